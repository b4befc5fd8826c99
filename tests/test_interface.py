"""Which interfaces gloo and NCCL are told: the one that leads to the first node, and no fewer than needed."""

from __future__ import annotations

import doctest

import pytest

from lightning_ddp.launch import rendezvous

BOTH = "cpu:gloo,cuda:nccl"
HOST = [("lo", "127.0.0.1"), ("eth0", "10.0.0.7"), ("eth1", "10.1.0.7"), ("eth1", "fe80::7")]
CONTAINERS = [HOST[0], ("cni0", "10.88.0.1"), *HOST[1:], ("docker0", "172.17.0.1")]
INFINIBAND = [*HOST, ("ib0", "10.2.0.7")]


@pytest.fixture(autouse=True)
def no_named_interface(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("found", "route", "backend", "told"),
    [
        (HOST, "eth0", "gloo", {"GLOO_SOCKET_IFNAME": "eth0"}),
        (HOST, "eth0", "nccl", {"GLOO_SOCKET_IFNAME": "eth0"}),
        (HOST, "eth0", BOTH, {"GLOO_SOCKET_IFNAME": "eth0"}),
        (HOST, "eth0", "CUDA:NCCL", {"GLOO_SOCKET_IFNAME": "eth0"}),
        (HOST, "eth1", BOTH, {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}),
        (CONTAINERS, "eth0", "nccl", {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0,eth1"}),
        (CONTAINERS, "docker0", BOTH, {"GLOO_SOCKET_IFNAME": "docker0", "NCCL_SOCKET_IFNAME": "=docker0"}),
        (INFINIBAND, "eth0", "nccl", {"GLOO_SOCKET_IFNAME": "eth0"}),
        (HOST, "lo", "gloo", {"GLOO_SOCKET_IFNAME": "lo"}),
        (HOST, "lo", BOTH, {"GLOO_SOCKET_IFNAME": "lo"}),
        (HOST, "lo", "nccl", {}),
        (HOST, "eth0", "cpu:toy,cuda:toy", {}),
        (HOST, "wlan0", BOTH, {}),
    ],
)
def test_what_gloo_and_nccl_are_told(found, route, backend, told, monkeypatch):
    address = dict(reversed(found)).get(route, "10.9.9.9")
    monkeypatch.setattr(rendezvous, "interfaces", lambda: iter(found))
    monkeypatch.setattr(
        rendezvous, "route_to", lambda _: (route if (route, address) in found else None, address)
    )
    assert rendezvous.choose_interface(address, backend) == told


def test_what_the_user_has_named_stays(monkeypatch):
    monkeypatch.setattr(rendezvous, "interfaces", lambda: iter(CONTAINERS))
    monkeypatch.setattr(rendezvous, "route_to", lambda _: ("eth0", "10.0.0.7"))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth")
    assert rendezvous.choose_interface("10.0.0.7", BOTH) == {"GLOO_SOCKET_IFNAME": "eth0"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert rendezvous.choose_interface("10.0.0.7", BOTH) == {}


def test_the_examples_of_the_file_hold():
    assert doctest.testmod(rendezvous) == (0, 4)

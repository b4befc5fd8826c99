"""Where the ranks of a run meet: an address, a file, a store, somebody else's backend; by which interface."""

from __future__ import annotations

import doctest
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import TORCHRUN, TRAINS, free_port, run_ranks, run_ranks_outcomes, run_script, slow
from pytorch_lightning.plugins.environments import LightningEnvironment

from lightning_ddp import CustomDDPStrategy, comm
from lightning_ddp.comm.barrier import _ATTEMPT, store_of_attempt
from lightning_ddp.comm.group import Group
from lightning_ddp.errors import ConfigurationError, RendezvousError
from lightning_ddp.launch import rendezvous
from lightning_ddp.launch.rendezvous import join_default_group, meet, meet_at_file

CPU = torch.device("cpu")
LOOPBACK = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def joined(rank, world_size, init_method):
    """The sum over ranks that met there; run in processes of their own."""
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    store = meet(init_method, rank, world_size, None)
    group = join_default_group("gloo", store, rank=rank, world_size=world_size, timeout=None, device=CPU)
    return comm.all_reduce(Group(group), torch.tensor(rank + 1.0)).item()


def killed_after_joining(rank, world_size, init_method):
    joined(rank, world_size, init_method)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_file_is_used_once_and_one_of_a_crashed_run_is_named(tmp_path) -> None:
    path = tmp_path / "meeting"
    init_method = path.as_uri()
    assert run_ranks(joined, 2, init_method, process_group=False) == [3.0, 3.0]
    assert list(tmp_path.iterdir()) == [], "a run that ends well leaves nothing behind"
    crashed = run_ranks_outcomes(killed_after_joining, 2, init_method, process_group=False)
    assert [outcome.status for outcome in crashed] == ["died", "died"]
    assert path.stat().st_size > 0
    for rank, outcome in enumerate(run_ranks_outcomes(joined, 2, init_method, process_group=False)):
        assert outcome.exception_type == "RendezvousError"
        assert f"file://{path}: rank {rank} is there already." in outcome.message
        assert "left over from an earlier run (last written" in outcome.message
    path.unlink()
    assert run_ranks(joined, 2, init_method, process_group=False) == [3.0, 3.0]


def test_a_file_of_a_run_that_goes_on_and_a_folder_that_is_missing(tmp_path) -> None:
    path = tmp_path / "meeting"
    store = meet_at_file(path, 0, 2, None)
    with pytest.raises(RendezvousError, match="rank 0 is there already"):
        meet_at_file(path, 0, 2, None)
    store.set("key", "value")
    assert meet_at_file(path, 1, 2, None).get("key") == b"value"
    with pytest.raises(RendezvousError, match="rank 3 finds no folder"):
        meet((tmp_path / "missing" / "file").as_uri(), 3, 4, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init_method": "somewhere"}, "expected 'env://', 'tcp://host:port' or 'file:///path'"),
        ({"init_method": "tcp://host"}, "'tcp://host': expected the first node's name or address and a free"),
        ({"init_method": "tcp://:29500"}, "expected the first node's name"),
        ({"init_method": "tcp://host:99999"}, "expected the first node's name"),
        ({"init_method": "file://relative/path"}, "with three slashes"),
        ({"init_method": "file:///folder/"}, "with three slashes"),
        ({"store": "text"}, "store='text': expected a torch.distributed.Store"),
        ({"store": dist.HashStore(), "init_method": "env://"}, "and a store were both given"),
        ({"store": dist.HashStore(), "start_method": "spawn"}, "a store cannot be sent to a new process"),
    ],
)
def test_meeting_places_that_cannot_be_are_refused(arguments, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CustomDDPStrategy(**arguments)


def test_unknown_schemes_and_backends_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="No rendezvous handler for carrier-pigeon"):
        meet("carrier-pigeon://loft", 0, 1, None)
    with pytest.raises(ConfigurationError, match="unknown backend 'abacus'; expected gloo"):
        join_default_group(
            "cpu:gloo,cuda:abacus", dist.HashStore(), rank=0, world_size=1, timeout=None, device=CPU
        )


SCRIPT = f"""{TRAINS}
sys.path.insert(0, {str(Path(__file__).parent)!r})
from harness import toy_backend

toy_backend.register()
strategy = lightning_ddp.CustomDDPStrategy(init_method=sys.argv[1], process_group_backend=sys.argv[2])
ours = trainer(strategy, max_steps=2)
rank = ours.global_rank
torch.manual_seed(rank)
ours.fit(BoringModel())
sums = strategy.reduce({{"a": torch.tensor(rank + 1.0)}}, reduce_op="sum")
weight = ours.model.layer.weight
same = strategy.all_reduce(weight.detach().clone(), reduce_op="max").equal(weight)
received = strategy.broadcast([torch.full((400,), rank)], src=1)
text = "rank %d sum %g same %s broadcast %d" % (rank, sums["a"], same, received[0][0])
port, backend = os.environ["MASTER_PORT"], torch.distributed.get_backend()
os.write(1, f"{{text}} port {{port}} {{backend}}\\n".encode())
"""


def test_a_rank_that_is_there_before_rank_0_after_a_restart_by_torchrun_learns_the_new_attempt() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=30))
    store.set(_ATTEMPT, "previous")
    met = partial(store_of_attempt, store, world_size=2)
    with ThreadPoolExecutor() as pool:
        early = pool.submit(met, rank=1)
        store.wait([f"{_ATTEMPT}/previous/hello/1"])
        met(rank=0).set("from 0", "this attempt")
        assert early.result().get("from 0") == b"this attempt"


@pytest.mark.parametrize("backend", ["gloo", "toy"])
def test_training_where_the_user_says(backend, tmp_path) -> None:
    port = free_port()
    place = f"tcp://127.0.0.1:{port}" if backend == "gloo" else (tmp_path / "meeting").as_uri()
    result = run_script(SCRIPT, [place, backend]).check()
    lines = sorted(line for line in result.stdout.splitlines() if line.startswith("rank "))
    for rank, line in enumerate(lines):
        assert line.startswith(f"rank {rank} sum 3 same True broadcast 1 port"), line
        assert (f"port {port} " in line) == (backend == "gloo")
        assert line.endswith(backend)
    assert len(lines) == 2
    assert list(tmp_path.iterdir()) == []


def joined_by_the_strategy(rank, world_size, kind, place):
    """As under torchrun: the processes exist, and no launcher has opened a store."""
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    store = dist.FileStore(place, world_size) if kind == "store" else None
    strategy = CustomDDPStrategy(
        parallel_devices=[CPU] * world_size, store=store, init_method=None if kind == "store" else place
    )
    environment = LightningEnvironment()
    environment.set_global_rank(rank)
    environment.set_world_size(world_size)
    strategy.cluster_environment = environment
    strategy.set_world_ranks = lambda: None  # Lightning's, which would ask for the Trainer's launcher
    strategy.setup_distributed()
    return strategy.reduce(torch.tensor(rank + 1.0), reduce_op="sum").item()


@pytest.mark.parametrize("kind", ["store", "tcp"])
def test_processes_of_another_launcher_meet_where_the_user_says(kind, tmp_path) -> None:
    place = str(tmp_path / "store") if kind == "store" else f"tcp://127.0.0.1:{free_port()}"
    assert run_ranks(joined_by_the_strategy, 2, kind, place, process_group=False) == [3.0, 3.0]


DESTROYED = f"""{TRAINS}
from pathlib import Path
import torch.distributed as dist

strategy = lightning_ddp.CustomDDPStrategy(timeout=60)
ours, model = trainer(strategy, max_steps=1, num_sanity_val_steps=0, limit_val_batches=1), BoringModel()
ours.fit(model)
rank, make = dist.get_rank(), dist.init_process_group
for number in range(2):
    dist.destroy_process_group()
    begun = Path(sys.argv[1], str(number))
    if rank == 0:
        dist.init_process_group = lambda *args, **kwargs: (begun.touch(), make(*args, **kwargs))
    else:  # it comes when rank 0 has looked for its address already
        deadline = time.monotonic() + 60
        while not begun.exists():
            assert time.monotonic() < deadline, "rank 0 has not come"
            time.sleep(0.01)
    ours.validate(model, verbose=False)
    total = strategy.reduce(torch.tensor(rank + 1.0), reduce_op="sum")
    os.write(1, f"rank {{rank}}, group {{number}}: {{total:g}}\\n".encode())
"""


@pytest.mark.parametrize("launcher", [(), slow(TORCHRUN)], ids=["own", "torchrun"])
def test_a_script_may_destroy_the_group_between_two_runs(launcher, tmp_path) -> None:
    """The rank that comes first to the next run must not find the addresses of the destroyed group."""
    result = run_script(DESTROYED, [str(tmp_path)], launcher=launcher).check()
    lines = sorted(line for line in result.stdout.splitlines() if line.startswith("rank "))
    assert lines == [f"rank {rank}, group {number}: 3" for rank in range(2) for number in range(2)]


# ---------------------------------------------------------------------- the network interface

BOTH = "cpu:gloo,cuda:nccl"
HOST = [("lo", "127.0.0.1"), ("eth0", "10.0.0.7"), ("eth1", "10.1.0.7"), ("eth1", "fe80::7")]
CONTAINERS = [HOST[0], ("cni0", "10.88.0.1"), *HOST[1:], ("docker0", "172.17.0.1")]
INFINIBAND = [*HOST, ("ib0", "10.2.0.7")]


@pytest.fixture
def told(monkeypatch):
    """What `choose_interface` answers for these interfaces, of which one leads to the address."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)

    def choose(found, route, address, backend):
        monkeypatch.setattr(rendezvous, "interfaces", lambda: iter(found))
        monkeypatch.setattr(rendezvous, "route_to", lambda _: (route, address))
        return rendezvous.choose_interface(address, backend)

    return choose


@pytest.mark.parametrize(
    ("found", "route", "backend", "expected"),
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
def test_what_gloo_and_nccl_are_told(told, found, route, backend, expected):
    address = dict(reversed(found)).get(route, "10.9.9.9")
    assert told(found, route if (route, address) in found else None, address, backend) == expected


def test_what_the_user_has_named_stays(told, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth")
    assert told(CONTAINERS, "eth0", "10.0.0.7", BOTH) == {"GLOO_SOCKET_IFNAME": "eth0"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert told(CONTAINERS, "eth0", "10.0.0.7", BOTH) == {}


def test_the_examples_of_the_file_hold():
    assert doctest.testmod(rendezvous) == (0, 4)

"""The network interface that leads to the first node.

A backend that gets none looks up this host's own name, which on many clusters belongs to another network, or
to the loopback.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lightning_ddp.comm.nccl import is_nccl
from lightning_ddp.errors import RendezvousError

_RESOLVED_WITHIN_S = 30.0
_ASK_AGAIN_S = 0.5
_SIOCGIFCONF = 0x8912
_ENTRY_BYTES, _MOST_ENTRIES = 40, 1024
"""Size of a `struct ifreq`, and how many fit into the answer."""
_IPV6 = Path("/proc/net/if_inet6")


def interfaces() -> Iterator[tuple[str, str]]:
    """Yield (network interface, address) of this host, IPv4 first; nothing outside of Linux."""
    if sys.platform != "linux":
        return
    answer = array.array("B", bytes(_ENTRY_BYTES * _MOST_ENTRIES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iP", len(answer), answer.buffer_info()[0])
        size = struct.unpack("iP", fcntl.ioctl(probe, _SIOCGIFCONF, request))[0]
    for entry in range(0, size, _ENTRY_BYTES):
        name, _, address = struct.unpack_from("16sI4s", answer, entry)
        yield name.partition(b"\0")[0].decode(), socket.inet_ntop(socket.AF_INET, address)
    with suppress(OSError):  # a kernel without IPv6
        entries = [line.split() for line in _IPV6.read_text().splitlines()]
        for address, *_, name in sorted(entries, key=lambda entry: int(entry[1], 16)):
            yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))


def route_to(address: str) -> tuple[str | None, str]:
    """Return the network interface (or None) and own address that lead to a host; `OSError` if none do."""
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # of a datagram socket: sends nothing
        own = str(probe.getsockname()[0])
    plain = own.partition("%")[0]
    return next((name for name, text in interfaces() if text == plain), None), plain


def backend_names(backend: str) -> frozenset[str]:
    """Return the names in a `torch.distributed` backend string: one, or one per type of device.

    >>> sorted(backend_names("cpu:gloo,cuda:nccl")), sorted(backend_names("NCCL"))
    (['gloo', 'nccl'], ['nccl'])
    """
    return frozenset(part.strip().rpartition(":")[2] for part in backend.lower().split(","))


def uses_nccl(backend: str) -> bool:
    """Return True if one of the backends in a `torch.distributed` backend string is NCCL.

    >>> uses_nccl("cpu:gloo,cuda:nccl2"), uses_nccl("gloo")
    (True, False)
    """
    return any(map(is_nccl, backend_names(backend)))


def choose_interface(address: str, backend: str) -> dict[str, str]:
    """Return the environment variables that tell gloo and NCCL which interface leads to the first node.

    Empty where the user has named one, or no interface is found. The loopback is named to gloo alone, and
    only where the address is a number: a name may lead elsewhere from another node. NCCL, which spreads its
    sockets over all interfaces, gets none where it finds the way itself.
    """
    has_gloo, has_nccl = "gloo" in backend_names(backend), uses_nccl(backend)
    if not (has_gloo or has_nccl):
        return {}
    try:
        name, own = route_to(address)
    except OSError:  # whoever connects next says so, with more words
        return {}
    if name is None:
        return {}
    is_local = _is_loopback(own)
    chosen = {}
    if not is_local or (has_gloo and address == own):
        chosen["GLOO_SOCKET_IFNAME"] = name
    if has_nccl and not is_local:
        found = list(dict.fromkeys(interface for interface, _ in interfaces()))
        names = _names_for_nccl(found, name)
        if names is not None:
            chosen["NCCL_SOCKET_IFNAME"] = names
    return {variable: value for variable, value in chosen.items() if variable not in os.environ}


def _names_for_nccl(found: Sequence[str], route: str) -> str | None:
    """Return the NCCL_SOCKET_IFNAME with which ranks meet on interface `route`; None if they do anyway.

    NCCL takes InfiniBand's interfaces if there are some, else all that are neither Docker's nor the loopback.
    Its ranks meet by the first of them, in the order of the C library, and data goes over all. So only
    interfaces before the right one, such as a bridge of containers, are left out.

    >>> _names_for_nccl(["lo", "eth0", "eth1", "docker0"], "eth0") is None
    True
    >>> _names_for_nccl(["lo", "cni0", "eth0", "eth1", "docker0"], "eth0")
    '=eth0,eth1'
    """
    taken = [name for name in found if name.startswith("ib")]
    taken = taken or [name for name in found if not name.startswith(("docker", "lo"))]
    if taken and (taken[0] == route or taken[0].startswith("ib")):
        return None
    return "=" + ",".join(taken[taken.index(route) :] if route in taken else [route])


def describe_route(address: str) -> str:
    """Return a phrase on the network interface that leads to an address, for an error message."""
    try:
        name, own = route_to(address)
    except OSError as error:
        return f"no interface leads to {address} ({error.strerror or error})"
    return f"interface {name or 'unknown'} with address {own} leads to {address}"


def is_loopback(address: str) -> bool:
    """Return True if a name or address leads to this host only; False if it cannot be resolved."""
    with suppress(OSError):
        return _is_loopback(socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0])
    return False


def _is_loopback(address: object) -> bool:
    return str(address).startswith("127.") or address == "::1"


def is_own_address(address: str) -> bool:
    """Return True if a name or address, which can be resolved, belongs to this host."""
    for family, kind, _, _, target in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(target)
            return True
    return False


def require_resolvable(address: str, named_by: str = "MASTER_ADDR") -> None:
    """Wait until the first node's name, which a cluster may publish late, can be resolved.

    Raises `RendezvousError`, which says where the user named it, if it cannot within 30 s.
    """
    deadline = time.monotonic() + _RESOLVED_WITHIN_S
    is_said = False
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"{named_by}={address} cannot be resolved on {socket.gethostname()}: {error}. Set"
                    f" {named_by} to a name or an address of the first node that all nodes can resolve."
                ) from error
            if not is_said:
                print(f"lightning_ddp: {named_by}={address} cannot be resolved yet: {error}", file=sys.stderr)
                is_said = True
        time.sleep(_ASK_AGAIN_S)

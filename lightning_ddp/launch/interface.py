"""Through which network interface the first node is reached.

A backend that is told nothing looks up this host's own name, which on many clusters belongs to another
network, or to the loopback.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from lightning_ddp.errors import RendezvousError

__all__ = [
    "backend_names",
    "choose_interface",
    "describe_route",
    "interfaces",
    "is_loopback",
    "is_own_address",
    "require_resolvable",
    "route_to",
]

_RESOLVED_WITHIN_S = 30.0
_ASK_AGAIN_S = 0.5


class _Address(ctypes.Structure):
    """`struct ifaddrs` of getifaddrs(3)."""


_Address._fields_ = [
    ("next", ctypes.POINTER(_Address)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interfaces() -> Iterator[tuple[str, str]]:
    """(interface, address) for each address of this host; nothing where the C library cannot tell."""
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Address)()
    if library.getifaddrs(ctypes.byref(first)) != 0:
        return
    try:
        entry = first
        while entry:
            text = _text_of(entry.contents.address)
            if text is not None:
                yield entry.contents.name.decode(), text
            entry = entry.contents.next
    finally:
        library.freeifaddrs(first)


def _text_of(address: int | None) -> str | None:
    """A `struct sockaddr` in letters, if it is one of IP."""
    if not address:
        return None
    family = int.from_bytes(ctypes.string_at(address, 2), "little")
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, ctypes.string_at(address + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, ctypes.string_at(address + 8, 16))
    return None


def route_to(address: str) -> tuple[str | None, str]:
    """The interface that leads to a host, or None, and this host's address on it; OSError if none does."""
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # of a datagram socket: sends nothing
        own = str(probe.getsockname()[0])
    plain = own.partition("%")[0]
    return next((name for name, text in interfaces() if text == plain), None), plain


def backend_names(backend: str) -> frozenset[str]:
    """The backends of a process group, in torch's spelling: one name, or one for each type of device.

    >>> sorted(backend_names("cpu:gloo,cuda:nccl")), sorted(backend_names("NCCL"))
    (['gloo', 'nccl'], ['nccl'])
    """
    return frozenset(part.strip().rpartition(":")[2] for part in backend.lower().split(","))


def choose_interface(address: str, backend: str) -> dict[str, str]:
    """The variables by which gloo and NCCL are told the interface that leads to the first node.

    Args:
        address: where the first node is reached.
        backend: 'gloo', 'nccl', 'cpu:gloo,cuda:nccl' ...

    Returns:
        Nothing where the user has named one, or no interface is found. The loopback is named to gloo only,
        and only where the address is a number: a name may lead elsewhere from another node. NCCL, which
        spreads its sockets over all interfaces that it finds, is told nothing where it finds the way itself.
    """
    backends = backend_names(backend)
    if not backends & {"gloo", "nccl"}:
        return {}
    try:
        name, own = route_to(address)
    except OSError:  # whoever connects next says so, with more words
        return {}
    if name is None:
        return {}
    is_local = _is_loopback(own)
    chosen = {}
    if not is_local or ("gloo" in backends and address == own):
        chosen["GLOO_SOCKET_IFNAME"] = name
    if "nccl" in backends and not is_local:
        found = list(dict.fromkeys(interface for interface, _ in interfaces()))
        names = _names_for_nccl(found, name)
        if names is not None:
            chosen["NCCL_SOCKET_IFNAME"] = names
    return {variable: value for variable, value in chosen.items() if variable not in os.environ}


def _names_for_nccl(found: Sequence[str], route: str) -> str | None:
    """What to name to NCCL so that its ranks meet by the interface `route`; None if they would anyway.

    NCCL takes InfiniBand's interfaces if there are some, else all that are neither Docker's nor the loopback.
    Its ranks meet by the first of them, in the order of the C library; data goes over all. So of those that
    it would take only the ones before the right one are in the way, such as a bridge of containers.

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
    """Through which interface an address is reached, for an error message."""
    try:
        name, own = route_to(address)
    except OSError as error:
        return f"no interface leads to {address} ({error.strerror or error})"
    return f"interface {name or 'unknown'} with address {own} leads to {address}"


def is_loopback(address: str) -> bool:
    """Whether a name or address leads to this host only. False where the name cannot be resolved."""
    with suppress(OSError):
        return _is_loopback(socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0])
    return False


def _is_loopback(address: object) -> bool:
    return str(address).startswith("127.") or address == "::1"


def is_own_address(address: str) -> bool:
    """Whether this host has the address, which can be resolved."""
    for family, kind, _, _, target in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(target)
            return True
    return False


def require_resolvable(address: str, named_by: str = "MASTER_ADDR") -> None:
    """Returns once the first node's name can be resolved, which a cluster may publish late; or raises.

    Args:
        address: name or address.
        named_by: where the user has named it, for the `RendezvousError`.
    """
    deadline = time.monotonic() + _RESOLVED_WITHIN_S
    is_told = False
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
            if not is_told:
                print(f"lightning_ddp: {named_by}={address} cannot be resolved yet: {error}", file=sys.stderr)
                is_told = True
        time.sleep(_ASK_AGAIN_S)

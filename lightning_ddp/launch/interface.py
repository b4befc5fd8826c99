"""Through which network interface the first node is reached.

A backend that is told nothing looks up this host's own name, which on many clusters belongs to another
network, or to the loopback.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from contextlib import suppress

__all__ = ["choose_interface", "describe_route", "is_own_address"]

_VARIABLES = {"gloo": ("GLOO_SOCKET_IFNAME",), "nccl": ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")}


class _Address(ctypes.Structure):
    """`struct ifaddrs` of getifaddrs(3)."""


_Address._fields_ = [
    ("next", ctypes.POINTER(_Address)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def _interfaces() -> Iterator[tuple[str, str]]:
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


def _route(address: str) -> tuple[str | None, str]:
    """The interface that leads to a host, or None, and this host's address on it.

    Raises:
        OSError: the name cannot be resolved, or no route leads there.
    """
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # of a datagram socket: sends nothing
        own = str(probe.getsockname()[0])
    plain = own.partition("%")[0]
    return next((name for name, text in _interfaces() if text == plain), None), plain


def choose_interface(address: str, backend: str) -> dict[str, str]:
    """The variables by which gloo and NCCL are told the interface that leads to the first node.

    Args:
        address: where the first node is reached.
        backend: 'gloo', 'nccl' ...

    Returns:
        Nothing where the user has named one, or no interface is found. The loopback is named to gloo only,
        and only where the address is a number: a name may lead elsewhere from another node.
    """
    wanted = [name for name in _VARIABLES.get(backend, ()) if name not in os.environ]
    name = None
    with suppress(OSError):  # whoever connects next says so, with more words
        name, own = _route(address)
        is_loopback = own.startswith("127.") or own == "::1"
        if is_loopback and (backend != "gloo" or address != own):
            return {}
    return {} if name is None else dict.fromkeys(wanted, name)


def describe_route(address: str) -> str:
    """Through which interface an address is reached, for an error message."""
    try:
        name, own = _route(address)
    except OSError as error:
        return f"no interface leads to {address} ({error.strerror or error})"
    return f"interface {name or 'unknown'} with address {own} leads to {address}"


def is_own_address(address: str) -> bool:
    """Whether this host has the address. True also where the name cannot be resolved yet."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return True
    for family, kind, _, _, target in found:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(target)
            return True
    return False

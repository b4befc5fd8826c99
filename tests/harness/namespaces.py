"""Two "nodes" on one machine: network namespaces that are joined by a link, as Linux lets root make them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lightning_ddp.tools import ToolError
from lightning_ddp.tools.ranks import enter, ip

NAMESPACES = tuple(f"lddp{os.getpid()}n{node}" for node in range(2))
"""Names of their own for each process: tests of several checkouts may run at the same time."""
INTERFACES = tuple(f"ld{os.getpid()}v{node}" for node in range(2))
ADDRESSES = ("10.197.31.1", "10.197.31.2")
ADDRESSES_6 = ("fd97:31::1", "fd97:31::2")


def can_shape_links() -> bool:
    """Whether this process may make namespaces and links (root, iproute2)."""
    name = f"lddp{os.getpid()}try"
    try:
        ip("netns", "add", name)
    except ToolError:
        return False
    ip("netns", "del", name)
    return True


class Link:
    """Carries the packets between both namespaces, which have tun devices: it can lose them."""

    def __init__(self) -> None:
        self.lost: set[int] = set()
        """Namespaces of which all that they send is lost."""
        with ThreadPoolExecutor(1) as thread:  # to move into a namespace is a matter of one thread
            self._ends = [thread.submit(_open_tun, end).result() for end in range(2)]
        self._wake, self._is_over = os.pipe()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def start(self) -> None:
        """Begins to carry. Both devices are up: one that is not cannot be read."""
        self._thread.start()

    def _carry(self) -> None:
        while True:
            ready, _, _ = select.select([*self._ends, self._wake], (), ())
            if self._wake in ready:
                return
            for end in (0, 1):
                if self._ends[end] in ready:
                    packet = os.read(self._ends[end], 65_535)
                    if end not in self.lost:
                        os.write(self._ends[1 - end], packet)

    def close(self) -> None:
        """Takes the devices away."""
        os.close(self._is_over)
        if self._thread.ident is not None:
            self._thread.join()
        for descriptor in (*self._ends, self._wake):
            os.close(descriptor)


def _open_tun(end: int) -> int:
    enter(NAMESPACES[end])
    tun_set_interface, is_tun, no_header = 0x400454CA, 0x0001, 0x1000
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    request = struct.pack("16sH22x", INTERFACES[end].encode(), is_tun | no_header)
    fcntl.ioctl(descriptor, tun_set_interface, request)
    return descriptor


@contextlib.contextmanager
def two_namespaces_with_link() -> Iterator[Link]:
    """As `two_namespaces`, with a link that the test has in its hand."""
    with _namespaces_with(Link) as link:
        link.start()
        try:
            yield link
        finally:
            link.close()


@contextlib.contextmanager
def two_namespaces() -> Iterator[None]:
    """Makes both and the link; skips the test, with the reason, where that is not permitted."""
    first = ["link", "add", INTERFACES[0], "netns", NAMESPACES[0], "type", "veth"]
    with _namespaces_with(lambda: ip(*first, "peer", INTERFACES[1], "netns", NAMESPACES[1])):
        yield


@contextlib.contextmanager
def _namespaces_with(join: Callable[[], Any]) -> Iterator[Any]:
    try:
        try:
            for name in NAMESPACES:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            joined = join()
            _set_addresses()
        except (OSError, ToolError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield joined
    finally:
        for name in NAMESPACES:
            with contextlib.suppress(ToolError):
                ip("netns", "del", name)


def _set_addresses() -> None:
    for name, interface, *addresses in zip(NAMESPACES, INTERFACES, ADDRESSES, ADDRESSES_6, strict=True):
        ip("-n", name, "addr", "add", f"{addresses[0]}/24", "dev", interface)
        with contextlib.suppress(ToolError):  # a kernel without IPv6
            ip("-n", name, "addr", "add", f"{addresses[1]}/64", "dev", interface, "nodad")
        ip("-n", name, "link", "set", interface, "up")

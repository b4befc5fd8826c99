"""Two "nodes" on one machine: network namespaces that are joined by a link, as Linux lets root make them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator

import pytest

from lightning_ddp.tools import ToolError
from lightning_ddp.tools.ranks import ip

NAMESPACES = tuple(f"lddp{os.getpid()}n{node}" for node in range(2))
"""Names of their own for each process: tests of several checkouts may run at the same time."""
INTERFACES = tuple(f"ld{os.getpid()}v{node}" for node in range(2))
ADDRESSES = ("10.197.31.1", "10.197.31.2")
ADDRESSES_6 = ("fd97:31::1", "fd97:31::2")


def by_hand(node: int) -> dict[str, str]:
    """The variables that a user sets for a launcher there."""
    return {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511", "NODE_RANK": str(node)}


def can_shape_links() -> bool:
    """Whether this process may make namespaces and links (root, iproute2)."""
    name = f"lddp{os.getpid()}try"
    try:
        ip("netns", "add", name)
    except ToolError:
        return False
    ip("netns", "del", name)
    return True


@contextlib.contextmanager
def losing(ends: Collection[int]) -> Iterator[None]:
    """In here all that these namespaces send is lost: it goes to a hardware address that nobody has."""
    links = [(("-n", NAMESPACES[end], "neigh"), (ADDRESSES[1 - end], "dev", INTERFACES[end])) for end in ends]
    for command, link in links:
        ip(*command, "replace", *link, "lladdr", "02:00:00:00:00:01", "nud", "permanent")
    yield
    for command, link in links:
        ip(*command, "del", *link)


@contextlib.contextmanager
def two_namespaces() -> Iterator[None]:
    """Makes both and the link; skips the test, with the reason, where that is not permitted."""
    first = ["link", "add", INTERFACES[0], "netns", NAMESPACES[0], "type", "veth"]
    try:
        try:
            for name in NAMESPACES:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            ip(*first, "peer", INTERFACES[1], "netns", NAMESPACES[1])
            _set_addresses()
        except (OSError, ToolError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield
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

"""Two "nodes" on one machine: network namespaces that are joined by a link, as Linux lets root make them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest

NAMESPACES = tuple(f"lddp{os.getpid()}n{node}" for node in range(2))
"""Names of their own for each process: tests of several checkouts may run at the same time."""
INTERFACES = tuple(f"ld{os.getpid()}v{node}" for node in range(2))
ADDRESSES = ("10.197.31.1", "10.197.31.2")
ADDRESSES_6 = ("fd97:31::1", "fd97:31::2")


def ip(*words: str) -> None:
    """Runs the command `ip`."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_namespaces() -> Iterator[None]:
    """Makes both and the link; skips the test, with the reason, where that is not permitted."""
    try:
        _make()
    except (OSError, subprocess.CalledProcessError) as error:
        _remove()
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield
    finally:
        _remove()


def _make() -> None:
    for name in NAMESPACES:
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
    first = ["link", "add", INTERFACES[0], "netns", NAMESPACES[0], "type", "veth"]
    ip(*first, "peer", INTERFACES[1], "netns", NAMESPACES[1])
    for name, interface, *addresses in zip(NAMESPACES, INTERFACES, ADDRESSES, ADDRESSES_6, strict=True):
        ip("-n", name, "addr", "add", f"{addresses[0]}/24", "dev", interface)
        with contextlib.suppress(subprocess.CalledProcessError):  # a kernel without IPv6
            ip("-n", name, "addr", "add", f"{addresses[1]}/64", "dev", interface, "nodad")
        ip("-n", name, "link", "set", interface, "up")


def _remove() -> None:
    for name in NAMESPACES:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            ip("netns", "del", name)

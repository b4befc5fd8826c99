"""Network namespaces for two ranks, joined by a link of a given speed. Linux, as root.

All that is made is removed at the end of the block: the namespaces, and with them the virtual link.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from lightning_ddp.tools import ToolError

INTERFACE: Final = "link0"
"""The link's name in both namespaces."""

_CLONE_NEWNET = 0x40000000
_NUM_RANKS = 2


def can_shape_links() -> bool:
    """Whether this process may make namespaces and links (root, iproute2)."""
    name = f"lddp{uuid.uuid4().hex[:6]}"
    try:
        _ip("netns", "add", name)
    except ToolError:
        return False
    _ip("netns", "del", name)
    return True


@contextmanager
def shaped_link(mbit: float) -> Generator[list[str], None, None]:
    """Make two namespaces, joined by a link that lets through `mbit` Mbit/s each way; yields their names.

    Raises:
        ToolError: iproute2 is not installed, or this process may not.
    """
    tag = uuid.uuid4().hex[:6]
    names = [f"lddp{tag}{rank}" for rank in range(_NUM_RANKS)]
    ends = [f"v{tag}{rank}" for rank in range(_NUM_RANKS)]
    burst = max(32_000, int(mbit * 1e6 / 8 / 250))  # what it passes between two ticks of the shaper
    shape = ("tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", "400ms")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for rank, (name, end) in enumerate(zip(names, ends, strict=True)):
            _ip("link", "set", end, "netns", name)
            inside = ("netns", "exec", name)
            _ip(*inside, "ip", "link", "set", end, "name", INTERFACE)
            _ip(*inside, "ip", "addr", "add", f"10.77.0.{rank + 1}/24", "dev", INTERFACE)
            _ip(*inside, "ip", "link", "set", "lo", "up")
            _ip(*inside, "ip", "link", "set", INTERFACE, "up")
            _ip(*inside, "tc", "qdisc", "add", "dev", INTERFACE, "root", *shape)
        yield names
    finally:
        for name in names:
            with suppress(FileNotFoundError):  # then there is no namespace either
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ToolError("ip is not installed; shaped links need iproute2") from error
    except subprocess.CalledProcessError as error:
        raise ToolError(f"ip {' '.join(arguments)} failed: {error.stderr.strip()}") from error


def enter_namespace(name: str) -> None:
    """Move the calling thread into a namespace; threads that it starts later are there as well."""
    with open(f"/var/run/netns/{name}", encoding="ascii") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise ToolError(f"setns failed: {os.strerror(ctypes.get_errno())}")


def read_sent_bytes() -> int:
    """Bytes that the kernel has sent on this rank's link, with all headers."""
    for line in Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[8])
    raise ToolError(f"there is no interface {INTERFACE} in this namespace")

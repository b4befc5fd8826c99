"""Two network namespaces that are joined by a link of a given speed (Linux, as root, with iproute2)."""

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
"""Name of the link in both namespaces."""

_CLONE_NEWNET = 0x40000000


def ip(*arguments: str) -> None:
    """Run the command `ip` of iproute2 with these arguments.

    Raises:
        ToolError: it is not installed, or it failed.
    """
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ToolError("ip is not installed, but shaped links need iproute2") from error
    except subprocess.CalledProcessError as error:
        raise ToolError(f"ip {' '.join(arguments)} failed: {error.stderr.strip()}") from error


@contextmanager
def shaped_link(mbit: float) -> Generator[list[str], None, None]:
    """Create two network namespaces with a link of `mbit` Mbit/s each way in this context; yield names."""
    tag = uuid.uuid4().hex[:6]
    names, ends = ([f"{kind}{tag}{rank}" for rank in range(2)] for kind in ("lddp", "v"))
    burst = max(32_000, int(mbit * 1e6 / 8 / 250))  # bytes between two ticks of the shaper
    shape = ("tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", "400ms")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for rank, (name, end) in enumerate(zip(names, ends, strict=True)):
            ip("link", "set", end, "netns", name)
            inside = ("netns", "exec", name)
            ip(*inside, "ip", "link", "set", end, "name", INTERFACE)
            ip(*inside, "ip", "addr", "add", f"10.77.0.{rank + 1}/24", "dev", INTERFACE)
            ip(*inside, "ip", "link", "set", "lo", "up")
            ip(*inside, "ip", "link", "set", INTERFACE, "up")
            ip(*inside, "tc", "qdisc", "add", "dev", INTERFACE, "root", *shape)
        yield names
    finally:
        for name in names:
            with suppress(ToolError):  # it was not made
                ip("netns", "del", name)


def enter(name: str) -> None:
    """Move the calling thread, and threads that it starts later, to a network namespace."""
    with open(f"/var/run/netns/{name}", encoding="ascii") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise ToolError(f"setns failed: {os.strerror(ctypes.get_errno())}")


def read_sent_bytes() -> int | None:
    """Return the bytes that the kernel has sent on this thread's link, with all headers; None without one."""
    for line in Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[8])
    return None

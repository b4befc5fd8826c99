"""Two ranks in two network namespaces, with a link between them that has a given speed. Linux, as root.

Everything that is made here is removed at the end: the namespaces, and with them the virtual link.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, spawn

from lightning_ddp.tools.bench import BenchmarkError
from lightning_ddp.tools.bench.ending import held_back
from lightning_ddp.tools.bench.processes import end_processes

__all__ = ["burst_bytes", "can_shape_links", "read_sent_bytes", "run_linked"]

_CLONE_NEWNET = 0x40000000
_INTERFACE = "link0"
_NUM_RANKS = 2


def burst_bytes(mbit: float) -> int:
    """What a link of `mbit` Mbit/s saves up while idle: what it passes between two ticks of the shaper."""
    return max(32_000, int(mbit * 1e6 / 8 / 250))


def can_shape_links() -> bool:
    """Whether this process may make namespaces and links (root, iproute2)."""
    name = f"lddp{uuid.uuid4().hex[:6]}"
    try:
        _ip("netns", "add", name)
    except BenchmarkError:
        return False
    _ip("netns", "del", name)
    return True


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise BenchmarkError(f"{command[0]} is not installed; shaped links need iproute2") from error
    except subprocess.CalledProcessError as error:
        raise BenchmarkError(f"{' '.join(command)} failed: {error.stderr.strip()}") from error


@contextmanager
def _namespaces(mbit: float) -> Generator[list[str], None, None]:
    """Two namespaces, joined by a link that lets through `mbit` Mbit/s each way."""
    tag = uuid.uuid4().hex[:6]
    names = [f"lddp{tag}{rank}" for rank in range(_NUM_RANKS)]
    ends = [f"v{tag}{rank}" for rank in range(_NUM_RANKS)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for rank, (name, end) in enumerate(zip(names, ends, strict=True)):
            _ip("link", "set", end, "netns", name)
            inside = ("netns", "exec", name)
            _ip(*inside, "ip", "link", "set", end, "name", _INTERFACE)
            _ip(*inside, "ip", "addr", "add", f"10.77.0.{rank + 1}/24", "dev", _INTERFACE)
            _ip(*inside, "ip", "link", "set", "lo", "up")
            _ip(*inside, "ip", "link", "set", _INTERFACE, "up")
            burst = str(burst_bytes(mbit))
            shape = ("tbf", "rate", f"{mbit}mbit", "burst", burst, "latency", "400ms")
            _ip(*inside, "tc", "qdisc", "add", "dev", _INTERFACE, "root", *shape)
        yield names
    finally:
        for name in names:
            with suppress(FileNotFoundError):  # then there is no namespace either
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def read_sent_bytes() -> int:
    """Bytes that the kernel has sent on this rank's link, with all headers."""
    for line in Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == _INTERFACE:
            return int(counts.split()[8])
    raise BenchmarkError(f"there is no interface {_INTERFACE} in this namespace")


def run_linked(
    worker: Callable[[int, Any], object],
    settings: Any,
    mbit: float,
    timeout_s: float,
    on_poll: Callable[[], object] = lambda: None,
) -> list[Any]:
    """Runs `worker(rank, settings)` on two ranks that share a default gloo group over a shaped link.

    Args:
        worker: at module level; returns something JSON can hold.
        settings: passed on; must pickle.
        mbit: speed of the link in Mbit/s, each way.
        timeout_s: seconds after which the processes are killed.
        on_poll: called twice a second meanwhile, by this process.

    Returns:
        One result a rank.

    Raises:
        BenchmarkError: namespaces are not permitted, a rank failed, or the deadline has passed.
    """
    with tempfile.TemporaryDirectory(prefix="lightning_ddp_link_") as folder, _namespaces(mbit) as names:
        arguments = (worker, settings, names, folder, timeout_s)
        context: ProcessContext | None = None
        deadline = time.monotonic() + timeout_s
        try:
            with held_back():
                context = spawn(_run_rank, arguments, nprocs=_NUM_RANKS, join=False, daemon=True)
            while not context.join(timeout=0.5):
                on_poll()
                if time.monotonic() > deadline:
                    raise BenchmarkError(f"ranks were still running after {timeout_s:g} s and were killed")
        except (RuntimeError, ChildProcessError) as error:
            raise BenchmarkError(str(error)) from error
        except Exception as error:
            if isinstance(error, BenchmarkError):
                raise
            raise BenchmarkError(f"a rank failed: {error}") from error
        finally:
            end_processes(context)
        return [json.loads((Path(folder) / f"result{rank}").read_text()) for rank in range(_NUM_RANKS)]


def _run_rank(
    rank: int,
    worker: Callable[[int, Any], object],
    settings: Any,
    names: list[str],
    folder: str,
    timeout_s: float,
) -> None:
    with open(f"/var/run/netns/{names[rank]}", encoding="ascii") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise BenchmarkError(f"setns failed: {os.strerror(ctypes.get_errno())}")
    torch.set_num_threads(1)  # the ranks share the cores
    os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", _NUM_RANKS),
        rank=rank,
        world_size=_NUM_RANKS,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        result = worker(rank, settings)
        (Path(folder) / f"result{rank}").write_text(json.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()

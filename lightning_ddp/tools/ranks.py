"""Supervised processes of ranks that leave nothing behind, on this machine or on a slow link.

The parent hosts a store, which the ranks use for rendezvous, progress and results, so that there is one
channel and nothing to drain while they run. A slow link joins two network namespaces (Linux, as root, with
iproute2), between which the store is a file.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from lightning_ddp.tools import ToolError, held_back

ItemT = TypeVar("ItemT")

FAILURE_KEY: Final = "first_failure"
"""Key in the store of the first failure of a rank, with its traceback."""

_HOST = "127.0.0.1"
_PROGRESS_KEY = "progress"
_POLL_INTERVAL_S = 0.25  # rare enough not to take the CPU from the ranks that are being timed


class RankContext(NamedTuple):
    """Rank, device and store of a worker process; each replica of all ranks has its own process group."""

    rank: int
    world_size: int
    replica: int
    device: torch.device
    store: Store

    def advance(self) -> None:
        """Add 1, on rank 0 only, to the count in the store that the parent reads for `on_progress`."""
        if self.rank == 0:
            self.store.add(_PROGRESS_KEY, 1)


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on the device; return at once on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Run `step` after a barrier of all ranks; return the seconds until the device has completed it.

    Collective: all ranks must call it.
    """
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


class _Meeting(NamedTuple):
    """Arguments of `run_ranks` that the ranks need, with the store's host and port, or its file."""

    worker: Callable[..., object]
    arguments: tuple[Any, ...]
    address: tuple[str, int] | str
    namespaces: Sequence[str]
    """Network namespace of each rank; empty for that of the parent."""
    world_size: int
    device: str
    timeout_s: float
    preload: str | None

    def open_store(self) -> Store:
        limit = timedelta(seconds=self.timeout_s)
        if isinstance(self.address, str):
            store = dist.FileStore(self.address, -1)
            store.set_timeout(limit)
            return store
        return TCPStore(*self.address, is_master=False, timeout=limit)


def host_store(timeout_s: float) -> TCPStore:
    """Return a new TCP store on a free port of this host's loopback."""
    limit = timedelta(seconds=timeout_s)
    return TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=limit)


def run_ranks(
    worker: Callable[..., object],
    *arguments: Any,
    world_size: int,
    device: str = "cpu",
    timeout_s: float,
    num_replicas: int = 1,
    on_progress: Callable[[int], object] = lambda count: None,
    mbit: float | None = None,
    store: TCPStore | None = None,
    preload: str | None = None,
    start_method: str = "spawn",
) -> list[Any]:
    """Run `worker(context, *arguments)` in new ranks with a process group; return results; leave no process.

    Args:
        worker: function at module level, with a result that JSON can represent.
        device: "cpu" (gloo), "cuda" (NCCL, one GPU per process) or "cuda:0" (gloo, all share that GPU).
        timeout_s: seconds after which all processes are killed.
        num_replicas: number of replicas of the ranks at once, each with a separate process group.
        on_progress: called a few times a second with the number of units of progress since its last call;
            an error that it raises stops the ranks.
        mbit: speed in Mbit/s of a link between two network namespaces, one per rank; None for no link.
        store: a store of `host_store` that the caller reads, too; None to open one.
        preload: a Python file that each rank runs first, or None.
        start_method: "fork" saves all imports, but does not work while CUDA is in use.

    Returns:
        One result per rank, replica by replica.

    Raises:
        ToolError: a process fails (the message holds its traceback), the deadline passes, there are too few
            GPUs, or namespaces are not permitted.
    """
    if device == "cuda" and torch.cuda.device_count() < world_size:
        raise ToolError(f"--world-size {world_size} needs as many GPUs, found {torch.cuda.device_count()}")
    with ExitStack() as stack:
        address: tuple[str, int] | str
        namespaces: Sequence[str] = ()
        if mbit is None:
            opened: Any = store or host_store(timeout_s)
            address = (_HOST, opened.port)
        else:  # a file is in no namespace's network
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lightning_ddp_link_"))
            address = str(Path(folder, "store"))
            opened = dist.FileStore(address, -1)
            namespaces = stack.enter_context(shaped_link(mbit))
        meeting = _Meeting(worker, arguments, address, namespaces, world_size, device, timeout_s, preload)
        _supervise(meeting, world_size * num_replicas, opened, start_method, on_progress)
        members = itertools.product(range(num_replicas), range(world_size))
        keys = [f"result/{replica}/{rank}" for replica, rank in members]
        if not opened.check(keys):
            raise ToolError("a rank exited with 0 before its work was done")
        return [json.loads(opened.get(key)) for key in keys]


def _supervise(
    meeting: _Meeting, count: int, store: Store, start_method: str, on_progress: Callable[[int], object]
) -> None:
    """Start `count` processes and wait; raise `ToolError` if one fails or time is up; kill the rest."""
    # A store in this process looks up the address of each client, and holds a lock of the C library
    # meanwhile, which a rank that is forked then could never take.
    all_made = multiprocessing.get_context(start_method).Barrier(count)
    started: dict[str, Any] = {"nprocs": count, "join": False, "daemon": True, "start_method": start_method}
    context: ProcessContext | None = None
    deadline, seen = time.monotonic() + meeting.timeout_s, 0
    try:
        with held_back():
            context = start_processes(_run_rank, (meeting, all_made), **started)
        while not context.join(timeout=_POLL_INTERVAL_S):
            progress = store.add(_PROGRESS_KEY, 0)
            on_progress(progress - seen)
            seen = progress
            if time.monotonic() > deadline:
                raise ToolError(f"ranks were still running after {meeting.timeout_s:g} s and were killed")
    except ProcessRaisedException as error:
        # Not the text of `error`, which is of the rank that exited first, often because of a peer.
        first = store.get(FAILURE_KEY).decode() if store.check([FAILURE_KEY]) else str(error)
        raise ToolError(first) from error
    except ProcessExitedException as error:
        raise ToolError(f"rank {error.error_index % meeting.world_size} died: {error}") from error
    finally:
        for process in context.processes if context is not None else ():
            if process.is_alive():
                process.kill()
            process.join()


def _run_rank(index: int, meeting: _Meeting, all_made: Barrier) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has the parent's handler
    gc.freeze()  # what the parent has left is not to be freed here: the threads of its groups are not there
    all_made.wait()
    replica, rank = divmod(index, meeting.world_size)
    if meeting.namespaces:
        enter(meeting.namespaces[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)  # ranks share the cores; more threads each would measure the scheduler
    if meeting.preload is not None:
        runpy.run_path(meeting.preload)
    store = meeting.open_store()
    device = torch.device(meeting.device)
    has_nccl = meeting.device == "cuda"
    if device.type == "cuda":
        device = torch.device("cuda", rank) if has_nccl else device
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if has_nccl else "gloo",
        store=PrefixStore(f"process_group/{replica}", store),
        rank=rank,
        world_size=meeting.world_size,
        timeout=timedelta(seconds=meeting.timeout_s),
        device_id=device if has_nccl else None,
    )
    context = RankContext(rank, meeting.world_size, replica, device, store)
    try:
        store.set(f"result/{replica}/{rank}", json.dumps(meeting.worker(context, *meeting.arguments)))
        dist.barrier()  # no rank exits while another rank still communicates
    except Exception:
        # Before the group is destroyed, which makes the other ranks fail: the first entry is the cause.
        text = f"rank {rank} (pid {os.getpid()}) failed:\n{traceback.format_exc()}"
        store.compare_set(FAILURE_KEY, "", text)
        raise
    finally:
        dist.destroy_process_group()


class RoundRobin:
    """Turns of replicas, one after the other, so that they share the processors; waiting processes sleep.

    All processes request the same turns in the same order; `num_ranks` processes share a turn.
    """

    def __init__(self, store: Store, num_ranks: int) -> None:
        self._store = store
        self._num_ranks = num_ranks
        self._next = 0

    @contextmanager
    def turn(self, order: Sequence[ItemT], mine: ItemT) -> Iterator[None]:
        """Wait for the processes that come before `mine` in `order`; hold the turn until the block ends."""
        number = self._next + order.index(mine)
        self._next += len(order)
        if number:
            self._store.wait([f"turn/{number - 1}"])
        yield
        if self._store.add(f"turn/{number}/count", 1) == self._num_ranks:
            self._store.set(f"turn/{number}", "over")


def shuffled(items: Sequence[ItemT], *, seed: int) -> list[ItemT]:
    """Return the items in an order that depends on the seed alone, so it is the same on all ranks."""
    return random.Random(seed).sample(items, k=len(items))


# ---------------------------------------------------------------------- a slow link

INTERFACE: Final = "link0"
"""Name of the link in both namespaces."""

_CLONE_NEWNET = 0x40000000


def ip(*arguments: str) -> None:
    """Run the command `ip` of iproute2 with these arguments; raise `ToolError` if it fails."""
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ToolError("ip is not installed, but shaped links need iproute2") from error
    except subprocess.CalledProcessError as error:
        raise ToolError(f"ip {' '.join(arguments)} failed: {error.stderr.strip()}") from error


@contextmanager
def shaped_link(mbit: float) -> Iterator[list[str]]:
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
    """Return the bytes sent so far by the slow link of this thread's network namespace; None without one."""
    for line in Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[8])
    return None

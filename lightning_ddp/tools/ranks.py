"""Supervised rank processes that leave nothing behind: here, under torchrun, or in network namespaces.

The parent hosts a store, which the ranks use for rendezvous, progress and results, so that there is one
channel and nothing to drain while they run. Under torchrun each of its processes starts one rank, and all
use torchrun's store; between two network namespaces (Linux, as root) it is a file store.
"""

from __future__ import annotations

import argparse
import ctypes
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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from lightning_ddp.tools import ToolError, ends_at_sigterm, held_back

SettingsT = TypeVar("SettingsT")
ItemT = TypeVar("ItemT")

FAILURE_KEY: Final = "first_failure"
"""Key in the store of the first failure of a rank, with its traceback."""

_HOST = "127.0.0.1"
_PROGRESS_KEY = "progress"
_POLL_INTERVAL_S = 0.25  # rare enough not to take the CPU from the ranks that are being timed


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Rank, device and store of a worker's process."""

    rank: int
    world_size: int
    replica: int = 0
    """Index of this process's replica; each replica has a separate process group."""
    num_replicas: int = 1
    device: torch.device
    """Device of this rank; with CUDA it is the current device."""
    store: Store
    """The parent's store."""

    def advance(self) -> None:
        """Count one unit of progress, on rank 0 only; one round trip to the parent."""
        if self.rank == 0:
            self.store.add(_PROGRESS_KEY, 1)


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on the device; return at once on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a step that all ranks begin together, until the device has done it.

    Collective: all ranks must call it.
    """
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


Worker = Callable[[RankContext, SettingsT], object]
"""Function that a rank runs: at module level, with a result that JSON can represent."""


@dataclass(kw_only=True)
class _Meeting:
    """Store of the ranks, and the ranks that are started here."""

    address: tuple[str, int] | str = ""
    """Address of the store: host and port, or a file."""
    prefix: str = ""
    world_size: int
    num_local_ranks: int
    num_replicas: int
    first_rank: int = 0
    first_local_rank: int = 0
    namespaces: Sequence[str] = ()
    device: str
    timeout_s: float
    preload: str | None

    def open_store(self) -> Store:
        limit = timedelta(seconds=self.timeout_s)
        if isinstance(self.address, str):
            store: Store = dist.FileStore(self.address, -1)
            store.set_timeout(limit)
        else:
            store = TCPStore(*self.address, is_master=False, timeout=limit)
        return PrefixStore(self.prefix, store) if self.prefix else store


def host_store(timeout_s: float) -> TCPStore:
    """Open a store on a free port of this host's loopback."""
    limit = timedelta(seconds=timeout_s)
    return TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=limit)


def run_ranks(
    worker: Worker[SettingsT],
    settings: SettingsT,
    *,
    world_size: int,
    device: str = "cpu",
    timeout_s: float,
    num_replicas: int = 1,
    on_progress: Callable[[int], object] = lambda count: None,
    torchrun: TorchrunRank | None = None,
    mbit: float | None = None,
    store: TCPStore | None = None,
    preload: str | None = None,
    start_method: str = "spawn",
) -> list[Any]:
    """Run a worker in new processes that share a process group; leave no process.

    Args:
        worker: called in each process with `settings`, which must pickle.
        settings: argument of the worker.
        world_size: number of ranks.
        device: "cpu" (gloo) or "cuda" (NCCL, one GPU per process).
        timeout_s: seconds after which all processes are killed.
        num_replicas: number of replicas of the ranks at once, each with a separate process group.
        on_progress: called a few times a second with the number of units of progress since its last call;
            an error that it raises stops the ranks.
        torchrun: the rank to start here, under torchrun, whose processes all call this; else None.
        mbit: speed in Mbit/s of a link between two network namespaces, one per rank; None for no link.
        store: a store of `host_store` that the caller reads, too; None to open one.
        preload: a Python file that each rank runs first, or None.
        start_method: "fork" saves all imports, but does not work while CUDA is in use.

    Returns:
        One result per rank, replica by replica; the same in all processes of torchrun.

    Raises:
        ToolError: a process fails (the message holds its traceback), the deadline passes, there are too few
            GPUs, or namespaces are not permitted.
    """
    meeting = _Meeting(
        world_size=world_size,
        num_local_ranks=world_size,
        num_replicas=num_replicas,
        device=device,
        timeout_s=timeout_s,
        preload=preload,
    )
    with ExitStack() as stack:
        if torchrun is not None:
            meeting.address, meeting.num_local_ranks = torchrun.address, 1
            meeting.prefix = f"{torchrun.prefix}/{next(torchrun.numbers)}"
            meeting.first_rank, meeting.first_local_rank = torchrun.rank, torchrun.local_rank
            opened: Store = PrefixStore(meeting.prefix, torchrun.store)
        elif mbit is not None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lightning_ddp_link_"))
            meeting.address = str(Path(folder, "store"))  # in no namespace's network
            meeting.namespaces = stack.enter_context(_shaped_link(mbit))
            opened = dist.FileStore(meeting.address, -1)
        else:
            if device == "cuda" and torch.cuda.device_count() < world_size:
                found = torch.cuda.device_count()
                raise ToolError(f"--world-size {world_size} needs as many GPUs, found {found}")
            store = store or host_store(timeout_s)
            opened, meeting.address = store, (_HOST, store.port)
        return _run(worker, settings, meeting, opened, on_progress, start_method)


def _run(
    worker: Worker[SettingsT],
    settings: SettingsT,
    meeting: _Meeting,
    store: Store,
    on_progress: Callable[[int], object],
    start_method: str,
) -> list[Any]:
    count = meeting.num_local_ranks * meeting.num_replicas
    # A store in this process looks up the address of each client, and holds a lock of the C library
    # meanwhile, which a rank that is forked then could never take.
    all_made = multiprocessing.get_context(start_method).Barrier(count)
    arguments = (worker, settings, meeting, all_made)
    context: ProcessContext | None = None
    try:
        with held_back():
            context = start_processes(
                _run_rank, arguments, nprocs=count, join=False, daemon=True, start_method=start_method
            )
        _watch(context, store, meeting, on_progress)
    finally:
        for process in context.processes if context is not None else ():
            if process.is_alive():
                process.kill()
            process.join()
    members = itertools.product(range(meeting.num_replicas), range(meeting.world_size))
    return [json.loads(store.get(f"result/{replica}/{rank}")) for replica, rank in members]


def _watch(
    context: ProcessContext, store: Store, meeting: _Meeting, on_progress: Callable[[int], object]
) -> None:
    deadline = time.monotonic() + meeting.timeout_s
    seen = 0
    try:
        while not context.join(timeout=_POLL_INTERVAL_S):
            count = store.add(_PROGRESS_KEY, 0)
            on_progress(count - seen)
            seen = count
            if time.monotonic() > deadline:
                raise ToolError(f"ranks were still running after {meeting.timeout_s:g} s and were killed")
    except ProcessRaisedException as error:
        # Not the text of `error`, which is of the rank that exited first, often because of a peer.
        first = store.get(FAILURE_KEY).decode() if store.check([FAILURE_KEY]) else str(error)
        raise ToolError(first) from error
    except ProcessExitedException as error:
        rank = meeting.first_rank + error.error_index % meeting.num_local_ranks
        raise ToolError(f"rank {rank} died: {error}") from error


def _run_rank(
    index: int, worker: Worker[SettingsT], settings: SettingsT, meeting: _Meeting, all_made: Barrier
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has the parent's handler
    all_made.wait()
    replica, local = divmod(index, meeting.num_local_ranks)
    if meeting.namespaces:
        _enter_namespace(meeting.namespaces[local])
        os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE
    torch.set_num_threads(1)  # ranks share the cores; more threads each would measure the scheduler
    if meeting.preload is not None:
        runpy.run_path(meeting.preload)
    rank = meeting.first_rank + local
    store = meeting.open_store()
    device = torch.device(meeting.device)
    if device.type == "cuda":
        device = torch.device("cuda", meeting.first_local_rank + local)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(f"process_group/{replica}", store),
        rank=rank,
        world_size=meeting.world_size,
        timeout=timedelta(seconds=meeting.timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    sizes = {"world_size": meeting.world_size, "num_replicas": meeting.num_replicas}
    context = RankContext(rank=rank, replica=replica, device=device, store=store, **sizes)
    try:
        store.set(f"result/{replica}/{rank}", json.dumps(worker(context, settings)))
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

    All processes request the same turns in the same order, with `is_mine` for their own turns; `num_ranks`
    processes share a turn.
    """

    def __init__(self, store: Store, num_ranks: int) -> None:
        self._store = store
        self._num_ranks = num_ranks
        self._next = 0

    @contextmanager
    def take(self, *, is_mine: bool) -> Generator[bool, None, None]:
        """Wait for the end of the previous turn, if this process takes part; yield `is_mine`.

        Raises:
            RuntimeError: the previous turn does not end within the timeout of the store.
        """
        number = self._next
        self._next += 1
        if not is_mine:
            yield False
            return
        if number:
            self._store.wait([f"turn/{number - 1}"])
        yield True
        if self._store.add(f"turn/{number}/count", 1) == self._num_ranks:
            self._store.set(f"turn/{number}", "over")


def shuffled(items: Sequence[ItemT], *, seed: int) -> list[ItemT]:
    """Return the items in an order that depends on the seed alone, so it is the same on all ranks."""
    return random.Random(seed).sample(items, k=len(items))


# ---------------------------------------------------------------------- torchrun


@dataclass(frozen=True, kw_only=True)
class TorchrunRank:
    """Torchrun's description of this process, and the store of its ranks."""

    rank: int
    local_rank: int
    world_size: int
    address: tuple[str, int]
    store: Store
    prefix: str
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """Numbers of the measurements, the same on all ranks."""


@contextmanager
def torchrun_rank(args: argparse.Namespace) -> Generator[TorchrunRank | None, None, None]:
    """Connect to torchrun's ranks, if torchrun started this process; yield None otherwise.

    At the end of the block torchrun's processes wait for each other, unless the block raised. `args` has
    `world_size` (None if not given), `device` and `timeout_s`.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield None
        return
    world_size = int(os.environ["WORLD_SIZE"])
    if args.world_size not in (None, world_size):
        raise ToolError(
            f"--world-size {args.world_size}, but {world_size} ranks have been started. Leave it out"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if args.device == "cuda" and torch.cuda.device_count() <= local_rank:
        found = torch.cuda.device_count()
        raise ToolError(f"local rank {local_rank} needs a GPU of its own, found {found}")
    try:
        with ends_at_sigterm():
            limit = timedelta(seconds=args.timeout_s)
            found_store, rank, _ = next(iter(dist.rendezvous("env://", timeout=limit)))
    except (ValueError, RuntimeError) as error:
        raise ToolError(f"RANK is set, but the ranks cannot connect to each other: {error}") from error
    prefix = f"lightning_ddp_bench/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    yield TorchrunRank(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        address=(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
        store=found_store,
        prefix=prefix,
    )
    store = PrefixStore(prefix, found_store)  # rank 0 may host it, so it must exit last
    if store.add("num_done", 1) == world_size:
        store.set("all_done", "1")
    with ends_at_sigterm():
        store.wait(["all_done"])


# ---------------------------------------------------------------------- network namespaces

_INTERFACE: Final = "link0"
"""Name of the link in both namespaces."""
_CLONE_NEWNET = 0x40000000


@contextmanager
def _shaped_link(mbit: float) -> Generator[list[str], None, None]:
    """Make two namespaces, joined by a link of `mbit` Mbit/s each way; yield their names."""
    tag = uuid.uuid4().hex[:6]
    names, ends = ([f"{kind}{tag}{rank}" for rank in range(2)] for kind in ("lddp", "v"))
    burst = max(32_000, int(mbit * 1e6 / 8 / 250))  # bytes between two ticks of the shaper
    shape = ("tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", "400ms")
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
            _ip(*inside, "tc", "qdisc", "add", "dev", _INTERFACE, "root", *shape)
        yield names
    finally:
        for name in names:
            with suppress(FileNotFoundError):  # then there is no namespace either
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ToolError("ip is not installed, but shaped links need iproute2") from error
    except subprocess.CalledProcessError as error:
        raise ToolError(f"ip {' '.join(arguments)} failed: {error.stderr.strip()}") from error


def _enter_namespace(name: str) -> None:
    """Move the calling thread, and threads that it starts later, to a namespace."""
    with open(f"/var/run/netns/{name}", encoding="ascii") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise ToolError(f"setns failed: {os.strerror(ctypes.get_errno())}")


def read_sent_bytes() -> int:
    """Return the bytes that the kernel has sent on this rank's link, with all headers."""
    for line in Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == _INTERFACE:
            return int(counts.split()[8])
    raise ToolError(f"there is no interface {_INTERFACE} in this namespace")

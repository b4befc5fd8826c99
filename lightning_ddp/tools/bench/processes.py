"""Spawns one process per rank for a benchmark, watches them against a deadline, and leaves none behind.

The parent hosts a store on a free port. Ranks rendezvous through it, count their progress in it and leave
their results there, so there is one channel and nothing to drain while they run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.synchronize import Barrier
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

from lightning_ddp.tools.bench import BenchmarkError
from lightning_ddp.tools.bench.ending import held_back

SettingsT = TypeVar("SettingsT")

_HOST = "127.0.0.1"
PROGRESS_KEY: Final = "progress"
"""Where the store counts units of progress."""

FAILURE_KEY: Final = "first_failure"
"""Where the store has what made the first rank fail, its traceback included."""

_POLL_INTERVAL_S = 0.25  # rare enough not to take the CPU from the ranks that are being timed


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """What a worker knows about its own process."""

    rank: int
    """Rank in the default process group."""

    world_size: int
    """Ranks of the default process group."""

    crew: int = 0
    """Which of the crews this process belongs to."""

    num_crews: int = 1
    """How many crews there are."""

    device: torch.device
    """The device of this rank; for CUDA also the current device."""

    store: Store
    """The parent's store."""

    def advance(self) -> None:
        """Count one unit of progress, on rank 0 only; one round trip to the parent."""
        if self.rank == 0:
            self.store.add(PROGRESS_KEY, 1)

    def synchronize(self) -> None:
        """Wait for all work queued on the device; nothing to wait for on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks of one measurement meet, and which of them are started here."""

    host: str
    """Of the store."""

    port: int
    """Of the store."""

    prefix: str = ""
    """Before all keys in the store; empty for a store of this measurement's own."""

    world_size: int
    """Ranks of one crew, here and elsewhere."""

    num_local_ranks: int
    """Those of them that are started here."""

    num_crews: int = 1
    """How many times they are started, each time with a process group of their own."""

    first_rank: int = 0
    """The first rank that is started here."""

    first_local_rank: int = 0
    """Its number on this host, which is that of its GPU."""

    device: str
    """``"cpu"`` (gloo) or ``"cuda"`` (NCCL, one GPU per process)."""

    timeout_s: float
    """Seconds after which the ranks that were started here are killed."""

    preload: str | None = None
    """A Python file that each rank runs first."""

    start_method: str = "spawn"
    """How processes are started here; ``"fork"`` spares them all imports, but not where CUDA is in use."""


Worker = Callable[[RankContext, SettingsT], object]
"""What a rank runs: a function at module level that returns something JSON can hold."""


def run_ranks(
    worker: Worker[SettingsT],
    settings: SettingsT,
    *,
    world_size: int,
    device: str,
    timeout_s: float,
    num_crews: int = 1,
    on_progress: Callable[[int], object] = lambda count: None,
) -> list[Any]:
    """Run a worker in ``world_size`` fresh processes that share a process group.

    Args:
        worker: Called in each process; must be importable by name.
        settings: Passed to each worker; must pickle.
        world_size: Number of processes.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL, one GPU per process).
        timeout_s: Seconds after which all processes are killed.
        num_crews: How many times to do so at once, each time with a process group of their own.
        on_progress: Called with the number of units of progress since its last call.

    Returns:
        One result per rank, in the order of the ranks; those of one crew after those of the other.

    Raises:
        BenchmarkError: If a process fails (the message holds its traceback) or the deadline passes. Either
            way no process is left.
    """
    if device == "cuda" and torch.cuda.device_count() < world_size:
        raise BenchmarkError(
            f"--world-size {world_size} needs as many GPUs, found {torch.cuda.device_count()}"
        )
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    meeting = Meeting(
        host=_HOST,
        port=store.port,
        world_size=world_size,
        num_local_ranks=world_size,
        num_crews=num_crews,
        device=device,
        timeout_s=timeout_s,
    )
    return run_meeting(worker, settings, meeting, store, on_progress=on_progress)


def run_meeting(
    worker: Worker[SettingsT],
    settings: SettingsT,
    meeting: Meeting,
    store: Store,
    *,
    on_progress: Callable[[int], object],
) -> list[Any]:
    """Start some of a measurement's ranks in fresh processes, and wait for the results of all.

    Args:
        worker: Called in each process; must be importable by name.
        settings: Passed to each worker; must pickle.
        meeting: Where the ranks meet.
        store: The meeting's store, with its prefix.
        on_progress: Called with the number of units of progress since its last call.

    Returns:
        One result per rank, in the order of the ranks; those of one crew after those of the other.

    Raises:
        BenchmarkError: If a process fails (the message holds its traceback) or the deadline passes. Either
            way no process that was started here is left.
    """
    num_processes = meeting.num_local_ranks * meeting.num_crews
    # A store in this process looks up the address of each that connects, and holds a lock of the C library
    # while it does: a rank forked then could never take that lock.
    all_made = multiprocessing.get_context(meeting.start_method).Barrier(num_processes)
    arguments = (worker, settings, meeting, all_made)
    context: ProcessContext | None = None
    try:
        with held_back():
            context = start_processes(
                _run_rank,
                arguments,
                nprocs=num_processes,
                join=False,
                daemon=True,
                start_method=meeting.start_method,
            )
        _watch(context, store, meeting, on_progress)
    finally:
        end_processes(context)
    return [
        json.loads(store.get(_result_key(crew, rank)))
        for crew in range(meeting.num_crews)
        for rank in range(meeting.world_size)
    ]


def end_processes(context: ProcessContext | None) -> None:
    """Kill the processes of a context that still run, and reap all; None for none."""
    for process in context.processes if context is not None else ():
        if process.is_alive():
            process.kill()
        process.join()


def _watch(
    context: ProcessContext, store: Store, meeting: Meeting, on_progress: Callable[[int], object]
) -> None:
    deadline = time.monotonic() + meeting.timeout_s
    seen = 0
    try:
        while not context.join(timeout=_POLL_INTERVAL_S):
            count = store.add(PROGRESS_KEY, 0)
            on_progress(count - seen)
            seen = count
            if time.monotonic() > deadline:
                raise BenchmarkError(
                    f"ranks were still running after {meeting.timeout_s:g} s and were killed"
                )
    except ProcessRaisedException as error:
        # Not the text of `error`: it is that of the rank which ended first, often one that a peer took along.
        first = store.get(FAILURE_KEY).decode() if store.check([FAILURE_KEY]) else str(error)
        raise BenchmarkError(first) from error
    except ProcessExitedException as error:
        rank = meeting.first_rank + error.error_index % meeting.num_local_ranks
        raise BenchmarkError(f"rank {rank} (pid {error.error_pid}) died: {error}") from error


def _run_rank(
    index: int, worker: Worker[SettingsT], settings: SettingsT, meeting: Meeting, all_made: Barrier
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has the parent's handler
    all_made.wait()
    torch.set_num_threads(1)  # ranks share the cores; more threads each would measure the scheduler
    if meeting.preload is not None:
        runpy.run_path(meeting.preload)
    crew, local = divmod(index, meeting.num_local_ranks)
    rank = meeting.first_rank + local
    timeout = timedelta(seconds=meeting.timeout_s)
    store: Store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
    if meeting.prefix:
        store = PrefixStore(meeting.prefix, store)
    device = torch.device(meeting.device)
    if device.type == "cuda":
        device = torch.device("cuda", meeting.first_local_rank + local)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(f"process_group/{crew}", store),
        rank=rank,
        world_size=meeting.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        context = RankContext(
            rank=rank,
            world_size=meeting.world_size,
            crew=crew,
            num_crews=meeting.num_crews,
            device=device,
            store=store,
        )
        store.set(_result_key(crew, rank), json.dumps(worker(context, settings)))
        dist.barrier()  # nobody leaves while another rank still communicates
    except Exception:
        # Before the group goes, which makes the others fail as well: the first entry is the cause.
        store.compare_set(
            FAILURE_KEY, "", f"rank {rank} (pid {os.getpid()}) failed:\n{traceback.format_exc()}"
        )
        raise
    finally:
        dist.destroy_process_group()


def _result_key(crew: int, rank: int) -> str:
    return f"result/{crew}/{rank}"

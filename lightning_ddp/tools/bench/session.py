"""The ranks of a benchmark: processes of its own, or one for each of those that torchrun has started."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store
from tqdm import tqdm  # type: ignore[import-untyped]  # tqdm ships no types

from lightning_ddp.tools.bench import BenchmarkError
from lightning_ddp.tools.bench.ending import at_once
from lightning_ddp.tools.bench.processes import Meeting, SettingsT, Worker, run_meeting, run_ranks
from lightning_ddp.tools.bench.report import progress_bar

__all__ = ["Session", "open_session", "refuse_launched"]

_DEFAULT_WORLD_SIZE = 2


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """What torchrun says about this process, and the store through which its ranks meet."""

    rank: int
    local_rank: int
    host: str
    port: int
    store: Store
    prefix: str
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """Of the measurements, the same on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """Runs measurements on the ranks of a benchmark."""

    world_size: int
    """Number of ranks."""

    device: str
    """``"cpu"`` or ``"cuda"``."""

    timeout_s: float
    """Deadline of each measurement in seconds."""

    launch: _Launch | None
    """None where this process starts all ranks."""

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.launch is None or self.launch.rank == 0

    def progress_bar(self, total: int, label: str) -> tqdm[None]:
        """Return a progress bar, which stays silent on all ranks but the first."""
        return progress_bar(total, label, is_shown=self.is_first)

    def run(
        self,
        worker: Worker[SettingsT],
        settings: SettingsT,
        on_progress: Callable[[int], object] = lambda count: None,
        *,
        num_crews: int = 1,
    ) -> list[Any]:
        """Run a worker on every rank, each in a fresh process; all processes of torchrun call it.

        Args:
            worker: Called in each process; must be importable by name.
            settings: Passed to each worker; must pickle.
            on_progress: Called with the number of units of progress since its last call.
            num_crews: How many times to do so at once, each time with a process group of their own.

        Returns:
            One result per rank, in the order of the ranks, those of one crew after those of the other; the
            same in all processes of torchrun.

        Raises:
            BenchmarkError: If a rank fails or the deadline passes. No process that was started here is left.
        """
        if self.launch is None:
            return run_ranks(
                worker,
                settings,
                world_size=self.world_size,
                device=self.device,
                timeout_s=self.timeout_s,
                num_crews=num_crews,
                on_progress=on_progress,
            )
        prefix = f"{self.launch.prefix}/{next(self.launch.numbers)}"
        meeting = Meeting(
            host=self.launch.host,
            port=self.launch.port,
            prefix=prefix,
            world_size=self.world_size,
            num_local_ranks=1,
            num_crews=num_crews,
            first_rank=self.launch.rank,
            first_local_rank=self.launch.local_rank,
            device=self.device,
            timeout_s=self.timeout_s,
        )
        store = PrefixStore(prefix, self.launch.store)
        return run_meeting(worker, settings, meeting, store, on_progress=on_progress)


@contextmanager
def open_session(args: argparse.Namespace) -> Generator[Session, None, None]:
    """Find the ranks for a benchmark: under torchrun its ranks, otherwise as many as were asked for.

    At the end of the block the processes of torchrun wait for each other, unless it raised.

    Args:
        args: With ``world_size`` (None if it was not given), ``device`` where there is a choice, and
            ``timeout_s``.

    Raises:
        BenchmarkError: If the number that was asked for is not that of torchrun, or torchrun's processes do
            not find each other.
    """
    device = getattr(args, "device", "cpu")
    launch = None
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        world_size = int(os.environ["WORLD_SIZE"])
        if args.world_size not in (None, world_size):
            raise BenchmarkError(
                f"--world-size {args.world_size}, but {world_size} ranks have been started: leave it out"
            )
        launch = _find_launch(device, args.timeout_s)
    else:
        world_size = args.world_size or _default_world_size(device)
    yield Session(world_size=world_size, device=device, timeout_s=args.timeout_s, launch=launch)
    if launch is not None:
        _leave_together(launch, world_size)


def _default_world_size(device: str) -> int:
    if device == "cuda":
        return max(1, min(_DEFAULT_WORLD_SIZE, torch.cuda.device_count()))
    return _DEFAULT_WORLD_SIZE


def _find_launch(device: str, timeout_s: float) -> _Launch:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda" and torch.cuda.device_count() <= local_rank:
        raise BenchmarkError(
            f"local rank {local_rank} needs a GPU of its own, found {torch.cuda.device_count()}"
        )
    try:
        with at_once():
            store, rank, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    except (ValueError, RuntimeError) as error:
        raise BenchmarkError(f"RANK is set, but the ranks do not find each other: {error}") from error
    return _Launch(
        rank=rank,
        local_rank=local_rank,
        host=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        store=store,
        prefix=f"lightning_ddp_bench/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )


def _leave_together(launch: _Launch, world_size: int) -> None:
    # Rank 0 may be the one that hosts the store.
    store = PrefixStore(launch.prefix, launch.store)
    if store.add("num_done", 1) == world_size:
        store.set("all_done", "1")
    with at_once():
        store.wait(["all_done"])


def refuse_launched(benchmark: str) -> None:
    """Raise if torchrun has started this process, for a benchmark that starts all of its own.

    Raises:
        BenchmarkError: If it has.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise BenchmarkError(
            f"bench {benchmark} starts its own processes, and RANK is set: run it once, without torchrun"
        )

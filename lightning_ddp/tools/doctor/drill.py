"""Drill of `doctor --verify --full`: ranks abort their process groups, leave them, and make new ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from lightning_ddp.comm.group import Group, sibling_group
from lightning_ddp.comm.teardown import abort_groups, destroy_groups, retire_groups, wait_for_aborts
from lightning_ddp.launch.rendezvous import join_default_group
from lightning_ddp.tools.doctor.machine import within
from lightning_ddp.tools.doctor.trials import Ranks, Verdict, store_verdict
from lightning_ddp.tools.ranks import RankContext, synchronize

_LIMIT_S: Final = 20.0
_NUM_KERNELS: Final = 200
_NUM_CYCLES, _CYCLES_WITHIN_S, _MOST_GROWTH_MIB = 50, 20.0, 64.0


class Drill:
    """Test of aborts and new process groups. All ranks call its methods in the same order."""

    def __init__(self, context: RankContext) -> None:
        self.ranks = Ranks(rank=context.rank, size=context.world_size, device=context.device)
        self._store: Any = context.store
        self._backend = dist.get_backend()
        self._num_groups = 0
        self._groups: list[Group] = []

    def begin(self, verdict: Verdict) -> None:
        """Create the default process group, as a run does, and time that with its first all-reduce."""
        start = time.monotonic()
        self._num_groups += 1
        group = join_default_group(
            self._backend,
            dist.PrefixStore(f"drill/{self._num_groups}", self._store),
            rank=self.ranks.rank,
            world_size=self.ranks.size,
            timeout=timedelta(seconds=_LIMIT_S),
            device=torch.device("cpu") if self._backend == "gloo" else self.ranks.device,
        )
        self._groups = [Group(group)]
        self._check_sums(verdict)
        verdict.figure = f"group and first all-reduce in {time.monotonic() - start:.2f} s"

    def communicate(self, verdict: Verdict) -> None:
        """Test all-reduces on two communicators in turns, and messages between neighbors in a ring."""
        rank, size = self.ranks.rank, self.ranks.size
        self._groups.append(sibling_group(self._groups[0], self.ranks.device))
        for _ in range(10):
            self._check_sums(verdict)
        own = torch.full((1000,), float(rank), device=self.ranks.device)
        found, source = torch.empty_like(own), (rank - 1) % size
        ring = [dist.P2POp(dist.isend, own, (rank + 1) % size), dist.P2POp(dist.irecv, found, source)]
        for work in dist.batch_isend_irecv(ring) if size > 1 else ():
            work.wait()
        if size > 1 and float(found[0]) != source:
            verdict.fail(f"received {float(found[0]):g} from rank {source}")
        verdict.figure = f"20 all-reduces on 2 communicators in turns, a ring of {size} ranks"

    def abort(self, verdict: Verdict) -> None:
        """Test an abort of all groups in collectives that rank 0 never calls, behind device kernels."""
        tensor = torch.ones(1000, device=self.ranks.device)
        for _ in range(_NUM_KERNELS if tensor.is_cuda else 0):
            tensor = tensor * 1.0
        works = [group.all_reduce(tensor.clone()) for group in self._groups if self.ranks.rank]
        self._meet("abort")
        start = time.monotonic()
        self._abort()
        verdict.figure = f"{len(self._groups)} groups in {time.monotonic() - start:.2f} s"
        for work in works if self._backend == "gloo" else ():
            try:
                within(_LIMIT_S, "a collective that was aborted", work.wait)
                verdict.fail("a collective that was aborted has ended without an error")
            except RuntimeError:  # as it should
                continue

    def rejoin(self, verdict: Verdict) -> None:
        """Destroy the aborted groups, create the default group again, and time both."""
        start = time.monotonic()
        retire_groups(group.process_group for group in self._groups)
        self._groups = []
        within(_LIMIT_S, "leaving the groups after their abort", destroy_groups)
        left_s = time.monotonic() - start
        self.begin(verdict)
        verdict.figure = f"left in {left_s:.2f} s, {verdict.figure}"

    def repeat(self, verdict: Verdict) -> None:
        """Abort and create the groups many times; record a problem if memory use grows."""
        start, used = time.monotonic(), [self._used_mib()]
        while len(used) <= _NUM_CYCLES:
            key = f"again/{len(used)}"
            if self.ranks.rank == 0:  # one decides for all
                self._store.set(key, str(time.monotonic() - start < _CYCLES_WITHIN_S))
            if self._store.get(key) != b"True":
                break
            self._meet(f"cycle/{len(used)}")
            self._abort()
            self.rejoin(verdict)
            used.append(self._used_mib())
        growth, num_cycles = used[-1] - used[min(5, len(used) - 1)], len(used) - 1
        if growth > _MOST_GROWTH_MIB:
            verdict.fail(f"memory grew by {growth:.0f} MiB in {num_cycles} recoveries of groups")
        seconds = (time.monotonic() - start) / max(1, num_cycles)
        verdict.figure = f"{num_cycles} recoveries of groups, {seconds:.2f} s each, memory {growth:+.0f} MiB"

    def _abort(self) -> None:
        abort_groups()
        within(_LIMIT_S, "the abort", wait_for_aborts)
        within(_LIMIT_S, "work on the device", lambda: synchronize(self.ranks.device))

    def _meet(self, key: str) -> None:
        """Wait until all ranks have called this with `key`, by the store, as groups may be aborted."""
        self._store.set(f"{key}/{self.ranks.rank}", "")
        self._store.wait([f"{key}/{rank}" for rank in range(self.ranks.size)])

    def _check_sums(self, verdict: Verdict) -> None:
        expected = sum(range(self.ranks.size))
        for group in self._groups:
            total = torch.full((1000,), float(self.ranks.rank), device=self.ranks.device)
            group.wait(group.all_reduce(total), total.device)
            if float(total[0]) != expected:
                verdict.fail(f"the sum of the ranks is {float(total[0]):g}, expected {expected}")

    def _used_mib(self) -> float:
        if self.ranks.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.ranks.device)
            return (total - free) / 2**20
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


DRILLS: Final[Mapping[str, Callable[[Drill, Verdict], None]]] = {
    "begin": Drill.begin,
    "communicate": Drill.communicate,
    "abort": Drill.abort,
    "rejoin": Drill.rejoin,
    "repeat": Drill.repeat,
}
"""Parts of the drill in running order, by name."""


def run_drill(context: RankContext, names: Sequence[str]) -> None:
    """Run the named parts of `Drill` on this rank; store each verdict at once.

    Collective: all ranks must call it.
    """
    drill = Drill(context)
    destroy_groups()
    context.advance()
    for name in names:
        verdict = Verdict()
        DRILLS[name](drill, verdict)
        store_verdict(context, name, verdict)

"""Finds the rank that makes no progress, from the reports of all (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_ddp.supervise.failure_record import FailureRecord, Identity, Where

__all__ = ["REPORTS_A_TIMEOUT", "StallWatch", "silent"]

REPORTS_A_TIMEOUT = 4
"""Least number of reports of a rank within the time after which it counts as stalled."""
_REPORT_EVERY_S = 0.25
_REPORTS_A_S = 64
"""Reports per second of all ranks together: each costs the server some 50 us."""
_MOST_ROWS = 20


def silent(identity: Identity, timeout_s: float) -> FailureRecord:
    """Return the failure of a process that does not even answer."""
    why = "it is stopped (SIGSTOP), swapped out, or holds its interpreter"
    return FailureRecord.of_identity(identity, f"the process has not answered for {timeout_s:g} s: {why}")


@dataclass
class _Progress:
    identity: Identity
    where: Where
    changed_at: float
    reported_at: float

    def describe(self) -> str:
        label = self.where.waits_for
        state = f"waits in {label}" if label is not None else "does not wait for others"
        return state + self.where.in_words()


class StallWatch:
    """The latest report of each rank.

    Args:
        timeout_s: seconds without progress after which a rank has stalled; None for no limit.
        num_ranks: number of ranks.
    """

    def __init__(self, timeout_s: float | None, num_ranks: int) -> None:
        often = max(_REPORT_EVERY_S, num_ranks / _REPORTS_A_S)
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self.interval_s = None if timeout_s is None else min(timeout_s / REPORTS_A_TIMEOUT, often)
        """Period of reports: a stopped rank is found by so much later than the timeout."""
        self._ranks: dict[int, _Progress] = {}
        self._looked_at: float | None = None

    def begin(self, identities: Iterable[Identity], now: float) -> None:
        """Begin once all ranks have connected: before, some waited for others that still started."""
        for identity in identities:
            self._ranks.setdefault(identity.rank, _Progress(identity, Where(), now, now))
        if self.interval_s is not None:
            self._restart(now)

    def _restart(self, now: float) -> None:
        self._looked_at = now
        for progress in self._ranks.values():
            progress.changed_at = progress.reported_at = now

    def report(self, identity: Identity, where: Where, now: float) -> None:
        """Note the report of a rank."""
        known = self._ranks.get(identity.rank)
        changed_at = now if known is None or known.where.count != where.count else known.changed_at
        self._ranks[identity.rank] = _Progress(identity, where, changed_at, now)

    def forget(self, rank: int) -> None:
        """Drop a rank that has finished or is gone."""
        self._ranks.pop(rank, None)

    def next_look(self, now: float) -> float | None:
        """Return when to call `find` again; None for never."""
        if self.interval_s is None:
            return None
        return (self._looked_at if self._looked_at is not None else now) + self.interval_s

    def find(self, now: float, *, may_all_wait: bool = False) -> FailureRecord | None:
        """Return the failure of a rank that has stalled.

        Args:
            may_all_wait: True if all may wait, as for a rank that is lost.
        """
        if self._looked_at is None or self.interval_s is None or now < self._looked_at + self.interval_s:
            return None
        if now > self._looked_at + self._timeout_s / 2:  # this very process slept, and could not hear others
            self._restart(now)
            return None
        self._looked_at = now
        quietest = min(self._ranks.values(), key=lambda p: p.reported_at, default=None)
        if quietest is not None and now - quietest.reported_at > self._timeout_s / 2:
            # the others may wait for it; it was well until then
            is_mute = now - quietest.reported_at > self._timeout_s + self.interval_s
            return silent(quietest.identity, self._timeout_s) if is_mute else None
        stuck = [p for p in self._ranks.values() if p.reported_at - p.changed_at > self._timeout_s]
        busy = [p for p in stuck if p.where.waits_for is None]
        if busy:
            return self._describe(busy[0], "no progress", now)
        if not may_all_wait and stuck and len(stuck) == len(self._ranks) > 1:
            return self._describe(stuck[0], "all ranks wait for different collectives", now)
        return None

    def _describe(self, culprit: _Progress, what: str, now: float) -> FailureRecord:
        rows = [
            f"  rank {rank}: {progress.describe()} for {now - progress.changed_at:.0f} s"
            for rank, progress in sorted(self._ranks.items())[:_MOST_ROWS]
        ]
        text = "\n".join([f"{what} within stall_timeout={self._timeout_s:g} s; ranks:", *rows])
        where = culprit.where
        return FailureRecord.of_identity(culprit.identity, text, step=where.step, phase=where.phase)

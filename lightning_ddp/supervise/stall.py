"""Finds a rank that makes no progress: stopped, or hanging outside of a collective.

When one rank hangs the others soon wait for it. So of the ranks without progress the culprit is one that says
nothing any more, else one that does not wait for others; if all wait, they wait for different things.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_ddp.supervise.failure_record import FailureRecord, Identity, Where

__all__ = ["REPORTS_A_TIMEOUT", "StallWatch", "silent"]

REPORTS_A_TIMEOUT = 4
"""How often a rank reports, at least, within the time after which it counts as stalled."""
_REPORT_EVERY_S = 0.25
_REPORTS_A_S = 64
"""Of all ranks together: each costs the server some 50 us."""

_MOST_ROWS = 20


def silent(identity: Identity, timeout_s: float) -> FailureRecord:
    """The failure of a process that does not even answer."""
    return FailureRecord.of_identity(
        identity, f"the process has said nothing for {timeout_s:g} s: it is stopped (SIGSTOP), or swapped out"
    )


@dataclass
class _Progress:
    identity: Identity
    where: Where
    changed_at: float
    reported_at: float


class StallWatch:
    """Told what the ranks report; says which one has stalled. Pure.

    Args:
        timeout_s: how long a rank may take to get on.
        num_ranks: how many there are.
    """

    def __init__(self, timeout_s: float, num_ranks: int) -> None:
        self._timeout_s = timeout_s
        often = max(_REPORT_EVERY_S, num_ranks / _REPORTS_A_S)
        self.interval_s = min(timeout_s / REPORTS_A_TIMEOUT, often)
        """How often ranks are to report: by so much later than the timeout a stopped one is found."""
        self._ranks: dict[int, _Progress] = {}
        self._looked_at: float | None = None

    def begin(self, identities: Iterable[Identity], now: float) -> None:
        """All ranks have come. Before, those that were there waited for others that still started."""
        for identity in identities:
            self._ranks.setdefault(identity.rank, _Progress(identity, Where(), now, now))
        self._restart(now)

    def _restart(self, now: float) -> None:
        self._looked_at = now
        for progress in self._ranks.values():
            progress.changed_at = progress.reported_at = now

    def report(self, identity: Identity, where: Where, now: float) -> None:
        """What a rank says that it is doing."""
        known = self._ranks.get(identity.rank)
        changed_at = now if known is None or known.where.count != where.count else known.changed_at
        self._ranks[identity.rank] = _Progress(identity, where, changed_at, now)

    def forget(self, rank: int) -> None:
        """A rank has finished or is gone."""
        self._ranks.pop(rank, None)

    def next_look(self, now: float) -> float:
        """When to look again."""
        return (self._looked_at if self._looked_at is not None else now) + self.interval_s

    def find(self, now: float, *, may_all_wait: bool = False) -> FailureRecord | None:
        """The rank that has stalled, if one has.

        Args:
            now: when.
            may_all_wait: whether it is no stall that all wait, as for one of them that is known to be lost.
        """
        if self._looked_at is None or now < self._looked_at + self.interval_s:
            return None
        if now > self._looked_at + self._timeout_s / 2:  # this very process slept, and could not hear others
            self._restart(now)
            return None
        self._looked_at = now
        quietest = min(self._ranks.values(), key=lambda p: p.reported_at, default=None)
        if (
            quietest is not None and now - quietest.reported_at > self._timeout_s / 2
        ):  # others may wait for it
            is_mute = now - quietest.reported_at > self._timeout_s + self.interval_s  # it was well until then
            return silent(quietest.identity, self._timeout_s) if is_mute else None
        stuck = [p for p in self._ranks.values() if p.reported_at - p.changed_at > self._timeout_s]
        busy = [p for p in stuck if p.where.waits_for is None]
        if busy:
            return self._describe(busy[0], "no progress", now)
        if not may_all_wait and stuck and len(stuck) == len(self._ranks) > 1:
            return self._describe(stuck[0], "all ranks wait, for different things", now)
        return None

    def _describe(self, culprit: _Progress, what: str, now: float) -> FailureRecord:
        rows = [
            f"  rank {rank}: {_state(progress.where)} for {now - progress.changed_at:.0f} s"
            for rank, progress in sorted(self._ranks.items())[:_MOST_ROWS]
        ]
        return FailureRecord.of_identity(
            culprit.identity,
            "\n".join([f"{what} within stall_timeout={self._timeout_s:g} s; ranks:", *rows]),
            step=culprit.where.step,
            phase=culprit.where.phase,
        )


def _state(where: Where) -> str:
    state = f"waits in {where.waits_for}" if where.waits_for is not None else "does not wait for others"
    at = f" at step {where.step}" if where.step is not None else ""
    return f"{state}{at}" + (f" in {where.phase}" if where.phase else "")

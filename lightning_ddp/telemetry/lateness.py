"""Lateness of each rank from the slacks of all, and which is slow for many steps in a row. Pure.

A rank's slack in a step is the time from its last bucket's readiness to the end of that bucket's collective.
The collective ends on all ranks at one moment, up to the time that a message travels, so slacks can be
compared though clocks cannot: the rank with the most slack came first, and each other one was late by the
difference.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Lateness", "SlowRank", "SlowRanks", "lateness"]

_MOST_KEPT = 1000

Slacks = Sequence[int | None]


@dataclass(frozen=True, kw_only=True)
class Lateness:
    """How late the ranks came in a number of successive steps."""

    first_step: int
    """Number of the first synchronised backward."""
    late_us: Mapping[int, Slacks]
    """Rank -> microseconds after the first rank in each step; None where a rank did not say."""

    def median_us(self) -> dict[int, float]:
        """Rank -> median over the steps; without ranks that said nothing."""
        known = {rank: [v for v in values if v is not None] for rank, values in self.late_us.items()}
        return {rank: statistics.median(values) for rank, values in known.items() if values}


def lateness(first_step: int, slacks_us: Mapping[int, Slacks]) -> Lateness:
    """Compares the slacks of all ranks, step by step.

    >>> lateness(7, {0: [50, 40], 1: [10, None]}).late_us
    {0: [0, 0], 1: [40, None]}
    """
    num_steps = max((len(values) for values in slacks_us.values()), default=0)
    late: dict[int, list[int | None]] = {rank: [] for rank in slacks_us}
    for number in range(num_steps):
        now = {rank: values[number] if number < len(values) else None for rank, values in slacks_us.items()}
        most = max((slack for slack in now.values() if slack is not None), default=0)
        for rank, slack in now.items():
            late[rank].append(None if slack is None else most - slack)
    return Lateness(first_step=first_step, late_us=late)


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank that has been late for many steps in a row."""

    rank: int
    num_steps: int
    """For how many."""
    late_us: float
    """Median of how long after the typical rank it came in these steps."""


class SlowRanks:
    """Finds ranks that are late in every one of many successive steps.

    Late is measured from the typical rank (of those in the middle the earlier one), so that one that is
    always early does not make all others late.

    Args:
        num_steps: how many steps in a row.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._streaks: dict[int, _Streak] = {}

    def add(self, known: Lateness, limit_us: float) -> list[SlowRank]:
        """Takes in the next steps.

        Args:
            known: of steps that follow those of the last call.
            limit_us: how much later than the typical rank a slow one is.

        Returns:
            Ranks that have now been late for `num_steps`, or for twice as many as when last returned.
        """
        for number in range(max((len(values) for values in known.late_us.values()), default=0)):
            self._add_step({rank: values[number] for rank, values in known.late_us.items()}, limit_us)
        return [slow for rank in sorted(self._streaks) if (slow := self._report(rank)) is not None]

    def _add_step(self, late_us: Mapping[int, int | None], limit_us: float) -> None:
        now = {rank: late for rank, late in late_us.items() if late is not None}
        if len(now) < 2:
            return
        typical = statistics.median_low(now.values())
        for rank in late_us:
            excess = now.get(rank, typical) - typical
            if excess > limit_us:
                streak = self._streaks.setdefault(rank, _Streak(self._num_steps))
                streak.num_steps += 1
                streak.late_us.append(excess)
            else:
                self._streaks.pop(rank, None)

    def _report(self, rank: int) -> SlowRank | None:
        streak = self._streaks[rank]
        if streak.num_steps < streak.next_report:
            return None
        streak.next_report = 2 * streak.num_steps
        return SlowRank(rank=rank, num_steps=streak.num_steps, late_us=statistics.median(streak.late_us))


class _Streak:
    """Steps in a row in which one rank was late."""

    def __init__(self, next_report: int) -> None:
        self.num_steps = 0
        self.next_report = next_report
        self.late_us: deque[int] = deque(maxlen=_MOST_KEPT)

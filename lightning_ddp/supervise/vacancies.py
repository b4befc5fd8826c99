"""Places of lost processes: when a new one is started there, and when no more. Pure: told what happened.

A spare has a place of its own, behind those of the ranks, until it takes that of a lost one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

__all__ = ["STEPS_TO_FORGET", "Vacancies"]

STEPS_TO_FORGET = 100
"""Committed steps after which earlier failures count no more."""
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 60.0
_NEXT_SPARE_S = 1.0
"""How long after one was called, so that it has joined before the next one takes time to start."""


class Vacancies:
    """Of one run.

    Args:
        most: how often a process may be started in a place without `STEPS_TO_FORGET` steps in between.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[int, float] = {}
        """Place -> when a process is to be started there."""
        self._started: set[int] = set()
        """Places of processes that are not members yet."""
        self._joined_at: dict[int, int] = {}
        """Place -> step at which its present process has joined; not of the first ones."""
        self._num_failed: Counter[int] = Counter()
        self._waits_since: dict[int, float] = {}
        """Place of a spare -> since when it waits."""

    def open(self, places: Iterable[int], now: float) -> None:
        """Processes are to be started in places that nobody has had."""
        for place in places:
            self._open[place] = now

    def waits(self, spare: int, now: float) -> None:
        """The process in the place of a spare waits to be called."""
        self._waits_since[spare] = now

    def called(self, spare: int, now: float) -> None:
        """It is called to another place, so that its own is vacant."""
        self._waits_since.pop(spare, None)
        self._num_failed[spare] = 0
        self._started.discard(spare)
        self._open[spare] = now + _NEXT_SPARE_S

    def close(self, place: int) -> None:
        """The process there ends, and none is to follow."""
        self._started.discard(place)
        self._waits_since.pop(place, None)
        self._open.pop(place, None)

    def lost(self, places: Iterable[int], step: int, now: float) -> None:
        """Members are lost, and known to have ended.

        Args:
            places: which.
            step: how many steps are committed.
            now: when.
        """
        for place in places:
            joined_at = self._joined_at.pop(place, None)
            if joined_at is not None and step - joined_at < STEPS_TO_FORGET:
                self._num_failed[place] += 1
            else:
                self._num_failed[place] = 0
            self._open[place] = now + self._delay(place)

    def left(self, place: int, now: float) -> None:
        """A member has left as it was asked to, and has ended: that is no failure of its place."""
        self._joined_at.pop(place, None)
        self._num_failed[place] = 0
        self._open[place] = now

    def ended(self, place: int, now: float) -> bool:
        """A process has ended; returns whether it was one that had not joined."""
        if place not in self._started:
            return False
        self._started.discard(place)
        if now - self._waits_since.pop(place, now) > _LONGEST_DELAY_S:
            self._num_failed[place] = 0
        self._num_failed[place] += 1
        self._open[place] = now + self._delay(place)
        return True

    def joined(self, places: Iterable[int], step: int) -> None:
        """Processes that were started here are members."""
        for place in places:
            self._started.discard(place)
            self._open.pop(place, None)
            self._joined_at[place] = step

    def reopen(self, places: Iterable[int], now: float) -> None:
        """Who starts processes there has come or gone: also where that was given up, or begun by another."""
        for place in places:
            self._started.discard(place)
            if place not in self._open:
                self._num_failed[place] = 0
                self._open[place] = now

    def may_enter(self, place: int, now: float) -> bool:
        """Whether a process that nobody was asked to start is let in there; it may have to wait as others."""
        if self._open.get(place, now) > now:
            return False
        self._open.pop(place, None)
        return True

    def expect(self, place: int) -> None:
        """The process there has not joined after all, and may yet."""
        self._joined_at.pop(place, None)
        self._started.add(place)

    def is_expected(self, place: int) -> bool:
        """Whether a process was started there that has not joined."""
        return place in self._started

    def due(self, now: float, may_start: Callable[[int], bool]) -> list[int]:
        """Places in which a process is to be started now; each is told once.

        Args:
            now: when.
            may_start: whether there is somebody who starts one in a place; else that stays vacant.
        """
        found = [place for place, at in self._open.items() if at <= now and may_start(place)]
        for place in found:
            del self._open[place]
        found = [place for place in sorted(found) if self._num_failed[place] <= self._most]
        self._started.update(found)
        return found

    def deadline(self, may_start: Callable[[int], bool]) -> float | None:
        """When to ask `due` at the latest; None if nothing is pending."""
        return min((at for place, at in self._open.items() if may_start(place)), default=None)

    def _delay(self, place: int) -> float:
        """Twice as long each time."""
        num_failed = self._num_failed[place]
        return min(_FIRST_DELAY_S * 2 ** (num_failed - 1), _LONGEST_DELAY_S) if num_failed else 0.0

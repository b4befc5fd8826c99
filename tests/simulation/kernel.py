"""Virtual time: events in their order, and how long each takes."""

from __future__ import annotations

import heapq
import random
import signal
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

__all__ = ["Kernel", "Violation", "ends_within"]

_MOST_AT_ONCE = 2000
"""Events at one moment, after which something spins."""


class Violation(AssertionError):
    """Something that must hold does not."""


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """Raise `Violation` if the code in the block runs longer in real time: a loop inside of one event."""

    def stop(*args: Any) -> NoReturn:
        raise Violation(f"one history takes more than {seconds:g} s: something spins in one event")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class Kernel:
    """The queue of what happens.

    Args:
        seed: of all delays.
        is_random: whether delays are random; else all are equal, but for `held`.
        held: number of an event -> how many seconds later than by itself it happens.
    """

    def __init__(self, seed: int, *, is_random: bool = True, held: Mapping[int, float] | None = None) -> None:
        self.now = 0.0
        self.is_calm = False
        """Whether nothing is slow any more."""
        self.num_events = 0
        self.trace: list[str] | None = None
        """What has happened, if somebody wants to read it."""
        self.before: dict[int, Callable[[], None]] = {}
        """Number of an event -> what happens just before it."""
        self._seed, self._is_random, self._held = seed, is_random, held or {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._num_pushed = self._num_at_once = 0
        self._streams: dict[str, random.Random] = {}
        self._last: dict[str, float] = {}

    def random(self, stream: str) -> random.Random:
        """A stream of random numbers that does not depend on what else happens."""
        if stream not in self._streams:
            self._streams[stream] = random.Random(self._seed * 0x9E3779B1 + zlib.crc32(stream.encode()))
        return self._streams[stream]

    def delay(self, stream: str, typical_s: float) -> float:
        """How long something takes: mostly short, now and then long."""
        if not self._is_random:
            return typical_s
        numbers = self.random(stream)
        draw = numbers.random()
        if self.is_calm or draw < 0.75:
            return typical_s * (0.2 + 1.6 * numbers.random())
        if draw < 0.93:
            return 0.02 + 0.4 * numbers.random()
        return 0.2 + 1.2 * numbers.random()

    def at(self, due: float, event: Callable[[], None]) -> None:
        """Has something happen."""
        self._num_pushed += 1
        due = max(due, self.now) + self._held.get(self._num_pushed, 0.0)
        heapq.heappush(self._queue, (due, self._num_pushed, event))

    def send(self, lane: str, delay_s: float, event: Callable[[], None]) -> None:
        """The same behind all that was sent on this lane before."""
        due = max(self.now + delay_s, self._last.get(lane, 0.0)) + self._held.get(self._num_pushed + 1, 0.0)
        self._last[lane] = due
        self._num_pushed += 1
        heapq.heappush(self._queue, (due, self._num_pushed, event))

    def step(self) -> bool:
        """The next event happens; returns False if there is none."""
        if not self._queue:
            return False
        due, _, event = heapq.heappop(self._queue)
        self._num_at_once = self._num_at_once + 1 if due <= self.now else 0
        if self._num_at_once > _MOST_AT_ONCE:
            raise Violation(f"{_MOST_AT_ONCE} events at one moment: something spins")
        self.now = max(self.now, due)
        self.num_events += 1
        if self.num_events in self.before:
            self.before.pop(self.num_events)()
        event()
        return True

    def note(self, text: Callable[[], str]) -> None:
        """A line of the history."""
        if self.trace is not None:
            self.trace.append(f"{self.now:9.4f}  {text()}")

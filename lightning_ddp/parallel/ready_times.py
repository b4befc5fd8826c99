"""When gradients become ready in a synchronised backward, as long as somebody wants to know."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["ReadyTimes", "TimedBackward"]


@dataclass(frozen=True, kw_only=True)
class TimedBackward:
    """One synchronised backward of this rank that went well; all times in seconds from its beginning."""

    step: int
    """Its number, the same on all ranks."""
    ready_s: dict[int, float]
    """By parameter, when its last gradient was there; empty if that was not asked for."""
    fill_s: dict[int, float]
    """By bucket, from its last gradient to the end of its launch; empty if that was not asked for."""
    backward_s: float
    """When all gradients were there."""
    finish_s: float
    """When all buckets were reduced."""


class ReadyTimes:
    """Reads the clock at the moments of a synchronised backward on the CPU. Does not communicate.

    Args:
        ready: the parameters whose gradients have come in the running backward; others append to it.
    """

    def __init__(self, ready: list[int]) -> None:
        self.clock: Callable[[], float] = time.perf_counter
        """Seconds from any moment on."""
        self.backwards: list[TimedBackward] = []
        """Those since `clear`, in their order."""
        self._ready = ready
        self._moments: list[float] = []
        self._fill_s: dict[int, float] = {}
        self._begin_s = 0.0
        self._end_s = 0.0

    def make_mark(self) -> Callable[[int], None]:
        """What a parameter's hook calls with its index, instead of appending it to `ready`."""
        append, note, clock = self._ready.append, self._moments.append, self.clock

        def mark(index: int) -> None:
            append(index)
            note(clock())

        return mark

    def clear(self) -> None:
        """Forgets all backwards."""
        self.backwards.clear()

    def start_backward(self) -> None:
        """The first gradient is there, or that of an output."""
        self._begin_s = self.clock()
        self._fill_s = {}

    def launched(self, index: int) -> None:
        """Bucket `index` has got its last gradient just now, and what could be launched then is."""
        if self._moments:
            self._fill_s[index] = self.clock() - self._moments[-1]

    def end_backward(self) -> None:
        """All gradients are there."""
        self._end_s = self.clock()

    def finish(self, step: int) -> None:
        """All buckets of backward `step` are reduced."""
        finish_s = self.clock()
        moments = self._moments[max(0, len(self._moments) - len(self._ready)) :]  # not of interrupted ones
        self._moments.clear()
        begin_s = min(self._begin_s, *moments[:1], self._end_s)  # a hook may come before the beginning
        self.backwards.append(
            TimedBackward(
                step=step,
                ready_s={i: moment - begin_s for i, moment in zip(self._ready, moments, strict=False)},
                fill_s=self._fill_s,
                backward_s=self._end_s - begin_s,
                finish_s=finish_s - begin_s,
            )
        )

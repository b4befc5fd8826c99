"""Agreement on the step boundary at which all ranks stop, without a collective.

A rank that is asked to stop (SIGTERM) cannot just leave: the others would wait for it in a collective. So
the server asks every rank how many boundaries it has passed. From its answer on a rank passes no further
boundary until it knows the greatest answer; then each goes on up to that boundary and stops at the next.
The answers come from a thread that never blocks, so no rank waits for one that waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_ddp.supervise.failure_record import FailureRecord
from lightning_ddp.supervise.protocol import Hold, Message, Stop, StopAfter

__all__ = ["StepBoundary", "StopAgreement"]

_SLICE_S = 0.05


class StopAgreement:
    """The server's side. Pure: told who says what and when, it says what to send to all.

    Args:
        grace_s: how long the ranks may take until all have stopped.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._expected: set[int] = set()
        self._positions: dict[int, int] = {}
        self._running: set[int] = set()
        self._deadline: float | None = None
        self._is_settled = False
        self._reason = Stop(0, is_requeue=False)

    def request(self, ranks: set[int], now: float, reason: Stop) -> list[Message]:
        """Somebody was asked to stop by a signal; later requests change nothing."""
        if self._deadline is not None or not ranks:
            return []
        self._reason = reason
        self._expected, self._running = set(ranks), set(ranks)
        self._deadline = now + self._grace_s
        return [Hold()]

    def report(self, rank: int, position: int) -> list[Message]:
        """A rank's answer: the boundaries that it has passed. Unasked it changes nothing."""
        if self._deadline is None:
            return []
        self._positions[rank] = position
        return self._settle()

    def restart(self, ranks: set[int]) -> list[Message]:
        """The run goes on with these ranks, which count from 0: if they are to stop it is at once."""
        if self._deadline is None:
            return []
        self._expected, self._running = set(ranks), set(ranks)
        self._is_settled = True
        return [StopAfter(0, self._reason.signal, self._reason.is_requeue)]

    def left(self, rank: int) -> list[Message]:
        """A rank has stopped, or had reached its end anyway."""
        self._running.discard(rank)
        self._expected.discard(rank)
        return self._settle() if self._deadline is not None and self._positions else []

    def _settle(self) -> list[Message]:
        if self._is_settled or not self._expected <= self._positions.keys():
            return []
        self._is_settled = True
        position = max(self._positions.values())
        return [StopAfter(position, self._reason.signal, self._reason.is_requeue)]

    def deadline(self) -> float | None:
        """When ranks that still run are overdue."""
        return self._deadline if self._running else None

    def overdue(self, now: float) -> FailureRecord | None:
        """The failure of not having stopped in time."""
        if self._deadline is None or now < self._deadline or not self._running:
            return None
        late, self._running = sorted(self._running), set()
        names = ", ".join(map(str, late))
        message = (
            f"all were asked to stop by a signal, but rank(s) {names} did not reach the next step boundary"
            f" within failure_grace_s={self._grace_s:g} s"
        )
        return FailureRecord(rank=late[0], message=message)


class StepBoundary:
    """A rank's side: counts the boundaries that its main thread passes, and says when to stop."""

    def __init__(self) -> None:
        self.signal = 0
        """The signal that asked for it."""
        self.is_requeue = False
        """Whether that was a cluster's, which starts the run again."""
        self._lock = threading.Lock()
        self._position = 0
        self._is_held = False
        self._target: int | None = None
        self._known = threading.Event()
        self.may_meet = False
        """Whether the boundary that comes next is one where others may join. Main thread."""
        self.is_meeting = False
        """Whether the main thread stands at the boundary where others join or leave."""
        self.has_new = False
        """Whether others join there."""
        self.is_gathering = False
        """Whether no boundary is passed until it is known where others join or leave."""
        self._meets_at: int | None = None
        self._meeting_known = threading.Event()

    def restart(self) -> None:
        """Counts from 0 again, on all ranks alike; what was agreed is forgotten. Any thread.

        The main thread passes no boundary meanwhile.
        """
        with self._lock:
            self._position, self._target, self._meets_at = 0, None, None
            self._known.clear()
            self._meeting_known.clear()
            self.is_meeting = self.is_gathering = False

    def gather(self) -> int:
        """From now on no boundary is passed until `meet_after`; returns how many were. Any thread."""
        with self._lock:
            self.is_gathering = True
            return self._position

    def meet_after(self, target: int, *, has_new: bool) -> None:
        """All ranks meet at the first boundary after the `target`-th that may be one. Any thread."""
        self._meets_at, self.has_new = target, has_new
        self._meeting_known.set()

    def hold(self) -> int:
        """From now on no boundary is passed until `release`; returns how many were. Any thread."""
        with self._lock:
            self._is_held = True
            return self._position

    def release(self, target: int, signal: int, is_requeue: bool) -> None:
        """All ranks stop at the boundary after the `target`-th, because of `signal`. Any thread."""
        self.signal, self.is_requeue = signal, is_requeue
        self._target = target
        self._known.set()

    def reached(self, check: Callable[[], None]) -> bool:
        """Called by the main thread at each boundary. Returns whether to stop there.

        Args:
            check: called while waiting for the agreement; raises if the run has failed.
        """
        with self._lock:
            if not self._is_held and not self.is_gathering:
                self._position += 1
                return False
        while self.is_gathering and not self._meeting_known.wait(_SLICE_S):
            check()
        if self._meets_at is not None and self._position >= self._meets_at and self.may_meet:
            self.is_meeting = True
            return False
        if not self._is_held:
            self._position += 1
            return False
        while not self._known.wait(_SLICE_S):
            check()
        if self._target is not None and self._position >= self._target:
            return True
        self._position += 1
        return False

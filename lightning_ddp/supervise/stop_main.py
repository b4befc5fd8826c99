"""Stops the main thread of a rank: at a step boundary that all ranks agree on, or at once by a failure.

A rank that is asked to stop (SIGTERM) cannot just leave: the others would wait for it in a collective. So
the server asks every rank how many boundaries it has passed. From its answer on a rank passes no further
boundary until it knows the greatest answer; then each goes on up to that boundary and stops at the next.
The answers come from a thread that never blocks, so no rank waits for one that waits for it.

A failure is raised in the main thread, whatever that does, exactly as if its own code had raised it. A thread
cannot raise in another one at a place of its choice. A signal can: its handler runs in the main thread
between two bytecodes, and a system call that blocks (a data loader's queue, a sleep) returns for it. Without
a free signal the interpreter's own asynchronous exception does the same, less promptly.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import types
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto

from lightning_ddp.supervise.failure_record import FailureRecord
from lightning_ddp.supervise.protocol import Hold, Message, Stop, StopAfter

__all__ = ["Alarm", "Passage", "StepBoundary", "StopAgreement"]

_SLICE_S = 0.05
_FINALISERS = {"__del__", "_callback", "remove"}
"""The latter two are what weakref.finalize and WeakValueDictionary call."""


# ---------------------------------------------------------------------- at a boundary


class StopAgreement:
    """The server's side. Pure: told who says what and when, it says what to send to all.

    Args:
        grace_s: how long the ranks may take until all have stopped.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
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
        self._running = set(ranks)
        self._deadline = now + self._grace_s
        return [Hold()]

    def report(self, rank: int, position: int) -> list[Message]:
        """A rank's answer: the boundaries that it has passed. Unasked it changes nothing."""
        if self._deadline is None:
            return []
        self._positions[rank] = position
        return self._settle()

    def restart(self, ranks: set[int]) -> list[Message]:
        """The run goes on with these ranks: if they are to stop it is at once."""
        if self._deadline is None:
            return []
        self._running = set(ranks)
        self._is_settled = True
        return [StopAfter(0, self._reason.signal, self._reason.is_requeue)]

    def end(self) -> None:
        """Wait for nobody any more: all have stopped, or are lost."""
        self._running = set()

    def left(self, rank: int) -> list[Message]:
        """A rank has stopped, or had reached its end anyway."""
        self._running.discard(rank)
        return self._settle() if self._deadline is not None and self._positions else []

    def _settle(self) -> list[Message]:
        if self._is_settled or not self._running <= self._positions.keys():
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


class Passage(Enum):
    """What a rank does at a boundary."""

    GO = auto()
    """It passes."""
    WAIT = auto()
    """It waits until the server has said at which boundary all meet, or stop."""
    MEET = auto()
    """It stays, as others join or leave here."""
    STOP = auto()
    """It stays, as all stop here."""


class StepBoundary:
    """A rank's side: counts the boundaries that its main thread passes, and says when to stop."""

    def __init__(self) -> None:
        self.signal = 0
        """The signal that asked for it."""
        self.is_requeue = False
        """Whether that was a cluster's, which starts the run again."""
        self.may_meet = False
        """Whether the boundary that comes next is one where others may join. Main thread."""
        self.is_meeting = False
        """Whether the main thread stands at the boundary where others join or leave."""
        self.has_new = False
        """Whether others join there."""
        self.is_gathering = False
        """Whether no boundary is passed until it is known where others join or leave."""
        self._lock = threading.Lock()
        self._position = self._base = 0
        self._is_held = False
        self._target = self._meets_at = 0
        self._target_known = self._meeting_known = False
        self._changed = threading.Event()

    def restart(self) -> None:
        """Counts from 0 again, on all ranks alike; what was agreed is forgotten. Any thread.

        The main thread passes no boundary meanwhile.
        """
        with self._lock:
            self._position = self._base = 0
            self._target_known = self._meeting_known = self.is_meeting = self.is_gathering = False

    def begin_fit(self) -> None:
        """A fit begins, in which boundaries have places. Main thread; all ranks have passed equally many."""
        with self._lock:
            self._base = self._position

    def place(self, number: int) -> None:
        """Says how many boundaries of the fit lie before the one that comes next. Main thread.

        Where ranks are lost some take a step again and others do not, and new ones have taken none: nobody
        can count what it has passed, and all give the same boundary the same number.
        """
        with self._lock:
            self._position = self._base + number

    def gather(self) -> int:
        """From now on no boundary is passed until `meet_after`; returns how many were. Any thread."""
        with self._lock:
            self.is_gathering = True
            return self._position

    def meet_after(self, target: int, *, has_new: bool) -> None:
        """All ranks meet at the first boundary after the `target`-th that may be one. Any thread."""
        with self._lock:
            self._meets_at, self.has_new, self._meeting_known = target, has_new, True
        self._changed.set()

    def hold(self) -> int:
        """From now on no boundary is passed until `release`; returns how many were. Any thread."""
        with self._lock:
            self._is_held = True
            return self._position

    def release(self, target: int, signal: int, is_requeue: bool) -> None:
        """All ranks stop at the boundary after the `target`-th, because of `signal`. Any thread."""
        with self._lock:
            self.signal, self.is_requeue, self._target, self._target_known = signal, is_requeue, target, True
        self._changed.set()

    def look(self) -> Passage:
        """What the main thread does at a boundary that it has come to; it looks again while it waits."""
        with self._lock:
            if self._meeting_known and self._position >= self._meets_at and self.may_meet:
                self.is_meeting = True
                return Passage.MEET
            if self._target_known and self._position >= self._target:
                return Passage.STOP
            is_asked = self._is_held or (self.is_gathering and not self._meeting_known)
            if is_asked and not self._target_known:  # once all stop nobody joins or leaves
                return Passage.WAIT
            self._position += 1
            return Passage.GO

    def reached(self, check: Callable[[], None]) -> bool:
        """Called by the main thread at each boundary. Returns whether to stop there.

        Args:
            check: called while waiting for the agreement; raises if the run has failed.
        """
        self._changed.clear()
        while (passage := self.look()) is Passage.WAIT:
            self._changed.wait(_SLICE_S)
            self._changed.clear()
            check()
        return passage is Passage.STOP


# ---------------------------------------------------------------------- at once


class Alarm:
    """One for a process; made in its main thread.

    `ring` may be repeated until the main thread has begun to unwind: a ring that finds it inside of a
    finaliser (where exceptions are swallowed), or handling this very error, does nothing.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self.is_silent = True
        """Whether a ring does nothing, as the main thread has begun to unwind or is outside of a run."""
        self.is_deferred = False
        """Whether a ring does nothing for now, as the main thread must not be interrupted half-way."""
        self.is_forced = False
        """Whether it has interrupted in spite of that, as the main thread took too long."""
        self._call: Callable[[], object] | None = None
        self._main = threading.main_thread().ident
        self._sending = threading.Lock()
        self._signal: signal.Signals | int | None = None

    def _claim_signal(self) -> signal.Signals | int | None:
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGRTMIN"):
            return None
        for number in range(signal.SIGRTMIN + 4, signal.SIGRTMAX):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._on_signal)
                return number
        return None

    def arm(self) -> None:
        """From now on a ring raises. Called where the main thread enters code that may be interrupted."""
        if self._signal is None:
            self._signal = self._claim_signal()
        self.is_silent = False

    def silence(self) -> None:
        """From now on a ring does nothing: the main thread has begun to unwind, or is outside of a run."""
        self.is_silent = True

    def ring(self, error: BaseException) -> None:
        """Has `error` raised in the main thread. Any thread."""
        self._error = error
        if self.is_silent or self.is_deferred or self._main is None:
            return
        if not self._send() and not self.is_silent:
            _raise_asynchronously(self._main, error)

    def force(self) -> None:
        """From now on a ring raises even if it was deferred. Any thread."""
        if self.is_deferred:
            self.is_forced, self.is_deferred = True, False

    def call(self, function: Callable[[], object]) -> None:
        """Has the main thread call `function` as soon as it runs Python; it must not raise. Any thread."""
        self._call = function
        self._send()

    def _send(self) -> bool:
        with self._sending:
            if self._signal is None or self._main is None:
                return False
            with suppress(ProcessLookupError):  # the main thread has ended meanwhile
                signal.pthread_kill(self._main, self._signal)
            return True

    def release(self) -> None:
        """Gives the signal back; from now on a ring does nothing. Called in the main thread."""
        self.silence()
        with self._sending:
            number, self._signal = self._signal, None
        if number is not None and signal.getsignal(number) == self._on_signal:
            signal.signal(number, signal.SIG_IGN)  # one that is on its way is dropped, and ends nothing
            signal.signal(number, signal.SIG_DFL)

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        function, self._call = self._call, None
        if function is not None:
            function()
        error = self._error
        if error is None or self.is_silent or self.is_deferred:
            return
        if not _is_handling(error) and not _is_in_finaliser(frame):
            raise error


def _is_handling(error: BaseException) -> bool:
    """Whether the code below the signal handler stands in an `except` or `finally` for `error`."""
    handled = sys.exc_info()[1]
    seen: set[int] = set()
    while handled is not None and id(handled) not in seen:
        if handled is error:
            return True
        seen.add(id(handled))
        handled = handled.__cause__ or handled.__context__
    return False


def _is_in_finaliser(frame: types.FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in _FINALISERS:
            return True
        frame = frame.f_back
    return False


def _raise_asynchronously(thread: int, error: BaseException) -> None:
    # the interpreter makes the exception itself, from a class without arguments
    kind = type(
        type(error).__name__, (type(error),), {"__init__": lambda self: self.__dict__.update(vars(error))}
    )
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))

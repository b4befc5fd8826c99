"""Interrupts the main thread of a rank when another rank has failed, as if its own code had raised.

The main thread is that which trains; Ray Train, for example, does so in another one than Python's.

A thread cannot raise in another thread at a place of its choice. A signal can: its handler runs in the main
thread between two bytecodes, and a system call that blocks (a data loader's queue, a sleep) returns for it.
Without a free signal the interpreter's own asynchronous exception does the same, less promptly.
"""

from __future__ import annotations

import ctypes
import math
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto

from lightning_ddp.supervise.failure_record import chain_of

_ABORT_EVERY_S = 0.3
_LONGEST_STEP_S = 1.0  # most seconds for which the end of the job is deferred, as for an optimizer step
_FINALIZERS = {"__del__", "_callback", "remove"}  # Python swallows what they raise; the latter are of weakref


class _Guard(Enum):
    """Setting of which exceptions may now be raised in the main thread from outside: none, all, deferred."""

    OUTSIDE = auto()  # none: it unwinds, or is outside of a run
    OPEN = auto()  # all
    DEFERRED = auto()  # none for now: it must not be interrupted halfway
    FORCED = auto()  # all, although deferred, as it took too long


class InterruptGuard:
    """Mechanism that raises another rank's failure in the main thread, which may defer or disable that.

    A thread of its own, the alarm, tries again until the exception has arrived: it does nothing while the
    main thread is in a finalizer, or handles this very error.
    """

    def __init__(self) -> None:
        self._guard = _Guard.OUTSIDE
        self._changing = threading.Lock()  # held to change the guard
        self._error: BaseException | None = None  # what is to be raised, until it has arrived
        self._aborting = threading.Lock()
        """Held while the alarm aborts, so that it aborts nothing that was made after it was over."""
        self._call: Callable[[], object] | None = None
        self._main: int | None = None
        self._sending = threading.Lock()
        self._signal: signal.Signals | int | None = None

    @property
    def is_silent(self) -> bool:
        """True while nothing may be raised in the main thread: it unwinds already, or is outside of a run."""
        return self._guard is _Guard.OUTSIDE

    @property
    def is_forced(self) -> bool:
        """True if the main thread has deferred an interruption for too long, and may be interrupted now."""
        return self._guard is _Guard.FORCED

    def arm(self, *, is_deferred: bool = False) -> None:
        """Allow other ranks' failures to be raised in the calling thread, or defer them if `is_deferred`."""
        self._main = threading.get_ident()
        if self._signal is None:
            self._signal = self._claim_signal()
        with self._changing:
            self._guard = _Guard.DEFERRED if is_deferred else _Guard.OPEN

    def silence(self) -> None:
        """Stop raising other ranks' failures in the main thread, as it unwinds or leaves a run."""
        with self._changing:
            self._guard = _Guard.OUTSIDE

    def defer(self, is_deferred: bool) -> None:
        """Defer raising other ranks' failures in the main thread, or allow it again, unless disabled."""
        with self._changing:
            if self._guard is not _Guard.OUTSIDE:
                self._guard = _Guard.DEFERRED if is_deferred else _Guard.OPEN

    def release(self) -> None:
        """Disable interruptions of the main thread and remove the signal handler. In the main thread."""
        self.silence()
        self._error = None
        with self._sending:
            number, self._signal = self._signal, None
        if number is not None and signal.getsignal(number) == self._on_signal:
            signal.signal(number, signal.SIG_IGN)  # one that is on its way is dropped, and ends nothing
            signal.signal(number, signal.SIG_DFL)

    def sound(self, error: BaseException, abort: Callable[[], None], *, is_final: bool) -> None:
        """Start a thread that raises `error` in the main thread until it reacts; an older such thread ends.

        It calls `abort` to free a main thread that is blocked in C++. If `is_final`, as the job ends, it is
        over once interruptions are disabled, and not deferred for long; else when the main thread calls
        `take`. An error is sounded once. Thread-safe.
        """
        if not (is_final and self.is_silent):
            self._error, alarm = error, (error, abort, is_final)
            threading.Thread(target=self._ring, args=alarm, daemon=True, name="failure-alarm").start()

    def take(self) -> None:
        """Stop the thread that interrupts the main thread; wait until it aborts no process group any more."""
        with self._aborting:
            self._error = None

    def call(self, function: Callable[[], object]) -> None:
        """Make the main thread call `function`, by a signal; do not wait for that. It must not raise."""
        self._call = function
        self._send()

    def _ring(self, error: BaseException, abort: Callable[[], None], is_final: bool) -> None:
        interval_s = 0.5 if is_final else 0.1
        begun_at = time.monotonic()
        abort_at = begun_at + _ABORT_EVERY_S
        while True:
            now = time.monotonic()
            with self._aborting:
                if self._error is not error or (is_final and self.is_silent):
                    return
                if now >= abort_at:  # again in a recovery, which may be about to open other connections
                    abort_at = math.inf if is_final else now + _ABORT_EVERY_S
                    abort()
            with self._changing:
                if is_final and now >= begun_at + _LONGEST_STEP_S and self._guard is _Guard.DEFERRED:
                    self._guard = _Guard.FORCED
            if self._may_interrupt() and self._main is not None and not self._send():
                _raise_asynchronously(self._main, error)
            time.sleep(min(interval_s, max(0.01, abort_at - time.monotonic())))

    def _may_interrupt(self) -> bool:
        return self._guard in (_Guard.OPEN, _Guard.FORCED)

    def _claim_signal(self) -> signal.Signals | int | None:
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGRTMIN"):
            return None
        for number in range(signal.SIGRTMIN + 4, signal.SIGRTMAX):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._on_signal)
                return number
        return None

    def _send(self) -> bool:
        with self._sending:
            if self._signal is None or self._main is None:
                return False
            with suppress(ProcessLookupError):  # the main thread has ended meanwhile
                signal.pthread_kill(self._main, self._signal)
            return True

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        function, self._call = self._call, None
        if function is not None:
            function()
        error, handled = self._error, sys.exc_info()[1]
        if error is None or not self._may_interrupt():
            return
        is_handled = handled is not None and any(link is error for link in chain_of(handled))
        if not is_handled and not _is_in_finalizer(frame):
            raise error


def _is_in_finalizer(frame: types.FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in _FINALIZERS:
            return True
        frame = frame.f_back
    return False


def _raise_asynchronously(thread: int, error: BaseException) -> None:
    # the interpreter makes the exception itself, from a class without arguments
    kind = type(
        type(error).__name__, (type(error),), {"__init__": lambda self: self.__dict__.update(vars(error))}
    )
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))

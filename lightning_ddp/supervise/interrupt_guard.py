"""Interrupts the main thread of a rank when another rank has failed.

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

__all__ = ["InterruptGuard"]

_FINALISERS = {"__del__", "_callback", "remove"}
"""The latter two are what weakref.finalize and WeakValueDictionary call."""


class _Guard(Enum):
    OUTSIDE = auto()
    """Nothing: the main thread has begun to unwind, or is outside of a run."""
    OPEN = auto()
    """What fails."""
    DEFERRED = auto()
    """Nothing for now: it must not be interrupted half-way."""
    FORCED = auto()
    """What fails, in spite of that, as it took too long."""


class InterruptGuard:
    """One for a process; made in its main thread.

    `ring` may be repeated until the main thread has begun to unwind: a ring that finds it inside of a
    finaliser (where exceptions are swallowed), or handling this very error, does nothing.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._guard = _Guard.OUTSIDE
        """What may interrupt the main thread."""
        self._changing = threading.Lock()
        """Held by who changes that, in the main thread or another one; not by who looks."""
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

    @property
    def is_silent(self) -> bool:
        """Whether a ring does nothing, as the main thread has begun to unwind or is outside of a run."""
        return self._guard is _Guard.OUTSIDE

    @property
    def is_deferred(self) -> bool:
        """Whether a ring does nothing for now, as the main thread must not be interrupted half-way."""
        return self._guard is _Guard.DEFERRED

    @property
    def is_forced(self) -> bool:
        """Whether a ring interrupts although it was deferred, as the main thread took too long."""
        return self._guard is _Guard.FORCED

    def arm(self, *, is_deferred: bool = False) -> None:
        """From now on a ring raises. Called where the main thread enters code that may be interrupted.

        Args:
            is_deferred: whether it does so once `defer` says, as the main thread must not be interrupted yet.
        """
        if self._signal is None:
            self._signal = self._claim_signal()
        with self._changing:
            self._guard = _Guard.DEFERRED if is_deferred else _Guard.OPEN

    def silence(self) -> None:
        """From now on a ring does nothing: the main thread has begun to unwind, or is outside of a run."""
        with self._changing:
            self._guard = _Guard.OUTSIDE

    def defer(self, is_deferred: bool) -> None:
        """Says whether a ring waits, as the main thread must not be interrupted half-way."""
        with self._changing:
            if self._guard is not _Guard.OUTSIDE:
                self._guard = _Guard.DEFERRED if is_deferred else _Guard.OPEN

    def ring(self, error: BaseException) -> None:
        """Has `error` raised in the main thread. Any thread."""
        self._error = error
        if self.is_silent or self.is_deferred or self._main is None:
            return
        if not self._send() and not self.is_silent:
            _raise_asynchronously(self._main, error)

    def force(self) -> None:
        """From now on a ring raises even if it was deferred. Any thread."""
        with self._changing:
            if self._guard is _Guard.DEFERRED:
                self._guard = _Guard.FORCED

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

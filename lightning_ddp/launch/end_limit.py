"""Time limit of a process that ends because of a failure, or that makes no progress."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

from lightning_ddp.launch.children import Children
from lightning_ddp.launch.last_words import LAST_WORDS_S, dump_stacks, limit_last_words, show_report
from lightning_ddp.supervise.failure_record import FailureRecord
from lightning_ddp.supervise.root_cause import ECHO_WAIT_S, EXIT_WAIT_S
from lightning_ddp.supervise.settings import SupervisionSettings
from lightning_ddp.supervise.stall_watch import REPORTS_A_TIMEOUT

__all__ = ["EndLimit"]

_LATER_S = 1.0
"""Seconds by which a launching process outlives the others, which exit by themselves."""


class EndLimit:
    """The one timer that ends this process, in C and without the GIL.

    Args:
        children: processes that this one has started; they are ended before it.
        wait_for_verdict: returns the first failure, waiting for it so many seconds at most.
    """

    def __init__(self, children: Children, wait_for_verdict: Callable[[float], FailureRecord | None]) -> None:
        self.settings = SupervisionSettings()
        self._children, self._wait_for_verdict = children, wait_for_verdict
        self._lock = threading.Lock()
        self._is_running = False
        self._ends_at: float | None = None
        self._late: threading.Timer | None = None

    @property
    def is_set(self) -> bool:
        """True once a failure has limited the time of this process."""
        return self._ends_at is not None

    def set(self, *, is_needed: bool) -> None:
        """Limit the time of this process, which has a bit more if others need its report."""
        grace_s, starts_others = self.settings.failure_grace_s, self._children.first_rank is not None
        with self._lock:
            self._ends_at = time.monotonic() + grace_s
            limit_last_words(grace_s + (2 * _LATER_S if is_needed or starts_others else 0.0))
        if starts_others and self._late is None:
            self._late = threading.Timer(grace_s + _LATER_S, self._end_late)
            self._late.daemon = True
            self._late.start()

    def seconds_left(self) -> float:
        """Return how long this process and its children have to end after a failure."""
        if self._ends_at is None:
            return self.settings.failure_grace_s
        return max(0.0, self._ends_at + _LATER_S - time.monotonic())

    def expect_progress(self, is_running: bool | None = None) -> None:
        """With `stall_timeout`, restart the timer that ends a process which holds its interpreter.

        Args:
            is_running: whether a run begins or ends; None if this process has just executed Python.
        """
        stall_s = self.settings.stall_timeout_s
        with self._lock:
            self._is_running = self._is_running if is_running is None else is_running
            if stall_s is None or self._ends_at is not None:
                return
            if is_running is False:
                faulthandler.cancel_dump_traceback_later()
            elif is_running is None and self._is_running:
                # later than the others find out, up to two reports after the limit, and ask for the stack
                grace_s = max(self.settings.failure_grace_s, 2 * stall_s / REPORTS_A_TIMEOUT)
                limit_last_words(stall_s + grace_s + _LATER_S)

    def cancel(self) -> None:
        """Stop all timers."""
        faulthandler.cancel_dump_traceback_later()
        if self._late is not None:
            self._late.cancel()

    def disown(self) -> None:
        """Make the lock anew in a process that was forked: a thread of the other one may hold it."""
        self._lock = threading.Lock()

    def _end_late(self) -> None:
        """End the children of this launching process, and then itself, as its time is over."""
        if not self._children.ending.acquire(blocking=False):  # the main thread does the same
            return
        limit_last_words(LAST_WORDS_S)
        rank, grace_s = self._children.first_rank, self.settings.failure_grace_s
        print(f"lightning_ddp: rank {rank} has not ended {grace_s:g} s after a failure:", file=sys.stderr)
        dump_stacks()
        self._children.end(0.0)
        failure = self._wait_for_verdict(ECHO_WAIT_S + EXIT_WAIT_S)
        if failure is not None:
            show_report(failure)
        sys.stderr.flush()
        os._exit(1)

"""A failure that another thread has learned of, for the threads that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lightning_ddp.comm.activity import Activity, Entry, Waiting

__all__ = ["Interrupt"]

_LOOK_AFTER_S = 5.0
"""How old a collective is when somebody looks whether the ranks wait for different ones."""


class Interrupt:
    """A failure that some other thread has learned of, for the thread that waits.

    `set` may be called from any thread; the first call wins. `check` raises in the thread that calls it.
    """

    def __init__(self) -> None:
        self.activity = Activity()
        self.deadline_s = float("inf")
        """A collective that is older while somebody waits for it has failed."""
        self.explain: Callable[[Waiting], BaseException] | None = None
        """Makes the error for a wait whose deadline has passed. May take a second."""
        self.look: Callable[[Entry], BaseException | None] | None = None
        """Makes the error of a collective where other ranks wait for another one. May take a second."""
        self.compare: Callable[[Entry], None] | None = None
        """Called before each collective; returns once all ranks are about to start the same one."""
        self.expect: Callable[..., None] | None = None
        """Has what a device has still to run looked after, as no thread waits for it: `DeviceWatch`."""
        self._looked_at: Entry | None = None
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def set(self, error: BaseException) -> bool:
        """Keeps `error` for the waiting threads. Returns whether it was the first."""
        with self._lock:
            if self._error is not None:
                return False
            self._error = error
            return True

    def clear(self) -> None:
        """Forgets the failure: the ranks that are left go on."""
        with self._lock:
            self._error = None

    @property
    def error(self) -> BaseException | None:
        """The failure, if there is one."""
        return self._error

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if self._error is not None:
            raise self._error

    def check_deadline(self, *, is_over: bool = False) -> None:
        """Raises if the calling thread has waited too long, and the control channel can tell for whom.

        Args:
            is_over: whether the backend has given up, so that it was too long in any case.
        """
        if self.explain is None:
            return
        waiting = self.activity.of_this_thread()
        if waiting is None:
            return
        waited_s = time.monotonic() - waiting.begun_at
        if is_over or waited_s >= self.deadline_s:
            raise self.explain(waiting)
        if waited_s >= _LOOK_AFTER_S and waiting.entry not in (None, self._looked_at):
            self._look_at(waiting.entry)

    def _look_at(self, entry: Entry) -> None:
        self._looked_at = entry
        error = self.look(entry) if self.look is not None else None
        if error is not None:
            raise error

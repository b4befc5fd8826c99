"""SIGTERM stops all ranks at one step boundary; a second one ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

from lightning_ddp.supervise.client import Watch
from lightning_ddp.supervise.interrupt_main import Alarm
from lightning_ddp.supervise.protocol import Stop

__all__ = ["StopSignals", "second_interrupt_ends"]

_IGNORED_WITHIN_S = 60.0
_POLL_S = 0.02


class StopSignals:
    """Handles SIGTERM for the life of this process; between two runs as if it were not there.

    The handler only asks: the answer comes over the control channel, and the main thread looks for it where
    a step begins. Made in the main thread; in another one it does nothing.

    Args:
        watch: this process's end of the control channel.
        is_ending: whether the process ends anyway, so that a signal asks for nothing new.
    """

    def __init__(self, watch: Watch, *, is_ending: Callable[[], bool]) -> None:
        self._watch = watch
        self._is_ending = is_ending
        self._num_received = 0
        self._previous: Any = None
        self.is_inherited = False
        """Whether this is a forked process, such as a worker of a data loader."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)

    def restore(self) -> None:
        """Sets the handler back to the one that was there before, unless somebody has replaced ours."""
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        if self._watch.is_resting and self._previous not in (None, signal.SIG_DFL):
            if callable(self._previous):
                self._previous(number, frame)
            return
        if self.is_inherited or self._watch.is_resting:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self._is_ending():
            return
        self._num_received += 1
        if self._num_received > 1:
            os.write(2, f"lightning_ddp: rank {self._watch.identity.rank}: second SIGTERM, ending\n".encode())
            sys.stdout.flush()
            os._exit(128 + number)
        self._watch.post(Stop(int(number), is_requeue=False))
        if callable(self._previous):
            self._previous(number, frame)


def second_interrupt_ends(alarm: Alarm, kill_children: Callable[[], None]) -> None:
    """After a first Ctrl-C: a second one ends this process and its children at once.

    Lightning ignores SIGINT while it shuts down, from a moment that nobody is told of. So a thread waits for
    that moment, and has the main thread, which alone may, set our handler.
    """

    def end(number: int, frame: types.FrameType | None) -> None:
        kill_children()
        os._exit(128 + number)

    def replace_ignoring() -> None:
        deadline = time.monotonic() + _IGNORED_WITHIN_S
        while signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            if time.monotonic() > deadline:
                return  # somebody has caught the first one and goes on
            time.sleep(_POLL_S)
        alarm.call(lambda: signal.signal(signal.SIGINT, end))

    threading.Thread(target=replace_ignoring, daemon=True, name="second-interrupt").start()

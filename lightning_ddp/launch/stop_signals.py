"""Handlers of signals: while a rank waits for others, in a run, and after Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from lightning_ddp.supervise.client import ControlClient
from lightning_ddp.supervise.interrupt_guard import InterruptGuard
from lightning_ddp.supervise.orders import Wish

LONG_S = 5.0
_IGNORED_WITHIN_S = 60.0
_POLL_S = 0.02


@contextmanager
def tell_long_wait(rank: int, what: Callable[[], str]) -> Generator[None, None, None]:
    """Print what this rank waits for, once it has been in this context for 5 s; calls `what` in a thread."""

    def tell() -> None:
        who = f"rank {rank} (host {socket.gethostname()}, pid {os.getpid()})"
        print(f"lightning_ddp: {who} has waited {LONG_S:g} s for {what()}", file=sys.stderr, flush=True)

    timer = threading.Timer(LONG_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def ended_by_signals() -> Generator[None, None, None]:
    """Let SIGTERM and Ctrl-C end this process at once in this context, also in C++.

    Does nothing outside of the main thread. Signals that are ignored, and a handler of the script for Ctrl-C,
    stay as they are.
    """
    replaced = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            before = signal.getsignal(number)
            is_scripts = number == signal.SIGINT and before is not signal.default_int_handler
            if before not in (None, signal.SIG_IGN) and not is_scripts:
                replaced[number] = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, before in replaced.items():
            signal.signal(number, before)


class StopSignals:
    """Handler of SIGTERM and `numbers` that asks for a stop; between runs it calls the script's own.

    It only reports a wish; the main thread reads the answer of the control server where a step begins. Does
    nothing outside of the main thread, or if the process ends anyway.
    """

    def __init__(
        self,
        watch: ControlClient,
        *,
        is_between: Callable[[], bool],
        is_ending: Callable[[], bool],
        request: Callable[[int], Wish],
        numbers: Iterable[int] = (),
    ) -> None:
        self._watch = watch
        self._is_between, self._is_ending, self._request = is_between, is_ending, request
        self._num_received = 0
        self._previous: dict[int, Any] = {}
        self._pid = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in {signal.SIGTERM, *numbers}:
                self._previous[number] = signal.signal(number, self._on_signal)

    def restore(self) -> None:
        """Restore the previous signal handlers, unless somebody has replaced this one."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, previous or signal.SIG_DFL)

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        previous = self._previous.get(number)
        is_inherited = os.getpid() != self._pid  # such as a worker of a data loader
        if is_inherited or self._is_between():
            if callable(previous) and not is_inherited:
                previous(number, frame)
            elif is_inherited or previous is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self._is_ending():
            return
        self._num_received += 1
        if self._num_received > 1:
            name = signal.Signals(number).name
            os.write(2, f"lightning_ddp: rank {self._watch.identity.rank}: second {name}, ending\n".encode())
            sys.stdout.flush()
            os._exit(128 + number)
        self._watch.ask(self._request(int(number)))
        if callable(previous):
            previous(number, frame)


def second_interrupt_ends(alarm: InterruptGuard, kill_children: Callable[[], None]) -> None:
    """Let a second Ctrl-C end this process and its children at once.

    Lightning ignores SIGINT while it shuts down, from a moment that it does not announce. So a thread waits
    for that, and calls the main thread, which alone may set a handler.
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

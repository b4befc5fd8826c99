"""SIGTERM, which stops all ranks at a step boundary, or makes one leave; a second one exits at once.

While a rank waits for others, which it prints in a line, SIGTERM and Ctrl-C end it at once.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any

from lightning_ddp.errors import RendezvousError
from lightning_ddp.supervise.client import ControlClient
from lightning_ddp.supervise.interrupt_guard import InterruptGuard
from lightning_ddp.supervise.orders import Wish

__all__ = ["StopSignals", "WaitSignals", "describe_rank", "second_interrupt_ends", "tell_long_wait"]

LONG_S = 5.0
_REACTS_WITHIN_S = 1.0
_IGNORED_WITHIN_S = 60.0
_POLL_S = 0.02


def describe_rank(rank: int) -> str:
    """Describe this process."""
    return f"rank {rank} (host {socket.gethostname()}, pid {os.getpid()})"


@contextmanager
def tell_long_wait(rank: int, what: Callable[[], str]) -> Generator[None, None, None]:
    """Print in a line what this rank waits for in this context, after 5 s; calls `what` in a thread."""

    def tell() -> None:
        who = describe_rank(rank)
        print(f"lightning_ddp: {who} has waited {LONG_S:g} s for {what()}", file=sys.stderr, flush=True)

    timer = threading.Timer(LONG_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class WaitSignals:
    """Context in which a rank waits for others, and SIGTERM and Ctrl-C end it at once.

    SIGTERM raises `RendezvousError` and Ctrl-C `KeyboardInterrupt`. If the main thread waits in C++, where it
    raises nothing, another thread ends the process. Does nothing outside of the main thread.

    Args:
        who: this process, for people.
        what: what it waits for, for people. Thread-safe.
        end: called with the reason in the other thread, before that ends the process.
    """

    def __init__(self, who: str, what: Callable[[], str], end: Callable[[str], None]) -> None:
        self._who, self._what, self._end = who, what, end
        self._begun_at = time.monotonic()
        self.is_on = False
        """True in the context."""
        self.previous: dict[int, Any] = {}
        """Handlers that this one replaces."""
        self._has_reacted = threading.Event()
        self._wakes: tuple[socket.socket, socket.socket] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        usual = {signal.SIGTERM: None, signal.SIGINT: signal.default_int_handler}
        for number, only in usual.items():
            previous = signal.getsignal(number)
            if previous is not signal.SIG_IGN and only in (None, previous):
                self.previous[number] = previous
                signal.signal(number, self.on_signal)
        self.is_on = True
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        if before != -1:  # somebody else has need of it: then signals wait where the main thread does
            signal.set_wakeup_fd(before)
            return
        self._wakes = (reading, writing)
        threading.Thread(target=self._look, args=(reading,), daemon=True, name="wait-signals").start()

    def __exit__(self, *error: object) -> None:
        self.is_on = False
        if self._wakes is not None:
            signal.set_wakeup_fd(-1)
            self._wakes[1].close()  # the thread closes the other one
        for number, previous in self.previous.items():
            if signal.getsignal(number) == self.on_signal:
                signal.signal(number, previous)

    def on_signal(self, number: int, frame: types.FrameType | None) -> None:
        """Raise `RendezvousError` for SIGTERM, `KeyboardInterrupt` for SIGINT."""
        self._has_reacted.set()
        if number == signal.SIGINT:
            raise KeyboardInterrupt(self._message(number))
        if callable(self.previous.get(number)):
            self.previous[number](number, frame)
        raise RendezvousError(self._message(number))

    def _message(self, number: int) -> str:
        name, waited_s = signal.Signals(number).name, time.monotonic() - self._begun_at
        return f"{self._who}: {name} after it had waited {waited_s:.0f} s for {self._what()}"

    def _look(self, reading: socket.socket) -> None:
        with reading:
            while data := reading.recv(1):
                if data[0] in self.previous and not self._has_reacted.wait(_REACTS_WITHIN_S) and self.is_on:
                    message = self._message(data[0])
                    print(f"lightning_ddp: {message}", file=sys.stderr, flush=True)
                    with suppress(BaseException):  # whatever comes, it is to end
                        self._end(message)
                    os._exit(128 + data[0])


class StopSignals:
    """Handler of SIGTERM and other signals; between two runs the script's own handler is used.

    It only reports a wish; the main thread reads the answer of the control server where a step begins. Does
    nothing outside of the main thread.

    Args:
        watch: this end of the control channel.
        is_between: returns True between two runs.
        is_ending: returns True if the process ends anyway.
        request: returns the wish of a signal.
        numbers: signals besides SIGTERM.
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
        self._wait: WaitSignals | None = None
        if threading.current_thread() is threading.main_thread():
            for number in {signal.SIGTERM, *numbers}:
                self._previous[number] = signal.signal(number, self._on_signal)
            wait = getattr(self._previous[signal.SIGTERM], "__self__", None)
            if isinstance(wait, WaitSignals):
                self._wait = wait
                self._previous[signal.SIGTERM] = wait.previous.get(signal.SIGTERM)

    def restore(self) -> None:
        """Restore the previous handlers, unless somebody has replaced this one."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, previous or signal.SIG_DFL)

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        previous = self._previous.get(number)
        is_inherited = os.getpid() != self._pid  # such as a worker of a data loader
        is_between = not is_inherited and self._is_between()
        if is_between and previous not in (None, signal.SIG_DFL):
            if callable(previous):
                previous(number, frame)
            return
        if is_inherited or is_between:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self._is_ending():
            return
        if self._wait is not None and self._wait.is_on and number == signal.SIGTERM:
            self._wait.on_signal(number, frame)
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

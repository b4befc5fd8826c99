"""The end of a process: by signals, by its time limit after a failure, and what it prints."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import TextIO

from lightning_ddp._lightning import ClusterEnvironment
from lightning_ddp.comm.teardown import flush_output
from lightning_ddp.supervise.failure_record import FailureRecord, render, write_error_file
from lightning_ddp.supervise.interrupt_guard import InterruptGuard
from lightning_ddp.supervise.settings import REPORTS_A_TIMEOUT, SupervisionSettings

LONG_S = 5.0
_IGNORED_WITHIN_S = 60.0
_POLL_S = 0.02
_LATER_S = 1.0  # seconds after the others at which a launching process kills those that it has started
_LAST_WORDS_S = 15.0  # seconds that a launching process may take to end its children and to report
_ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_WIDTH = 100
_BOLD_RED, _FAINT, _PLAIN = "\033[1;31m", "\033[2m", "\033[0m"


# ---------------------------------------------------------------------- signals


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
def waiting(
    environment: ClusterEnvironment, what: Callable[[], str], rank: int | None = None
) -> Generator[None, None, None]:
    """Return a context: after 5 s, local rank 0 prints what it waits for; SIGTERM or Ctrl-C kill the process.

    SIGTERM and Ctrl-C end it at once, also in C++, unless it is not the main thread that waits. Signals that
    are ignored, and a handler of the script for Ctrl-C, stay as they are.
    """
    with ExitStack() as stack:
        if environment.local_rank() == 0:
            rank = environment.global_rank() if rank is None else rank  # which it may not know yet
            stack.enter_context(tell_long_wait(rank, what))
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                before = signal.getsignal(number)
                is_scripts = number == signal.SIGINT and before is not signal.default_int_handler
                if before not in (None, signal.SIG_IGN) and not is_scripts:
                    stack.callback(signal.signal, number, signal.signal(number, signal.SIG_DFL))
        yield


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


# ---------------------------------------------------------------------- after a failure


class EndLimit:
    """Timer that prints all stacks and ends this process after a failure or stall, whoever holds the GIL."""

    def __init__(self) -> None:
        self.settings = SupervisionSettings()
        self._lock = threading.Lock()
        self._is_running = False
        self._ends_at: float | None = None

    @property
    def is_set(self) -> bool:
        """True once a failure has started the timer that ends this process."""
        return self._ends_at is not None

    def set(self, *, is_needed: bool) -> None:
        """Start the timer that ends this process after a failure, later if others need its report."""
        grace_s = self.settings.failure_grace_s
        with self._lock:
            self._ends_at = time.monotonic() + grace_s
            _end_after(grace_s + (2 * _LATER_S if is_needed else 0.0))

    def extend_for_children(self) -> float:
        """Extend the timer so that this process outlives its children; return the seconds that they have."""
        left_s = self.settings.failure_grace_s
        if self._ends_at is not None:
            left_s = max(0.0, self._ends_at + _LATER_S - time.monotonic())
        _end_after(left_s + _LAST_WORDS_S)
        return left_s

    def expect_progress(self, is_running: bool | None = None) -> None:
        """Restart the timer that ends this process on a stall; `is_running` enables or cancels it."""
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
                _end_after(stall_s + grace_s + _LATER_S)

    def disown(self) -> None:
        """Replace the timer's lock in a forked process, as a thread of the parent may have held it."""
        self._lock = threading.Lock()


def _end_after(limit_s: float) -> None:
    try:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.stderr)
    except (AttributeError, OSError, ValueError, RuntimeError):  # a notebook's stream has no descriptor
        faulthandler.dump_traceback_later(limit_s, exit=True, file=2)


def exit_now(code: int) -> None:
    """Flush all output and exit the process with `code`, without exit handlers."""
    flush_output()
    os._exit(code)


def show_report(record: FailureRecord, stream: TextIO | None = None) -> None:
    """Print a report of a job's failure, to standard error; on a terminal colored, in 100 columns."""
    stream = stream or sys.stderr
    if stream is None:  # a daemon may have closed it
        return
    text = render(record)
    if stream.isatty():
        text = _dressed(text, is_colored="NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb")
    print(text, file=stream, end="", flush=True)


def _dressed(text: str, *, is_colored: bool) -> str:
    """Return a report with lines wrapped, the first in red, and the frames of the traceback faint."""
    head, mark, trace = text.partition("Traceback of ")
    lines = [
        part
        for line in head.splitlines()
        for part in textwrap.wrap(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False) or [line]
    ]
    if is_colored:
        lines[0] = f"{_BOLD_RED}{lines[0]}{_PLAIN}"
        trace = re.sub(r"^(  .*)$", rf"{_FAINT}\1{_PLAIN}", trace, flags=re.MULTILINE)
    return "\n".join(lines) + "\n" + mark + trace


def fill_error_file(record: FailureRecord, *, is_cause: bool) -> None:
    """Write a failure to the file in which torchelastic's agent, if any, looks for this process's error."""
    path = os.environ.get(_ERROR_FILE_VARIABLE)
    if path:
        with suppress(OSError):  # the agent then reports the exit code alone
            write_error_file(path, record, is_cause=is_cause)

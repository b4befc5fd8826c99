"""What a process says on the terminal: for what it has been waiting, and the report of a failure."""

from __future__ import annotations

import os
import re
import socket
import sys
import textwrap
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO

from lightning_ddp.supervise.failure_record import FailureRecord
from lightning_ddp.supervise.failure_report import render

__all__ = ["describe_rank", "show_report", "tell_long_wait"]

LONG_S = 5.0
_WIDTH = 100
_BOLD_RED, _FAINT, _PLAIN = "\033[1;31m", "\033[2m", "\033[0m"


def describe_rank(rank: int) -> str:
    """This process, for people."""
    return f"rank {rank} (host {socket.gethostname()}, pid {os.getpid()})"


@contextmanager
def tell_long_wait(rank: int, what: Callable[[], str]) -> Generator[None, None, None]:
    """Says in one line for what this rank waits, once that has taken 5 s.

    Args:
        rank: of this process.
        what: says it; called in a thread.
    """

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


def show_report(record: FailureRecord, stream: TextIO | None = None) -> None:
    """Prints the report of a failure; on a terminal in colours and within 100 columns.

    Args:
        record: the failure.
        stream: where to; None for standard error.
    """
    stream = stream or sys.stderr
    text = render(record)
    if stream.isatty():
        text = _dressed(text, is_coloured="NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb")
    print(text, file=stream, end="", flush=True)


def _dressed(text: str, *, is_coloured: bool) -> str:
    """The lines before the traceback wrapped, the first one in red, the frames of a traceback faint."""
    head, mark, trace = text.partition("Traceback of ")
    lines = [
        part
        for line in head.splitlines()
        for part in textwrap.wrap(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False) or [line]
    ]
    if is_coloured:
        lines[0] = f"{_BOLD_RED}{lines[0]}{_PLAIN}"
        trace = re.sub(r"^(  .*)$", rf"{_FAINT}\1{_PLAIN}", trace, flags=re.MULTILINE)
    return "\n".join(lines) + "\n" + mark + trace

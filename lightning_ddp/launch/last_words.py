"""Output of a process that ends: the report of a failure, and all stacks if it does not end in time."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import textwrap
from contextlib import suppress
from typing import Any, TextIO

from lightning_ddp.supervise.failure_record import FailureRecord, render, write_error_file

__all__ = ["LAST_WORDS_S", "dump_stacks", "exit_now", "fill_error_file", "limit_last_words", "show_report"]

LAST_WORDS_S = 15.0
"""Seconds that a launching process may take to end its children and to report."""
_ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_WIDTH = 100
_BOLD_RED, _FAINT, _PLAIN = "\033[1;31m", "\033[2m", "\033[0m"


def limit_last_words(limit_s: float) -> None:
    """Print all stacks and end this process after `limit_s` seconds, in C, without the GIL."""
    faulthandler.dump_traceback_later(limit_s, exit=True, file=_standard_error())


def dump_stacks() -> None:
    """Print the stacks of all threads to standard error."""
    faulthandler.dump_traceback(_standard_error(), all_threads=True)


def exit_now(code: int) -> None:
    """Exit without handlers, with all output written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _standard_error() -> Any:
    """Return a standard error to which C can write."""
    for stream in (sys.stderr, sys.__stderr__):
        with suppress(AttributeError, OSError, ValueError):
            stream.fileno()  # type: ignore[union-attr]
            return stream
    return 2


def show_report(record: FailureRecord, stream: TextIO | None = None) -> None:
    """Print the report of a failure; on a terminal in colors and within 100 columns.

    Args:
        stream: standard error if None.
    """
    stream = stream or sys.stderr
    text = render(record)
    if stream.isatty():
        text = _dressed(text, is_colored="NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb")
    print(text, file=stream, end="", flush=True)


def _dressed(text: str, *, is_colored: bool) -> str:
    """Wrap the lines before the traceback, the first in red, and make frames of the traceback faint."""
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
    """Write the file in which torchelastic's agent, if it started this process, looks for its error."""
    path = os.environ.get(_ERROR_FILE_VARIABLE)
    if path:
        with suppress(OSError):  # the agent then reports the exit code alone
            write_error_file(path, record, is_cause=is_cause)

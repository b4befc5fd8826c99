"""Tools behind `python -m lightning_ddp`, with `ToolError` and the handling of SIGTERM.

Only the command line imports this room. Its page is README.md beside this file.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
from collections.abc import Generator
from contextlib import contextmanager

from lightning_ddp.errors import LightningDDPError


class ToolError(LightningDDPError, RuntimeError):
    """A tool could not do its task; the message is printed without a traceback."""


class _Handler:
    """Handler of SIGTERM that raises an exception for the first signal and ignores signals after it."""

    def __init__(self) -> None:
        self.num_holding = 0
        self._has_come = False

    def __call__(self, number: int, frame: types.FrameType | None) -> None:
        self._has_come = True
        self.raise_if_come()

    def raise_if_come(self) -> None:
        if not self._has_come or self.num_holding > 0:
            return
        self._has_come = False
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(2, b"ended by SIGTERM\n")  # the main thread may be inside a print
        sys.exit(128 + signal.SIGTERM)


@contextmanager
def unwinds_at_sigterm() -> Generator[None, None, None]:
    """Raise `SystemExit` (status 143) in the main thread at the first SIGTERM in this block.

    Without effect if entered by another thread, as only the main thread may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _Handler())
    try:
        yield
    finally:  # None is a handler that was not set from Python
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


def _ours() -> _Handler | None:
    handler = signal.getsignal(signal.SIGTERM)
    return handler if isinstance(handler, _Handler) else None


@contextmanager
def held_back() -> Generator[None, None, None]:
    """Defer SIGTERM to the end of the block, which starts something that must be cleaned up."""
    handler = _ours() or _Handler()
    handler.num_holding += 1
    try:
        yield
    finally:
        handler.num_holding -= 1
    handler.raise_if_come()


@contextmanager
def ends_at_sigterm() -> Generator[None, None, None]:
    """Let SIGTERM terminate the process in this block: for waits in C++, where no handler runs."""
    handler = _ours()
    if handler is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)

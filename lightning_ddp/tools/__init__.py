"""Tools behind `python -m lightning_ddp`, with `ToolError` and the handling of SIGTERM.

Only the command line imports this room. Its page is README.md beside this file.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

from lightning_ddp.errors import LightningDDPError


class ToolError(LightningDDPError, RuntimeError):
    """Error of a tool that could not do its task; its message is printed without a traceback."""


class _Handler:
    """Handler that raises `SystemExit` at the first SIGTERM, or after `held_back`, and ignores later ones."""

    is_held_back = False
    has_come = False

    def __call__(self, *_: object) -> None:
        self.has_come = True
        if self.is_held_back:
            return
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
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


@contextmanager
def held_back() -> Generator[None, None, None]:
    """Defer the `SystemExit` of `unwinds_at_sigterm` to the end of this block; do nothing outside of that."""
    handler = signal.getsignal(signal.SIGTERM)
    if not isinstance(handler, _Handler):
        yield
        return
    handler.is_held_back = True
    try:
        yield
    finally:
        handler.is_held_back = False
    if handler.has_come:
        handler()

"""Sockets of the control channel stay out of forked processes.

A DataLoader's worker that kept its rank's connection open would hide the rank's death: the connection would
not close with it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["close_in_forked_child"]

_closers: list[weakref.WeakMethod[Callable[[], Any]]] = []


def close_in_forked_child(close: Callable[[], Any]) -> None:
    """Has a bound method called in every process that is forked from this one, while its object lives."""
    if not _closers:
        os.register_at_fork(after_in_child=_close_all)
    _closers.append(weakref.WeakMethod(close))


def _close_all() -> None:
    for reference in _closers:
        close = reference()
        if close is not None:
            close()

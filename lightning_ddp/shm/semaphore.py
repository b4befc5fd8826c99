"""POSIX semaphores in memory that processes share: how ranks of one host wake each other.

A post makes what was written before it visible to whoever waits for it, on every processor. A wait sleeps in
the kernel, without the GIL.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

__all__ = ["SEMAPHORE_BYTES", "are_semaphores_available", "create", "post", "try_wait", "wait"]

SEMAPHORE_BYTES = 64
"""Room for one: more than a `sem_t`, and a cache line of its own."""

_NS_PER_S = 1_000_000_000
_NAMES = ("sem_init", "sem_post", "sem_trywait", "sem_clockwait")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _load() -> tuple[Any, Any] | None:
    """The C library, once keeping the GIL during a call and once not; None where it lacks a function."""
    if sys.platform != "linux":
        return None
    keeping, releasing = ctypes.PyDLL(None), ctypes.CDLL(None)
    if not all(hasattr(keeping, name) for name in _NAMES):
        return None
    for library in (keeping, releasing):
        library.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        library.sem_post.argtypes = library.sem_trywait.argtypes = (ctypes.c_void_p,)
        library.sem_clockwait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    return keeping, releasing


_libraries = _load()


def are_semaphores_available() -> bool:
    """Whether the C library has process-shared semaphores and waits by the monotonic clock."""
    return _libraries is not None


def _c(*, releases_gil: bool = False) -> Any:
    assert _libraries is not None  # callers have asked are_semaphores_available()
    return _libraries[releases_gil]


def create(address: int) -> None:
    """Makes a semaphore of count 0 at an address of shared memory, for all processes that map it."""
    if _c().sem_init(address, 1, 0):
        raise OSError("sem_init failed")


def post(address: int) -> None:
    """Adds one to the count and wakes who waits. Never blocks."""
    _c().sem_post(address)


def try_wait(address: int) -> bool:
    """Takes one off the count if it is above zero."""
    return bool(_c().sem_trywait(address) == 0)


def wait(address: int, timeout_s: float) -> bool:
    """Sleeps until the count is above zero, and takes one off; False if that took longer than `timeout_s`.

    May return False sooner, when a signal comes.
    """
    deadline_ns = time.monotonic_ns() + int(timeout_s * _NS_PER_S)
    until = _Timespec(deadline_ns // _NS_PER_S, deadline_ns % _NS_PER_S)
    found = _c(releases_gil=True).sem_clockwait(address, time.CLOCK_MONOTONIC, ctypes.byref(until))
    return bool(found == 0)

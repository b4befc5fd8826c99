"""Exit of a process whose groups have threads of gloo, without an abort by C++.

* Since torch 2.13 a thread of C++ that releases a tensor takes the GIL to update its Python object. gloo's
  threads release the tensors of a collective after its waits have returned. If the interpreter is being
  finalized by then, the thread is terminated inside a destructor, which aborts the process (`terminate called
  without an active exception`, SIGABRT). So the interpreter waits for these threads before it exits.
* If ranks call different collectives, a thread of gloo detects that sizes differ. Nothing catches its
  exception: C++ calls the terminate handler, which aborts the process without a message about the cause.
  A handler here calls Python first, in that thread, while other threads continue.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch

from lightning_ddp._torch import use_count

_MOST_NOTED = 32
_LONGEST_WAIT_S = 1.0
_PAUSE_S = 0.001

_sent: deque[weakref.ref[torch.Tensor]] = deque(maxlen=_MOST_NOTED)
"""Tensors of recent collectives of the process, also of destroyed groups; awaited at exit."""


def note_sent(tensors: Iterable[torch.Tensor]) -> None:
    """Store weak references to the tensors of a collective that is about to start, to await them at exit.

    Tensors to which C++ has further references, such as those with views, are left out, because these
    references may not be gloo's.

    Thread-safe.
    """
    for tensor in tensors:
        if use_count(tensor) == 1:
            _sent.append(weakref.ref(tensor))


def are_let_go() -> bool:
    """Return True if C++, such as a thread of gloo, has no reference to the recorded tensors any more."""
    alive = (ref() for ref in list(_sent))
    return all(tensor is None or use_count(tensor) == 1 for tensor in alive)


@atexit.register
def _part() -> None:
    """Wait at exit until gloo's threads have released all tensors and the GIL."""
    deadline = time.monotonic() + _LONGEST_WAIT_S
    num_idle = 0
    while _sent and num_idle < 2 and time.monotonic() < deadline:
        num_idle = num_idle + 1 if are_let_go() and not _is_another_runnable() else 0
        time.sleep(_PAUSE_S)  # releases the GIL: a thread that waits for it becomes runnable, or ends


def _is_another_runnable() -> bool:
    """Return True if another thread runs or waits for a processor; False if unknown."""
    for status in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            state = status.read_bytes().rpartition(b")")[2].split()[0]
            if state == b"R" and int(status.parent.name) != threading.get_native_id():
                return True
    return False


# ---------------------------------------------------------------------- gloo's own end of the process


class _Handler:
    """C++ terminate handler of this process: calls a function if gloo failed, then the previous handler.

    Raises OSError or AttributeError if the C++ library is not GNU's.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libstdc++.so.6")
        self._type_info = library["__cxa_current_exception_type"]
        self._set = library["_ZSt13set_terminatePFvvE"]
        self._type_info.restype = self._set.restype = ctypes.c_void_p
        self._set.argtypes = [ctypes.c_void_p]
        self.call: Callable[[], None] | None = None
        self.has_given_up = threading.Event()
        self._own = ctypes.CFUNCTYPE(None)(self._on_terminate)
        self._before = ctypes.CFUNCTYPE(None)(self._set(ctypes.cast(self._own, ctypes.c_void_p)))

    def _on_terminate(self) -> None:
        if self.call is not None and b"gloo" in self._type_of_exception():
            self.has_given_up.set()
            with suppress(BaseException):  # the process is aborted in any case
                self.call()
        self._before()

    def _type_of_exception(self) -> bytes:
        """Return the mangled name of the uncaught C++ exception."""
        info = self._type_info()
        if not info:
            return b""
        return ctypes.c_char_p.from_address(info + ctypes.sizeof(ctypes.c_void_p)).value or b""

    def remove(self) -> None:
        self._set(ctypes.cast(self._before, ctypes.c_void_p))


@functools.cache
def _handler() -> _Handler | None:
    """Install the C++ terminate handler, once, and return it; None if the C++ library is not GNU's."""
    try:
        return _Handler()
    except (OSError, AttributeError):
        return None


def before_gloo_ends_the_process(call: Callable[[], None] | None) -> None:
    """Register `call` to run in gloo's thread before an error there aborts the process; None removes it.

    The process is aborted when `call` returns, so it may wait until the main thread has exited.
    """
    handler = _handler()
    if handler is not None:
        handler.call = call


@atexit.register
def _leave() -> None:
    """End the process at exit if a thread of gloo never returns, as its groups would wait forever."""
    handler = _handler() if _handler.cache_info().currsize else None
    if handler is None:
        return
    if handler.has_given_up.is_set():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    handler.remove()  # a finalized interpreter must not be called from a thread of C++

"""C++ terminate handler: tells the reason when gloo is about to end this process.

Where ranks call different collectives, gloo finds in a thread of its own that sizes do not fit. Its exception
has nowhere to go there: C++ calls the terminate handler, which aborts the process without a word about who
called what. This handler has Python called first, in that thread, while the others go on.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

__all__ = ["before_gloo_ends_the_process"]

_has_given_up = threading.Event()
_call: Callable[[], None] | None = None
_type_info: Any = None
_set: Any = None
_handlers: tuple[Any, Any] | None = None
"""This one and the one before."""


def before_gloo_ends_the_process(call: Callable[[], None] | None) -> None:
    """Has `call` called in gloo's thread before it ends this process for an error; None for nothing.

    The process is aborted when it returns, so it may wait until the main thread has ended the process. Does
    nothing where C++ has another library than GNU's.
    """
    global _call
    _call = call
    if call is not None and _handlers is None and sys.platform == "linux":
        with suppress(OSError, AttributeError):
            _install()


def _install() -> None:
    global _type_info, _set, _handlers
    library = ctypes.CDLL("libstdc++.so.6")
    _type_info, _set = library["__cxa_current_exception_type"], library["_ZSt13set_terminatePFvvE"]
    _type_info.restype = _set.restype = ctypes.c_void_p
    _set.argtypes = [ctypes.c_void_p]
    handler = ctypes.CFUNCTYPE(None)(_on_terminate)
    _handlers = handler, ctypes.CFUNCTYPE(None)(_set(ctypes.cast(handler, ctypes.c_void_p)))


def _on_terminate() -> None:
    if _call is not None and b"gloo" in _type_of_exception():
        _has_given_up.set()
        with suppress(BaseException):  # whatever it is, the process ends now
            _call()
    assert _handlers is not None
    _handlers[1]()


def _type_of_exception() -> bytes:
    """The mangled name of the C++ exception that nobody has caught."""
    info = _type_info()
    if not info:
        return b""
    return ctypes.c_char_p.from_address(info + ctypes.sizeof(ctypes.c_void_p)).value or b""


@atexit.register
def _leave() -> None:
    """Ends a process in which a thread of gloo never returns: its groups would wait for it for ever."""
    if _has_given_up.is_set():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    if _handlers is not None:  # an interpreter that ends calls no Python in a thread of C++
        _set(ctypes.cast(_handlers[1], ctypes.c_void_p))

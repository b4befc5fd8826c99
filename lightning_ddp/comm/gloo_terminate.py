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

__all__ = ["before_gloo_ends_the_process"]


class _Handler:
    """The terminate handler that this process has from now on; before the process ends, the one before it.

    Raises:
        OSError, AttributeError: C++ has another library than GNU's.
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
            with suppress(BaseException):  # whatever it is, the process ends now
                self.call()
        self._before()

    def _type_of_exception(self) -> bytes:
        """The mangled name of the C++ exception that nobody has caught."""
        info = self._type_info()
        if not info:
            return b""
        return ctypes.c_char_p.from_address(info + ctypes.sizeof(ctypes.c_void_p)).value or b""

    def remove(self) -> None:
        """Puts the one before in its place."""
        self._set(ctypes.cast(self._before, ctypes.c_void_p))


_handler: _Handler | None = None
"""Of the process, as the terminate handler is: C++ has one."""


def before_gloo_ends_the_process(call: Callable[[], None] | None) -> None:
    """Has `call` called in gloo's thread before it ends this process for an error; None for nothing.

    The process is aborted when it returns, so it may wait until the main thread has ended the process. Does
    nothing where C++ has another library than GNU's.
    """
    global _handler
    if call is not None and _handler is None and sys.platform == "linux":
        with suppress(OSError, AttributeError):
            _handler = _Handler()
    if _handler is not None:
        _handler.call = call


@atexit.register
def _leave() -> None:
    """Ends a process in which a thread of gloo never returns: its groups would wait for it for ever."""
    if _handler is None:
        return
    if _handler.has_given_up.is_set():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    _handler.remove()  # an interpreter that ends calls no Python in a thread of C++

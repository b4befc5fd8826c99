"""Keep gloo threads from outliving the interpreter (torch >= 2.13), which would abort the process.

Since torch 2.13 a tensor that C++ lets go of tells its Python object, for which the thread has to take the
GIL. gloo's threads drop the tensors of a collective after those who wait for it have gone on. If the
interpreter is being finalised by then, the thread is ended inside of a destructor, and that ends the process
(`terminate called without an active exception`, SIGABRT). So the interpreter waits for them before.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable

import torch

from lightning_ddp._torch import use_count

__all__ = ["are_let_go", "note_sent", "wait_until_let_go"]

_MOST_NOTED = 32
_LONGEST_WAIT_S = 1.0
_PAUSE_S = 0.001

_sent: deque[weakref.ref[torch.Tensor]] = deque(maxlen=_MOST_NOTED)
"""Of the interpreter, which waits for tensors also of groups that are gone."""


def note_sent(tensors: Iterable[torch.Tensor]) -> None:
    """Remembers, weakly, what a collective is about to use. Called by any thread; does not communicate.

    Tensors that C++ holds already, such as those with views, are left out: it cannot be told who does.
    """
    for tensor in tensors:
        if use_count(tensor) == 1:
            _sent.append(weakref.ref(tensor))


def are_let_go() -> bool:
    """Whether only Python holds what was noted last."""
    alive = (ref() for ref in list(_sent))
    return all(tensor is None or use_count(tensor) == 1 for tensor in alive)


def wait_until_let_go(longest_s: float = _LONGEST_WAIT_S) -> bool:
    """Waits until `are_let_go`, or for `longest_s` seconds; releases the GIL meanwhile. Returns whether."""
    deadline = time.monotonic() + longest_s
    while not are_let_go():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


@atexit.register
def _part() -> None:
    """Waits until no thread is about to let go; one that has just done it wants the GIL once more."""
    deadline = time.monotonic() + _LONGEST_WAIT_S
    num_idle = 0
    while _sent and num_idle < 2 and time.monotonic() < deadline:
        num_idle = num_idle + 1 if are_let_go() and not _is_another_runnable() else 0
        time.sleep(_PAUSE_S)  # without the GIL: who waits for it is runnable then, or done


def _is_another_runnable() -> bool:
    """Whether a thread beside this one runs, or waits for a processor; False where that cannot be known."""
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return False
    states = (_state_of(thread) for thread in threads if int(thread) != threading.get_native_id())
    return "R" in states


def _state_of(thread: str) -> str | None:
    try:
        with open(f"/proc/self/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return None

"""What the threads of a backend still hold when the interpreter ends.

Since torch 2.13 a tensor that C++ lets go of tells its Python object, for which the thread has to take the
GIL. gloo's threads drop the tensors of a collective after those who wait for it have gone on. If the
interpreter is being finalised by then, the thread is ended inside of a destructor, and that ends the process
(`terminate called without an active exception`, SIGABRT). So the interpreter waits for them before.
"""

from __future__ import annotations

import atexit
import operator
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable

import torch

__all__ = ["are_let_go", "note_sent", "wait_until_let_go"]

_MOST_NOTED = 32
_LONGEST_WAIT_S = 0.5
_PAUSE_S = 0.001

_use_count: Callable[[torch.Tensor], int] = operator.methodcaller("_use_count")
"""How many hold a tensor in C++; 1 is its Python object."""

_sent: deque[weakref.ref[torch.Tensor]] = deque(maxlen=_MOST_NOTED)


def note_sent(tensors: Iterable[torch.Tensor]) -> None:
    """Remembers, weakly, what a collective is about to use. Called by any thread; does not communicate.

    Tensors that C++ holds already, such as those with views, are left out: it cannot be told who does.
    """
    for tensor in tensors:
        if _use_count(tensor) == 1:
            _sent.append(weakref.ref(tensor))


def are_let_go() -> bool:
    """Whether only Python holds what was noted last."""
    alive = (ref() for ref in list(_sent))
    return all(tensor is None or _use_count(tensor) == 1 for tensor in alive)


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
    if _sent:
        wait_until_let_go()
        time.sleep(_PAUSE_S)  # who has just let go wants the GIL once more

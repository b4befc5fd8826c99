"""Process-group teardown: frees blocked threads, refuses groups of lost ranks, and lets gloo's threads end.

* A thread that is blocked inside of a collective of torch, where no Python runs, is freed. NCCL communicators
  are aborted, which ends what they have on the device; from then on NCCL's watchdog does not look at them any
  more, and does not end the process because of them. gloo has nothing of the kind (its `abort` leaves waiting
  threads waiting), so the connections that the group has opened are shut down: to gloo every peer is gone,
  and its waits fail. Where a group is being made, and gloo waits for a peer to connect that never will, it is
  connected to from here, and left again.
* Code of the user's may keep a group of lost ranks, which torch forgets and does not forbid: its collectives
  would wait for those. Who uses one is told which, and what to do.
* Since torch 2.13 a tensor that C++ lets go of tells its Python object, for which the thread has to take the
  GIL. gloo's threads drop the tensors of a collective after those who wait for it have gone on. If the
  interpreter is being finalised by then, the thread is ended inside of a destructor, and that ends the
  process (`terminate called without an active exception`, SIGABRT). So the interpreter waits for them before.
* Where ranks call different collectives, gloo finds in a thread of its own that sizes do not fit. Its
  exception has nowhere to go there: C++ calls the terminate handler, which aborts the process without a word
  about who called what. A handler here has Python called first, in that thread, while the others go on.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp._torch import known_groups, name_of_group, refuse_collectives, use_count
from lightning_ddp.errors import ProcessGroupError

# ---------------------------------------------------------------------- abort

_DESCRIPTORS = Path("/proc/self/fd")
_KNOCK_WITHIN_S = 1.0
_LOOK_EVERY_S = 0.01
_remembered: dict[int, str] = {}
"""Registry of the sockets of groups: who aborts knows no group, and the groups do not tell their sockets."""
_making: list[tuple[dict[int, str], int]] = []
"""Registry of groups that are being made: the sockets that there were before, how many peers may connect."""
_aborts: weakref.WeakKeyDictionary[Any, threading.Event] = weakref.WeakKeyDictionary()
"""Registry of aborts: group -> set once it is aborted."""


@contextmanager
def remember_connections(num_peers: int = 0) -> Generator[None, None, None]:
    """Remembers the sockets that are opened in here, so that `abort_groups` can shut them down.

    Also while they are opened: a group is not made before all ranks have come, which they may never do.

    Args:
        num_peers: for how many gloo may wait to connect, if it does.
    """
    making = _sockets(), num_peers
    _making.append(making)
    try:
        yield
    finally:
        _making.remove(making)
    _remembered.update(_opened_since(making[0]))


def abort_groups() -> None:
    """Makes every collective of this process fail, now and from now on. Any thread; does not communicate.

    Returns at once. Each group has a thread: an abort frees memory, for which CUDA waits for all kernels of
    the device, also for those of groups that would be aborted only after it.
    """
    for group in list(known_groups()):
        is_over = threading.Event()
        if _aborts.setdefault(group, is_over) is is_over:
            _start("abort", _abort, group, is_over)
    present = _sockets()
    ours = {descriptor: name for descriptor, name in _remembered.items() if present.get(descriptor) == name}
    num_peers = dict.fromkeys(ours, 0)
    for before, number in list(_making):
        num_peers.update(dict.fromkeys(_opened_since(before), number))
    for descriptor, number in num_peers.items():
        with suppress(OSError), _duplicate(descriptor) as connection:
            # a listening socket stays: gloo ends the process when it cannot accept
            if not _is_listener(connection):
                connection.shutdown(socket.SHUT_RDWR)
            elif number:
                _start("knock", _knock, connection.getsockname(), number)


def wait_for_aborts() -> None:
    """Returns once all that `abort_groups` has begun is over, which may take as long as a kernel runs."""
    for is_over in list(_aborts.values()):
        is_over.wait()


def _start(what: str, target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, daemon=True, name=f"lightning_ddp {what}").start()


def _abort(group: Any, is_over: threading.Event) -> None:
    try:
        with suppress(RuntimeError):  # a backend without abort
            group.abort()
    finally:
        is_over.set()


def _knock(address: Any, num_peers: int) -> None:
    """Connects to a socket at which gloo listens as each of its peers would, and leaves."""
    for number in range(num_peers):  # which a peer says first
        with suppress(OSError), socket.create_connection(address[:2], _KNOCK_WITHIN_S) as connection:
            connection.sendall(number.to_bytes(8, sys.byteorder))


def _opened_since(before: dict[int, str]) -> dict[int, str]:
    """The connections that are new, but those that a server here has accepted, such as the store's.

    Pairs of sockets within this host are of other threads, which start processes meanwhile.
    """
    opened = {descriptor: name for descriptor, name in _sockets().items() if before.get(descriptor) != name}
    served = set()
    for descriptor, name in before.items() if opened else ():
        if _remembered.get(descriptor) != name:  # else a group accepts its peers there
            with suppress(OSError), _duplicate(descriptor) as connection:
                if _is_listener(connection):
                    served.add(_port_of(connection))
    for descriptor in list(opened):
        with suppress(OSError), _duplicate(descriptor) as connection:
            if (port := _port_of(connection)) in served or port < 0:
                del opened[descriptor]
    return opened


def _duplicate(descriptor: int) -> socket.socket:
    return socket.socket(fileno=os.dup(descriptor))


def _is_listener(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _port_of(connection: socket.socket) -> int:
    """The local port; -1 where there is none. An accepted connection has that of the listener."""
    name = connection.getsockname()
    is_of_network = connection.family in (socket.AF_INET, socket.AF_INET6)
    return int(name[1]) if is_of_network else -1


def _sockets() -> dict[int, str]:
    """Descriptor -> name with the inode, of all sockets of this process; empty where there is no /proc."""
    found = {}
    with suppress(OSError):
        for entry in _DESCRIPTORS.iterdir():
            with suppress(OSError):  # the descriptor of this very listing is closed meanwhile
                name = os.readlink(entry)
                if name.startswith("socket:"):
                    found[int(entry.name)] = name
    return found


# ---------------------------------------------------------------------- groups of lost ranks

_retired: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Registry of groups of lost ranks, with their descriptions."""
_COMMUNICATE = tuple(os.path.dirname(path) + os.sep for path in (str(dist.__file__), __file__))


def retire_groups(beside: Iterable[Any] = ()) -> None:
    """Has the collectives of all groups of a run fail at once, and threads destroy them. Called before that.

    gloo's destructor waits for the threads of the group, and one of them may wait for the rest of a message
    whose sender was lost: gloo wakes those that wait for one which has not begun, and no others before the
    timeout of the group is over.

    Args:
        beside: groups that torch does not know of.
    """
    known = list(known_groups())
    for group in known:
        ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        what = "the default one" if group is dist.group.WORLD else f"{group.group_desc!r}"
        _retired[group] = f"process group {name_of_group(group)} ({what}, of ranks {ranks})"
        refuse_collectives(group)
    for group in {*known, *beside}:
        _start("let go", _let_go_last, [group])


def _let_go_last(held: list[Any]) -> None:
    while sys.getrefcount(held[0]) > 2:  # the list's, and that of the question
        time.sleep(_LOOK_EVERY_S)
    held.clear()


def explain_retired(error: BaseException) -> ProcessGroupError | None:
    """What to raise in the place of an error that comes of the use of such a group; None for another one."""
    for frame, _ in traceback.walk_tb(error.__traceback__) if _retired else ():
        if not frame.f_code.co_filename.startswith(_COMMUNICATE):
            continue
        for value in frame.f_locals.values():
            group = getattr(value, "process_group", value)  # of a `Group`
            if isinstance(group, dist.ProcessGroup) and group in _retired:
                return ProcessGroupError(
                    f"{_retired[group]} was created before ranks were lost and cannot be used any more. Do"
                    " not keep torch.distributed.group.WORLD, but look it up where you use it; and create"
                    " groups of torch.distributed.new_group again in on_world_changed(), which all"
                    " remaining ranks call."
                )
    return None


# ---------------------------------------------------------------------- the interpreter's exit

_MOST_NOTED = 32
_LONGEST_WAIT_S = 1.0
_PAUSE_S = 0.001

_sent: deque[weakref.ref[torch.Tensor]] = deque(maxlen=_MOST_NOTED)
"""Of the process, and of no run: the interpreter waits for tensors also of groups that are gone."""


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


# ---------------------------------------------------------------------- gloo's own end of the process


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


@functools.cache
def _handler() -> _Handler | None:
    """That of the process, as C++ has one; None where C++ has another library than GNU's."""
    if sys.platform != "linux":
        return None
    try:
        return _Handler()
    except (OSError, AttributeError):
        return None


def before_gloo_ends_the_process(call: Callable[[], None] | None) -> None:
    """Has `call` called in gloo's thread before it ends this process for an error; None for nothing.

    The process is aborted when it returns, so it may wait until the main thread has ended the process.
    """
    handler = _handler()
    if handler is not None:
        handler.call = call


@atexit.register
def _leave() -> None:
    """Ends a process in which a thread of gloo never returns: its groups would wait for it for ever."""
    handler = _handler() if _handler.cache_info().currsize else None
    if handler is None:
        return
    if handler.has_given_up.is_set():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    handler.remove()  # an interpreter that ends calls no Python in a thread of C++

"""End of process groups and of their process: aborts, groups of lost ranks, exit without an abort by C++.

A thread that is blocked inside a collective of torch runs no Python. NCCL communicators are aborted, which
stops their kernels; from then on NCCL's watchdog ignores them. gloo's own abort leaves waiting threads
blocked, so its connections are shut down: gloo sees every peer as lost. While gloo makes a group it may wait
for a lost peer to connect; then this process connects in its place, and closes the connection.

Threads of gloo can end the process:

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
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp._torch import REFUSAL, forget_groups, known_groups, refuse_collectives, use_count
from lightning_ddp.errors import ProcessGroupError

_DESCRIPTORS = Path("/proc/self/fd")
_KNOCK_WITHIN_S = 1.0
_LOOK_EVERY_S = 0.01
_remembered: dict[int, str] = {}
"""Registry of the sockets of groups, because groups do not expose their sockets."""
_making: list[tuple[dict[int, str], int]] = []
"""Registry of groups that are being made: the sockets before, and how many peers may connect."""
_aborts: weakref.WeakKeyDictionary[Any, threading.Event] = weakref.WeakKeyDictionary()
"""Registry of aborts: group -> event that is set once the group is aborted."""
_MOST_NOTED = 32
_LONGEST_WAIT_S = 1.0
_PAUSE_S = 0.001

_sent: deque[weakref.ref[torch.Tensor]] = deque(maxlen=_MOST_NOTED)
"""Tensors of recent collectives of the process, also of destroyed groups; awaited at exit."""


@contextmanager
def remember_connections(num_peers: int = 0) -> Generator[None, None, None]:
    """Record the sockets opened in this context, so that `abort_groups` can shut them down.

    Also works during the context: a group is not made until all ranks have connected, which may never happen.
    `num_peers` is the number of peers for whose connections gloo may wait.
    """
    making = _sockets(), num_peers
    _making.append(making)
    try:
        yield
    finally:
        _making.remove(making)
    _remembered.update(_opened_since(making[0]))


def abort_groups() -> None:
    """Make collectives of all process groups made so far fail, now and later; return at once.

    Each group is aborted in a separate thread: an abort frees memory, for which CUDA waits for all kernels of
    the device, including those of groups whose abort would come next.

    Thread-safe.
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
            # Keep listening sockets: gloo terminates the process when it cannot accept.
            if not _is_listener(connection):
                connection.shutdown(socket.SHUT_RDWR)
            elif number:
                _start("knock", _knock, connection.getsockname(), number)


def destroy_groups() -> None:
    """Destroy all process groups that torch knows; if one is aborted, only remove them from its registry."""
    if not dist.is_initialized():
        return
    if any(group in _aborts for group in known_groups()):
        forget_groups()
        return
    with suppress(RuntimeError):  # a peer may be gone already, and this process is about to be
        dist.destroy_process_group()


def wait_for_aborts() -> None:
    """Wait for all aborts that `abort_groups` has begun, which may take as long as a kernel runs."""
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
    """Connect to gloo's listening socket in place of each peer, and disconnect, to end its wait for them."""
    for number in range(num_peers):  # the number with which a peer identifies itself
        with suppress(OSError), socket.create_connection(address[:2], _KNOCK_WITHIN_S) as connection:
            connection.sendall(number.to_bytes(8, sys.byteorder))


def _opened_since(before: dict[int, str]) -> dict[int, str]:
    """Return network sockets opened since `before`, by descriptor, except those that a server here accepted.

    Socket pairs are left out, too: they belong to other threads, which start processes meanwhile.
    """
    opened = {descriptor: name for descriptor, name in _sockets().items() if before.get(descriptor) != name}
    served = set()
    for descriptor, name in before.items() if opened else ():
        if _remembered.get(descriptor) != name:  # not a group's own listener for its peers
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
    """Return a socket's local TCP port, or -1; an accepted connection has the port of its listener."""
    name = connection.getsockname()
    is_of_network = connection.family in (socket.AF_INET, socket.AF_INET6)
    return int(name[1]) if is_of_network else -1


def _sockets() -> dict[int, str]:
    """Return the name, with the inode, of each socket of this process by descriptor; {} without /proc."""
    found = {}
    with suppress(OSError):
        for entry in _DESCRIPTORS.iterdir():
            with suppress(OSError):  # the descriptor of this listing is closed meanwhile
                name = os.readlink(entry)
                if name.startswith("socket:"):
                    found[int(entry.name)] = name
    return found


# ---------------------------------------------------------------------- groups of lost ranks


def retire_groups(beside: Iterable[Any] = ()) -> None:
    """Make collectives of all process groups raise; let threads destroy each group once nothing else uses it.

    User code may keep a group of lost ranks: its collectives would wait for these ranks. gloo's destructor
    waits for the threads of the group, and such a thread may wait until the timeout of the group for the rest
    of a message whose sender was lost. `beside` are further groups, which torch does not know.
    """
    known = list(known_groups())
    for group in known:
        refuse_collectives(group)
    for group in {*known, *beside}:
        _start("let go", _let_go_last, [group])


def _let_go_last(held: list[Any]) -> None:
    while sys.getrefcount(held[0]) > 2:  # the list's reference and that of the argument
        time.sleep(_LOOK_EVERY_S)
    held.clear()


def explain_retired(error: BaseException) -> ProcessGroupError | None:
    """Return the error to raise instead of `error` if a retired process group caused it; else None."""
    cause: BaseException | None = error  # torch may raise another one as it logs the error
    while cause is not None and REFUSAL not in str(cause):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    return ProcessGroupError(
        "a process group that was created before ranks were lost cannot be used any more. Do not keep"
        " torch.distributed.group.WORLD, but look it up where you use it; and create groups of"
        " torch.distributed.new_group again in on_world_changed(), which all remaining ranks call."
    )


# ---------------------------------------------------------------------- exit of the interpreter


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
    """Wait at exit, at most one second, until gloo's threads have released all tensors and the GIL."""
    deadline = time.monotonic() + _LONGEST_WAIT_S
    num_idle = 0
    while _sent and num_idle < 2 and time.monotonic() < deadline:
        num_idle = num_idle + 1 if are_let_go() and not _is_another_runnable() else 0
        time.sleep(_PAUSE_S)  # releases the GIL: a thread that waits for it becomes runnable, or ends


def _is_another_runnable() -> bool:
    """Return True if another thread of this process runs or waits for a processor; False if unknown."""
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


def flush_output() -> None:
    """Flush stdout and stderr as far as they are open, before the process ends without that."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        # nobody reads it any more, the script has closed it, or a signal has interrupted a write to it
        with suppress(OSError, ValueError, RuntimeError):
            stream.flush()


@atexit.register
def _leave() -> None:
    """End the process with code 1 at exit if a gloo thread failed; else restore C++'s terminate handler."""
    handler = _handler() if _handler.cache_info().currsize else None
    if handler is None:
        return
    if handler.has_given_up.is_set():
        logging.shutdown()
        flush_output()
        os._exit(1)
    handler.remove()  # a finalized interpreter must not be called from a thread of C++

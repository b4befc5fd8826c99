"""Frees a thread that is blocked inside of a collective of torch, where no Python runs.

NCCL communicators are aborted, which ends what they have on the device; from then on NCCL's watchdog does not
look at them any more, and does not end the process because of them. gloo has nothing of the kind (its `abort`
leaves waiting threads waiting), so the connections that the group has opened are shut down: to gloo every
peer is gone, and its waits fail. Where a group is being made, and gloo waits for a peer to connect that never
will, it is connected to from here, and left again.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning_ddp._torch import known_groups

__all__ = ["abort_groups", "remember_connections", "wait_for_aborts"]

_DESCRIPTORS = Path("/proc/self/fd")
_remembered: dict[int, str] = {}
"""Of the process, as descriptors are; who aborts knows no group, and the groups do not tell their sockets."""
_aborts: weakref.WeakKeyDictionary[Any, threading.Thread] = weakref.WeakKeyDictionary()
"""Group -> the thread that aborts it, or has done so."""
_starting = threading.RLock()
"""Held until such a thread has started: before that nobody can wait for it. A signal may come meanwhile."""
_making: list[tuple[dict[int, str], int]] = []
"""For each group that is being made: the sockets that there were before, and how many peers may connect."""
_KNOCK_WITHIN_S = 1.0


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
        thread = threading.Thread(target=_abort, args=(group,), daemon=True, name="lightning_ddp abort")
        with _starting:
            if _aborts.setdefault(group, thread) is thread:
                thread.start()
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
                where = connection.getsockname(), number
                threading.Thread(target=_knock, args=where, daemon=True, name="lightning_ddp knock").start()


def _knock(address: Any, num_peers: int) -> None:
    """Connects to a socket at which gloo listens as each of its peers would, and leaves."""
    for number in range(num_peers):  # which a peer says first
        with suppress(OSError), socket.create_connection(address[:2], _KNOCK_WITHIN_S) as connection:
            connection.sendall(number.to_bytes(8, sys.byteorder))


def wait_for_aborts() -> None:
    """Returns once all that `abort_groups` has begun is over, which may take as long as a kernel runs."""
    with _starting:
        threads = list(_aborts.values())
    for thread in threads:
        thread.join()


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


def _abort(group: Any) -> None:
    with suppress(RuntimeError):  # a backend without abort
        group.abort()


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

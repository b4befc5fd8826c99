"""Init method of a run as the user says it: `env://`, `tcp://host:port`, `file:///path`."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlparse

import torch.distributed as dist

from lightning_ddp.errors import ConfigurationError, RendezvousError
from lightning_ddp.launch.interface import require_resolvable

if sys.platform != "win32":
    import fcntl

__all__ = ["check_meeting_place", "meet", "meet_at_file", "tcp_address"]

_LOCK_SUFFIX = ".lock"
_LEFT_OVER = b"left over"


def check_meeting_place(init_method: str | None, store: Any | None, start_method: str) -> None:
    """Refuses what cannot be where ranks meet. Does not communicate.

    Args:
        init_method: a URL, or None.
        store: a store of the user's, or None.
        start_method: how the processes are made.

    Raises:
        ConfigurationError: no URL, `tcp://` without host and port, `file://` without an absolute path, both
            of the two, or a store that the processes cannot have.
    """
    if init_method is not None:
        _check_init_method(init_method)
    if store is None:
        return
    if init_method is not None:
        raise ConfigurationError(f"init_method={init_method!r} and a store: the ranks meet in one place only")
    if not isinstance(store, dist.Store):
        raise ConfigurationError(f"store={store!r} is no torch.distributed.Store")
    if start_method in ("spawn", "fork", "forkserver"):
        raise ConfigurationError(
            f"store with start_method={start_method!r}: a store cannot be sent to a new process. Use"
            " start_method='popen', where each process runs the script and makes its own, or init_method."
        )


def _check_init_method(init_method: str) -> None:
    url = urlparse(init_method)
    if not url.scheme or "://" not in init_method:
        raise ConfigurationError(
            f"init_method={init_method!r}: expected 'env://', 'tcp://host:port' or 'file:///path'"
        )
    if url.scheme == "tcp":
        tcp_address(init_method)
    if url.scheme == "file" and (url.netloc or not url.path.startswith("/") or url.path.endswith("/")):
        raise ConfigurationError(
            f"init_method={init_method!r}: expected the absolute path of a file, as in 'file:///shared/run-7',"
            " with three slashes"
        )


def tcp_address(init_method: str | None) -> tuple[str, int] | None:
    """Host and port of a `tcp://` URL; None for any other.

    Raises:
        ConfigurationError: host or port is missing.
    """
    if init_method is None or not init_method.startswith("tcp://"):
        return None
    url = urlparse(init_method)
    try:
        host, port = url.hostname, url.port
    except ValueError:  # no number, or too large
        host, port = None, None
    if not host or not port:
        raise ConfigurationError(
            f"init_method={init_method!r}: expected the first node's name or address and a free port, as in"
            " 'tcp://10.0.0.1:29500'"
        )
    return host, port


def meet(init_method: str, rank: int, world_size: int, timeout: timedelta | None) -> Any:
    """The store at a meeting place. All ranks call it.

    Args:
        init_method: a URL that `torch.distributed.rendezvous` knows.
        rank: of this process.
        world_size: number of ranks.
        timeout: how long to wait for the store; None for torch's own.

    Raises:
        ConfigurationError: torch does not know the scheme.
        RendezvousError: the place cannot be used.
    """
    if init_method.startswith("file://"):
        return meet_at_file(Path(urlparse(init_method).path), rank, world_size, timeout)
    address = tcp_address(init_method)
    if address is not None:
        require_resolvable(address[0], "init_method")
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    try:
        store, _, _ = next(dist.rendezvous(init_method, rank, world_size, **options))
    except (RuntimeError, ValueError) as error:
        if "No rendezvous handler" in str(error):
            raise ConfigurationError(f"init_method={init_method!r}: {error}") from error
        raise RendezvousError(
            f"rank {rank} cannot meet the others at {init_method}: {error}. Check that the host is the first"
            " node's, that it is up, and that the port is free there."
        ) from error
    return store


# ---------------------------------------------------------------------- a file


def meet_at_file(path: Path, rank: int, world_size: int, timeout: timedelta | None) -> Any:
    """A store in a file that all ranks reach. Refuses what an earlier run has left there.

    A crashed run leaves its file behind, and ranks that read the old entries hang. So each process holds a
    shared lock on `<path>.lock` as long as it lives. Whoever gets it exclusively is the first of its run:
    nobody alive has written the file, and if there is something in it, that is left over. The kernel gives
    the locks back however a process ends, on NFS too. At exit, the last process removes both files.

    Args:
        path: the file; its folder exists.
        rank: of this process.
        world_size: number of ranks.
        timeout: of the store; None for torch's own.

    Raises:
        RendezvousError: the file is left over or used by another run, or it cannot be locked.
    """
    if sys.platform == "win32":
        raise RendezvousError(f"file://{path}: needs file locks as Linux and macOS have them")
    if not path.parent.is_dir():
        raise RendezvousError(f"file://{path}: rank {rank} finds no folder {path.parent}")
    lock = _lock(path, rank)
    # it holds the lock until then; unlike atexit it also runs where multiprocessing ends its processes
    Finalize(None, _leave, args=(path, lock), exitpriority=0)
    store: Any = dist.FileStore(str(path), world_size)
    if timeout is not None:
        store.set_timeout(timeout)
    if store.add(f"lightning_ddp/rank/{rank}", 1) > 1:
        raise RendezvousError(
            f"file://{path}: rank {rank} is there already: another run that goes on uses this file, or two"
            " processes have the same rank. Name a file of its own for each run."
        )
    return store


def _lock(path: Path, rank: int) -> IO[bytes]:
    """Takes the shared lock; the first process of the run looks at the file before."""
    name = Path(f"{path}{_LOCK_SUFFIX}")
    while True:
        try:
            lock = name.open("a+b")
            if _try_lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB) and _is_at(lock, name):
                # what the first one finds is what the others find, who wait for it in the line after
                lock.truncate(0)
                lock.write(_LEFT_OVER if path.exists() and path.stat().st_size else b"fresh")
                lock.flush()
            fcntl.flock(lock, fcntl.LOCK_SH)
            lock.seek(0)
            found = lock.read()
            if not _is_at(lock, name):  # the last process of a run that ended just now has removed it
                lock.close()
                continue
        except OSError as error:
            raise RendezvousError(f"file://{path}: rank {rank} cannot lock {name}: {error}") from error
        if found == _LEFT_OVER:
            lock.close()
            raise RendezvousError(
                f"file://{path} is left over from an earlier run{_age(path)}: no process of that run lives,"
                f" and its entries would make rank {rank} hang. Delete it, or name another one for each run."
            )
        return lock


def _is_at(lock: IO[bytes], name: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), name.stat())
    except FileNotFoundError:
        return False


def _try_lock(lock: IO[bytes], how: int) -> bool:
    try:
        fcntl.flock(lock, how)
    except BlockingIOError:
        return False
    return True


def _age(path: Path) -> str:
    with suppress(OSError):
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        return f" (last written {stamp})"
    return ""


def _leave(path: Path, lock: IO[bytes]) -> None:
    """Gives the lock back; the last process removes the files, so that a run leaves none behind."""
    with suppress(OSError, ValueError):
        if _try_lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            path.unlink(missing_ok=True)
            Path(lock.name).unlink(missing_ok=True)
        lock.close()

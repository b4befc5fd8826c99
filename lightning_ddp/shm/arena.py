"""Memory of one rank that all ranks of its host map, POSIX semaphores in it, and who of them is alive.

It lies in a memory file without a name (`memfd_create`): its size does not depend on /dev/shm, and it is gone
with the last process that maps it, however that one dies. Peers open it through /proc while they connect.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import select
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_NAME = "lightning_ddp"
_TOKEN_BYTES = 16
_ALIGNMENT = 64
_MAP_FAILED = ctypes.c_void_p(-1).value
_SEMAPHORE_FUNCTIONS = ("sem_init", "sem_post", "sem_trywait", "sem_clockwait")
_NS_PER_S = 1_000_000_000


class Arena:
    """Mapped memory of a memory file, zero at first. Freed once neither this nor a tensor in it is left."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._buffer = _map(descriptor, nbytes)
        self.bytes = torch.frombuffer(self._buffer, dtype=torch.uint8)
        """All of it, 1-D."""
        self.address = self.bytes.data_ptr()

    def view(self, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        """`numel` elements from byte `offset` on, 1-D."""
        return self.bytes[offset : offset + numel * dtype.itemsize].view(dtype)

    def integers(self, offset: int, count: int) -> memoryview:
        """`count` integers of 64 bits from byte `offset` on, which is a multiple of 8."""
        return memoryview(self._buffer).cast("B")[offset : offset + 8 * count].cast("q")

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where a tensor begins, in bytes; None if it lies elsewhere."""
        offset = tensor.data_ptr() - self.address
        is_inside = offset >= 0 and offset + tensor.numel() * tensor.element_size() <= self.nbytes
        return offset if is_inside else None


class OwnArena(Arena):
    """An arena that this rank makes, and lets its peers open until `close_descriptor`.

    Raises:
        OSError: there is no such memory, or not so much.
    """

    def __init__(self, nbytes: int) -> None:
        nbytes = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._descriptor = os.memfd_create(_NAME)
        try:
            size = nbytes + _TOKEN_BYTES
            os.posix_fallocate(self._descriptor, 0, size)  # what is not there now would be a SIGBUS later
            os.pwrite(self._descriptor, self._token, nbytes)
            super().__init__(self._descriptor, nbytes)
        except BaseException:
            self.close_descriptor()
            raise

    @property
    def ticket(self) -> tuple[int, int, bytes]:
        """What a peer opens it with, besides this process's id."""
        return self._descriptor, self.nbytes, self._token

    def close_descriptor(self) -> None:
        """From now on nobody else can open it; those who have keep it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def open_arena(pid: int, ticket: tuple[int, int, bytes]) -> Arena:
    """Maps an arena of a process of this host, of which `OwnArena.ticket` there gave the ticket.

    Raises:
        OSError: it cannot be opened, as where this user may not, or the process is in another container.
    """
    number, nbytes, token = ticket
    path = f"/proc/{pid}/fd/{number}"
    found = os.readlink(path)
    if not found.startswith(f"/memfd:{_NAME}"):  # in another container the number means another process
        raise OSError(f"{path} is {found}, not shared memory of this package")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(descriptor, _TOKEN_BYTES, nbytes) != token:
            raise OSError(f"{path} is the memory of another process")
        return Arena(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _map(descriptor: int, nbytes: int) -> Any:
    """An array of bytes that keeps its memory mapped. Python's own `mmap` would keep a descriptor, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    address = libc.mmap(None, nbytes, rights, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, _MAP_FAILED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(buffer, libc.munmap, address, nbytes).atexit = False
    return buffer


class Lifeline:
    """Tells whether processes of this host are alive, also once their ids are given to others."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = tuple(pids)
        self._descriptors: list[int | None] = []
        for pid in pids:
            try:
                self._descriptors.append(os.pidfd_open(pid))
            except (OSError, AttributeError):  # it is gone; or Linux before 5.3, other sandboxes
                self._descriptors.append(None)

    def is_alive(self, index: int) -> bool:
        """Whether that process has not ended."""
        descriptor = self._descriptors[index]
        if descriptor is None:
            with suppress(OSError):
                status = Path(f"/proc/{self._pids[index]}/stat").read_text()
                return status.rpartition(")")[2].split()[0] not in "ZX"
            return False
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Frees the descriptors."""
        for descriptor in self._descriptors:
            if descriptor is not None:
                with suppress(OSError):
                    os.close(descriptor)
        self._descriptors = [None] * len(self._pids)


# ---------------------------------------------------------------------- semaphores


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _load() -> tuple[Any, Any]:
    """The C library, once keeping the GIL during a call and once not; None where it lacks a function."""
    if sys.platform != "linux":
        return None, None
    keeping, releasing = ctypes.PyDLL(None), ctypes.CDLL(None)
    if not all(hasattr(keeping, name) for name in _SEMAPHORE_FUNCTIONS):
        return None, None
    for library in (keeping, releasing):
        library.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        library.sem_post.argtypes = library.sem_trywait.argtypes = (ctypes.c_void_p,)
        library.sem_clockwait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    return keeping, releasing


_libc, _libc_without_gil = _load()


def are_semaphores_available() -> bool:
    """Whether the C library has process-shared semaphores and waits by the monotonic clock."""
    return _libc is not None


class Semaphore:
    """A semaphore at an address of shared memory, for all processes that map it."""

    NBYTES = 64
    """Room for one: more than a `sem_t`, and a cache line of its own."""

    def __init__(self, address: int) -> None:
        self._address = address

    def create(self) -> None:
        """Makes it, with count 0."""
        if _libc.sem_init(self._address, 1, 0):
            raise OSError("sem_init failed")

    def post(self) -> None:
        """Adds one to the count and wakes who waits, who then sees what was written before. Never blocks."""
        _libc.sem_post(self._address)

    def try_wait(self) -> bool:
        """Takes one off the count if it is above zero."""
        return bool(_libc.sem_trywait(self._address) == 0)

    def wait(self, timeout_s: float) -> bool:
        """Sleeps, without the GIL, until the count is above zero, and takes one off.

        False if that took longer than `timeout_s`, or a signal came.
        """
        deadline_ns = time.monotonic_ns() + int(timeout_s * _NS_PER_S)
        until = _Timespec(deadline_ns // _NS_PER_S, deadline_ns % _NS_PER_S)
        found = _libc_without_gil.sem_clockwait(self._address, time.CLOCK_MONOTONIC, ctypes.byref(until))
        return bool(found == 0)

"""Memory of one rank that all ranks of its host map, POSIX semaphores in it, and a check for dead peers.

The memory is an anonymous file (`memfd_create`): its size does not depend on /dev/shm, and the kernel frees
it with the last process that maps it, however that process ends. Peers open it through /proc to connect.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_NAME = "lightning_ddp"
_TOKEN_BYTES = 16
_ALIGNMENT = 64
_MAP_FAILED = ctypes.c_void_p(-1).value
_START_TIME = 18
"""Index of the start time in /proc/<pid>/stat after the state."""
_SEMAPHORE_FUNCTIONS = ("sem_init", "sem_post", "sem_trywait", "sem_clockwait")
_NS_PER_S = 1_000_000_000


class Arena:
    """Shared memory mapped from a memory file, zero at first; unmapped with the last tensor in it."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._buffer = _map(descriptor, nbytes)
        self.bytes = torch.frombuffer(self._buffer, dtype=torch.uint8)
        """The whole memory as a 1-D uint8 tensor."""
        self.address = self.bytes.data_ptr()

    def view(self, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        """Return `numel` elements from byte `offset` on as a 1-D tensor."""
        return self.bytes[offset : offset + numel * dtype.itemsize].view(dtype)

    def integers(self, offset: int, count: int) -> memoryview:
        """Return `count` 64-bit integers from byte `offset` on, which must be a multiple of 8."""
        return memoryview(self._buffer).cast("B")[offset : offset + 8 * count].cast("q")

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return the byte offset of a contiguous tensor in this memory; None if it lies elsewhere."""
        offset = tensor.data_ptr() - self.address
        is_inside = offset >= 0 and offset + tensor.numel() * tensor.element_size() <= self.nbytes
        return offset if is_inside else None


class OwnArena(Arena):
    """Shared memory that this rank has created, which peers can map until `close_descriptor`.

    Raises:
        OSError: shared memory is not available, or not enough of it.
    """

    def __init__(self, nbytes: int) -> None:
        nbytes = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._descriptor = os.memfd_create(_NAME)
        try:
            size = nbytes + _TOKEN_BYTES
            os.posix_fallocate(self._descriptor, 0, size)  # without it, a lack of memory is a later SIGBUS
            os.pwrite(self._descriptor, self._token, nbytes)
            super().__init__(self._descriptor, nbytes)
        except BaseException:
            self.close_descriptor()
            raise

    @property
    def ticket(self) -> tuple[int, int, bytes]:
        """Ticket by which a peer maps this memory, with the process's id: descriptor, size and token."""
        return self._descriptor, self.nbytes, self._token

    def close_descriptor(self) -> None:
        """Prevent peers from mapping this memory from now on; existing mappings stay."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def open_arena(pid: int, ticket: tuple[int, int, bytes]) -> Arena:
    """Map shared memory that a process of this host has created, by its id and `OwnArena.ticket`.

    Raises:
        OSError: the arena cannot be opened, because of permissions or because the process is in another
            container.
    """
    number, nbytes, token = ticket
    path = f"/proc/{pid}/fd/{number}"
    found = os.readlink(path)
    if not found.startswith(f"/memfd:{_NAME}"):  # in another container, the id is of another process
        raise OSError(f"{path} is {found}, not shared memory of this package")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(descriptor, _TOKEN_BYTES, nbytes) != token:
            raise OSError(f"{path} is the memory of another process")
        return Arena(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _map(descriptor: int, nbytes: int) -> Any:
    """Map a descriptor's memory and return it as a byte array; `mmap` would keep a descriptor open, too."""
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


def birth_of(pid: int) -> str | None:
    """Return a living process's start time, to tell it from a later one with its id; None if it has ended."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[_START_TIME] if state not in "ZX" else None
    return None


# ---------------------------------------------------------------------- semaphores


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _load() -> tuple[Any, Any]:
    """Return the C library twice, with calls that keep and that release the GIL; (None, None) if unfit."""
    keeping, releasing = ctypes.PyDLL(None), ctypes.CDLL(None)
    if sys.platform != "linux" or not all(hasattr(keeping, name) for name in _SEMAPHORE_FUNCTIONS):
        return None, None
    for library in (keeping, releasing):
        library.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        library.sem_post.argtypes = library.sem_trywait.argtypes = (ctypes.c_void_p,)
        library.sem_clockwait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    return keeping, releasing


_libc, _libc_without_gil = _load()


def are_semaphores_available() -> bool:
    """Return True if the C library has shared semaphores with waits by the monotonic clock."""
    return _libc is not None


class Semaphore:
    """A semaphore at an address of shared memory, for all processes that map it."""

    NBYTES = 64
    """Bytes of a semaphore: more than a `sem_t`, and a separate cache line."""

    def __init__(self, address: int) -> None:
        self._address = address

    def create(self) -> None:
        if _libc.sem_init(self._address, 1, 0):
            raise OSError("sem_init failed")

    def post(self) -> None:
        """Increment the count and wake a waiting process, which sees all earlier writes; never block."""
        _libc.sem_post(self._address)

    def try_wait(self) -> bool:
        """Decrement the count if it is above zero; return True if it was."""
        return bool(_libc.sem_trywait(self._address) == 0)

    def wait(self, timeout_s: float) -> bool:
        """Wait without the GIL until the count is above zero, and decrement it.

        Return False after `timeout_s` seconds, or at a signal.
        """
        deadline_ns = time.monotonic_ns() + int(timeout_s * _NS_PER_S)
        until = _Timespec(deadline_ns // _NS_PER_S, deadline_ns % _NS_PER_S)
        found = _libc_without_gil.sem_clockwait(self._address, time.CLOCK_MONOTONIC, ctypes.byref(until))
        return bool(found == 0)

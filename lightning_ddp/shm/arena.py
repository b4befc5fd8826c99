"""Memory of one rank that all ranks of its host map.

It lies in a memory file without a name (`memfd_create`): its size does not depend on /dev/shm, and it is gone
with the last process that maps it, however that one dies. Peers open it through /proc while they connect.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import select
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

__all__ = ["Arena", "Lifeline", "OwnArena", "open_arena"]

_NAME = "lightning_ddp"
_TOKEN_BYTES = 16
_ALIGNMENT = 64
_MAP_FAILED = ctypes.c_void_p(-1).value


class Arena:
    """Mapped memory, zero at first. Freed once neither this nor a tensor in it is left.

    Args:
        descriptor: of a memory file; it may be closed afterwards.
        nbytes: its size.
    """

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

    Args:
        nbytes: its size; a multiple of 64 is taken.

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
    """Maps an arena of another process of this host, or of this one.

    Args:
        pid: that process.
        ticket: what `OwnArena.ticket` said there.

    Raises:
        OSError: it cannot be opened, as where this user may not, or the process is in another container.
    """
    number, nbytes, token = ticket
    path = f"/proc/{pid}/fd/{number}"
    found = os.readlink(path)
    if not found.startswith(f"/memfd:{_NAME}"):  # in another container the number means another process
        raise OSError(f"{path} is {found}, no memory of this package")
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
    """Tells whether processes of this host are alive, also once their ids are given to others.

    Args:
        pids: the processes, by rank.
    """

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
            return _is_running(self._pids[index])
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


def _is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"

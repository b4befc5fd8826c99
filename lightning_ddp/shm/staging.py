"""All-reduce of tensors that lie anywhere, piece by piece through memory that the ranks share."""

from __future__ import annotations

import torch

from lightning_ddp.comm.group import Group
from lightning_ddp.shm.hosts import find_hosts
from lightning_ddp.shm.shared_memory import SharedMemory

__all__ = ["Staging", "open_staging"]

_PIECE_BYTES = 2**20
_LENT_BYTES = 2**23


class Staging:
    """Shared memory of a few MiB, of which callers may also use a part for their own tensors.

    Args:
        memory: not yet connected.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._piece = memory.zeros(_PIECE_BYTES, torch.uint8)
        self._lent = memory.zeros(_LENT_BYTES, torch.uint8)

    def lend(self, count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor] | None:
        """`count` 1-D tensors of `numel` elements that are reduced without a copy; None if that is too much.

        For one caller at a time.
        """
        nbytes = numel * dtype.itemsize
        if count * nbytes > _LENT_BYTES:
            return None
        return [self._lent[i * nbytes : (i + 1) * nbytes].view(dtype) for i in range(count)]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replaces a contiguous tensor by the sum over the ranks. All ranks call it; waits for them."""
        if self._memory.place_of(tensor) is not None:
            self._memory.all_reduce(tensor)
            return
        flat = tensor.view(-1)
        for part in flat.split(_PIECE_BYTES // flat.element_size()):
            piece = self._piece[: part.numel() * part.element_size()].view(part.dtype)
            piece.copy_(part)
            self._memory.all_reduce(piece)
            part.copy_(piece)


def open_staging(group: Group, device: torch.device) -> Staging | None:
    """Shared memory of the ranks of a group; None where there is none. All ranks call it; communicates.

    Raises:
        ConfigurationError: the group's `transport` asks for it, and it cannot be used.
    """
    hosts = find_hosts(group, device)
    if hosts is None or not hosts.are_shared:
        return None
    memory = SharedMemory(group, hosts)
    staging = Staging(memory)
    return staging if memory.connect() else None

"""Means of many tensors, in place, through two flat chunks: one is filled while the other is on its way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lightning_ddp.encoding.mean import Wire

__all__ = ["CHUNK_NUMEL", "Segment", "average_", "exchange", "memory_view"]

CHUNK_NUMEL = 2**20
"""Elements of a chunk; two of them are all the memory that an exchange needs."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of one tensor that travels in one chunk."""

    index: int
    """Which tensor."""
    start: int
    """First element in the order of memory."""
    stop: int
    """One after the last."""


def memory_view(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of memory: 1-D, no copy, without gradient.

    Raises:
        ValueError: there are gaps between the elements, or several share memory.
    """
    tensor = tensor.detach()
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                raise ValueError(f"tensor of shape {list(tensor.shape)} has gaps or overlaps in memory")
            expected *= size
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def exchange(
    wire: Wire,
    tensors: Sequence[torch.Tensor],
    pack: Callable[[Segment, torch.Tensor], object],
    unpack: Callable[[Segment, torch.Tensor], object],
) -> None:
    """Averages over the ranks what `pack` makes of the tensors, and gives it to `unpack`, piece by piece.

    Called in a job of a channel; communicates. On all ranks the tensors have the same sizes and types.

    Args:
        wire: how the chunks are sent.
        tensors: tell sizes and types; 16-bit ones travel as float32 numbers.
        pack: called with a segment and a 1-D tensor to fill.
        unpack: called with the segment and its mean.
    """
    under_way: deque[tuple[list[tuple[Segment, int]], Callable[[], torch.Tensor]]] = deque()

    def end_oldest() -> None:
        segments, finish = under_way.popleft()
        mean = finish()
        for segment, offset in segments:
            unpack(segment, mean[offset : offset + segment.stop - segment.start])

    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(torch.promote_types(tensor.dtype, torch.float32), []).append(index)
    for dtype, indices in by_dtype.items():
        numels = [(index, tensors[index].numel()) for index in indices]
        buffers = wire.empties(2, CHUNK_NUMEL, dtype)
        for number, segments in enumerate(_chunks(numels)):
            buffer = buffers[number % 2]
            filled = 0
            for segment, offset in segments:
                filled = offset + segment.stop - segment.start
                pack(segment, buffer[offset:filled])
            under_way.append((segments, wire.begin(buffer[:filled])))
            if len(under_way) == 2:
                end_oldest()
        while under_way:
            end_oldest()


def average_(wire: Wire, tensors: Sequence[torch.Tensor]) -> None:
    """Replaces each tensor by its mean over the ranks, in place. A job of a channel; communicates."""
    views = [memory_view(tensor) for tensor in tensors]
    exchange(
        wire,
        views,
        lambda segment, out: out.copy_(views[segment.index][segment.start : segment.stop]),
        lambda segment, mean: views[segment.index][segment.start : segment.stop].copy_(mean),
    )


def _chunks(numels: Sequence[tuple[int, int]]) -> Iterator[list[tuple[Segment, int]]]:
    """Cuts tensors into chunks; large ones go over several. Each segment comes with its place in it."""
    segments: list[tuple[Segment, int]] = []
    filled = 0
    for index, numel in numels:
        start = 0
        while start < numel:
            length = min(numel - start, CHUNK_NUMEL - filled)
            segments.append((Segment(index=index, start=start, stop=start + length), filled))
            start += length
            filled += length
            if filled == CHUNK_NUMEL:
                yield segments
                segments, filled = [], 0
    if segments:
        yield segments

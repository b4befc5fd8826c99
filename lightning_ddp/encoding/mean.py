"""Means over the ranks for hooks and averagers: plain or encoded, of one tensor or of many.

An algorithm (PowerSGD, top-k ...) requests the mean of a tensor over the ranks, or the tensors of all ranks,
from its `Wire`; a `Codec` determines the number of bits that are sent. `exchange` sends many tensors through
two flat chunks: one is filled while the other is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from lightning_ddp.encoding.side_stream import Channel

CHUNK_NUMEL = 2**20
"""Number of elements of a chunk; an exchange needs memory for two chunks."""
PIECE_NUMEL = 2**19
"""Number of elements of a piece, small enough that the link is not idle during encoding."""
_Scatter = Callable[[], Callable[[], torch.Tensor]]
_MIN_BLOCKS = 64
"""Number of blocks from which the cost of padding the last block is negligible."""
_SCALE_BYTES = 4


# ---------------------------------------------------------------------- codecs


class _BlockCodec:
    """Codec with 8-bit codes of values divided by their block's scale.

    Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, section 2.1. A scale maps the
    largest element of its block to `largest`, the largest code.
    """

    dtype: torch.dtype
    largest: float

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        """Number of elements of a block; rows of whole blocks are encoded without a copy."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode floating-point rows (k, m) as uint8 (k, number of bytes, which depends on m only).

        Scales of all blocks come first, then 8-bit codes of the values; zeros stay zero.
        """
        num_rows, length = rows.shape
        if length % self.block_size:
            rows = torch.nn.functional.pad(rows, (0, -length % self.block_size))
        blocks = rows.float().view(num_rows, -1, self.block_size)
        low, high = torch.aminmax(blocks, dim=2)
        scales = torch.maximum(high, -low).div_(self.largest)
        # An infinite scale would silently make the finite elements of the block zeros.
        scales.masked_fill_(torch.isinf(scales), torch.nan)
        factors = torch.where(scales == 0, torch.ones_like(scales), scales).reciprocal_()
        # The reciprocal of a denormal scale is infinite; treat such a block as zeros.
        factors.masked_fill_(torch.isinf(factors), 0.0)
        scaled = (blocks * factors.unsqueeze(2)).nan_to_num_()
        codes = (scaled if self.dtype.is_floating_point else scaled.round_()).to(self.dtype)
        codes = codes.view(torch.uint8).view(num_rows, -1)[:, :length]
        return torch.cat([scales.view(torch.uint8), codes], dim=1)

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """Decode uint8 (k, number of bytes) to float32 (k, numel), non-finite values included."""
        num_rows, num_blocks = data.shape[0], -(-numel // self.block_size)
        # A slice of a single row counts as contiguous, but keeps the stride of the whole row.
        scales = data[:, : num_blocks * _SCALE_BYTES].clone(memory_format=torch.contiguous_format)
        scales = scales.view(torch.float32)
        codes = data[:, num_blocks * _SCALE_BYTES :]
        codes = torch.nn.functional.pad(codes, (0, -numel % self.block_size)).contiguous()
        values = codes.view(self.dtype).float().view(num_rows, num_blocks, self.block_size)
        return values.mul_(scales.unsqueeze(2)).view(num_rows, -1)[:, :numel]


class Int8Codec(_BlockCodec):
    """Block codec with integer codes from -127 to 127; error at most the block's largest value / 254."""

    dtype, largest = torch.int8, 127.0


class Fp8Codec(_BlockCodec):
    """Block codec with 8-bit float codes: relative error up to 1/16 for values above the largest / 28,672."""

    dtype, largest = torch.float8_e4m3fn, 448.0


class CastCodec:
    """Codec that rounds each number to `dtype`, a 16-bit floating-point type."""

    block_size = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self._dtype).view(torch.uint8)

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        return data.view(self._dtype).float()


Codec = _BlockCodec | CastCodec
"""Encoder of rows of numbers as rows of bytes, and decoder."""


# ---------------------------------------------------------------------- wires


class Wire:
    """Transport that averages and gathers unencoded tensors, in jobs of a channel; all ranks call alike."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def empties(self, count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return `count` 1-D tensors that `begin` sends with the fewest copies, for one job at a time."""
        return self._channel.empties(count, numel, dtype)

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the mean of a 1-D tensor over the ranks, bitwise equal on all; may reuse its memory."""
        return self.begin(flat)()

    def begin(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start a `mean`; return a function that waits for it. Several may run; wait in order of starts."""
        if not flat.numel():
            return lambda: flat
        return self._channel.start_all_reduce(flat.div_(self._channel.size))

    def gather(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks as received, this rank's included: shape (size, numel)."""
        return self._channel.all_gather(flat)


class EncodedWire(Wire):
    """Transport that averages and gathers tensors in encoded form, and sums them in float32.

    The mean is a reduce-scatter and an all-gather: rank r gets the encoded r-th part of every rank, decodes
    and adds them, and sends its encoded part of the mean to all. Codes are never added, so no sum overflows.
    """

    def __init__(self, channel: Channel, codec: Codec) -> None:
        super().__init__(channel)
        self._codec = codec

    def empties(self, count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.empty(numel, dtype=dtype, device=self._channel.device) for _ in range(count)]

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the mean of a 1-D tensor over the ranks in float32, in new memory.

        A long tensor is sent in pieces: one is encoded while another is sent and a third one is decoded.
        """
        result = flat.new_empty(flat.numel(), dtype=torch.float32)
        outs, pieces = deque(result.split(PIECE_NUMEL)), deque(flat.split(PIECE_NUMEL))
        scatters: deque[_Scatter] = deque()
        gathers: deque[Callable[[], torch.Tensor]] = deque()
        while outs:
            is_last = not pieces
            if pieces:  # the newest starts before the older ones wait
                scatters.append(self._start(pieces.popleft()))
            if len(scatters) > 1 or (is_last and scatters):
                gathers.append(scatters.popleft()())
            if len(gathers) > 1 or (is_last and not scatters):
                outs.popleft().copy_(gathers.popleft()())
        return result

    def begin(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start an encoded reduce-scatter; return a function to do the all-gather and return the mean."""
        scatter = self._start(flat)
        return lambda: scatter()()

    def _start(self, flat: torch.Tensor) -> _Scatter:
        """Start an encoded reduce-scatter; return a function to start the all-gather and return its wait."""
        if not flat.numel():
            return lambda: lambda: flat
        size = self._channel.size
        part = self._padded(-(-flat.numel() // size))
        receive = self._channel.start_all_to_all(self._codec.encode(self._rows(flat / size, size, part)))

        def add() -> Callable[[], torch.Tensor]:
            mine = self._codec.decode(receive(), part).sum(0, keepdim=True)
            gather = self._channel.start_all_gather(self._codec.encode(mine).view(-1))
            return lambda: self._codec.decode(gather(), part).reshape(-1)[: flat.numel()]

        return add

    def gather(self, flat: torch.Tensor) -> torch.Tensor:
        length = self._padded(flat.numel())
        gathered = self._channel.all_gather(self._codec.encode(self._rows(flat, 1, length)).view(-1))
        return self._codec.decode(gathered, length)[:, : flat.numel()]

    def _padded(self, numel: int) -> int:
        block = self._codec.block_size
        return numel if numel < _MIN_BLOCKS * block else -(-numel // block) * block

    @staticmethod
    def _rows(flat: torch.Tensor, num_rows: int, length: int) -> torch.Tensor:
        if flat.numel() == num_rows * length:
            return flat.view(num_rows, length)
        rows = flat.new_zeros(num_rows * length)
        rows[: flat.numel()] = flat
        return rows.view(num_rows, length)


# ---------------------------------------------------------------------- many tensors


class Segment(NamedTuple):
    """Part of one tensor that is sent in one chunk: the tensor's index and the slice of its elements."""

    number: int
    where: slice
    """Slice of its elements, in the order of memory."""


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has no gaps, overlaps, pending conjugation or sign."""
    has_gaps = torch.empty_like(tensor, device="meta").stride() != tensor.stride()
    return not (has_gaps or tensor.is_conj() or tensor.is_neg())


def memory_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements in the order of memory: a detached 1-D view; complex ones as pairs."""
    tensor = tensor.detach()
    if not _is_dense(tensor):
        raise ValueError(
            f"tensor of shape {list(tensor.shape)} has gaps or overlaps in memory, or is a lazy conjugate"
        )
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def exchange(
    wire: Wire,
    tensors: Sequence[torch.Tensor],
    pack: Callable[[Segment, torch.Tensor], object],
    unpack: Callable[[Segment, torch.Tensor], object],
) -> None:
    """Average over the ranks what `pack` makes of tensors; pass the means to `unpack`. For a channel's jobs.

    Sizes and dtypes of the tensors are the same on all ranks; 16-bit floats are sent as float32. `pack` gets
    a segment and a 1-D tensor to fill, `unpack` the segment and its mean.

    Collective: all ranks must call it.
    """
    under_way: deque[tuple[list[tuple[Segment, slice]], Callable[[], torch.Tensor]]] = deque()

    def end_oldest() -> None:
        segments, finish = under_way.popleft()
        mean = finish()
        for segment, place in segments:
            unpack(segment, mean[place])

    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(torch.promote_types(tensor.dtype, torch.float32), []).append(index)
    for dtype, indices in by_dtype.items():
        numels = [(index, tensors[index].numel()) for index in indices]
        buffers = wire.empties(2, CHUNK_NUMEL, dtype)
        for number, segments in enumerate(_chunks(numels)):
            buffer = buffers[number % 2]
            for segment, place in segments:
                pack(segment, buffer[place])
            under_way.append((segments, wire.begin(buffer[: segments[-1][1].stop])))
            if len(under_way) == 2:
                end_oldest()
        while under_way:
            end_oldest()


def average_(wire: Wire, tensors: Sequence[torch.Tensor]) -> None:
    """Replace each tensor by its mean over the ranks, in place; called in a channel's thread.

    Collective: all ranks must call it.
    """
    others = [i for i, tensor in enumerate(tensors) if not _is_dense(tensor)]
    copies = {i: tensors[i].detach().clone(memory_format=torch.contiguous_format) for i in others}
    views = [memory_view(copies.get(i, tensor)) for i, tensor in enumerate(tensors)]
    exchange(
        wire,
        views,
        lambda segment, out: out.copy_(views[segment.number][segment.where]),
        lambda segment, mean: views[segment.number][segment.where].copy_(mean),
    )
    for i, mean in copies.items():
        tensors[i].detach().copy_(mean)


def _chunks(numels: Sequence[tuple[int, int]]) -> Iterator[list[tuple[Segment, slice]]]:
    """Cut tensors into chunks of limited size; yield a chunk's segments with their slices in it."""
    segments: list[tuple[Segment, slice]] = []
    filled = 0
    for index, numel in numels:
        start = 0
        while start < numel:
            length = min(numel - start, CHUNK_NUMEL - filled)
            segments.append((Segment(index, slice(start, start + length)), slice(filled, filled + length)))
            start += length
            filled += length
            if filled == CHUNK_NUMEL:
                yield segments
                segments, filled = [], 0
    if segments:
        yield segments

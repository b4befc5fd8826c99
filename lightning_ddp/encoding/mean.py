"""Means over the ranks of what hooks and averagers send: as it is or encoded, of one tensor or of many.

An algorithm (PowerSGD, top-k ...) asks its `Wire` for the mean over the ranks of what it has to send, or for
the tensors of all ranks. A `Codec` decides in how many bits they go. So `["bf16", "powersgd"]` is PowerSGD
whose factors travel in bfloat16, while its arithmetic and its error feedback stay in float32. `exchange`
sends many tensors through two flat chunks: one is filled while the other is on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from lightning_ddp.encoding.side_stream import Channel

CHUNK_NUMEL = 2**20
"""Elements of a chunk; two of them are all the memory that an exchange needs."""
PIECE_NUMEL = 2**19
"""Elements of a piece. Small enough that the link is never idle while something is encoded."""
_NUM_STAGES = 3
_Stages = Generator[None, None, None]
_MIN_BLOCKS = 64
"""From so many blocks on, filling up the last one costs next to nothing on the wire."""
_SCALE_BYTES = 4


# ---------------------------------------------------------------------- codecs


class Codec(Protocol):
    """Encoder of rows of numbers as rows of bytes, and decoder."""

    block_size: int
    """Rows whose length is a multiple of this are encoded without a copy."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Floating point (k, m) -> uint8 (k, number of bytes, which follows from m)."""
        ...

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """uint8 (k, number of bytes) -> float32 (k, numel). What was not finite is not finite."""
        ...


class _BlockCodec:
    """Eight-bit codes of values that are divided by their block's scale; the scales go in front.

    A scale that covers a small block keeps an outlier from coarsening everything else (Dettmers et al.,
    "8-bit Optimizers via Block-wise Quantization", ICLR 2022, section 2.1, there with a nonlinear code).

    Args:
        block_size: number of elements that share a scale.
        largest: absolute value of the largest code; the scale maps the largest element there.
    """

    def __init__(self, block_size: int, largest: float) -> None:
        self.block_size = block_size
        self._largest = largest

    def _to_codes(self, scaled: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _from_codes(self, codes: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Scales each block by its largest absolute value and rounds; a block of zeros stays zero."""
        num_rows, length = rows.shape
        if length % self.block_size:
            rows = torch.nn.functional.pad(rows, (0, -length % self.block_size))
        blocks = rows.float().view(num_rows, -1, self.block_size)
        low, high = torch.aminmax(blocks, dim=2)
        scales = torch.maximum(high, -low).div_(self._largest)
        # an infinite scale would turn the finite elements of the block into zeros without a trace
        scales.masked_fill_(torch.isinf(scales), torch.nan)
        factors = torch.where(scales == 0, torch.ones_like(scales), scales).reciprocal_()
        # of a denormal scale the reciprocal is infinite: the block is as good as zero
        factors.masked_fill_(torch.isinf(factors), 0.0)
        codes = self._to_codes(blocks * factors.unsqueeze(2))
        return torch.cat([scales.view(torch.uint8), codes.view(num_rows, -1)[:, :length]], dim=1)

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        num_rows, num_blocks = data.shape[0], -(-numel // self.block_size)
        scales = data[:, : num_blocks * _SCALE_BYTES].contiguous().view(torch.float32)
        codes = data[:, num_blocks * _SCALE_BYTES :]
        codes = torch.nn.functional.pad(codes, (0, -numel % self.block_size)).contiguous()
        values = self._from_codes(codes).view(num_rows, num_blocks, self.block_size)
        return values.mul_(scales.unsqueeze(2)).view(num_rows, -1)[:, :numel]


class Int8Codec(_BlockCodec):
    """Codec for integers from -127 to 127; the error is at most the block's largest value / 254."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, 127.0)

    def _to_codes(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.nan_to_num_().round_().to(torch.int8).view(torch.uint8)

    def _from_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.int8).float()


class Fp8Codec(_BlockCodec):
    """Floating point with 3 bits of mantissa: a relative error of at most 1/16 above the largest / 28,672."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, 448.0)

    def _to_codes(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.nan_to_num_().to(torch.float8_e4m3fn).view(torch.uint8)

    def _from_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.float8_e4m3fn).float()


class CastCodec:
    """Codec that rounds each number to a 16-bit floating-point type.

    Args:
        dtype: `torch.float16` (11 bits of precision, up to 65,504; above that it becomes infinite) or
            `torch.bfloat16` (8 bits, the range of float32).
    """

    block_size = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self._dtype).view(torch.uint8)

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        return data.view(self._dtype).float()


# ---------------------------------------------------------------------- wires


class Wire(Protocol):
    """Sender of flat tensors, used by all ranks in the same order in jobs of a channel; communicates."""

    def empties(self, count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """`count` tensors of `numel` elements, 1-D, that `begin` sends best; for one job at a time."""
        ...

    def begin(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts a `mean`; what is returned waits for it. Several may be under way, ended in this order."""
        ...

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the mean over the ranks of a 1-D tensor, bitwise the same on all; may reuse its memory."""
        ...

    def gather(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks as they arrived, this rank's own included: shape (size, numel)."""
        ...


class PlainWire:
    """Wire that sends numbers unencoded."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def empties(self, count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return self._channel.empties(count, numel, dtype)

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        """The mean in the tensor's own type and memory; divided before the sum, as torch does."""
        return self.begin(flat)()

    def begin(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        if not flat.numel():
            return lambda: flat
        return self._channel.start_all_reduce(flat.div_(self._channel.size))

    def gather(self, flat: torch.Tensor) -> torch.Tensor:
        return self._channel.all_gather(flat)


class EncodedWire:
    """Wire that sends encoded numbers and sums them in float32.

    The mean is a reduce-scatter and an all-gather: each rank gets the encoded r-th part of every rank,
    decodes and adds, and sends its encoded part of the mean to all. Codes are never added, so that no sum
    overflows, and a rank sends 2 (N-1)/N times the encoded size, however many ranks there are.
    """

    def __init__(self, channel: Channel, codec: Codec) -> None:
        self._channel = channel
        self._codec = codec

    def empties(self, count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.empty(numel, dtype=dtype, device=self._channel.device) for _ in range(count)]

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        """The mean in float32, in new memory.

        A long tensor goes in pieces: one is encoded while another is on its way and a third one is decoded.
        """
        if flat.numel() <= PIECE_NUMEL:
            return self.begin(flat)()
        result = flat.new_empty(flat.numel(), dtype=torch.float32)
        under_way: deque[_Stages] = deque()
        for piece, out in zip(flat.split(PIECE_NUMEL), result.split(PIECE_NUMEL), strict=True):
            under_way.append(self._stages(piece, out))
            for stages in reversed(under_way):  # the newest starts before the older ones wait
                next(stages)
            if len(under_way) == _NUM_STAGES:
                under_way.popleft()
        while under_way:
            for stages in reversed(under_way):
                next(stages)
            under_way.popleft()
        return result

    def begin(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Encodes and starts the reduce-scatter; the all-gather follows at the end."""
        if not flat.numel():
            return lambda: flat
        result = flat.new_empty(flat.numel(), dtype=torch.float32)
        stages = self._stages(flat, result)
        next(stages)

        def finish() -> torch.Tensor:
            next(stages)
            next(stages)
            return result

        return finish

    def _stages(self, flat: torch.Tensor, out: torch.Tensor) -> _Stages:
        """Three steps: encode and scatter; add up and gather; decode into `out`."""
        size = self._channel.size
        part = self._padded(-(-flat.numel() // size))
        receive = self._channel.start_all_to_all(self._codec.encode(self._rows(flat / size, size, part)))
        yield
        mine = self._codec.decode(receive(), part).sum(0, keepdim=True)
        gather = self._channel.start_all_gather(self._codec.encode(mine).view(-1))
        yield
        out.copy_(self._codec.decode(gather(), part).reshape(-1)[: flat.numel()])
        yield

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
    """A stretch of one tensor that travels in one chunk."""

    number: int
    """Which tensor."""
    where: slice
    """Its elements, in the order of memory."""


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
    """Replaces each tensor by its mean over the ranks, in place. A job of a channel; communicates."""
    views = [memory_view(tensor) for tensor in tensors]
    exchange(
        wire,
        views,
        lambda segment, out: out.copy_(views[segment.number][segment.where]),
        lambda segment, mean: views[segment.number][segment.where].copy_(mean),
    )


def _chunks(numels: Sequence[tuple[int, int]]) -> Iterator[list[tuple[Segment, slice]]]:
    """Cuts tensors into chunks; large ones go over several. Each segment comes with its place in it."""
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

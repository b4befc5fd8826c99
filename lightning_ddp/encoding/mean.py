"""Mean of a flat tensor over the ranks, sent as it is or encoded. The seam around which hooks compose.

An algorithm (PowerSGD, top-k ...) asks its `Wire` for the mean over the ranks of what it has to send, or for
the tensors of all ranks. A `Codec` decides in how many bits they go. So `["bf16", "powersgd"]` is PowerSGD
whose factors travel in bfloat16, while its arithmetic and its error feedback stay in float32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Protocol

import torch

from lightning_ddp.encoding.side_stream import Channel

__all__ = ["Codec", "EncodedWire", "PlainWire", "Wire"]

PIECE_NUMEL = 2**19
"""Elements of a piece. Small enough that the link is never idle while something is encoded."""
_NUM_STAGES = 3
_Stages = Generator[None, None, None]
_MIN_BLOCKS = 64
"""From so many blocks on, filling up the last one costs next to nothing on the wire."""


class Codec(Protocol):
    """Turns rows of numbers into rows of bytes and back. Knows nothing of ranks."""

    block: int
    """Rows whose length is a multiple of this are encoded without a copy."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Floating point (k, m) -> uint8 (k, number of bytes, which follows from m)."""
        ...

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """uint8 (k, number of bytes) -> float32 (k, numel). What was not finite is not finite."""
        ...


class Wire(Protocol):
    """Sends flat tensors. Called in jobs of a channel, by all ranks in one order; communicates."""

    def empties(self, count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """`count` tensors of `numel` elements, 1-D, that `begin` sends best; for one job at a time."""
        ...

    def begin(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts a `mean`; what is returned waits for it. Several may be under way, ended in this order."""
        ...

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        """The mean over the ranks of a 1-D tensor, the same bits on all of them; may reuse its memory."""
        ...

    def gather(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks as they arrived, this rank's own included: shape (size, numel)."""
        ...


class PlainWire:
    """Sends numbers as they are."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def empties(self, count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """1-D tensors, in memory that the ranks share where they do."""
        return self._channel.empties(count, numel, dtype)

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        """The mean in the tensor's own type and memory; divided before the sum, as torch does."""
        return self.begin(flat)()

    def begin(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts the all-reduce."""
        if not flat.numel():
            return lambda: flat
        return self._channel.start_all_reduce(flat.div_(self._channel.size))

    def gather(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, in rank order."""
        return self._channel.all_gather(flat)


class EncodedWire:
    """Sends encoded numbers and adds them up in float32.

    The mean is a reduce-scatter and an all-gather: each rank gets the encoded r-th part of every rank,
    decodes and adds, and sends its encoded part of the mean to all. Codes are never added, so that no sum
    overflows, and a rank sends 2 (N-1)/N times the encoded size, however many ranks there are.
    """

    def __init__(self, channel: Channel, codec: Codec) -> None:
        self._channel = channel
        self._codec = codec

    def empties(self, count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """1-D tensors; what is sent is another one."""
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
        """The tensors of all ranks in float32, in rank order."""
        length = self._padded(flat.numel())
        gathered = self._channel.all_gather(self._codec.encode(self._rows(flat, 1, length)).view(-1))
        return self._codec.decode(gathered, length)[:, : flat.numel()]

    def _padded(self, numel: int) -> int:
        block = self._codec.block
        return numel if numel < _MIN_BLOCKS * block else -(-numel // block) * block

    @staticmethod
    def _rows(flat: torch.Tensor, num_rows: int, length: int) -> torch.Tensor:
        if flat.numel() == num_rows * length:
            return flat.view(num_rows, length)
        rows = flat.new_zeros(num_rows * length)
        rows[: flat.numel()] = flat
        return rows.view(num_rows, length)

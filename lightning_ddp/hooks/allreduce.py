"""`allreduce`, `fp16`, `bf16`, `int8`, `fp8`: the mean of a bucket in 32, 16 or 8 bits; `noop`: no mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_ddp.encoding.mean import CastCodec, Fp8Codec, Int8Codec
from lightning_ddp.errors import require
from lightning_ddp.hooks.base import Hook, HookOptions, Part


class AllReduce(Hook):
    """Average in the gradients' own dtype, as without a hook. The baseline of comparisons."""

    name = "allreduce"


class NoOp(Hook):
    """Leave each rank its own gradients, for local training or to time a step without communication."""

    name = "noop"

    def run(self, part: Part) -> torch.Tensor:
        return part.buffer

    def run_sparse(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class FP16(Hook):
    """Send gradients in float16, half the bytes of float32; each rank divides before it sends."""

    name = "fp16"
    make_codec = staticmethod(lambda _: CastCodec(torch.float16))


class BF16(Hook):
    """Send gradients in bfloat16, half the bytes of float32 with its whole range."""

    name = "bf16"
    make_codec = staticmethod(lambda _: CastCodec(torch.bfloat16))


@dataclass(frozen=True, kw_only=True)
class BlockOptions(HookOptions):
    block_size: int = 256
    """Number of elements that share one float32 scale."""

    def __post_init__(self) -> None:
        require(
            isinstance(self.block_size, int) and self.block_size > 0 and self.block_size % 8 == 0,
            f"block_size={self.block_size!r}: expected a multiple of 8 above 0, such as 256",
        )


class Int8(Hook):
    """Send gradients in 8-bit integers with one scale per block: about a quarter of the bytes of float32."""

    name = "int8"
    Options = BlockOptions
    make_codec = staticmethod(lambda options: Int8Codec(options.block_size))


class FP8(Hook):
    """Send gradients in 8-bit floating point (e4m3) with one scale per block."""

    name = "fp8"
    Options = BlockOptions
    make_codec = staticmethod(lambda options: Fp8Codec(options.block_size))

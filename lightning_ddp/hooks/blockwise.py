"""`int8` and `fp8`: gradients travel in eight bits with a scale a block, and are added in float32."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ddp.comm.checks import require
from lightning_ddp.encoding.codecs import Fp8Codec, Int8Codec
from lightning_ddp.hooks.base import Hook, HookOptions

__all__ = ["FP8", "BlockOptions", "Int8"]


@dataclass(frozen=True, kw_only=True)
class BlockOptions(HookOptions):
    """Options of `int8` and `fp8`."""

    block: int = 256
    """Elements that share one float32 scale."""

    def __post_init__(self) -> None:
        require(
            isinstance(self.block, int) and self.block > 0 and self.block % 8 == 0,
            f"block={self.block!r}: expected a multiple of 8 above 0, such as 256",
        )


class Int8(Hook):
    """The mean, sent in 8 bits with a scale a block. About a quarter of the bytes of float32."""

    name = "int8"
    Options = BlockOptions

    @staticmethod
    def make_codec(options: BlockOptions) -> Int8Codec:
        """How this hook encodes, for itself or for the hook that it is wrapped around."""
        return Int8Codec(options.block)


class FP8(Hook):
    """The mean, sent as 8-bit floating point (e4m3) with a scale a block, where torch has that type."""

    name = "fp8"
    Options = BlockOptions

    @staticmethod
    def make_codec(options: BlockOptions) -> Fp8Codec:
        """How this hook encodes, for itself or for the hook that it is wrapped around."""
        return Fp8Codec(options.block)

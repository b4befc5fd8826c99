"""`fp16` and `bf16`: gradients travel in 16 bits and are added in 32."""

from __future__ import annotations

import torch

from lightning_ddp.encoding.codecs import CastCodec
from lightning_ddp.hooks.base import Hook

__all__ = ["BF16", "FP16"]


class FP16(Hook):
    """The mean, sent in float16. Half the bytes of float32; each rank divides before it sends."""

    name = "fp16"

    @staticmethod
    def make_codec(options: object) -> CastCodec:
        """How this hook encodes, for itself or for the hook that it is wrapped around."""
        return CastCodec(torch.float16)


class BF16(Hook):
    """The mean, sent in bfloat16. Half the bytes of float32, and its whole range."""

    name = "bf16"

    @staticmethod
    def make_codec(options: object) -> CastCodec:
        """How this hook encodes, for itself or for the hook that it is wrapped around."""
        return CastCodec(torch.bfloat16)

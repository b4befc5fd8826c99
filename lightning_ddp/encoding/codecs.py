"""In how many bits a number travels: 16-bit floating point, or 8 bits with a scale a block.

A scale that covers a small block keeps an outlier from coarsening everything else (Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", ICLR 2022, section 2.1, there with a nonlinear code).
"""

from __future__ import annotations

import torch

__all__ = ["CastCodec", "Fp8Codec", "Int8Codec", "has_fp8"]

_SCALE_BYTES = 4


def has_fp8() -> bool:
    """Whether this build of torch has the eight-bit type with four bits of exponent."""
    return hasattr(torch, "float8_e4m3fn")


class _BlockCodec:
    """Eight-bit codes of values that are divided by their block's scale; the scales go in front.

    Args:
        block: elements that share a scale.
        largest: absolute value of the largest code; the scale maps the largest element there.
    """

    def __init__(self, block: int, largest: float) -> None:
        self.block = block
        self._largest = largest

    def _to_codes(self, scaled: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _from_codes(self, codes: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Scales each block by its largest absolute value and rounds; a block of zeros stays zero."""
        num_rows, length = rows.shape
        if length % self.block:
            rows = torch.nn.functional.pad(rows, (0, -length % self.block))
        blocks = rows.float().view(num_rows, -1, self.block)
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
        """Codes times scales."""
        num_rows, num_blocks = data.shape[0], -(-numel // self.block)
        scales = data[:, : num_blocks * _SCALE_BYTES].contiguous().view(torch.float32)
        codes = data[:, num_blocks * _SCALE_BYTES :]
        codes = torch.nn.functional.pad(codes, (0, -numel % self.block)).contiguous()
        values = self._from_codes(codes).view(num_rows, num_blocks, self.block)
        return values.mul_(scales.unsqueeze(2)).view(num_rows, -1)[:, :numel]


class Int8Codec(_BlockCodec):
    """Integers from -127 to 127. The error is at most half a step: the block's largest value / 254."""

    def __init__(self, block: int) -> None:
        super().__init__(block, 127.0)

    def _to_codes(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.nan_to_num_().round_().to(torch.int8).view(torch.uint8)

    def _from_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.int8).float()


class Fp8Codec(_BlockCodec):
    """Floating point with 3 bits of mantissa: a relative error of at most 1/16 above the largest / 28,672."""

    def __init__(self, block: int) -> None:
        super().__init__(block, 448.0)

    def _to_codes(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.nan_to_num_().to(torch.float8_e4m3fn).view(torch.uint8)

    def _from_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.float8_e4m3fn).float()


class CastCodec:
    """Rounds each number to a 16-bit floating-point type.

    Args:
        dtype: `torch.float16` (11 bits of precision, up to 65,504; above that it becomes infinite) or
            `torch.bfloat16` (8 bits, the range of float32).
    """

    block = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rounds to nearest."""
        return rows.to(self._dtype).view(torch.uint8)

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """Exact."""
        return data.view(self._dtype).float()

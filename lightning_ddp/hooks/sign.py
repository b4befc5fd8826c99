"""`sign`: one bit per element, with error feedback.

Karimireddy, Rebjock, Stich and Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
ICML 2019, algorithm 1 (EF-signSGD), with the blocks and the momentum of Zheng, Huang and Kwok,
"Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback", NeurIPS 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_ddp.comm.group import uploaded
from lightning_ddp.errors import require
from lightning_ddp.hooks.base import MomentumHook, MomentumOptions, Part


@dataclass(frozen=True, kw_only=True)
class SignOptions(MomentumOptions):
    block_size: int = 1024
    """Number of elements of a parameter that share one float32 scale; the last block of each parameter may be
    shorter. Use smaller blocks for parameters whose parts have gradients of different sizes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.block_size >= 1, f"block_size={self.block_size}: expected at least 1")


class Sign(MomentumHook):
    """Send signs, with the mean absolute value of each block as its scale; keep the residual.

    With p the gradient plus the residual, each rank sends mean(|p|) sign(p), where sign(0) is +1 everywhere,
    and keeps p minus that. The traffic grows with the number N of ranks: N/64 of that of float32, and
    1/block_size of it for the scales.
    """

    name = "sign"
    Options = SignOptions
    options: SignOptions

    def compress(self, part: Part, velocity: torch.Tensor | None) -> torch.Tensor:
        lengths = uploaded(torch.tensor(self._block_lengths(part)), part.flat.device)
        numel = part.flat.numel()

        def decoded(scales: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
            signs = unpack_signs(bits, numel).to(part.flat.dtype)
            # Without `output_size` the host would wait for the device.
            return signs.mul_(scales.repeat_interleave(lengths, output_size=numel))

        scales, bits = self._scales(part), pack_signs(part.flat)
        mine = decoded(scales, bits)
        self.remember_slices(part, "error", part.flat - mine)
        gathered_scales = self.check_finite(self.channel.all_gather(scales))
        gathered_bits = self.channel.all_gather(bits)
        mean = torch.zeros_like(part.flat)
        for rank, received in enumerate(zip(gathered_scales, gathered_bits, strict=True)):
            mean.add_(mine if rank == self.channel.rank else decoded(*received))
        return mean.div_(self.channel.size)

    def _block_lengths(self, part: Part) -> list[int]:
        lengths: list[int] = []
        for size in part.sizes:
            whole, rest = divmod(size, self.options.block_size)
            lengths += [self.options.block_size] * whole + [rest] * (rest > 0)
        return lengths

    def _scales(self, part: Part) -> torch.Tensor:
        """Return the mean absolute value of each block; 0 for parameters without a gradient anywhere."""
        scales = []
        for piece, is_present in zip(part.slices(), part.present, strict=True):
            sizes = piece.abs() if is_present else torch.zeros_like(piece)
            whole = piece.numel() // self.options.block_size * self.options.block_size
            scales.append(sizes[:whole].view(-1, self.options.block_size).mean(1))
            if whole < piece.numel():
                scales.append(sizes[whole:].mean().view(1))
        return torch.cat(scales)


def pack_signs(flat: torch.Tensor) -> torch.Tensor:
    """Pack signs as one bit per element (1 if not negative), eight per byte, in uint8.

    >>> pack_signs(torch.tensor([1.0, -1.0, 0.0, -2.0, 3.0, 1.0, 1.0, 1.0, -1.0, 5.0])).tolist()
    [245, 2]
    """
    bits = (flat >= 0).to(torch.uint8)
    padded = torch.nn.functional.pad(bits, (0, -flat.numel() % 8)).view(-1, 8)
    packed = padded[:, 0].clone()
    for place in range(1, 8):
        packed |= padded[:, place] << place
    return packed


def unpack_signs(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Unpack the signs of `pack_signs` as +1 and -1 in int8.

    >>> unpack_signs(torch.tensor([245, 2], dtype=torch.uint8), 10).tolist()
    [1, -1, 1, -1, 1, 1, 1, 1, -1, 1]
    """
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(1) >> places) & 1
    return bits.view(-1)[:numel].to(torch.int8).mul_(2).sub_(1)

"""`sign`: one bit an element, with error feedback.

Karimireddy, Rebjock, Stich and Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
ICML 2019, algorithm 1 (EF-signSGD).
"""

from __future__ import annotations

import torch

from lightning_ddp.hooks.base import Part, StatefulHook, check_finite

__all__ = ["Sign", "pack_signs", "unpack_signs"]


class Sign(StatefulHook):
    """Sends of each parameter the signs and one scale, the mean absolute value; the rest waits.

    With p the gradient plus the residual, each rank sends mean(|p|) sign(p), where sign(0) is +1 everywhere,
    and keeps p minus that. All ranks get the bits of all ranks, so the traffic grows with their number: it is
    1/32 of float32 at two ranks and N/64 of it at N.
    """

    name = "sign"

    def reduce(self, part: Part) -> torch.Tensor:
        """The mean over the ranks of what each of them sends."""
        self.add_errors(part)
        sizes = part.sizes
        pieces = zip(part.slices(), part.present, strict=True)
        scales = torch.stack([self._scale(piece, is_present) for piece, is_present in pieces])
        gathered_scales = check_finite(self.channel.all_gather(scales))
        gathered_bits = self.channel.all_gather(pack_signs(part.flat))
        lengths = torch.tensor(sizes, device=part.flat.device)
        mean = torch.zeros_like(part.flat)
        residual = part.flat
        for rank in range(self.channel.size):
            signs = unpack_signs(gathered_bits[rank], part.flat.numel()).to(mean.dtype)
            sent = signs.mul_(gathered_scales[rank].repeat_interleave(lengths))
            mean.add_(sent)
            if rank == self.channel.rank:
                residual = part.flat - sent
        self.remember_errors(part, residual)
        return mean.div_(self.channel.size)

    @staticmethod
    def _scale(piece: torch.Tensor, is_present: bool) -> torch.Tensor:
        return piece.abs().mean() if is_present and piece.numel() else piece.new_zeros(())


def pack_signs(flat: torch.Tensor) -> torch.Tensor:
    """One bit an element, eight a byte, 1 for what is not negative; uint8.

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
    """The signs of `pack_signs`: +1 and -1 as int8.

    >>> unpack_signs(torch.tensor([245, 2], dtype=torch.uint8), 10).tolist()
    [1, -1, 1, -1, 1, 1, 1, 1, -1, 1]
    """
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(1) >> places) & 1
    return bits.view(-1)[:numel].to(torch.int8).mul_(2).sub_(1)

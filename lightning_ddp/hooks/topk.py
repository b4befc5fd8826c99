"""`topk`: the largest elements, with momentum that survives the wait of the others.

Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth for
Distributed Training", ICLR 2018, section 3 and algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lightning_ddp.comm.checks import require
from lightning_ddp.hooks.base import Part
from lightning_ddp.hooks.momentum import MomentumHook, MomentumOptions

__all__ = ["TopK", "TopKOptions"]

_WARMUP_FACTOR = 0.25
"""The first warm-up ratio, and the factor between two of them."""


@dataclass(frozen=True, kw_only=True)
class TopKOptions(MomentumOptions):
    """Options of `topk`."""

    ratio: float = 0.01
    """Part of each parameter's elements that is sent, at least one element."""
    warmup_steps: int = 0
    """Steps over which the ratio falls to its value: a quarter, a sixteenth and so on, for equal times."""
    start_step: int = 0
    """Synchronised backwards with the plain mean before compression, and the warm-up, start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.ratio <= 1, f"ratio={self.ratio}: expected above 0 and at most 1")
        require(self.warmup_steps >= 0, f"warmup_steps={self.warmup_steps}: expected 0 or more")
        require(self.start_step >= 0, f"start_step={self.start_step}: expected 0 or more")

    def ratio_at(self, step: int) -> float:
        """The ratio of a step; 1 where the mean is plain.

        >>> [TopKOptions(ratio=0.01, warmup_steps=8).ratio_at(step) for step in (0, 2, 4, 6, 8)]
        [0.25, 0.0625, 0.015625, 0.01, 0.01]
        """
        step -= self.start_step
        if step < 0:
            return 1.0
        if step >= self.warmup_steps or self.ratio >= _WARMUP_FACTOR:
            return self.ratio
        num_stages = math.ceil(math.log(self.ratio) / math.log(_WARMUP_FACTOR))
        stage = step * num_stages // self.warmup_steps
        return max(self.ratio, _WARMUP_FACTOR ** (stage + 1))


class TopK(MomentumHook):
    """Sends of each parameter the elements with the largest accumulated velocity; the rest waits.

    With g the gradient: u = m u + g, v = v + u, the k elements of v with the largest absolute values are
    sent, and at their positions both are set to 0, so that old momentum does not push them further (momentum
    factor masking). Without momentum that is error feedback: v is the residual. Values and positions of all
    ranks go to all ranks, so the traffic grows with their number.
    """

    name = "topk"
    Options = TopKOptions
    options: TopKOptions

    def reduce(self, part: Part) -> torch.Tensor:
        """The mean over the ranks of what each of them sends."""
        velocity = self.add_momentum(part)
        if self.step < self.options.start_step:
            self.remember_velocity(part, velocity)
            return self.check_finite(self.wire.mean(part.flat))
        self.add_errors(part)
        indices = self._select(part)
        if not indices.numel():
            return part.flat
        sent = part.flat[indices]
        part.flat[indices] = 0
        self.remember_errors(part, part.flat)
        self.remember_velocity(part, velocity, indices)
        values = self.check_finite(self.wire.gather(sent))
        positions = self.channel.all_gather(indices.to(torch.int32))
        # where the wire rounds, what it rounded off stays here
        part.flat[indices] = sent - values[self.channel.rank].to(sent.dtype)
        mean = torch.zeros_like(part.flat)
        # rank by rank: the positions of one rank differ, so the order of every sum is the same everywhere
        for row, where in zip(values.unbind(0), positions.unbind(0), strict=True):
            mean[where.long()] += row.to(mean.dtype)
        return mean.div_(self.channel.size)

    def _select(self, part: Part) -> torch.Tensor:
        """Positions in the flat gradient of the elements to send: the same number on all ranks."""
        ratio = self.options.ratio_at(self.step)
        found = []
        start = 0
        for piece, is_present in zip(part.slices(), part.present, strict=True):
            if is_present and piece.numel():
                count = max(1, math.ceil(ratio * piece.numel()))
                found.append(torch.topk(piece.abs(), count, sorted=False).indices + start)
            start += piece.numel()
        if not found:
            return torch.empty(0, dtype=torch.int64, device=part.flat.device)
        return torch.cat(found)

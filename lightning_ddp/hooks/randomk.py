"""`randomk`: a random part of the elements, the same on all ranks.

Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch

from lightning_ddp.comm.checks import require
from lightning_ddp.comm.uploads import uploaded
from lightning_ddp.hooks.base import Part
from lightning_ddp.hooks.momentum import MomentumHook, MomentumOptions

__all__ = ["RandomK", "RandomKOptions"]


@dataclass(frozen=True, kw_only=True)
class RandomKOptions(MomentumOptions):
    """Options of `randomk`."""

    ratio: float = 0.01
    """Part of each parameter's elements that is sent, at least one element."""
    seed: int = 0
    """Of the choice of elements; the same on all ranks."""
    start_step: int = 0
    """Synchronised backwards with the plain mean before compression starts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.ratio <= 1, f"ratio={self.ratio}: expected above 0 and at most 1")
        require(self.start_step >= 0, f"start_step={self.start_step}: expected 0 or more")


class RandomK(MomentumHook):
    """Sends random elements of each parameter, without their positions, and keeps the others for later.

    The positions follow from seed, step and parameter name, so all ranks choose the same ones and the values
    can be averaged as they are: the traffic does not grow with the number of ranks. An element waits
    1 / ratio steps on average, which an optimizer with momentum at a high learning rate does not bear: set
    `momentum` here instead, as with `topk`.
    """

    name = "randomk"
    Options = RandomKOptions
    options: RandomKOptions

    def reduce(self, part: Part) -> torch.Tensor:
        """The mean at the chosen positions, zero elsewhere."""
        velocity = self.add_momentum(part)
        if self.step < self.options.start_step:
            self.remember_velocity(part, velocity)
            return self.check_finite(self.wire.mean(part.flat))
        self.add_errors(part)
        indices = self._choose(part)
        if not indices.numel():
            return part.flat
        sent = part.flat[indices]
        part.flat[indices] = 0
        self.remember_errors(part, part.flat)
        self.remember_velocity(part, velocity, indices)
        means = self.check_finite(self.wire.mean(sent))
        result = torch.zeros_like(part.flat)
        result[indices] = means.to(result.dtype)
        return result

    def _choose(self, part: Part) -> torch.Tensor:
        chosen = []
        start = 0
        for name, size, is_present in zip(part.names, part.sizes, part.present, strict=True):
            if is_present and size:
                count = max(1, math.ceil(self.options.ratio * size))
                chosen.append(self._positions(name, size, count) + start)
            start += size
        if not chosen:
            return torch.empty(0, dtype=torch.int64, device=part.flat.device)
        return uploaded(torch.cat(chosen), part.flat.device)

    def _positions(self, name: str, size: int, count: int) -> torch.Tensor:
        """`count` different positions below `size`, each with the same probability."""
        key = f"{self.options.seed} {self.step} {name}"
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        if 4 * count >= size:
            return torch.randperm(size, generator=generator)[:count]
        # drawing again what was drawn twice costs far less than a permutation of a large tensor
        found: torch.Tensor = torch.randint(size, (count,), generator=generator).unique()
        while found.numel() < count:
            more = torch.randint(size, (count - found.numel(),), generator=generator)
            found = torch.cat([found, more]).unique()
        return found

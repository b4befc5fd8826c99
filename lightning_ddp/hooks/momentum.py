"""Momentum that is applied before compression, so that what is sent late still has the weight it should have.

Lin et al., "Deep Gradient Compression", ICLR 2018, section 3.1, and Zheng, Huang and Kwok,
"Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback", NeurIPS 2019, algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_ddp.comm.checks import require
from lightning_ddp.hooks.base import HookOptions, Part, StatefulHook

__all__ = ["MomentumHook", "MomentumOptions"]


@dataclass(frozen=True, kw_only=True)
class MomentumOptions(HookOptions):
    """Options of hooks that can apply momentum."""

    momentum: float = 0.0
    """Factor of the velocity that is kept here, before compression. The optimizer's own must then be 0: set
    this to what it was. 0 keeps plain residuals and goes with any optimizer."""
    nesterov: bool = False
    """Whether the velocity looks one step ahead."""

    def __post_init__(self) -> None:
        require(0 <= self.momentum < 1, f"momentum={self.momentum}: expected from 0 and below 1")
        require(not self.nesterov or self.momentum > 0, "nesterov=True needs a momentum above 0")


class MomentumHook(StatefulHook):
    """A hook with a velocity for each parameter: with g the gradient, u = m u + g takes the place of g."""

    Options = MomentumOptions
    options: MomentumOptions

    def add_momentum(self, part: Part) -> torch.Tensor | None:
        """Turns the flat gradient into what the velocity makes of it; returns the velocity, if any."""
        momentum = self.options.momentum
        if not momentum:
            return None
        velocity = part.flat.clone()
        for name, piece, is_present in zip(part.names, velocity.split(part.sizes), part.present, strict=True):
            before = self.recall(name, "velocity", piece.numel()) if is_present else None
            if before is not None:
                piece.add_(before, alpha=momentum)
        if self.options.nesterov:
            part.flat.add_(velocity, alpha=momentum)
        else:
            part.flat.copy_(velocity)
        return velocity

    def remember_velocity(
        self, part: Part, velocity: torch.Tensor | None, sent: torch.Tensor | None = None
    ) -> None:
        """Keeps the velocity of this step, for the parameters that took part in it.

        Args:
            part: the bucket.
            velocity: from `add_momentum`.
            sent: positions that were sent and begin anew, so that old momentum does not push them further.
        """
        if velocity is None:
            return
        if sent is not None:
            velocity[sent] = 0
        for name, piece, is_present in zip(part.names, velocity.split(part.sizes), part.present, strict=True):
            if is_present:
                self.remember(name, "velocity", piece)

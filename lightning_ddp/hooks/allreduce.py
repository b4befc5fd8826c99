"""`allreduce`: the plain mean; `noop`: no communication at all."""

from __future__ import annotations

import torch

from lightning_ddp.hooks.base import Hook, Part

__all__ = ["AllReduce", "NoOp"]


class AllReduce(Hook):
    """The mean over the ranks in the gradients' own type, as without a hook. The base of comparisons."""

    name = "allreduce"


class NoOp(Hook):
    """Leaves each rank its own gradients. For local training phases, and to time a step without traffic."""

    name = "noop"

    def run(self, part: Part) -> torch.Tensor:
        """Returns the bucket as it is. Does not communicate."""
        return part.buffer

"""Optimizers that step during backward, as torch's `_apply_optimizer_in_backward` attaches them.

torch lets each parameter's optimizer step as soon as its local gradient is there. Under data parallelism
the step has to wait for the mean: it is taken when the parameter's bucket is reduced, while later buckets
are still on their way.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_ddp._torch import OPTIMIZERS_IN_BACKWARD
from lightning_ddp.ddp.bucket import Bucket

__all__ = ["OptimizersInBackward"]


class OptimizersInBackward:
    """Steps the optimizers of parameters once their gradients are averaged, then frees these gradients.

    Args:
        parameters: those that the reducer averages. Hooks by which torch would step on the local gradients
            are taken off.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        from torch.distributed.optim.apply_optimizer_in_backward import (  # slow to import, rarely needed
            param_to_optim_hook_handle_map,
        )

        for parameter in parameters:
            for handle in param_to_optim_hook_handle_map.get(parameter, []):
                handle.remove()

    @staticmethod
    def are_used(parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Whether any of `parameters` has such an optimizer."""
        return any(hasattr(parameter, OPTIMIZERS_IN_BACKWARD) for parameter in parameters)

    def step(self, bucket: Bucket) -> None:
        """Steps for the parameters of a reduced bucket that have a gradient."""
        for parameter in bucket.params:
            optimizers = getattr(parameter, OPTIMIZERS_IN_BACKWARD, None)
            if optimizers is None or parameter.grad is None:
                continue
            for optimizer in optimizers:
                optimizer.step()
            parameter.grad = None

"""Averaged gradients cannot be differentiated again: backward does not go through the all-reduce."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lightning_ddp.errors import BackwardOrderError

__all__ = ["refuse_double_backward"]


class _Averaged(torch.autograd.Function):
    """The identity, with a backward that says why there is none."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise BackwardOrderError(
            "backward through an averaged gradient (create_graph=True, then backward of something computed"
            " from .grad): the other ranks' parts of it are not in this process's graph. Compute the penalty"
            " from torch.autograd.grad(...) of the loss inside forward, and call backward once on the sum."
        )


def refuse_double_backward(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Makes a second backward through the averaged gradients of `parameters` an error that says so."""
    with torch.enable_grad():
        for parameter in parameters:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad = _Averaged.apply(  # type: ignore[no-untyped-call]
                    parameter.grad.detach(), parameter
                )

"""Copies of what a forward changes in a module besides its outputs: buffers and metrics."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lightning_ddp._torch import COMPUTED, UPDATE_COUNT, buffers_of, preserve_version_counters

__all__ = ["ModuleSnapshot", "copy_states", "put_states", "unseen_by_autograd"]


@contextmanager
def unseen_by_autograd(tensors: Sequence[torch.Tensor]) -> Generator[None, None, None]:
    """What is written to `tensors` in here does not count as a change: a backward may still follow."""
    with torch.no_grad(), preserve_version_counters(tuple(tensors)):
        yield


class ModuleSnapshot:
    """The buffers of a module and the states of the torchmetrics in it, at one moment."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._buffers = [
            (buffers_of(owner), key, tensor, None if tensor is None else tensor.detach().clone())
            for owner in module.modules()
            for key, tensor in buffers_of(owner).items()
        ]
        self._metrics = [
            (metric, copy_states(metric), getattr(metric, UPDATE_COUNT))
            for metric in module.modules()
            if hasattr(type(metric), "metric_state") and hasattr(metric, UPDATE_COUNT)
        ]

    def restore(self) -> None:
        """Puts them back, in place and unseen by autograd."""
        with unseen_by_autograd([tensor for _, _, tensor, _ in self._buffers if tensor is not None]):
            for owner, key, tensor, value in self._buffers:
                if tensor is not None and value is not None:
                    tensor.detach().copy_(value)
                owner[key] = tensor
        for metric, states, count in self._metrics:
            put_states(metric, states)
            setattr(metric, UPDATE_COUNT, count)


def copy_states(metric: Any) -> dict[str, Any]:
    """The states of a torchmetrics `Metric`: tensors, or lists of them. Does not communicate."""
    return {
        name: state.detach().clone() if isinstance(state, torch.Tensor) else list(state)
        for name, state in metric.metric_state.items()
    }


def put_states(metric: Any, states: Mapping[str, Any]) -> None:
    """Gives a torchmetrics `Metric` the states that `copy_states` has copied."""
    for name, state in states.items():
        setattr(metric, name, state.clone() if isinstance(state, torch.Tensor) else list(state))
    setattr(metric, COMPUTED, None)

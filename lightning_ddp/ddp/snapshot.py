"""Copies of what a forward changes in a module besides its outputs: buffers and metrics."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

import torch

from lightning_ddp._torch import (
    COMPUTED,
    UPDATE_COUNT,
    buffers_of,
    foreach_copy_,
    preserve_version_counters,
)

__all__ = ["ModuleSnapshot", "copy_states", "put_states", "unseen_by_autograd"]


@contextmanager
def unseen_by_autograd(tensors: Sequence[torch.Tensor]) -> Generator[None, None, None]:
    """What is written to `tensors` in here does not count as a change: a backward may still follow."""
    with torch.no_grad(), preserve_version_counters(tuple(tensors)):
        yield


class ModuleSnapshot:
    """The buffers of a module and the states of the torchmetrics in it, at one moment."""

    def __init__(self, module: torch.nn.Module) -> None:
        modules = list(module.modules())
        self._owners = [buffers_of(owner) for owner in modules if buffers_of(owner)]
        self._found = [
            metric
            for metric in modules
            if hasattr(type(metric), "metric_state") and hasattr(metric, UPDATE_COUNT)
        ]
        self._buffers: list[tuple[Any, str, Any]] = []
        self._present: list[torch.Tensor | None] = []
        self._tensors: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self.retake()

    def retake(self) -> None:
        """Copies what the modules that were found hold now, into the same memory."""
        present = list(chain.from_iterable(map(dict.values, self._owners)))
        is_same = len(present) == len(self._present) and all(map(is_, present, self._present))
        if is_same and self._tensors:
            try:
                with torch.no_grad():
                    foreach_copy_(self._values, self._tensors)
            except RuntimeError:  # one has another size now
                is_same = False
        if not is_same:
            self._buffers = [(owner, key, tensor) for owner in self._owners for key, tensor in owner.items()]
            self._present = present
            self._tensors = [tensor for tensor in present if tensor is not None]
            self._values = [tensor.detach().clone() for tensor in self._tensors]
        self._metrics = [(m, copy_states(m), getattr(m, UPDATE_COUNT)) for m in self._found]

    def restore(self) -> None:
        """Puts them back, in place and unseen by autograd."""
        with unseen_by_autograd(self._tensors):
            for tensor, value in zip(self._tensors, self._values, strict=True):
                tensor.detach().copy_(value)
        for owner, key, present in self._buffers:
            owner[key] = present
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

"""What the benchmarks compare: this package's wrapper and torch's, each a name with a fixed set of flags."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp import BucketedDDP
from lightning_ddp.bench.arguments import OURS, TORCH_DEFAULT, TORCH_FLAGS, TORCH_VIEW
from lightning_ddp.bench.models import Workload, compute_loss


def constructor_flags(contender: str) -> dict[str, bool]:
    """Return the arguments with which a contender is built, besides the module and its device.

    Flags that the installed torch does not have are left out.

    Raises:
        KeyError: If there is no contender of that name.
    """
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {name: value for name, value in _FLAGS[contender].items() if name in known}


def wrap(contender: str, module: nn.Module, device: torch.device) -> nn.Module:
    """Wrap a module for data-parallel training over the default process group.

    Called by all ranks; communicates.

    Args:
        contender: A name from `lightning_ddp.bench.arguments`.
        module: The module, already on ``device``.
        device: The rank's device.

    Raises:
        KeyError: If there is no contender of that name.
    """
    flags: dict[str, Any] = constructor_flags(contender)
    device_ids = [device.index] if device.type == "cuda" else None
    if contender == OURS:
        return BucketedDDP(module, device_ids=device_ids)
    return DistributedDataParallel(module, device_ids=device_ids, **flags)


class TrainingRun:
    """One contender in training: a wrapped model, its optimizer and its batch.

    Args:
        contender: A name from `lightning_ddp.bench.arguments`.
        workload: Model and batch; the model is moved and trained in place.
        device: The rank's device.
    """

    def __init__(self, contender: str, workload: Workload, device: torch.device) -> None:
        self.contender = contender
        self._batch = workload.batch.to(device)
        self._module = workload.module.to(device)
        self._wrapped = wrap(contender, self._module, device)
        # A small rate: it does not change the time of a step, and weights stay finite in any number of steps.
        self._optimizer = torch.optim.SGD(self._wrapped.parameters(), lr=1e-6)

    def step(self) -> None:
        """Do one training step: zero the gradients, forward, backward, update. All ranks; communicates."""
        self._optimizer.zero_grad(set_to_none=True)
        compute_loss(self._wrapped(self._batch)).backward()
        self._optimizer.step()

    def take_weights(self, other: TrainingRun) -> None:
        """Overwrite weights and buffers with those of another run of the same model."""
        self._module.load_state_dict(other._module.state_dict())

    def averaged_state(self) -> dict[str, Tensor]:
        """Return copies of what a wrapper keeps in step across ranks; all ranks, communicates.

        An evaluating forward comes first: by then a wrapper has to have brought the buffers together.

        Returns:
            ``gradients``, and ``buffers`` where the model has floating-point ones; each as one vector.

        Raises:
            RuntimeError: If a parameter has no gradient.
        """
        gradients = []
        for name, parameter in self._wrapped.named_parameters():
            if parameter.grad is None:
                raise RuntimeError(f"{self.contender} left {name} without a gradient")
            gradients.append(parameter.grad.flatten())
        state = {"gradients": torch.cat(gradients)}
        self._wrapped.eval()
        with torch.no_grad():
            self._wrapped(self._batch)
        self._wrapped.train()
        buffers = [buffer.flatten() for buffer in self._wrapped.buffers() if buffer.is_floating_point()]
        if buffers:
            state["buffers"] = torch.cat(buffers)
        return state


_FLAGS: Mapping[str, Mapping[str, bool]] = {
    OURS: {},
    TORCH_DEFAULT: {},
    TORCH_VIEW: {"gradient_as_bucket_view": True},
    TORCH_FLAGS: {"gradient_as_bucket_view": True, "static_graph": True, "batched_grad_copy": True},
}

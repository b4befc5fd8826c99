"""What the benchmarks compare: this package's wrapper and torch's, each a name with a fixed set of flags."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp import BucketedDDP
from lightning_ddp.tools.bench.arguments import CONTENDERS
from lightning_ddp.tools.bench.models import Workload, compute_loss


def constructor_flags(contender: str) -> dict[str, Any]:
    """Return the arguments with which a contender is built, besides the module and its device.

    Flags that the installed torch does not have are left out.

    Raises:
        KeyError: If there is no contender of that name.
    """
    chosen = CONTENDERS[contender]
    if not chosen.is_torch:
        return dict(chosen.flags)
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {name: value for name, value in chosen.flags.items() if name in known}


def wrap(contender: str, module: nn.Module, device: torch.device) -> nn.Module:
    """Wrap a module for data-parallel training over the default process group.

    Called by all ranks; communicates.

    Args:
        contender: A name of `lightning_ddp.tools.bench.arguments.CONTENDERS`.
        module: The module, already on ``device``.
        device: The rank's device.

    Raises:
        KeyError: If there is no contender of that name.
    """
    if CONTENDERS[contender].is_bare:
        return module
    wrapper = BucketedDDP if CONTENDERS[contender].is_ours else DistributedDataParallel
    device_ids = [device.index] if device.type == "cuda" else None
    return wrapper(module, device_ids=device_ids, **constructor_flags(contender))


class TrainingRun:
    """One contender in training: a wrapped model, its optimizer and its batch.

    Args:
        contender: A name of `lightning_ddp.tools.bench.arguments.CONTENDERS`.
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

    def state_after_one_step(self, workload: Workload) -> dict[str, Tensor]:
        """Do one step from given weights; return copies of what a wrapper keeps in step across ranks.

        An evaluating forward comes after it: by then a wrapper has to have brought the buffers together. All
        ranks; communicates.

        Args:
            workload: As it was at first: the same model, with the weights and buffers to start from.

        Returns:
            ``gradients``, and ``buffers`` where the model has floating-point ones; each as one vector.

        Raises:
            RuntimeError: If a parameter has no gradient.
        """
        self._module.load_state_dict(workload.module.state_dict())
        self.step()
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

"""Ways to wrap a module that are timed beside each other: this package's wrapper and torch's, with flags."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp import BucketedDDP
from lightning_ddp.tools.models import Workload, compute_loss

OURS: Final = "ours"
OURS_GLOO: Final = "ours_gloo"
"""Without shared memory: what that gains between ranks of a host."""
TORCH_DEFAULT: Final = "torch_ddp"
TORCH_VIEW: Final = "torch_ddp_view"
TORCH_FLAGS: Final = "torch_ddp_flags"
"""With every flag on that makes a static model's step faster."""
BARE: Final = "bare"
"""The module itself, on one rank: for the overhead of a wrapper."""

_VIEW: Final = {"gradient_as_bucket_view": True}
CONTENDERS: Final[Mapping[str, tuple[type[nn.Module] | None, Mapping[str, Any]]]] = {
    OURS: (BucketedDDP, {}),
    OURS_GLOO: (BucketedDDP, {"transport": "gloo"}),
    TORCH_DEFAULT: (DistributedDataParallel, {}),
    TORCH_VIEW: (DistributedDataParallel, _VIEW),
    TORCH_FLAGS: (DistributedDataParallel, {**_VIEW, "static_graph": True, "batched_grad_copy": True}),
    BARE: (None, {}),
}
"""Name -> what wraps, if anything, and its arguments besides the module and its device."""


def is_torch(contender: str) -> bool:
    """Whether torch's DistributedDataParallel wraps it."""
    return CONTENDERS[contender][0] is DistributedDataParallel


def constructor_flags(contender: str) -> dict[str, Any]:
    """The arguments with which a contender is built; without flags that the installed torch does not have."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    flags = CONTENDERS[contender][1]
    return {name: value for name, value in flags.items() if name in known or not is_torch(contender)}


def wrap(contender: str, module: nn.Module, device: torch.device) -> nn.Module:
    """Wrap a module, which is on its device, for training over the default process group. All ranks."""
    wrapper: Any = CONTENDERS[contender][0]
    if wrapper is None:
        return module
    device_ids = [device.index] if device.type == "cuda" else None
    wrapped: nn.Module = wrapper(module, device_ids=device_ids, **constructor_flags(contender))
    return wrapped


class TrainingRun:
    """A model in training: wrapped, with its optimizer and its batch. All ranks make it together.

    Args:
        contender: a name of `CONTENDERS`.
        workload: model and batch; the model is moved and trained in place.
        device: of the rank.
    """

    def __init__(self, contender: str, workload: Workload, device: torch.device) -> None:
        self.contender = contender
        self.batch = workload.batch.to(device)
        self.module = workload.module.to(device)
        self.wrapped = wrap(contender, self.module, device)
        # A small rate: it does not change the time of a step, and weights stay finite in any number of steps.
        self._optimizer = torch.optim.SGD(self.wrapped.parameters(), lr=1e-6)

    def step(self) -> None:
        """Do one training step: zero the gradients, forward, backward, update. All ranks; communicates."""
        self._optimizer.zero_grad(set_to_none=True)
        compute_loss(self.wrapped(self.batch)).backward()
        self._optimizer.step()

    def state_after_one_step(self, workload: Workload) -> dict[str, Tensor]:
        """Do one step from the weights of a workload; return what a wrapper keeps in step across ranks.

        An evaluating forward comes after it: by then a wrapper has to have brought the buffers together. All
        ranks; communicates.

        Returns:
            "gradients", and "buffers" where the model has floating-point ones; each as one vector.

        Raises:
            RuntimeError: a parameter has no gradient.
        """
        self.module.load_state_dict(workload.module.state_dict())
        self.step()
        gradients = []
        for name, parameter in self.wrapped.named_parameters():
            if parameter.grad is None:
                raise RuntimeError(f"{self.contender} left {name} without a gradient")
            gradients.append(parameter.grad.flatten())
        state = {"gradients": torch.cat(gradients)}
        self.wrapped.eval()
        with torch.no_grad():
            self.wrapped(self.batch)
        self.wrapped.train()
        buffers = [buffer.flatten() for buffer in self.wrapped.buffers() if buffer.is_floating_point()]
        if buffers:
            state["buffers"] = torch.cat(buffers)
        return state

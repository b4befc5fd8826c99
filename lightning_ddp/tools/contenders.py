"""Ways to wrap a module that are timed beside each other: this package's wrapper and torch's, with flags.

Free of torch until something is wrapped, so that `--help` is fast.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from lightning_ddp.tools.models import Workload

OURS: Final = "ours"
"""`lightning_ddp.BucketedDDP` with its default arguments."""

OURS_GLOO: Final = "ours_gloo"
"""The same without shared memory: what that gains between ranks of a host."""

TORCH_DEFAULT: Final = "torch_ddp"
"""torch's DistributedDataParallel with its default arguments."""

TORCH_VIEW: Final = "torch_ddp_view"
"""torch's DistributedDataParallel with `gradient_as_bucket_view=True`."""

TORCH_FLAGS: Final = "torch_ddp_flags"
"""torch's DistributedDataParallel with every flag on that makes a static model's step faster."""

BARE: Final = "bare"
"""The module itself, on one rank."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to wrap a module."""

    is_ours: bool = False
    """Whether `lightning_ddp.BucketedDDP` wraps it; otherwise torch's DistributedDataParallel."""
    is_bare: bool = False
    """Whether nothing wraps it, for the overhead of a wrapper on one rank."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the wrapper besides the module and its device."""

    @property
    def is_torch(self) -> bool:
        """Whether torch's DistributedDataParallel wraps it."""
        return not (self.is_ours or self.is_bare)


CONTENDERS: Final[Mapping[str, Contender]] = {
    OURS: Contender(is_ours=True),
    OURS_GLOO: Contender(is_ours=True, flags={"transport": "gloo"}),
    TORCH_DEFAULT: Contender(),
    TORCH_VIEW: Contender(flags={"gradient_as_bucket_view": True}),
    TORCH_FLAGS: Contender(
        flags={"gradient_as_bucket_view": True, "static_graph": True, "batched_grad_copy": True}
    ),
    BARE: Contender(is_bare=True),
}
"""Name -> how it wraps; a new contender is one line here."""


def constructor_flags(contender: str) -> dict[str, Any]:
    """The arguments with which a contender is built, besides the module and its device.

    Flags that the installed torch does not have are left out.

    Raises:
        KeyError: there is no contender of that name.
    """
    from torch.nn.parallel import DistributedDataParallel

    chosen = CONTENDERS[contender]
    if not chosen.is_torch:
        return dict(chosen.flags)
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {name: value for name, value in chosen.flags.items() if name in known}


def wrap(contender: str, module: nn.Module, device: torch.device) -> nn.Module:
    """Wrap a module for data-parallel training over the default process group. All ranks; communicates.

    Args:
        contender: a name of `CONTENDERS`.
        module: already on `device`.
        device: of the rank.

    Raises:
        KeyError: there is no contender of that name.
    """
    from torch.nn.parallel import DistributedDataParallel

    from lightning_ddp import BucketedDDP

    if CONTENDERS[contender].is_bare:
        return module
    wrapper: Any = BucketedDDP if CONTENDERS[contender].is_ours else DistributedDataParallel
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
        import torch

        from lightning_ddp.tools.models import compute_loss

        self.contender = contender
        self._loss = compute_loss
        self.batch = workload.batch.to(device)
        self.module = workload.module.to(device)
        self.wrapped = wrap(contender, self.module, device)
        # A small rate: it does not change the time of a step, and weights stay finite in any number of steps.
        self._optimizer = torch.optim.SGD(self.wrapped.parameters(), lr=1e-6)

    def step(self) -> None:
        """Do one training step: zero the gradients, forward, backward, update. All ranks; communicates."""
        self._optimizer.zero_grad(set_to_none=True)
        self._loss(self.wrapped(self.batch)).backward()
        self._optimizer.step()

    def state_after_one_step(self, workload: Workload) -> dict[str, Tensor]:
        """Do one step from given weights; return copies of what a wrapper keeps in step across ranks.

        An evaluating forward comes after it: by then a wrapper has to have brought the buffers together. All
        ranks; communicates.

        Args:
            workload: as it was at first: the same model, with the weights and buffers to start from.

        Returns:
            "gradients", and "buffers" where the model has floating-point ones; each as one vector.

        Raises:
            RuntimeError: a parameter has no gradient.
        """
        import torch

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

"""Benchmark models with a batch, and the wrappers to compare.

Each model stresses another part of a data-parallel wrapper: `linear500` the per-parameter cost of hooks
(1,000 small parameters), `linear16` bytes (64 MiB of gradients), `transformer6` a usual mix, `convbn40`
the broadcast of buffers before each forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp import BucketedDDP


class Workload(NamedTuple):
    """A model with the same weights on all ranks, and a batch of float32 inputs, on the CPU."""

    module: nn.Module
    batch: Tensor


def build_workload(name: str, *, rank: int) -> Workload:
    """Return a model of `MODEL_NAMES`, and a batch that depends on `rank`: the same values each time."""
    build_module, batch_shape = WORKLOADS[name]
    torch.manual_seed(0)
    module = build_module()
    return Workload(module, torch.randn(batch_shape, generator=torch.Generator().manual_seed(1 + rank)))


def compute_loss(output: Tensor) -> Tensor:
    """Return the scalar loss of every model: the mean square of its output."""
    return output.square().mean()


def _repeated(times: int, *builders: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*(build() for _ in range(times) for build in builders))


def _transformer6() -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        d_model=256, nhead=4, dim_feedforward=1024, dropout=0.0, batch_first=True
    )
    return nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)


def _scaled_linear(features: int, nonlinearity: str) -> nn.Module:
    # The default initialization shrinks the signal in each layer; hundreds of layers deep it ends in denormal
    # numbers, whose arithmetic is many times slower and would be what is measured.
    linear = nn.Linear(features, features)
    nn.init.kaiming_normal_(linear.weight, nonlinearity=nonlinearity)  # type: ignore[arg-type]  # a Literal in torch
    nn.init.zeros_(linear.bias)
    return linear


_conv = partial(nn.Conv2d, 32, 32, kernel_size=3, padding=1)
WORKLOADS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear500": (partial(_repeated, 500, partial(_scaled_linear, 32, "relu"), nn.ReLU), (8, 32)),
    "linear16": (partial(_repeated, 16, partial(_scaled_linear, 1024, "linear")), (8, 1024)),
    "transformer6": (_transformer6, (8, 64, 256)),
    "convbn40": (partial(_repeated, 40, _conv, partial(nn.BatchNorm2d, 32), nn.ReLU), (8, 32, 16, 16)),
}
"""Constructors of the models and shapes of their batches, by name."""

MODEL_NAMES = tuple(WORKLOADS)
MODELS_HELP: Final = (
    "500 small layers (linear500), 16 large ones (linear16), a transformer (transformer6) or convolutions"
    " with BatchNorm (convbn40)"
)
"""Text of the options that name models."""


# ---------------------------------------------------------------------- wrappers

OURS: Final = "ours"
OURS_GLOO: Final = "ours_gloo"
"""This package's wrapper without shared memory, to measure the gain of shared memory."""
TORCH_DEFAULT: Final = "torch_ddp"
TORCH_VIEW: Final = "torch_ddp_view"
TORCH_FLAGS: Final = "torch_ddp_flags"
"""torch's wrapper with all flags that make a static model's step faster."""

_VIEW: Final = {"gradient_as_bucket_view": True}
CONTENDERS: Final[Mapping[str, Mapping[str, Any]]] = {
    OURS: {},
    OURS_GLOO: {"transport": "gloo"},
    TORCH_DEFAULT: {},
    TORCH_VIEW: _VIEW,
    TORCH_FLAGS: {**_VIEW, "static_graph": True, "batched_grad_copy": True},
}
"""Arguments of the wrappers besides the module and its device, by name."""


def is_torch(contender: str) -> bool:
    return contender in (TORCH_DEFAULT, TORCH_VIEW, TORCH_FLAGS)


def constructor_flags(contender: str) -> dict[str, Any]:
    """Return the constructor arguments of a contender, without flags that the installed torch lacks."""
    known = inspect.signature(DistributedDataParallel).parameters
    flags = CONTENDERS[contender]
    return {name: value for name, value in flags.items() if name in known or not is_torch(contender)}


def wrap(contender: str, module: nn.Module, device: torch.device) -> Any:
    """Wrap a module in a contender's DDP class, on the default process group; return the wrapper.

    Collective: all ranks must call it.
    """
    wrapper: Any = DistributedDataParallel if is_torch(contender) else BucketedDDP
    device_ids = [device.index] if device.type == "cuda" else None
    return wrapper(module, device_ids=device_ids, **constructor_flags(contender))


class TrainingRun:
    """A model in training: wrapped, with its optimizer and its batch. All ranks must construct it."""

    def __init__(self, contender: str, workload: Workload, device: torch.device) -> None:
        self.batch = workload.batch.to(device)
        self.module = workload.module.to(device)
        self.wrapped = wrap(contender, self.module, device)
        # A small rate: it does not change the time of a step, and weights stay finite in any number of steps.
        self._optimizer = torch.optim.SGD(self.wrapped.parameters(), lr=1e-6)

    def step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        compute_loss(self.wrapped(self.batch)).backward()
        self._optimizer.step()

    def gradients_from(self, workload: Workload) -> Tensor:
        """Load a workload's weights, do a step on this run's batch; return all gradients as a CPU vector."""
        self.module.load_state_dict(workload.module.state_dict())
        self.step()
        lacking = [name for name, parameter in self.module.named_parameters() if parameter.grad is None]
        if lacking:
            raise RuntimeError(f"the wrapper left {lacking[0]} without a gradient")
        return torch.cat([parameter.grad.flatten() for parameter in self.wrapped.parameters()]).cpu()

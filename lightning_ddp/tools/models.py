"""Models that the benchmarks train, and one batch for each.

Each stresses another part of a data-parallel wrapper: `linear500` the per-parameter cost of hooks (1,000
small parameters), `linear16` bytes (64 MiB of gradients), `transformer6` a usual mix, `convbn40` the
broadcast of buffers before each forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with its batch, on the CPU."""

    module: nn.Module
    """The model, in training mode; the same weights on all ranks."""

    batch: Tensor
    """One batch of float32 inputs; different on each rank."""


def build_workload(name: str, *, rank: int) -> Workload:
    """Build one model and one batch.

    Args:
        name: one of `MODEL_NAMES`.
        rank: seeds the batch, so that ranks have different gradients to average.

    Returns:
        The workload; called twice with the same arguments it holds the same values.

    Raises:
        KeyError: there is no model of that name.
    """
    build_module, batch_shape = WORKLOADS[name]
    torch.manual_seed(0)
    module = build_module()
    generator = torch.Generator().manual_seed(1 + rank)
    return Workload(module=module, batch=torch.randn(batch_shape, generator=generator))


def compute_loss(output: Tensor) -> Tensor:
    """Return the scalar loss of every model: the mean square of its output."""
    return output.square().mean()


def _linear500() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(500):
        layers += [_scaled_linear(32, nonlinearity="relu"), nn.ReLU()]
    return nn.Sequential(*layers)


def _linear16() -> nn.Module:
    return nn.Sequential(*(_scaled_linear(1024, nonlinearity="linear") for _ in range(16)))


def _transformer6() -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        d_model=256, nhead=4, dim_feedforward=1024, dropout=0.0, batch_first=True
    )
    return nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)


def _convbn40() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(40):
        layers += [nn.Conv2d(32, 32, kernel_size=3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers)


def _scaled_linear(features: int, *, nonlinearity: str) -> nn.Linear:
    # The default initialization shrinks the signal in each layer; hundreds of layers deep it ends in denormal
    # numbers, whose arithmetic is many times slower and would be what is measured.
    linear = nn.Linear(features, features)
    nn.init.kaiming_normal_(linear.weight, nonlinearity=nonlinearity)  # type: ignore[arg-type]  # a Literal in torch
    nn.init.zeros_(linear.bias)
    return linear


WORKLOADS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear500": (_linear500, (8, 32)),
    "linear16": (_linear16, (8, 1024)),
    "transformer6": (_transformer6, (8, 64, 256)),
    "convbn40": (_convbn40, (8, 32, 16, 16)),
}
"""Name -> how to build the model, and the shape of its batch."""

MODEL_NAMES = tuple(WORKLOADS)
"""In the order in which they are measured."""

"""A model whose gradients the test chooses, trained over threads as ranks: what went in, what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import run_threads
from torch import Tensor, nn

from lightning_ddp import BucketedDDP
from lightning_ddp.hooks import Hook, build_hook

SHAPES = {"first": (24, 20), "bias": (9,), "second": (3, 16, 4), "third": (30, 12)}
"""Parameters of the model: two matrices, a vector, and a tensor of three dimensions."""

ONE_EACH_MB = 1e-5
"""The bucket size at which each parameter is in a bucket of its own."""

Grads = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


class Given(nn.Module):
    """Its output has the given tensors as gradients with respect to its parameters."""

    def __init__(self, shapes: Shapes = SHAPES, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, grads: Grads) -> Tensor:
        named = dict(self.named_parameters())
        return torch.stack([(named[name] * grad.conj()).sum().real for name, grad in grads.items()]).sum()


def random_grads(rank: int, step: int, shapes: Shapes = SHAPES) -> Grads:
    """Gradients that are different for every rank, step and element."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def inputs_of(world_size: int, num_steps: int = 6, shapes: Shapes = SHAPES) -> list[list[Grads]]:
    """Random gradients of all ranks and steps."""
    return [[random_grads(rank, step, shapes) for step in range(num_steps)] for rank in range(world_size)]


class Run:
    """One rank's wrapped model and hook."""

    def __init__(
        self,
        group: Any,
        spec: Any,
        *,
        cap_mb: float = 25,
        dtype: torch.dtype = torch.float32,
        shapes: Shapes = SHAPES,
        **options: Any,
    ) -> None:
        self.module = Given(shapes, dtype)
        self.model = BucketedDDP(self.module, process_group=group, bucket_cap_mb=cap_mb, **options)
        self.hook: Hook = build_hook(spec, group)
        self.model.register_comm_hook(None, self.hook)

    def step(self, grads: Grads) -> Grads:
        """One synchronised backward; the gradients that it leaves."""
        self.module.zero_grad()
        self.model(grads).backward()
        return {n: p.grad.clone() for n, p in self.module.named_parameters() if p.grad is not None}

    def state(self, key: str = "error") -> Grads:
        """What the hook remembers under `key`, by parameter name."""
        tensors = self.hook.state_dict()["tensors"]
        return {name: values[key] for name, values in tensors.items() if key in values}


def reduce_steps(
    spec: Any,
    inputs: Sequence[Sequence[Grads]],
    *,
    finish: Callable[[Run], Any] = lambda run: None,
    **options: Any,
) -> list[tuple[list[Grads], Any]]:
    """Runs `inputs[rank][step]` through a hook on as many ranks; per rank the outputs and `finish(run)`."""

    def rank_main(rank: int, world_size: int, group: Any) -> tuple[list[Grads], Any]:
        run = Run(group, spec, **options)
        outputs = [run.step(grads) for grads in inputs[rank]]
        return outputs, finish(run)

    answers = run_threads(rank_main, len(inputs))
    for outputs, _ in answers[1:]:
        for mine, first in zip(outputs, answers[0][0], strict=True):
            assert mine.keys() == first.keys()
            for name in first if spec != "noop" else ():
                torch.testing.assert_close(mine[name], first[name], rtol=0, atol=0, equal_nan=True)
    return answers


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean in float64."""
    return torch.stack([t.double() for t in tensors]).mean(0)

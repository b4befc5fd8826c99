"""One training program, run under torch's DistributedDataParallel and under ours, and compared in numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conformance import torch_names  # noqa: F401 (what torch's class has beside the documented names)
from harness import RankFailed, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp import BucketedDDP


def _with_both(rank: int, world_size: int, fn: Callable[..., Any], cases: Sequence[Sequence[Any]]) -> Any:
    return [
        [fn(rank, world_size, wrap, *case) for wrap in (DistributedDataParallel, BucketedDDP)]
        for case in cases
    ]


def assert_all_as_torch(
    fn: Callable[..., Any],
    world_size: int,
    cases: Sequence[Sequence[Any]],
    rtol: float = 0.0,
    atol: float = 0.0,
) -> list[list[Any]]:
    """Runs all cases under both, in one set of processes, and requires the same answers on every rank.

    Bit-equal unless told. Returns ours: by case, by rank.
    """
    try:
        by_rank = run_ranks(_with_both, world_size, fn, cases)
    except RankFailed as error:
        refused = "DistributedDataParallel.__init__() got an unexpected keyword argument"
        if refused in str(error) and os.environ.get("CI") != "true":
            pytest.skip("the class of this torch lacks an option")
        raise
    for rank, answers in enumerate(by_rank):
        for case, (expected, found) in zip(cases, answers, strict=True):
            assert_same(found, expected, f"rank {rank}, {case}", rtol, atol)
    return [[answers[i][1] for answers in by_rank] for i in range(len(cases))]


def assert_same(found: Any, expected: Any, what: str, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Requires equal values in nested lists, tuples, dicts: tensors within the tolerance, others exactly."""
    if isinstance(expected, Tensor):
        torch.testing.assert_close(
            found, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{what}: {text}"
        )
    elif isinstance(expected, dict):
        assert list(found) == list(expected), what
        for key, value in expected.items():
            assert_same(found[key], value, f"{what}, {key}", rtol, atol)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), what
        for i, value in enumerate(expected):
            assert_same(found[i], value, f"{what}, {i}", rtol, atol)
    else:
        assert found == expected, what


def grads_of(module: nn.Module) -> dict[str, Tensor]:
    """The gradients by name, sparse ones as dense tensors under a name that says so.

    Where there is none, a tensor of no elements and another dtype stands for it.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        if grad is None:
            found[name] = torch.empty(0, dtype=torch.bool)
        elif grad.is_sparse:
            found[f"{name} (sparse)"] = grad.to_dense()
        else:
            found[name] = grad.detach().clone()
    return found


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}

"""torch's own communication hooks run unchanged on our buckets, with the results that torch's DDP gives.

torch's class refuses bfloat16 hooks on the CPU; there ours has to do what the formula says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import batch, build
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp import BucketedDDP

NUM_STEPS = 6


def powersgd_state(**options: Any) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=1,
        start_powerSGD_iter=2,
        min_compression_rate=0.5,
        **options,
    )


def local_sgd_state() -> post_localSGD_hook.PostLocalSGDState:
    return post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=None, start_localSGD_iter=3, post_local_gradient_allreduce=False
    )


HOOKS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook),
    "fp16": (lambda: None, default_hooks.fp16_compress_hook),
    "fp16 around allreduce": (
        lambda: None,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ),
    "powersgd": (powersgd_state, powerSGD_hook.powerSGD_hook),
    "fp16 around powersgd": (
        powersgd_state,
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
    "post-local SGD": (local_sgd_state, post_localSGD_hook.post_localSGD_hook),
}


def train(wrap: Callable[..., Any], make_state: Any, hook: Any, rank: int) -> list[Tensor]:
    """The gradients of each step, flat. One bucket: torch's PowerSGD waits for good on gloo with two."""
    module = build("mlp", seed=3)
    model = wrap(module, gradient_as_bucket_view=True)
    model.register_comm_hook(make_state(), hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    grads = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        inputs, labels = batch("mlp", rank, step)
        cross_entropy(model(inputs), labels).backward()
        grads.append(torch.cat([p.grad.view(-1) for p in module.parameters()]))
        optimizer.step()
    return grads


def with_both(rank: int, world_size: int, name: str) -> list[tuple[bool, float]]:
    make_state, hook = HOOKS[name]
    theirs = train(DistributedDataParallel, make_state, hook, rank)
    ours = train(BucketedDDP, make_state, hook, rank)
    return [(a.equal(b), a.abs().max().item()) for a, b in zip(theirs, ours, strict=True)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", HOOKS)
def test_torchs_hooks_give_what_they_give_under_torch(name):
    for steps in run_ranks(with_both, 2, name, timeout_s=60):
        assert [is_equal for is_equal, _ in steps] == [True] * NUM_STEPS
        assert all(largest > 0 for _, largest in steps)


def bf16_on_two_ranks(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    return train(BucketedDDP, lambda: None, default_hooks.bf16_compress_hook, rank), [
        torch.cat([p.view(-1) for p in grads]) for grads in local_gradients(rank)
    ]


def local_gradients(rank: int) -> list[list[Tensor]]:
    module = build("mlp", seed=3)
    inputs, labels = batch("mlp", rank, 0)
    cross_entropy(module(inputs), labels).backward()
    return [[p.grad for p in module.parameters()]]


def test_torchs_bf16_hook_which_torch_refuses_on_the_cpu_sums_halves_in_bfloat16():
    (ours, (first,)), (_, (second,)) = run_ranks(bf16_on_two_ranks, 2)
    expected = (first.bfloat16() / 2) + (second.bfloat16() / 2)
    assert ours[0].equal(expected.float())

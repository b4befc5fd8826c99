"""`join()`: ranks that run out of inputs at different steps, compared with torch's DDP."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from comparison import assert_all_as_torch, assert_same, grads_of, state_of
from harness import on_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_ddp import BucketedDDP
from lightning_ddp.errors import ConfigurationError


class Plain(nn.Module):
    """Two layers in several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 6)
        self.two = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


class Normed(Plain):
    """With the statistics of a BatchNorm as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Counting(Plain):
    """With a buffer that forward reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(x.mean(0), 0.25)
        return super().forward(x - self.average.clone())


class Branches(Plain):
    """Leaves out a layer in some forwards, not the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.sometimes(x) if x[0, 0] > 0 else x)


MODELS = {"plain": Plain, "normed": Normed, "counting": Counting, "branches": Branches}


def seeded(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]()


def inputs(rank: int, step: int) -> Tensor:
    x = models.x_of(rank, step)
    # while both ranks go on, each uses the optional layer in every other step, and not in the same one
    x[0, 0] = 1.0 if step >= 2 or (rank + step) % 2 else -1.0
    return x


def joined_training(rank, world_size, wrap, name, counts, options, join_options, program) -> Any:
    """Trains `counts[rank]` steps inside join(). The gradients of each step, and the state after it."""
    module = seeded(name)
    model = wrap(module, bucket_cap_mb=1e-6, **options)
    if "hook" in program:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for _ in range(2 if "twice" in program else 1):
        with model.join(**join_options):
            for step in range(counts[rank]):
                is_local = "no_sync" in program and step % 3 != 2
                with model.no_sync() if is_local else nullcontext():
                    model(inputs(rank, step)).square().sum().backward()
                if not is_local:
                    seen.append(grads_of(module))
                    optimizer.step()
                    optimizer.zero_grad()
        seen.append(state_of(module))
    if "more" in program:  # all ranks go on together, without join
        for step in range(2):
            model(inputs(rank, 50 + step)).square().sum().backward()
            seen.append(grads_of(module))
            optimizer.step()
            optimizer.zero_grad()
    return seen


def case(
    name: str = "plain",
    counts: tuple[int, ...] = (2, 5),
    options: dict[str, Any] | None = None,
    join_options: dict[str, Any] | None = None,
    program: str = "",
) -> tuple[Any, ...]:
    return name, counts, options or {}, join_options or {}, program


ACTIVE_ONLY = {"divide_by_initial_world_size": False}
BOTH_WAYS = ((2, 5), (5, 2))
CASES = [
    *(case(counts=counts) for counts in (*BOTH_WAYS, (0, 3), (3, 0), (3, 3), (1, 2))),
    *(case(counts=counts, join_options=ACTIVE_ONLY) for counts in (*BOTH_WAYS, (0, 3))),
    *(case(counts=(2, 4), options={"gradient_as_bucket_view": view}) for view in (True, False)),
    *(case(name, counts) for name in ("normed", "counting") for counts in BOTH_WAYS),
    *(case("normed", counts, {"forward_sync_buffers": False}) for counts in BOTH_WAYS),
    *(case("branches", counts, {"find_unused_parameters": True}) for counts in BOTH_WAYS),
    *(case(counts=counts, options={"static_graph": True}) for counts in BOTH_WAYS),
    *(case(counts=counts, program="hook") for counts in BOTH_WAYS),
    *(case(counts=counts, program="no_sync") for counts in ((3, 6), (6, 3), (3, 9))),
    *(case("normed", (2, 4), program="twice"), case(counts=(1, 4), program="twice")),
    *(case(counts=(2, 4), program="more"), case("normed", (4, 2), program="more")),
    case(counts=(3, 3), join_options={"enable": False}, program="more"),
]


def test_uneven_inputs_give_torchs_gradients_and_its_final_model() -> None:
    for (_, counts, *_), by_rank in zip(CASES, assert_all_as_torch(joined_training, 2, CASES), strict=True):
        assert len(by_rank[0]) + len(by_rank[1]) > 2, counts


def test_three_ranks_that_end_at_three_different_steps() -> None:
    ends = ((1, 3, 5), (4, 2, 3))
    cases = [case("normed", counts, {}, options) for counts in ends for options in ({}, ACTIVE_ONLY)]
    for by_rank in assert_all_as_torch(joined_training, 3, cases, rtol=1e-5, atol=1e-6):
        final = [seen[-1] for seen in by_rank]
        for state in final[1:]:
            assert all(torch.equal(state[name], final[0][name]) for name in state)


def unused_after_the_others_end(rank, world_size):
    model = BucketedDDP(models.Branches(), find_unused_parameters=True)
    seen = []
    with model.join():
        for step in range(1 + 3 * rank):
            model.zero_grad()
            model(torch.full((1, 3), rank + 1.0), "ab" if step in (0, 2) else "a").backward()
            seen.append(models.grads_by_branch(model)[:2])
    return seen


def test_a_parameter_that_no_remaining_rank_uses_keeps_its_gradient() -> None:
    """Torch's DDP lets a joined rank repeat its last bitmap, so that such a gradient becomes zeros."""
    assert run_ranks(unused_after_the_others_end, 2) == [
        [[1.5, 1.5]],
        [[1.5, 1.5], [1.0, None], [1.0, 1.0], [1.0, None]],
    ]


def evaluates_between_steps(rank, world_size, counts):
    results = []
    for evaluates in (False, True):
        module = seeded("normed")
        model = BucketedDDP(module, bucket_cap_mb=1e-6)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        seen = []
        with model.join():
            for step in range(counts[rank]):
                optimizer.zero_grad()
                model(inputs(rank, step)).square().sum().backward()
                seen.append(grads_of(module))
                optimizer.step()
                if evaluates:
                    with torch.no_grad():
                        seen[-1]["output"] = model.eval()(inputs(rank, step))
                    model.train()
        results.append((seen, state_of(module)))
    return results


@pytest.mark.parametrize("counts", [(1, 4), (4, 1)])
def test_forwards_without_gradients_change_nothing_while_others_have_run_out(counts) -> None:
    by_rank = run_ranks(evaluates_between_steps, 2, counts)
    for (expected, _), (found, state) in by_rank:
        assert all(seen.pop("output").isfinite().all() for seen in found)
        assert_same(found, expected, "gradients")
        assert_same(state, by_rank[0][1][1], "the model at the end")


def joined_with_a_buffer_hook(rank, world_size):
    def take_largest(_, buffers: dict[str, Tensor]) -> list[Any]:
        works = [dist.all_reduce(b, dist.ReduceOp.MAX, async_op=True) for b in buffers.values()]
        return [work.get_future() for work in works]

    found = []
    for location, counts in product(("before_forward", "after_forward"), BOTH_WAYS):
        module = seeded("normed")
        model = BucketedDDP(module, bucket_cap_mb=1e-6)
        model.register_buffer_comm_hook(None, take_largest, location=location)
        with model.join():
            for step in range(counts[rank]):
                module.norm.num_batches_tracked += rank
                model(inputs(rank, step)).square().sum().backward()
        found.append((state_of(module), len(model.reducer.futures)))
    return found


def test_a_buffer_hook_runs_on_ranks_without_input_too() -> None:
    for found in zip(*run_ranks(joined_with_a_buffer_hook, 2, timeout_s=20), strict=True):
        (state, num_pending), (other, num_pending_there) = found
        assert_same(other, state, "the model at the end")
        assert (num_pending, num_pending_there) == (0, 0)


def switched_off(rank, world_size, counts):
    module = seeded("plain")
    model = BucketedDDP(module, bucket_cap_mb=1e-6)
    module.one.requires_grad_(False)  # whole buckets, which nobody reduces
    seen = []
    with model.join():
        for step in range(counts[rank]):
            model.zero_grad()
            model(inputs(rank, step)).square().sum().backward()
            seen.append(grads_of(module))
    return seen


def test_ranks_without_input_skip_buckets_that_are_switched_off() -> None:
    counts = (1, 3)
    first, second = run_ranks(switched_off, 2, counts, timeout_s=20)
    alone = seeded("plain")
    alone(inputs(1, 2)).square().sum().backward()
    assert_same(second[0], first[0], "gradients of a step of both")
    assert second[2]["two.weight"].allclose(alone.two.weight.grad / 2)


@on_ranks(1)
def test_buckets_that_a_rank_without_input_cannot_know_of_are_refused(group) -> None:
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    model = BucketedDDP(Plain(), process_group=group, **options)
    with pytest.raises(ConfigurationError, match="needs skip_all_reduce_unused_params=False"):
        model.join()

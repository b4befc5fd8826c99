"""Unused parameters, static graphs, and parameters that are switched off by hand."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks, run_threads
from models import Branches
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ddp import BucketedDDP
from lightning_ddp.ddp.gradients import reached_parameters
from lightning_ddp.errors import BackwardOrderError

ALL = ("a", "b", "c")


def input_of(rank: int) -> torch.Tensor:
    return torch.full((1, 3), float(rank + 1))


def grads(model: BucketedDDP) -> dict[str, float | None]:
    found = {name: getattr(model.module, name).weight.grad for name in ALL}
    return {name: None if g is None else g.unique().item() for name, g in found.items()}


@pytest.mark.parametrize("bucket_cap_mb", [None, 1e-6])
@pytest.mark.parametrize("view", [True, False])
def test_unused_everywhere_stays_untouched_and_used_somewhere_is_averaged(bucket_cap_mb, view) -> None:
    uses = [  # by step: what rank 0 uses, what rank 1 uses, the gradients of a, b, c
        (ALL, ALL, (1.5, 1.5, 1.5)),
        (("a", "b"), ("a", "b"), (1.5, 1.5, None)),
        (("a",), ("b",), (0.5, 1.0, None)),
        (("c",), ALL, (1.0, 1.0, 1.5)),
        (ALL, ALL, (1.5, 1.5, 1.5)),
    ]

    def rank_main(rank, world_size, group):
        model = BucketedDDP(
            Branches(),
            process_group=group,
            find_unused_parameters=True,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=view,
        )
        seen = []
        for step in uses:
            model.zero_grad()
            model(input_of(rank), step[rank]).backward()
            seen.append(tuple(grads(model).values()))
        return seen

    assert run_threads(rank_main, 2) == [[step[2] for step in uses]] * 2


@pytest.mark.parametrize("view", [True, False])
def test_a_gradient_that_nobody_used_keeps_its_value(view) -> None:
    def rank_main(rank, world_size, group):
        model = BucketedDDP(
            Branches(), process_group=group, find_unused_parameters=True, gradient_as_bucket_view=view
        )
        model(input_of(rank), ALL).backward()
        model(input_of(rank), ("a", "b")).backward()  # not zeroed: a and b accumulate, c is left alone
        return grads(model)

    expected = {"a": 3.0, "b": 3.0, "c": 1.5}
    assert run_threads(rank_main, 2) == [expected] * 2


def test_use_inside_no_sync_counts() -> None:
    def rank_main(rank, world_size, group):
        model = BucketedDDP(Branches(), process_group=group, find_unused_parameters=True)
        with model.no_sync():
            model(input_of(rank), ("a", "c")).backward()
        model(input_of(rank), ("a", "b")).backward()
        return grads(model)

    assert run_threads(rank_main, 2) == [{"a": 3.0, "b": 1.5, "c": 1.5}] * 2


def test_a_rank_that_uses_nothing_does_not_hold_up_the_others() -> None:
    def rank_main(rank, world_size, group):
        class Maybe(Branches):
            def forward(self, x, use):
                return super().forward(x, use) if use else x.sum()

        model = BucketedDDP(Maybe(), process_group=group, find_unused_parameters=True)
        x = input_of(rank).requires_grad_()
        model(x, () if rank == 0 else ("a",)).backward()
        return grads(model)

    assert run_threads(rank_main, 2) == [{"a": 1.0, "b": None, "c": None}] * 2


def test_parameters_switched_off_by_hand_need_no_search() -> None:
    """As Lightning's `toggle_optimizer` does for GANs."""

    def rank_main(rank, world_size, group):
        model = BucketedDDP(Branches(), process_group=group, bucket_cap_mb=1e-6)
        seen = []
        for names in (("a",), ("b", "c"), ALL):
            for name in ALL:
                getattr(model.module, name).requires_grad_(name in names)
            model.zero_grad()
            model(input_of(rank), ALL).backward()
            seen.append(tuple(grads(model).values()))
        return seen

    expected = [(1.5, None, None), (None, 1.5, 1.5), (1.5, 1.5, 1.5)]
    assert run_threads(rank_main, 2) == [expected] * 2


def test_a_gradient_that_is_switched_off_keeps_its_value() -> None:
    def rank_main(rank, world_size, group):
        model = BucketedDDP(Branches(), process_group=group)  # one bucket for all
        model(input_of(rank), ALL).backward()
        model.module.c.requires_grad_(False)
        model(input_of(rank), ALL).backward()
        return grads(model)

    assert run_threads(rank_main, 2) == [{"a": 3.0, "b": 3.0, "c": 1.5}] * 2


# ---------------------------------------------------------------- static graphs


@pytest.mark.parametrize("view", [True, False])
def test_a_static_graph_is_learned_once_with_its_unused_parameters(view) -> None:
    def rank_main(rank, world_size, group):
        model = BucketedDDP(
            Branches(),
            process_group=group,
            static_graph=True,
            gradient_as_bucket_view=view,
            bucket_cap_mb=1e-6,
        )
        seen = []
        for _ in range(4):
            model.zero_grad()
            model(input_of(rank), ("a", "b") if rank == 0 else ("a",)).backward()
            seen.append(tuple(grads(model).values()))
        return seen

    assert run_threads(rank_main, 2) == [[(1.5, 0.5, None)] * 4] * 2


def static_epochs_in_which_a_rank_comes_later(rank, world_size):
    model = BucketedDDP(Branches(), static_graph=True)
    gradients, exchanges = model.reducer._gradients, []
    start = gradients.start_exchange
    gradients.start_exchange = lambda absent: exchanges.append(start(absent)) or exchanges[-1]
    seen = []
    for num_batches in (2 * rank, 2, 2):  # at first the rank that uses both branches has no input
        with model.join():
            for _ in range(num_batches):
                model.zero_grad()
                model(input_of(rank), ("a", "b") if rank == 0 else ("a",)).backward()
                seen.append(tuple(grads(model).values()))
    return seen, sum(work is not None for work in exchanges)


def test_a_rank_that_had_no_input_at_first_learns_the_static_graph_later() -> None:
    both = [(1.5, 0.5, None)] * 4
    # ranks tell each other what they use until the first step of all, not after it
    expected = [(both, 3), ([(1.0, None, None)] * 2 + both, 3)]
    assert run_ranks(static_epochs_in_which_a_rank_comes_later, 2) == expected


class Checkpointed(nn.Module):
    """The same layer, checkpointed twice, between two others."""

    def __init__(self, use_reentrant: bool, width: int = 4) -> None:
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(width, width) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=self.use_reentrant)
        return self.last(x).sum()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("width", [4, 300])  # below and above the size from which gradients are copied early
def test_a_static_graph_works_with_activation_checkpointing(use_reentrant, width) -> None:
    def rank_main(rank, world_size, group):
        model = BucketedDDP(Checkpointed(use_reentrant, width), process_group=group, static_graph=True)
        alone = Checkpointed(use_reentrant, width)
        alone.load_state_dict(model.module.state_dict())
        x = torch.randn(2, width, generator=torch.Generator().manual_seed(7))  # the same on both ranks
        for _ in range(3):
            model.zero_grad()
            alone.zero_grad()
            model(x).backward()
            alone(x).backward()
            for (name, mine), theirs in zip(model.module.named_parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, msg=name)

    run_threads(rank_main, 2)


def test_reentrant_checkpointing_without_a_static_graph_is_named() -> None:
    def rank_main(rank, world_size, group):
        model = BucketedDDP(Checkpointed(True), process_group=group)
        with pytest.raises(BackwardOrderError, match=r"more than one gradient .* shared\.(weight|bias)"):
            model(torch.ones(2, 4)).backward()

    run_threads(rank_main, 1)


# ---------------------------------------------------------------- the search


def test_the_graph_tells_which_leaves_a_backward_reaches() -> None:
    a, b, c = (torch.ones(1, requires_grad=True) for _ in range(3))
    assert reached_parameters([(a * b).sum(), c]) == {id(a), id(b), id(c)}
    assert reached_parameters([(a * b.detach()).sum()]) == {id(a)}
    assert reached_parameters([torch.ones(1)]) == set()

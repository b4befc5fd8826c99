"""Unused parameters, static graphs, and parameters that are switched off by hand."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from harness import on_ranks, run_ranks
from models import Branches, grads_by_branch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ddp import BucketedDDP
from lightning_ddp.ddp.gradients import reached_parameters
from lightning_ddp.errors import BackwardOrderError

ALL = "abc"
FINDS = {"find_unused_parameters": True}


class MaybeNothing(Branches):
    """Without any branch its loss leads to its input alone."""

    def forward(self, x, use):
        return super().forward(x, use) if use else x.sum()


def input_of(rank: int) -> torch.Tensor:
    return torch.full((1, 3), float(rank + 1))


WAYS = {
    "unused everywhere stays untouched, used somewhere is averaged": (
        FINDS,
        [
            ("abc", "abc", [1.5, 1.5, 1.5]),
            ("ab", "ab", [1.5, 1.5, None]),
            ("a", "b", [0.5, 1.0, None]),
            ("c", "abc", [1.0, 1.0, 1.5]),
            ("abc", "abc", [1.5, 1.5, 1.5]),
        ],
    ),
    "what nobody used keeps its value": (
        FINDS,
        [("abc", "abc", [1.5, 1.5, 1.5]), ("+ab", "+ab", [3.0, 3.0, 1.5])],
    ),
    "use inside no_sync counts once": (
        FINDS,
        [("-ac", "-ac", None), ("+ab", "+ab", [3.0, 1.5, 1.5]), ("ab", "ab", [1.5, 1.5, None])],
    ),
    "a rank that uses nothing holds up nobody": (FINDS, [("", "a", [1.0, None, None])]),
    "switched off by hand, as in Lightning's toggle_optimizer, needs no search": (
        {},
        [
            ("a!bc", "a!bc", [1.5, None, None]),
            ("bc!a", "bc!a", [None, 1.5, 1.5]),
            ("abc", "abc", [1.5, 1.5, 1.5]),
        ],
    ),
    "switched off keeps its value": (
        {},
        [("abc", "abc", [1.5, 1.5, 1.5]), ("+ab!c", "+ab!c", [3.0, 3.0, 1.5])],
    ),
    "a static graph is learned once": ({"static_graph": True}, [("ab", "a", [1.5, 0.5, None])] * 4),
}


@pytest.mark.parametrize("bucket_cap_mb", [None, 1e-6])
@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize(("options", "steps"), WAYS.values(), ids=WAYS)
@on_ranks(2)
def test_gradients_of_what_some_ranks_use(rank, group, options, steps, view, bucket_cap_mb) -> None:
    """Of each step what ranks 0 and 1 do, and the gradients of a, b, c.

    What a rank does: the branches that it uses; behind `!` those that are used, but switched off. A `+` in
    front: gradients add up to those before; a `-`: and they stay on their rank.
    """

    model = BucketedDDP(
        MaybeNothing(),
        process_group=group,
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=view,
        **options,
    )
    for step in steps:
        used, _, switched_off = step[rank].lstrip("+-").partition("!")
        for name in ALL:
            getattr(model.module, name).requires_grad_(name not in switched_off)
        if step[rank][:1] != "+":
            model.zero_grad()
        x = input_of(rank).requires_grad_()
        with model.no_sync() if step[rank][:1] == "-" else nullcontext():
            model(x, used + switched_off).backward()
        assert step[2] in (None, grads_by_branch(model)), step


# ---------------------------------------------------------------- static graphs


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
                model(input_of(rank), "ab" if rank == 0 else "a").backward()
                seen.append(tuple(grads_by_branch(model)))
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
@on_ranks(2)
def test_a_static_graph_works_with_activation_checkpointing(group, use_reentrant, width) -> None:
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


@on_ranks(1)
def test_reentrant_checkpointing_without_a_static_graph_is_named(group) -> None:
    model = BucketedDDP(Checkpointed(True), process_group=group)
    with pytest.raises(BackwardOrderError, match=r"more than one gradient .* shared\.(weight|bias)"):
        model(torch.ones(2, 4)).backward()


# ---------------------------------------------------------------- the search


def test_the_graph_tells_which_leaves_a_backward_reaches() -> None:
    a, b, c = (torch.ones(1, requires_grad=True) for _ in range(3))
    assert reached_parameters([(a * b).sum(), c]) == {id(a), id(b), id(c)}
    assert reached_parameters([(a * b.detach()).sum()]) == {id(a)}
    assert reached_parameters([torch.ones(1)]) == set()

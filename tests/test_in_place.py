"""Small gradients on the CPU are added up in their bucket."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import on_ranks, run_threads
from torch import Tensor, nn

from lightning_ddp import BucketedDDP

INPUT = torch.tensor([[1.0, 2.0, 3.0]])


class Heads(nn.Module):
    """Two small layers, and a large one in the same bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 2)
        self.right = nn.Linear(3, 2)
        self.large = nn.Linear(3, 30_000)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(x).sum() + self.left(x).sum() + self.right(x).sum()


def wrapped(group: Any, **options: Any) -> BucketedDDP:
    model = BucketedDDP(Heads(), process_group=group, **options)
    model(INPUT).backward()  # after it the buckets are in the order of readiness
    model.zero_grad()
    return model


def is_in_bucket(model: BucketedDDP, tensor: Tensor) -> bool:
    return any(
        bucket.flat.data_ptr() <= tensor.data_ptr() < bucket.flat.data_ptr() + bucket.flat.nbytes
        for bucket in model.reducer.buckets
    )


def seen_by_hooks(model: BucketedDDP, loss: Tensor) -> dict[str, bool]:
    """Whether each gradient was in its bucket when the parameter's own hook ran."""
    seen: dict[str, bool] = {}
    handles = [
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.update({name: is_in_bucket(model, p.grad)})
        )
        for name, p in model.module.named_parameters()
    ]
    loss.backward()
    for handle in handles:
        handle.remove()
    return seen


SMALL = ("left.weight", "left.bias", "right.weight", "right.bias", "large.bias")


@pytest.mark.parametrize(
    ("options", "in_bucket"),
    [
        ({}, SMALL),
        ({"gradient_as_bucket_view": False}, ()),
        ({"find_unused_parameters": True}, ()),
        ({"static_graph": True}, ()),
    ],
    ids=["default", "no views", "unused", "static"],
)
@on_ranks(2)
def test_small_gradients_arrive_in_the_bucket(rank, group, options, in_bucket) -> None:
    model = wrapped(group, **options)
    seen = seen_by_hooks(model, model(INPUT * (rank + 1)))
    # the reducer's own hook comes first, and copies a large gradient at once
    assert {name for name, is_in in seen.items() if is_in and name != "large.weight"} == set(in_bucket)
    assert all(torch.equal(p.grad, 1.5 * INPUT.expand_as(p)) for p in model.parameters() if p.ndim == 2)


@on_ranks(2)
def test_a_hook_of_the_user_may_put_another_tensor_there(rank, group) -> None:
    model = wrapped(group)
    left = model.module.left.weight
    handle = left.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", 2 * p.grad))
    model(INPUT * (rank + 1)).backward()
    handle.remove()
    assert torch.equal(left.grad, 3 * INPUT.expand(2, 3))
    assert is_in_bucket(model, left.grad)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}, {"static_graph": True}], ids=str)
@on_ranks(2)
def test_hooks_registered_after_wrapping_run_before_the_average(rank, group, options) -> None:
    model = wrapped(group, **options)
    model(INPUT).backward()  # has planned the buckets again, and renewed the hooks
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.square()))
    for _ in range(2):
        model.zero_grad()
        model(INPUT * (rank + 1)).backward()
        # the mean of squares, and not the square of the mean, also for the last in a bucket and a large one
        assert all(p.grad.equal(2.5 * INPUT.square().expand_as(p)) for p in model.parameters() if p.ndim == 2)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@on_ranks(2)
def test_gradients_with_a_graph_are_averaged_too(rank, group) -> None:
    model = wrapped(group)
    model(INPUT * (rank + 1)).backward(create_graph=True)
    assert model.module.left.weight.grad.requires_grad
    assert torch.equal(model.module.left.weight.grad.detach(), 1.5 * INPUT.expand(2, 3))


def test_an_exception_in_backward_leaves_none_at_the_next_forward() -> None:
    def rank_main(_rank, _world_size, group):
        model = wrapped(group)
        handle = model.module.left.weight.register_hook(fail)
        with pytest.raises(ArithmeticError, match="not finite"):
            model(INPUT).backward()
        handle.remove()
        arrived = {name for name, p in model.module.named_parameters() if p.grad is not None and p.grad.any()}
        model(INPUT)
        found = {name for name, p in model.module.named_parameters() if p.grad is not None}
        assert found == arrived
        assert "left.weight" not in found

    def fail(_grad: Tensor) -> None:
        raise ArithmeticError("not finite")

    run_threads(rank_main, 2)

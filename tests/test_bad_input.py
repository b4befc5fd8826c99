"""Bad input is a clear error on every rank, and no hang: outputs without tensors, hooks, arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import on_ranks, run_threads, run_threads_outcomes
from models import done
from torch import Tensor, nn

from lightning_ddp import BucketedDDP
from lightning_ddp.errors import CommHookError, RankMismatchError

ONE_BUCKET_EACH_MB = 1e-6


class Returns(nn.Module):
    """Computes a loss and returns what it is told to make of it."""

    def __init__(self, answer: Callable[[Tensor], Any] = lambda loss: loss) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2, bias=False)
        self.two = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            self.one.weight.fill_(1.0)
            self.two.weight.fill_(1.0)
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        self.loss = self.two(self.one(x)).sum()
        return self.answer(self.loss)


class Holder:
    """An object that is no container which anybody knows."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def grads(model: BucketedDDP) -> list[float]:
    return [p.grad.unique().item() for p in model.module.parameters()]


def x_of(rank: int) -> Tensor:
    return torch.full((1, 2), rank + 1.0)


MEAN = [1.5, 3.0]  # of 1 and 2 for the first layer, of 2 and 4 for the second

# ---------------------------------------------------------------- outputs that hold no tensor


@pytest.mark.parametrize(
    "answer",
    [lambda loss: None, lambda loss: "text", lambda loss: [], lambda loss: {"loss": loss.item()}, Holder],
    ids=["None", "text", "empty", "number", "object"],
)
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=["plain", "static"])
@on_ranks(2)
def test_a_loss_that_is_no_output_is_averaged_all_the_same(rank, group, answer, options) -> None:
    model = BucketedDDP(Returns(answer), process_group=group, **options)
    seen = []
    for _ in range(3):
        model.zero_grad()
        model(x_of(rank))
        model.module.loss.backward()
        seen.append(grads(model))
    assert seen == [MEAN] * 3


@on_ranks(2)
def test_a_forward_without_a_backward_is_followed_by_clean_steps(rank, group) -> None:
    model = BucketedDDP(Returns(lambda loss: None), process_group=group)
    for _ in range(3):
        model(x_of(rank))  # nothing to go back from
    model.module.loss.backward()
    assert grads(model) == MEAN


@pytest.mark.parametrize("answer", [lambda loss: None, Holder], ids=["nothing", "object"])
def test_a_search_that_finds_no_tensor_does_not_lose_gradients_in_silence(answer) -> None:
    """With find_unused_parameters nothing leads into the graph: right or refused, not wrong."""

    def rank_main(rank, world_size, group):
        model = BucketedDDP(Returns(answer), process_group=group, find_unused_parameters=True)
        model(x_of(rank))
        model.module.loss.backward()
        return grads(model)

    for outcome in run_threads_outcomes(rank_main, 2, timeout_s=10):
        assert outcome.status in ("returned", "raised"), outcome.describe()
        if outcome.status == "returned":
            assert outcome.value == MEAN
        else:
            assert outcome.exception_type == "BackwardOrderError"
            assert "find_unused_parameters" in outcome.message
            assert ".weight" in outcome.message


# ---------------------------------------------------------------- communication hooks


def raises(bucket: Any) -> Any:
    raise ZeroDivisionError("no norm")


HOOKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "raises": (raises, r"'raises' raised ZeroDivisionError: no norm"),
    "returns_nothing": (
        lambda bucket: None,
        r"'returns_nothing' returned NoneType: callback must return a torch\.futures\.Future",
    ),
    "returns_the_tensor": (
        lambda bucket: bucket.buffer(),
        r"'returns_the_tensor' returned (Tensor|Parameter).*make one of the flat gradient",
    ),
    "gives_a_short_tensor": (
        lambda bucket: done(bucket.buffer()[:1]),
        r"'gives_a_short_tensor' gave shape \[1\].*expected \[2\] of torch\.float32",
    ),
    "gives_another_dtype": (
        lambda bucket: done(bucket.buffer().double()),
        r"'gives_another_dtype' gave shape \[2\] of torch\.float64; expected \[2\]",
    ),
    "gives_text": (lambda bucket: done("reduced"), r"'gives_text' gave str; expected the flat gradient"),
    "gives_two": (
        lambda bucket: done([bucket.buffer(), bucket.buffer()]),
        r"'gives_two' gave list; expected the flat gradient",
    ),
    "fails_later": (
        lambda bucket: done(ValueError("lost on the way")),
        r"'fails_later' failed: .*lost on the way",
    ),
}


@pytest.mark.parametrize("name", HOOKS)
@on_ranks(2)
def test_a_broken_hook_is_named_on_every_rank_and_step(rank, group, name) -> None:
    act, message = HOOKS[name]

    def hook(state: Any, bucket: Any) -> Any:
        return act(bucket)

    hook.__qualname__ = name
    model = BucketedDDP(Returns(), process_group=group, bucket_cap_mb=ONE_BUCKET_EACH_MB)
    model.register_comm_hook(None, hook)
    for step in range(2):
        loss = model(x_of(rank))
        where = rf"(?s)^rank {rank}, step {step}: communication hook .*{message}.*parameters 'two\.weight'"
        with pytest.raises(CommHookError, match=where):
            loss.backward()


@on_ranks(2)
def test_a_hook_that_recovers_reduces_the_next_step(rank, group) -> None:
    model = BucketedDDP(Returns(), process_group=group, bucket_cap_mb=ONE_BUCKET_EACH_MB)
    broken = [True]

    def hook(state: Any, bucket: Any) -> Any:
        if broken[0] and bucket.is_last():
            raise ZeroDivisionError("no norm")
        return group.allreduce([bucket.buffer().div_(2)]).get_future()

    model.register_comm_hook(None, hook)
    with pytest.raises(CommHookError, match="no norm"):
        model(x_of(rank)).backward()
    broken[0] = False
    model.zero_grad()
    model(x_of(rank)).backward()
    assert grads(model) == MEAN


# ---------------------------------------------------------------- models and arguments that differ


def frozen_weight(odd: bool) -> nn.Module:
    layer = nn.Linear(4, 5)
    layer.weight.requires_grad_(not odd)
    return layer


DIFFERENT_LAYERS = {
    "shape": (lambda odd: nn.Linear(4, 7 if odd else 5), ["has '1.weight'", "[5, 4]", "[7, 4]"]),
    "dtype": (
        lambda odd: nn.Linear(4, 5, dtype=torch.float64 if odd else None),
        ["has '1.weight'", "float32", "float64"],
    ),
    "stride": (
        lambda odd: nn.Conv2d(3, 4, 5).to(
            memory_format=torch.channels_last if odd else torch.contiguous_format
        ),
        ["has '1.weight'", "[75, 25, 5, 1]", "[75, 1, 15, 3]"],
    ),
    "layer": (lambda odd: nn.Linear(4, 5) if odd else nn.Identity(), ["1.weight", "1.bias", " 2 ", " 4"]),
    "frozen": (frozen_weight, ["1.weight", " 4 ", " 3"]),
}
"""Makes the second layer, of the rank that has another one or of the others; what the error says."""
DIFFERENT_OPTIONS = [
    ("static_graph", (False, True)),
    ("find_unused_parameters", (False, True)),
    ("bucket_cap_mb", (25, ONE_BUCKET_EACH_MB)),  # other plans would pair gradients of different parameters
    ("bucket_cap_mb_list", ([25], [ONE_BUCKET_EACH_MB])),
    ("skip_all_reduce_unused_params", (False, True)),
    ("transport", ("shared_memory", "gloo")),
]


def named_on_every_rank(make: Callable[[int, Any], BucketedDDP], parts: list[str], odd: int) -> None:
    """Wrapping fails on all of three ranks with these parts, after which the group is as good as before."""

    def rank_main(rank, world_size, group):
        with pytest.raises(RankMismatchError) as caught:
            make(rank, group)
        model = BucketedDDP(Returns(), process_group=group)
        model(torch.ones(1, 2)).backward()
        assert grads(model) == [1.0, 2.0]
        return str(caught.value)

    for rank, text in enumerate(run_threads(rank_main, 3)):
        expected = [f"rank {rank}: ", "rank 0", f"rank {odd or 1}", *parts]
        assert [part for part in expected if part not in text] == []


@pytest.mark.parametrize("odd", [1, 2])
@pytest.mark.parametrize("what", DIFFERENT_LAYERS)
def test_different_models_are_an_error_on_every_rank(what, odd) -> None:
    second, parts = DIFFERENT_LAYERS[what]

    def make(rank: int, group: Any) -> BucketedDDP:
        return BucketedDDP(nn.Sequential(nn.Linear(3, 4), second(rank == odd)), process_group=group)

    named_on_every_rank(make, parts, odd)


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize(("name", "values"), DIFFERENT_OPTIONS)
def test_different_arguments_are_an_error_on_every_rank(name, values, odd) -> None:
    common = {"find_unused_parameters": True} if name.startswith("skip") else {}

    def make(rank: int, group: Any) -> BucketedDDP:
        return BucketedDDP(Returns(), process_group=group, **common, **{name: values[rank == odd]})

    named_on_every_rank(
        make, [f"{name} is {values[odd == 0]!r} on rank 0 and {values[odd != 0]!r} on rank"], odd
    )

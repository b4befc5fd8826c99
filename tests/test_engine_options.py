"""The wrapper's other options, compared with torch's DDP or with a closed form."""

from __future__ import annotations

import dataclasses
import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import assert_all_as_torch, assert_same, grads_of, state_of
from harness import on_ranks, run_ranks, run_threads
from models import x_of
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from lightning_ddp import BucketedDDP
from lightning_ddp.ddp.gradients import find_tensors
from lightning_ddp.errors import BackwardOrderError, MissingGradientError, UnsuitableModuleError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 8)
        self.two = nn.Linear(8, 8)
        self.three = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.three(torch.tanh(self.two(torch.tanh(self.one(x)))))


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def train(model: nn.Module, rank: int) -> list[Any]:
    module = model.module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        model(x_of(rank, step)).square().sum().backward()
        seen.append(grads_of(module))
        optimizer.step()
    return [*seen, state_of(module)]


# ---------------------------------------------------------------- groups


def goes_on_with_fewer(rank, world_size, wrap, with_hook):
    module = net()
    smaller = dist.new_group([0, 1])
    model = wrap(module)
    if with_hook:

        def average(state, bucket):  # torch wants its own annotations or none
            group = model.process_group
            scaled = bucket.buffer().div_(dist.get_world_size(group))
            work = dist.all_reduce(scaled, group=group, async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        model.register_comm_hook(None, average)
    model(x_of(rank)).square().sum().backward()
    if rank == 2:
        return []
    model._update_process_group(smaller)
    if wrap is not BucketedDDP:
        model.process_group = smaller
    seen = []
    for step in (1, 2, 3):
        module.zero_grad()
        model(x_of(rank, step)).square().sum().backward()
        seen.append(grads_of(module))
    return seen


def test_after_a_rank_was_lost_the_others_average_over_fewer() -> None:
    for first_rank, second_rank, _ in assert_all_as_torch(goes_on_with_fewer, 3, [(False,), (True,)]):
        assert len(first_rank) == 3
        assert_same(second_rank, first_rank, "gradients of the two")


class UsedOnSome(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch: Tensor, uses_second: bool) -> Tensor:
        hidden = self.first(batch)
        return self.second(hidden) if uses_second else hidden


@on_ranks(2)
def test_a_buffer_hook_and_a_static_graph_outlast_an_update_of_the_group(rank, group) -> None:
    called: list[tuple[int, int]] = []
    norm = nn.BatchNorm1d(4)
    model = BucketedDDP(nn.Sequential(nn.Linear(4, 4), norm), process_group=group)
    model.register_buffer_comm_hook(
        None, lambda state, buffers: called.append((len(buffers), int(norm.num_batches_tracked)))
    )
    model.update_process_group(group)
    for _ in range(2):
        model(torch.ones(3, 4) * rank).sum().backward()
    assert called == [(3, 1), (3, 2)], "after the forward"

    module = UsedOnSome()
    model = BucketedDDP(module, process_group=group)
    model._set_static_graph()
    model.update_process_group(group)
    model(torch.ones(3, 4), False).sum().backward()
    assert module.second.weight.grad is None


@on_ranks(2)
def test_ranks_that_meet_again_copy_buffers_whatever_each_did_before(rank, group) -> None:
    """As one that was in a validation, and one that joins."""
    module = nn.Linear(4, 4)
    module.register_buffer("offset", torch.zeros(1))
    model = BucketedDDP(module, process_group=group)
    with torch.set_grad_enabled(rank == 1):
        model(torch.ones(2, 4))
    module.offset.fill_(rank)
    model.update_process_group(group)
    model(torch.ones(2, 4)).sum().backward()
    assert module.offset == 0


def steps_in_backward(rank, world_size):
    from torch.distributed.optim import _apply_optimizer_in_backward  # warns when it is imported

    module = UsedOnSome()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = BucketedDDP(module, find_unused_parameters=True)
    before = module.second.weight.detach().clone()
    model(torch.ones(3, 4), rank == 1).square().sum().backward()
    assert not torch.equal(before, module.second.weight)
    assert all(parameter.grad is None for parameter in module.parameters())
    return [parameter.detach() for parameter in module.parameters()]


def test_an_optimizer_in_backward_steps_what_another_rank_has_used_on_all_ranks() -> None:
    assert_same(*run_ranks(steps_in_backward, 2), "parameters of the two")


# ---------------------------------------------------------------- functional_call, replaced parameters


def functional(rank, world_size):
    module = net()
    model = BucketedDDP(module)
    seen: list[Any] = []
    for names in (dict(model.named_parameters()), ["module.two.weight"]):
        own = {name: model.get_parameter(name).detach().clone().requires_grad_() for name in names}
        module.zero_grad()
        torch.func.functional_call(model, own, (x_of(rank),)).square().sum().backward()
        seen.append((own["module.two.weight"].grad.clone(), grads_of(module)))
    module.zero_grad()
    model(x_of(rank)).square().sum().backward()
    return seen, grads_of(module)


def test_all_or_a_part_of_the_parameters_may_be_replaced_for_a_forward() -> None:
    answers = run_ranks(functional, 2)
    for ((_, none), (_, partly)), whole in answers:
        assert {grad.dtype for grad in none.values()} == {torch.bool}, "it stands for no gradient"
        assert partly.pop("two.weight").dtype is torch.bool
        assert all(torch.equal(partly[name], whole[name]) for name in partly)
    (first, whole), (second, _) = answers
    for (mine, _), (other, _) in zip(first, second, strict=True):  # the replacements' gradients stay local
        torch.testing.assert_close((mine + other) / 2, whole["two.weight"], rtol=0, atol=0)
        assert not torch.equal(mine, other)


@on_ranks(2)
def test_a_parameter_that_is_replaced_for_good_is_named(rank, group) -> None:
    model = BucketedDDP(net(), process_group=group)
    model(x_of(rank)).sum().backward()
    model.module.two.weight = nn.Parameter(torch.zeros(8, 8))
    loss = model(x_of(rank)).sum()
    with pytest.raises(UnsuitableModuleError, match=r"replaced after the module was wrapped.*two\.weight"):
        loss.backward()


def moved(rank, world_size, wrap):
    module = net()
    model = wrap(module)
    seen: list[Any] = []
    for change in (
        lambda: None,
        lambda: prune.l1_unstructured(module.two, "weight", amount=0.5),
        lambda: prune.l1_unstructured(module.two, "weight", amount=0.5),
        lambda: prune.global_unstructured(
            [(module.one, "weight"), (module.one, "bias")], prune.L1Unstructured, amount=0.3
        ),
        lambda: prune.remove(module.two, "weight"),
    ):
        change()
        seen += train(model, rank)
    return seen


def test_a_parameter_that_moves_within_the_module_is_still_averaged() -> None:
    assert_all_as_torch(moved, 2, [()])


# ---------------------------------------------------------------- second derivatives, teardown, static graphs


def test_a_second_backward_through_averaged_gradients_is_refused_with_a_way_out() -> None:
    def rank_main(rank, world_size, group):
        model = BucketedDDP(net(), process_group=group)
        model(x_of(rank)).square().sum().backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in model.parameters())
        with pytest.raises(BackwardOrderError, match=r"through an averaged gradient.*torch\.autograd\.grad"):
            penalty.backward()
        for p in model.parameters():
            p.grad = None
        model(x_of(rank)).square().sum().backward()
        return [p.grad.requires_grad for p in model.parameters()]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True", UserWarning)
        assert run_threads(rank_main, 2) == [[False] * 6] * 2


class Reentrant(nn.Module):
    """Runs its layer as often as it is told, checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(4, 4), nn.Linear(4, 4)
        self.num_calls = 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.num_calls):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x.sum()


@pytest.mark.parametrize(
    ("num_calls", "kind", "message"),
    [
        (3, BackwardOrderError, r"more gradients than in the first one for shared\.(weight|bias)"),
        (1, (BackwardOrderError, MissingGradientError), r"shared\.weight"),
    ],
    ids=["more", "fewer"],
)
@on_ranks(2)
def test_a_static_graph_that_changed_is_refused_again_at_the_next_forward(
    rank, group, num_calls, kind, message
) -> None:
    model = BucketedDDP(Reentrant(), process_group=group, static_graph=True)
    for _ in range(2):
        model(x_of(rank)).backward()
    model.module.num_calls = num_calls
    loss = model(x_of(rank))
    with pytest.raises(kind, match=message):
        loss.backward()
    if num_calls == 3:
        for _ in range(2):
            with pytest.raises(BackwardOrderError, match=r"(?s)Expected to have finished.*" + message):
                model(x_of(rank))


# ---------------------------------------------------------------- the search for outputs

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Outputs:
    loss: Tensor
    extra: dict[str, Any]


class Registered:
    """A container of the user's, registered with torch's pytrees."""

    def __init__(self, tensor: Tensor, more: Any) -> None:
        self.tensor, self.more = tensor, more


torch.utils._pytree.register_pytree_node(
    Registered,
    lambda node: ([node.tensor, node.more], None),
    lambda children, _: Registered(*children),
    serialized_type_name="tests.Registered",
)


def test_the_search_finds_tensors_in_any_container() -> None:
    loss = torch.ones((), requires_grad=True)
    registered = Registered(torch.zeros(()), Pair("x", loss))
    nested = [Outputs(torch.zeros(()), {"k": (registered, None)})]
    assert any(found is loss for found in find_tensors(nested))

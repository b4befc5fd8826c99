"""Ranks with different numbers of batches in step, without Lightning: loader, reductions, gradient."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from harness import on_ranks, run_threads
from torch import nn
from torch.utils.data import DataLoader

from lightning_ddp.comm.group import Group
from lightning_ddp.ddp.buffers import ModuleSnapshot
from lightning_ddp.ddp.lockstep import Lockstep, Turn
from lightning_ddp.errors import UnevenInputsError

CPU = torch.device("cpu")


class Numbers:
    """An unsized loader of `count` batches that starts anew when it is asked again after its end."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.num_asked = 0

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return self

    def __next__(self) -> dict[str, list[int]]:
        self.num_asked += 1
        if self.num_asked % (self.count + 1) == 0:
            raise StopIteration
        return {"numbers": [self.num_asked]}


def walk(lockstep: Lockstep, loader: Any) -> list[tuple[Any, Turn]]:
    seen = []
    for batch in loader:
        lockstep.begin()
        seen.append((copy.deepcopy(batch), lockstep.turn))
        batch.clear()  # the repetition is not to see that
    return seen


@on_ranks(2)
def test_a_rank_repeats_its_last_batch_until_all_have_run_out(rank, process_group) -> None:
    lockstep = Lockstep(Group(process_group), CPU)
    numbers = Numbers([1, 3][rank])
    loader = lockstep.wrap(numbers)
    epochs = [[(b["numbers"], t) for b, t in walk(lockstep, loader)] for _ in range(2)]
    both, replays, alone = (
        Turn(is_replay=is_replay, num_active=num_active)
        for is_replay, num_active in ((False, 2), (True, 1), (False, 1))
    )
    first = [
        [([1], both), ([1], replays), ([1], replays)],
        [([3], both), ([3], replays), ([3], replays)],
    ]
    second = [
        [([1], both), ([2], alone), ([3], alone)],
        [([5], both), ([6], alone), ([7], alone)],
    ]
    assert epochs == [first, second][rank]
    assert numbers.num_asked == [4, 8][rank], "a loader is asked once after its end"


@on_ranks(2)
def test_a_batch_that_is_fetched_ahead_keeps_its_turn(rank, process_group) -> None:
    lockstep = Lockstep(Group(process_group), CPU)
    fetched = iter(lockstep.wrap(Numbers([1, 3][rank])))
    next(fetched)
    turns = []
    for _ in range(2):
        next(fetched)
        lockstep.begin()
        lockstep.begin()  # a batch that is moved by hand is not a step
        turns.append(lockstep.turn.is_replay)
    assert next(fetched, None) is None
    lockstep.begin()
    assert [*turns, lockstep.turn.is_replay] == [[False, True, True], [False, False, False]][rank]


@on_ranks(2)
def test_what_was_fetched_ahead_is_forgotten_in_a_new_epoch(rank, process_group) -> None:
    lockstep = Lockstep(Group(process_group), CPU)
    loader = lockstep.wrap([[0]] * [1, 3][rank])
    fetched = iter(loader)
    next(fetched)
    lockstep.begin()
    next(fetched)  # a replay on rank 0, which an epoch that is left early does not use
    next(iter(loader))
    lockstep.begin()
    assert lockstep.turn == Turn(is_replay=False, num_active=2)


@on_ranks(2)
def test_the_last_batch_is_kept_until_it_is_forgotten(rank, process_group) -> None:
    lockstep = Lockstep(Group(process_group), CPU)
    batch = torch.zeros(1)
    reference = weakref.ref(batch)
    fetched = iter(lockstep.wrap([batch] * [1, 2][rank]))
    assert [next(fetched) is batch for _ in range(2)] == [True, True]
    del batch, fetched
    assert reference() is not None
    lockstep.forget()
    assert reference() is None


@on_ranks(2)
def test_the_loader_is_as_long_as_the_longest_and_else_like_the_one_inside(rank, process_group) -> None:
    inside = DataLoader(list(range(3 + 4 * rank)), batch_size=2)
    inside.state_dict = dict  # as loaders have that can be resumed
    loader = Lockstep(Group(process_group), CPU).wrap(inside)
    assert loader.dataset is inside.dataset
    assert loader.sampler is inside.sampler
    loader.worker_init_fn = print
    assert inside.worker_init_fn is print
    for name in ("state_dict", "load_state_dict", "nonsense"):
        assert not hasattr(loader, name)
    assert copy.copy(loader).batch_sampler is inside.batch_sampler
    assert len(loader) == 4


@on_ranks(2)
def test_a_loader_without_a_length_has_none(process_group) -> None:
    loader = Lockstep(Group(process_group), CPU).wrap(Numbers(1))
    with pytest.raises(TypeError, match="Numbers has no length"):
        len(loader)


def test_a_rank_without_a_batch_of_its_own_repeats_a_spare_one() -> None:
    def rank_main(rank, world_size, process_group):
        lockstep = Lockstep(Group(process_group), CPU)
        return walk(lockstep, lockstep.wrap([] if rank else [[1], [2]], most=lambda: 2, spare=lambda: [7]))

    found = [[(batch, turn.is_replay) for batch, turn in seen] for seen in run_threads(rank_main, 2)]
    assert found == [[([1], False), ([2], False)], [([7], True), ([7], True)]]


@pytest.mark.parametrize(
    ("counts", "is_allowed", "message"),
    [
        ([2, 0, 0], True, r"rank {rank}: ranks \[1, 2\] have no training batch to repeat"),
        ([2, 1, 2], False, r"rank {rank}: ranks \[1\] have run out .* rank has had {count} in this epoch"),
    ],
)
@on_ranks(3)
def test_ranks_that_cannot_go_on_are_named_on_all(rank, process_group, counts, is_allowed, message) -> None:
    lockstep = Lockstep(Group(process_group), CPU, is_allowed=is_allowed)
    loader = lockstep.wrap([[0]] * counts[rank])
    with pytest.raises(UnevenInputsError, match=message.format(rank=rank, count=counts[rank])):
        walk(lockstep, loader)


REDUCED = {  # of ranks 0 and 1, which hold [2, -3] and [5, 4]; rank 2 repeats
    "mean": [3.5, 0.5],
    "avg": [3.5, 0.5],
    "sum": [7, 1],
    "min": [2, -3],
    "max": [5, 4],
    "product": [10, -12],
    dist.ReduceOp.SUM: [7, 1],
    dist.ReduceOp.BAND: [2 & 5, -3 & 4],
    dist.ReduceOp.BOR: [2 | 5, -3 | 4],
}

BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR)
KINDS = [
    (op, dtype)
    for op in REDUCED
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int8)
    if not (dtype.is_floating_point and op in BITWISE)
]


@pytest.mark.parametrize("is_own_group", [True, False])
@on_ranks(3)
def test_a_reduction_is_over_the_ranks_that_have_a_batch(rank, process_group, is_own_group) -> None:
    group = Group(process_group)
    lockstep = Lockstep(group if is_own_group else Group(process_group), CPU)
    lockstep.turn = Turn(is_replay=rank == 2, num_active=2)
    for op, dtype in KINDS:
        values = torch.tensor([[2, -3], [5, 4], [7, 100]][rank], dtype=dtype)
        lockstep.reduce(group, [values], op)
        assert values.tolist() == torch.tensor(REDUCED[op]).to(dtype).tolist(), (op, dtype)


@on_ranks(2)
def test_ranks_that_all_repeat_reduce_what_they_hold(rank, process_group) -> None:
    lockstep = Lockstep(Group(process_group), CPU)
    lockstep.turn = Turn(is_replay=True, num_active=5)  # of a group around this one
    value = torch.tensor(rank + 1.0)
    lockstep.reduce(Group(process_group), [value], "mean")
    assert value.item() == 1.5


@on_ranks(1)
def test_a_replay_adds_zeros_also_when_the_loss_scale_is_not_finite(process_group) -> None:
    lockstep = Lockstep(Group(process_group), CPU)
    lockstep.turn = Turn(is_replay=True, num_active=1)
    weight = torch.tensor(1.0, requires_grad=True)
    lockstep.scale(weight * 2).backward(torch.tensor(float("inf")))
    assert weight.grad.item() == 0.0


class Everything(nn.Module):
    """Buffers that change in place and by replacement, one that is None, and metrics of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counted", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("absent", None)
        self.mean = torchmetrics.MeanMetric()
        self.all = torchmetrics.MetricCollection([torchmetrics.MinMetric(), torchmetrics.CatMetric()])

    def step(self, value: float) -> None:
        self.counted += value
        self.replaced = torch.tensor([value])
        self.absent = torch.tensor([value])
        self.mean.update(value)
        self.all.update(value)

    def state(self) -> list[Any]:
        metrics = [self.mean.compute().item(), {n: v.tolist() for n, v in self.all.compute().items()}]
        return [self.counted.tolist(), self.replaced.tolist(), self.absent, *metrics, self.mean.update_count]


def test_a_snapshot_brings_back_buffers_and_metrics() -> None:
    module = Everything()
    module.step(3.0)
    module.absent = None
    before, counted, replaced = module.state(), module.counted, module.replaced
    snapshot = ModuleSnapshot(module)
    for _ in range(2):  # it can be used twice
        module.step(1.0)
        assert module.state() != before
        snapshot.restore()
        assert module.state() == before
        assert module.counted is counted
        assert module.replaced is replaced
    module.step(5.0)
    assert module.mean.compute().item() == 4.0


def test_a_snapshot_that_is_taken_again_has_buffers_of_any_kind_and_place() -> None:
    buffers = {
        "scalar": torch.tensor(3),
        "flags": torch.tensor([True, False, True]),
        "short": torch.arange(5, dtype=torch.bfloat16),
        "complex": torch.tensor([1 + 2j]),
        "columns": torch.arange(6.0).view(2, 3).t(),
        "large": torch.arange(40_000.0),
        "empty": torch.empty(0),
    }
    module = nn.Module()
    for name, tensor in buffers.items():
        module.register_buffer(name, tensor)

    def move(tensor: torch.Tensor) -> None:
        tensor.data = tensor.clone()

    changes: list[Callable[[torch.Tensor], object]] = [
        lambda tensor: None,
        lambda tensor: tensor.data.fill_(1),
        move,
        lambda tensor: tensor.resize_(2) if tensor is buffers["flags"] else None,
    ]
    snapshot = ModuleSnapshot(module)
    for number, change in enumerate(changes):
        for tensor in buffers.values():
            change(tensor)
        expected = {name: tensor.clone() for name, tensor in buffers.items()}
        snapshot.retake()
        for tensor in buffers.values():
            tensor.zero_()
        snapshot.restore()
        for name, tensor in buffers.items():
            assert torch.equal(tensor, expected[name]), (number, name)


@pytest.mark.parametrize("is_replay", [True, False])
@on_ranks(1)
def test_a_step_leaves_the_module_as_it_was_only_if_it_is_a_replay(process_group, is_replay) -> None:
    expected = ([0.0, 0.0], [0.0, 0.0]) if is_replay else ([4.0, 4.0], [9.0, 9.0])
    lockstep, module = Lockstep(Group(process_group), CPU), Everything()
    lockstep.turn = Turn(is_replay=is_replay, num_active=1)
    for _ in range(2):
        with lockstep.step(module):
            module.counted += 1
            lockstep.restore()  # a backward inside the step is not its end
            module.counted += 1
    inside = module.counted.tolist()
    module.counted += 5  # as a part of the forward that runs again in backward
    lockstep.restore()
    assert (inside, module.counted.tolist()) == expected

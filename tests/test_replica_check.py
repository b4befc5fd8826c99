"""Replicas that part are named: hashes by themselves, the comparison, and real runs in which bits flip."""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks, run_script
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_ddp import BucketedDDP, CustomDDPStrategy
from lightning_ddp.ddp.replica_hash import State, StateHasher, state_of_optimizers, words_of
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.supervise.failure_detection import Difference, ReplicaComparison
from lightning_ddp.supervise.protocol import StateHashes, StateRequest, StateValues

SCRIPT = Path(__file__).parent / "harness" / "replica_script.py"

# ---------------------------------------------------------------------- hashes

TENSORS = {
    "float32": torch.randn(5, 7),
    "odd number of bytes": torch.randn(3).to(torch.bfloat16),
    "behind another one": torch.randn(9)[1:],
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(4, 6).T,
    "not dense": torch.randn(6, 6)[:, ::2],
    "float64": torch.randn(4, dtype=torch.float64),
    "complex": torch.randn(3, dtype=torch.complex64),
    "bool": torch.tensor([True, False, True]),
    "integers": torch.arange(5),
    "one element": torch.tensor(3.0),
    "parameter": nn.Parameter(torch.randn(2, 2)),
}


def flip(tensor: torch.Tensor, index: int, bit: int) -> None:
    """Flip a bit of an element, where the tensor lies."""
    element = tensor.detach()[tuple(torch.unravel_index(torch.tensor(index), tensor.shape))]
    data = element.clone().reshape(1).view(torch.uint8)
    data[bit // 8] ^= 1 << bit % 8
    element.copy_(data.view(tensor.dtype)[0])


@pytest.mark.parametrize("name", TENSORS)
def test_a_flipped_bit_changes_the_sum_of_the_words(name: str) -> None:
    tensor = TENSORS[name].detach().clone(memory_format=torch.preserve_format)
    before = words_of(tensor).sum()
    num_bits = 1 if tensor.dtype is torch.bool else 8 * tensor.element_size()
    for index, bit in itertools.product(range(tensor.numel()), range(num_bits)):
        flip(tensor, index, bit)
        assert words_of(tensor).sum() != before, (index, bit)
        flip(tensor, index, bit)
    assert words_of(tensor).sum() == before


@pytest.mark.parametrize("name", [name for name in TENSORS if name != "not dense"])
def test_words_of_a_dense_tensor_need_no_memory(name: str) -> None:
    tensor = TENSORS[name]
    assert words_of(tensor).untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


MODELS: dict[str, Any] = {
    "mlp": lambda: nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)),
    "many layers": lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)]),
    "a large layer": lambda: nn.Linear(60, 50),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)),
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3),
    "sgd": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, nesterov=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, 1e-3, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-3),
}


class Rank:
    """A rank of a run whose gradients are those of all."""

    def __init__(self, model: nn.Module, optimizer: str, cycle_steps: int = 16) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.names = {id(p): name for name, p in self.model.named_parameters()}
        self.hasher = StateHasher(self.read, cycle_steps, 5_000)

    def read(self) -> State:
        tensors, numbers = state_of_optimizers([self.optimizer], self.names)
        return {**dict(self.model.named_parameters()), **tensors}, numbers

    def step(self, seed: int, number: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for p in self.model.parameters():
            p.grad = torch.randn(p.shape, generator=draw)
        self.optimizer.step()
        self.hasher.hash_next(number)

    def answer(self, request: StateRequest) -> StateValues:
        found, before = self.hasher.find(request.number)
        assert found is not None
        said = {"step": found.step, "before": before, "names": found.names, "values": found.values}
        return answer_of(request.number, 0, can_be_copied=found.is_state, **said)


def answer_of(number: int, value: int, **more: Any) -> StateValues:
    given = {"step": 5, "before": 1, "names": ("w",), "values": (value,), "can_be_copied": True, "notes": ()}
    return StateValues(0, 1, number, **{**given, **more})


def send(comparison: ReplicaComparison, number: int, *values: int) -> list[int]:
    """Each rank tells the server a hash; the ranks that it asks about the difference."""
    asked = [comparison.handle(r, StateHashes(0, 1, {number: v}), 0.0) for r, v in enumerate(values)]
    return [rank for messages in asked for rank, _ in messages]


def found_by(comparison: ReplicaComparison, now: float = 0.0) -> Difference:
    found = comparison.due(now)
    assert found is not None
    return found


def compare(ranks: list[Rank], comparison: ReplicaComparison) -> Difference | None:
    """What the server finds once it has what all have hashed."""
    requests: list[tuple[int, Any]] = []
    for rank, each in enumerate(ranks):
        requests += comparison.handle(rank, StateHashes(0, 1, each.hasher.take_fresh()), 0.0)
    for rank, request in requests:
        comparison.handle(rank, ranks[rank].answer(request), 0.0)
    return comparison.due(0.0)


def step_in(text: str) -> int:
    """The step after which a difference was found."""
    found = re.search(r" after step (\d+)", text)
    assert found is not None, text
    return int(found[1])


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        pytest.param(model, optimizer, marks=() if (i + j) % 4 == 0 else pytest.mark.slow)
        for (i, model), (j, optimizer) in itertools.product(enumerate(MODELS), enumerate(OPTIMIZERS))
    ],
)
def test_a_flipped_bit_is_named_within_two_cycles(model: str, optimizer: str) -> None:
    draw = random.Random(f"{model} {optimizer}")
    net = MODELS[model]()
    for _ in range(4):
        ranks = [Rank(net, optimizer) for _ in range(4)]
        comparison = ReplicaComparison(range(4))
        steps = itertools.count(1)
        for step, each in itertools.product(itertools.islice(steps, draw.randrange(1, 20)), ranks):
            each.step(step, step)
        assert compare(ranks, comparison) is None
        bad = draw.randrange(4)
        # but the largest of all, which the next step may make the largest of all again
        places = {n: t for n, t in ranks[bad].read()[0].items() if not n.startswith("max_exp")}
        name, tensor = draw.choice([*places.items()])
        has_sign = not name.startswith(("step", "exp_avg_sq", "sum"))  # which has no square root
        bit = 31 if has_sign and draw.random() < 0.5 else draw.randrange(23, 30)
        flip(tensor, draw.randrange(tensor.numel()), bit)
        last, num_slices = step, len(ranks[0].hasher.cycle)
        for step, each in itertools.product(itertools.islice(steps, 2 * num_slices), ranks):
            each.step(step, step)
        found = compare(ranks, comparison)
        assert found is not None, (name, bad)
        assert found.ranks == (bad,)
        assert found.has_majority
        assert found.can_be_copied
        assert f"rank {bad} has another" in found.text
        of = name.rpartition(" of ")[2]
        assert of in found.text  # the weight may be hashed before the moment that has changed it
        assert last < step_in(found.text) <= last + 2 * num_slices


def test_equal_replicas_are_never_named() -> None:
    for model, optimizer in zip(MODELS, OPTIMIZERS, strict=True):
        ranks, comparison = [Rank(MODELS[model](), optimizer)], ReplicaComparison(range(3))
        ranks += [Rank(ranks[0].model, optimizer) for _ in range(2)]
        for step in range(1, 60):
            for each in ranks:
                each.step(step, step)
            if step % 7 == 0:
                assert compare(ranks, comparison) is None, (model, optimizer, step)


class Wrapped(torch.Tensor):
    """A tensor of somebody else's, whose bytes may be anywhere."""


def test_a_default_device_and_tensors_of_other_classes_do_not_matter() -> None:
    state = {
        "weight": torch.ones(3),
        "wrapped": torch.ones(3).as_subclass(Wrapped),
        "sparse": torch.eye(2).to_sparse(),
    }
    hasher = StateHasher(lambda: (state, {"lr": 0.1}), 16, None)
    with torch.device("meta"):
        for step in range(4):
            hasher.hash_next(step)
    assert [part.names for part in hasher.cycle] == [("lr",), ("weight",)]
    assert len(hasher.take_fresh()) == 4


def test_state_of_an_optimizer_may_be_anything() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 0.5)
    optimizer.state[parameter] = {"list": [torch.ones(1), 3, None], "text": "x", "f": print, "flag": True}
    other = nn.Parameter(torch.ones(2))
    optimizer.state |= {other: object(), "shared": {"count": 7}}
    tensors, numbers = state_of_optimizers([optimizer], {id(parameter): "w", id(other): "v"})
    assert list(tensors) == ["list of w[0]"]
    assert {k: v for k, v in numbers.items() if " of w" in k} == {"list of w[1]": 3, "flag of w": True}
    assert numbers["lr of parameter group 0"] == 0.5


def test_one_of_many_numbers_is_named() -> None:
    hashers = [
        StateHasher(lambda rank=rank: ({}, {f"lr {n}": n + rank * (n == 150) for n in range(200)}), 16, None)
        for rank in range(2)
    ]
    for step, hasher in itertools.product(range(4), hashers):
        hasher.hash_next(step)
    assert [len(part.names) for part in hashers[0].cycle] == [64, 64, 64, 8]
    one, other = (hasher.take_fresh() for hasher in hashers)
    assert [number for number in one if one[number] != other[number]] == [3]
    found, _ = hashers[0].find(3)
    assert found is not None
    assert "lr 150" in found.names


def test_state_that_was_replaced_is_hashed_from_the_next_cycle_on_and_data_at_once() -> None:
    state = {"a": torch.ones(3), "b": nn.Parameter(torch.ones(3))}
    hasher = StateHasher(lambda: (dict(state), {}), 2, None)

    def values() -> list[tuple[int, ...]]:
        for step in range(2):
            hasher.hash_next(step)
        found = [hasher.find(number)[0] for number in (hasher.num_hashed - 1, hasher.num_hashed)]
        return [hashed.values for hashed in found if hashed is not None]

    before = values()
    assert values() == before
    state["a"] = torch.full((3,), 2.0)
    state["b"].data = torch.full((3,), 2.0)
    after = values()
    assert after[0] != before[0]
    assert after[1] == after[0] != before[1]
    hasher.hash_next(0)
    state["b"].data = torch.ones(3)
    hasher.hash_next(1)
    found, _ = hasher.find(hasher.num_hashed)
    assert found is not None
    assert found.values == before[1]


def test_all_of_the_state_is_in_one_cycle_and_no_slice_is_large() -> None:
    for model, optimizer in itertools.product(MODELS, OPTIMIZERS):
        rank = Rank(MODELS[model](), optimizer)
        rank.step(0, 0)
        rank.hasher.begin()
        rank.step(1, 1)
        tensors, numbers = rank.read()
        names = [name for part in rank.hasher.cycle for name in part.names]
        assert {*names} == {*tensors, *numbers}
        assert max(len(part.names) for part in rank.hasher.cycle if part.is_state) <= 64
        if model == "a large layer":  # 12,000 bytes, of which a step takes 5,000
            assert names.count("weight") == 3


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_a_state_of_more_than_half_is_the_majority(values: list[str]) -> None:
    comparison = ReplicaComparison(range(len(values)))
    is_equal, most = len({*values}) == 1, max({*values}, key=values.count)
    has_majority = 2 * values.count(most) > len(values)
    everybody = list(range(len(values)))
    assert sorted(send(comparison, 1, *map(ord, values))) == ([] if is_equal else everybody)
    for rank in () if is_equal else everybody:
        comparison.handle(rank, answer_of(1, ord(values[rank])), 0.0)
    if is_equal:
        assert comparison.due(0.0) is None
        return
    found = found_by(comparison)
    assert found.has_majority == has_majority
    assert found.ranks == tuple(r for r in everybody if values[r] != most or not has_majority)


def test_a_rank_that_has_parted_is_named_once_and_the_others_are_compared_on() -> None:
    comparison = ReplicaComparison(range(3))
    assert send(comparison, 1, 1, 1, 2) == [0, 1, 2]
    assert comparison.deadline() == 2.0
    for rank, value in enumerate((1, 1, 2)):
        assert comparison.due(0.0) is None
        comparison.handle(rank, answer_of(1, value), 0.0)
    assert found_by(comparison).ranks == (2,)
    assert send(comparison, 2, 3, 3, 9) == []
    assert comparison.due(9.0) is None
    assert send(comparison, 3, 3, 4, 9) == [0, 1]


def test_a_difference_that_all_have_forgotten_is_asked_for_once_more() -> None:
    comparison = ReplicaComparison(range(2))
    for number in (4, 5):
        assert send(comparison, number, 0, 1) == [0, 1]
        for rank in range(2):
            is_known = number == 5
            more = {} if is_known else {"names": (), "values": ()}
            comparison.handle(rank, answer_of(number, rank, **more), 0.0)
        assert (comparison.due(0.0) is not None) == is_known


def test_ranks_that_do_not_answer_are_left_out() -> None:
    comparison = ReplicaComparison(range(3))
    send(comparison, 4, 1, 2, 1)
    comparison.handle(0, answer_of(4, 1), 0.0)
    comparison.handle(1, answer_of(4, 2), 0.0)
    assert comparison.due(1.9) is None
    assert not found_by(comparison, 2.0).has_majority
    assert comparison.deadline() is None


def test_another_run_begins_anew_and_late_hashes_of_the_last_one_are_ignored() -> None:
    comparison = ReplicaComparison(range(2))
    assert comparison.handle(0, StateHashes(0, 1, {1: 5}), 0.0) == []
    assert comparison.handle(0, StateHashes(0, 2, {1: 6}), 0.0) == []
    assert comparison.handle(1, StateHashes(0, 1, {1: 7}), 0.0) == []
    assert comparison.handle(1, StateHashes(0, 2, {1: 6}), 0.0) == []


def test_a_text_names_what_differs_and_what_has_happened_where() -> None:
    comparison = ReplicaComparison(range(3))
    send(comparison, 4, 1, 2, 1)
    for rank in range(3):
        names, values = ("a", "b", "c"), (1, 2 + (rank == 1), 3)
        notes = ("x joined training", *(("y",) if rank == 1 else ()))
        comparison.handle(rank, answer_of(4, 0, names=names, values=values, notes=notes), 0.0)
    assert found_by(comparison).text.splitlines() == [
        "lightning_ddp: the replicas differ: rank 1 has another b than ranks 0, 2, the majority, after step 5"
        " (equal after step 1)",
        "  all ranks: x joined training",
        "  rank 1: y",
        "  Causes and what to do: lightning_ddp/docs/guides/replica-check.md",
    ]


# ---------------------------------------------------------------------- real runs


def train(folder: Path, **order: Any) -> tuple[Any, list[list[dict[str, Any]]]]:
    """A run of the script, and what each rank has noted."""
    result = run_script(SCRIPT, [json.dumps({"folder": str(folder), **order})], timeout_s=120)
    notes = [
        [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("rank-*"))
    ]
    return result, notes


def test_a_bit_that_flips_in_a_run_is_named_in_a_warning(tmp_path: Path) -> None:
    result, notes = train(tmp_path, steps=60, flips=[[2, 5, "exp_avg_sq of head.bias", 1, 25]])
    assert result.returncode == 0, result.stderr
    assert len({ends[-1]["digest"] for ends in notes}) == 2
    (line,) = [line for line in result.stderr.splitlines() if "replicas differ" in line]
    assert "rank 2 has another" in line
    assert "than ranks 0-1, the majority, after step" in line
    assert "head.bias" in line
    assert 5 < step_in(line) <= 5 + 32


def test_learning_rates_that_differ_are_found_and_cannot_be_healed(tmp_path: Path) -> None:
    strategy = {"replica_check": "heal", "on_failure": "shrink"}
    result, _ = train(tmp_path, steps=40, rate_differs_on=1, strategy=strategy)
    assert result.returncode == 1
    assert "rank 1 has another lr of parameter group 0" in result.stderr


def test_of_two_ranks_that_differ_none_is_healed(tmp_path: Path) -> None:
    strategy = {"replica_check": "heal", "on_failure": "shrink"}
    flips = [[1, 5, "exp_avg_sq of head.bias", 1, 25]]
    result, _ = train(tmp_path, devices=2, steps=300, step_s=0.01, flips=flips, strategy=strategy)
    assert result.returncode == 1
    assert "nobody knows which is right without a majority" in result.stderr
    assert "healed" not in result.stderr


def test_a_rank_that_has_parted_takes_over_the_state_of_the_majority_each_time(tmp_path: Path) -> None:
    flips = [[1, 9, "backbone.0.weight", 17, 31], [2, 260, "exp_avg_sq of head.bias", 1, 26]]
    strategy = {"replica_check": "heal", "on_failure": "shrink"}
    result, notes = train(tmp_path, steps=460, step_s=0.01, flips=flips, strategy=strategy)
    assert result.returncode == 0, result.stderr
    rows = list(zip(*notes, strict=True))
    assert len(rows) == len(flips) + 1
    assert all(len({entry["digest"] for entry in row}) == 1 for row in rows), result.stderr
    healed = [line for line in result.stderr.splitlines() if "; healed: rank" in line]
    assert [int(line.rpartition("rank ")[2]) for line in healed] == [1, 2][-len(healed) :]
    assert result.stderr.count("the replicas differ") == len(flips)


def test_a_backbone_that_joins_training_is_not_averaged_and_the_report_says_so(tmp_path: Path) -> None:
    """The reproduction of issue 20340 of PyTorch Lightning."""
    result, _ = train(tmp_path, devices=2, steps=20, epochs=3, unfreezes_at=1)
    assert result.returncode == 0, result.stderr
    (start,) = [line for line in result.stderr.splitlines() if "replicas differ" in line]
    assert 20 < step_in(start) <= 20 + 32
    assert "backbone.0" in start
    assert "all ranks: backbone.0.weight, backbone.0.bias joined training before step" in result.stderr
    assert "no gradient of backbone.0.weight, backbone.0.bias is averaged over the ranks" in result.stderr


@pytest.mark.parametrize("manual", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_static_graph_does_not_part_the_replicas(manual: bool, tmp_path: Path) -> None:
    """The reproduction of issue 20704 of PyTorch Lightning, and with manual optimization 18086."""
    strategy = {"static_graph": True, "replica_check": "stop"}
    result, notes = train(tmp_path, devices=2, steps=40, strategy=strategy, manual=manual)
    assert result.returncode == 0, result.stderr
    assert len({ends[-1]["digest"] for ends in notes}) == 1


def check_by_hand(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    model = BucketedDDP(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert model.check_replicas(optimizer) == {}
    if rank >= 2:
        flip(optimizer.state[model.module.weight]["momentum_buffer"], 5, rank)
    assert model.check_replicas() == {}
    assert model.check_replicas(optimizer) == {"momentum_buffer of weight": [0, 1, 2, 3]}, "no majority"
    if rank == 0:
        flip(model.module.bias, 0, 0)
    assert model.check_replicas() == {"bias": [0]}


def test_the_wrapper_alone_compares_all_of_the_state_in_a_collective_call() -> None:
    run_ranks(check_by_hand, world_size=4)


@pytest.mark.parametrize(
    "given",
    [
        "sometimes",
        {"name": "warn", "cycle": 3},
        {"name": "stop", "cycle_steps": 0},
        {"name": "warn", "mb_per_step": 0},
        "heal",
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="replica_check"):
        CustomDDPStrategy(replica_check=given)


def test_without_a_control_channel_nothing_is_compared_and_that_is_said(tmp_path: Path) -> None:
    order = {"folder": str(tmp_path), "devices": 2, "steps": 5, "strategy": {"replica_check": "stop"}}
    env = {"LIGHTNING_DDP_SUPERVISION": "0"}
    result = run_script(SCRIPT, [json.dumps(order)], env, timeout_s=120)
    assert result.returncode != 0
    assert "LIGHTNING_DDP_SUPERVISION=0 has switched off the control channel" in result.stderr


def test_with_one_rank_nothing_is_compared_and_that_is_said(tmp_path: Path) -> None:
    result, _ = train(tmp_path, devices=1, steps=5, strategy={"replica_check": "stop"})
    assert result.returncode == 0, result.stderr
    assert "replicas are not compared, because there is one rank" in result.stderr

"""`BucketedDDP` as a module: copies, pickles, state dicts, teardown, arguments."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from lightning_ddp import BucketedDDP
from lightning_ddp.errors import ConfigurationError, UnsuitableModuleError


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def trained(model: nn.Module, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def copied_and_pickled(rank, world_size):
    model = BucketedDDP(net(), bucket_cap_mb=1e-4, static_graph=True)
    theirs = DistributedDataParallel(net())
    assert list(model.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    model.load_state_dict(theirs.state_dict())
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert [b.spec for b in loaded.reducer.buckets] == [b.spec for b in model.reducer.buckets]
    results = [trained(m, rank) for m in (model, copied, loaded)]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    return [p.sum().item() for p in results[0]]


def test_a_copy_and_a_pickle_train_as_the_original_and_state_dicts_have_torchs_keys() -> None:
    first, second = run_ranks(copied_and_pickled, 2)
    assert first == second


class ReturnsWeight(nn.Linear):
    """Returns its weight beside what it computes, as with losses that need an embedding."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), self.weight


@pytest.mark.parametrize(
    "precision", [None, _MixedPrecision(param_dtype=torch.bfloat16)], ids=["full", "mixed"]
)
@on_ranks(1)
def test_a_parameter_among_the_outputs_does_not_collect_hooks(group, precision) -> None:
    model = BucketedDDP(ReturnsWeight(4, 1), process_group=group, mixed_precision=precision)
    numbers = []
    for _ in range(3):
        output, weight = model(torch.ones(2, 4))
        (output.sum() + weight.sum()).backward()
        with torch.no_grad():  # nor where another tensor is in the place of one
            bias = torch.ones(1, dtype=precision and precision.param_dtype)
            torch.func.functional_call(model, {"module.bias": bias}, (torch.ones(2, 4),))
        numbers.append(len(weight._backward_hooks))
    assert len({*numbers}) == 1
    model.teardown()


@on_ranks(1)
def test_without_a_group_construction_copies_and_join_say_what_to_call(group) -> None:
    assert not dist.is_initialized()
    model = BucketedDDP(net(), process_group=group)
    for act in (lambda: BucketedDDP(net()), lambda: copy.deepcopy(model), model.join):
        with pytest.raises(ConfigurationError, match=r"(no process group|join\(\)).* .*init_process_group"):
            act()


def accumulate_grad(parameter: torch.Tensor):
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


@on_ranks(1)
def test_no_node_of_autograd_outlives_its_step_so_the_stream_of_the_construction_does_not_matter(
    group,
) -> None:
    model = BucketedDDP(net(), process_group=group)
    for _ in range(2):  # before the first step and after it
        for parameter in model.parameters():
            accumulate_grad(parameter).metadata["is_seen"] = True
            assert "is_seen" not in accumulate_grad(parameter).metadata
        model(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
def test_after_teardown_the_module_is_on_its_own(rank, group) -> None:
    model = BucketedDDP(net(), process_group=group)
    inner = model.module
    model.teardown()
    inner(torch.full((2, 4), rank + 1.0)).sum().backward()
    assert [len(p._post_accumulate_grad_hooks or ()) for p in inner.parameters()] == [0] * 6


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dim": 1}, ConfigurationError, "dim=1: expected 0"),
        ({"bucket_cap_mb": 0}, ConfigurationError, "bucket_cap_mb=0: expected sizes in MiB above 0"),
        ({"bucket_cap_mb": [1, 2]}, ConfigurationError, r"bucket_cap_mb=\[1, 2\]: expected sizes in MiB"),
        ({"bucket_cap_mb": "ten"}, ConfigurationError, "bucket_cap_mb='ten': expected sizes in MiB above 0"),
        ({"bucket_cap_mb_list": [1, 0]}, ConfigurationError, r"bucket_cap_mb_list=\[1, 0\]: expected sizes"),
        ({"skip_all_reduce_unused_params": True}, ConfigurationError, "unused_params=True needs find_unused"),
        ({"check_reduction": True}, ConfigurationError, "check_reduction=True is deprecated"),
        ({"delay_all_reduce_named_params": []}, ConfigurationError, "delay_all_reduce.* are not supported"),
        ({"param_to_hook_all_reduce": 1}, ConfigurationError, "param_to_hook_all_reduce are not supported"),
        ({"device_ids": [0]}, ConfigurationError, "but the module is on cpu"),
        ({"output_device": 1}, ConfigurationError, "but the module is on cpu"),
        ({"transport": "tcp"}, ConfigurationError, "transport='tcp': expected 'auto', 'gloo'"),
        (
            {"module": nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))},
            ConfigurationError,
            "SyncBatchNorm layers only work with GPU modules.*'1'",
        ),
        ({"module": nn.ReLU()}, UnsuitableModuleError, "ReLU has no parameter that requires a gradient"),
        ({"module": nn.LazyLinear(2)}, UnsuitableModuleError, "parameters: weight, bias"),
    ],
)
@on_ranks(1)
def test_arguments_that_cannot_be_used_are_named(group, arguments, error, message) -> None:
    given = {"module": net(), "process_group": group, **arguments}
    with pytest.raises(error, match=message):
        BucketedDDP(**given)


class DenseOnly:
    """Says that it is NCCL, and is bound to a device; refused before anything communicates."""

    bound_device_id = None

    def name(self) -> str:
        return "nccl"

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def test_gradients_that_the_backend_cannot_reduce_are_refused_at_wrapping() -> None:
    group = DenseOnly()
    text = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    with pytest.raises(ConfigurationError, match=r"'0\.weight' are sparse, .* nccl reduces dense"):
        BucketedDDP(text, process_group=group)
    text[0].weight.requires_grad_(False)
    model = BucketedDDP(text, process_group=group, init_sync=False)
    group.bound_device_id = torch.device("cpu", 1)
    message = r"the module is on cpu, but .* bound to cpu:1 .*: '1\.weight', .* without device_id"
    with pytest.raises(ConfigurationError, match=message):
        BucketedDDP(text, process_group=group)
    with pytest.raises(ConfigurationError, match=message):
        model.update_process_group(group)

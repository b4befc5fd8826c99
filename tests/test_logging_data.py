"""What a wrapper tells of itself: torch's keys with torch's values, and a public form in plain values."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import run_both
from harness import run_ranks, run_threads
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_ddp import BucketedDDP
from lightning_ddp.errors import CommHookError


class Net(nn.Module):
    """Parameters of two dtypes; one layer takes part where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 8)
        self.in_double = nn.Linear(8, 8, dtype=torch.float64)
        self.sometimes = nn.Linear(4, 4)
        self.two = nn.Linear(8, 2)

    def forward(self, x: Tensor, uses_all: bool = True) -> Tensor:
        x = self.sometimes(x) if uses_all else x
        x = self.in_double(self.one(x).double())
        return self.two(x.float()).square().sum()


def x_of(rank: int, step: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * rank + step))


# ---------------------------------------------------------------- against torch


def data_of(rank, world_size, wrap, options, with_hook, skips) -> Any:
    """The logging data of a wrapper, after construction and after two and four steps."""
    model = wrap(Net(), **options)
    if with_hook:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    model._set_ddp_runtime_logging_sample_rate(100)
    seen = [dict(model._get_ddp_logging_data())]
    for step in range(4):
        model(x_of(rank, step), step not in skips).backward()
        if step in (1, 3):
            seen.append(dict(model._get_ddp_logging_data()))
    return seen


CASES = {
    "plain": ({}, False, ()),
    "small buckets": ({"bucket_cap_mb": 1e-6, "gradient_as_bucket_view": True}, False, ()),
    "comm hook": ({"static_graph": True}, True, ()),
    "unused": ({"find_unused_parameters": True}, False, (1, 2, 3)),
    "buffers": ({"forward_sync_buffers": False}, False, ()),
}
CONSTRUCTION = [
    "world_size",
    "module_name",
    "device_ids",
    "output_device",
    "backend_name",
    "is_multi_device_module",
    "bucket_cap_bytes",
    "bucket_sizes",
    "broadcast_buffers",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "dtypes",
    "total_parameter_size_bytes",
    "num_parameter_tensors",
    "rank",
    "static_graph",
    "has_sync_bn",
]
LATER = [
    "comm_hook",
    "has_rebuilt_buckets",
    "rebuilt_bucket_sizes",
    "rebuilt_per_bucket_param_indices",
    "prev_iteration_grad_ready_order_indices",
    "num_buckets_reduced",
    "unused_parameter_size",
    "can_set_static_graph",
    "iteration",
]


@pytest.mark.parametrize("name", CASES)
def test_torchs_keys_have_torchs_values(name) -> None:
    for [(theirs, ours)] in run_both(data_of, 2, [CASES[name]]):
        constructed = [key for key in CONSTRUCTION if key in theirs[0]]
        assert set(CONSTRUCTION) - set(constructed) <= {"static_graph"}
        if name == "small buckets":
            constructed.remove("bucket_sizes")  # torch starts with one bucket a dtype, until it rebuilds them
        assert {k: ours[0].get(k) for k in constructed} == {k: theirs[0][k] for k in constructed}
        # torch's figures of a step come with the forward after it, so that two equal steps were needed
        later = [key for key in LATER if key in theirs[-1]]
        if CASES[name][0].get("find_unused_parameters"):
            later.remove("prev_iteration_grad_ready_order_indices")  # we keep none, as nothing is rebuilt
        assert {k: ours[-1].get(k) for k in later} == {k: theirs[-1][k] for k in later}
        times = {key for key in theirs[-1] if key.endswith(("_time", "_time_start", "_time_end"))}
        assert len(times) == 13
        assert times <= ours[-1].keys()


# ---------------------------------------------------------------- the public form


def test_construction_is_told_in_plain_values() -> None:
    def rank_main(rank, world_size, group):
        model = BucketedDDP(Net(), process_group=group, bucket_cap_mb=2)
        data = model.logging_data()
        return {key: data[key] for key in expected}

    num_float, num_double = 4 * 8 + 8 + 4 * 4 + 4 + 8 * 2 + 2, 8 * 8 + 8
    expected = {
        "module_name": "Net",
        "world_size": 2,
        "backend_name": "gloo",
        "device_ids": None,
        "bucket_cap_bytes": 2 * 1024 * 1024,
        "bucket_sizes": [8 * num_double, 4 * num_float],
        "dtypes": ["float32", "float64"],
        "num_parameter_tensors": 8,
        "total_parameter_size_bytes": 4 * num_float + 8 * num_double,
        "comm_hook": None,
        "num_steps": 0,
        "num_buckets_reduced": 0,
        "unused_parameter_size": 0,
        "has_rebuilt_buckets": False,
        "join_uneven_inputs": False,
        "error": None,
    }
    for data in run_threads(rank_main, 2):
        data["bucket_sizes"].sort(reverse=True)
        expected["bucket_sizes"].sort(reverse=True)
        assert data == expected


def test_a_hook_an_unused_parameter_and_an_error_are_told() -> None:
    def my_hook(state: Any, bucket: Any) -> Any:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def rank_main(rank, world_size, group):
        model = BucketedDDP(Net(), process_group=group, find_unused_parameters=True)
        model.register_comm_hook(None, my_hook)
        model(x_of(rank), False).backward()
        data = model.logging_data()
        assert data["comm_hook"].endswith("my_hook")
        assert data["unused_parameter_size"] == 4 * (4 * 4 + 4)
        assert data["error"] is None
        with pytest.raises(CommHookError, match="can only be called once"):
            model.register_comm_hook(None, my_hook)
        assert "can only be called once" in model.logging_data()["error"]
        of_torch = model._get_ddp_logging_data()
        assert (of_torch["has_error"], of_torch["error"]) == (1, model.logging_data()["error"])
        model.update_process_group(group)
        assert "can only be called once" in model.logging_data()["error"], "also after ranks were lost"

    run_threads(rank_main, 1)


def test_join_is_told() -> None:
    assert run_ranks(joins, 2) == [(False, True)] * 2


def joins(rank, world_size):
    model = BucketedDDP(nn.Linear(4, 1))
    before = model.logging_data()["join_uneven_inputs"]
    with model.join():
        model(x_of(rank)).sum().backward()
    return before, model.logging_data()["join_uneven_inputs"]


# ---------------------------------------------------------------- the log


@pytest.fixture
def _debug_level_restored() -> Any:
    before = dist.get_debug_level()
    yield
    dist.set_debug_level(before)


@pytest.mark.usefixtures("_debug_level_restored")
@pytest.mark.parametrize(("level", "num_logged"), [("OFF", 0), ("INFO", 1), ("DETAIL", 1)])
def test_the_debug_level_decides_what_is_logged(level, num_logged, caplog) -> None:
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    caplog.set_level(logging.DEBUG, logger="lightning_ddp")

    def rank_main(rank, world_size, group):
        model = BucketedDDP(Net(), process_group=group)
        for step in range(2):
            model(x_of(rank, step)).backward()

    run_threads(rank_main, 2)
    texts = sorted(r.getMessage() for r in caplog.records if r.name == "lightning_ddp")
    assert len(texts) == 2 * num_logged
    for rank, text in enumerate(texts):
        assert text.startswith(f"constructed on rank {rank}: ")
        assert "'module_name': 'Net'" in text
        assert "'bucket_sizes': [" in text

"""The logging data that torch's tests read of a wrapper: torch's keys with torch's values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import run_both
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


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


def data_of(rank, world_size, wrap, options, with_hook, skips) -> Any:
    """The logging data of a wrapper, after construction and after two and four steps."""
    model = wrap(Net(), **options)
    if with_hook:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
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

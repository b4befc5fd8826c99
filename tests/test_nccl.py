"""What 'nccl' means in each torch, what its errors say, and where buckets are."""

from __future__ import annotations

import doctest
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_ddp import BucketedDDP
from lightning_ddp.comm import Interrupt, nccl
from lightning_ddp.comm.nccl import (
    default_implementation,
    implementation_of,
    is_own_error,
    memory_problem,
    recovery_problem,
)
from lightning_ddp.elastic.refusals import check_backend
from lightning_ddp.errors import CollectiveError, ConfigurationError
from lightning_ddp.launch.recovery_client import Cause, cause_of_error

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def both_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch from 2.14 on: the classes are there, and nothing chooses between them."""
    for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2"):
        if not hasattr(dist, name):
            monkeypatch.setattr(dist, name, type(name, (), {}), raising=False)
    for variable in ("TORCH_DIST_USE_NCCL2", "DDP_DISABLE_COMM_MEM"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("version", "choice", "expected"),
    [
        ("2.13.0+cu130", None, "nccl-legacy"),
        ("2.14.1", None, "nccl-legacy"),
        ("2.14.1", "1", "nccl2"),
        ("2.15.0+cu130", None, "nccl2"),
        ("2.15.0", "0", "nccl-legacy"),
        ("2.15.0", "off", "nccl2"),  # only 0 is no
    ],
)
def test_the_version_and_a_variable_choose_the_implementation(monkeypatch, version, choice, expected):
    monkeypatch.setattr(torch, "__version__", version)
    if choice is not None:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", choice)
    assert default_implementation().name == expected
    assert default_implementation("nccl2").name == "nccl2"
    assert default_implementation("nccl-legacy").name == "nccl-legacy"


def test_without_the_second_class_it_is_the_first(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    monkeypatch.delattr(dist, "ProcessGroupNCCL2")
    assert default_implementation().name == "nccl-legacy"


def test_a_backend_is_known_by_its_class_also_inside_the_wrapper_of_the_debug_level():
    second = dist.ProcessGroupNCCL2
    backend = second.__new__(second)
    for found in (backend, SimpleNamespace(wrapped_pg=backend)):
        assert implementation_of(found).name == "nccl2"
    assert implementation_of(SimpleNamespace()) is None


def test_what_ends_the_process_at_an_abort_is_refused_with_the_variable_to_set(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    check_backend("cpu:gloo,cuda:nccl")
    with pytest.raises(
        ConfigurationError, match=r"nccl2 ends the process\. Set TORCH_DIST_USE_NCCL2=0 and use 'nccl', or"
    ):
        check_backend("nccl2")
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "1")
    with pytest.raises(ConfigurationError, match=r"in torch 2\.14\.0 an abort of nccl2 ends the process"):
        check_backend("cpu:gloo,cuda:nccl")
    check_backend("gloo")
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    assert recovery_problem("nccl") is None


def test_the_examples_of_the_file_hold():
    assert doctest.testmod(nccl) == (0, 2)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NCCL operation timed out", Cause.LOST_CONNECTION),
        ("NCCL communicator was aborted after a previous error", Cause.LOST_CONNECTION),
        ("NCCL Async Error: remote process exited or there was a network error", Cause.LOST_CONNECTION),
        ("Failed to initialize NCCL communicator: Duplicate GPU detected : rank 1 and rank 0", Cause.OWN),
        ("ProcessGroupNCCL is bound to device cuda:0 but an operation was issued on cuda:1", Cause.OWN),
    ],
)
def test_an_error_of_nccl_is_that_of_a_peer_unless_this_rank_has_made_it(text, expected):
    error = CollectiveError(f"all-reduce failed: {text}", label="all-reduce", rank=0, waited_s=1.0)
    error.__cause__ = dist.DistBackendError(text)
    assert cause_of_error(error) is expected
    assert not is_own_error("Duplicate GPU")


# ---------------------------------------------------------------------- memory of buckets


class Backend:
    """A backend with the allocator of torch's."""

    def __init__(self, *, supports: bool = True, is_made: bool = True) -> None:
        self.supports, self.is_made = supports, is_made

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return self.supports

    def _is_initialized(self) -> bool:
        return self.is_made


Backend.__name__ = "ProcessGroupNCCL"


def test_buckets_are_registered_where_the_backend_allocates_and_nobody_objects(monkeypatch):
    assert memory_problem(Backend(), CUDA) is None
    assert memory_problem(Backend(supports=False), CUDA) == "the backend allocates no memory for this device"
    assert "Pass device_id to init_process_group" in memory_problem(Backend(is_made=False), CUDA)
    assert memory_problem(Backend(), CUDA, may_abort=True).startswith("on_failure, ")
    monkeypatch.setenv("DDP_DISABLE_COMM_MEM", "1")
    assert memory_problem(Backend(), CUDA) == "DDP_DISABLE_COMM_MEM=1"


def _count_registered(rank: int, world_size: int, may_abort: bool) -> tuple[int, int]:
    """How often ours and torch's class ask the backend for memory."""
    asked: list[int] = []
    kind = type(dist.group.WORLD._get_backend(torch.device("cuda", rank)))
    sound = kind.allocate_tensor

    def allocate(self: Any, size: int, **options: Any) -> torch.Tensor:
        asked.append(size)
        return sound(self, size, **options)

    kind.allocate_tensor = allocate
    interrupt = Interrupt()
    interrupt.may_abort = may_abort
    module = nn.Linear(64, 64).to("cuda")
    wrapped = BucketedDDP(module, interrupt=interrupt)
    wrapped(torch.ones(2, 64, device="cuda")).sum().backward()
    return sum(asked), sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("variables", "may_abort", "is_registered"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"SIMULATED_CUDA_MULTICAST": "0"}, False, False),
    ],
)
@pytest.mark.xdist_group("simulated ranks")
def test_the_buckets_of_a_wrapper_are_in_memory_of_the_backend(
    simulated_ranks, variables, may_abort, is_registered
):
    for asked, num_parameters in simulated_ranks.run(_count_registered, 2, may_abort, variables=variables):
        assert (asked >= num_parameters) == is_registered
        assert (asked > 0) == is_registered

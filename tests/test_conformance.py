"""PyTorch's own tests of DistributedDataParallel pass with `BucketedDDP` in its place, but for eight."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from conformance import KNOWN_TORCH, Outcome, TorchTest, TorchTests, read_list

_SHARED_MEMORY = (
    "the profiler's events are searched for gloo:all_reduce, but gradients of ranks of one host are summed in"
    " memory that they share; with transport='gloo' it passes"
)
_AT_ONCE = (
    "torch's class names a parameter without a gradient at the next forward; here the backward that lacks it"
    " raises, the first one too"
)
EXCEPTIONS = {
    "test_ddp_profiling_autograd_profiler": ("AssertionError: Scalars are not equal", _SHARED_MEMORY),
    "test_ddp_profiling_torch_profiler": ("AssertionError: Scalars are not equal", _SHARED_MEMORY),
    **dict.fromkeys(
        (
            "test_ddp_control_flow_different_across_ranks",
            "test_ddp_control_flow_same_across_ranks",
            "test_ddp_multiple_nested_unused_params_err_ignore_params",
            "test_ddp_multiple_nested_unused_params_error",
            "test_ddp_unused_params_rebuild_buckets_exception",
        ),
        ("backward 0 ended, but these parameters got no gradient", _AT_ONCE),
    ),
    "test_ddp_broadcast_buffers_deprecation_warning": (
        "AssertionError: 0 not greater than 0",
        "torch deprecates broadcast_buffers=True and =False in favour of forward_sync_buffers; here it"
        " stays, as it carries the default 'auto', so naming another choice of it is no reason for a warning",
    ),
}
"""Tests that fail with `BucketedDDP`: with what text, and why that is right."""

SAME_WITH_VIEWS = (
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
    "test_extra_DistributedDataParallel_view",
    "test_extra_fused_optim_parity_adamw_view_static",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
)
"""Tests of which `--slow` runs another one, with the other choice of gradient_as_bucket_view."""

AS_THEY_ARE = read_list("as_they_are.txt")
CPU_FOR_CUDA = [
    pytest.param(test, id=test.name, marks=[pytest.mark.exhaustive] * (test.name in SAME_WITH_VIEWS))
    for test in read_list("cpu_for_cuda.txt")
]


def torch_tests(*, cpu_for_cuda: bool) -> Iterator[TorchTests]:
    if not torch.__version__.startswith(tuple(f"{version}." for version in KNOWN_TORCH)):
        reason = f"the lists are for the tests of torch {' and '.join(KNOWN_TORCH)}, not {torch.__version__}"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with closing(TorchTests(cpu_for_cuda=cpu_for_cuda)) as tests:
        yield tests


@pytest.fixture(scope="module")
def as_they_are() -> Iterator[TorchTests]:
    yield from torch_tests(cpu_for_cuda=False)


@pytest.fixture(scope="module")
def with_cpu_for_cuda() -> Iterator[TorchTests]:
    yield from torch_tests(cpu_for_cuda=True)


def require_failure(outcome: Outcome, message: str) -> None:
    assert outcome.status == "failed", outcome
    assert message in outcome.error, outcome.error


@pytest.mark.xdist_group("conformance")
@pytest.mark.parametrize("test", AS_THEY_ARE, ids=lambda test: test.name)
def test_a_test_that_needs_no_gpu_passes(as_they_are, test):
    outcome = as_they_are.run(test)
    assert outcome.status == "passed", outcome.error


@pytest.mark.slow
@pytest.mark.parametrize("test", CPU_FOR_CUDA)
def test_a_test_with_the_cpu_in_place_of_cuda_passes_or_fails_for_a_reason(with_cpu_for_cuda, test):
    outcome = with_cpu_for_cuda.run(test)
    if test.name in EXCEPTIONS:
        message, _ = EXCEPTIONS[test.name]
        require_failure(outcome, message)
    else:
        assert outcome.status == "passed", outcome.error


def test_the_exceptions_are_tests_of_the_list():
    assert EXCEPTIONS.keys() | set(SAME_WITH_VIEWS) <= {param.id for param in CPU_FOR_CUDA}


@pytest.mark.xdist_group("conformance")
def test_a_class_with_wrong_gradients_fails(as_they_are):
    test = TorchTest(name="test_DistributedDataParallelCPU")
    outcome = as_they_are.run(test, "conformance.substitution:NoSync")
    require_failure(outcome, "AssertionError: Tensor-likes are not close")


@pytest.mark.slow
def test_a_class_that_broadcasts_no_buffers_fails(with_cpu_for_cuda):
    outcome = with_cpu_for_cuda.run(
        TorchTest(name="test_ddp_broadcast_buffer"), "conformance.substitution:NoBuffers"
    )
    require_failure(outcome, "AssertionError: Tensor-likes are not close")

"""PyTorch's own tests of DistributedDataParallel, with `BucketedDDP` in its place.

The runner and the lists stand beside the repository; without them these tests are skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFORMANCE = Path(__file__).resolve().parents[2] / "shared" / "conformance"
DEADLINE_S = 900

_SHARED_MEMORY = (
    "the profiler's events are searched for gloo:all_reduce, but gradients of ranks of one host are summed in"
    " memory that they share; with transport='gloo' it passes"
)
EXCEPTIONS = {
    "spawn:test_ddp_profiling_autograd_profiler": _SHARED_MEMORY,
    "spawn:test_ddp_profiling_torch_profiler": _SHARED_MEMORY,
    "spawn:test_ddp_broadcast_buffers_deprecation_warning": (
        "torch deprecates broadcast_buffers=True and =False in favour of forward_sync_buffers; here it"
        " stays, as it carries the default 'auto', so naming another choice of it is no reason for a warning"
    ),
}
"""Tests that fail with `BucketedDDP`, and why that is right."""

pytestmark = pytest.mark.skipif(
    not CONFORMANCE.is_dir(), reason="the conformance runner is not beside the repository"
)


def failed_tests(tmp_path: Path, *options: str) -> tuple[set[str], int]:
    """Runs one list. Returns the tests that did not pass, and how many there are."""
    report = tmp_path / "report.json"
    command = [sys.executable, "torch_ddp.py", "--ddp", "lightning_ddp:BucketedDDP", "--jobs", "2"]
    result = subprocess.run(
        [*command, "--json", str(report), *options],
        cwd=CONFORMANCE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert report.exists(), result.stdout[-3000:]
    tests = json.loads(report.read_text())["tests"]
    return {test["id"] for test in tests if test["status"] != "PASS"}, len(tests)


def test_the_tests_that_run_as_they_are_pass(tmp_path: Path) -> None:
    failed, num_tests = failed_tests(tmp_path)
    assert num_tests == 11
    assert failed == set()


def test_the_tests_with_the_cpu_standing_in_for_cuda_pass(tmp_path: Path) -> None:
    failed, num_tests = failed_tests(tmp_path, "--cpu-shim")
    assert num_tests == 98
    assert failed == set(EXCEPTIONS)

"""Under torchrun: no signal is sent, each rank raises, and the agent reports the rank that failed first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import user_script
from harness import last_screen, run_script
from user_script import order, read_notes

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("fault", "fresh"),
    [("exception", True), ("kill", False), pytest.param("long", False, marks=pytest.mark.slow)],
)
def test_torchrun_reports_the_rank_that_failed_first(fault, fresh, tmp_path) -> None:
    arguments = order(tmp_path, fault=fault, rank=1)
    result = run_script(
        Path(user_script.__file__), arguments, timeout_s=150.0, launcher=TORCHRUN, fresh=fresh
    )
    assert result.returncode == 1
    notes = read_notes(tmp_path)
    assert [name for name in notes if name.startswith("fired")] == ["fired-1"]
    assert (notes["on_exception-0"]["kind"], notes["on_exception-0"]["rank"]) == ("PeerFailure", 1)
    root = result.stderr[result.stderr.index("Root Cause (first observed failure)") :]
    assert re.search(r"rank +: 1 \(local_rank: 1\)", root), root
    if fault == "long":
        screen = last_screen(result.stderr)
        assert "rank 1 failed first at step 2 in training_step: ValueError" in screen
    else:
        assert ("ValueError: expected 3 channels, got 1" if fault == "exception" else "SIGKILL") in root

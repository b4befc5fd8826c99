"""`Trainer(strategy="custom_ddp")` ends with the same weights as Lightning's `strategy="ddp"`, bit for bit.

Real scripts in real processes. Each launch runs several ways of training in sequence, which also shows
that one script can make many Trainers; the launches are shared by the tests of this file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ScriptResult, run_script

SCRIPT = Path(__file__).with_name("harness") / "trainer_script.py"
ALL_CASES = [
    "plain",
    "accumulate",
    "clip",
    "bf16",
    "manual_accumulate",
    "gan",
    "compiled",
    "two_epochs",
    "resumed",
    "fit_twice_and_evaluate",
]
CASES_BY_LAUNCH = {
    "popen": ALL_CASES,
    "torchrun": ["plain", "fit_twice_and_evaluate"],  # another launcher changes nothing in the steps
}
pytestmark = pytest.mark.xdist_group("parity_trainer")  # they share what the fixtures make
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TIMEOUT_S = 170


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One run of the script: what it printed, and its results by case as far as it came."""

    script: ScriptResult
    results: dict[str, dict[str, Any]]

    def result(self, case: str) -> dict[str, Any]:
        self.script.check()
        return self.results[case]


def launch(strategy: str, cases: Sequence[str], folder: Path, launcher: Sequence[str] = ()) -> Launch:
    out = folder / "results.pt"
    args = [strategy, ",".join(cases), str(out)]
    script = run_script(SCRIPT, args, timeout_s=TIMEOUT_S, launcher=launcher, cwd=folder)
    return Launch(script=script, results=torch.load(out) if out.exists() else {})


@pytest.fixture(scope="module")
def lightning(tmp_path_factory) -> Launch:
    """The reference: Lightning's own strategy."""
    return launch("ddp", ALL_CASES, tmp_path_factory.mktemp("lightning"))


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> Callable[[str], Launch]:
    """Launches our strategy when the first test asks for it."""

    @functools.cache
    def of(name: str) -> Launch:
        launcher = TORCHRUN if name == "torchrun" else []
        return launch("custom_ddp", CASES_BY_LAUNCH[name], tmp_path_factory.mktemp(name), launcher)

    return of


def wrappers(script: ScriptResult, case: str) -> dict[int, set[str]]:
    """rank -> names of the classes that wrapped its module, as the ranks printed them."""
    found: dict[int, set[str]] = {}
    for line in script.stdout.splitlines():
        words = line.split()
        if line.startswith(f"{case}: rank "):
            assert words[4] == "2", line
            found.setdefault(int(words[2]), set()).add(words[-1])
    return found


def test_the_reference_is_lightnings_ddp_on_two_ranks(lightning):
    for case in ALL_CASES:
        assert lightning.result(case)
        assert wrappers(lightning.script, case) == {rank: {"DistributedDataParallel"} for rank in (0, 1)}, (
            case
        )
    assert lightning.result("fit_twice_and_evaluate")["test"][0]["test_ranks"] > 0, "of both ranks"


def test_the_cases_of_the_reference_differ(lightning):
    # so that an option which a strategy drops cannot go unnoticed
    weights = {case: lightning.result(case)["state"]["head.weight"] for case in ALL_CASES}
    same = [(a, b) for a in ALL_CASES for b in ALL_CASES if a < b and torch.equal(weights[a], weights[b])]
    assert same == [("resumed", "two_epochs")]


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, cases in CASES_BY_LAUNCH.items() for case in cases]
)
def test_results_equal_those_of_lightnings_ddp(name, case, launched, lightning):
    ours, theirs = launched(name).result(case), lightning.result(case)
    assert wrappers(launched(name).script, case) == {rank: {"BucketedDDP"} for rank in (0, 1)}
    assert ours.keys() == theirs.keys()
    assert list(ours["state"]) == list(theirs["state"])
    different = [n for n, t in theirs["state"].items() if not torch.equal(ours["state"][n], t)]
    assert different == []
    for key in theirs.keys() - {"state", "predict"}:
        assert ours[key] == theirs[key], key
    if "predict" in theirs:
        assert torch.equal(ours["predict"], theirs["predict"])


def test_after_a_fit_all_ranks_have_the_buffers_of_rank_0(launched):
    """Those of the last batch too, which no forward has copied."""
    said = [line for line in launched("popen").script.stdout.splitlines() if "plain: the buffers are" in line]
    assert (len(said), len(set(said))) == (2, 1)

"""Children import with a rare garbage collector, and nothing of that is left when their run begins."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import TRAINS, run_script

from lightning_ddp.launch import child_process as prelude

LIGHT = Path(__file__).with_name("harness") / "light" / "sitecustomize.py"
SCRIPT = (
    """
import gc, os, subprocess, sys
at_start = gc.get_threshold()
"""
    + TRAINS
    + """
if len(sys.argv) > 1:
    gc.set_threshold(*map(int, sys.argv[1].split(",")))

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        ask = "import gc, os; print(gc.get_threshold(), os.environ.get('PYTHONPATH'))"
        child = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
        told = {
            "start": at_start,
            "run": gc.get_threshold(),
            "path": os.environ.get("PYTHONPATH"),
            "folders": [folder for folder in sys.path if "prelude" in folder],
            "marked": getattr(sys, "marked", False),
            "child": child.stdout.strip(),
        }
        print(f"rank {self.global_rank} {told!r}", flush=True)
        return super().training_step(batch, batch_idx)

trainer(max_steps=1).fit(Model())
"""
)
RARE = (100_000, 10, 10)


def told_by_ranks(tmp_path: Path, *args: str, fresh: bool = False) -> list[dict[str, object]]:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"{LIGHT.read_text()}\nsys.marked = True\n")
    result = run_script(SCRIPT, args, env={"PYTHONPATH": str(site)}, fresh=fresh).check()
    lines = sorted(line for line in result.stdout.splitlines() if line.startswith("rank "))
    assert [line[:7] for line in lines] == ["rank 0 ", "rank 1 "]
    return [eval(line[7:]) for line in lines]  # what the script above has printed


def test_a_child_imports_with_a_rare_collector_and_runs_as_its_parent_does(tmp_path: Path) -> None:
    parent, child = told_by_ranks(tmp_path, fresh=True)
    assert (parent.pop("start"), child.pop("start")) == (gc.get_threshold(), RARE)
    assert child == parent
    assert child["run"] == gc.get_threshold()
    assert child["folders"] == []
    assert child["marked"]
    assert child["child"] == f"{gc.get_threshold()} {child['path']}"


def test_thresholds_that_the_script_sets_stay(tmp_path: Path) -> None:
    """Also in the parent, which has no prelude to restore."""
    assert [rank["run"] for rank in told_by_ranks(tmp_path, "500,5,5")] == [(500, 5, 5)] * 2


@pytest.mark.parametrize("inherited", [None, "/some/folder:/another"])
def test_python_starts_with_the_prelude_and_what_else_it_would(inherited: str | None) -> None:
    """Some systems have a sitecustomize of their own, as Debian's Python has."""
    told = "gc.get_threshold(), os.environ.get('PYTHONPATH'), 'sitecustomize' in sys.modules"
    ask = f"import gc, os, sys; print({told})"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if inherited is not None:
        environment["PYTHONPATH"] = inherited
    command = [sys.executable, "-c", ask]
    plain, found = (
        subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        for env in (environment, prelude.child_environment(environment))
    )
    thresholds, rest = plain.stdout.split(") ")
    assert (found.stdout, found.stderr) == (f"{RARE} {rest}", "")
    assert rest.startswith(f"{inherited} ")
    assert f"{thresholds})" != str(RARE)

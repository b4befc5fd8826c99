"""Benchmarks: statistics, tables and command line are right, a broken run fails and leaves nothing behind.

No test asserts a time: figures depend on the machine, their meaning does not.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import math
import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from harness import RunningScript, start_script
from harness.namespaces import can_shape_links

from lightning_ddp.__main__ import main
from lightning_ddp.tools import ToolError, held_back, unwinds_at_sigterm
from lightning_ddp.tools.bench import Benchmark, Comparison, Result, compare, runs
from lightning_ddp.tools.bench.runs import ALONE, WITH_OURS, run_to_recovery, time_first_batch, time_import
from lightning_ddp.tools.command_line import format_table, paired_ratio, picture_path
from lightning_ddp.tools.ranks import RankContext, RoundRobin, run_ranks

DEADLINE_S = 240.0
DEATH_DEADLINE_S = 10
FIRST_BATCH = """
import json, sys, time
given = json.loads(sys.argv[1])
print("noise")
print(f"FIRST_BATCH {time.time() + 100 * given['devices'] * (1 + (given['strategy'] == 'ddp')):.6f}")
"""

# Statistics and reports


def test_ratios_are_paired_by_round_and_quartiles_are_inclusive() -> None:
    samples = {"a": [1.0, 20.0, 3.0], "b": [2.0, 40.0, 2.0]}  # the machine was slow in the second round
    assert compare(samples, reference="a") == {
        "a": Comparison(median=3.0, iqr=9.5, ratio=1.0),
        "b": Comparison(median=2.0, iqr=19.0, ratio=0.5),
    }
    for values, iqr in (([5.0, 1.0, 4.0, 2.0, 3.0], 2.0), ([7.0], 0.0), ([1.0, 2.0], 0.5)):
        assert compare({"a": values}, reference="a")["a"].iqr == iqr
    for ours, theirs in (([1.0], [1.0, 2.0]), ([], [])):
        with pytest.raises(ValueError, match=r"longer|no median"):
            paired_ratio(ours, theirs)


def test_table_aligns_text_left_and_numbers_right() -> None:
    assert format_table(("model", "rounds", "ms"), [("a", 3, 1.5), ("longer", 30, 10.0)]).splitlines() == [
        "model   rounds      ms",
        "------  ------  ------",
        "a            3   1.500",
        "longer      30  10.000",
    ]
    assert format_table(("name",), []) == "name\n----"
    with pytest.raises(ValueError, match="argument 2 is longer"):
        format_table(("name",), [("a", "b")])


# Command line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: command"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["bench"], "required: benchmark"),
        (["bench", "nonsense"], "invalid choice: 'nonsense'"),
        (["bench", "step", "--rounds", "0"], "at least 1, got '0'"),
        (["bench", "step", "--models", "nonsense"], "invalid choice: 'nonsense'"),
        (["bench", "step", "--timeout-s", "inf"], "at most 1e6, got 'inf'"),
        (["bench", "launch", "--json", "no_such_folder/a.json"], "existing folder"),
    ],
)
def test_usage_error_exits_with_2_and_prints_usage(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(argv)
    error = capsys.readouterr().err
    assert error.startswith("usage: python -m lightning_ddp")
    assert message in error


def test_failed_benchmark_exits_with_1_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "first_batch.py"
    script.write_text("raise SystemExit('no such cluster')")
    monkeypatch.setattr("lightning_ddp.tools.bench.runs.SCRIPT", script)
    assert main(["bench", "launch", "--rounds", "1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: first_batch.py")
    assert "no such cluster" in captured.err


@pytest.mark.parametrize("name", ["step", "launch", "failures", "recovery", "hooks", "scaling"])
def test_a_benchmark_that_starts_its_own_processes_is_refused_under_torchrun(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", name]) == 1
    assert f"bench {name} starts its own processes" in capsys.readouterr().err


# Files that are asked for

SAMPLES = {size: {"ours": [1.0, 1.1, 1.3], "theirs": [float(size), 2.0, 2.2]} for size in ("4", "64", "256")}


def report_of(samples: dict[str, dict[str, list[float]]], *options: str) -> int:
    result = Result(samples=samples, references="ours", settings={"rounds": 3}, extra={"more": 1})
    benchmark = Benchmark(
        name="toy",
        summary="",
        unit="ms",
        options=lambda parser: None,
        measure=lambda args: result,
        table=lambda found: f"{len(found.comparisons)} subjects",
        title="the title",
    )
    parser = argparse.ArgumentParser()
    benchmark.add_arguments(parser)
    return benchmark.run(parser.parse_args(options))


def test_the_files_that_were_asked_for_are_written_and_no_other(tmp_path: Path, capsys) -> None:
    assert report_of(SAMPLES, "--json", str(tmp_path / "a.json")) == 0
    assert report_of(SAMPLES, "--plot", str(tmp_path / "a.svg")) == 0
    assert report_of({"64": {"ours": [1.0], "theirs": [2.0]}}, "--plot", str(tmp_path / "b.png")) == 0
    assert capsys.readouterr().out.startswith("3 subjects\n3 subjects\npicture: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.svg", "b.png"]
    document = json.loads((tmp_path / "a.json").read_text())
    assert set(document) == {"benchmark", "environment", "settings", "unit", "summary", "samples"}
    assert document["samples"] == SAMPLES
    assert document["summary"]["more"] == 1
    assert document["summary"]["comparisons"]["4"]["ours"] == {
        "median": 1.1,
        "iqr": pytest.approx(0.15),
        "ratio": 1.0,
    }
    assert document["environment"]["packages"]["torch"]
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    picture = (tmp_path / "a.svg").read_text()  # matplotlib writes each text into a comment
    ratio = compare(SAMPLES["4"], reference="ours")["theirs"].ratio
    for text in (*SAMPLES, "ours", "theirs", "bench toy: the title", "ms", f"2.2 (ratio {ratio:.2f})"):
        assert f"<!-- {text} -->" in picture, text


def test_a_report_refuses_what_json_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        report_of({"m": {"ours": [math.nan]}}, "--json", str(tmp_path / "a.json"))


@pytest.mark.slow
def test_a_rank_that_is_killed_costs_no_step_and_no_sample(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(run_to_recovery.__globals__, "_NUM_TIMED", 5)  # of 100 steps without a failure
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    options = ["--rounds", "1", "--world-size", "2", "--contenders", "shrink", *files]
    assert main(["bench", "recovery", *options]) == 0
    printed = capsys.readouterr().out
    assert "1 of 1" in printed
    assert re.search(r"^ *step +stop +\d+\.\d+ +\d+\.\d+ +\d\.\d+$", printed, re.MULTILINE), printed
    (run,) = json.loads((tmp_path / "a.json").read_text())["summary"]["runs"]["shrink"]
    assert (run["is_recovered"], run["steps_again"], run["samples_lost"]) == (True, 0, 0)
    assert 0 < run["regroup_s"] < run["seconds"]
    assert run["full_s"] is None
    assert (tmp_path / "a.png").stat().st_size > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["replace", "cold"])
def test_a_rank_that_is_killed_is_replaced(name: str) -> None:
    run = run_to_recovery(name, 2, timeout_s=240.0)
    assert run["is_recovered"]
    assert min(run["seconds"], run["full_s"]) > 0
    assert run["steps_again"] == 0
    assert run["seconds"] < run["full_s"]
    assert run["pause_s"] < run["full_s"]


def test_a_picture_that_cannot_be_drawn_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert picture_path("a.SVG") == Path("a.SVG")
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected .*\.png.*, got 'a.txt'"):
        picture_path("a.txt")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(argparse.ArgumentTypeError, match="needs matplotlib: pip install matplotlib"):
        picture_path("a.png")


# Processes


def fail_on_rank_1(context: RankContext, message: str) -> None:
    """Fail on rank 1 while rank 0 waits for it in a collective."""
    if context.rank == 1:
        raise ValueError(message)
    dist.barrier()


@pytest.mark.slow
def test_failing_rank_is_reported_with_its_traceback_and_ends_the_others() -> None:
    # conftest.py fails the test if a process is left
    with pytest.raises(ToolError, match=r"(?s)rank 1 .*fail_on_rank_1.*ValueError: broken on purpose"):
        run_ranks(fail_on_rank_1, "broken on purpose", world_size=2, device="cpu", timeout_s=120)


def collect_garbage(context: RankContext, _: None) -> int:
    return gc.collect()


def test_forked_ranks_free_no_group_that_the_starting_process_has_left() -> None:
    """Whose threads are not there: gloo would abort them."""
    gc.disable()
    try:
        left: list[Any] = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))]
        left.append(left)
        del left
        run_ranks(collect_garbage, None, world_size=1, timeout_s=60, start_method="fork")
    finally:
        gc.enable()


def leave_early(context: RankContext, code: int) -> None:
    sys.exit(code)


def test_a_rank_that_exits_before_its_work_is_done_is_not_waited_for() -> None:
    with pytest.raises(ToolError, match="a rank exited with 0 before its work was done"):
        run_ranks(leave_early, 0, world_size=1, timeout_s=10, start_method="fork")


def take_three_turns(context: RankContext, orders: list[list[int]]) -> list[list[float]]:
    """When this process began and ended each of its turns; every order lists the replicas."""
    turns, spans = RoundRobin(context.store, context.world_size), []
    for order in orders:
        with turns.turn(order, context.replica):
            start = time.monotonic()
            for _ in range(50):  # long enough for turns to overlap, if they do
                dist.barrier()
            spans.append([start, time.monotonic()])
    return spans


@pytest.mark.slow
def test_replicas_have_groups_of_their_own_and_work_in_turns() -> None:
    orders = [[0, 1, 2], [2, 0, 1], [1, 2, 0]]
    by_process = run_ranks(
        take_three_turns, orders, world_size=2, num_replicas=3, device="cpu", timeout_s=120
    )
    assert [len(spans) for spans in by_process] == [3] * 6
    ends = 0.0
    for number, order in enumerate(orders):
        for replica in order:
            spans = [by_process[2 * replica + rank][number] for rank in range(2)]
            assert min(start for start, _ in spans) >= ends
            ends = max(end for _, end in spans)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_missing_gpu_is_named_before_anything_is_spawned() -> None:
    with pytest.raises(ToolError, match="--world-size 1 needs as many GPUs, found 0"):
        run_ranks(fail_on_rank_1, "", world_size=1, device="cuda", timeout_s=120)


# Scripts that are timed


def test_each_number_of_devices_is_compared_by_itself_after_an_uncounted_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, path = tmp_path / "first_batch.py", tmp_path / "a.json"
    script.write_text(FIRST_BATCH)
    monkeypatch.setattr(runs, "SCRIPT", script)
    monkeypatch.setattr(runs, "STARTS", {"custom_ddp": (), "run": ("-B",), "ddp": ()})
    imports = iter([(9.0, 99.0), (1.0, 1.25), (2.0, 2.75)])
    names = (ALONE, WITH_OURS)
    monkeypatch.setattr(runs, "time_import", lambda timeout_s: dict(zip(names, next(imports), strict=True)))
    options = ["--world-size", "2", "4", "--rounds", "2", "--json", str(path)]
    assert main(["bench", "launch", *options]) == 0
    document = json.loads(path.read_text())
    for devices in (2, 4):
        samples = document["samples"][f"first batch, {devices} devices"]
        for name, factor in (("custom_ddp", 100), ("run", 100), ("ddp", 200)):
            # counted from the start of the script, which itself takes a fraction of a second
            assert len(samples[name]) == 2
            assert all(factor * devices < value < factor * devices + 60 for value in samples[name])
    assert document["samples"]["import"] == {ALONE: [1.0, 2.0], WITH_OURS: [1.25, 2.75]}
    assert document["summary"]["import_adds_ms"] == 500.0
    assert "first batch, 4 devices  ddp" in capsys.readouterr().out


@pytest.mark.slow
def test_the_import_is_that_of_lightning_and_this_package_after_it() -> None:
    found = time_import(600.0)
    assert 0 < found[ALONE] < found[WITH_OURS]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys; print('the reason'); sys.exit(3)", "(?s)ended with status 3.*the reason"),
        ("print('the reason')", "(?s)did not reach FIRST_BATCH.*the reason"),
    ],
)
def test_script_without_a_first_batch_is_an_error_with_its_output(
    source: str, message: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    with pytest.raises(ToolError, match=message):
        time_first_batch(script, {}, timeout_s=60)


def test_hanging_script_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "child.pid"
    script = tmp_path / "script.py"
    script.write_text(
        "import json, pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "pathlib.Path(json.loads(sys.argv[1])['path']).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    with pytest.raises(ToolError, match=r"still running after 2 s"):
        time_first_batch(script, {"path": str(pid_file)}, timeout_s=2)
    child = int(pid_file.read_text())
    deadline = time.monotonic() + DEATH_DEADLINE_S
    with contextlib.suppress(psutil.NoSuchProcess):  # gone, which is as good as a zombie
        while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the script's child outlived it"


# SIGTERM


def sessions_of(script: RunningScript) -> list[int]:
    """The script that is measured: the process with a session of its own."""
    found = []
    for one in script.processes():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            found += [one.pid] if os.getsid(one.pid) == one.pid != script.pid else []
    return found


def namespaces_of(script: RunningScript) -> list[Path]:
    """The names of the namespaces, once both ranks have entered theirs."""
    inodes, found = set(), []
    for one in script.processes():
        with contextlib.suppress(FileNotFoundError):  # such as `ip`, which has ended meanwhile
            inodes.add(os.stat(f"/proc/{one.pid}/ns/net").st_ino)
    for path in Path("/var/run/netns").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # another test's
            found += [path] if path.stat().st_ino in inodes else []
    return found if len(found) == 2 else []


@pytest.mark.slow
@pytest.mark.xdist_group("namespaces")
@pytest.mark.parametrize(
    ("arguments", "find"),
    [(["failures"], sessions_of), (["hooks", "--links", "100"], namespaces_of)],
    ids=["script", "link"],
)
def test_sigterm_removes_what_a_benchmark_has_made(arguments, find, tmp_path: Path) -> None:
    if find is namespaces_of and not can_shape_links():
        pytest.skip("needs network namespaces (root)")
    env, made = {"TMPDIR": str(tmp_path)}, []
    with start_script("lightning_ddp", ["bench", *arguments], env, fresh=True, is_module=True) as script:
        script.wait_until(lambda: made.extend(find(script)) or made, DEADLINE_S)
        assert list(tmp_path.iterdir()), "it has no scratch folder"
        os.kill(script.pid, signal.SIGTERM)
        result = script.wait(DEADLINE_S)  # raises if a process is left
    assert result.returncode == 143, result.stderr
    assert "ended by SIGTERM\n" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())
    assert find is sessions_of or not [path for path in made if path.exists()]


def test_what_is_being_started_is_finished_before_sigterm_ends_it() -> None:
    before, steps = signal.getsignal(signal.SIGTERM), []

    def start() -> None:
        with held_back():
            signal.raise_signal(signal.SIGTERM)
            steps.append("started")
        steps.append("not reached")

    with pytest.raises(SystemExit, match="143"), unwinds_at_sigterm():
        start()
    assert steps == ["started"]
    assert signal.getsignal(signal.SIGTERM) == before

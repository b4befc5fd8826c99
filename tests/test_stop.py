"""A signal to one rank stops all at the same step; Ctrl-C ends a run at once, and twice means now."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.preloaded import Preloaded, PreloadedRun, preloaded
from test_failures import read_notes

TIMEOUT_S = 60.0
SOON_S = 15.0  # 2 s is what is promised, on a machine that is not busy; less than any grace period
GRACE_S = 3.0


@pytest.fixture(scope="module")
def process() -> Iterator[Preloaded]:
    with preloaded("stop_script") as process:
        yield process


@pytest.fixture(scope="module")
def undisturbed(process: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """World size -> what the ranks of an undisturbed run note."""

    @functools.cache
    def notes(world_size: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("undisturbed")
        result = process.run(["", str(folder), "", str(world_size)], timeout_s=TIMEOUT_S)
        assert result.exit_code == 0, result.stderr
        return read_notes(folder)

    return notes


def wait_until_ready(folder: Path, world_size: int) -> dict[int, int]:
    """Rank -> process id, once all ranks have paused."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        notes = read_notes(folder)
        if {f"ready-{rank}" for rank in range(world_size)} <= notes.keys():
            return {rank: notes[f"ready-{rank}"]["pid"] for rank in range(world_size)}
        assert time.monotonic() < deadline, notes


def start(
    process: Preloaded, wait_at: str, folder: Path, world_size: int = 2
) -> tuple[PreloadedRun, dict[int, int]]:
    run = process.start([wait_at, str(folder), "", str(world_size)])
    return run, wait_until_ready(folder, world_size)


def report_seconds(begin: float) -> float:
    seconds = time.monotonic() - begin
    print(f"all ended {seconds:.2f} s after the signal")
    return seconds


@pytest.mark.parametrize(
    ("moment", "rank", "world_size"),
    [("fit", 0, 2), ("fit", 1, 2), ("validation", 0, 2), ("validation", 1, 2), ("fit", 2, 4)],
)
def test_sigterm_to_one_rank_stops_all_at_one_step_and_the_run_resumes(
    process, undisturbed, tmp_path, moment, rank, world_size
) -> None:
    run, pids = start(process, moment, tmp_path, world_size)
    os.kill(pids[rank], signal.SIGTERM)
    (tmp_path / "go").touch()
    result = run.wait(TIMEOUT_S)
    notes = read_notes(tmp_path)
    assert result.exit_code == 0, result.stderr
    assert result.left == []
    kinds = [notes[f"on_exception-{r}"]["kind"] for r in range(world_size)]
    assert kinds == ["SIGTERMException"] * world_size
    (step,) = {notes[f"finally-{r}"]["step"] for r in range(world_size)}
    assert 4 <= step < 12, "stopped before the end"

    resumed = tmp_path / "resumed"
    resumed.mkdir()
    arguments = ["", str(resumed), str(tmp_path / "stopped.ckpt"), str(world_size)]
    result = process.run(arguments, timeout_s=TIMEOUT_S)
    assert result.exit_code == 0, result.stderr
    after_notes = read_notes(resumed)
    for r in range(world_size):
        before = json.loads(notes[f"finally-{r}"]["losses"])
        after = json.loads(after_notes[f"finally-{r}"]["losses"])
        assert set(before) & set(after) == set()
        assert before | after == json.loads(undisturbed(world_size)[f"finally-{r}"]["losses"])


def test_a_second_sigterm_ends_the_process_at_once(process, tmp_path) -> None:
    run, pids = start(process, "fit", tmp_path)
    os.kill(pids[1], signal.SIGTERM)
    deadline = time.monotonic() + TIMEOUT_S
    while "sigterm-1" not in read_notes(tmp_path):  # a second one would merge with a first that is pending
        assert time.monotonic() < deadline
    os.kill(pids[1], signal.SIGTERM)
    result = run.wait(TIMEOUT_S)
    assert result.exit_code == 1
    assert "second SIGTERM, ending" in result.stderr
    assert read_notes(tmp_path)["on_exception-0"]["rank"] == 1
    assert result.left == []


def test_ctrl_c_twice_means_now(process, tmp_path) -> None:
    run, _ = start(process, "fit", tmp_path)
    (tmp_path / "hang").touch()
    os.killpg(run.pid, signal.SIGINT)
    deadline = time.monotonic() + TIMEOUT_S
    while not {"hanging-0", "hanging-1"} <= read_notes(tmp_path).keys():
        assert time.monotonic() < deadline
    handlers = Path(f"/proc/{run.pid}/status")
    while int(re.search(r"SigIgn:\s*(\w+)", handlers.read_text())[1], 16) & (1 << (signal.SIGINT - 1)):
        assert time.monotonic() < deadline, "SIGINT stays ignored"
    begin = time.monotonic()
    os.killpg(run.pid, signal.SIGINT)
    result = run.wait(TIMEOUT_S, leftover_grace_s=5.0)
    assert report_seconds(begin) < SOON_S
    assert result.exit_code == 130
    assert result.left == []


@pytest.mark.parametrize("whom", ["all", "launcher"])
def test_ctrl_c_ends_all_soon(process, tmp_path, whom) -> None:
    run, pids = start(process, "fit", tmp_path)
    begin = time.monotonic()
    if whom == "all":  # what a terminal does
        os.killpg(run.pid, signal.SIGINT)
    else:
        os.kill(pids[0], signal.SIGINT)
    result = run.wait(TIMEOUT_S)
    assert report_seconds(begin) < SOON_S
    assert result.exit_code == 1
    assert result.left == []
    notes = read_notes(tmp_path)
    kinds = [notes[f"on_exception-{rank}"]["kind"] for rank in range(2)]
    if whom == "all":  # a rank may hear of the other's interrupt before it has seen to its own
        assert "KeyboardInterrupt" in kinds
        assert set(kinds) <= {"KeyboardInterrupt", "PeerFailure"}
    else:
        assert kinds == ["KeyboardInterrupt", "PeerFailure"]
    assert "finally-1" in notes


def test_a_process_that_does_not_end_within_the_grace_period_is_ended_with_its_stacks(
    process, tmp_path
) -> None:
    (tmp_path / "hang").touch()
    run, pids = start(process, "grace", tmp_path)
    os.kill(pids[1], signal.SIGKILL)
    begin = time.monotonic()
    result = run.wait(TIMEOUT_S)
    assert GRACE_S <= report_seconds(begin) < GRACE_S + SOON_S
    assert result.left == []
    assert result.exit_code == 1
    assert "hanging-0" in read_notes(tmp_path)
    assert "Timeout (0:00:03)!" in result.stderr
    assert result.stderr.count("Thread 0x") + result.stderr.count("Current thread") >= 2, (
        "stacks of all threads"
    )
    assert "in on_exception" in result.stderr, "where the main thread hangs"
    assert "finally-0" not in read_notes(tmp_path)


def test_slurms_signal_to_one_rank_stops_all_saves_and_requeues_the_job_once(process, tmp_path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    scontrol = tools / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    scontrol.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    variables = {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PATH": f"{tools}:{os.environ['PATH']}",
    }
    runs = []
    for rank in range(2):
        environment = json.dumps({**variables, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
        runs.append(process.start(["fit", str(tmp_path), "", "2", environment]))
    pids = wait_until_ready(tmp_path, 2)
    os.kill(pids[1], signal.SIGUSR1)
    (tmp_path / "go").touch()
    results = [run.wait(TIMEOUT_S) for run in runs]
    context = "\n".join(result.stderr for result in results)
    assert [result.exit_code for result in results] == [0, 0], context
    notes = read_notes(tmp_path)
    assert [notes[f"on_exception-{rank}"]["kind"] for rank in range(2)] == ["SIGTERMException"] * 2
    (step,) = {notes[f"finally-{rank}"]["step"] for rank in range(2)}
    assert 4 <= step < 12
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert saved["global_step"] == step

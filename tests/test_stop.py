"""A signal to one rank stops all at the same step; Ctrl-C ends a run at once, and twice means now."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RUN, TRAINS, RunningScript, ScriptResult, free_port, run_script, slow, srun, start_script
from user_script import SCRIPT, STEPS, order, read_notes, wait_for_notes

from lightning_ddp.launch.step_stop import PREEMPTED

TIMEOUT_S = 120.0
SOON_S = 30.0  # 2 s is what is promised, on a machine that is not busy; less than any grace period
LONG_S = 60.0
GRACE_S = 1.0


def train(folder: Path, **more: Any) -> dict[str, Any]:
    """What the ranks of a run that nobody disturbs note."""
    run_script(SCRIPT, order(folder, **more), timeout_s=TIMEOUT_S).check()
    return read_notes(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the ranks of an undisturbed run note."""
    return train(tmp_path_factory.mktemp("undisturbed"))


@contextlib.contextmanager
def started(folder: Path, grace_s: float = LONG_S) -> Iterator[tuple[RunningScript, list[int]]]:
    """A run whose ranks all wait, and their process ids."""
    with start_script(SCRIPT, order(folder, pause="fit", strategy={"failure_grace_s": grace_s})) as run:
        yield run, wait_until_ready(run, folder)


def wait_until_ready(run: RunningScript, folder: Path, num_ranks: int = 2) -> list[int]:
    """Process id of each rank, once all have paused."""
    names = [f"ready-{rank}" for rank in range(num_ranks)]
    notes = wait_for_notes(run, folder, names)
    return [notes[name]["pid"] for name in names]


def stop(
    folder: Path, rank: int, launcher: Sequence[str] = (), num_ranks: int = 2, pause: str = "fit", **more: Any
) -> ScriptResult:
    """A run of which one rank gets SIGTERM while all wait, and whose ranks all stop for that."""
    arguments = order(folder, pause=pause, trainer={"devices": num_ranks}, **more)
    with start_script(SCRIPT, arguments, launcher=launcher) as run:
        os.kill(wait_until_ready(run, folder, num_ranks)[rank], signal.SIGTERM)
        (folder / "go").touch()
        result = run.wait(TIMEOUT_S)
    assert result.returncode == PREEMPTED
    notes = read_notes(folder)
    assert [notes[f"on_exception-{r}"]["kind"] for r in range(num_ranks)] == ["SIGTERMException"] * num_ranks
    return result


@pytest.mark.parametrize(("moment", "rank"), [("fit", 0), ("validation", 1)])
def test_sigterm_to_one_rank_stops_all_at_one_step_and_the_run_resumes(
    undisturbed, tmp_path, moment, rank
) -> None:
    stop(tmp_path, rank, pause=moment, strategy={"failure_grace_s": LONG_S})
    notes = read_notes(tmp_path)
    (step,) = {notes[f"finally-{r}"]["step"] for r in range(2)}
    assert 4 <= step < STEPS, "stopped before the end"

    resumed = tmp_path / "resumed"
    resumed.mkdir()
    after_notes = train(resumed, checkpoint=str(tmp_path / "stopped.ckpt"))
    for r in range(2):
        before = json.loads(notes[f"finally-{r}"]["losses"])
        after = json.loads(after_notes[f"finally-{r}"]["losses"])
        assert set(before) & set(after) == set()
        assert before | after == json.loads(undisturbed[f"finally-{r}"]["losses"])


@pytest.mark.parametrize("launcher", [(), slow(RUN)], ids=["python", "run"])
def test_sigterm_to_a_lone_rank_ends_the_script_with_the_code_of_a_preempted_job(launcher, tmp_path) -> None:
    stop(tmp_path, 0, launcher, num_ranks=1)


@pytest.mark.parametrize("start_method", ["fork", slow("spawn")])
def test_sigterm_to_a_rank_that_is_a_function_ends_the_script_as_it_does_elsewhere(
    tmp_path, start_method
) -> None:
    result = stop(tmp_path, 1, strategy={"start_method": start_method})
    assert "trained-0" not in read_notes(tmp_path), "stopped before the end"
    assert "PeerFailure" not in result.stderr


FITS_TWICE = f"""{TRAINS}
from pytorch_lightning.demos.boring_classes import RandomDataset

class Stopped(BoringModel):
    def training_step(self, batch, batch_idx):
        if (self.trainer.global_step, self.global_rank) == (1, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)

def note(number, frame):
    os.write(1, b"heard\\n")

def pass_on(number, frame):
    note(number, frame)
    ours(number, frame)

num_samples = 1 + 4 * int(os.environ.get("LOCAL_RANK", 0))
uneven = torch.utils.data.DataLoader(RandomDataset(32, num_samples))
trainer(use_distributed_sampler=False).predict(BoringModel(), uneven, return_predictions=False)
trainer(max_steps=1).fit(BoringModel())
ours = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, {{"default": signal.SIG_DFL, "own": note, "passes on": pass_on}}[sys.argv[1]])
trainer(max_steps=2000).fit(Stopped())
"""


@pytest.mark.parametrize(("handler", "times"), [("default", 0), slow("own", 1), slow("passes on", 1)])
def test_sigterm_stops_a_second_fit_whichever_handler_the_script_has_set_before_it(handler, times) -> None:
    """And however many batches each rank has predicted before it."""
    result = run_script(FITS_TWICE, [handler], timeout_s=TIMEOUT_S)
    assert result.returncode == PREEMPTED, result.stderr
    assert result.stdout.count("heard\n") == times
    assert "second SIGTERM" not in result.stderr


def test_a_second_sigterm_ends_the_process_at_once(tmp_path) -> None:
    with started(tmp_path) as (run, pids):
        os.kill(pids[1], signal.SIGTERM)
        wait_for_notes(run, tmp_path, ["sigterm-1"])  # a second one would merge with a pending one
        os.kill(pids[1], signal.SIGTERM)
        result = run.wait(TIMEOUT_S)
    assert result.returncode == 1
    assert "second SIGTERM, ending" in result.stderr
    assert read_notes(tmp_path)["on_exception-0"]["rank"] == 1


def test_ctrl_c_twice_means_now(tmp_path) -> None:
    with started(tmp_path) as (run, _):
        (tmp_path / "hang").touch()
        os.killpg(run.pid, signal.SIGINT)
        wait_for_notes(run, tmp_path, ["hanging-0", "hanging-1"])
        handlers = Path(f"/proc/{run.pid}/status")
        ignored = re.compile(r"SigIgn:\s*(\w+)")
        bit = 1 << (signal.SIGINT - 1)
        run.wait_until(lambda: not int(ignored.search(handlers.read_text())[1], 16) & bit)
        begin = time.monotonic()
        os.killpg(run.pid, signal.SIGINT)
        result = run.wait(TIMEOUT_S)
        assert time.monotonic() - begin < SOON_S
    assert result.returncode == 130


@pytest.mark.parametrize("whom", ["all", "launcher"])
def test_ctrl_c_ends_all_soon(tmp_path, whom) -> None:
    with started(tmp_path) as (run, pids):
        begin = time.monotonic()
        if whom == "all":  # what a terminal does
            os.killpg(run.pid, signal.SIGINT)
        else:
            os.kill(pids[0], signal.SIGINT)
        result = run.wait(TIMEOUT_S)
        assert time.monotonic() - begin < SOON_S
    assert result.returncode == 1
    notes = read_notes(tmp_path)
    kinds = [notes[f"on_exception-{rank}"]["kind"] for rank in range(2)]
    if whom == "all":  # a rank may hear of the other's interrupt before it has seen to its own
        assert "KeyboardInterrupt" in kinds
        assert set(kinds) <= {"KeyboardInterrupt", "PeerFailure"}
    else:
        assert kinds == ["KeyboardInterrupt", "PeerFailure"]
    assert "finally-1" in notes


def test_a_process_that_does_not_end_within_the_grace_period_is_ended_with_its_stacks(tmp_path) -> None:
    (tmp_path / "hang").touch()
    with started(tmp_path, GRACE_S) as (run, pids):
        begin = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        result = run.wait(TIMEOUT_S)
        assert GRACE_S <= time.monotonic() - begin < GRACE_S + SOON_S
    assert result.returncode == 1
    assert "hanging-0" in read_notes(tmp_path)
    assert "Timeout (0:00:0" in result.stderr
    assert result.stderr.rpartition("lightning_ddp: ")[2].startswith("rank 1 ("), "the guard reports"
    assert result.stderr.count("Thread 0x") + result.stderr.count("Current thread") >= 2, (
        "stacks of all threads"
    )
    assert "in on_exception" in result.stderr, "where the main thread hangs"
    assert "finally-0" not in read_notes(tmp_path)


def test_slurms_signal_to_one_rank_stops_all_saves_and_requeues_the_job_once(tmp_path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    scontrol = tools / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    scontrol.chmod(0o755)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables["PATH"] = f"{tools}:{os.environ['PATH']}"
    with contextlib.ExitStack() as stack:
        runs = []
        for rank in range(2):
            env = {**variables, **srun(1, 2, local_rank=rank)}
            runs.append(stack.enter_context(start_script(SCRIPT, order(tmp_path, pause="fit"), env)))
        pids = wait_until_ready(runs[0], tmp_path)
        os.kill(pids[1], signal.SIGUSR1)
        (tmp_path / "go").touch()
        for run in runs:
            run.wait(TIMEOUT_S).check()
    notes = read_notes(tmp_path)
    assert [notes[f"on_exception-{rank}"]["kind"] for rank in range(2)] == ["SIGTERMException"] * 2
    (step,) = {notes[f"finally-{rank}"]["step"] for rank in range(2)}
    assert 4 <= step < STEPS
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert saved["global_step"] == step

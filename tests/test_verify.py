"""`doctor --verify`: checks pass on a sound engine, and name a planted defect; so do the items of `--full`.

A defect is a file that each rank runs first (`--preload`), or a variable of the environment.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_script

from lightning_ddp.__main__ import main
from lightning_ddp.averaging import available_averagers
from lightning_ddp.hooks import available_hooks
from lightning_ddp.hooks.allreduce import AllReduce
from lightning_ddp.hooks.base import Part
from lightning_ddp.tools.doctor.checklist import _REPLACED, ITEMS
from lightning_ddp.tools.doctor.trials import (
    AVERAGERS,
    HOOKS,
    HOST_WAITS,
    Ranks,
    Verdict,
    trials_of,
)
from lightning_ddp.tools.doctor.verify import KILLED

DEADLINE_S = 120


def verify(capsys: Any, *arguments: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit status, and level and message of each check."""
    status = main(["doctor", "--verify", "--device", "cpu", "--timeout-s", str(DEADLINE_S), *arguments])
    found = {}
    for line in capsys.readouterr().out.splitlines():
        level, _, rest = line.partition("  ")
        if level in ("PASS", "WARN", "FAIL"):
            check, _, message = rest.partition("  ")
            found[check] = (level, message.strip())
    return status, found


def failures(found: dict[str, tuple[str, str]]) -> dict[str, str]:
    return {check: message for check, (level, message) in found.items() if level == "FAIL"}


# ---------------------------------------------------------------------- a sound engine


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_sound_engine_passes_every_check(num_ranks, capsys):
    status, found = verify(capsys, "--processes", str(num_ranks))
    assert failures(found) == {}
    assert status == 0
    assert {*trials_of("cpu"), "host waits", KILLED} <= found.keys()
    others = "rank 0" if num_ranks == 2 else "ranks 0-2"
    assert f"rank {num_ranks - 1} failed in training (kill); {others} raised PeerFailure" in found[KILLED][1]
    assert "ours / torch's DDP" in found["step time"][1]
    assert found["host waits"][1].startswith("not applicable")


def test_a_sound_engine_passes_some_checks(capsys):
    status, found = verify(capsys, "--processes", "2", "--only", "gradients", "averager slowmo", KILLED)
    assert (status, failures(found)) == (0, {})
    assert {"averager slowmo", KILLED} <= found.keys()


def test_every_hook_and_averager_has_a_formula_and_a_trial():
    assert HOOKS.keys() == available_hooks().keys()
    assert AVERAGERS.keys() == available_averagers().keys()
    names = [f"hook {name}" for name in HOOKS] + [f"averager {name}" for name in AVERAGERS]
    for device in ("cpu", "cuda"):
        assert set(names) <= trials_of(device).keys()


def _try_on_device(rank: int, world_size: int) -> dict[str, str | None]:
    ranks = Ranks(rank=rank, size=world_size, device=torch.device("cuda", rank))
    found = {}
    for name, trial in trials_of("cuda").items():
        if name != "step time":  # of a simulated device it says nothing
            verdict = Verdict()
            trial(ranks, verdict)
            found[name] = verdict.problem
    return found


@pytest.mark.slow
@pytest.mark.skipif(find_spec("simcuda") is None, reason="needs the simulated CUDA device")
def test_a_sound_engine_passes_on_simulated_devices(simulated_ranks):
    for found in simulated_ranks.run(_try_on_device, 2, timeout_s=3 * DEADLINE_S):
        assert set(found.values()) == {None}, found
        assert {"host waits", "hook topk", "averager diloco"} < found.keys()


def _wait_in_a_hook(rank: int, world_size: int) -> str | None:
    sound = AllReduce.run

    def run(self: AllReduce, part: Part) -> torch.Tensor:
        part.buffer.sum().item()
        return sound(self, part)

    AllReduce.run = run
    ranks, verdict = Ranks(rank=rank, size=world_size, device=torch.device("cuda", rank)), Verdict()
    trials_of("cuda")[HOST_WAITS](ranks, verdict)
    return verdict.problem


@pytest.mark.slow
@pytest.mark.skipif(find_spec("simcuda") is None, reason="needs the simulated CUDA device")
def test_a_hook_that_makes_the_host_wait_is_found_on_simulated_devices(simulated_ranks):
    for problem in simulated_ranks.run(_wait_in_a_hook, 2, timeout_s=DEADLINE_S):
        assert "hook allreduce: 2 steady steps made the host wait for the device" in problem


# ---------------------------------------------------------------------- planted defects

WRONG_DIVISOR = """
from lightning_ddp.ddp.reduction import Reduction

sound = Reduction.set_divisor
def set_divisor(self, divisor):
    sound(self, divisor + 1)
Reduction.set_divisor = set_divisor
"""

RESIDUAL_AFTER_OVERFLOW = """
from lightning_ddp.hooks.base import StatefulHook

sound = StatefulHook._end_step
def end_step(self):
    self._are_spoiled = []
    sound(self)
StatefulHook._end_step = end_step
"""

RESIDUAL_NEVER_CLEARED = """
from lightning_ddp.hooks.base import StatefulHook

sound_remember = StatefulHook.remember
def remember(self, name, key, value):
    old = self.recall(name, key, value.numel())
    sound_remember(self, name, key, value if old is None or key != "error" else value + old.view_as(value))
StatefulHook.remember = remember
"""

UNREPORTED_DEATH = """
import os
from lightning_ddp.launch.failure_handler import FailureHandler

os.environ["LIGHTNING_DDP_SUPERVISION"] = "0"
assert FailureHandler.child_ended
FailureHandler.child_ended = lambda self, record: None
"""

WRONG_ROUND = """
from lightning_ddp.averaging.outer import SlowMo

sound_update = SlowMo.update
def update(self, anchor, momentum, delta, lr):
    sound_update(self, anchor, momentum, delta * 1.01, lr)
SlowMo.update = update
"""

HANGS = """
import threading
import lightning_ddp.tools.doctor.trials as trials

sound = trials._try_hook
def hang(ranks, verdict, *, name):
    if name == "noop" and ranks.rank == 1:
        threading.Event().wait()
    sound(ranks, verdict, name=name)
trials._try_hook = hang
"""

RAISES = """
from lightning_ddp.hooks.allreduce import AllReduce

def run(self, part):
    if self.channel.rank == 1:
        raise ValueError("the defect of this test")
    return part.buffer
AllReduce.run = run
"""

OVERFLOWED = "step 4: a step that overflowed was counted"
RESIDUAL = "step 1, .*residual is .* is expected"
DEATH = r"rank 1 failed in training \(kill\): rank 0 raised .*, expected PeerFailure of 1"


@pytest.mark.parametrize(
    ("defect", "only", "expected"),
    [
        pytest.param(
            WRONG_DIVISOR,
            ["gradients"],
            {name: "mean is .* is expected" for name in trials_of("cpu") if name.startswith("gradients")},
            id="divisor",
        ),
        pytest.param(
            RESIDUAL_AFTER_OVERFLOW,
            ["hook"],
            {f"hook {name}": OVERFLOWED for name in ("topk", "randomk", "sign", "powersgd")},
            id="residual-overflow",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            RESIDUAL_NEVER_CLEARED + WRONG_ROUND,
            ["hook topk", "hook sign", "hook fp16", "averager"],
            {
                "hook topk": RESIDUAL,
                "hook sign": RESIDUAL,
                "averager slowmo": "local step 2: parameters is .* is expected",
            },
            id="residual-never, round",
            marks=pytest.mark.slow,
        ),
        pytest.param(UNREPORTED_DEATH, ["killed"], {KILLED: DEATH}, id="death", marks=pytest.mark.slow),
    ],
)
def test_a_planted_defect_fails_the_checks_that_it_concerns(defect, only, expected, tmp_path, capsys):
    file = tmp_path / "defect.py"
    file.write_text(defect)
    status, found = verify(capsys, "--preload", str(file), "--only", *only)
    assert status == 1
    red = failures(found)
    assert red.keys() == expected.keys()
    for name, message in red.items():
        assert re.search(expected[name], message), message


# ---------------------------------------------------------------------- deadlines


def test_a_check_that_hangs_or_raises_is_named_and_those_after_it_run(tmp_path, capsys):
    file = tmp_path / "defect.py"
    file.write_text(HANGS + RAISES)
    arguments = ["--only", "hook allreduce", "hook noop", "hook topk", "--timeout-s", "15"]
    start = time.monotonic()
    status, found = verify(capsys, "--preload", str(file), *arguments)
    assert time.monotonic() - start < 2 * DEADLINE_S
    assert status == 1
    assert failures(found).keys() == {"hook allreduce", "hook noop"}
    assert "ValueError: the defect of this test" in failures(found)["hook allreduce"]
    assert "not finished after 15 s" in failures(found)["hook noop"]
    assert found["hook topk"][0] == "PASS"


# ---------------------------------------------------------------------- what cannot be verified


def test_ranks_that_others_have_started_are_told_to_start_it_once_a_node(capsys, monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    status, found = verify(capsys)
    assert status == 1
    assert "Run `python -m lightning_ddp doctor --verify` once on each node" in failures(found)["verify"]


def test_a_name_that_no_check_has_is_an_error_also_beside_others(capsys):
    status, found = verify(capsys, "--only", "hook topk", "hook tpok")
    assert (status, failures(found)) == (1, {"verify": "no check begins with hook tpok"})


def test_options_of_verify_are_refused_without_it(capsys):
    assert main(["doctor", "--full", "--only", "abort"]) == 1
    assert capsys.readouterr().err.startswith("error: --full, --only: only for --verify")


def test_more_ranks_than_gpus_are_an_error(capsys):
    status, found = verify(capsys, "--device", "cuda", "--processes", "99")
    assert status == 1
    assert failures(found)["verify"].startswith("99 ranks need as many GPUs, found ")


# ---------------------------------------------------------------------- comparing


def test_a_verdict_counts_what_is_not_finite_as_wrong_and_keeps_the_first_problem():
    verdict = Verdict()
    one = torch.ones(2)
    verdict.check("here", "x", one, one + 1e-3, 1e-2)
    assert (verdict.problem, verdict.num_values) == (None, 2)
    assert verdict.largest == pytest.approx(0.1, rel=1e-3)
    verdict.check("here", "x", torch.tensor([1.0, math.nan]), one, 1.0)
    assert verdict.problem == "here: x is nan where 1 +/- 1 is expected (1 of 2 numbers are wrong)"
    verdict.check("there", "y", one, 2 * one, 0.0)
    assert verdict.problem.startswith("here")


# ---------------------------------------------------------------------- the checklist

NOT_ON_A_CPU = {2, 8, 12, 13, 20, 21, 25, 26, 28}
"""Numbers of the items that two ranks on a CPU cannot answer."""
DRILL = ("abort of", "nothing", "messages", "memory", "first", "two comm", "many", "versions", "NCCL")
ELSEWHERE = ("hooks", "step")
"""Beginnings of items whose trials are tested above."""
NAMES = [name.partition(" ")[2] for name in ITEMS]
OTHERS = [name for name in NAMES if not name.startswith((*DRILL, *ELSEWHERE))]


def checklist(
    folder: Path, *only: str, timeout_s: float = 60.0, preload: str = ""
) -> tuple[int, dict[str, Any]]:
    """The exit status, and what the JSON file has of each item, by its name without the backend."""
    arguments = ["--device", "cpu", "--processes", "2", "--timeout-s", str(timeout_s)]
    arguments += ["--full", str(folder / "found")]
    if preload:
        (folder / "defect.py").write_text(preload)
        arguments += ["--preload", str(folder / "defect.py")]
    if only:
        arguments += ["--only", *only]
    status = main(["doctor", "--verify", *arguments])
    document = json.loads((folder / "found.json").read_text())
    return status, {item["check"].partition(", ")[0]: item for item in document["items"]}


FEW_CYCLES = "import lightning_ddp.tools.doctor.checklist as drill; drill._NUM_CYCLES = 8"
"""For devices that are slow, as the sound machine has all cycles."""


def levels(found: dict[str, Any], level: str) -> set[str]:
    return {name for name, item in found.items() if item["level"] == level}


def test_a_sound_machine_passes_the_drill(tmp_path, capsys):
    status, found = checklist(tmp_path, *DRILL)
    assert status == 0
    assert levels(found, "NOT HERE") == {"2 NCCL version"}
    assert levels(found, "FAIL") == set()
    assert found["6 abort of all groups"]["message"].startswith("2 groups in ")
    assert "50 recoveries of groups" in found["14 memory kept"]["message"]
    assert (tmp_path / "found.png").stat().st_size > 0
    shown = [line for line in capsys.readouterr().out.splitlines() if ", gloo " in line]
    assert [line.split("  ")[1].strip() for line in shown] == [f"{name}, gloo" for name in found], "in order"


@pytest.mark.slow
def test_every_other_item_answers_on_a_cpu(tmp_path, monkeypatch):
    # `test_shrink` has the other moments
    monkeypatch.setattr("lightning_ddp.tools.doctor.checklist._MOMENTS", ("all-reduce",))
    monkeypatch.setitem(_REPLACED, "num_steps", 250)
    status, found = checklist(tmp_path, *OTHERS)
    assert list(found) == [name for name in ITEMS if name.partition(" ")[2] in OTHERS]
    assert {int(name.split()[0]) for name in levels(found, "NOT HERE")} == NOT_ON_A_CPU - {2}
    assert {name: found[name]["message"] for name in levels(found, "FAIL")} == {}
    assert status == 0
    assert all(item["message"] for item in found.values())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("simcuda") is None, reason="needs the simulated CUDA device")
def test_both_implementations_pass_on_simulated_devices(compiled_cuda, tmp_path):
    arguments = ["--device", "cuda", "--processes", "2", "--full", str(tmp_path / "found")]
    arguments += ["--only", *DRILL, "device", "host"]
    (tmp_path / "preload.py").write_text(FEW_CYCLES)
    arguments += ["--preload", str(tmp_path / "preload.py")]
    env = {"SIMULATED_CUDA": str(compiled_cuda)}
    run_script(Path(__file__), ["doctor", "--verify", *arguments], env, timeout_s=300.0).check()
    items = json.loads((tmp_path / "found.json").read_text())["items"]
    assert {item["level"] for item in items} == {"PASS"}
    assert {item["check"].partition(", ")[2] for item in items} == {"nccl2", "nccl-legacy"}


def test_a_name_that_no_item_has_is_an_error(tmp_path, capsys):
    assert (
        main(["doctor", "--verify", "--device", "cpu", "--full", str(tmp_path / "x"), "--only", "abotr"]) == 1
    )
    assert "no item begins with abotr" in capsys.readouterr().out


def test_an_item_that_raises_any_error_fails_alone(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")  # no driver, and no error
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setitem(ITEMS, "4 watchdog", lambda site: 1 / 0)
    status, found = checklist(tmp_path, "versions", "watchdog", "forensics")
    assert status == 1
    assert {name: item["level"] for name, item in found.items()} == {
        "1 versions": "PASS",
        "4 watchdog": "FAIL",
        "5 forensics": "PASS",
    }
    assert found["4 watchdog"]["message"] == "ZeroDivisionError: division by zero"
    assert found["1 versions"]["message"].endswith("driver none")


# ---------------------------------------------------------------------- planted defects in the checklist


@pytest.mark.parametrize(
    ("variable", "value", "item", "says"),
    [
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "3 debug level", "torch loses device_id"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "4 watchdog", "would end a process that loses a peer"),
        ("TORCH_INCLUDE_STACK_TRACE", "1", "5 forensics", "may deadlock"),
    ],
)
def test_a_variable_that_breaks_something_is_named(variable, value, item, says, tmp_path, monkeypatch):
    monkeypatch.setenv(variable, value)
    status, found = checklist(tmp_path, "debug", "watchdog", "forensics")
    assert status == 1
    assert levels(found, "FAIL") == {item}
    assert variable in found[item]["message"]
    assert says in found[item]["message"]


ABORT_HANGS = """
import lightning_ddp.tools.doctor.checklist as drill, threading
drill._LIMIT_S = 5.0
drill.wait_for_aborts = threading.Event().wait
"""

DESTROY_HANGS = """
import lightning_ddp.tools.doctor.checklist as drill, threading
drill._LIMIT_S = 5.0
destroy_groups, calls = drill.destroy_groups, []
def destroy():
    calls.append(1)
    destroy_groups() if len(calls) < 2 else threading.Event().wait()
drill.destroy_groups = destroy
"""

MEMORY_IS_KEPT = """
import lightning_ddp.tools.doctor.checklist as drill
drill._NUM_CYCLES = 30
sound, kept = drill.retire_groups, []
def retire(groups):
    kept.append(bytearray(b"1") * 2**22)
    sound(groups)
drill.retire_groups = retire
"""

WRONG_MESSAGE = """
import torch.distributed as dist
sound = dist.batch_isend_irecv
def send(operations):
    operations[0].tensor.add_(1)
    return sound(operations)
dist.batch_isend_irecv = send
"""

WRONG_SUM = """
from lightning_ddp.comm.group import Group
sound = Group.all_reduce
def all_reduce(self, tensor, *rest, **named):
    return sound(self, tensor.mul_(2), *rest, **named)
Group.all_reduce = all_reduce
"""

NO_REGROUP = """
import lightning_ddp.strategy as strategy
def meet(self, new):
    raise RuntimeError("the defect of this test")
strategy.CustomDDPStrategy._meet_again = meet
"""


STEP_RAISES = """
import lightning_ddp.tools.doctor.trials as trials
def timed(run, device):
    raise RuntimeError("the defect of this test")
trials.timed = timed
"""


@pytest.mark.parametrize(
    ("defect", "limit_s", "shown"),
    [
        pytest.param(
            WRONG_MESSAGE + ABORT_HANGS,
            60.0,  # a step of the drill has a limit of its own
            {"6 abort of all groups": "did not end within 5 s", "11 messages of pairs": "received"},
            id="message, abort",
        ),
        pytest.param(
            WRONG_SUM + DESTROY_HANGS,
            60.0,
            {
                "7 nothing destroyed after it": "did not end within 5 s",
                "15 first group": "the sum of the ranks is",
            },
            id="sum, destroy",
        ),
        pytest.param(MEMORY_IS_KEPT, 60.0, {"14 memory kept": "memory grew by"}, id="memory"),
        pytest.param(
            WRONG_ROUND + STEP_RAISES,
            60.0,
            {"17 hooks and averagers": "averager slowmo: ", "19 step time": "the defect of this test"},
            id="round, step time",
        ),
        pytest.param(WRONG_DIVISOR, 10.0, {"18 parity with torch": "mean is"}, id="divisor"),
        pytest.param(NO_REGROUP, 10.0, {"23 SIGKILL": "0 of 1 recoveries"}, id="regroup"),
    ],
)
@pytest.mark.slow
def test_planted_defects_are_shown_by_the_items_that_are_for_them(
    defect: str, limit_s: float, shown: dict[str, str], tmp_path: Path
) -> None:
    names = [name.partition(" ")[2] for name in shown]
    status, found = checklist(tmp_path, *names, timeout_s=limit_s, preload=defect)
    assert status == 1
    assert levels(found, "FAIL") == found.keys() == shown.keys(), found
    for name, says in shown.items():
        assert says in found[name]["message"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

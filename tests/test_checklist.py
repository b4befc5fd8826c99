"""`doctor --verify --full`: each item answers, and names a planted defect that is for it.

A defect is a file that each rank runs first (`--preload`), or a variable of the environment.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness import run_script
from test_verify import WRONG_DIVISOR

from lightning_ddp.__main__ import main
from lightning_ddp.tools.doctor.checklist import _REPLACED, ITEMS

NOT_ON_A_CPU = {2, 8, 12, 13, 20, 21, 25, 26, 28}
"""Numbers of the items that two ranks on a CPU cannot answer."""
DRILL = ("abort of", "nothing", "messages", "memory", "first", "two comm", "many", "versions", "NCCL")
ELSEWHERE = ("hooks", "step")
"""Beginnings of items whose trials `test_verify` runs."""
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


# ---------------------------------------------------------------------- planted defects


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
drill._LIMIT_S = 1.0
drill.wait_for_aborts = threading.Event().wait
"""

DESTROY_HANGS = """
import lightning_ddp.tools.doctor.checklist as drill, threading
drill._LIMIT_S = 1.0
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


@pytest.mark.parametrize(
    ("defect", "limit_s", "shown"),
    [
        pytest.param(
            WRONG_MESSAGE + ABORT_HANGS,
            60.0,  # a step of the drill has a limit of its own
            {"6 abort of all groups": "did not end within 1 s", "11 messages of pairs": "received"},
            id="message, abort",
        ),
        pytest.param(
            WRONG_SUM + DESTROY_HANGS,
            60.0,
            {
                "7 nothing destroyed after it": "did not end within 1 s",
                "15 first group": "the sum of the ranks is",
            },
            id="sum, destroy",
        ),
        pytest.param(MEMORY_IS_KEPT, 60.0, {"14 memory kept": "memory grew by"}, id="memory"),
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

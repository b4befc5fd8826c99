"""`doctor --verify` passes on a sound engine, and names the check that a planted defect has to fail.

A defect is a file that each rank runs first (`--preload`), which breaks the engine there.
"""

from __future__ import annotations

import math
import re
import time
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from lightning_ddp.__main__ import main
from lightning_ddp.averaging import available_averagers
from lightning_ddp.hooks import available_hooks
from lightning_ddp.hooks.allreduce import AllReduce
from lightning_ddp.hooks.base import Part
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
    arguments = ["--only", "hook allreduce", "hook noop", "hook topk", "--timeout-s", "5"]
    start = time.monotonic()
    status, found = verify(capsys, "--preload", str(file), *arguments)
    assert time.monotonic() - start < 2 * DEADLINE_S
    assert status == 1
    assert failures(found).keys() == {"hook allreduce", "hook noop"}
    assert "ValueError: the defect of this test" in failures(found)["hook allreduce"]
    assert "not finished after 5 s" in failures(found)["hook noop"]
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


def test_a_name_that_no_check_has_is_an_error(capsys):
    status, found = verify(capsys, "--only", "hook tpok")
    assert (status, failures(found)) == (1, {"verify": "no check begins with hook tpok"})


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

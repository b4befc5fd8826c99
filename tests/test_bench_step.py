"""`bench step`: its contenders, memory, torchrun's ranks, a Trainer, and links between namespaces."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest
import torch
from harness import run_script
from harness.namespaces import can_shape_links

from lightning_ddp.cli import main
from lightning_ddp.tools import ToolError
from lightning_ddp.tools.bench import Comparison, Result, step
from lightning_ddp.tools.bench.step import STEP, StepSettings, default_world_size
from lightning_ddp.tools.models import (
    BARE,
    CONTENDERS,
    OURS,
    OURS_GLOO,
    TORCH_DEFAULT,
    TORCH_FLAGS,
    TORCH_VIEW,
    constructor_flags,
)
from lightning_ddp.tools.ranks import RankContext, run_ranks, torchrun_rank


def figures(median: float, ratio: float) -> Comparison:
    return Comparison(median=median, iqr=0.0, ratio=ratio)


def test_the_first_contender_is_the_reference_where_ours_is_left_out() -> None:
    comparisons = {"a": {TORCH_VIEW: figures(2.0, 1.0), TORCH_FLAGS: figures(4.0, 0.5)}}
    assert step.geometric_means(comparisons) == {TORCH_FLAGS: pytest.approx(0.5)}
    result = Result(
        samples={"a": {TORCH_VIEW: [2.0], TORCH_FLAGS: [4.0]}},
        references=TORCH_VIEW,
        settings={"flags": {TORCH_VIEW: {"gradient_as_bucket_view": True}, TORCH_FLAGS: {}}},
        extra={"geometric_mean": {TORCH_FLAGS: 0.5}, "peak_mib": {"a": {TORCH_VIEW: 300.25}}},
    )
    report = STEP.table(result)
    assert "torch_ddp_view/contender  peak MiB" in report
    assert [line.split()[-1] for line in report.splitlines()[2:4]] == ["300.2", "-"]
    assert "geometric mean of torch_ddp_view/torch_ddp_flags: 0.500" in report


def test_flags_that_torch_lacks_are_left_out_and_ours_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"gradient_as_bucket_view": True, "no_such_flag": 1}
    for name in CONTENDERS:
        monkeypatch.setitem(CONTENDERS, name, flags)  # type: ignore[arg-type]
    assert constructor_flags(TORCH_DEFAULT) == {"gradient_as_bucket_view": True}
    assert constructor_flags(OURS) == flags


def test_links_join_two_ranks_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "--links", "100", "--world-size", "3"]) == 1
    assert "--links needs two ranks on the CPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--links", "100", "--trainer", "1"], "without --links and without torchrun"),
        (["--contenders", "ours", "bare"], "bare averages nothing"),
    ],
)
def test_what_cannot_be_measured_together_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", *options]) == 1
    assert message in capsys.readouterr().err


def test_the_bare_module_is_not_one_of_torch_s_contenders() -> None:
    row = {OURS: figures(2.0, 1.0), TORCH_VIEW: figures(4.0, 0.5), TORCH_FLAGS: figures(3.0, 0.6)}
    means = step.geometric_means({"a": row | {BARE: figures(1.0, 2.0)}})
    assert means == pytest.approx({TORCH_VIEW: 0.5, TORCH_FLAGS: 0.6, BARE: 2.0, step.FASTEST_TORCH: 0.6})


class _Hoard(torch.nn.Module):
    """A wrapper with 48 MiB of its own, which it fills when it is used."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.kept: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.ones(12 * 2**20)
        return self.module(inputs)


def _hoarding(contender: str, module: torch.nn.Module, _device: torch.device) -> torch.nn.Module:
    return _Hoard(module) if contender == OURS_GLOO else module


def _time_hoarding_steps(context: RankContext, settings: StepSettings) -> object:
    step.check_agreement = lambda *_: None
    from lightning_ddp.tools import models

    models.wrap = _hoarding
    return step.time_steps(context, settings)


@pytest.mark.slow
def test_the_peak_of_a_contender_is_that_of_its_own_processes() -> None:
    models, names = ("linear500", "convbn40"), (OURS, OURS_GLOO)
    settings = StepSettings(models=models, contenders=names, num_rounds=1, num_steps=1, num_warmup_steps=1)
    found = run_ranks(_time_hoarding_steps, settings, world_size=1, num_replicas=2, timeout_s=240)
    ours, hoarding = (replica["peak_bytes"] for replica in found)
    extra = hoarding["linear500"][OURS_GLOO] - ours["linear500"][OURS]
    assert 40 * 2**20 < extra < 80 * 2**20
    assert ours["linear500"][OURS] > 50 * 2**20  # torch itself


PRINTS_STEPS = """
import json, sys
given = json.loads(sys.argv[1])
assert (given["devices"], given["accelerator"], given["num_steps"]) == (2, "cpu", 10)
last = 0.004 if given["strategy"] == "ddp" else 0.002
print("STEP_SECONDS", [9.0, 9.0, 0.001, *[last] * 6, 9.0])
"""
ARGUMENTS = {"trainer": 2, "device": "cpu", "timeout_s": 60.0}
SETTINGS = {"contenders": (OURS,), "num_rounds": 1}


def test_a_sample_of_a_trainer_is_the_median_of_the_steps_after_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "steps.py"
    script.write_text(PRINTS_STEPS)
    monkeypatch.setattr(step, "SCRIPT", script)
    settings = StepSettings(models=("a", "b"), num_warmup_steps=2, num_steps=1, **SETTINGS)
    samples = step._measure_trainer(argparse.Namespace(**ARGUMENTS), settings, 2)
    assert samples == {f"{name}, Trainer": {"custom_ddp": [2.0, 2.0], "ddp": [4.0, 4.0]} for name in "ab"}
    result = Result(
        samples={"a": {OURS: [1.0]}} | samples,
        references={"a": OURS} | dict.fromkeys(samples, "custom_ddp"),
        settings={"flags": {OURS: {}}},
        extra={"geometric_mean": {"Trainer ddp": 0.5}, "peak_mib": {}},
    )
    assert STEP.table(result).endswith("geometric mean of custom_ddp/ddp: 0.500")


@pytest.mark.slow
def test_a_trainer_trains_as_many_steps_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "STRATEGIES", ("custom_ddp",))
    settings = StepSettings(models=("convbn40",), num_warmup_steps=1, num_steps=1, **SETTINGS)
    arguments = argparse.Namespace(**ARGUMENTS | {"trainer": 1, "timeout_s": 200.0})
    (milliseconds,) = step._measure_trainer(arguments, settings, 1)["convbn40, Trainer"]["custom_ddp"]
    assert 0 < milliseconds < 100_000


# torchrun


@pytest.mark.slow
def test_ranks_that_torchrun_has_started_are_joined_and_the_first_one_speaks(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    launcher = "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0"
    options = ["--rounds", "1", "--steps", "1", "--models", "convbn40", "--contenders", OURS, OURS_GLOO]
    result = run_script(
        "lightning_ddp",
        ["bench", "step", *options, "--json", str(path)],
        timeout_s=600,
        launcher=launcher.split(),
        is_module=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("median ms") == 1
    document = json.loads(path.read_text())
    assert document["settings"]["world_size"] == 2
    samples = document["samples"]["convbn40"]
    assert {name: len(rounds) for name, rounds in samples.items()} == {OURS: 1, OURS_GLOO: 1}


def test_another_number_of_ranks_than_have_been_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ToolError, match="--world-size 3, but 2 ranks have been started"),
        torchrun_rank(argparse.Namespace(world_size=3, timeout_s=5.0, device="cpu")),
    ):
        raise AssertionError("it was opened")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_an_answer_there_are_two_ranks_or_as_many_as_gpus() -> None:
    for device, world_size in (("cpu", 2), ("cuda", 1)):
        assert default_world_size(argparse.Namespace(world_size=None, device=device)) == world_size


# Links


@pytest.mark.slow
@pytest.mark.xdist_group("namespaces")
@pytest.mark.skipif(not can_shape_links(), reason="needs root and iproute2 to make network namespaces")
def test_steps_on_a_link_last_as_long_as_their_bytes_need(tmp_path, capsys) -> None:
    path, mbit = tmp_path / "step.json", 40.0
    command = [
        "bench",
        "step",
        "--links",
        str(mbit),
        "--models",
        "convbn40",
        "--contenders",
        OURS,
        TORCH_VIEW,
    ]
    options = ["--rounds", "1", "--steps", "1", "--warmup", "1", "--timeout-s", "600", "--json", str(path)]
    assert main([*command, *options]) == 0
    assert f"geometric mean of ours/{TORCH_VIEW}" in capsys.readouterr().out
    document = json.loads(path.read_text())
    samples = document["samples"]["convbn40, 40 Mbit/s"]
    assert set(samples) == {OURS, TORCH_VIEW}
    num_bytes = 4 * 40 * (32 * 32 * 9 + 32 + 64)
    for milliseconds in samples.values():
        assert len(milliseconds) == 1
        assert all(
            math.isfinite(value) and value > 900 * num_bytes * 8 / (mbit * 1e6) for value in milliseconds
        )

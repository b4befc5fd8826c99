"""`bench step`: its contenders, and its links where namespaces are permitted."""

from __future__ import annotations

import json
import math

import pytest

from lightning_ddp.cli import main
from lightning_ddp.tools.bench import step, trainer_steps
from lightning_ddp.tools.bench.arguments import BARE, CONTENDERS, OURS, TORCH_DEFAULT, TORCH_FLAGS, TORCH_VIEW
from lightning_ddp.tools.bench.contenders import constructor_flags
from lightning_ddp.tools.bench.links import can_shape_links
from lightning_ddp.tools.bench.report import Comparison, compare


def figures(median: float, ratio: float) -> Comparison:
    return Comparison(median=median, iqr=0.0, ratio=ratio)


def test_the_first_contender_is_the_reference_where_ours_is_left_out() -> None:
    comparisons = {"a": {TORCH_VIEW: figures(2.0, 1.0), TORCH_FLAGS: figures(4.0, 0.5)}}
    assert step.geometric_means(comparisons) == {TORCH_FLAGS: pytest.approx(0.5)}
    report = step.format_report(comparisons, {TORCH_VIEW: {"gradient_as_bucket_view": True}, TORCH_FLAGS: {}})
    assert "torch_ddp_view/contender" in report
    assert "geometric mean of torch_ddp_view/torch_ddp_flags: 0.500" in report


def test_flags_that_torch_lacks_are_left_out_and_ours_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"gradient_as_bucket_view": True, "no_such_flag": 1}
    for name, contender in CONTENDERS.items():
        monkeypatch.setitem(CONTENDERS, name, type(contender)(is_ours=contender.is_ours, flags=flags))  # type: ignore[arg-type]
    assert constructor_flags(TORCH_DEFAULT) == {"gradient_as_bucket_view": True}
    assert constructor_flags(OURS) == flags


def test_links_join_two_ranks_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "--links", "100", "--world-size", "3"]) == 1
    assert "--links joins two ranks on the CPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--links", "100", "--trainer", "1"], "without --links, not by torchrun"),
        (["--contenders", "ours", "bare"], "bare averages nothing: measure it with --world-size 1"),
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


PRINTS_STEPS = """
import sys
strategy, devices, accelerator, model, num_steps, package_root = sys.argv[1:]
assert (devices, accelerator, num_steps) == ("2", "cpu", "5")
print("STEP_SECONDS", [9.0, 9.0, 0.001, 0.004 if strategy == "ddp" else 0.002, 9.0])
"""


def test_a_sample_of_a_trainer_is_the_median_of_the_steps_after_the_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer_steps, "SCRIPT", PRINTS_STEPS)
    samples = trainer_steps.time_trainer_steps(
        ("a", "b"), num_rounds=2, num_warmup_steps=2, num_steps=3, world_size=2, device="cpu", timeout_s=60
    )
    assert samples == {f"{name}, Trainer": {"custom_ddp": [2.0, 2.0], "ddp": [4.0, 4.0]} for name in "ab"}
    comparisons = {subject: compare(rounds, reference="custom_ddp") for subject, rounds in samples.items()}
    assert step.format_trainer(comparisons).endswith("geometric mean of custom_ddp/ddp: 0.500")


@pytest.mark.slow
def test_a_trainer_trains_as_many_steps_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_steps, "STRATEGIES", ("custom_ddp",))
    samples = trainer_steps.time_trainer_steps(
        ("convbn40",),
        num_rounds=1,
        num_warmup_steps=1,
        num_steps=2,
        world_size=1,
        device="cpu",
        timeout_s=200,
    )
    (milliseconds,) = samples["convbn40, Trainer"]["custom_ddp"]
    assert 0 < milliseconds < 100_000


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

"""`bench step` and `bench hooks`: statistics, contenders, whole runs, and links between namespaces."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from harness.namespaces import can_shape_links

from lightning_ddp.__main__ import main
from lightning_ddp.hooks import parse_hook
from lightning_ddp.tools import ToolError, models
from lightning_ddp.tools.bench import Comparison, Result, step
from lightning_ddp.tools.bench.step import (
    HOOK_SPECS,
    NONE,
    check_agreement,
    format_links,
    merge_ranks,
    time_steps,
)
from lightning_ddp.tools.command_line import paired_ratio
from lightning_ddp.tools.models import (
    CONTENDERS,
    OURS,
    OURS_GLOO,
    TORCH_DEFAULT,
    TORCH_FLAGS,
    TORCH_VIEW,
    constructor_flags,
)
from lightning_ddp.tools.ranks import RankContext, run_ranks, shuffled

# ---------------------------------------------------------------------- statistics


def test_step_time_of_a_round_is_the_median_step_of_the_slowest_rank() -> None:
    first = {"m": {OURS: [[0.001, 0.005, 0.002], [0.004, 0.004, 0.004]]}}
    second = {"m": {OURS: [[0.003, 0.001, 0.001], [0.001, 0.009, 0.004]]}}
    other = {"m": {"b": [[0.007], [0.008]]}}  # a replica that has trained another contender
    found = step.reduce_ranks([first, second, other, other])
    # slowest rank per step: (3, 5, 2) and (4, 9, 4) milliseconds
    assert found == {"m": {OURS: pytest.approx([3.0, 4.0]), "b": pytest.approx([7.0, 8.0])}}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param(
            [
                {OURS: (1, 1), TORCH_DEFAULT: (2, 0.5), TORCH_FLAGS: (4, 0.25)},
                {OURS: (1, 1), TORCH_DEFAULT: (8, 0.125), TORCH_FLAGS: (0.5, 2.0)},
            ],
            {TORCH_DEFAULT: 0.25, TORCH_FLAGS: math.sqrt(0.5), step.FASTEST_TORCH: 1.0},
            id="the fastest flags of each model",
        ),
        pytest.param(
            [{TORCH_VIEW: (2, 1), TORCH_FLAGS: (4, 0.5)}],
            {TORCH_FLAGS: 0.5},
            id="the first is the reference without ours",
        ),
        pytest.param(
            [{OURS: (2, 1), TORCH_VIEW: (4, 0.5), TORCH_FLAGS: (3, 0.6), OURS_GLOO: (1, 2.0)}],
            {TORCH_VIEW: 0.5, TORCH_FLAGS: 0.6, OURS_GLOO: 2.0, step.FASTEST_TORCH: 0.6},
            id="ours without shared memory is not torch's",
        ),
    ],
)
def test_geometric_means(rows, expected) -> None:
    comparisons = {
        str(number): {
            n: Comparison(median=median, iqr=0.0, ratio=ratio) for n, (median, ratio) in row.items()
        }
        for number, row in enumerate(rows)
    }
    assert step.geometric_means(comparisons) == pytest.approx(expected)


def test_order_of_contenders_changes_between_rounds_and_not_between_ranks() -> None:
    orders = [tuple(shuffled(step.DEFAULT_CONTENDERS, seed=seed)) for seed in range(30)]
    assert orders == [tuple(shuffled(step.DEFAULT_CONTENDERS, seed=seed)) for seed in range(30)]
    assert len(set(orders)) == 6
    assert all(sorted(order) == sorted(step.DEFAULT_CONTENDERS) for order in orders)


# ---------------------------------------------------------------------- contenders


def test_flags_that_torch_lacks_are_left_out_and_ours_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"gradient_as_bucket_view": True, "no_such_flag": 1}
    for name in CONTENDERS:
        monkeypatch.setitem(CONTENDERS, name, flags)  # type: ignore[arg-type]
    assert constructor_flags(TORCH_DEFAULT) == {"gradient_as_bucket_view": True}
    assert constructor_flags(OURS) == flags


@pytest.mark.parametrize("wrong", [1.01, math.nan])
def test_contender_that_computes_something_else_is_not_timed(wrong: float) -> None:
    ones = torch.ones(4)
    check_agreement(OURS, ones + 1e-6, TORCH_DEFAULT, ones)
    with pytest.raises(RuntimeError, match="the gradients of ours differ from those of torch_ddp by"):
        check_agreement(OURS, wrong * ones, TORCH_DEFAULT, ones)


def time_steps_without_communication(context: RankContext, names: tuple[str, ...]) -> object:
    if names[context.replica] == OURS:
        models.wrap = lambda _contender, module, _device: module
    return time_steps(context, ("linear500",), names, num_rounds=1, num_steps=1, num_warmup_steps=1)


@pytest.mark.slow
def test_a_wrapper_that_communicates_nothing_is_not_timed() -> None:
    names = (OURS, TORCH_DEFAULT)
    with pytest.raises(ToolError, match="the gradients of ours differ from those of torch_ddp by a"):
        run_ranks(time_steps_without_communication, names, world_size=2, num_replicas=2, timeout_s=120)


# ---------------------------------------------------------------------- whole runs


@pytest.mark.slow
def test_every_model_and_contender_is_printed_and_written(tmp_path: Path, capsys) -> None:
    names, path = ("linear16", "linear500"), tmp_path / "step.json"
    options = ["--rounds", "2", "--steps", "1", "--json", str(path), "--models", *names]
    assert main(["bench", "step", *options]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    pairs = [[model, contender] for model in names for contender in step.DEFAULT_CONTENDERS]
    assert [row[:2] for row in rows[2 : 2 + len(pairs)]] == pairs
    for row in rows[2 : 2 + len(pairs)]:
        assert all(math.isfinite(float(value)) for value in row[2:])
        assert min(float(row[2]), float(row[4])) > 0
    assert printed.count("geometric mean of ours/") == 3
    document = json.loads(path.read_text())
    for model, contender in pairs:
        samples = document["samples"][model][contender]
        assert len(samples) == 2
        assert all(math.isfinite(value) and value > 0 for value in samples)
        ratio = document["summary"]["comparisons"][model][contender]["ratio"]
        assert ratio == pytest.approx(paired_ratio(document["samples"][model][OURS], samples))
    assert set(document["summary"]["geometric_mean"]) == {TORCH_DEFAULT, TORCH_FLAGS, step.FASTEST_TORCH}


# ---------------------------------------------------------------------- hooks on links


def test_every_contender_is_one_that_the_package_has() -> None:
    for hook in HOOK_SPECS.values():
        assert hook is None or parse_hook(hook)


def test_the_slower_rank_counts_and_the_table_holds_medians() -> None:
    ranks = [{"a": [{"seconds": 1.0, "bytes": 5}]}, {"a": [{"seconds": 2.0, "bytes": 3}]}]
    assert merge_ranks(ranks) == {"a": [{"seconds": 2.0, "bytes": 5}]}
    row = {"kernel_bytes": 2e6, "counted_bytes": 1e6, "codec_seconds": 0.01}
    result = Result(
        samples={"link": {NONE: [4000.0], "int8": [1000.0]}},
        references=NONE,
        extra={"links": {"link": {NONE: [row], "int8": [row | {"counted_bytes": 3e6}, row, row]}}},
    )
    assert [line.split() for line in format_links(result).splitlines()[3:]] == [
        ["none", "4000.000", "1.000", "2.000", "1.000", "10.000"],
        ["int8", "1000.000", "4.000", "2.000", "1.000", "10.000"],
    ]


@pytest.mark.slow
@pytest.mark.xdist_group("namespaces")
@pytest.mark.skipif(not can_shape_links(), reason="needs root and iproute2 to make network namespaces")
def test_kernel_and_hook_count_the_same_on_a_link_of_the_speed(tmp_path, capsys, monkeypatch) -> None:
    contenders = {NONE: None, "allreduce": "allreduce", "bf16": "bf16"}
    monkeypatch.setattr("lightning_ddp.tools.bench.step.HOOK_SPECS", contenders)
    monkeypatch.setattr("lightning_ddp.tools.bench.step._MODEL", "convbn40")
    path = tmp_path / "a.json"
    assert main(["bench", "hooks", "--links", "40", "--rounds", "3", "--json", str(path)]) == 0
    assert "two ranks, convbn40, 40 Mbit/s" in capsys.readouterr().out
    rows = json.loads(path.read_text())["summary"]["links"]["convbn40, 40 Mbit/s"]
    num_bytes = 4 * 40 * (32 * 32 * 9 + 32 + 64)
    assert min(row["kernel_bytes"] for row in rows[NONE]) >= num_bytes
    for name, counted in (("allreduce", num_bytes), ("bf16", num_bytes // 2)):
        for row in rows[name]:
            assert row["counted_bytes"] == counted < row["kernel_bytes"]
            assert row["seconds"] > 0.9 * counted * 8 / 40e6
            assert math.isfinite(row["codec_seconds"])
    # headers, and buffers that are broadcast beside the hook; in a slow round also what TCP sent again
    ratios = [row["kernel_bytes"] / row["counted_bytes"] for row in rows["allreduce"]]
    assert statistics.median(ratios) < 1.15, ratios

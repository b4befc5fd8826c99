"""`bench hooks`: its tables, its tasks, and its links where namespaces are permitted."""

from __future__ import annotations

import itertools
import json
import math
import statistics

import pytest
import torch
from harness.namespaces import can_shape_links

from lightning_ddp.averaging import parse_averager
from lightning_ddp.cli import main
from lightning_ddp.hooks import parse_hook
from lightning_ddp.tools.bench.hooks import (
    CONVERGENCE_RUNS,
    LINK_HOOKS,
    LinkSettings,
    communication_of,
    draw_learned,
    format_learned,
    format_link,
    merge_ranks,
    time_on_link,
)
from lightning_ddp.tools.models import make_task
from lightning_ddp.tools.ranks import run_ranks


def test_every_contender_is_one_that_the_package_has():
    for task, run in itertools.product(("digits", "text"), CONVERGENCE_RUNS.values()):
        arguments = communication_of(run, task, 100)
        assert len(arguments) == 1
        if "hook" in arguments:
            parse_hook(arguments["hook"])
        else:
            parse_averager(arguments["averaging"])
    for hook in LINK_HOOKS.values():
        assert hook is None or parse_hook(hook)


def test_the_slower_rank_counts():
    ranks = [{"a": [{"seconds": 1.0, "bytes": 5}]}, {"a": [{"seconds": 2.0, "bytes": 3}]}]
    assert merge_ranks(ranks) == {"a": [{"seconds": 2.0, "bytes": 5}]}


@pytest.mark.slow
def test_the_tables_hold_medians_and_spreads(tmp_path):
    row = {"kernel_bytes": 2e6, "counted_bytes": 1e6, "codec_seconds": 0.01}
    text = format_link({"ours": [row | {"seconds": 4.0}], "int8": [row | {"seconds": 1.0}]})
    assert [line.split()[:3] for line in text.splitlines()[2:]] == [
        ["ours", "4000.000", "1.000"],
        ["int8", "1000.000", "4.000"],
    ]
    entries = [{"score": score, "part": 0.5, "bytes": 2000.0} for score in (90.0, 92.0)]
    scores = {"allreduce": entries, "bf16": [e | {"score": e["score"] + 1} for e in entries]}
    last = format_learned(scores, is_perplexity=False).splitlines()[-1].split()
    assert last == ["bf16", "92.000", "1.414", "1.000", "0.500", "2.000"]
    last = format_learned(scores, is_perplexity=True).splitlines()[-1].split()
    assert last == ["bf16", "92.000", "1.414", "1.099", "0.500", "2.000"]
    draw_learned({"digits": scores}, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chance"), [("digits", 10.0), ("text", 60.0)])
def test_a_task_begins_at_chance_and_ranks_have_other_batches(name, chance):
    tasks = [make_task(name, rank=rank, world_size=2, seed=1) for rank in range(2)]
    weights = [torch.cat([p.view(-1) for p in task.module.parameters()]) for task in tasks]
    assert weights[0].equal(weights[1])
    batches = [task.next_batch() for task in tasks]
    assert not batches[0][0].equal(batches[1][0])
    assert tasks[0].loss(tasks[0].module, batches[0]).isfinite()
    score = tasks[0].score(tasks[0].module)
    assert (0 <= score < 30) if name == "digits" else (chance < score < 500)


@pytest.mark.slow
def test_learning_is_compared_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lightning_ddp.tools.bench.hooks._TASKS", {"digits": 60})
    path = tmp_path / "a.json"
    command = ["bench", "hooks", "--links", "--tasks", "digits", "--hooks", "allreduce", "bf16", "diloco_h20"]
    assert main([*command, "--seeds", "1", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    learned = document["summary"]["learned"]["digits"]
    assert learned["allreduce"][0]["part"] == pytest.approx(1.0)
    assert learned["bf16"][0]["part"] == pytest.approx(0.5, abs=0.01)
    # 15 of 60 steps before the local phase, two rounds in 45 steps, and one agreement at the end
    assert learned["diloco_h20"][0]["part"] == pytest.approx(18 / 60, abs=0.01)
    assert all(rows[0]["score"] > 50 for rows in learned.values())
    assert "digits: test accuracy" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.xdist_group("namespaces")
@pytest.mark.skipif(not can_shape_links(), reason="needs root and iproute2 to make network namespaces")
def test_the_kernel_counts_what_hooks_count_and_a_link_is_as_slow_as_asked():
    settings = LinkSettings(model="convbn40", hooks={"ours": None, "allreduce": "allreduce"}, num_rounds=3)
    for rank in run_ranks(time_on_link, settings, world_size=2, timeout_s=60.0, mbit=20.0):
        for row in rank["allreduce"]:
            assert row["counted_bytes"] == 4 * 40 * (32 * 32 * 9 + 32 + 64)
            assert row["counted_bytes"] < row["kernel_bytes"]
            assert row["seconds"] > 0.9 * row["counted_bytes"] * 8 / 20e6
            assert math.isfinite(row["codec_seconds"])
        # headers, and buffers that are broadcast beside the hook; in a slow round also what TCP sent again
        ratios = [row["kernel_bytes"] / row["counted_bytes"] for row in rank["allreduce"]]
        assert statistics.median(ratios) < 1.15, ratios


def test_hooks_without_links_and_tasks_have_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hooks", "--links", "--tasks"]) == 1
    assert "give --links or --tasks" in capsys.readouterr().err

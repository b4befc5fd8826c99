"""`bench hooks`: its tables, and its links where namespaces are permitted."""

from __future__ import annotations

import json
import math
import statistics

import pytest
from harness.namespaces import can_shape_links

from lightning_ddp.cli import main
from lightning_ddp.hooks import parse_hook
from lightning_ddp.tools.bench import Result
from lightning_ddp.tools.bench.hooks import (
    CONTENDERS,
    NONE,
    HookSettings,
    format_links,
    merge_ranks,
    time_hooks,
)
from lightning_ddp.tools.ranks import run_ranks


def test_every_contender_is_one_that_the_package_has() -> None:
    for hook in CONTENDERS.values():
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


needs_namespaces = pytest.mark.skipif(
    not can_shape_links(), reason="needs root and iproute2 to make network namespaces"
)


@pytest.mark.slow
@pytest.mark.xdist_group("namespaces")
@needs_namespaces
def test_hooks_are_compared_on_a_link_and_written(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("lightning_ddp.tools.bench.hooks.CONTENDERS", {NONE: None, "bf16": "bf16"})
    path = tmp_path / "a.json"
    assert main(["bench", "hooks", "--links", "1000", "--rounds", "1", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["summary"]["links"]["linear16, 1000 Mbit/s"]
    numel = 16 * (1024 * 1024 + 1024)
    assert rows["bf16"][0]["counted_bytes"] == 2 * numel
    assert rows[NONE][0]["kernel_bytes"] >= 4 * numel
    assert "two ranks, linear16, 1000 Mbit/s" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.xdist_group("namespaces")
@needs_namespaces
def test_the_kernel_counts_what_hooks_count_and_a_link_is_as_slow_as_asked() -> None:
    settings = HookSettings(model="convbn40", hooks={"allreduce": "allreduce"}, num_rounds=3)
    for rank in run_ranks(time_hooks, settings, world_size=2, timeout_s=60.0, mbit=20.0):
        for row in rank["allreduce"]:
            assert row["counted_bytes"] == 4 * 40 * (32 * 32 * 9 + 32 + 64)
            assert row["counted_bytes"] < row["kernel_bytes"]
            assert row["seconds"] > 0.9 * row["counted_bytes"] * 8 / 20e6
            assert math.isfinite(row["codec_seconds"])
        # headers, and buffers that are broadcast beside the hook; in a slow round also what TCP sent again
        ratios = [row["kernel_bytes"] / row["counted_bytes"] for row in rank["allreduce"]]
        assert statistics.median(ratios) < 1.15, ratios

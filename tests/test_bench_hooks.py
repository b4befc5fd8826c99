"""`bench hooks`: its tables, and its links where namespaces are permitted."""

from __future__ import annotations

import json
import math
import statistics

import pytest
from harness.namespaces import can_shape_links

from lightning_ddp.__main__ import main
from lightning_ddp.hooks import parse_hook
from lightning_ddp.tools.bench import Result
from lightning_ddp.tools.bench.hooks import CONTENDERS, NONE, format_links, merge_ranks


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


@pytest.mark.slow
@pytest.mark.xdist_group("namespaces")
@pytest.mark.skipif(not can_shape_links(), reason="needs root and iproute2 to make network namespaces")
def test_kernel_and_hook_count_the_same_on_a_link_of_the_speed(tmp_path, capsys, monkeypatch) -> None:
    contenders = {NONE: None, "allreduce": "allreduce", "bf16": "bf16"}
    monkeypatch.setattr("lightning_ddp.tools.bench.hooks.CONTENDERS", contenders)
    monkeypatch.setattr("lightning_ddp.tools.bench.hooks._MODEL", "convbn40")
    path = tmp_path / "a.json"
    assert main(["bench", "hooks", "--links", "20", "--rounds", "3", "--json", str(path)]) == 0
    assert "two ranks, convbn40, 20 Mbit/s" in capsys.readouterr().out
    rows = json.loads(path.read_text())["summary"]["links"]["convbn40, 20 Mbit/s"]
    num_bytes = 4 * 40 * (32 * 32 * 9 + 32 + 64)
    assert min(row["kernel_bytes"] for row in rows[NONE]) >= num_bytes
    for name, counted in (("allreduce", num_bytes), ("bf16", num_bytes // 2)):
        for row in rows[name]:
            assert row["counted_bytes"] == counted < row["kernel_bytes"]
            assert row["seconds"] > 0.9 * counted * 8 / 20e6
            assert math.isfinite(row["codec_seconds"])
    # headers, and buffers that are broadcast beside the hook; in a slow round also what TCP sent again
    ratios = [row["kernel_bytes"] / row["counted_bytes"] for row in rows["allreduce"]]
    assert statistics.median(ratios) < 1.15, ratios

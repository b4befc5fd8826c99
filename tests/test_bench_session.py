"""Benchmarks under torchrun: those that join its ranks, and those that start all of their own."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from harness import run_script

from lightning_ddp.cli import main
from lightning_ddp.tools.bench import BenchmarkError
from lightning_ddp.tools.bench.session import open_session


@pytest.mark.slow
def test_ranks_that_torchrun_has_started_are_joined_and_the_first_one_speaks(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    launcher = "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0"
    result = run_script(
        "lightning_ddp",
        ["bench", "allreduce", "--rounds", "1", "--sizes-kib", "4", "--json", str(path)],
        timeout_s=600,
        launcher=launcher.split(),
        is_module=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("median ms") == 1
    document = json.loads(path.read_text())
    assert document["settings"]["world_size"] == 2
    assert {name: len(rounds) for name, rounds in document["samples"]["4"].items()} == {
        "shared_memory": 1,
        "gloo": 1,
    }


def test_another_number_of_ranks_than_have_been_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(BenchmarkError, match="--world-size 3, but 2 ranks have been started"),
        open_session(argparse.Namespace(world_size=3, timeout_s=5.0)),
    ):
        raise AssertionError("it was opened")


@pytest.mark.parametrize("name", ["launch", "failures", "hooks", "channel"])
def test_a_benchmark_that_starts_its_own_processes_is_refused_under_torchrun(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", name]) == 1
    assert f"bench {name} starts its own processes" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_an_answer_there_are_two_ranks_or_as_many_as_gpus() -> None:
    for device, world_size in (("cpu", 2), ("cuda", 1)):
        with open_session(argparse.Namespace(world_size=None, timeout_s=5.0, device=device)) as session:
            assert session.world_size == world_size
            assert session.is_first

"""A GAN trains unchanged, without a search for unused parameters, to the weights of torch's DDP with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_script

pytestmark = pytest.mark.xdist_group("gan")  # they share what the fixtures make
SCRIPT = Path(__file__).with_name("harness") / "gan_script.py"


def train(strategy: str, folder: Path) -> list[dict[str, Any]]:
    """The results of both ranks."""
    out = folder / "results"
    run_script(SCRIPT, [strategy, str(out)], cwd=folder).check()
    return [torch.load(out.with_suffix(f".{rank}.pt")) for rank in range(2)]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> list[dict[str, Any]]:
    return train("ddp_find_unused_parameters_true", tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> list[dict[str, Any]]:
    return train("custom_ddp", tmp_path_factory.mktemp("ours"))


def test_the_reference_trains_both_networks(theirs):
    still = [n for n, t in theirs[0]["before"].items() if torch.equal(theirs[0]["state"][n], t)]
    assert still == []
    assert theirs[0]["steps"] == 3 * 4 * 2


def test_weights_and_buffers_equal_those_of_torchs_ddp(ours, theirs):
    for our, their in zip(ours, theirs, strict=True):
        assert list(our["state"]) == list(their["state"])
        assert [n for n, t in their["state"].items() if not torch.equal(our["state"][n], t)] == []
        assert our["steps"] == their["steps"]
        assert our["logged"] == their["logged"]


def test_optimizers_equal_those_of_torchs_ddp_on_all_ranks(ours, theirs):
    for our, their in zip(ours, theirs, strict=True):
        for mine, other in zip(our["optimizers"], their["optimizers"], strict=True):
            assert mine.keys() == other.keys()
            for index, state in other.items():
                assert all(torch.equal(mine[index][name], value) for name, value in state.items())


def test_all_ranks_hold_the_same_weights(ours):
    first, second = (result["state"] for result in ours)
    buffers = [name for name in first if "running" in name]  # each rank's own since the last broadcast
    assert [n for n in first if n not in buffers and not torch.equal(first[n], second[n])] == []

"""On simulated CUDA devices a rank is killed, and training goes on: real processes, SIGKILL, and the ledger.

The optimizer of a rank that is left would go on with what an aborted collective has left of the gradients.
"""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.ledger import Ledger, fault, hash_of, replace, train
from test_shrink import CELLS, HOOKS, MOMENTS, STEP

from lightning_ddp.elastic import regroup
from lightning_ddp.errors import LightningDDPError


def variables(build: Path) -> dict[str, str]:
    return {"SIMULATED_CUDA": str(build), "SIMULATED_CUDA_DEVICES": "4"}


def check(ledger: Ledger, survivors: list[int], **checks: Any) -> None:
    """The invariants; and nothing on the devices conflicts, or is given back too early."""
    ledger.check(survivors, **checks)
    assert sorted(entry["place"] for entry in ledger.of("finds")) == survivors
    assert [entry for entry in ledger.of("finds") if entry["reports"]] == []


def kill(build: Path, folder: Path, moment: str, place: int, **order: Any) -> None:
    order = {"checkpoints": {"every_n_train_steps": 2}, "validates": moment in STEP, **order}
    order["trainer"] = {"num_sanity_val_steps": 2 * (moment == "sanity check")}
    faults = [fault(place, moment, STEP.get(moment, 3))]
    ledger = train(folder, env=variables(build), faults=faults, **order)
    check(ledger, [other for other in range(order.get("devices", 4)) if other != place])
    assert {tuple(entry["lost"]) for entry in ledger.changes} == {(place,)}


def test_an_abort_that_does_not_end_ends_the_run(monkeypatch) -> None:
    """As that of a communicator whose kernel goes on for ever."""
    is_over = threading.Event()
    monkeypatch.setattr(regroup, "wait_for_aborts", is_over.wait)
    monkeypatch.setattr(regroup, "_ABORTED_WITHIN_S", 0.1)
    ours = SimpleNamespace(forget_device=lambda: None, check_end=lambda: None)
    with pytest.raises(LightningDDPError, match=r"have not ended 0\.1 s after the abort"):
        regroup.end_collectives(ours, torch.device("cuda", 0))
    is_over.set()


@pytest.mark.xdist_group("simulated ranks")
def test_an_update_waits_for_gradients_that_a_lost_rank_has_a_part_in(simulated_cuda, tmp_path) -> None:
    kill(simulated_cuda, tmp_path, "last bucket", 2, devices=3)


@pytest.mark.slow
def test_what_hooks_after_a_committed_step_ask_of_a_lost_rank_is_their_own(simulated_cuda, tmp_path) -> None:
    """It has died before its update, and all others wait for it when theirs is done."""
    kill(simulated_cuda, tmp_path, "optimizer", 2, devices=3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("moment", "place"), list(itertools.product(MOMENTS, (1, 2, 3))))
def test_the_others_go_on_at_the_step_that_was_interrupted(moment, place, simulated_cuda, tmp_path) -> None:
    kill(simulated_cuda, tmp_path, moment, place)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_remembers_of_a_lost_step_nothing(name, simulated_cuda, tmp_path) -> None:
    moment = ("last bucket", "between buckets", "before the first bucket")[list(HOOKS).index(name) % 3]
    strategy = {"ddp_comm_hook": HOOKS[name]}
    kill(simulated_cuda, tmp_path, moment, 2, devices=3, strategy=strategy, optimizer="SGD")


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", CELLS)
def test_what_lightning_has_beside_a_step_goes_on_as_well(cell, simulated_cuda, tmp_path) -> None:
    order, checks = CELLS[cell]
    moment = "between buckets" if list(CELLS).index(cell) % 2 == 0 else "optimizer"
    faults = [fault(1, moment, 2)]
    ledger = train(tmp_path, env=variables(simulated_cuda), devices=3, faults=faults, **order)
    check(ledger, [0, 2], **checks)


@pytest.mark.exhaustive
def test_a_rank_that_is_a_step_behind_copies_the_state(simulated_cuda, tmp_path) -> None:
    order = {"late": [1, 3], "late_s": 3.0, "devices": 4, "faults": [fault(3, "optimizer", 3, after=0)]}
    ledger = train(tmp_path, env=variables(simulated_cuda), **order)
    check(ledger, [0, 1, 2])
    ledger.check_behind()


@pytest.mark.exhaustive
def test_two_that_are_killed_close_to_each_other_are_left_behind(simulated_cuda, tmp_path) -> None:
    """The second one while the others meet again."""
    faults = [fault(3, "forward", 1), fault(2, "regroup", 1)]
    ledger = train(tmp_path, env=variables(simulated_cuda), faults=faults)
    check(ledger, [0, 1])
    assert {tuple(entry["sizes"]) for entry in ledger.changes} == {(4, 2)}


@pytest.mark.exhaustive
def test_the_last_step_is_saved_where_the_others_do_not_go_on(simulated_cuda, tmp_path) -> None:
    strategy = {"on_failure": {"name": "shrink", "min_world_size": 3}, "emergency_checkpoint": str(tmp_path)}
    order = {"devices": 3, "strategy": strategy, "faults": [fault(1, "last bucket", 3)]}
    ledger = train(tmp_path, "fewer than min_world_size", variables(simulated_cuda), **order)
    checkpoint = torch.load(tmp_path / "emergency-step=3.ckpt", weights_only=False, map_location="cpu")
    commits = [entry for entry in ledger.of("commits") if entry["place"] == 0]
    names = [name for name in checkpoint["state_dict"] if "running" not in name and "num_batches" not in name]
    assert hash_of(checkpoint["state_dict"][name] for name in names) == commits[-1]["parameters"]


@pytest.mark.exhaustive
def test_a_lost_rank_is_replaced_while_the_others_train(simulated_cuda, tmp_path) -> None:
    kill = fault(1, "between buckets", 3)
    ledger = replace(tmp_path, kill, env=variables(simulated_cuda))
    ledger.check_members(3)
    assert {str(entry["reports"]) for entry in ledger.of("finds")} == {"[]"}

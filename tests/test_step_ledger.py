"""The cursor of a step, without a Trainer: what is undone, copied or finished where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.demos.boring_classes import BoringModel

from lightning_ddp.elastic import step_ledger
from lightning_ddp.elastic.step_ledger import Cursor, StepLedger
from lightning_ddp.supervise.orders import NewGeneration


class Mark:
    """Counts how often it is gone back to."""

    def __init__(self, *args: Any, phase: int = 0, has_weights: bool = False, **more: Any) -> None:
        self.phase, self.has_weights = phase, has_weights
        self.num_batches = self.num_restored = 0
        self.random = None

    def restore(self) -> None:
        self.num_restored += 1

    restore_weights = restore


@pytest.fixture
def communication() -> Any:
    return SimpleNamespace(has_met=True, is_local=False)


@pytest.fixture
def ledger(monkeypatch, communication) -> StepLedger:
    current = SimpleNamespace(completed=0, ready=0)
    loop = SimpleNamespace(batch_progress=SimpleNamespace(current=current))
    trainer: Any = SimpleNamespace(
        optimizers=[],
        accumulate_grad_batches=1,
        lightning_module=SimpleNamespace(automatic_optimization=True),
        fit_loop=SimpleNamespace(epoch_loop=loop),
    )
    for name in ("Mark", "PhaseMark", "ModuleSnapshot"):
        monkeypatch.setattr(step_ledger, name, Mark)
    for name in ("batches_that_stepped", "complete_steps", "loader_states"):
        monkeypatch.setattr(step_ledger, name, lambda trainer: None)
    return StepLedger(trainer, communication, keeps_marks=True)


def generation(step: int, phase: int = 0) -> NewGeneration:
    return NewGeneration(
        number=1,
        members=(0,),
        before=(0, 1),
        step=step,
        source=0,
        behind=(),
        joined=(),
        left=(),
        is_retried=True,
        is_met=False,
        phase=phase,
    )


def go_to(ledger: StepLedger, cursor: Cursor) -> None:
    """In the first step."""
    ledger.reach_boundary()
    if cursor is not Cursor.BOUNDARY:
        ledger.begin_backward()
    if cursor in (Cursor.UPDATING, Cursor.COMMITTED, Cursor.PHASE):
        ledger.begin_update()
    if cursor in (Cursor.COMMITTED, Cursor.PHASE):
        ledger.take_step()
    if cursor is Cursor.PHASE:
        ledger.end_phase()
    assert ledger.cursor is cursor


@pytest.mark.parametrize(
    ("cursor", "step", "is_undone", "after"),
    [
        (Cursor.BOUNDARY, 0, True, Cursor.BOUNDARY),
        (Cursor.COMPUTING, 0, True, Cursor.BOUNDARY),
        (Cursor.COMPUTING, 1, False, Cursor.COMPUTING),  # to be copied, as is the next
        (Cursor.UPDATING, 1, False, Cursor.UPDATING),
        (Cursor.COMMITTED, 1, False, Cursor.COMMITTED),
        (Cursor.PHASE, 1, False, Cursor.PHASE),
    ],
)
def test_what_was_interrupted_is_undone_copied_or_finished(ledger, cursor, step, is_undone, after) -> None:
    go_to(ledger, cursor)
    ledger.settle(generation(step))
    assert (ledger.cursor, ledger.mark.num_restored) == (after, is_undone)


def test_a_copy_whose_source_is_lost_is_no_commit(ledger) -> None:
    go_to(ledger, Cursor.COMPUTING)
    for _ in range(2):
        ledger.settle(generation(1))
        ledger.begin_copy()
        assert not ledger.is_whole
        assert ledger.must_redo
    ledger.settle(generation(0))  # another rank, which has not committed it, is left
    assert ledger.mark.num_restored == 1
    ledger.begin_copy()
    ledger.end_copy(0)
    assert (ledger.cursor, ledger.step, ledger.is_whole) == (Cursor.BOUNDARY, 0, True)


def test_who_copies_a_step_finishes_its_batch_without_the_others(ledger) -> None:
    go_to(ledger, Cursor.COMPUTING)
    ledger.settle(generation(1, phase=1))
    ledger.begin_copy()
    ledger.end_copy(1)
    assert (ledger.cursor, ledger.step, ledger.is_alone) == (Cursor.COMMITTED, 1, True)
    ledger.end_phase()
    assert (ledger.cursor, ledger.is_alone) == (Cursor.PHASE, False)


@pytest.mark.parametrize("is_over", [False, True])
def test_a_part_without_steps_is_undone_unless_others_have_gone_on_from_its_end(ledger, is_over) -> None:
    go_to(ledger, Cursor.PHASE)
    ledger.begin_phase()
    ledger.settle(generation(1, phase=ledger.phase + is_over))
    ledger.resume()
    assert (ledger.is_alone, ledger.phase_mark.num_restored) == (is_over, 0 if is_over else 2)
    ledger.end_phase()
    assert not ledger.is_alone


def test_the_steps_of_a_round_are_committed_together(ledger, communication) -> None:
    communication.is_local = True
    for has_met, cursor in ((False, Cursor.COMPUTING), (True, Cursor.COMMITTED)):
        ledger.reach_boundary()
        communication.has_met = False
        ledger.begin_backward()
        ledger.begin_update()
        assert ledger.is_whole, "a round can be undone in the middle of an update"
        communication.has_met = has_met
        ledger.take_step()
        assert ledger.cursor is cursor
        ledger.end_phase()
    assert (ledger.step, ledger.phase) == (1, 2)


def test_ranks_that_agree_in_the_middle_of_an_accumulation_window_end_no_round(ledger) -> None:
    go_to(ledger, Cursor.COMPUTING)
    ledger.agree()
    assert (ledger.cursor, ledger.step) == (Cursor.COMPUTING, 0)
    ledger.take_step()
    ledger.agree()
    assert (ledger.cursor, ledger.step) == (Cursor.COMMITTED, 2)


@pytest.mark.parametrize(("is_lbfgs", "is_whole"), [(False, False), (True, True)])
def test_a_second_backward_of_a_step_needs_a_copy_of_the_weights(ledger, is_lbfgs, is_whole) -> None:
    ledger._has_several = is_lbfgs
    go_to(ledger, Cursor.UPDATING)
    ledger.begin_backward()
    assert ledger.is_whole is is_whole


def test_an_optimizer_step_of_a_batch_with_several_is_no_commit(ledger) -> None:
    ledger.trainer.lightning_module.automatic_optimization = False
    go_to(ledger, Cursor.UPDATING)
    ledger.take_step()
    ledger.begin_backward()
    assert not ledger.is_whole
    ledger.end_batch()
    assert (ledger.cursor, ledger.step) == (Cursor.COMMITTED, 1)


@pytest.mark.filterwarnings("ignore")
def test_a_part_that_is_undone_but_for_a_checkpoint_that_it_has_saved(tmp_path) -> None:
    saving, stopping = ModelCheckpoint(tmp_path), EarlyStopping("loss")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=0, limit_val_batches=0, callbacks=[saving, stopping], **quiet
    )
    trainer.fit(BoringModel())
    mark = step_ledger.PhaseMark(trainer)
    (group,) = trainer.optimizers[0].param_groups
    saving.best_model_path, stopping.wait_count, group["lr"] = "later", 1, 7.0
    mark.restore()
    assert (saving.best_model_path, stopping.wait_count, group["lr"]) == ("", 0, 0.1)
    saving.best_model_path, stopping.wait_count = "later", 1
    saving._last_global_step_saved += 1
    mark.restore()
    assert (saving.best_model_path, stopping.wait_count) == ("later", 0)

"""The last checkpoint of a run that a failure ends: of the last committed step, by a remaining rank."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # has no stubs

from lightning_ddp._lightning import (
    Trainer,
    after_schedulers,
    before_batches,
    before_updates,
    dump_checkpoint,
    is_fitting,
    saved_last,
    settle_counters,
)
from lightning_ddp.communication import Communication
from lightning_ddp.elastic import StepObserver
from lightning_ddp.elastic.step_ledger import Cursor, StepLedger, models_of_callbacks
from lightning_ddp.launch.failure_handler import FailureHandler
from lightning_ddp.launch.job_context import JobContext


class EmergencyObserver(StepObserver):
    """Observer of a fit without recovery that defers interrupts in a step, for an emergency checkpoint.

    From the end of a backward until the schedulers have followed the optimizer the main thread is not
    interrupted, unless it waits for other ranks: a step is committed as a whole.
    """

    ledger: StepLedger

    def __init__(self, trainer: Trainer, communication: Communication, context: JobContext) -> None:
        self.ledger = StepLedger(trainer, communication, keeps_marks=False)
        self._context = context
        before_batches(trainer, self.ledger.reach_boundary)
        before_updates(trainer, self.ledger.begin_update)
        after_schedulers(trainer, self._end_batch)

    def end_backward(self) -> None:
        if self.ledger.is_automatic:
            self._context.control.alarm.defer(True)

    def _end_batch(self) -> None:
        self.ledger.end_batch()
        ours = self._context.control
        if not ours.is_over:
            ours.alarm.defer(False)
            ours.interrupt.check()


def save_on_failure(ledger: StepLedger, folder: str | None, ours: FailureHandler) -> None:
    """Make the supervision `ours` save the last committed step of the present fit if a failure ends it.

    `folder` is the one to save to; None for `emergency/` beside that of the Trainer's checkpoints, if it
    makes any.
    """
    ours.save_last = partial(_save, ledger, folder, ours, ledger.step)


def _save(ledger: StepLedger, folder: str | None, ours: FailureHandler, first_step: int) -> str | None:
    """Write an emergency checkpoint if a step was committed; return its path, or None. No collectives."""
    folder = folder or _default_folder(ledger.trainer)
    if not is_fitting(ledger.trainer) or ledger.step == first_step or not folder:
        return None
    reason = _settle(ledger, is_forced=ours.alarm.is_forced)
    if reason is None:
        try:
            path = _write(ledger, folder)
            print(f"lightning_ddp: emergency checkpoint: {path}", file=sys.stderr, flush=True)
            return path
        except Exception as error:  # noqa: BLE001 (hooks of the user's, a full disk ...)
            reason = f"{type(error).__name__}: {error}"
    print(f"lightning_ddp: no emergency checkpoint: {reason}", file=sys.stderr, flush=True)
    return None


def _default_folder(trainer: Trainer) -> str | None:
    """Return the path `emergency/` beside the Trainer's checkpoint folder; None if it saves none."""
    callbacks = sorted(trainer.checkpoint_callbacks, key=lambda each: saved_last(each) is None)
    if not callbacks or getattr(trainer, "fast_dev_run", False):
        return None
    beside = getattr(callbacks[0], "dirpath", None) or f"{trainer.default_root_dir}/checkpoints"
    parent, _, _ = str(beside).rstrip("/").rpartition("/")
    return f"{parent}/emergency"


def _settle(ledger: StepLedger, *, is_forced: bool) -> str | None:
    """Roll the Trainer back to the last committed step; return the reason if impossible, else None."""
    if ledger.cursor is Cursor.COPYING:
        return "the state was being copied from another rank"
    if not ledger.is_whole and not ledger.is_automatic:
        return "manual optimization was interrupted between the optimizer steps of a batch"
    is_torn = is_forced and ledger.cursor is Cursor.COMMITTED  # perhaps in a scheduler
    if not ledger.is_whole or is_torn:
        return "an optimizer step or an average of parameters was interrupted"
    if not ledger.trainer.training and models_of_callbacks(ledger.trainer):
        return "validation was interrupted, and a callback may have exchanged weights"
    ledger.undo()
    settle_counters(ledger.trainer, is_committed=not ledger.must_redo, num_stepped=ledger.num_stepped)
    return None


def _write(ledger: StepLedger, folder: str) -> str:
    trainer: Any = ledger.trainer
    loaders = ledger.loaders if ledger.must_redo else None  # else the present ones are right
    checkpoint = dump_checkpoint(trainer, loaders)
    path = _unused(f"{folder.rstrip('/')}/emergency-step={trainer.global_step}", ".ckpt")
    ledger.communication.add_shared(checkpoint, path, trainer.world_size)
    files = trainer.strategy.checkpoint_io
    files = getattr(files, "checkpoint_io", None) or files  # that of an asynchronous one
    if "://" in folder:
        files.save_checkpoint(checkpoint, path)
        return path
    Path(folder).mkdir(parents=True, exist_ok=True)
    part = f"{path}.{os.getpid()}.part"
    files.save_checkpoint(checkpoint, part)
    Path(part).replace(path)
    return str(Path(path).resolve())


def _unused(stem: str, ending: str) -> str:
    """Return `stem` + `ending` as the path of a new file, with `-v1`, `-v2` ... between if it exists."""
    path, number = stem + ending, 0
    system, _ = fsspec.core.url_to_fs(path)
    while system.exists(path):
        number += 1
        path = f"{stem}-v{number}{ending}"
    return path

"""The last checkpoint of a run that a failure ends: of the last committed step, by a rank that is left."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # has no stubs

from lightning_ddp._lightning import (
    Trainer,
    after_schedulers,
    batches_that_stepped,
    dump_checkpoint,
    is_fitting,
    loader_states,
    saved_last,
    settle_counters,
)
from lightning_ddp._torch import version_of
from lightning_ddp.elastic.undo import models_of_callbacks
from lightning_ddp.launch.failure_handler import FailureHandler

__all__ = ["EmergencyCheckpoint"]

_FOLDER = "emergency"


class EmergencyCheckpoint:
    """The checkpoint of one Trainer. Follows its optimizer steps, so that it knows where one is committed.

    From the end of a backward until the schedulers have followed the optimizer the main thread is not
    interrupted, unless it waits for other ranks: a step is committed as a whole.

    Args:
        trainer: whose state.
        folder: where; None for `emergency/` beside that of its checkpoints, if it makes any.
        complete: adds to a checkpoint what Lightning does not know.
        undo: puts back what a step that is not committed has changed, as far as that is known; returns
            whether the state is a whole one.
        defers: whether this object keeps the alarm from interrupting a step; else somebody else does.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: str | None,
        *,
        complete: Callable[[dict[str, Any], str], None],
        undo: Callable[[], bool],
        defers: bool,
    ) -> None:
        self.trainer = trainer
        self._folder = folder
        self._complete, self._undo, self._defers = complete, undo, defers
        self._ours: FailureHandler | None = None
        self._num_steps = 0
        self._committed_batch = -1
        self._touched_batch = -1
        self._stepped_before = 0
        self._parameters: list[Any] = []
        self._versions: int | None = None
        self._loaders: list[Any] | None = None
        after_schedulers(trainer, self._end_step)

    def begin(self, ours: FailureHandler) -> None:
        """A fit begins, in this process's part of the run."""
        self._ours = ours
        self._num_steps, self._versions, self._loaders = 0, None, None
        self._parameters = []
        self._committed_batch = self._touched_batch = -1
        ours.save_last = self.save

    # ------------------------------------------------------------------ told by the strategy

    @property
    def _batch(self) -> int:
        return int(self.trainer.fit_loop.epoch_loop.batch_progress.total.ready)

    @property
    def _is_automatic(self) -> bool:
        return bool(self.trainer.lightning_module.automatic_optimization)

    def note_backward(self) -> None:
        """A backward is over."""
        if self._is_automatic and self._versions is None:
            self._parameters = self._parameters or list(self.trainer.lightning_module.parameters())
            self._versions = self._version_of_parameters()
            if self._defers and self._ours is not None:
                self._ours.alarm.defer(True)

    def note_update(self) -> None:
        """An optimizer is about to change parameters, or to call for a backward before."""
        self._touched_batch = self._batch

    def commit(self) -> None:
        """An optimizer step is finished; averages of parameters may follow."""
        self._num_steps += 1
        if self._is_automatic:
            self._committed_batch = self._batch
            self._stepped_before = batches_that_stepped(self.trainer)
            self._versions = self._version_of_parameters()

    def _end_step(self) -> None:
        """The batch is over but for the hooks of its end."""
        self._versions = None
        if self._touched_batch == self._batch and self._committed_batch != self._batch:
            self._committed_batch = self._batch  # manual optimization, with all its steps
            self._stepped_before = batches_that_stepped(self.trainer)
        if self._committed_batch == self._batch:
            self._loaders = loader_states(self.trainer)  # of those that have a state, which are few
        if self._defers and self._ours is not None and not self._ours.is_over:
            self._ours.alarm.defer(False)
            self._ours.interrupt.check()

    def _version_of_parameters(self) -> int:
        """Grows with each change of a parameter."""
        return sum(map(version_of, self._parameters))

    # ------------------------------------------------------------------ the end

    def save(self) -> str | None:
        """Writes the checkpoint, if there is anything new to save; returns where. Does not communicate."""
        folder = self._folder or self._default_folder()
        if not is_fitting(self.trainer) or self._num_steps == 0 or not folder:
            return None
        reason = self._settle()
        if reason is None:
            try:
                path = self._write(folder)
                print(f"lightning_ddp: emergency checkpoint: {path}", file=sys.stderr, flush=True)
                return path
            except Exception as error:  # noqa: BLE001 (hooks of the user's, a full disk ...)
                reason = f"{type(error).__name__}: {error}"
        print(f"lightning_ddp: no emergency checkpoint: {reason}", file=sys.stderr, flush=True)
        return None

    def _default_folder(self) -> str | None:
        """Return `emergency/` beside the folder of the Trainer's checkpoints; None if it makes none."""
        callbacks = sorted(self.trainer.checkpoint_callbacks, key=lambda each: saved_last(each) is None)
        if not callbacks or getattr(self.trainer, "fast_dev_run", False):
            return None
        beside = getattr(callbacks[0], "dirpath", None) or f"{self.trainer.default_root_dir}/checkpoints"
        parent, _, _ = str(beside).rstrip("/").rpartition("/")
        return f"{parent}/{_FOLDER}"

    def _settle(self) -> str | None:
        """Makes the state that of the last committed step; returns why it cannot be."""
        assert self._ours is not None  # a fit has begun
        is_forced = self._ours.alarm.is_forced  # perhaps within an update, which not all count
        if self._versions is not None and (is_forced or self._versions != self._version_of_parameters()):
            return "an optimizer step or an average of parameters was interrupted"
        if not self.trainer.training and models_of_callbacks(self.trainer):
            return "validation was interrupted, and a callback may have exchanged weights"
        is_committed = self._committed_batch == self._batch
        if is_committed:
            self._loaders = None  # the present ones are right
        elif not self._is_automatic and self._touched_batch == self._batch:
            return "manual optimization was interrupted between the optimizer steps of a batch"
        elif not self._undo():
            return "the state was being copied from another rank"
        settle_counters(self.trainer, is_committed=is_committed, num_stepped=self._stepped_before)
        return None

    def _write(self, folder: str) -> str:
        checkpoint = dump_checkpoint(self.trainer, self._loaders)
        path = _unused(f"{folder.rstrip('/')}/emergency-step={self.trainer.global_step}", ".ckpt")
        self._complete(checkpoint, path)
        files: Any = self.trainer.strategy.checkpoint_io
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
    """Return the path of a new file, numbered as Lightning numbers its own (`-v1`) if another run has one."""
    path = stem + ending
    system, _ = fsspec.core.url_to_fs(path)
    number = 0
    while system.exists(path):
        number += 1
        path = f"{stem}-v{number}{ending}"
    return path

"""State that a process takes over in the place of another one: results of the set-up, training, loggers."""

from __future__ import annotations

import hashlib
import hmac
import pickle
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_ddp._lightning import (
    Trainer,
    callback_metrics,
    dump_checkpoint,
    load_loops,
    logger_version,
    restore_checkpoint,
    saving_state,
    set_logger_version,
    set_saving_state,
    set_train_reload_epoch,
    set_val_reload_epoch,
    train_reload_epoch,
    val_reload_epoch,
)
from lightning_ddp.communication import Communication
from lightning_ddp.elastic.redeal import Dealer
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.launch.job_context import JobContext

_KEY = "lightning_ddp/journal"
_CHUNK_BYTES = 4 * 1024 * 1024
"""Largest value of a key: torch's store drops a connection that sends it more than 8 MiB."""
_LOOK_EVERY_S = 0.02


class Journal:
    """Recorded results of the collectives before the first epoch, replayed by processes that join later.

    Rank 0 publishes them when its first epoch begins, signed with the secret of the run: they are pickled.
    """

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._is_reader = context.is_joining
        self._secret = (context.rendezvous.token or "").encode()
        self._has_ended = False  # True once all processes run their collectives together
        self._has_read = False
        self.results: list[tuple[str, Any]] = []
        """Kind and result of each collective; of a reader those that are still to come, once it has them."""

    def end(self) -> None:
        """Publish the results of the collectives so far for processes that join later; record no more."""
        self._has_ended = True
        self.publish()

    @property
    def is_read(self) -> bool:
        """True while this joining process takes results of collectives from rank 0's published record."""
        return self._is_reader and not self._has_ended

    def result(self, kind: str, call: Callable[[], Any]) -> Any:
        """Return `call()`; until the first epoch record it, or in a joining process take rank 0's record."""
        if self._has_ended:
            return call()
        if not self._is_reader:
            self.results.append((kind, call()))
            return self.results[-1][1]
        if not self._has_read:
            self.results, self._has_read = self._read(), True
        nothing = ("nothing more before its first epoch", None)
        expected, value = self.results.pop(0) if self.results else nothing
        if expected != kind:
            raise ConfigurationError(
                f"on_failure='replace': in a replacement process the script's set-up calls {kind}, where"
                f" rank 0 has called {expected}. Set-up must be the same in each process, and not depend on"
                " files that the run itself has written."
            )
        return value

    def publish(self) -> None:
        """Put the recorded results into the run's store, on rank 0 only, once its first epoch has begun."""
        calls = self._context.control.calls
        is_due = self._has_ended and self.results and not self._is_reader
        if not is_due or calls is None or calls.state.rank != 0:
            return
        data = pickle.dumps(self.results)
        for start in range(0, len(data), _CHUNK_BYTES):
            self._context.store.set(f"{_KEY}/{start}", data[start : start + _CHUNK_BYTES])
        self._context.store.set(_KEY, f"{len(data)} {self._sign(data)}")

    def _read(self) -> list[tuple[str, Any]]:
        store = self._context.store
        while not store.check([_KEY]):
            self._context.control.check_whether_late()
            time.sleep(_LOOK_EVERY_S)
        num_bytes, signature = store.get(_KEY).decode().split()
        data = b"".join(store.get(f"{_KEY}/{start}") for start in range(0, int(num_bytes), _CHUNK_BYTES))
        if not hmac.compare_digest(signature, self._sign(data)):
            raise ConfigurationError(
                "the store of the run has results that are not signed with the secret of the run"
            )
        results: list[tuple[str, Any]] = pickle.loads(data)
        return results

    def _sign(self, data: bytes) -> str:
        return hmac.new(self._secret, data, hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Handover:
    """Training state of a running rank at a step boundary, for a process that joins there.

    That one takes it over as a run that resumes does, except the loops: Lightning resumes in an epoch as if
    it had been interrupted, and would skip or repeat a batch. So their counters are set.
    """

    checkpoint: dict[str, Any]  # with the shared state of hook and averager
    reload_epochs: tuple[Any, Any]  # epochs in which the dataloaders of training and validation were made
    dealt: list[Any]  # used part of the data, of each loader
    num_batches: int  # number of used batches of this epoch
    metrics: dict[str, Any]  # metrics that callbacks monitor
    saving: list[dict[str, Any]]  # last save of each callback
    accumulate_grad_batches: int  # which a callback may have changed
    trains: list[bool]  # whether each parameter requires a gradient
    should_stop: bool
    num_recoveries: int

    @classmethod
    def of(
        cls, trainer: Trainer, communication: Communication, dealer: Dealer, *, num_recoveries: int
    ) -> Handover:
        """Return this rank's training state. All ranks of a run call it: checkpoint hooks may communicate."""
        checkpoint = dump_checkpoint(trainer)
        communication.add_shared(checkpoint, "", trainer.world_size)
        return cls(
            checkpoint=checkpoint,
            reload_epochs=(train_reload_epoch(trainer), val_reload_epoch(trainer)),
            dealt=dealer.state(),
            num_batches=int(trainer.fit_loop.epoch_loop.batch_progress.current.completed),
            metrics=dict(callback_metrics(trainer)),
            saving=list(map(saving_state, trainer.callbacks)),  # type: ignore[attr-defined]
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            trains=[parameter.requires_grad for parameter in trainer.lightning_module.parameters()],
            should_stop=bool(trainer.should_stop),
            num_recoveries=num_recoveries,
        )

    def restore(self, trainer: Trainer) -> None:
        """Load the training state into this process, except the loops' counters. Does not communicate."""
        restore_checkpoint(trainer, dict(self.checkpoint))
        callback_metrics(trainer).update(self.metrics)
        for callback, saving in zip(trainer.callbacks, self.saving, strict=True):  # type: ignore[attr-defined]
            set_saving_state(callback, saving)
        trainer.should_stop = self.should_stop

    def restore_reload_epochs(self, trainer: Trainer) -> None:
        """Make this process create its dataloaders anew in the same epochs as the others."""
        set_train_reload_epoch(trainer, self.reload_epochs[0])
        set_val_reload_epoch(trainer, self.reload_epochs[1])

    def restore_loops(self, trainer: Trainer, dealer: Dealer) -> None:
        """Set the loops' counters, the used part of the data and what callbacks may change in an epoch."""
        load_loops(trainer, self.checkpoint["loops"]["fit_loop"])
        dealer.load(self.dealt)
        trainer.accumulate_grad_batches = self.accumulate_grad_batches
        for parameter, trains in zip(trainer.lightning_module.parameters(), self.trains, strict=True):
            parameter.requires_grad_(trains)


def seed_generators(*, seed: int, rank: int, step: int) -> None:
    """Seed the global random number generators, differently for each rank and step."""
    digest = hashlib.sha256(f"{seed}/{rank}/{step}".encode()).digest()
    number = int.from_bytes(digest[:4], "little")
    torch.manual_seed(number)
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number)


def share_versions(trainer: Trainer) -> None:
    """Set the versions of all ranks' loggers to those of rank 0's loggers; all ranks must call it."""
    versions = trainer.strategy.broadcast([logger_version(logger) for logger in trainer.loggers])
    for logger, version in zip(trainer.loggers, versions, strict=True):
        set_logger_version(logger, version)

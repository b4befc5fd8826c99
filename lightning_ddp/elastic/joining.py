"""All that a rank has at a step boundary, for a process that joins there: what it takes over, and what not.

It is what plain Lightning saves in a checkpoint, with what hooks and averagers share and with what of the
data is used. The process takes it over as a run that resumes does, but for the loops: Lightning resumes in an
epoch as if it had been interrupted, and would skip or repeat a batch. So their counters are set.
"""

from __future__ import annotations

import hashlib
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

from lightning_ddp._lightning import (
    Trainer,
    callback_metrics,
    dump_checkpoint,
    has_validation_loaders,
    load_loops,
    restore_checkpoint,
    saved_last,
    set_callback_metrics,
    set_saved_last,
)
from lightning_ddp.communication import Communication
from lightning_ddp.elastic.redeal import Dealer

__all__ = ["Handover", "seed_generators"]


@dataclass(frozen=True)
class Handover:
    """The state of a member at a boundary. It is sent to those that join."""

    checkpoint: dict[str, Any]
    """As Lightning saves it."""
    shared: dict[str, Any] | None
    """Of hook and averager."""
    dealt: list[Any]
    """What of the data is used."""
    num_batches: int
    """Of this epoch, that are used."""
    metrics: dict[str, Any]
    """What callbacks monitor."""
    saved: list[int | None]
    """At which step each callback that saves checkpoints has done so last."""
    should_stop: bool
    validates: bool
    """Whether the loaders of validation are set up, for which the ranks communicate."""

    @classmethod
    def of(cls, trainer: Trainer, communication: Communication, dealer: Dealer) -> Handover:
        """What this rank has. All members call it, as hooks of a checkpoint may communicate."""
        checkpoint = dump_checkpoint(trainer)
        has_state = communication.has_state
        return cls(
            checkpoint=checkpoint,
            shared=communication.shared_state(trainer.world_size) if has_state else None,
            dealt=dealer.state(),
            num_batches=int(trainer.fit_loop.epoch_loop.batch_progress.current.completed),
            metrics=callback_metrics(trainer),
            saved=[saved_last(callback) for callback in _callbacks(trainer)],
            should_stop=bool(trainer.should_stop),
            validates=has_validation_loaders(trainer),
        )

    def restore(self, trainer: Trainer, communication: Communication) -> None:
        """Takes over all but the loops. Does not communicate."""
        restore_checkpoint(trainer, dict(self.checkpoint))
        if self.shared is not None:
            names = [name for name, _ in trainer.lightning_module.named_parameters()]
            communication.load(self.shared, None, names)
        set_callback_metrics(trainer, self.metrics)
        for callback, step in zip(_callbacks(trainer), self.saved, strict=True):
            if step is not None:
                set_saved_last(callback, step)
        trainer.should_stop = self.should_stop

    def restore_loops(self, trainer: Trainer, dealer: Dealer) -> None:
        """Sets the counters of the loops, inside of the epoch."""
        load_loops(trainer, self.checkpoint["loops"]["fit_loop"])
        dealer.load(self.dealt)


def _callbacks(trainer: Any) -> list[Any]:
    return list(trainer.callbacks)


def seed_generators(*, seed: int, rank: int, step: int) -> None:
    """Seeds the global generators of random numbers, other than on any other rank or at any other step."""
    digest = hashlib.sha256(f"{seed}/{rank}/{step}".encode()).digest()
    number = int.from_bytes(digest[:4], "little")
    torch.manual_seed(number)
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number)

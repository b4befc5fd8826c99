"""Copies of the state of a rank at a step boundary or before a part of the loops, to go back to them."""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

import torch

from lightning_ddp._lightning import (
    Trainer,
    batches_that_stepped,
    loop_counters,
    saved_last,
    set_batches_that_stepped,
    training_results,
)
from lightning_ddp.communication import Communication
from lightning_ddp.ddp.buffers import ModuleSnapshot, copy_states, put_states


def put_scale(scaler: Any, state: dict[str, Any]) -> None:
    """Load a `state_dict` into a GradScaler, and drop what it knows of a step in progress."""
    if state:  # it is enabled
        scaler.scale(torch.ones(()))  # from now on it has a scale to be set
        scaler.update(state["scale"])  # which forgets what it knows of a step that has begun
        scaler.load_state_dict(state)


class RandomStates:
    """States of the global random number generators of torch, Python and numpy, copied at construction."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state(legacy=False) if numpy is not None else None
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


def _copies_of(counters: list[Any]) -> list[tuple[Any, dict[str, Any]]]:
    return [(counter, dict(vars(counter))) for counter in counters]


class Mark:
    """Copy of the training state at a step boundary, to undo a step; takes the module's snapshot again.

    With `has_weights` also parameters and optimizers, which an interrupted step may have changed. With
    `is_round` also what whole batches change, as several of them are undone together.
    """

    def __init__(
        self,
        trainer: Trainer,
        snapshot: ModuleSnapshot,
        communication: Communication,
        *,
        phase: int,
        has_weights: bool,
        is_round: bool,
    ) -> None:
        self.phase, self.has_weights = phase, has_weights
        self._batches = PhaseMark(trainer) if is_round else None
        optimizers = trainer.optimizers if has_weights else ()
        parameters = trainer.lightning_module.parameters() if has_weights else ()
        self._optimizers = [(optimizer, copy.deepcopy(optimizer.state_dict())) for optimizer in optimizers]
        self._parameters = [(parameter, parameter.detach().clone()) for parameter in parameters]
        self.num_batches = int(trainer.fit_loop.epoch_loop.batch_progress.current.completed)
        """Number of used batches of this epoch."""
        self.random = RandomStates()  # states to be put back last, before the step is repeated
        self._trainer, self._module = trainer, snapshot
        snapshot.retake()
        self._communication, self._hook = communication, communication.mark()
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._scale = self._scaler.state_dict() if self._scaler is not None else {}
        self._counters = _copies_of(loop_counters(trainer))
        self._results = {
            key: (metric, copy_states(metric)) for key, metric in training_results(trainer).items()
        }

    def restore(self) -> None:
        """Restore the training state at the step boundary, except that of random number generators."""
        if self._batches is not None:
            self._batches.restore_weights()
            self._batches.restore()
        for optimizer, state in self._optimizers:
            optimizer.load_state_dict(copy.deepcopy(state))
        for parameter, value in self._parameters:
            parameter.data.copy_(value)
        self._module.restore()
        self._communication.restore(self._hook)
        put_scale(self._scaler, self._scale)
        self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = False
        for owner, values in self._counters:
            vars(owner).update(values)
        results: Any = training_results(self._trainer)
        for key in [key for key in results if key not in self._results]:
            del results[key]
        for metric, states in self._results.values():
            put_states(metric, states)


def models_of_callbacks(trainer: Trainer) -> list[torch.nn.Module]:
    """Return models that callbacks keep, such as moving averages, and may swap in for the trained model."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [
        value
        for callback in callbacks
        for value in vars(callback).values()
        if isinstance(value, torch.nn.Module)
        and value is not trainer.lightning_module
        and next(value.parameters(), None) is not None
    ]


class PhaseMark:
    """Copy of a Trainer's state before a part of the loops without steps (validation ...), to undo it."""

    def __init__(self, trainer: Trainer) -> None:
        module = trainer.lightning_module
        self._trainer, self._random = trainer, RandomStates()
        self._stage = trainer.state.stage
        self._modes = [(part, part.training) for part in module.modules()]
        epochs: Any = trainer.fit_loop.epoch_progress
        self._counters = _copies_of([*loop_counters(trainer), epochs.total, epochs.current])
        self._num_stepped = batches_that_stepped(trainer)
        self._schedulers = [
            (config.scheduler, copy.deepcopy(config.scheduler.state_dict()))
            for config in trainer.lr_scheduler_configs
        ]
        self._rates = [
            (group, group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups
        ]
        self._callbacks: list[Any] = [
            (callback, copy.deepcopy(callback.state_dict()), saved_last(callback))
            for callback in trainer.callbacks  # type: ignore[attr-defined]
        ]
        models = models_of_callbacks(trainer)
        self._weights = [
            (tensor, tensor.detach().clone())
            for model in ([module, *models] if models else [])
            for tensor in (*model.parameters(), *model.buffers())
        ]

    def restore_weights(self) -> None:
        """Restore weights that callbacks have swapped for a validation; no committed step is undone."""
        for tensor, value in self._weights:
            tensor.data.copy_(value)

    def restore(self) -> None:
        """Restore the saved state, except weights, and callbacks that have saved a checkpoint since."""
        for owner, values in self._counters:
            vars(owner).update(values)
        set_batches_that_stepped(self._trainer, self._num_stepped)
        for scheduler, state in self._schedulers:
            scheduler.load_state_dict(copy.deepcopy(state))
        for group, rate in self._rates:
            group["lr"] = rate
        for callback, state, saved in self._callbacks:
            if state and saved_last(callback) == saved:
                callback.load_state_dict(copy.deepcopy(state))
        for part, is_training in self._modes:
            part.training = is_training
        self._trainer.state.stage = self._stage
        self._random.restore()

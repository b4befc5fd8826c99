"""The state of a rank at a step boundary that a step changes before it is committed: to go back to it."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from lightning_ddp._lightning import Trainer, loop_counters, training_results
from lightning_ddp.communication import Communication
from lightning_ddp.ddp.snapshot import ModuleSnapshot, copy_states, put_states

__all__ = ["Mark", "RandomStates"]


class RandomStates:
    """The states of the global random number generators, now."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        """Puts them back."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


class Mark:
    """A step boundary.

    Args:
        trainer: whose.
        module: what it trains.
        communication: the hook, with what it remembers.
        step: optimizer steps that are committed.
    """

    def __init__(
        self, trainer: Trainer, module: torch.nn.Module, communication: Communication, step: int
    ) -> None:
        self.step = step
        self.num_batches = int(trainer.fit_loop.epoch_loop.batch_progress.current.completed)
        """Of this epoch, that are used."""
        self._trainer = trainer
        self._random = RandomStates()
        self._module = ModuleSnapshot(module)
        self._communication, self._hook = communication, communication.mark()
        self._counters = [(owner, dict(vars(owner))) for owner in loop_counters(trainer)]
        steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        self.steps_completed = int(steps.total.completed)
        """As Lightning counts them."""
        self._results = {
            key: (metric, copy_states(metric)) for key, metric in training_results(trainer).items()
        }

    def restore(self) -> None:
        """Undoes what has happened since, but for random numbers."""
        self._module.restore()
        self._communication.restore(self._hook)
        self.restore_counters()
        results: Any = training_results(self._trainer)
        for key in [key for key in results if key not in self._results]:
            del results[key]
        for metric, states in self._results.values():
            put_states(metric, states)

    def restore_counters(self) -> None:
        """Puts the counters of the loops back."""
        for owner, values in self._counters:
            vars(owner).update(values)

    def restore_random(self) -> None:
        """Puts the random number generators back: the last thing before the step is done again."""
        self._random.restore()

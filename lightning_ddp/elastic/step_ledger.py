"""Record of where a rank is in a step: what it has committed, and copies of its state to undo the rest."""

from __future__ import annotations

import copy
import ctypes
import random
import sys
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

import torch

from lightning_ddp._lightning import (
    Trainer,
    batches_that_stepped,
    complete_steps,
    loader_states,
    loop_counters,
    saved_last,
    set_batches_that_stepped,
    training_results,
)
from lightning_ddp.communication import Communication
from lightning_ddp.ddp.buffers import ModuleSnapshot, copy_states, put_states
from lightning_ddp.supervise.orders import NewGeneration, Progress


class Cursor(Enum):
    """Enumeration of the stages of a training step at which a rank can be."""

    BOUNDARY = auto()  # between two steps; nothing of the next one has begun
    COMPUTING = auto()  # a step; also between two steps of a round of local training, committed together
    UPDATING = auto()  # the update of the parameters, or their average over the ranks
    COMMITTED = auto()  # a step is committed; the hooks of its batch follow
    PHASE = auto()  # a part of the loops without steps, such as validation, with all steps committed
    COPYING = auto()  # the state is copied from another rank


class StepLedger:
    """Record of how far one rank is in one fit, with saved state to undo an uncommitted step.

    Without an averager the unit of commit is an optimizer step. In local training it is a round: the steps
    up to the next moment at which all ranks average, which is the end of an epoch at the latest.

    With `keeps_marks` each boundary copies what is needed to go back to it.
    """

    def __init__(self, trainer: Trainer, communication: Communication, *, keeps_marks: bool) -> None:
        self.trainer, self.communication, self._keeps_marks = trainer, communication, keeps_marks
        self.cursor = Cursor.PHASE
        self.step = 0  # number of units, of all fits together, that all ranks have committed
        self.phase = 0  # number of finished parts of the loops: batches, validations, ends of epochs
        self.last_phase = 0  # number of parts that all ranks finish before they go on together
        self.mark: Mark | None = None  # state at the last boundary
        self.phase_mark: PhaseMark | None = None  # state before the present part without steps
        self.batch: Any = None  # batch in use, with `output` of `training_step` for it
        self.output: Any = None
        self.num_stepped = 0  # `batches_that_stepped` at the last commit
        self.loaders: list[Any] | None = None  # states at the last commit, of dataloaders that have one
        self._before_copy = Cursor.PHASE  # cursor before the state began to be overwritten
        self._num_backwards = 0
        self._has_several = any(isinstance(each, torch.optim.LBFGS) for each in trainer.optimizers)
        """True if a step may take several backwards, of which the later ones see moved weights."""
        self._has_gradients = False
        self._snapshot: ModuleSnapshot | None = None

    # ------------------------------------------------------------------ derived

    @property
    def is_automatic(self) -> bool:
        """True if Lightning takes the optimizer steps, one at most in a batch."""
        return bool(self.trainer.lightning_module.automatic_optimization)

    @property
    def must_redo(self) -> bool:
        """True if the step in progress is not committed, so that it has to be repeated after a loss."""
        cursor = self._before_copy if self.cursor is Cursor.COPYING else self.cursor
        return cursor in (Cursor.BOUNDARY, Cursor.COMPUTING, Cursor.UPDATING)

    @property
    def is_whole(self) -> bool:
        """True if the training state is that of the last committed step, or can be rolled back to it."""
        if self.cursor is Cursor.COPYING:
            return False
        if not self.must_redo or (self.mark is not None and self.mark.has_weights):
            return True
        return self.cursor is not Cursor.UPDATING and (self._num_backwards <= 1 or not self.is_automatic)

    @property
    def is_alone(self) -> bool:
        """True while this rank completes, without collectives, work that the other ranks have completed."""
        return self.phase < self.last_phase

    @property
    def num_in_unit(self) -> int:
        """Number of batches since the last boundary at which ranks may join or leave; 0 once committed."""
        completed = int(self.trainer.fit_loop.epoch_loop.batch_progress.current.completed)
        return completed - self.mark.num_batches if self.must_redo and self.mark is not None else 0

    def progress(self, *, is_trying: bool) -> Progress:
        """Return this rank's progress as reported after a loss of ranks; `is_trying` if a step had begun."""
        phase = self.phase
        if self.must_redo:
            phase = self.mark.phase if self.mark is not None else phase
        elif self.cursor is Cursor.COMMITTED:  # the batch is finished without the others
            phase += 1
        return Progress(self.step, is_clean=self.is_whole, is_trying=is_trying, phase=phase)

    # ------------------------------------------------------------------ told by the loops

    def begin_fit(self) -> None:
        """Reset stage and saved state for a new fit, as an earlier one may have failed; keep the counts."""
        self.cursor, self.mark, self.phase_mark = Cursor.PHASE, None, None
        self._num_backwards, self._has_gradients = 0, False

    def begin_epoch(self) -> None:
        """Drop the list of tensors to copy for an undo: a new epoch may have other parameters and buffers."""
        self._snapshot = None

    def reach_boundary(self) -> bool:
        """Record that a batch begins; if a step or local round begins with it, save state, return True."""
        self._num_backwards = 0
        loop: Any = self.trainer.fit_loop.epoch_loop
        in_window = loop.batch_progress.current.completed % self.trainer.accumulate_grad_batches
        if in_window or (self._keeps_marks and not self.communication.has_met):
            self.cursor = Cursor.COMPUTING
            return False
        self.cursor, self.batch, self.output, self._has_gradients = Cursor.BOUNDARY, None, None, False
        if self._keeps_marks:
            self._take_mark()
        return True

    def _take_mark(self) -> None:
        if self._snapshot is None:
            self._snapshot = ModuleSnapshot(self.trainer.lightning_module)
        is_round = self.communication.is_local
        random_before = None if self.mark is None else self.mark.random
        self.mark = None  # its memory is free for the next one
        self.mark = Mark(
            self.trainer,
            self._snapshot,
            self.communication,
            phase=self.phase,
            has_weights=self._has_several or is_round,
            is_round=is_round,
            random_before=random_before,
        )

    def begin_phase(self) -> None:
        self.phase_mark = PhaseMark(self.trainer)

    def end_phase(self) -> None:
        """Increment the number of finished parts of the loops: batches, validations, ends of epochs ..."""
        self.phase += 1
        if self.cursor is Cursor.COMMITTED:
            self.cursor = Cursor.PHASE

    def skip_rest(self) -> None:
        """Record the epoch's end: gradients accumulated since the last step will be part of no step."""
        self._has_gradients = False
        if not self._keeps_marks or self.communication.has_met:
            self.cursor = Cursor.PHASE

    # ------------------------------------------------------------------ told by the strategy

    def note_output(self, batch: Any, output: Any) -> None:
        """Keep the batch, and the output of `training_step` for it, without the graph of its loss."""
        if isinstance(output, Mapping):
            loss = output.get("loss")
            output = {**output, "loss": loss.detach()} if isinstance(loss, torch.Tensor) else output
        self.batch = batch
        self.output = output.detach() if isinstance(output, torch.Tensor) else output

    def begin_backward(self) -> None:
        """Record a start of backward; if a batch has several, later boundaries copy parameters as well."""
        self._has_gradients = True
        if self.is_automatic or self.cursor is not Cursor.UPDATING:
            self.cursor = Cursor.COMPUTING
        self._num_backwards += 1
        self._has_several |= self._num_backwards > 1

    def begin_update(self) -> None:
        self.cursor = Cursor.UPDATING

    def take_step(self) -> None:
        """Record that an optimizer step is done; commit it unless its batch or averaging round continues."""
        self._has_gradients = False
        if not self.is_automatic:  # other steps of the batch may follow
            self.cursor = Cursor.UPDATING
        elif self._keeps_marks and not self.communication.has_met:
            self.cursor = Cursor.COMPUTING
        else:
            self._commit()

    def end_batch(self) -> None:
        """Record that a batch is done but for its end hooks; with manual optimization, commit its steps."""
        if not self.is_automatic and self.cursor is Cursor.UPDATING:
            self._commit()

    def agree(self) -> None:
        """Commit the round of local steps, as all ranks have averaged, unless gradients have accumulated."""
        if not self._has_gradients:
            self._commit()

    def _commit(self) -> None:
        self.step += 1
        self._settle_unit(self.cursor)

    def _settle_unit(self, before: Cursor) -> None:
        """Save counters; set the stage after a commit or a copy, given the stage `before` it."""
        self.num_stepped = batches_that_stepped(self.trainer)
        self.loaders = loader_states(self.trainer)
        if before is Cursor.BOUNDARY:
            self.cursor = before
            self._take_mark()
        elif self.phase_mark is not None:
            self.cursor = Cursor.PHASE
            self.begin_phase()  # of the committed state
        else:
            self.cursor = Cursor.COMMITTED

    def finish_alone(self) -> None:
        """Make `is_alone` True until this rank has finished the current part of the loops."""
        self.last_phase = max(self.last_phase, self.phase + 1)

    # ------------------------------------------------------------------ after a loss

    def undo(self) -> None:
        """Restore the state of the last step boundary if the current step is not committed."""
        if self.must_redo and self.mark is not None:
            if self.phase_mark is not None:
                self.phase_mark.restore()
            self.mark.restore()
            self.phase, self.cursor = self.mark.phase, Cursor.BOUNDARY
            self._num_backwards, self._has_gradients = 0, False

    def settle(self, generation: NewGeneration) -> None:
        """Roll back to the step from which all ranks continue, unless this rank has to copy a newer state."""
        self.last_phase = generation.phase
        if self.phase_mark is not None and not self.is_alone:
            self.phase_mark.restore_weights()  # others may copy them
        if self.step >= generation.step:
            self.undo()

    def begin_copy(self) -> None:
        if self.cursor is not Cursor.COPYING:  # else from a rank that was lost meanwhile
            self._before_copy, self.cursor = self.cursor, Cursor.COPYING

    def end_copy(self, step: int) -> None:
        complete_steps(self.trainer)
        self.step = step
        self._settle_unit(self._before_copy)

    def resume(self) -> None:
        """Restore random and other states that the recovery has changed, just before training continues."""
        if self.must_redo and self.mark is not None:
            self.mark.random.restore()
        elif self.phase_mark is not None and not self.is_alone:
            self.phase_mark.restore()


# ---------------------------------------------------------------------- copies of the state


def put_scale(scaler: Any, state: dict[str, Any]) -> None:
    """Load a `state_dict` into a GradScaler, and drop what it knows of a step in progress."""
    if state:  # it is enabled
        scaler.scale(torch.ones(()))  # from now on it has a scale to be set
        scaler.update(state["scale"])  # which forgets what it knows of a step that has begun
        scaler.load_state_dict(state)


class RandomStates:
    """States of the global random number generators of torch, Python and numpy, copied at construction.

    Reading that of numpy takes 0.2 ms, so it is taken from `before` if nothing has been drawn since.
    """

    def __init__(self, before: RandomStates | None = None) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._numpy: Any = None
        self._memory = b""  # bytes of the state of numpy's generator
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._memory = _memory_of_numpy(numpy)
            last = before._numpy if before is not None and before._memory == self._memory != b"" else None
            # a normal number that waits for its turn is not in those bytes
            is_same = last is not None and not last["has_gauss"]
            self._numpy = last if is_same else numpy.random.get_state(legacy=False)

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


def _memory_of_numpy(numpy: Any) -> bytes:
    """Return the memory of numpy's global generator, or nothing if it is not the usual MT19937."""
    get = getattr(numpy.random, "get_bit_generator", None)  # since numpy 1.24
    generator: Any = None if get is None else get()
    if type(generator).__name__ != "MT19937":
        return b""
    return ctypes.string_at(generator.ctypes.state_address, 624 * 4 + 4)  # key and position


def _copies_of(counters: list[Any]) -> list[tuple[Any, dict[str, Any]]]:
    return [(counter, dict(vars(counter))) for counter in counters]


class Mark:
    """Copy of the training state at a step boundary, from which an interrupted step is undone.

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
        random_before: RandomStates | None,
    ) -> None:
        self.phase, self.has_weights = phase, has_weights
        self._batches = PhaseMark(trainer) if is_round else None
        self._num_groups = [(each, len(each.param_groups)) for each in trainer.optimizers]
        optimizers = trainer.optimizers if has_weights else ()
        parameters = trainer.lightning_module.parameters() if has_weights else ()
        self._optimizers = [(optimizer, copy.deepcopy(optimizer.state_dict())) for optimizer in optimizers]
        self._parameters = [(parameter, parameter.detach().clone()) for parameter in parameters]
        self.num_batches = int(trainer.fit_loop.epoch_loop.batch_progress.current.completed)
        """Number of used batches of this epoch."""
        self.random = RandomStates(random_before)  # states to be put back last, before the step is repeated
        self._trainer, self._module = trainer, snapshot
        snapshot.retake()  # the buffers and metrics of now
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
        for optimizer, number in self._num_groups:
            del optimizer.param_groups[number:]  # what is repeated adds them again
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
        self._num_groups = [(each, len(each.param_groups)) for each in trainer.optimizers]
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
        """Restore the saved state, but neither weights nor callbacks that have saved a checkpoint since."""
        for owner, values in self._counters:
            vars(owner).update(values)
        set_batches_that_stepped(self._trainer, self._num_stepped)
        for scheduler, state in self._schedulers:
            scheduler.load_state_dict(copy.deepcopy(state))
        for optimizer, number in self._num_groups:
            del optimizer.param_groups[number:]
        for group, rate in self._rates:
            group["lr"] = rate
        for callback, state, saved in self._callbacks:
            if state and saved_last(callback) == saved:
                callback.load_state_dict(copy.deepcopy(state))
        for part, is_training in self._modes:
            part.training = is_training
        self._trainer.state.stage = self._stage
        self._random.restore()

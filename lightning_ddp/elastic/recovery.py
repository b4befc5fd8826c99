"""Training that continues in the same `fit` after a rank is lost.

Methods of Lightning's loops are wrapped: a failure that interrupts them is caught, the remaining ranks meet
again, and what was interrupted is finished if it is committed, or else repeated from the last boundary.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from lightning_ddp._lightning import (
    Trainer,
    batches_that_stepped,
    before_updates,
    end_after_teardown,
    enter_epoch,
    fetch_anew,
    finish_batch,
    limit_epoch,
    limit_validation,
    loaders_of,
    prepare_loaders,
    set_up_validation,
    silent_end,
    validates_now,
    wrap_steps,
    wrap_validation_setup,
)
from lightning_ddp.comm import barrier, broadcast_nested, monitored_barrier
from lightning_ddp.comm.gather_scatter import broadcast_coalesced
from lightning_ddp.comm.group import Group
from lightning_ddp.communication import Communication
from lightning_ddp.elastic import WorldChange
from lightning_ddp.elastic.redeal import Dealer, set_ranks
from lightning_ddp.elastic.regroup import end_collectives, leave
from lightning_ddp.elastic.step_ledger import Cursor, Outcome, StepLedger
from lightning_ddp.elastic.step_observer import StepObserver
from lightning_ddp.elastic.takeover import MAIN, VALIDATION, Handover, Journal, Loggers, seed_generators
from lightning_ddp.elastic.undo import RandomStates, put_scale
from lightning_ddp.errors import PeerFailure
from lightning_ddp.launch.failure_handler import FailureHandler
from lightning_ddp.launch.job_context import JobContext, global_seed
from lightning_ddp.launch.recovery_client import RecoveryClient
from lightning_ddp.launch.stop_signals import tell_long_wait
from lightning_ddp.supervise.orders import NewGeneration

__all__ = ["Recovery"]

_log = logging.getLogger("lightning_ddp")


class Recovery(StepObserver):
    """Reaction of one fit to lost ranks, and to ranks that join or leave.

    Args:
        context: context of this process.
        trainer: Trainer whose loops are wrapped.
        communication: the hook and the averager.
        keeps_global: True if the global batch keeps its size, False if that of each rank does.
        is_uneven: True if ranks may have different numbers of batches.
        meet: makes the process group of a generation, and all that depends on it; returns the new group.
            All ranks call it; communicates.
        boundary: called before each batch; returns True if all meet there, and raises if the run stops.
        group: returns the present ranks.
        journal: journal of the set-up, where processes may join; None elsewhere.
    """

    ledger: StepLedger
    dealer: Dealer
    repeats_steps = True

    def __init__(
        self,
        context: JobContext,
        trainer: Trainer,
        communication: Communication,
        *,
        keeps_global: bool,
        is_uneven: bool,
        meet: Callable[[NewGeneration], Group],
        boundary: Callable[[], bool],
        group: Callable[[], Group],
        journal: Journal | None,
    ) -> None:
        self._context = context
        self._trainer, self._communication = trainer, communication
        self._device = trainer.strategy.root_device
        self._meet, self._boundary, self._group = meet, boundary, group
        self.dealer = Dealer(trainer, keeps_global=keeps_global, fills=not is_uneven)
        self._keeps_global = keeps_global
        self.ledger = StepLedger(trainer, communication, keeps_marks=True)
        self._members = tuple(range(trainer.world_size))
        """Places of the generation that was told of last, by rank."""
        self._num_recoveries = 0
        """Number of generations after a failure; those that others joined or left do not count."""
        self._is_meeting = False
        """True if this rank stands at the boundary where all meet."""
        self._validates = True
        """True if a validation may follow a batch of this epoch."""
        self._loggers = Loggers(trainer, is_joining=context.is_joining)
        self._journal, self._is_joining = journal, context.is_joining
        self._handover: Handover | None = None
        """State for processes that join: made by members, taken by a process that has joined."""
        self._form: NewGeneration | None = None
        """Generation that this process has joined, until it takes its first step."""
        if journal is not None:
            if importlib.util.find_spec("omegaconf") is not None:
                # as the first checkpoint would, in a third of a second, when another process joins
                importlib.import_module("omegaconf")
            wrap_validation_setup(trainer, self._setup_validation)
        wrap_steps(
            trainer,
            advance=self._advance,
            on_advance_end=self._end_advance,
            on_epoch_start=self._start_epoch,
            on_run_start=self._start_run,
            on_run_end=self._end_run,
            sanity_check=self._check_sanity,
            others=self.repeat,
        )
        before_updates(trainer, self._begin_update)
        for loader in loaders_of(trainer.fit_loop):  # made already, to count the steps of a schedule
            self.dealer.adopt(loader)
        self._calls.defer(True)  # from here to the first barrier only waits for other ranks are interrupted
        self._calls.may_leave = True

    @property
    def _ours(self) -> FailureHandler:
        return self._context.control  # another one after a failure that the script has caught

    @property
    def _calls(self) -> RecoveryClient:
        calls = self._ours.calls
        assert calls is not None
        return calls

    # ------------------------------------------------------------------ told by the strategy

    def begin_fit(self) -> None:
        """Forget where an earlier fit has ended."""
        self.ledger.begin_fit()

    def wait_for_others(self) -> None:
        """Return once all ranks have come as far, or one is lost: what is repeated goes on without it.

        A rank that is sooner may be lost as soon as its next hooks run. All ranks call it; it communicates.
        """
        if not self._is_joining:
            self._completes(lambda: barrier(self._group(), self._device, "before ranks may be lost"))

    @property
    def is_alone(self) -> bool:
        """True while this rank finishes what the others have finished already, without them."""
        return self.ledger.is_alone

    def begin_batch(self, batch: Any) -> None:
        """Keep the batch, which may have to be finished without the others."""
        self.ledger.batch = batch

    def end_forward(self, output: Any) -> None:
        """Keep the output of `training_step`, for the same reason."""
        self.ledger.note_output(output)

    def begin_backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of this rank's batch times its weight in the mean."""
        self.ledger.begin_backward()
        if not self._keeps_global or not self._calls.state.generation:
            return loss
        return loss * self.dealer.weight(self._loop.batch_idx)

    def end_backward(self) -> None:
        """Defer interrupts: from here to the next boundary only waits for other ranks are interrupted."""
        self._calls.defer(True)

    def end_step(self) -> None:
        """Commit the step, or in local training the round that it ends."""
        self.ledger.take_step()

    def agree(self) -> None:
        """Commit the round that an average outside of a step ends."""
        self.ledger.agree()

    def keep(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies, for `finishes_alone`."""
        return [tensor.clone() for tensor in tensors]

    def _begin_update(self) -> None:
        self._settle()
        self.ledger.begin_update()

    def _settle(self) -> None:
        """Return once all collectives that were called have ended well, on a device too.

        There waits of the host do not wait for them, and an abort would leave results that were written in
        part: nothing is taken for done before this.
        """
        if self._device.type == "cuda":
            self._group().wait_device(self._device)

    def settle_hook(self) -> None:
        """Wait for a collective after a committed step."""
        if self.ledger.cursor is Cursor.COMMITTED:
            self._settle()

    def finishes_alone(self, error: Exception) -> bool:
        """Return True if the hooks after a committed step go on without others, one of which is lost.

        All meet again at the end of the batch; a hook is not called twice.
        """
        if self.ledger.cursor is not Cursor.COMMITTED or not self._ours.is_call(error):
            return False
        self.ledger.finish_alone()
        end_collectives(self._ours, self._device)  # the caller writes over what they may still write to
        return True

    # ------------------------------------------------------------------ Lightning's steps

    @property
    def _loop(self) -> Any:
        return self._trainer.fit_loop.epoch_loop

    def _start_run(self, start: Callable[[], None]) -> None:
        """Call the hooks `on_train_start` once; they are interrupted only where they wait for others."""
        self._calls.begin_fit()
        self.repeat(lambda: set_up_validation(self._trainer))
        start()

    def _setup_validation(self, setup: Callable[[], None]) -> None:
        """Set up its loaders, in the sanity check, or when training starts, or by a first validation."""
        assert self._journal is not None
        if self._form is not None:  # the others make theirs later, and communicate for it
            return
        with self._journal.part(VALIDATION):
            setup()
        self._journal.end(VALIDATION)

    def _check_sanity(self, check: Callable[[], None]) -> None:
        """Check, except in a process that joins."""
        if self._is_joining:
            self._join()
            return
        with self._journal.part(None) if self._journal is not None else nullcontext():
            self.repeat(check)

    def _start_epoch(self, start: Callable[[], None]) -> None:
        if self._journal is not None:
            self._journal.end(MAIN)
        self._validates = self._trainer.enable_validation
        if self._form is not None:  # of an epoch that has begun for the others
            start()
            enter_epoch(self._trainer)
            return
        self.ledger.begin_epoch()

        def start_whole() -> None:
            start()
            self.dealer.check()
            if self._calls.state.generation:  # the samplers deal a whole epoch again, to other ranks
                limit_epoch(self._trainer)

        self.repeat(start_whole, is_new_epoch=True)

    def _advance(self, advance: Callable[[Any], None], fetcher: Any) -> None:
        if self._form is not None:
            self._enter_late(self._form)

        def attempt() -> None:
            if self._begin():
                self._meet_at_boundary()
            else:
                advance(fetcher)

        try:
            self.through(attempt, is_over=lambda: not self.ledger.must_redo)
            self.ledger.end_phase()
        except StopIteration:  # the rest of the epoch is skipped
            self.ledger.skip_rest()
            if not self._communication.is_local or self._agree():
                raise

    def _begin(self) -> bool:
        """Pass a boundary; return True if all meet there. What has come before is committed.

        The alarm may ring again.
        """
        self._calls.defer(True)
        may_meet = self.ledger.reach_boundary()
        self._calls.defer(False)
        self._calls.place_boundary((self.ledger.step << 32) + self.ledger.num_in_unit, may_meet=may_meet)
        return self._boundary()

    def _meet_at_boundary(self) -> None:
        """Stop where others join or leave. All ranks call it; communicates."""
        self._calls.meet()
        if self._calls.state.has_new:
            self._handover = Handover.of(
                self._trainer, self._communication, self.dealer, num_recoveries=self._num_recoveries
            )
        if self._device.type == "cuda":  # or an abort here cuts off what another one still receives
            self._settle()
            limit = timedelta(seconds=self._group().timeout_s(self._device))
            monitored_barrier(self._group(), "before ranks join or leave", timeout=limit)
        self._calls.defer(True)
        self._is_meeting = True

    def _end_advance(self, end: Callable[[Any], None], fetcher: Any) -> None:
        """Validate, if it is time. In local training the ranks agree before, and at the end of the epoch."""
        validates = self._validates and (
            validates_now(self._trainer) or self._trainer.val_check_batch is None
        )
        if self._loop.done:
            self.ledger.skip_rest()
        if self._communication.is_local and (validates or self._loop.done) and not self._agree():
            return
        if validates:
            self.repeat(lambda: end(fetcher))
        else:
            end(fetcher)
            self.ledger.end_phase()
        if self._loop.done:
            self.ledger.skip_rest()

    def _agree(self) -> bool:
        """Commit a round by an average; return False if all go back to the one before. Communicates."""

        def agree() -> None:
            if not self.ledger.is_alone and self._communication.agree():
                self.ledger.agree()

        return self.repeat(agree)

    def _end_run(self, end: Callable[[], None]) -> None:
        self._calls.stop_instead_of_leaving()
        self.repeat(end)
        self._calls.defer(False)  # nothing that follows is repeated

    def repeat(self, phase: Callable[[], None], *, is_new_epoch: bool = False) -> bool:
        """Run a part of the loops without steps. It is repeated from its beginning, or that of the whole.

        At the begin of a new epoch the batches that are counted are those of the one before.

        Returns:
            False if steps before it were undone, so that it comes again.
        """
        if self.ledger.phase_mark is not None or self._is_joining:  # who joins meets nobody yet
            phase()
            return True
        self.ledger.begin_phase()

        def attempt() -> None:
            self._calls.defer(False)
            self._ours.interrupt.check()
            phase()
            self._settle()
            self._calls.defer(True)

        num_batches = 0 if is_new_epoch else None
        try:
            is_finished = self.through(
                attempt, is_over=lambda: self.ledger.must_redo, num_batches=num_batches
            )
        finally:
            self.ledger.phase_mark = None
        if is_finished:
            self.ledger.end_phase()
        return is_finished

    # ------------------------------------------------------------------ recovery

    def through(
        self, work: Callable[[], None], *, is_over: Callable[[], bool], num_batches: int | None = None
    ) -> bool:
        """Run a part of the loops; repeat it after a change of the ranks.

        Args:
            work: the part.
            is_over: returns True after such a change if the part is not to be repeated.
            num_batches: number of used batches of the epoch; None for the loop's count.

        Returns:
            True if the part has run to its end.
        """
        while not self._completes(work) or self._is_meeting:
            self.enter(num_batches)
            if is_over():
                return False
        return True

    def _completes(self, work: Callable[[], None]) -> bool:
        """Call a function; return False if it was interrupted, and the remaining ranks are to meet."""
        try:
            try:
                work()
                return True
            except Exception as error:
                self._calls.defer(True)
                if not self._ours.is_call(error):
                    raise
        except PeerFailure as error:  # also where the alarm rang before it was deferred
            self._calls.defer(True)
            if not self._ours.is_call(error):
                raise
        cause: BaseException | None = self._calls.error
        while cause is not None:  # else the functions that it has come through keep groups, with threads
            cause.__traceback__ = None
            cause = cause.__context__
        return False

    def enter(self, num_batches: int | None = None) -> None:
        """Enter the next generation, and finish or undo what was interrupted.

        Args:
            num_batches: number of used batches of the epoch; None for the loop's count.
        """
        has_met, self._is_meeting = self._is_meeting, False
        error, outcome = self._calls.error, Outcome.FINISHED
        is_trying = self.ledger.progress(has_met=has_met).is_trying
        generation: NewGeneration | None = None

        def attempt() -> None:
            nonlocal generation, outcome
            progress = replace(self.ledger.progress(has_met=has_met), is_trying=is_trying)
            new = self._calls.wait_for_generation(progress, self._collect_garbage())
            if new is None:  # the Trainer is torn down as after a fit, and all ends
                self._calls.has_left = True
                self.ledger.finish_alone()
                end_after_teardown(self._trainer)
                raise silent_end(self._trainer)
            group = self._meet(new)
            outcome = self.ledger.settle(new)
            if new.behind:
                self._copy_state(new, group)
            if new.joined:
                self._hand_over(new, group)
            self._settle()
            self._calls.settle()
            generation = new

        is_standing = has_met
        while generation is None:
            self._stop(has_met=is_standing)
            is_standing = False
            self._completes(attempt)
        self._handover = None
        if outcome is Outcome.UNDONE and self.ledger.mark is not None:
            num_batches = self.ledger.mark.num_batches
        if num_batches is None:
            num_batches = self._loop.batch_progress.current.ready
        self._deal(num_batches)
        self._loggers.take_over()
        if self._journal is not None:
            self._journal.publish()  # rank 0 may have been lost before it has
        self._tell(generation, error)
        if self.ledger.cursor is Cursor.COMMITTED:
            self._calls.defer(True)
            self.ledger.finish_alone()  # the others have done so, and would not answer
            finish_batch(self._trainer, self.ledger.batch, self.ledger.output)
        self.ledger.resume()

    def _collect_garbage(self) -> Callable[[], None]:
        """Return a check for the wait, which first frees what is left of an earlier group."""
        is_first = True

        def look() -> None:
            nonlocal is_first
            if is_first:
                gc.collect()
            is_first = False
            self._ours.check_end()

        return look

    def _stop(self, *, has_met: bool = False) -> None:
        """Let go of the others: nothing that this process has called or queued goes on."""
        self._communication.halt()
        self._ours.forget_device()
        self._calls.stop(has_met=has_met)
        leave(self._ours, self._trainer.strategy.model, self._device)

    def _hand_over(self, form: NewGeneration, group: Group) -> None:
        """Send all that this rank has to those that join, or take it. All ranks call it; communicates."""
        source = form.members.index(form.source)
        sent = self._handover if group.rank == source else None
        received = broadcast_nested(group, sent, source, self._device, label="state for a rank that joins")
        if self._calls.state.place in form.joined:
            self._handover = received
            received.restore(self._trainer, self._communication)

    # ------------------------------------------------------------------ a process that joins

    def _join(self) -> None:
        """Wait until the others let this process in, and take their state over."""
        assert self._journal is not None
        calls = self._calls
        prepare_loaders(self._trainer, validates=self._journal.is_complete(VALIDATION))
        calls.defer(True)

        def look() -> None:
            self._ours.check_whether_late()
            self._ours.check_end()

        def attempt() -> None:
            with tell_long_wait(calls.state.place, lambda: "the other ranks to let it join"):
                form = calls.wait_for_generation(None, look)
            if form is None:
                self._ours.leave_late()
            assert form is not None
            self._hand_over(form, self._meet(form))
            self._settle()
            calls.settle()
            self._form = form

        while self._form is None:
            self._stop()
            self._completes(attempt)
        assert self._handover is not None
        form, self._form = self._form, None
        prepare_loaders(self._trainer, validates=self._handover.validates)
        self._journal.end(VALIDATION)
        self._form = form

    def _enter_late(self, form: NewGeneration) -> None:
        """Take over the loops, before the first step of a process that has joined."""
        assert self._handover is not None
        self._handover.restore_loops(self._trainer, self.dealer)
        self._num_recoveries = self._handover.num_recoveries
        self.ledger.step, self.ledger.phase, self.ledger.last_phase = form.step, form.phase, form.phase
        self._deal(self._handover.num_batches)
        seed_generators(seed=global_seed(), rank=self._calls.state.place, step=form.step)
        self._members = form.before
        self._loggers.take_over()
        self._tell(form, None)
        self._form = self._handover = None
        self._is_joining = False

    # ------------------------------------------------------------------ after each regroup

    def _copy_state(self, form: NewGeneration, group: Group) -> None:
        """Give the state of one rank to those that are a step behind. All ranks call it; communicates.

        Learning rates stay: the scheduler's step after this one is still to come on a rank that is behind.
        """
        is_behind = self._calls.state.place in form.behind
        source, device = form.members.index(form.source), self._device
        is_local = self._communication.is_local
        takes = is_behind and not self._communication.keeps_parameters
        keeps_optimizer = self._communication.keeps_optimizer
        if is_behind:
            self.ledger.begin_copy()
        module = self._trainer.lightning_module
        averaged = module.buffers() if self._communication.averager is not None else ()
        for tensors, is_taken in ((module.parameters(), takes), (averaged, is_behind and is_local)):
            mine: list[torch.Tensor] = list(tensors)
            if not is_taken and group.rank != source:  # in local training others have tensors of their own
                mine = [tensor.detach().clone() for tensor in mine]
            broadcast_coalesced(group, mine, source)
        for optimizer in self._trainer.strategy.optimizers:
            own = optimizer.state_dict()
            state = broadcast_nested(group, own["state"], source, device, label="state of an optimizer")
            if takes and not keeps_optimizer:
                optimizer.load_state_dict({**own, "state": state})
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            state = broadcast_nested(group, scaler.state_dict(), source, device, label="loss scale")
            if is_behind and not is_local:
                put_scale(scaler, state)
        self._communication.copy_state(group, source, device, is_behind=is_behind)
        self._settle()
        if is_behind:  # also where another one is lost before all have gone on
            self.ledger.end_copy(form.step)

    def _deal(self, num_batches: int) -> None:
        """Deal the rest of the epoch over the present ranks."""
        rank, world_size, states = self._calls.state.rank, self._trainer.world_size, RandomStates()
        self.dealer.deal(num_batches, rank, world_size)
        if loaders_of(self._trainer.fit_loop):  # not so in the sanity check
            fetch_anew(self._trainer, num_batches)
        states.restore()
        for loader in loaders_of(self._loop.val_loop):
            sampler = getattr(loader, "sampler", None)
            if hasattr(sampler, "num_replicas"):
                set_ranks(sampler, rank, world_size)
        limit_validation(self._trainer)

    def _tell(self, form: NewGeneration, error: Any) -> None:
        before, self._members = self._members, form.members  # generations that were never whole are not told
        lost = tuple(rank for rank, place in enumerate(before) if place not in form.members)
        left = tuple(rank for rank in lost if before[rank] in form.left)
        joined = tuple(rank for rank, place in enumerate(form.members) if place not in before)
        if not lost and not joined:  # one that was to join has died
            return
        trainer: Any = self._trainer
        seconds, place = time.monotonic() - self._calls.heard_at, self._calls.state.place
        change = WorldChange(
            old_world_size=len(before),
            new_world_size=len(form.members),
            old_rank=before.index(place) if place in before else None,
            new_rank=self._calls.state.rank,
            lost_ranks=lost,
            joined_ranks=joined,
            step=trainer.global_step,
            seconds=seconds,
            cause=error,
            retried=form.is_retried,
        )
        failed = tuple(rank for rank in lost if rank not in left)
        self._num_recoveries += bool(failed)
        if change.new_rank == 0:
            what = [
                f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {verb}"
                for ranks, verb in (
                    (failed, "were lost" if len(failed) > 1 else "was lost"),
                    (left, "left"),
                    (joined, "joined"),
                )
                if ranks
            ]
            now = (", ".join(what), change.step, change.new_world_size, seconds)
            _log.warning("%s at step %d; training continues on %d ranks (recovered in %.2f s)", *now)
        for callback in trainer.callbacks:
            if hasattr(callback, "on_world_changed"):
                callback.on_world_changed(trainer, trainer.lightning_module, change)
        if hasattr(trainer.lightning_module, "on_world_changed"):
            trainer.lightning_module.on_world_changed(change)
        for logger in trainer.loggers:
            metrics = {
                "recovery/count": float(self._num_recoveries),
                "recovery/seconds": float(seconds),
                "recovery/world_size": float(change.new_world_size),
            }
            logger.log_metrics(metrics, step=batches_that_stepped(trainer))

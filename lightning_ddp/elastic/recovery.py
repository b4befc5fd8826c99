"""Training that goes on in the same `fit` after a rank is lost.

Lightning's `advance` is wrapped: a failure that interrupts it is caught, the ranks that are left meet again,
and the batch is finished, where its optimizer step is committed, or done again from its beginning. It is long
as each step of Lightning's loops has its part, and all of them share what is committed, and by whom.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
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
    loop_counters,
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
from lightning_ddp.ddp.buffers import ModuleSnapshot
from lightning_ddp.elastic import WorldChange
from lightning_ddp.elastic.redeal import Dealer, set_ranks
from lightning_ddp.elastic.regroup import end_collectives, leave
from lightning_ddp.elastic.takeover import MAIN, VALIDATION, Handover, Journal, Loggers, seed_generators
from lightning_ddp.elastic.undo import Mark, PhaseMark, RandomStates, put_scale
from lightning_ddp.errors import PeerFailure
from lightning_ddp.launch.job_context import JobContext, global_seed
from lightning_ddp.launch.stop_signals import tell_long_wait
from lightning_ddp.supervise.orders import NewGeneration, Progress

__all__ = ["Recovery"]

_log = logging.getLogger("lightning_ddp")


class Recovery:
    """What one fit does about lost ranks, and about those that join or leave.

    Args:
        session: of this process.
        trainer: whose loops are wrapped.
        communication: the hook and the averager.
        keeps_global: whether the global batch keeps its size; else that of each rank does.
        is_uneven: whether ranks may have different numbers of batches.
        meet: makes the process group of a generation, and all that is made of it; returns the new group. All
            ranks call it; communicates.
        boundary: called before each batch; returns whether all meet there, and raises where the run stops.
        group: tells the present ranks.
        journal: where processes may join; None elsewhere.
    """

    def __init__(
        self,
        session: JobContext,
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
        assert session.control.calls is not None
        self._ours, self._calls = session.control, session.control.calls
        self._trainer, self._communication = trainer, communication
        self._device = trainer.strategy.root_device
        self._meet, self._boundary, self._group = meet, boundary, group
        self.dealer = Dealer(trainer, keeps_global=keeps_global, fills=not is_uneven)
        self._keeps_global = keeps_global
        self.committed = self.taken = 0
        """Optimizer steps of this fit that are finished: by all ranks, and by this one in local training."""
        self._num_local = 0
        """Of those taken, since all ranks have met."""
        self._deal_after: int | None = None
        self.is_alone = False
        """Whether this rank finishes what the others have finished already, without them."""
        self._is_finishing = False
        self._phase = self._last_phase = 0
        self._members = tuple(range(trainer.world_size))
        """Places of the generation that was told of last, by rank."""
        self._num_recoveries = 0
        """Generations that went on after a failure; those that others joined or left do not count."""
        self._is_clean = True
        self._is_repeating = False
        self._mark: Mark | None = None
        self._num_backwards = 0
        """Of this batch, begun: several if the optimizer calls its closure again, with other weights."""
        self._has_several = any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers)
        """Whether the optimizer has done so; from then on weights are copied at each boundary."""
        self._snapshot: ModuleSnapshot | None = None
        self._counters: list[Any] = []
        self._validates = True
        """Whether a validation may follow a batch of this epoch."""
        self.batch: Any = None
        """That is used, as the strategy notes it."""
        self._output: Any = None
        """What `training_step` has returned for it."""
        self._loggers = Loggers(trainer, is_joining=session.is_joining)
        self._num_rows = 0
        self._journal, self._is_joining = journal, session.is_joining
        self._handover: Handover | None = None
        """What those that join take over: made by members, taken by a process that has joined."""
        self._form: NewGeneration | None = None
        """The generation that this process has joined, until it takes its first step."""
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
        before_updates(trainer, self._settle)
        for loader in loaders_of(trainer.fit_loop):  # made already, to count the steps of a schedule
            self.dealer.adopt(loader)
        self._calls.defer(True)  # from here to the first barrier only waits for other ranks are interrupted
        self._calls.may_leave = True

    # ------------------------------------------------------------------ told by the strategy

    def wait_for_others(self) -> None:
        """Return once all ranks have come as far, or one is lost: what is repeated goes on without it.

        A rank that is sooner may be lost as soon as its next hooks run. All ranks call it; it communicates.
        """
        if not self._is_joining:
            self._is_through(lambda: barrier(self._group(), self._device, "before ranks may be lost"))

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """A backward begins, from the loss of this rank's batch times what it counts for in the mean."""
        self._num_backwards += 1
        self._has_several |= self._num_backwards > 1
        if not self._keeps_global or not self._calls.state.generation:
            return loss
        return loss * self.dealer.weight(self._loop.batch_idx)

    def defer(self) -> None:
        """A backward is over: from here to the next boundary only waits for other ranks are interrupted."""
        self._calls.defer(True)

    def commit(self) -> None:
        """An optimizer step is finished. In local training it is one of all ranks if they have averaged."""
        self.taken += 1
        self.committed += self._communication.has_met
        self._num_local = 0 if self._communication.has_met else self._num_local + 1
        self._is_finishing = True

    def leaves_part(self, error: Exception) -> bool:
        """Whether an average among a part of the ranks is left out, one of which is lost."""
        if not self._communication.is_in_part or not self._ours.is_call(error):
            return False
        self._communication.leave_part()
        return True

    def _settle(self) -> None:
        """Returns once all collectives that were called have ended well, on a device too.

        There waits of the host do not wait for them, and an abort would leave results that were written in
        part: nothing is taken for done before this.
        """
        if self._device.type == "cuda":
            self._group().wait_device(self._device)

    def settle_hook(self) -> None:
        """A collective was called; after a committed step nothing is done again that it has spoilt."""
        if self._is_finishing:
            self._settle()

    def undo(self) -> bool:
        """Where the run ends: puts back what the interrupted step has changed; returns if all is whole."""
        if self._is_whole and self._mark is not None and self._mark.step == self.taken:
            self._mark.restore()
        return self._is_whole

    @property
    def _is_whole(self) -> bool:
        """Whether the state is that of the last committed step, but for what can be undone."""
        mark = self._mark
        can_undo = mark is None or mark.step < self.taken or mark.has_weights
        return self._is_clean and (can_undo or self._num_backwards <= 1)

    def finishes_alone(self, error: Exception) -> bool:
        """Whether the hooks after a committed step go on without others, one of which is lost.

        All meet again at the end of the batch; a hook is not called twice.
        """
        if not self._is_finishing or not self._ours.is_call(error):
            return False
        self.is_alone = True
        end_collectives(self._ours, self._device)  # the caller writes over what they may still write to
        return True

    # ------------------------------------------------------------------ Lightning's steps

    @property
    def _loop(self) -> Any:
        return self._trainer.fit_loop.epoch_loop

    def _start_run(self, start: Callable[[], None]) -> None:
        """The hooks `on_train_start` are called once, and interrupted only where they wait for others."""
        self._calls.begin_fit()
        self.repeat(lambda: set_up_validation(self._trainer))
        start()

    def _setup_validation(self, setup: Callable[[], None]) -> None:
        """Its loaders are set up in the sanity check, or when training starts, or by a first validation."""
        assert self._journal is not None
        if self._form is not None:  # the others make theirs later, and communicate for it
            return
        with self._journal.part(VALIDATION):
            setup()
        self._journal.end(VALIDATION)

    def _check_sanity(self, check: Callable[[], None]) -> None:
        """A process that joins does without."""
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
        self._snapshot = None  # the module may have other parts than in the epoch before
        if self._deal_after is not None:
            self._deal_after = None
            self.dealer.set_ranks(self._calls.state.rank, self._trainer.world_size)

        def start_whole() -> None:
            start()
            self.dealer.check()
            if self._calls.state.generation:  # the samplers deal a whole epoch again, to other ranks
                limit_epoch(self._trainer)

        self.repeat(start_whole, is_new_epoch=True)

    def _advance(self, advance: Callable[[Any], None], fetcher: Any) -> None:
        if self._form is not None:
            self._enter(self._form)
        is_meeting = False

        def attempt() -> None:
            nonlocal is_meeting
            is_meeting = self._begin()
            if is_meeting:
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
            else:
                advance(fetcher)

        while not (is_through := self._is_through(attempt)) or is_meeting:
            if self._go_on(has_met=is_through and is_meeting):
                break
            is_meeting = False
        self._end_phase()

    def _end_phase(self) -> None:
        """A part of the loops is finished; where the others were here already, all go on together."""
        self._is_finishing = False
        self._phase += 1
        self.is_alone = self._phase < self._last_phase

    def _is_through(self, attempt: Callable[[], None]) -> bool:
        """Calls a function; returns False if it was interrupted, and the ranks that are left are to meet."""
        try:
            try:
                attempt()
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

    def _begin(self) -> bool:
        """A boundary; returns whether all meet there. What has come before is committed.

        The alarm may ring again.
        """
        self._calls.defer(True)
        self._num_backwards = 0
        progress = self._loop.batch_progress.current
        window = self._trainer.accumulate_grad_batches
        in_window = progress.completed % window
        if in_window == 0:
            self.batch = self._output = None
            if self._deal_after is not None and self.committed > self._deal_after:
                self._deal(progress.completed, anew=True)
            if self._snapshot is None:
                self._snapshot = ModuleSnapshot(self._trainer.lightning_module)
                self._counters = loop_counters(self._trainer)
            self._mark = Mark(
                self._trainer,
                self._snapshot,
                self._communication,
                self._counters,
                self.taken,
                has_weights=self._has_several,
            )
            self._num_rows = self._loggers.begin(self.committed)
        self._calls.defer(False)
        number = (self.committed << 32) + self._num_local * window + in_window
        self._calls.place_boundary(number, may_meet=in_window == 0 and self._communication.has_met)
        return self._boundary()

    def note_output(self, output: Any) -> None:
        """What `training_step` has returned for the batch; the graph of its loss is not kept alive."""
        if isinstance(output, Mapping):
            loss = output.get("loss")
            output = {**output, "loss": loss.detach()} if isinstance(loss, torch.Tensor) else output
        self._output = output.detach() if isinstance(output, torch.Tensor) else output

    def _end_advance(self, end: Callable[[Any], None], fetcher: Any) -> None:
        """Validation, if it is time."""
        if self._validates and (validates_now(self._trainer) or self._trainer.val_check_batch is None):
            self.repeat(lambda: end(fetcher))
        else:
            end(fetcher)
            self._end_phase()

    def _end_run(self, end: Callable[[], None]) -> None:
        self._calls.stop_instead_of_leaving()
        self.repeat(end)
        self._calls.defer(False)  # nothing that follows is repeated

    def repeat(self, phase: Callable[[], None], *, is_new_epoch: bool = False) -> None:
        """A part of the loops that takes no steps. It is repeated from its beginning, or that of the whole.

        At the begin of a new epoch the batches that are counted are those of the one before.
        """
        if self._is_repeating or self._is_joining:  # who joins meets nobody yet
            phase()
            return
        self._is_repeating = True
        mark = PhaseMark(self._trainer, self._trainer.lightning_module)
        num_rows = self._loggers.begin(self.committed)

        def attempt() -> None:
            self._calls.defer(False)
            self._ours.interrupt.check()
            phase()
            self._settle()
            self._calls.defer(True)

        try:
            while not self._is_through(attempt):
                self._mark = None  # the step is over
                mark.restore_weights()  # others may copy them
                self._loggers.undo(num_rows)
                self._go_on(num_batches=0 if is_new_epoch else None)
                mark.restore()
        finally:
            self._is_repeating = False
        self._end_phase()

    # ------------------------------------------------------------------ recovery

    def _go_on(self, num_batches: int | None = None, *, has_met: bool = False) -> bool:
        """Meets the others again; returns whether the batch is finished, so that it is not done again.

        Args:
            num_batches: so many of the epoch are used; None for what the loop has counted.
            has_met: whether this rank stands at the boundary where all meet.
        """
        step, mark = self.committed, self._mark
        error = self._calls.error
        is_over = mark is None or mark.step < self.taken
        in_round, is_local = self._communication.is_in_round, self._communication.is_local
        form = self._regroup(
            is_trying=not is_over and (in_round or not is_local) and not has_met, has_met=has_met
        )
        is_lifted = form.step > step and (in_round or not is_local)
        self.committed = form.step
        self._last_phase = form.phase
        self.is_alone = self._phase < form.phase
        self.taken += is_lifted
        self._num_local = 0 if is_lifted else self._num_local
        is_undone = not is_over and not is_lifted and not in_round
        if num_batches is None:
            num_batches = self._loop.batch_progress.current.ready
        if is_undone and mark is not None:
            mark.restore()
            self._loggers.undo(self._num_rows)
            num_batches = mark.num_batches
        elif (is_lifted or in_round) and mark is not None:
            steps = self._loop.automatic_optimization.optim_progress.optimizer.step
            while steps.total.ready < mark.steps_completed + 1:
                steps.increment_ready()
            while steps.total.completed < mark.steps_completed + 1:
                steps.increment_completed()
        self._deal(num_batches, anew=form.is_met or not self._communication.is_local)
        self._loggers.take_over()
        self._tell(form, error)
        if in_round and not is_lifted:
            self._calls.defer(True)
            if not self._is_through(self._communication.complete_round):
                return self._go_on()
            self.commit()
        if is_undone and mark is not None:
            mark.restore_random()
            return False
        progress = self._loop.batch_progress.total
        if mark is not None and progress.completed < progress.ready:
            self._calls.defer(True)
            self.is_alone = True  # the others have done so, and would not answer
            finish_batch(self._trainer, self.batch, self._output)
        return True

    def _regroup(self, *, is_trying: bool, has_met: bool) -> NewGeneration:
        """Answers the call, and enters the generation that follows; anew if another rank is lost."""
        calls = self._calls
        entered: list[NewGeneration] = []
        has_collected = False

        def look() -> None:
            nonlocal has_collected
            if not has_collected:  # what was left of an earlier group, while the server waits for all anyway
                gc.collect()
            has_collected = True
            self._ours.check_end()

        def attempt() -> None:
            phase = 0 if self._communication.is_local else self._phase
            form = calls.wait_for_generation(
                Progress(self.committed, is_clean=self._is_whole, is_trying=is_trying, phase=phase), look
            )
            if form is None:  # the Trainer is torn down as after a fit, and all ends
                self.is_alone = calls.has_left = True
                end_after_teardown(self._trainer)
                raise silent_end(self._trainer)
            group = self._meet(form)
            if form.behind:
                self._copy_state(form, group)
            if form.joined:
                self._hand_over(form, group)
            self._settle()
            calls.settle()
            entered.append(form)

        while not entered:
            self._stop(has_met=has_met)
            has_met = False
            self._is_through(attempt)
        self._handover = None
        return entered[0]

    def _stop(self, *, has_met: bool = False) -> None:
        """Lets go of the others: nothing that this process has called or queued goes on."""
        self._communication.halt()
        self._ours.forget_device()
        self._calls.stop(has_met=has_met)
        leave(self._ours, self._trainer.strategy.model, self._device)

    def _hand_over(self, form: NewGeneration, group: Group) -> None:
        """Sends all that this rank has to those that join, or takes it. All ranks call it; communicates."""
        source = form.members.index(form.source)
        sent = self._handover if group.rank == source else None
        received = broadcast_nested(group, sent, source, self._device, label="state for a rank that joins")
        if self._calls.state.place in form.joined:
            self._handover = received
            received.restore(self._trainer, self._communication)

    # ------------------------------------------------------------------ a process that joins

    def _join(self) -> None:
        """Waits until the others let this process in, and takes their state over."""
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
            self._is_through(attempt)
        assert self._handover is not None
        form, self._form = self._form, None
        prepare_loaders(self._trainer, validates=self._handover.validates)
        self._journal.end(VALIDATION)
        self._form = form

    def _enter(self, form: NewGeneration) -> None:
        """Before the first step of a process that has joined."""
        assert self._handover is not None
        self._handover.restore_loops(self._trainer, self.dealer)
        self._num_recoveries = self._handover.num_recoveries
        self.committed = self.taken = form.step
        self._phase = self._last_phase = form.phase
        self._deal(self._handover.num_batches, anew=True)
        seed_generators(seed=global_seed(), rank=self._calls.state.place, step=form.step)
        self._members = form.before
        self._loggers.take_over()
        self._tell(form, None)
        self._form = self._handover = None
        self._is_joining = False

    # ------------------------------------------------------------------ after each regroup

    def _copy_state(self, form: NewGeneration, group: Group) -> None:
        """Gives ranks that are a step behind what one that is not has. All ranks call it; communicates.

        Learning rates stay: the scheduler's step after this one is still to come on a rank that is behind.
        """
        is_behind = self._calls.state.place in form.behind
        source, device = form.members.index(form.source), self._device
        self._is_clean = not is_behind
        takes, is_local = is_behind and not self._communication.keeps_parameters, self._communication.is_local
        parameters: list[torch.Tensor] = list(self._trainer.lightning_module.parameters())
        if not takes and group.rank != source:  # in local training others have parameters of their own
            parameters = [parameter.detach().clone() for parameter in parameters]
        broadcast_coalesced(group, parameters, source)
        for optimizer in self._trainer.strategy.optimizers:
            mine = optimizer.state_dict()
            state = broadcast_nested(group, mine["state"], source, device, label="state of an optimizer")
            if takes and not is_local:
                optimizer.load_state_dict({**mine, "state": state})
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            state = broadcast_nested(group, scaler.state_dict(), source, device, label="loss scale")
            if is_behind:
                put_scale(scaler, state)
        self._communication.copy_state(group, source, device, is_behind=is_behind)
        self._settle()
        self._is_clean = True
        if is_behind:  # also where another one is lost before all have gone on
            self.committed = form.step

    def _deal(self, num_batches: int, *, anew: bool) -> None:
        """Deals the rest of the epoch; if not anew, each rank goes on with its part until ranks have met."""
        rank, world_size, states = self._calls.state.rank, self._trainer.world_size, RandomStates()
        self._deal_after = None if anew else self.committed
        if anew:
            self.dealer.deal(num_batches, rank, world_size)
        else:
            self.dealer.deal_as_before(num_batches)
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

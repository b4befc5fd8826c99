"""Training that continues in the same `fit` after a rank is lost.

Methods of Lightning's loops are wrapped: a failure that interrupts them is caught, the remaining ranks meet
again, and what was interrupted is finished if it is committed, or else repeated from the last boundary.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from lightning_ddp._lightning import (
    Trainer,
    append_to_csv,
    batches_that_stepped,
    before_updates,
    end_after_teardown,
    enter_epoch,
    fetch_anew,
    finish_batch,
    forget_loaders,
    limit_epoch,
    limit_validation,
    loaders_made,
    loaders_of,
    put_loaders,
    running_hook,
    silent_end,
    validates_now,
    wrap_steps,
)
from lightning_ddp.comm import barrier, broadcast_nested, monitored_barrier
from lightning_ddp.comm.collectives import broadcast_coalesced
from lightning_ddp.comm.group import Group
from lightning_ddp.communication import Communication
from lightning_ddp.elastic import StepObserver, WorldChange
from lightning_ddp.elastic.redeal import Dealer, set_ranks
from lightning_ddp.elastic.regroup import end_collectives, leave
from lightning_ddp.elastic.step_ledger import Cursor, RandomStates, StepLedger, put_scale
from lightning_ddp.elastic.takeover import Handover, Journal, seed_generators, share_versions
from lightning_ddp.launch.failure_handler import FailureHandler
from lightning_ddp.launch.job_context import JobContext, global_seed
from lightning_ddp.launch.process_end import tell_long_wait
from lightning_ddp.launch.recovery_client import RecoveryClient
from lightning_ddp.launch.step_stop import StepStop
from lightning_ddp.supervise.orders import NewGeneration

T = TypeVar("T")
_log = logging.getLogger("lightning_ddp")


def _forget_frames(*errors: BaseException | None) -> None:
    """Clear the tracebacks of errors and of their causes, whose frames would keep process groups alive."""
    waiting, seen = [*errors], set[int]()
    while waiting:
        error = waiting.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            error.__traceback__ = None
            waiting += error.__cause__, error.__context__


class Recovery(StepObserver):
    """Observer that lets one `fit` continue after ranks are lost, join or leave, by wrapping its loops.

    `group` returns the present ranks; `meet` makes the process group of a generation, and all that depends on
    it. `stop` agrees on boundaries. Where processes may join, `journal` is that of the set-up.

    Collective: all ranks must construct it, except those that join.
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
        group: Callable[[], Group],
        meet: Callable[[NewGeneration], None],
        stop: StepStop,
        journal: Journal | None,
    ) -> None:
        self._context, self._trainer, self._communication = context, trainer, communication
        self._device = trainer.strategy.root_device
        self._group, self._meet, self._stop = group, meet, stop
        self._keeps_global = keeps_global
        self.dealer = Dealer(trainer, keeps_global=keeps_global, fills=not is_uneven)
        self.ledger = StepLedger(trainer, communication, keeps_marks=True)
        self._members = tuple(range(trainer.world_size))
        """Slots of the generation that was told of last, by rank."""
        self._num_recoveries = 0  # of generations after a failure; not of those that others joined or left
        self._is_meeting = False  # True if this rank stands at the boundary where all meet
        self._replaces = journal is not None
        self._journal = journal or Journal(context)  # else empty, as nobody joins
        self._is_joining = context.is_joining
        self._handover: Handover | None = None  # state that members make for processes that join
        self._joined: NewGeneration | None = None  # generation that it has joined, until its first step
        share_versions(trainer)
        if journal is not None and importlib.util.find_spec("omegaconf") is not None:
            # as the first checkpoint would, in a third of a second, when another process joins
            importlib.import_module("omegaconf")
        wrap_steps(trainer, self)
        before_updates(trainer, self._begin_update)
        for loader in loaders_of(trainer.fit_loop):  # made already, to count the steps of a schedule
            self.dealer.adopt(loader)

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
        """Allow ranks to be lost and to leave from now on. Collective, except in a process that joins."""
        super().begin_fit()
        self._calls.defer(True)  # from here to the first barrier only waits for other ranks are interrupted
        self._calls.may_leave = True
        num_before = self._calls.state.begun - 1
        if self._replaces and num_before > 0 and self._trainer.is_global_zero:
            _log.warning(
                "on_failure='replace': no process can join this fit, as it would have to repeat the %d run(s)"
                " of the script before it. After a loss training continues on fewer ranks. Fit first, or in"
                " a program of its own.",
                num_before,
            )
        if not self._is_joining:  # what is repeated goes on without a rank that is lost before all are here
            self._completes(lambda: barrier(self._group(), self._device, "before ranks may be lost"))

    def end_forward(self, batch: Any, output: Any) -> None:
        self.ledger.note_output(batch, output)

    def begin_backward(self, loss: torch.Tensor) -> torch.Tensor:
        loss = super().begin_backward(loss)
        is_split = self._keeps_global and self._calls.state.generation
        return loss * self.dealer.weight(self._loop.batch_idx) if is_split else loss

    def end_backward(self) -> None:
        """Defer interrupts by failures until the next step boundary, except in waits for other ranks."""
        self._calls.defer(True)

    def agree(self) -> None:
        self.ledger.agree()

    def _begin_update(self) -> None:
        self._settle()
        self.ledger.begin_update()

    def _settle(self) -> None:
        """Wait until the group's collectives on a GPU have succeeded, as an abort leaves half a result."""
        if self._device.type == "cuda":
            self._group().wait_device(self._device)

    def together(self, call: Callable[[], T], alone: Callable[[], T]) -> T:
        """Return a collective's result; if a rank is lost after the step is committed, `alone()` instead."""
        try:
            result = call()
            if self.ledger.cursor is Cursor.COMMITTED:
                self._settle()
            return result
        except Exception as error:
            if self.ledger.cursor is not Cursor.COMMITTED or not self._calls.is_call(error):
                raise
        self.ledger.finish_alone()
        end_collectives(self._ours, self._device)  # the caller writes over what they may still write to
        return alone()

    # ------------------------------------------------------------------ Lightning's steps

    @property
    def _loop(self) -> Any:
        return self._trainer.fit_loop.epoch_loop

    def check_sanity(self, check: Callable[[], None]) -> None:
        """Set up validation loaders and run the sanity check; a joining process joins the run instead."""
        self.repeat(self._set_up_validation)  # in all processes at the same point of the set-up
        if self._is_joining:
            self._join()
            return
        num_results = len(self._journal.results)
        self.repeat(check)
        del self._journal.results[num_results:]  # who joins does not run it

    def _set_up_validation(self) -> None:
        if self._trainer.enable_validation:
            self._trainer.validating = True
            self._loop.val_loop.setup_data()
            self._trainer.training = True

    def start_epoch(self, start: Callable[[], None]) -> None:
        """Begin a training epoch, again if ranks are lost; a joined process enters the running one."""
        self._journal.end()
        if self._joined is not None:  # of an epoch that has begun for the others
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

    def advance(self, advance: Callable[[Any], None], fetcher: Any) -> None:
        """Run a training batch; after a loss of ranks, repeat it, or finish it if its step is committed."""
        if self._joined is not None:
            self._enter_late(self._joined)

        def attempt() -> None:
            if self._begin():
                self._meet_at_boundary()
            else:
                advance(fetcher)

        try:
            self._through(attempt, lambda: not self.ledger.must_redo)
            self.ledger.end_phase()
        except StopIteration:  # the rest of the epoch is skipped
            self.ledger.skip_rest()
            if not self._communication.is_local or self._agree():
                raise

    def _begin(self) -> bool:
        """Record a batch boundary; return True if all ranks pause there because ranks join or leave."""
        self._calls.defer(True)
        may_meet = self.ledger.reach_boundary()
        self._calls.defer(False)
        self._calls.place_boundary((self.ledger.step << 32) + self.ledger.num_in_unit, may_meet=may_meet)
        return self._stop.check()

    def _meet_at_boundary(self) -> None:
        """Prepare to form a new process group as ranks join or leave. All ranks call it; communicates."""
        self._calls.meet()
        if self._calls.state.order.has_new:
            self._handover = Handover.of(
                self._trainer, self._communication, self.dealer, num_recoveries=self._num_recoveries
            )
        if self._device.type == "cuda":  # or an abort here cuts off what another one still receives
            self._settle()
            limit = timedelta(seconds=self._group().timeout_s(self._device))
            monitored_barrier(self._group(), "before ranks join or leave", timeout=limit)
        self._calls.defer(True)
        self._is_meeting = True

    def end_advance(self, end: Callable[[Any], None], fetcher: Any) -> None:
        """Validate after a batch if due; in local training average parameters first, also at epoch end."""
        trainer = self._trainer  # time decides where there is no interval
        validates = validates_now(trainer) or (trainer.val_check_batch is None and trainer.enable_validation)
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
        """Average the parameters over all ranks; return False if a loss of ranks undid steps. Collective."""

        def agree() -> None:
            if self._communication.agree():
                self.ledger.agree()

        return self.repeat(agree)

    def end_run(self, end: Callable[[], None]) -> None:
        """Run the hooks `on_train_end`, again if ranks are lost; a request to leave then stops all ranks."""
        if running_hook(self._trainer.lightning_module) is None:  # else of a callback that tries some steps
            self._calls.stop_instead_of_leaving()
        self.repeat(end)
        self._calls.defer(False)  # nothing that follows is repeated

    def repeat(self, phase: Callable[[], None], *, is_new_epoch: bool = False) -> bool:
        """Run `phase` (no optimizer steps), again if ranks are lost; return False if that undid steps.

        It is repeated from its beginning, by all ranks or, once all have come to its end, by none.
        `is_new_epoch` if the loop still counts the batches of another epoch.
        """
        if self.ledger.phase_mark is not None or self._is_joining:  # who joins meets nobody yet
            phase()
            return True
        self.ledger.begin_phase()
        num_results, loaders = len(self._journal.results), loaders_made(self._trainer)

        def attempt() -> None:
            if self.ledger.is_alone:  # all have come to its end, and others have gone on
                return
            del self._journal.results[num_results:]  # of an attempt that was interrupted
            put_loaders(self._trainer, loaders)  # else one that is whole here is not made again, as by others
            self._calls.defer(False)
            self._ours.interrupt.check()
            phase()
            barrier(self._group(), self._device, "end of a part of the loops")
            self._settle()
            self._calls.defer(True)

        num_batches = 0 if is_new_epoch else None
        try:
            is_finished = self._through(attempt, lambda: self.ledger.must_redo, num_batches)
        finally:
            self.ledger.phase_mark = None
        if is_finished:
            self.ledger.end_phase()
        return is_finished

    # ------------------------------------------------------------------ recovery

    def _through(
        self, work: Callable[[], None], is_over: Callable[[], bool], num_batches: int | None = None
    ) -> bool:
        """Call `work` until it completes; after each loss regroup, and return False if `is_over()`."""
        while not self._completes(work) or self._is_meeting:
            self._enter(num_batches)
            if is_over():
                return False
        return True

    def _completes(self, work: Callable[[], None]) -> bool:
        """Call `work`; return False if a loss of ranks interrupted it and the remaining ranks regroup."""
        try:
            try:
                work()
                return True
            except Exception:
                self._calls.defer(True)
                raise
        except Exception as error:  # also where the alarm rang before it was deferred
            self._calls.defer(True)
            if not self._calls.is_call(error):
                raise
            _forget_frames(error, self._calls.error)
        return False

    def _let_go(self, *, has_met: bool = False) -> None:
        """Report that this rank stops, abort its collectives and queued communication, and destroy groups."""
        self._communication.halt()
        self._ours.forget_device()
        self._calls.stop(has_met=has_met)
        leave(self._ours, self._trainer.strategy.model, self._device)

    def _enter_next(self, wait: Callable[[], NewGeneration], *, has_met: bool = False) -> NewGeneration:
        """Join and return the new set of ranks from `wait`, or a later one if a rank is lost meanwhile."""
        entered: list[NewGeneration] = []

        def attempt() -> None:
            new = wait()
            self._meet(new)
            if not self._is_joining:
                self.ledger.settle(new)
            if new.behind:
                self._copy_state(new)
            if new.joined:
                self._hand_over(new)
            self._settle()
            self._calls.settle()
            entered.append(new)

        self._let_go(has_met=has_met)
        while not self._completes(attempt):
            self._let_go()
        return entered[-1]

    def _enter(self, num_batches: int | None) -> None:
        """Join the next set of ranks; finish or undo the interrupted step, after `num_batches` batches."""
        has_met, self._is_meeting = self._is_meeting, False
        is_trying = self.ledger.must_redo and not has_met

        def wait() -> NewGeneration:
            progress = self.ledger.progress(is_trying=is_trying)
            new = self._calls.wait_for_generation(progress, self._ours.check_end)
            if new is None:  # the Trainer is torn down as after a fit, and all ends
                self._calls.has_left = True
                self.ledger.finish_alone()
                end_after_teardown(self._trainer)
                raise silent_end(self._trainer)
            return new

        new = self._enter_next(wait, has_met=has_met)
        self._handover = None
        if self.ledger.must_redo and self.ledger.mark is not None:
            num_batches = self.ledger.mark.num_batches
        if num_batches is None:
            num_batches = self._loop.batch_progress.current.ready
        self._deal(num_batches)
        self._journal.publish()  # rank 0 may have been lost before it has
        self._tell(new)
        if self.ledger.cursor is Cursor.COMMITTED:
            self._calls.defer(True)
            self.ledger.finish_alone()  # the others have done so, and would not answer
            finish_batch(self._trainer, self.ledger.batch, self.ledger.output)
        self.ledger.resume()

    def _hand_over(self, new: NewGeneration) -> None:
        """Broadcast one rank's training state to the ranks that join. All ranks call it; communicates."""
        source = new.members.index(new.source)
        sent = self._handover if self._group().rank == source else None
        received = broadcast_nested(self._group(), sent, source, self._device, label="state to join with")
        if self._calls.state.place in new.joined:
            self._handover = received
            received.restore(self._trainer)
            self._communication.settle_others()

    # ------------------------------------------------------------------ a process that joins

    def _join(self) -> None:
        """Wait until the running ranks admit this process, and take over their training state."""
        self._trainer.fit_loop.setup_data()
        self._calls.defer(True)

        def look() -> None:
            self._ours.check_whether_late()
            self._ours.check_end()

        def wait() -> NewGeneration:
            with tell_long_wait(self._calls.state.place, lambda: "the other ranks to let it join"):
                new = self._calls.wait_for_generation(None, look)
            if new is None:
                self._ours.leave_late()
            assert new is not None
            return new

        self._joined = self._enter_next(wait)
        assert self._handover is not None
        trainer: Any = self._trainer
        if trainer.reload_dataloaders_every_n_epochs:  # the others may have other ones in this epoch
            self.ledger.finish_alone()
            for loop in (trainer.fit_loop, self._loop.val_loop):
                forget_loaders(loop)
            self._set_up_validation()
            trainer.fit_loop.setup_data()
            self.ledger.last_phase = self.ledger.phase
        self._handover.restore_reload_epochs(trainer)

    def _enter_late(self, new: NewGeneration) -> None:
        """Restore loop counters and data position, and seed, before a joined process's first step."""
        assert self._handover is not None
        self._handover.restore_loops(self._trainer, self.dealer)
        self._num_recoveries = self._handover.num_recoveries
        self.ledger.step, self.ledger.phase, self.ledger.last_phase = new.step, new.phase, new.phase
        self._deal(self._handover.num_batches)
        seed_generators(seed=global_seed(), rank=self._calls.state.place, step=new.step)
        self._members = new.before
        self._tell(new)
        self._joined = self._handover = None
        self._is_joining = False

    # ------------------------------------------------------------------ after each regroup

    def _copy_state(self, new: NewGeneration) -> None:
        """Copy the training state to ranks that are behind, or differ. All ranks call it; communicates."""
        is_behind = self._calls.state.place in new.behind
        group, source, device = self._group(), new.members.index(new.source), self._device
        communication, trainer = self._communication, self._trainer
        if is_behind:
            self.ledger.begin_copy()
        module = trainer.lightning_module
        averaged = module.buffers() if communication.averager is not None else ()
        for tensors, is_taken in (
            (module.parameters(), is_behind),
            (averaged, is_behind and communication.is_local),
        ):
            mine: list[torch.Tensor] = list(tensors)
            if not is_taken and group.rank != source:  # in local training others have tensors of their own
                mine = [tensor.detach().clone() for tensor in mine]
            broadcast_coalesced(group, mine, source)
        for optimizer in trainer.strategy.optimizers:
            own = optimizer.state_dict()
            state = broadcast_nested(group, own["state"], source, device, label="state of an optimizer")
            # learning rates stay: the scheduler's step after this one is still to come on a rank behind
            if is_behind and not communication.keeps_optimizer:
                optimizer.load_state_dict({**own, "state": state})
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            state = broadcast_nested(group, scaler.state_dict(), source, device, label="loss scale")
            if is_behind and not communication.is_local:
                put_scale(scaler, state)
        communication.copy_state(group, source, device, is_behind=is_behind)
        self._settle()
        if is_behind:  # also where another one is lost before all have gone on
            self.ledger.end_copy(new.step)

    def _deal(self, num_batches: int) -> None:
        """Redistribute the epoch's unused samples over the present ranks, and drop prefetched batches."""
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

    def _tell(self, new: NewGeneration) -> None:
        """Report a change of the ranks to callbacks, module and loggers, and on rank 0 to the log."""
        before, self._members = self._members, new.members  # generations that were never whole are not told
        gone = tuple(rank for rank, slot in enumerate(before) if slot not in new.members)
        left = tuple(rank for rank in gone if before[rank] in new.left)
        lost = tuple(rank for rank in gone if rank not in left)
        joined = tuple(rank for rank, slot in enumerate(new.members) if slot not in before)
        if not gone and not joined:  # one that was to join has died
            return
        trainer: Any = self._trainer
        own, cause = self._calls.state.place, self._calls.state.cause
        change = WorldChange(
            old_world_size=len(before),
            new_world_size=len(new.members),
            old_rank=before.index(own) if own in before else None,
            new_rank=self._calls.state.rank,
            lost_ranks=gone,
            joined_ranks=joined,
            step=trainer.global_step,
            seconds=time.monotonic() - self._calls.heard_at,
            cause=cause.to_error() if cause is not None and lost else None,
            retried=new.is_retried,
        )
        self._num_recoveries += bool(lost)
        if change.new_rank == 0:
            for logger in trainer.loggers if change.old_rank != 0 else ():
                append_to_csv(logger)
            was = "were lost" if len(lost) > 1 else "was lost"
            said = [
                f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {verb}"
                for ranks, verb in ((lost, was), (left, "left"), (joined, "joined"))
                if ranks
            ]
            _log.warning(
                "%s at step %d; training continues on %d ranks (recovered in %.2f s)",
                *(", ".join(said), change.step, change.new_world_size, change.seconds),
            )
        for callback in trainer.callbacks:
            if hasattr(callback, "on_world_changed"):
                callback.on_world_changed(trainer, trainer.lightning_module, change)
        if hasattr(trainer.lightning_module, "on_world_changed"):
            trainer.lightning_module.on_world_changed(change)
        metrics = {
            "recovery/count": float(self._num_recoveries),
            "recovery/seconds": change.seconds,
            "recovery/world_size": float(change.new_world_size),
        }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=batches_that_stepped(trainer))

"""Supervision of one process: reports its failure, and interrupts it for another rank's."""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import signal
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any

from lightning_ddp._lightning import Trainer, running_hook, stop_exceptions
from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.comm.device_watch import DeviceWatch
from lightning_ddp.comm.nccl import WATCHDOG_VARIABLES
from lightning_ddp.comm.teardown import (
    abort_groups,
    before_gloo_ends_the_process,
    explain_retired,
    flush_output,
)
from lightning_ddp.errors import LightningDDPError, PeerFailure
from lightning_ddp.hydra_jobs.jobs import restore
from lightning_ddp.launch.child_process import guarded_by, launcher_pid, outlive_parent
from lightning_ddp.launch.children import Children
from lightning_ddp.launch.desync_reporter import DesyncReporter
from lightning_ddp.launch.process_end import (
    EndLimit,
    exit_now,
    fill_error_file,
    second_interrupt_ends,
    tell_long_wait,
)
from lightning_ddp.launch.recovery_client import Cause, RecoveryClient, cause_of_error, interruption_behind
from lightning_ddp.launch.zygote import was_passed_on
from lightning_ddp.supervise.client import ControlClient, ServerAddress
from lightning_ddp.supervise.failure_detection import ECHO_WAIT_S, EXIT_WAIT_S
from lightning_ddp.supervise.failure_record import FailureRecord, Identity, Where, render, shortened
from lightning_ddp.supervise.guard import forbid_stack, permit_stack, tell_guard
from lightning_ddp.supervise.interrupt_guard import InterruptGuard
from lightning_ddp.supervise.orders import Wish, WishKind
from lightning_ddp.supervise.protocol import Exited, Failed, Message, Saved, Start
from lightning_ddp.supervise.rank_state import Passage
from lightning_ddp.supervise.server import ControlServer
from lightning_ddp.supervise.settings import SupervisionSettings

_SWITCH_VARIABLE = "LIGHTNING_DDP_SUPERVISION"
_MOST_INTERRUPTIONS = 3
_LONGEST_END_S = 1800.0
_OWN_WORD_S = 0.3
"""Seconds that a rank continues after another one raised, as it may be about to raise the same."""


def is_enabled() -> bool:
    """Return True if the processes of a job are supervised: unless LIGHTNING_DDP_SUPERVISION=0."""
    return os.environ.get(_SWITCH_VARIABLE, "1") != "0"


def _options(settings: SupervisionSettings) -> dict[str, object]:
    """Return the options of supervision that are the same in all runs of a script, by their public names."""
    return {
        "heartbeat_timeout_s": settings.heartbeat_timeout_s,
        "failure_grace_s": settings.failure_grace_s,
        "stall_timeout": settings.stall_timeout_s,
        "on_failure": settings.recovery or "stop",
        "on_preemption": settings.preemption or "stop",
        "replica_check": "warn" if settings.replicas is None else settings.replicas.name,
    }


class _State(Enum):
    """State of a process's main thread: between runs, in a run, reporting its failure, or failed."""

    IDLE = auto()  # code of the script, outside of a run
    RUNNING = auto()  # a run: a fit, a test ...
    ENDING = auto()  # it has raised, and reports that
    OVER = auto()  # it has failed, or unwinds from a failure: nobody answers collectives


class FailureHandler:
    """Supervision of one process: reports its failure, and interrupts it if another rank has failed.

    Used in the main thread.
    """

    def __init__(self, children: Children) -> None:
        self.interrupt = Interrupt()
        self.alarm = InterruptGuard()
        self.server: ControlServer | None = None
        self.watch: ControlClient | None = None
        self.calls: RecoveryClient | None = None  # None if a failure ends the job
        self.inspector = DesyncReporter(self.interrupt, self._position)
        self.save_last: Callable[[], str | None] | None = None
        """Function that saves a checkpoint where a failure ends a fit, and returns its path."""
        self.end_script: Callable[[BaseException | None], BaseException | None] | None = None
        """Function that ends, with an error or None, a run as long as the script; None without such a run."""
        self._pid = os.getpid()
        self._state = _State.IDLE
        self._depth = 0  # number of runs within each other
        self._children = children
        self._trainer: Callable[[], Trainer | None] = lambda: None
        self._settings = SupervisionSettings()
        self.end_limit = EndLimit()
        self._own: FailureRecord | None = None
        self._variables: dict[str, str | None] = {}
        self._handlers: dict[int, partial[None]] = {}
        """Handlers of the signals that stop all ranks, each with the one that it has replaced."""
        self._num_signals = 0

    # ------------------------------------------------------------------ what is known

    @property
    def is_over(self) -> bool:
        """True if this process has failed, or is a rank's fork, so that it calls no collectives."""
        return self._state is _State.OVER or self.is_inherited

    @property
    def has_met(self) -> bool:
        """True if all ranks have connected to the control server, or supervision is switched off."""
        return self.watch.has_met if self.watch is not None else not is_enabled()

    @property
    def has_left(self) -> bool:
        """True if this process has left the run on request, and exits while the other ranks continue."""
        return self.calls is not None and self.calls.has_left

    @property
    def has_failed(self) -> bool:
        """True if a failure of the job, or of this process, is known."""
        return self.first_failure() is not None or self.is_ending

    @property
    def identity(self) -> Identity | None:
        """Identity of this process (rank, node, host, pid) once it has connected to the server, else None."""
        return self.watch.identity if self.watch is not None else None

    @property
    def is_inherited(self) -> bool:
        """True in a process that user code has forked from a rank, and that is no rank."""
        return os.getpid() != self._pid

    @property
    def is_launcher(self) -> bool:
        """True if this process starts the other ranks of its node."""
        return self._children.launch is not None

    @property
    def is_ending(self) -> bool:
        """True if this process unwinds from a failure, or will in a moment."""
        return self.is_over or self.interrupt.error is not None

    def _position(self) -> Where:
        """Return global step and running hook or stage of this rank's Trainer. Thread-safe."""
        trainer = self._trainer()
        module = None if trainer is None else trainer.lightning_module
        if trainer is None or module is None:
            return Where()
        return Where(step=trainer.global_step, phase=running_hook(module) or trainer.state.stage)

    def _where(self) -> Where:
        """Restart the stall timer; return step, hook, awaited collective and progress count of this rank."""
        self.end_limit.expect_progress()
        activity = self.interrupt.activity
        return replace(self._position(), waits_for=activity.label, count=activity.count)

    def first_failure(self) -> FailureRecord | None:
        """Return the record of the job's first failure, as far as this process knows it, or None."""
        known = self.server.first_failure if self.server is not None else None
        return known or (self.watch.failure if self.watch is not None else None)

    def wait_for_verdict(self, timeout_s: float) -> FailureRecord | None:
        """Wait up to `timeout_s` seconds until the job's first failure is known; return it, or None."""
        known_by = self.watch or self.server
        if known_by is not None:
            known_by.wait_for_verdict(timeout_s)
        return self.first_failure()

    def check_end(self) -> None:
        """Raise `PeerFailure` if the job has ended with a failure."""
        if self.watch is not None and self.watch.failure is not None:
            raise self.watch.failure.to_error(self.watch.identity.rank)

    # ------------------------------------------------------------------ connecting

    def connect(self, server: ServerAddress, identity: Identity, settings: SupervisionSettings) -> None:
        """Connect to the control server, and start supervision, in which the launcher's end is a failure."""
        self._settings = self.end_limit.settings = settings
        parent_pid, parent, called_within_s = launcher_pid(), None, ECHO_WAIT_S + 3.0
        if identity.node_rank != server.identity.node_rank:
            called_within_s += settings.heartbeat_timeout_s  # the order has to come from there
            if parent_pid is not None:
                parent = Identity(rank=-1, node_rank=identity.node_rank, pid=parent_pid)
        elif parent_pid == server.identity.pid:
            parent = server.identity
        self.watch = ControlClient(
            server,
            identity,
            settings,
            on_failure=self._learned,
            on_order=lambda error: None if self.calls is None else self.calls.on_order(error),
            where=self._where,
            parent=parent,
            on_message=self._on_message,
            is_launcher=self._children.are_of_this_process,
        )
        if settings.recovery is not None:
            self.interrupt.may_abort = True
            with self.watch.lock:
                self.calls = RecoveryClient(self.interrupt, self.alarm, self.watch, called_within_s)
                if self.watch.state.is_called:  # the order came before there was a client to handle it
                    self.calls.on_order(self.watch.state.error)
        permit_stack()
        self._tell_guard(None)
        self.inspector.attach(self.watch)
        self.interrupt.device_watch = DeviceWatch(self.interrupt, self._device_failed)
        before_gloo_ends_the_process(self._gloo_failed)
        if parent_pid is not None:
            outlive_parent()

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Start):
            self._children.start_again(message.slot, message.number)
        else:
            self.inspector.on_message(message)

    def follow(self, trainer: Trainer) -> None:
        """Report step and hook of this Trainer, held by a weak reference, to the server from now on."""
        self._trainer = weakref.ref(trainer)

    def check_settings(self, settings: SupervisionSettings) -> None:
        """Warn, in rank 0, of options of a script's later strategy that differ from those in force."""
        in_force, given = _options(self._settings), _options(settings)
        if settings.replicas is None:
            del given["replica_check"]  # such a strategy sends no hashes
        stays = [f"{name} stays {in_force[name]!r}" for name in given if given[name] != in_force[name]]
        if stays and self.watch is not None and self.watch.identity.rank == 0:
            warnings.warn(
                "options of this strategy have no effect, because supervision has begun with those of the"
                f" script's first strategy: {', '.join(stays)}. Give all strategies the same ones.",
                stacklevel=2,
            )

    # ------------------------------------------------------------------ recovery

    def forget_device(self) -> None:
        """Stop watching the work that is queued on the device, as its process groups will be aborted."""
        if self.interrupt.device_watch is not None:
            self.interrupt.device_watch.forget()

    def check_whether_late(self) -> None:
        """Exit with code 0 if the job that this process is to join has ended; raise if it has failed."""
        self.interrupt.check()
        if self.watch is not None and self.watch.has_been_left:
            self.leave_late()

    def leave_late(self) -> None:
        """Kill this process's children and exit with code 0, as the job to join has ended already."""
        self._children.kill()
        exit_now(0)

    # ------------------------------------------------------------------ runs

    def run(self, trainer: Trainer | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a Trainer's function under supervision: until it returns, this process's exit is a failure."""
        if trainer is not None:
            self.follow(trainer)
        # Lightning's functions are called _fit_impl, _test_impl ...
        self.enter(getattr(function, "__name__", "run").removeprefix("_").removesuffix("_impl"))
        try:
            try:
                self.interrupt.check()
                result = function(*args, **kwargs)
            except Exception as error:
                if self.calls is not None and (retired := explain_retired(error)) is not None:
                    raise retired from error
                raise
            self.leave_together()
            return result
        except stop_exceptions():  # raised by all ranks, and no failure
            raise
        except BaseException as error:
            if self.is_inherited:
                raise
            failure, num_attempts = None, 0
            while num_attempts < _MOST_INTERRUPTIONS:  # no call before `try`: handlers run at calls
                num_attempts += 1
                try:
                    self.alarm.silence()
                    failure = self.end(error)
                    break
                except BaseException:  # noqa: BLE001 (what such a handler raised: a data loader's, Ctrl-C)
                    continue
            self._save_last(error, is_own=failure is None)
            if failure is not None:  # the echo itself explains nothing, but where it was raised does
                raise failure.with_traceback(error.__traceback__) from None
            raise
        finally:
            self.leave()

    def enter(self, name: str) -> None:
        """Begin a run (fit, test ...): allow interruptions and tell the server; only count a nested one."""
        self._depth += 1
        if self._depth == 1:
            if self._state is _State.IDLE:
                self._state = _State.RUNNING
            self.end_limit.expect_progress(True)
            self.alarm.arm()
            self.inspector.enter(name)

    def leave_together(self) -> None:
        """Wait, up to 30 minutes, until all ranks have ended the outermost run; raise if the job failed."""
        if self.watch is not None and self._depth == 1:
            limit_s = min(self.inspector.deadline_s, _LONGEST_END_S)
            self.watch.leave_run(self.inspector.leave, limit_s, self.alarm.silence)
            if self.alarm.is_silent:  # all ranks have ended the run: a failure after that is not part of it
                return
        self.check_end()  # it was told of a failure a moment ago, perhaps
        self.interrupt.check()

    def leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.end_limit.expect_progress(False)
            restore(self._variables)
            self._variables = {}
            self.alarm.silence()
            self.save_last = None
            if not self.is_over:
                self._state = _State.IDLE
                self.inspector.leave()
                if self.watch is not None:  # else the exit that may follow at once would be a failure
                    self.watch.flush()

    def set_while_running(self, variables: dict[str, str]) -> None:
        """Set environment variables until the run ends, or outside of a run until the process does."""
        if self._depth > 0:
            self._variables = {name: os.environ.get(name) for name in variables} | self._variables
        os.environ.update(variables)

    def outlive_watchdog(self) -> None:
        """Set environment variables, unless set, so that NCCL's watchdog does not end this process."""
        values = {name: os.environ.get(name, value) for name, value in WATCHDOG_VARIABLES.items()}
        self.set_while_running(values)

    # ------------------------------------------------------------------ step boundaries and signals

    def reached_step_boundary(self) -> Passage:
        """Wait at a step boundary if the server says so; return its order: go, stop, ranks join or leave."""
        self.interrupt.check()
        self.interrupt.activity.advance()
        if self.watch is None:
            return Passage.GO
        passage = self._look()
        if passage is Passage.WAIT:
            with ExitStack() as stack:
                if self.calls is not None:
                    stack.enter_context(self.calls.waiting())
                    stack.enter_context(tell_long_wait(self.watch.state.rank, lambda: "others to join"))
                while (passage := self._look()) is Passage.WAIT:
                    self.watch.wait_for_order()
                    self.interrupt.check()
        return passage

    def _look(self) -> Passage:
        assert self.watch is not None
        with self.watch.lock:
            passage = self.watch.state.look()
        if passage is Passage.STOP:
            self.watch.update(lambda state: None)  # which reports it
        return passage

    def handle_stop_signals(self) -> None:
        """Install, in the main thread, handlers of signals to stop all ranks, or leave, at a step boundary.

        In each run that is not within another one, as the script may have set handlers since the last run.
        """
        is_main = threading.current_thread() is threading.main_thread()
        is_within_another = self._depth > 1 and self._handlers
        if self.watch is None or not is_main or is_within_another:
            return
        preemption = self._settings.preemption
        for number in {signal.SIGTERM, *([] if preemption is None else [preemption.number])}:
            previous: Any = signal.getsignal(number)
            if number not in self._handlers or previous is not self._handlers[number]:
                self._handlers[number] = partial(self._on_signal, previous)
                signal.signal(number, self._handlers[number])

    def restore_sigterm(self) -> None:
        """Restore the handlers that `handle_stop_signals` replaced, except where its own is no longer set."""
        for number, handler in self._handlers.items():
            present: Any = signal.getsignal(number)
            if present is handler:
                signal.signal(number, handler.args[0] or signal.SIG_DFL)

    def _on_signal(self, previous: Any, number: int, frame: types.FrameType | None) -> None:
        """Ask to stop or leave at a step boundary; exit on a 2nd signal; between runs call the old handler.

        Also called by a handler of the script that was set over this one, and that a later one has replaced.
        """
        is_between_runs = self._depth == 0 and self.inspector.num_runs > 0
        if self.is_inherited or (is_between_runs and not self.is_over and not self.has_left):
            if callable(previous) and not self.is_inherited:
                previous(number, frame)
            elif self.is_inherited or previous is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.watch is None or self.is_ending or self.has_left:
            return
        if previous is self._handlers[number].args[0]:  # else the later one has asked
            self._num_signals += 1
            if self._num_signals > 1:
                name, rank = signal.Signals(number).name, self.watch.identity.rank
                os.write(2, f"lightning_ddp: rank {rank}: second {name}, ending\n".encode())
                flush_output()
                os._exit(128 + number)
            self.watch.ask(self._requested_by(int(number)))
        if callable(previous):
            previous(number, frame)

    def _requested_by(self, number: int) -> Wish:
        """Return what a signal requests: that all ranks stop, or that this process or its node leaves."""
        preemption = self._settings.preemption
        is_notice = preemption is not None and number == preemption.number
        if not is_notice or self.calls is None or not self.calls.may_leave or self.identity is None:
            return Wish(WishKind.STOP, number)
        if not self.is_launcher and not was_passed_on(number):
            return Wish(WishKind.LEAVE, number)
        return Wish(WishKind.STOP if self.identity.node_rank == 0 else WishKind.LEAVE_NODE, number)

    # ------------------------------------------------------------------ a failure of this process

    def end(self, error: BaseException) -> PeerFailure | None:
        """Report the run's error, abort all groups; return the peer's failure that caused it, or None."""
        if self._state is _State.RUNNING:
            self._state = _State.ENDING
        failure = None
        for _ in range(_MOST_INTERRUPTIONS):
            try:
                failure = self._explain(error)
                break
            except BaseException:  # noqa: BLE001 (what a signal handler raised: a data loader's, Ctrl-C)
                continue
        else:  # not a handler, but where or how it was raised: the others have to hear of it all the same
            if self.watch is not None:
                kind = type(error).__name__
                record = FailureRecord.of_identity(self.watch.identity, "", exception_type=kind)
                self.watch.report(record, is_echo=False)
        if self.watch is not None:
            recovery = self._settings.recovery
            raises_alone = recovery is not None and recovery.exceptions
            is_left_behind = raises_alone and not isinstance(error, LightningDDPError)
            why = f"rank {self.watch.identity.rank} cannot continue: {error}"[:200]
            self.watch.update(lambda state: state.fail(None if is_left_behind else why))
            self._state = _State.OVER
            self.forget_device()  # after an abort nccl2 reports an error, which is none
            abort_groups()
            self._wake_parent()  # if it is stopped, it would never hear of this failure
            if not self.end_limit.is_set:
                self._limit_end()
            goes_on = is_left_behind or (recovery is not None and isinstance(error, SystemExit))
            if failure is None and not goes_on:
                self._tell_guard(True, self._own)
        return failure

    def _explain(self, error: BaseException) -> PeerFailure | None:
        """Report an exception to the server; return the other rank's failure that caused it, if any."""
        if (interruption := interruption_behind(error, self.interrupt.error)) is not None:
            return interruption.like()
        if self.watch is None:
            return None
        record = FailureRecord.of_exception(error, self.watch.identity, self._position())
        fill_error_file(record, is_cause=True)
        cause, is_known = cause_of_error(error), self.watch.failure is not None
        is_echo = cause is Cause.LOST_CONNECTION or (cause is Cause.BACKEND and is_known)
        self._own = None if is_echo else record
        self.watch.report(record, is_echo=is_echo)
        if isinstance(error, KeyboardInterrupt):  # from the terminal all ranks get it, and none is at fault
            second_interrupt_ends(self.alarm, self._children.kill)
            return None
        first = self.watch.wait_for_verdict(ECHO_WAIT_S + 1.0) if is_echo else None
        if first is None or first.rank == record.rank:
            return None
        fill_error_file(first, is_cause=False)  # over this rank's own
        return first.to_error(record.rank).like()

    def _save_last(self, error: BaseException, *, is_own: bool) -> None:
        """Let rank 0, or rank 1 if rank 0 failed first, save a checkpoint after a failure (not Ctrl-C)."""
        if self.save_last is None or self.watch is None or isinstance(error, KeyboardInterrupt):
            return
        with suppress(BaseException):  # whatever comes now, the failure itself is what is raised
            first = self.watch.wait_for_verdict(ECHO_WAIT_S + 1.0)
            if first is None or first.exception_type == "KeyboardInterrupt":
                return
            if is_own and first.exception_type is None:  # a process that died meanwhile is no better reason
                return
            path = self.save_last() if self.watch.identity.rank == int(first.rank == 0) else None
            if path is not None:
                self.watch.post(Saved(path))
                self.watch.flush()
                if self.watch.has_lost_server:  # nobody else is left to report
                    report = render(replace(first, checkpoint=path))
                    tell_guard(guarded_by(), self.watch.identity.rank, True, report=report)

    def _tell_guard(self, is_aware: bool | None, failure: FailureRecord | None = None) -> None:
        """Tell the guard process that this rank joined (None), knows of a failure (True), goes on (False)."""
        is_interrupt = failure is not None and failure.exception_type == "KeyboardInterrupt"
        report = "" if failure is None or is_interrupt else render(failure)
        limit_s = self._settings.failure_grace_s if is_aware else math.inf
        if self.identity is not None:
            tell_guard(guarded_by(), self.identity.rank, is_aware, limit_s, report)

    def fail(self, trace: str, cause: str | None = None) -> None:
        """Report to the server that this rank failed, with a traceback; `cause` defaults to its last line."""
        if self.watch is None and self.server is None:
            return
        who = self.identity or Identity(rank=0, node_rank=0)  # which has the server, if it has not connected
        where = self._position()
        if cause is None:
            cause = trace.strip().splitlines()[-1] if trace.strip() else "reconciliate_processes was called"
            trace = trace.replace(cause, shortened(cause))
        more = {"step": where.step, "phase": where.phase, "traceback": trace or None}
        record = FailureRecord.of_identity(who, shortened(cause), **more)
        if self.watch is not None:
            self.watch.report(record, is_echo=False)
        elif self.server is not None:
            self.server.tell(Failed(record))
            self.server.wait_for_verdict(EXIT_WAIT_S)

    def child_ended(self, record: FailureRecord) -> None:
        """Report a child's exit to the server, not code 0 if all met without recovery. Thread-safe."""
        if self._settings.recovery is None and not record.exit_code and self.has_met:
            return
        if self.watch is not None:
            self.watch.post(Exited(record))
            return
        if self.server is not None:
            self.server.tell(Exited(record))
        self.interrupt.set(record.to_error())

    # ------------------------------------------------------------------ a failure of another process

    def _learned(self, record: FailureRecord) -> None:
        """Interrupt the main thread, as the job failed; limit its time to exit. In the channel's thread."""
        rank = self.identity.rank if self.identity is not None else None
        error = record.to_error(rank)
        if rank is not None and record.rank != rank:
            fill_error_file(record, is_cause=False)
        if self._children.remote is not None:
            self._children.remote.note_failure(record)
        self._tell_guard(True, record)
        self._limit_end()
        if record.exception_type is None or record.rank == rank:
            self.interrupt.set(error)
        threading.Thread(target=self._interrupt_main, args=(error,), daemon=True, name="interrupt").start()

    def _device_failed(self, error: BaseException) -> None:
        """Interrupt the main thread, as work on the device failed or hangs. In the thread that watches it."""
        if self.calls is not None and self.calls.is_call(error):  # which stops the main thread
            return
        if self.interrupt.set(error):
            self._limit_end()
            self._interrupt_main(error)

    def _gloo_failed(self) -> None:
        """Interrupt the main thread for gloo's error; delay gloo's thread, which then ends the process."""
        with suppress(PeerFailure):
            self._device_failed(self.inspector.mismatch())
        time.sleep(self._settings.failure_grace_s)  # meanwhile the main thread unwinds and ends the process

    def _interrupt_main(self, error: BaseException) -> None:
        """Raise `error` in the main thread, unless that raises an error of its own within 0.3 s."""
        if isinstance(error, PeerFailure):
            self._wake_stopped(error)
        until = time.monotonic() + _OWN_WORD_S
        while self._state is _State.RUNNING and self.interrupt.error is None and time.monotonic() < until:
            time.sleep(0.02)
        self.interrupt.set(error)
        self.alarm.sound(error, abort_groups, is_final=True)

    def _wake_stopped(self, error: PeerFailure) -> None:
        """Send SIGCONT to ranks and workers started here, and a failed launcher, so that stopped ones end."""
        self._children.send_signal(signal.SIGCONT)
        for process in multiprocessing.active_children():  # such as workers of a data loader
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGCONT)
        if error.pid == launcher_pid():  # the launching process, which is part of this job
            self._wake_parent()

    def _wake_parent(self) -> None:
        parent_pid = launcher_pid()
        if parent_pid is not None:
            with suppress(ProcessLookupError):  # it ends at this very moment
                os.kill(parent_pid, signal.SIGCONT)

    # ------------------------------------------------------------------ the end

    def _limit_end(self) -> None:
        # for the job's last failure only: that of a device is of groups which the recovery aborts
        is_last = self.first_failure() is not None
        is_in_recovery = is_last and self.calls is not None and self.calls.is_stopped
        if self.is_over or is_in_recovery or not self.alarm.is_silent:
            is_first = self.watch is not None and self.watch.failure is None
            self.end_limit.set(is_needed=is_first or self.is_launcher)

    def may_begin_anew(self) -> bool:
        """Return True if the job failed by an exception, not a collective's, so that a new run can begin."""
        if self.watch is None or not self.is_over or self._depth:
            return False
        failure = self.wait_for_verdict(ECHO_WAIT_S + 1.0)
        # after a collective that has failed, threads of the backend may never return
        return failure is not None and "Collective" not in (failure.exception_type or "Collective")

    def close(self) -> None:
        """Disconnect from the control server, so that an exit is no failure; close a server of its own."""
        for end in (self.interrupt.device_watch, self.watch, self.server):
            if end is not None:
                end.close()

    def restore_handlers(self) -> None:
        """Restore the signal handlers and cancel the timers that this process has set for the job."""
        faulthandler.cancel_dump_traceback_later()
        if self.end_limit.is_set:
            self._tell_guard(False)
        forbid_stack()
        before_gloo_ends_the_process(None)
        self.alarm.release()
        self.restore_sigterm()

    def disown(self) -> None:
        """Close the control sockets that a forked process has inherited: its parent is the rank."""
        self.end_limit.disown()
        for end in (self.watch, self.server):
            if end is not None:
                end.close_sockets()

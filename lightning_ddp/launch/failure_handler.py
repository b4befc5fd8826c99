"""Supervision of one process: what it hears of failures, what it reports, how it is interrupted.

It is long because it is one subject: how a failure of this rank, or of another one, ends what this rank does.
"""

from __future__ import annotations

import atexit
import faulthandler
import math
import multiprocessing
import os
import re
import signal
import sys
import textwrap
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, TextIO

import torch.distributed as dist

import lightning_ddp.comm as comm
import lightning_ddp.encoding as encoding
import lightning_ddp.shm as shm
from lightning_ddp._lightning import Trainer, running_hook, stop_exceptions
from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.comm.device_watch import DeviceWatch
from lightning_ddp.comm.teardown import abort_groups, before_gloo_ends_the_process, explain_retired
from lightning_ddp.encoding import side_stream
from lightning_ddp.errors import CollectiveError, LightningDDPError, PeerFailure
from lightning_ddp.hydra_jobs.jobs import restore
from lightning_ddp.launch.child_process import guarded_by, launcher_pid
from lightning_ddp.launch.children import Children
from lightning_ddp.launch.control_process import ControlProcess
from lightning_ddp.launch.desync_probe import DesyncReporter
from lightning_ddp.launch.recovery_client import RecoveryClient
from lightning_ddp.launch.stop_signals import StopSignals, second_interrupt_ends, tell_long_wait
from lightning_ddp.launch.supervisor import was_passed_on
from lightning_ddp.supervise.client import ControlClient, ServerAddress
from lightning_ddp.supervise.desync import REPORTS_A_TIMEOUT
from lightning_ddp.supervise.failure_record import (
    FailureRecord,
    Identity,
    Where,
    render,
    shortened,
    write_error_file,
)
from lightning_ddp.supervise.guard import forbid_stack, permit_stack, tell_guard
from lightning_ddp.supervise.interrupt_guard import InterruptGuard
from lightning_ddp.supervise.orders import Wish, WishKind
from lightning_ddp.supervise.protocol import Exited, Message, Saved, Start
from lightning_ddp.supervise.rank_state import Passage
from lightning_ddp.supervise.root_cause import ECHO_WAIT_S, EXIT_WAIT_S
from lightning_ddp.supervise.server import ControlServer
from lightning_ddp.supervise.settings import SupervisionSettings

__all__ = [
    "LAST_WORDS_S",
    "FailureHandler",
    "is_enabled",
    "limit_last_words",
    "show_report",
]

_SWITCH_VARIABLE = "LIGHTNING_DDP_SUPERVISION"
_WATCHDOG_VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_RING_EVERY_S = 0.5
_ABORT_AFTER_S = 0.3
_MOST_INTERRUPTIONS = 3
_LONGEST_STEP_S = 1.0
"""How long an optimizer step may take that is not to be interrupted."""
_LONGEST_END_S = 1800.0
_LATER_S = 1.0
"""By how much the launching process outlives the others, which print their stacks and end by themselves."""
_EXPLAINED_WITHIN_S = 2 * EXIT_WAIT_S
"""How long a rank that cannot connect to others waits for the loss of one that explains it."""
_LONGEST_WHY = 200
_OWN_WORD_S = 0.3
"""How long a rank goes on after another one has raised, as it may be about to raise the same."""
LAST_WORDS_S = 15.0
"""How long a launching process may take to end its children and to say what happened."""

_LOST_CONNECTION = re.compile(r"connection (closed|reset|refused)|broken pipe|gloo|nccl", re.IGNORECASE)
_FROM_GLOO = re.compile(r"\[[^\]]*/gloo/[^\]]*:\d+\]")
_COMMUNICATE = tuple(os.path.dirname(str(room.__file__)) + os.sep for room in (comm, shm, encoding, dist))
_WIDTH = 100
_BOLD_RED, _FAINT, _PLAIN = "\033[1;31m", "\033[2m", "\033[0m"
_RUNS_JOBS = side_stream.__file__


def is_enabled() -> bool:
    """Whether the processes of a run end together; LIGHTNING_DDP_SUPERVISION=0 switches it off."""
    return os.environ.get(_SWITCH_VARIABLE, "1") != "0"


class FailureHandler:
    """One generation of a run. Made in the main thread; its methods are called there.

    Args:
        children: the processes that this one has started.
    """

    def __init__(self, children: Children) -> None:
        self.interrupt = Interrupt()
        self.alarm = InterruptGuard()
        self.server: ControlServer | ControlProcess | None = None
        self.watch: ControlClient | None = None
        self.calls: RecoveryClient | None = None
        """Where the run goes on without ranks that it loses."""
        self.inspector = DesyncReporter(self.interrupt, self._position)
        self.save_last: Callable[[], str | None] | None = None
        """Saves a checkpoint where a failure ends a fit, and returns its place."""
        self.is_over = False
        """Whether this process has failed or unwinds from a failure: then nobody answers collectives."""
        self._children = children
        self._is_inherited = False
        self._trainer: Callable[[], Trainer | None] = lambda: None
        self._settings = SupervisionSettings()
        self._parent_pid: int | None = None
        self._call_within_s = ECHO_WAIT_S + 3.0
        self._device_watch: DeviceWatch | None = None
        self._depth = 0
        self._ends_at: float | None = None
        self._limiting = threading.Lock()
        """Held by who sets the time at which this process is ended, of which there is one."""
        self._timer: threading.Timer | None = None
        self._own: FailureRecord | None = None
        self._has_raised = threading.Event()
        self._variables: dict[str, str | None] = {}
        self._stop_signals: StopSignals | None = None
        self._hook_before: Callable[..., Any] | None = None

    @property
    def has_met(self) -> bool:
        """Whether all ranks of the run have connected; without a control channel nobody knows."""
        return self.watch.has_met if self.watch is not None else not is_enabled()

    @property
    def has_left(self) -> bool:
        """Whether the others go on without this process, which has left them as it was asked to, and ends."""
        return self.calls is not None and self.calls.has_left

    @property
    def identity(self) -> Identity | None:
        """Which process of the run this is, once it has connected."""
        return self.watch.identity if self.watch is not None else None

    # ------------------------------------------------------------------ joining

    def connect(
        self,
        server: ServerAddress,
        identity: Identity,
        settings: SupervisionSettings,
        parent_pid: int | None,
        *,
        start: int | None = None,
    ) -> None:
        """Connects to the control server. Raises `RendezvousError` if that cannot be reached.

        Args:
            server: where it is.
            identity: this process.
            settings: times.
            parent_pid: the process that has started this one, if it is ours.
            start: which one in its place this process is, if it is to join; 0 if nobody has asked for it.
        """
        self._settings, self._parent_pid = settings, parent_pid
        parent = None
        if parent_pid is not None:
            parent = Identity(rank=-1, node_rank=identity.node_rank, pid=parent_pid)
            if (parent.pid, parent.host) == (server.identity.pid, server.identity.host):
                parent = server.identity
            elif parent.node_rank == server.identity.node_rank:
                parent = None  # it has a supervisor, which tells the server of its end
        if identity.node_rank != server.identity.node_rank:  # the call has to come from there
            self._call_within_s += settings.heartbeat_timeout_s
        self.watch = ControlClient(
            server,
            identity,
            settings,
            on_failure=self._learned,
            on_order=self._on_order,
            where=self._where,
            parent=parent,
            on_message=self._on_message,
            start=start,
            is_launcher=self._children.first_rank is not None,
        )
        if settings.recovery is not None:
            with self.watch.lock:
                self.calls = RecoveryClient(self.interrupt, self.alarm, self.watch)
                if self.watch.state.is_called:  # sooner than that was there to hear it
                    self.calls.on_order(self.watch.state.error)
        permit_stack()
        self._tell_guard(None)
        self.inspector.attach(self.watch)
        self._device_watch = DeviceWatch(self.interrupt, self._device_failed)
        self.interrupt.expect = self._device_watch.expect
        before_gloo_ends_the_process(self._gloo_failed)
        self._stop_signals = StopSignals(
            self.watch,
            is_between=lambda: self._is_between_runs,
            is_ending=lambda: self._is_ending or self.has_left,
            request=self._requested_by,
            numbers=[settings.preemption.number] if settings.preemption is not None else [],
        )

    def wait_for_all(self, timeout_s: float) -> None:
        """Waits until all ranks have connected.

        Raises `RendezvousError` if not all came in time, `PeerFailure` if a rank failed before.
        """
        if self.watch is not None:
            self.watch.wait_for_all(timeout_s, self.interrupt.check)
        self.interrupt.check()

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Start):
            self._children.start_again(message.place, message.number)
        else:
            self.inspector.on_message(message)

    def _on_order(self, error: PeerFailure | None) -> None:
        if self.calls is not None:
            self.calls.on_order(error)

    def is_call(self, error: BaseException) -> bool:
        """Whether an exception of the main thread comes from a loss of a rank with which the run goes on.

        It may wait for the server to say so.
        """
        if self.calls is None or self.watch is None or self.watch.failure is not None:
            return False
        while isinstance(error, LightningDDPError) and isinstance(error.__cause__, PeerFailure):
            error = error.__cause__
        if isinstance(error, PeerFailure):
            return self.calls.is_called
        text = str(error)
        is_aborted = self.calls.is_called  # connections to the store as well, in many words
        is_echo = _is_of_backend(error, text) and (is_aborted or _LOST_CONNECTION.search(text) is not None)
        if not is_echo:
            return False
        if self.calls.state.is_entering:  # it says so itself, and all meet anew
            self.calls.wait_for_call(_EXPLAINED_WITHIN_S)
            return True
        return self.calls.wait_for_call(self._call_within_s)

    def forget_device(self) -> None:
        """What a device has still to run is not looked after any more, as its groups are to be aborted."""
        if self._device_watch is not None:
            self._device_watch.forget()

    def check_end(self) -> None:
        """Raises `PeerFailure` if the run has ended with a failure."""
        if self.watch is not None and self.watch.failure is not None:
            raise self.watch.failure.to_error(self.watch.identity.rank)

    def check_whether_late(self) -> None:
        """In a process that is to join: ends it, with code 0, if the others have ended their run.

        Raises `PeerFailure` if they have done so with a failure.
        """
        self.interrupt.check()
        if self.watch is not None and self.watch.has_been_left:
            self.leave_late()

    def leave_late(self) -> None:
        """Ends this process with code 0, and those that it has started, as they come too late as well."""
        self._children.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def follow(self, trainer: Trainer) -> None:
        """From now on it is this Trainer that a report tells of. It is not kept alive."""
        self._trainer = weakref.ref(trainer)

    def _position(self) -> Where:
        """Where in its Trainer this rank is. Any thread."""
        trainer = self._trainer()
        module = None if trainer is None else trainer.lightning_module
        if trainer is None or module is None:
            return Where()
        return Where(step=trainer.global_step, phase=running_hook(module) or trainer.state.stage)

    def _where(self) -> Where:
        """What this rank is doing. Where stalls are looked for it is asked while the interpreter is free."""
        stall_s, grace_s = self._settings.stall_timeout_s, self._settings.failure_grace_s
        with self._limiting:
            if stall_s is not None and self._depth > 0 and self._ends_at is None:
                # later than the others find out, up to two reports after the limit, and ask for the stack
                limit_last_words(stall_s + max(grace_s, 2 * stall_s / REPORTS_A_TIMEOUT) + _LATER_S)
        activity = self.interrupt.activity
        return replace(self._position(), waits_for=activity.label, count=activity.count)

    def _requested_by(self, number: int) -> Wish:
        """What a signal asks for: that all stop, or that this process or its node leaves."""
        preemption, first = self._settings.preemption, self._children.first_rank
        is_notice = preemption is not None and number == preemption.number
        if not is_notice or self.calls is None or not self.calls.may_leave or self.identity is None:
            return Wish(WishKind.STOP, number)
        if first is not None and self.identity.node_rank == 0 and not self._may_go_alone(number):
            return Wish(WishKind.STOP, number)
        is_node = first is not None and self.identity.node_rank != 0
        return Wish(WishKind.LEAVE_NODE if is_node else WishKind.LEAVE, number)

    def _may_go_alone(self, number: int) -> bool:
        """In rank 0 of a script: whether the others of its node live on, and the signal was to it alone."""
        outlives_it = isinstance(self.server, ControlProcess) and self._children.are_forked
        return outlives_it and not was_passed_on(number)

    @property
    def _is_between_runs(self) -> bool:
        """Whether the script is on its own: a run has ended here, and no other one has begun."""
        has_ended = self._depth == 0 and self.inspector.num_runs > 0
        return has_ended and not self.is_over and not self.has_left

    @property
    def _is_ending(self) -> bool:
        return self.is_over or self.interrupt.error is not None

    # ------------------------------------------------------------------ running

    def run(self, trainer: Trainer | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function of a Trainer, in which this rank counts as running: its silent end is a failure.

        Raises:
            PeerFailure: another rank failed; also where `function` raised an echo of that, and where another
                rank fails at its end after it has returned here.
            BaseException: what `function` raised, after the others have been told.
        """
        self.interrupt.check()
        if trainer is not None:
            self.follow(trainer)
        self._enter(function)
        try:
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                retired = explain_retired(error) if self.calls is not None else None
                if retired is not None:
                    raise retired from error
                raise
            self._leave_together()
            return result
        except stop_exceptions():  # raised by all ranks, and no failure
            raise
        except BaseException as error:
            if self._is_inherited:  # user code has forked this process: it is no rank
                raise
            failure, num_attempts = None, 0
            while num_attempts < _MOST_INTERRUPTIONS:  # no call before `try`: handlers run at calls
                num_attempts += 1
                try:
                    self.alarm.silence()
                    self._has_raised.set()
                    failure = self._end(error)
                    break
                except BaseException:  # noqa: BLE001 (what such a handler raised: a data loader's, Ctrl-C)
                    continue
            self._save_last(error, is_own=failure is None)
            if failure is not None:  # the echo itself explains nothing, but where it was raised does
                raise failure.with_traceback(error.__traceback__) from None
            raise
        finally:
            self._leave()

    def _enter(self, function: Callable[..., Any]) -> None:
        self._depth += 1
        if self._depth == 1:  # Lightning's functions are called _fit_impl, _test_impl ...
            self.alarm.arm()
            name = getattr(function, "__name__", "run")
            self.inspector.enter(name.removeprefix("_").removesuffix("_impl"))

    def follow_script(self, *, is_whole: bool) -> None:
        """From now on the script counts as running, whose loop is its own: that is how Fabric is used.

        SIGTERM ends this process, as there is no step boundary of ours to stop at.

        Args:
            is_whole: whether it does up to its end, and not for a function that a launcher runs.
        """
        if self._stop_signals is not None:
            self._stop_signals.restore()
        if not is_whole or self._hook_before is not None:
            return
        self._hook_before = sys.excepthook
        self._enter(self._script_ends)
        self.inspector.enter("the script")
        sys.excepthook = self._script_raised
        atexit.register(self._script_ends)

    def _script_raised(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """The script ends with an exception: as in `run`."""
        self.alarm.silence()
        self._has_raised.set()
        failure = None if self.is_over else self._end(error)
        if failure is not None:
            kind, error = type(failure), failure.with_traceback(trace)
        assert self._hook_before is not None
        self._hook_before(kind, error, trace)

    def _script_ends(self) -> None:
        """At exit: waits until all ranks have come to the end of the script, unless this one has failed."""
        if self._is_inherited:
            return
        try:
            if not self._is_ending:
                self._leave_together()
        except BaseException as error:  # noqa: BLE001 (nobody is left to catch it)
            self.alarm.silence()
            failure = self._end(error) or error
            traceback.print_exception(failure)
            if self._children.first_rank is None:  # the launching process still ends the others
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
        finally:
            self._leave()

    def set_while_running(self, variables: dict[str, str]) -> None:
        """Sets environment variables until the run (a fit, a test ...) ends; outside of one until the end."""
        if self._depth > 0:
            self._variables = {name: os.environ.get(name) for name in variables} | self._variables
        os.environ.update(variables)

    def outlive_watchdog(self) -> None:
        """Keeps the watchdog of NCCL groups made from now on from ending this process when another is gone.

        It does what the user has set, if anything.
        """
        self.set_while_running({_WATCHDOG_VARIABLE: os.environ.get(_WATCHDOG_VARIABLE, "0")})

    def _leave_together(self) -> None:
        """Waits until the run has ended on all ranks: what this one does next may build on that."""
        if self.watch is not None and self._depth == 1:
            limit_s = min(self.interrupt.deadline_s, _LONGEST_END_S)
            self.watch.leave_run(self.inspector.leave, limit_s, self.alarm.silence)
            if self.alarm.is_silent:  # all ranks have ended the run: a failure after that is not part of it
                return
        self.check_end()  # it was told of a failure a moment ago, perhaps
        self.interrupt.check()

    def _leave(self) -> None:
        with self._limiting:
            self._depth -= 1
            if self._depth == 0 and self._ends_at is None and self._settings.stall_timeout_s is not None:
                faulthandler.cancel_dump_traceback_later()
        if self._depth == 0:
            restore(self._variables)
            self._variables = {}
            self.alarm.silence()
            self.save_last = None
            if not self.is_over:
                self.inspector.leave()

    def _end(self, error: BaseException) -> PeerFailure | None:
        """Reports what ended the run on this rank, and makes its collectives fail instead of waiting."""
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
            self._fail(error)
            self.is_over = True
            abort_groups()
            self._wake_parent()  # if it is stopped, it would never hear of this failure
            if self._ends_at is None:
                self._limit_ending()
            goes_on = self._settings.recovery is not None and isinstance(error, SystemExit)
            if failure is None and not goes_on and not self._is_left_behind(error):
                self._tell_guard(True, self._own)
        return failure

    def _fail(self, error: BaseException) -> None:
        assert self.watch is not None
        why = f"rank {self.watch.identity.rank} cannot continue: {error}"[:_LONGEST_WHY]
        is_left_behind = self._is_left_behind(error)
        self.watch.update(lambda state: state.fail(None if is_left_behind else why))

    def _is_left_behind(self, error: BaseException) -> bool:
        """Whether the others go on without this rank, whose code has raised."""
        recovery = self._settings.recovery
        return recovery is not None and recovery.exceptions and not isinstance(error, LightningDDPError)

    def _save_last(self, error: BaseException, *, is_own: bool) -> None:
        """Saves a checkpoint, if this is the lowest rank that has not failed first.

        Where `error` is this rank's own, a process that died meanwhile is no better reason.
        """
        if self.save_last is None or self.watch is None or isinstance(error, KeyboardInterrupt):
            return
        with suppress(BaseException):  # whatever comes now, the failure itself is what is raised
            first = self.watch.wait_for_verdict(ECHO_WAIT_S + 1.0)
            if first is None or first.exception_type == "KeyboardInterrupt":
                return
            if is_own and first.exception_type is None:
                return
            path = self.save_last() if self.watch.identity.rank == int(first.rank == 0) else None
            if path is not None:
                self.watch.post(Saved(path))
                self.watch.flush()
                if self.watch.has_lost_server:  # nobody else is left to report
                    report = render(replace(first, checkpoint=path).cut())
                    tell_guard(guarded_by(), self.watch.identity.rank, True, report=report)

    def _tell_guard(self, is_aware: bool | None, failure: FailureRecord | None = None) -> None:
        """As the function: that this process has joined (None), knows of a failure, or goes on after one."""
        is_interrupt = failure is not None and failure.exception_type == "KeyboardInterrupt"
        report = "" if failure is None or is_interrupt else render(failure.cut())
        limit_s = self._settings.failure_grace_s if is_aware else math.inf
        if self.identity is not None:
            tell_guard(guarded_by(), self.identity.rank, is_aware, limit_s, report)

    def _explain(self, error: BaseException) -> PeerFailure | None:
        """Reports an exception of this process; returns the failure that it is the consequence of, if any."""
        told = self._interruption_behind(error)
        if told is not None:
            return told.like()
        if self.watch is None:
            return None
        record = FailureRecord.of_exception(error, self.watch.identity, self._position())
        self._write_error_file(record)
        is_echo = _is_of_backend(error, record.message)
        is_echo &= self.watch.failure is not None or _LOST_CONNECTION.search(record.message) is not None
        self._own = None if is_echo else record
        self.watch.report(record, is_echo=is_echo)
        if isinstance(error, KeyboardInterrupt):  # from the terminal all ranks get it, and none is at fault
            second_interrupt_ends(self.alarm, self._children.kill)
            return None
        first = self.watch.wait_for_verdict(ECHO_WAIT_S + 1.0) if is_echo else None
        if first is None or first.rank == record.rank:
            return None
        self._write_error_file(first)  # over this rank's own
        return first.to_error(record.rank).like()

    def _interruption_behind(self, error: BaseException) -> PeerFailure | None:
        """The failure that interrupted this rank, which code of the user's may have turned into `error`."""
        cause: BaseException | None = error if isinstance(error, Exception) else None
        seen: set[int] = set()
        while cause is not None and id(cause) not in seen:
            if isinstance(cause, PeerFailure) and (cause is error or cause is self.interrupt.error):
                return cause
            seen.add(id(cause))
            cause = cause.__cause__ or cause.__context__
        return None

    def reached_step_boundary(self) -> Passage:
        """What this rank does at a step boundary: it goes on, or all stop, or meet here. Called at each."""
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

    @property
    def stops_for(self) -> Wish | None:
        """What all have stopped for at a boundary, where they have."""
        return self.watch.state.stops_for if self.watch is not None else None

    def fail(self, trace: str, cause: str | None = None) -> None:
        """Tells all ranks that this one has failed, as the text `trace` says; None for its last line."""
        if self.watch is None:
            return
        where = self._position()
        if cause is None:
            cause = trace.strip().splitlines()[-1] if trace.strip() else "reconciliate_processes was called"
            trace = trace.replace(cause, shortened(cause))
        record = FailureRecord.of_identity(
            self.watch.identity, shortened(cause), step=where.step, phase=where.phase, traceback=trace or None
        )
        self.watch.report(record, is_echo=False)

    @property
    def has_failed(self) -> bool:
        """Whether a failure of the run, or of this process, is known."""
        return self.first_failure() is not None or self._is_ending

    def child_ended(self, record: FailureRecord) -> None:
        """A child of this launching process ended without success. Any thread."""
        if self.watch is not None:
            self.watch.post(Exited(record.cut()))
            return
        if self.server is not None:
            self.server.tell(Exited(record))
        self.interrupt.set(record.to_error())

    def first_failure(self) -> FailureRecord | None:
        """The first failure of the run, as far as this process knows."""
        known = self.server.first_failure if self.server is not None else None
        return known or (self.watch.failure if self.watch is not None else None)

    def wait_for_verdict(self, timeout_s: float) -> FailureRecord | None:
        """As `first_failure`, waiting up to `timeout_s` seconds for it."""
        heard_by = self.watch or self.server
        if heard_by is not None:
            heard_by.wait_for_verdict(timeout_s)
        return self.first_failure()

    def may_begin_anew(self) -> bool:
        """Whether the run has failed with an exception, so that all ranks may take part in another one."""
        if self.watch is None or not self.is_over or self._depth:
            return False
        failure = self.wait_for_verdict(ECHO_WAIT_S + 1.0)
        # after a collective that has failed, threads of the backend may never return
        return failure is not None and "Collective" not in (failure.exception_type or "Collective")

    def close(self) -> None:
        """Leaves the run: the end of this process is no failure from now on."""
        if self._device_watch is not None:
            self._device_watch.close()
        if self.watch is not None:
            self.watch.close()
        if self.server is not None:
            self.server.close()

    def restore_handlers(self) -> None:
        """Gives the signals and the last-resort timer back that this process has taken for the run."""
        faulthandler.cancel_dump_traceback_later()
        if self._ends_at is not None:
            self._tell_guard(False)
        forbid_stack()
        if self._timer is not None:
            self._timer.cancel()
        before_gloo_ends_the_process(None)
        self.alarm.release()
        if self._stop_signals is not None:
            self._stop_signals.restore()

    def disown(self) -> None:
        """Called in a forked process: the rank is another one, whose sockets must not live on here."""
        self._is_inherited = self.is_over = True
        self._limiting = threading.Lock()  # a thread that is not here may have held the other one
        if self._stop_signals is not None:
            self._stop_signals.is_inherited = True
        for end in (self.watch, self.server):
            if end is not None:
                end.close_sockets()

    # ------------------------------------------------------------------ being interrupted

    def _learned(self, record: FailureRecord) -> None:
        """In the watching thread: the run has failed."""
        rank = self.identity.rank if self.identity is not None else None
        error = record.to_error(rank)
        if record.rank != rank:
            self._write_error_file(record)
        self._tell_guard(True, record)
        self._limit_ending()
        if record.exception_type is None or record.rank == rank:
            self.interrupt.set(error)
        threading.Thread(target=self._ring, args=(error,), daemon=True, name="failure-alarm").start()

    def _device_failed(self, error: BaseException) -> None:
        """In the thread that looks after the device: what it has to run does not end, or has failed."""
        if self.is_call(error):  # which stops the main thread
            return
        if self.interrupt.set(error):
            self._limit_ending()
            self._ring(error)

    def _gloo_failed(self) -> None:
        """In gloo's thread, which then ends the process: collectives differ, or a connection has broken."""
        with suppress(PeerFailure):
            self._device_failed(self.inspector.mismatch())
        time.sleep(self._settings.failure_grace_s)  # meanwhile the main thread unwinds and ends the process

    def _limit_ending(self) -> None:
        """Gives this process its time to end; one that others need to hear, or to be ended by, a bit more."""
        if self.alarm.is_silent and not self.is_over:
            return
        grace_s = self._settings.failure_grace_s
        starts_others = self._children.first_rank is not None
        is_needed = starts_others or (self.watch is not None and self.watch.failure is None)
        with self._limiting:
            self._ends_at = time.monotonic() + grace_s
            limit_last_words(grace_s + (2 * _LATER_S if is_needed else 0.0))
        if starts_others and self._timer is None:
            self._timer = threading.Timer(grace_s + _LATER_S, self._end_late)
            self._timer.daemon = True
            self._timer.start()

    def _end_late(self) -> None:
        """In a thread: the time of this launching process is over; ends its children first, and then it."""
        if not self._children.ending.acquire(blocking=False):  # the main thread does the same
            return
        limit_last_words(LAST_WORDS_S)
        rank, grace_s = self._children.first_rank, self._settings.failure_grace_s
        print(f"lightning_ddp: rank {rank} has not ended {grace_s:g} s after a failure:", file=sys.stderr)
        faulthandler.dump_traceback(_standard_error(), all_threads=True)
        self._children.end(0.0)
        failure = self.wait_for_verdict(ECHO_WAIT_S + EXIT_WAIT_S)
        if failure is not None:
            show_report(failure)
        sys.stderr.flush()
        os._exit(1)

    def seconds_left(self) -> float:
        """How long this process and its children have to end after a failure."""
        if self._ends_at is None:
            return self._settings.failure_grace_s
        return max(0.0, self._ends_at + _LATER_S - time.monotonic())

    def _ring(self, error: BaseException) -> None:
        if isinstance(error, PeerFailure):
            self._wake_stopped(error)
        if self.interrupt.error is None:
            self._has_raised.wait(_OWN_WORD_S)
            self.interrupt.set(error)
        start, has_aborted = time.monotonic(), False
        while not self.alarm.is_silent:
            if time.monotonic() - start >= _LONGEST_STEP_S:
                self.alarm.force()
            self.alarm.ring(error)
            time.sleep(_ABORT_AFTER_S if not has_aborted else _RING_EVERY_S)
            if not has_aborted and time.monotonic() - start >= _ABORT_AFTER_S and not self.alarm.is_silent:
                has_aborted = True
                abort_groups()  # the main thread may be blocked inside of one of torch's own collectives

    def _wake_stopped(self, error: PeerFailure) -> None:
        """Continues processes of this one's that are stopped (SIGSTOP), so that they can end."""
        self._children.wake()
        for process in multiprocessing.active_children():  # such as workers of a data loader
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGCONT)
        if error.pid == self._parent_pid:  # the launching process, which is part of this run
            self._wake_parent()

    def _wake_parent(self) -> None:
        if self._parent_pid is not None and self._parent_pid == launcher_pid():
            with suppress(ProcessLookupError):  # it ends at this very moment
                os.kill(self._parent_pid, signal.SIGCONT)

    def _write_error_file(self, record: FailureRecord) -> None:
        path = os.environ.get(_ERROR_FILE_VARIABLE)
        if path and self.identity is not None:
            with suppress(OSError):  # the agent then reports the exit code alone
                write_error_file(path, record, is_cause=record.rank == self.identity.rank)


def _is_of_backend(error: BaseException, text: str) -> bool:
    """Whether a call that communicates has raised it, and not code of the user's in words of its own."""
    while isinstance(error, LightningDDPError) and isinstance(error.__cause__, RuntimeError):
        error = error.__cause__
    if isinstance(error, LightningDDPError):
        return type(error) is CollectiveError  # those derived from it say more
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error, dist.DistError) or _FROM_GLOO.search(text):
        return True
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(file.startswith(_COMMUNICATE) and file != _RUNS_JOBS for file in files)


def limit_last_words(limit_s: float) -> None:
    """Prints all stacks and ends this process after so long, in C, without the GIL, whatever holds that."""
    faulthandler.dump_traceback_later(limit_s, exit=True, file=_standard_error())


def _standard_error() -> Any:
    """What the C library can write to as standard error."""
    for stream in (sys.stderr, sys.__stderr__):
        with suppress(AttributeError, OSError, ValueError):
            stream.fileno()  # type: ignore[union-attr]
            return stream
    return 2


def show_report(record: FailureRecord, stream: TextIO | None = None) -> None:
    """Prints the report of a failure to standard error; on a terminal in colors and within 100 columns."""
    stream = stream or sys.stderr
    text = render(record)
    if stream.isatty():
        text = _dressed(text, is_coloured="NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb")
    print(text, file=stream, end="", flush=True)


def _dressed(text: str, *, is_coloured: bool) -> str:
    """The lines before the traceback wrapped, the first one in red, the frames of a traceback faint."""
    head, mark, trace = text.partition("Traceback of ")
    lines = [
        part
        for line in head.splitlines()
        for part in textwrap.wrap(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False) or [line]
    ]
    if is_coloured:
        lines[0] = f"{_BOLD_RED}{lines[0]}{_PLAIN}"
        trace = re.sub(r"^(  .*)$", rf"{_FAINT}\1{_PLAIN}", trace, flags=re.MULTILINE)
    return "\n".join(lines) + "\n" + mark + trace

"""A process of the run: its channel, and a main thread that trains as `elastic/recovery.py` does.

The main thread is a generator: it yields what it waits for, and is resumed or interrupted there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning_ddp.supervise.protocol as protocol
from lightning_ddp.errors import PeerFailure
from lightning_ddp.supervise.failure_record import FailureRecord, Identity, Where
from lightning_ddp.supervise.protocol import Form, Message
from lightning_ddp.supervise.rank_state import RankState
from lightning_ddp.supervise.stop_main import Passage, StepBoundary
from simulation.network import describe

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["Process"]

ALL_HERE_WITHIN_S = 20.0
CALL_WITHIN_S = 3.0
EXPLAINED_WITHIN_S = 0.5
NUM_TESTS = 80
VALIDATES_EVERY = 3
LOOK_EVERY_S = 0.05
FORCED_AFTER_S = 1.0


class RunFailed(Exception):
    """This rank has learned of the first failure of the run."""


class BackendError(Exception):
    """A collective has failed: a connection of it is closed."""


class UserError(Exception):
    """The training script has raised."""


class Stops(Exception):
    """All ranks stop at this boundary."""


class Leaves(Exception):
    """This process has left the others as it was asked to, or comes too late."""


@dataclass
class Wait:
    """What the main thread waits for."""

    until: Callable[[], Any] | None
    """None for nothing but time."""
    deadline: float
    is_interruptible: bool


Main = Generator[Wait, None, Any]


class Process:
    """A process.

    Args:
        world: that it is in.
        pid: its own; never used again.
        place: its place.
        node: of that.
        start: which one in its place it is, if it is to join; None for a first one.
        is_launcher: whether it starts the others of its node.
    """

    def __init__(
        self, world: World, pid: int, place: int, node: int, *, start: int | None, is_launcher: bool
    ) -> None:
        self.world, self.kernel, self.pid, self.node = world, world.kernel, pid, node
        self.place, self.is_launcher = place, is_launcher
        self.start_number, self.is_new = start, start is not None
        self.boundary = StepBoundary()
        self.state = RankState(place, self.boundary, is_new=self.is_new)
        self.lane = f"p{pid}"
        self.is_alive, self.is_frozen, self.exit_code = True, False, None
        self.cause: FailureRecord | None = None
        """What this process knows to be the first failure."""
        self.is_connected = self.is_deaf = self.all_here = self.all_left = False
        self.failed_at: float | None = None
        self.inbox: list[Message] = []
        """What has come while it was stopped."""
        self._outbox: list[Message] = []
        """What it says before it is connected."""
        self.was_asked_to_leave = False
        self.log: list[tuple[int, int]] = []
        """Committed steps: in which generation, by how many ranks."""
        self.is_clean = True
        self.phase = 0
        self.is_training = False
        """Whether it takes steps as a member."""
        self.is_stopped = False
        """Whether it has answered a call, and is in no generation since."""
        self.has_ended_fit = False
        self.is_sound = True
        """Whether nothing has happened to it, nor in it, for which the others may go on without it."""
        self.user_error = False
        """Whether its next step raises."""
        self._error: PeerFailure | None = None
        """What its waits are interrupted by."""
        self._interrupted_at: float | None = None
        self._is_deferred = False
        self._may_leave = False
        self._mark_step = -1
        self._last_phase = 0
        self._has_handover = False
        """Whether it has put together what those that join take over."""
        self._form: Form | None = None
        self._main: Main | None = None
        self._wait: Wait | None = None
        self._is_resuming = False

    @property
    def identity(self) -> Identity:
        return Identity(rank=self.place, node_rank=self.node, host=f"node{self.node}", pid=self.pid)

    @property
    def committed(self) -> int:
        return len(self.log)

    def __str__(self) -> str:
        return f"p{self.pid}@{self.state.place}"

    # ------------------------------------------------------------------ from outside

    def start(self) -> None:
        self._main = self._run()
        self._advance(None)

    def end(self, code: int) -> None:
        """The process is gone: by itself, or killed."""
        if not self.is_alive:
            return
        self.kernel.note(lambda: f"{self} ends with {code}")
        self.is_alive, self.exit_code, self.is_training = False, code, False
        if self._main is not None and not self._main.gi_running:
            self._main.close()
        self.world.ended(self)

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        if self.is_frozen:
            self.is_frozen = False
            inbox, self.inbox = self.inbox, []
            for message in inbox:  # in one piece, before the main thread runs
                self.hear(message)
            self.poke()

    def sigterm(self) -> None:
        """As `Reconciliation._requested_by` answers it; `WaitSignals` ends one that waits for others."""
        if not self.is_new and not self.all_here:
            self.post(protocol.Failed(FailureRecord.of_identity(self.identity, "SIGTERM before all had met")))
            self.end(143)
        elif not self.world.plan.leaves or not self._may_leave or self.world.is_host(self):
            self.post(protocol.Stop(15, is_requeue=False))
        else:
            self.was_asked_to_leave = True
            self.post(self.state.ask_to_leave(15, is_node=self.is_launcher and self.node != 0))

    def post(self, message: Message) -> None:
        if self.is_connected:
            self.world.to_server(self, message)
        else:
            self._outbox.append(message)

    # ------------------------------------------------------------------ the thread of the channel

    def hear(self, message: Message) -> None:
        if not self.is_alive or self.is_deaf:
            return
        if self.is_frozen:
            self.inbox.append(message)
            return
        self.kernel.note(lambda: f"{self} hears {describe(message)}")
        match message:
            case protocol.Failure(record):
                self.learn(record)
            case protocol.AllHere():
                self.all_here = True
            case protocol.Left():
                self.all_left = True
            case protocol.Closing():
                self.is_deaf = True
            case protocol.Hold():
                self.post(protocol.Position(self.boundary.hold()))
            case protocol.StopAfter(position, signal, is_requeue):
                self.boundary.release(position, signal, is_requeue)
            case protocol.Start(place, number):
                self.world.start_again(place, number)
            case protocol.Beat():
                pass
            case _:
                heard = self.state.hear(message)
                assert heard is not None, message
                if heard.stops is not None:
                    self._error, self._interrupted_at = heard.stops, self.kernel.now
                for reply in heard.replies:
                    self.post(reply)
        self.poke()

    def learn(self, record: FailureRecord) -> None:
        """The first failure of the run, or the end of the server."""
        if self.cause is None and self.is_alive:
            self.cause, self.is_deaf, self.failed_at = record, True, self.kernel.now
            self.poke()

    def lost_server(self) -> None:
        if self.is_frozen:
            self.inbox.append(protocol.Failure(self.world.server_gone))
        elif not self.is_deaf:
            self.learn(self.world.server_gone)

    def report_progress(self) -> None:
        """Where stalls are looked for."""
        if self.is_alive and self.is_connected and not self.is_deaf:
            if not self.is_frozen:
                waits = "the others" if self._wait is not None and self._wait.until is not None else None
                where = Where(step=self.committed, waits_for=waits, count=self.kernel.num_events)
                self.post(protocol.Progress(where))
            self.kernel.at(self.kernel.now + self.world.report_every_s, self.report_progress)

    # ------------------------------------------------------------------ the main thread

    def poke(self, within_s: float = LOOK_EVERY_S) -> None:
        """The main thread looks again, soon."""
        if not self._is_resuming and self.is_alive:
            self._is_resuming = True
            delay = min(self.kernel.delay(self.lane, within_s / 10), within_s)
            self.kernel.at(self.kernel.now + delay, self._resume)

    def _resume(self) -> None:
        self._is_resuming = False
        if not self.is_alive or self.is_frozen or self._wait is None:
            return
        wait, now = self._wait, self.kernel.now
        error = self._interruption(wait)
        if error is not None:
            self._advance(error)
        elif (wait.until is not None and wait.until()) or now >= wait.deadline:
            self._advance(None)
        elif wait.deadline < float("inf"):
            self._wake_at(wait)

    def _interruption(self, wait: Wait) -> Exception | None:
        """What the main thread is interrupted by where it stands."""
        is_free = wait.until is not None or not self._is_deferred
        if self.cause is not None and self.failed_at is not None:
            if is_free or self.kernel.now >= self.failed_at + FORCED_AFTER_S:
                return RunFailed()
            self.kernel.at(self.failed_at + FORCED_AFTER_S, self._resume)
        if self._error is not None and wait.is_interruptible and is_free:
            return self._error
        return None

    def _advance(self, error: Exception | None) -> None:
        assert self._main is not None
        try:
            self._wait = self._main.throw(error) if error is not None else next(self._main)
        except StopIteration:
            self._wait = None
            return
        wait = self._wait
        if wait.until is not None:
            self.poke()
        self._wake_at(wait)

    def _wake_at(self, wait: Wait) -> None:
        def wake() -> None:
            if self._wait is wait:
                self._resume()

        if wait.deadline < float("inf"):
            self.kernel.at(wait.deadline, wake)

    def _sleep(self, typical_s: float) -> Main:
        """Something that this process does by itself; interrupted unless that is deferred."""
        yield Wait(None, self.kernel.now + self.kernel.delay(self.lane, typical_s), is_interruptible=True)

    def _until(
        self,
        condition: Callable[[], Any],
        within_s: float = float("inf"),
        then: Callable[[], Any] | None = None,
    ) -> Main:
        """Waits for others; returns whether it has come to pass."""
        yield Wait(condition, self.kernel.now + within_s, is_interruptible=True)
        return (then or condition)()

    def _wait_beyond_calls(self, condition: Callable[[], Any], within_s: float = float("inf")) -> Main:
        yield Wait(condition, self.kernel.now + within_s, is_interruptible=False)
        return condition()

    def _run(self) -> Main:
        """The script, from its start to its end."""
        code = 1
        try:
            try:
                yield from self._script()
                code = 0
            except (Leaves, Stops):
                code, self.is_training = 0, False
                self.post(protocol.Active(False, 1, "fit"))
            except RunFailed:
                pass
            except UserError:
                self.is_sound = False
                if not self.world.plan.exceptions:
                    self._decline("user error")
                record = FailureRecord.of_identity(
                    self._ranked(), "bad sample", exception_type="ValueError", exception_class="ValueError"
                )
                self.post(protocol.Failed(record))
                yield from self._wait_beyond_calls(lambda: self.cause is not None, CALL_WITHIN_S)
            except PeerFailure as error:  # a call that this process cannot answer
                self._decline("cannot continue")
                text = f"{self} cannot continue: {str(error)[:60]}"
                self.kernel.note(lambda: text)
                yield from self._wait_beyond_calls(lambda: self.cause is not None, CALL_WITHIN_S)
            except BackendError:
                if self.is_training:
                    raise self.world.violation(
                        f"{self} loses a connection while it trains, and ends"
                    ) from None
                self.is_sound = False
                if not self.world.plan.exceptions:
                    self._decline("lost a connection")
                record = FailureRecord.of_identity(
                    self._ranked(), "reset", exception_type="RuntimeError", exception_class="RuntimeError"
                )
                self.post(protocol.Echoed(record))
                yield from self._wait_beyond_calls(lambda: self.cause is not None, CALL_WITHIN_S)
        except RunFailed:
            pass
        try:
            yield from self._end_script(code)
        except RunFailed:
            code = 1
        self.end(code)

    def _end_script(self, code: int) -> Main:
        """`Session._leave`."""
        if code == 0 and not self.world.is_host(self):
            self.post(protocol.Bye())
            yield Wait(None, self.kernel.now + 0.01, is_interruptible=False)
        while self.world.waits_for_children(self):
            yield from self._wait_beyond_calls(lambda: not self.world.waits_for_children(self), 1.0)

    def _decline(self, why: str) -> None:
        """As `Calls.decline`."""
        self.world.note_decline(self)
        if self.state.error is not None:
            self.post(protocol.Declined(self.state.last_call, why))

    def _ranked(self) -> Identity:
        return Identity(rank=self.state.rank, node_rank=self.node, host=f"node{self.node}", pid=self.pid)

    def _script(self) -> Main:
        yield from self._sleep(0.05)  # imports
        self.world.connect(self)
        self.is_connected = True
        for message in self._outbox:
            self.post(message)
        if self.world.report_every_s:
            self.report_progress()
        self.post(protocol.Active(True, 1, "fit"))
        if self.is_new:
            yield from self._sleep(0.05)
            self._may_leave = True
            yield from self._join()
        else:
            if not (yield from self._until(lambda: self.all_here, ALL_HERE_WITHIN_S)):
                self.post(
                    protocol.Failed(FailureRecord.of_identity(self.identity, "not all ranks have arrived"))
                )
                yield from self._wait_beyond_calls(lambda: self.cause is not None, CALL_WITHIN_S)
                raise RunFailed
            yield from self._collective("set-up", range(self.world.plan.num_ranks))
        self._may_leave, self._is_deferred = True, True
        self.is_training = True
        while self.committed < self.world.last_step or self._form is not None:
            yield from self._batch()
            if self.committed % VALIDATES_EVERY == 0 and self._form is None:
                yield from self._repeat(("validation", self.committed))
        self._may_leave = self.boundary.may_meet = False
        for message in self.state.stop_instead():
            self.post(message)
        yield from self._repeat("end of fit")
        self._is_deferred = self.is_training = self.all_left = False
        self.has_ended_fit = True
        self.post(protocol.Active(False, 1, "fit"))
        yield from self._until(lambda: self.all_left)
        if self.world.plan.tests_after:
            yield from self._test()

    def _test(self) -> Main:
        """`Trainer.test`: another run, at whose boundaries all may stop, and nobody joins or leaves."""
        was_asked = self.was_asked_to_leave
        self.post(protocol.Active(True, 2, "test"))
        for _ in range(NUM_TESTS):
            yield from self._boundary()
            yield from self._sleep(0.1)
        if was_asked:
            raise self.world.violation(f"{self} was asked to leave, and went on to its end")
        self.all_left = False
        self.post(protocol.Active(False, 2, "test"))
        yield from self._until(lambda: self.all_left)

    # ------------------------------------------------------------------ steps

    def _batch(self) -> Main:
        """`Recovery._advance`."""
        if self._form is not None:
            form, self._form = self._form, None
            self.phase = self._last_phase = form.phase
        while True:
            is_through = yield from self._is_through(self._attempt)
            if is_through and not self.boundary.is_meeting:
                break
            is_finished = yield from self._go_on()
            if is_finished:
                break
        self._end_phase()

    def _end_phase(self) -> None:
        self.phase += 1

    @property
    def _is_alone(self) -> bool:
        return self.phase < self._last_phase

    def _attempt(self) -> Main:
        self._is_deferred, self._mark_step = False, self.committed
        self.boundary.place(self.committed << 32)
        self.boundary.may_meet = True
        passage = yield from self._boundary()
        if passage is Passage.MEET:
            self._is_deferred, self._has_handover = True, self.boundary.has_new
            return
        yield from self._sleep(0.1)
        if self.user_error:
            self.user_error = False
            raise UserError
        step = self.committed
        yield from self._collective(("step", step), self.world.members_of[self.state.generation])
        self._is_deferred = True
        self.world.through(self)
        yield from self._sleep(0.01)
        self.world.commit(self)

    def _boundary(self) -> Main:
        """`Reconciliation.reached_step_boundary`."""
        if self._error is not None:
            raise self._error
        passages = [self.boundary.look()]

        def looks_again() -> bool:
            passages[0] = self.boundary.look()
            return passages[0] is not Passage.WAIT

        if passages[0] is Passage.WAIT:
            yield from self._until(looks_again, then=lambda: True)
        passage = passages[0]
        if passage is Passage.STOP:
            self.post(protocol.Stopped())
            raise Stops
        return passage

    def _repeat(self, name: Any) -> Main:
        """`Recovery.repeat`: a part of the loops that takes no steps."""

        def attempt() -> Main:
            self._is_deferred = False
            if self._error is not None:
                raise self._error
            yield from self._sleep(0.02)
            if not self._is_alone:
                yield from self._collective(name, self.world.members_of[self.state.generation])
            yield from self._sleep(0.005)  # hooks that come after the last call
            self._is_deferred = True

        while not (yield from self._is_through(attempt)):
            self._mark_step = -1
            yield from self._go_on()
        self._end_phase()

    def _collective(self, what: Any, members: Any) -> Main:
        """Returns once all have come; raises where a member is gone before this process is through."""
        call = self.world.collective(self.state.generation, what, tuple(members))
        call.arrive(self)
        yield from self._until(lambda: call.is_complete or call.is_broken)
        if not call.is_complete:
            raise BackendError
        yield from self._until(lambda: True)
        if call.is_broken and self.kernel.random(self.lane).random() < 0.5:
            raise BackendError  # what the others have sent has not come
        call.leave(self)

    # ------------------------------------------------------------------ recovery

    def _is_through(self, attempt: Callable[[], Main]) -> Main:
        try:
            yield from attempt()
            return True
        except (BackendError, PeerFailure) as error:
            self._is_deferred = True
            self.world.let_go(self)
            if not (yield from self._is_call(error)):
                raise
            return False

    def _is_call(self, error: Exception) -> Main:
        if isinstance(error, PeerFailure):
            return self.state.error is not None
        is_entering = self.state.is_entering
        within_s = CALL_WITHIN_S + (self.world.settings.heartbeat_timeout_s if self.node else 0.0)
        within_s = EXPLAINED_WITHIN_S if is_entering else within_s
        yield from self._wait_beyond_calls(lambda: self.state.error is not None, within_s)
        return self.state.error is not None or is_entering

    def _stop(self) -> None:
        self.state.stop()
        self.is_stopped, self._error = True, None
        self.world.let_go(self)

    def _go_on(self) -> Main:
        """`Recovery._go_on`; returns whether the step is finished."""
        step, is_meeting = self.committed, self.boundary.is_meeting
        is_over = self._mark_step < step
        form: Form = yield from self._regroup(is_trying=not is_over and not is_meeting)
        is_lifted = form.step > step
        self._last_phase = form.phase
        if self.committed != form.step:
            raise self.world.violation(f"{self} goes on at step {self.committed}, and not {form.step}")
        return is_over or is_lifted

    def _regroup(self, *, is_trying: bool) -> Main:
        entered: list[Form] = []

        def attempt() -> Main:
            form = yield from self._wait_for_form(is_trying=is_trying)
            if self.state.place in form.left:
                raise Leaves
            self._enter(form)
            yield from self._meet(form)
            if form.behind:
                yield from self._sleep(0.05)
                if self.state.place in form.behind:
                    self.is_clean = False
                    self.world.occurs("copies")
                yield from self._collective("copy", form.members)
                self.world.copy(self, form)
            if form.joined:
                if form.source == self.state.place and not self._has_handover:
                    raise self.world.violation(f"{self} has no state made for those that join")
                yield from self._sleep(0.03)
                yield from self._collective("hand over", form.members)
            self._go_on_in(form)
            entered.append(form)

        while not entered:
            self._stop()
            yield from self._is_through(attempt)
        self._has_handover = False
        return entered[0]

    def _wait_for_form(self, *, is_trying: bool) -> Main:
        """`Calls.wait_for_form`."""
        posted = None

        def look() -> Form | None:
            nonlocal posted
            answer = self.state.answer(
                self.committed, is_clean=self.is_clean, is_trying=is_trying, phase=self.phase
            )
            form = self.state.next_form()
            if answer is not posted:
                posted = answer
                self.post(answer)
            return form

        while (form := look()) is None:
            yield from self._wait_beyond_calls(look, 10.0)
        return form

    def _join(self) -> Main:
        self._is_deferred = True

        def attempt() -> Main:
            form = yield from self._wait_for_invitation()
            self._enter(form)
            yield from self._meet(form)
            yield from self._collective("hand over", form.members)
            self.world.copy(self, form)
            self._go_on_in(form)
            self._form = form

        while self._form is None:
            self._stop()
            yield from self._is_through(attempt)

    def _wait_for_invitation(self) -> Main:
        """`Calls.wait_for_invitation`."""

        def look() -> bool:
            for message in self.state.ask_to_join():
                self.post(message)
            return self.state.invitation() is not None or self.is_deaf

        while True:
            yield from self._wait_beyond_calls(look)
            form = self.state.invitation()
            if form is not None:
                return form
            raise Leaves  # the others have ended their run

    def _enter(self, form: Form) -> None:
        self.state.enter(form)
        self.is_stopped, self._error = False, None
        self.world.entered(self, form)

    def _meet(self, form: Form) -> Main:
        """`meet_again`: all members come, and connect to each other."""
        yield from self._collective("meet", form.members)
        yield from self._sleep(0.02)
        yield from self._collective("connect", form.members)

    def _go_on_in(self, form: Form) -> None:
        if not self.is_clean:
            raise self.world.violation(f"{self} goes on without its state")
        for message in self.state.go_on():
            self.post(message)

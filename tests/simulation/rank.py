"""A process of the run: its channel, and a main thread that trains as `elastic/recovery.py` does.

The main thread is a generator: it yields what it waits for, and is resumed or interrupted there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import lightning_ddp.supervise.protocol as protocol
from lightning_ddp.errors import PeerFailure
from lightning_ddp.supervise.failure_record import FailureRecord, Identity, Where
from lightning_ddp.supervise.orders import NewGeneration, Order, Progress, Task, Wish, WishKind
from lightning_ddp.supervise.protocol import Message
from lightning_ddp.supervise.rank_state import Passage, RankState
from simulation.network import describe

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["Process"]

ALL_HERE_WITHIN_S = 20.0
CALL_WITHIN_S = 5.0
EXPLAINED_WITHIN_S = 0.5
ASKS_EVERY_S = 0.5
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
        pid: its own in this world; never used again.
        seen_pid: the one that its machine gives it, perhaps a second time after the node was lost.
        place: its place.
        node: of that.
        start: which one in its place it is, if it is to join; None for a first one.
        is_launcher: whether it starts the others of its node.
    """

    def __init__(
        self,
        world: World,
        pid: int,
        place: int,
        node: int,
        *,
        seen_pid: int,
        start: int | None,
        is_launcher: bool,
    ) -> None:
        self.world, self.kernel, self.pid, self.node = world, world.kernel, pid, node
        self.place, self.is_launcher, self.seen_pid = place, is_launcher, seen_pid
        self.start_number, self.is_new = start, start is not None
        self.state = RankState(place, is_new=self.is_new)
        self.lane = f"p{pid}"
        self.is_alive, self.is_frozen, self.exit_code = True, False, None
        self.cause: FailureRecord | None = None
        """What this process knows to be the first failure."""
        self.is_connected = self.is_deaf = False
        self.failed_at: float | None = None
        self.inbox: list[Message] = []
        """What has come while it was stopped."""
        self._outbox: list[Message] = []
        """What it says before it is connected."""
        self.was_asked_to_leave = False
        self.asked_to_stop_at: float | None = None
        """When a signal has asked it to have all stop."""
        self.entered_last = 0
        """The last generation that it has entered."""
        self.raised_outside = False
        """Whether its script has raised while it was no member."""
        self._is_hanging = False
        """Whether the main thread does not return from where it is, while the channel goes on."""
        self.log: list[tuple[int, int]] = []
        """Committed steps: in which generation, by how many ranks."""
        self.is_clean = True
        self.has_parted = False
        """Whether it has another state than the others, and they know so."""
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
        self._is_meeting = False
        self._last_phase = 0
        self._has_handover = False
        """Whether it has put together what those that join take over."""
        self._form: NewGeneration | None = None
        self._main: Main | None = None
        self._wait: Wait | None = None
        self._is_resuming = False
        self._num_moves = 0

    @property
    def identity(self) -> Identity:
        return Identity(
            rank=self.place,
            node_rank=self.node,
            host=f"node{self.node}",
            pid=self.seen_pid,
            start=self.start_number,
        )

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

    @property
    def is_held(self) -> bool:
        """Whether it, or its main thread alone, stands still."""
        return self.is_frozen or self._is_hanging

    def hang(self) -> None:
        self._is_hanging = True

    def go_on_after_hanging(self) -> None:
        self._is_hanging = False
        self.poke()

    def ask_to_stop(self) -> None:
        """A signal that asks all to stop, perhaps after one that has asked this process to leave."""
        if self.state.has_met and self._may_leave:
            self.asked_to_stop_at = self.asked_to_stop_at or self.kernel.now
            self.state.ask(Wish(WishKind.STOP, 2))
            self.post_news()

    def sigterm(self) -> None:
        """As `FailureHandler._requested_by` answers it; one that waits for others is ended by the kernel."""
        if not self.state.has_met:
            self.post(protocol.Failed(FailureRecord.of_identity(self.identity, "SIGTERM before all had met")))
            self.end(143)
        elif not self.world.plan.leaves or not self._may_leave or self.world.is_host(self):
            self.state.ask(Wish(WishKind.STOP, 15))
            self.post_news()
        else:
            self.was_asked_to_leave = True
            is_node = self.is_launcher and self.node != 0
            self.state.ask(Wish(WishKind.LEAVE_NODE if is_node else WishKind.LEAVE, 15))
            self.post_news()

    def post(self, message: Message) -> None:
        if self.is_connected:
            self.world.to_server(self, message)
        else:
            self._outbox.append(message)

    def post_news(self, *, is_due: bool = False) -> None:
        """Reports, if there is something to report."""
        if self.is_connected and self.is_alive and not self.is_deaf and not self.is_frozen:
            waits = "the others" if self._wait is not None and self._wait.until is not None else None
            where = Where(step=self.committed, waits_for=waits, count=self._num_moves)
            report = self.state.news(lambda: where, is_due=is_due)
            if report is not None:
                self.post(report)

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
            case protocol.Start(place, number):
                self.world.asked_to_start(self, place, number)
            case Order():
                error = self.state.hear(message)
                if error is not None:
                    self._error, self._interrupted_at = error, self.kernel.now
                self.post_news()
            case _:
                raise AssertionError(message)
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

    def report_now_and_then(self) -> None:
        if self.is_alive and self.is_connected and not self.is_deaf:
            self.post_news(is_due=True)
            self.kernel.at(self.kernel.now + self.world.period_s, self.report_now_and_then)

    # ------------------------------------------------------------------ the main thread

    def poke(self, within_s: float = LOOK_EVERY_S) -> None:
        """The main thread looks again, soon."""
        if not self._is_resuming and self.is_alive:
            self._is_resuming = True
            delay = min(self.kernel.delay(self.lane, within_s / 10), within_s)
            self.kernel.at(self.kernel.now + delay, self._resume)

    def _resume(self) -> None:
        self._is_resuming = False
        if not self.is_alive or self.is_held or self._wait is None:
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
        self._num_moves += 1
        try:
            self._wait = self._main.throw(error) if error is not None else next(self._main)
        except StopIteration:
            self._wait = None
            return
        self.post_news()
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

    def _wait_beyond_calls(
        self,
        condition: Callable[[], Any],
        within_s: float = float("inf"),
        then: Callable[[], Any] | None = None,
    ) -> Main:
        yield Wait(condition, self.kernel.now + within_s, is_interruptible=False)
        return (then or condition)()

    def _run(self) -> Main:
        """The script, from its start to its end."""
        code = 1
        try:
            try:
                yield from self._script()
                code = 0
            except (Leaves, Stops) as error:
                if isinstance(error, Leaves):
                    self.world.checks.left_alone(self)
                code, self.is_training = 0, False
                self.state.end_run()
            except RunFailed:
                pass
            except UserError:
                self.is_sound, self.raised_outside = False, not self.is_training
                self._decline(None if self.world.plan.exceptions else "cannot continue: bad sample")
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
                self._decline(None if self.world.plan.exceptions else "cannot continue: lost a connection")
                record = FailureRecord.of_identity(
                    self._ranked(), "reset", exception_type="RuntimeError", exception_class="RuntimeError"
                )
                self.post(protocol.SecondaryFailure(record))
                yield from self._wait_beyond_calls(lambda: self.cause is not None, CALL_WITHIN_S)
        except RunFailed:
            pass
        try:
            yield from self._end_script(code)
        except RunFailed:
            code = 1
        self.end(code)

    def _end_script(self, code: int) -> Main:
        """`JobContext._leave`."""
        if code == 0 and not self.world.is_host(self):
            self.state.leave()
            yield Wait(None, self.kernel.now + 0.01, is_interruptible=False)
        while self.world.waits_for_children(self):
            yield from self._wait_beyond_calls(lambda: not self.world.waits_for_children(self), 1.0)

    def _decline(self, why: str | None) -> None:
        """This process fails; `why` the others cannot go on without it."""
        if why is not None:
            self.world.note_decline(self)
        self.state.fail(why)
        self.post_news()

    def _ranked(self) -> Identity:
        return replace(self.identity, rank=self.state.rank)

    def _script(self) -> Main:
        yield from self._sleep(0.05)  # imports
        self.world.connect(self)
        self.is_connected = True
        for message in self._outbox:
            self.post(message)
        self.report_now_and_then()
        self.state.begin_run("fit")
        if self.is_new:
            yield from self._sleep(0.05)
            if self.user_error:
                raise UserError
            self._may_leave = True
            yield from self._join()
        else:
            if not (yield from self._until(lambda: self.state.has_met, ALL_HERE_WITHIN_S)):
                self.post(
                    protocol.Failed(FailureRecord.of_identity(self.identity, "not all ranks have arrived"))
                )
                self._decline("cannot continue: not all ranks have arrived")  # as `FailureHandler.end` does
                yield from self._wait_beyond_calls(lambda: self.cause is not None, CALL_WITHIN_S)
                raise RunFailed
            yield from self._collective("set-up", range(self.world.plan.num_ranks))
        self._may_leave, self._is_deferred = True, True
        self.is_training = True
        while self.committed < self.world.last_step or self._form is not None:
            yield from self._batch()
            if self.committed % VALIDATES_EVERY == 0 and self._form is None:
                yield from self._repeat(("validation", self.committed))
        self._may_leave = False
        self.state.end_boundaries()
        yield from self._repeat("end of fit")
        self._is_deferred = self.is_training = False
        self.has_ended_fit = True
        self.state.end_run()
        yield from self._until(self.state.has_ended_everywhere)
        if self.world.plan.tests_after:
            yield from self._test()

    def _test(self) -> Main:
        """`Trainer.test`: another run, at whose boundaries all may stop, and nobody joins or leaves."""
        was_asked = self.was_asked_to_leave
        self.state.begin_run("test")
        for _ in range(NUM_TESTS):
            yield from self._boundary()
            yield from self._sleep(0.1)
        if was_asked:
            raise self.world.violation(f"{self} was asked to leave, and went on to its end")
        self.state.end_run()
        yield from self._until(self.state.has_ended_everywhere)

    # ------------------------------------------------------------------ steps

    def _batch(self) -> Main:
        """`Recovery._advance`."""
        if self._form is not None:
            form, self._form = self._form, None
            self.phase = self._last_phase = form.phase
        while True:
            self._is_meeting = False
            is_through = yield from self._is_through(self._attempt)
            if is_through and not self._is_meeting:
                break
            is_finished = yield from self._go_on(is_meeting=is_through)
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
        self.state.place_boundary(self.committed << 32, may_meet=True)
        passage = yield from self._boundary()
        if passage is Passage.MEET:
            self._is_deferred, self._has_handover = True, self.state.order.has_new
            self._is_meeting = True
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
        """`FailureHandler.reached_step_boundary`."""
        if self._error is not None:
            raise self._error
        passages = [self.state.look()]

        def looks_again() -> bool:
            passages[0] = self.state.look()
            return passages[0] is not Passage.WAIT

        if passages[0] is Passage.WAIT:
            yield from self._until(looks_again, then=lambda: True)
        passage = passages[0]
        if passage is Passage.STOP:
            raise Stops
        return passage

    def _repeat(self, name: Any) -> Main:
        """`Recovery.repeat`: a part of the loops that takes no steps."""

        def attempt() -> Main:
            if self._is_alone:  # all have come to its end, and others have gone on
                return
            self._is_deferred = False
            if self._error is not None:
                raise self._error
            yield from self._sleep(0.02)
            members = self.world.members_of[self.state.generation]
            yield from self._collective(name, members)
            yield from self._sleep(0.005)  # hooks that come after the last call
            yield from self._collective((name, "end"), members)
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
            return self.state.is_called
        is_entering = self.state.is_entering
        within_s = CALL_WITHIN_S + (self.world.settings.heartbeat_timeout_s if self.node else 0.0)
        within_s = EXPLAINED_WITHIN_S if is_entering else within_s
        for _ in range(int(within_s / ASKS_EVERY_S)):  # a time in which it is stopped does not count
            if self.state.is_called:
                break
            self.state.say_again()
            yield from self._wait_beyond_calls(lambda: self.state.is_called, ASKS_EVERY_S)
        return self.state.is_called or is_entering

    def _stop(self, *, has_met: bool = False) -> None:
        self.state.stop(has_met=has_met)
        self.post_news()
        self.is_stopped, self._error = True, None
        self.world.let_go(self)

    def _go_on(self, *, is_meeting: bool = False) -> Main:
        """`Recovery._go_on`; returns whether the step is finished."""
        step = self.committed
        is_over = self._mark_step < step
        form: NewGeneration = yield from self._regroup(
            is_trying=not is_over and not is_meeting, has_met=is_meeting
        )
        is_lifted = form.step > step
        self._last_phase = form.phase
        if self.committed != form.step:
            raise self.world.violation(f"{self} goes on at step {self.committed}, and not {form.step}")
        return is_over or is_lifted

    def _regroup(self, *, is_trying: bool, has_met: bool) -> Main:
        entered: list[NewGeneration] = []

        def attempt() -> Main:
            form = yield from self._wait_for_generation(is_trying=is_trying)
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
            yield from self._sleep(0.01)  # deals the data anew
            self._go_on_in(form)
            entered.append(form)

        while not entered:
            self._stop(has_met=has_met)
            has_met = False
            yield from self._is_through(attempt)
        self._has_handover = False
        return entered[0]

    def _wait_for_generation(self, *, is_trying: bool) -> Main:
        """Answers, and waits for the generation that follows."""
        self.state.answer(Progress(self.committed, self.is_clean, is_trying, self.phase))
        found: list[NewGeneration] = []

        def look() -> bool:
            new = self.state.enter_next()
            if new is not None:
                self._entered(new)
                found.append(new)
            return bool(found) or self.state.task is Task.LEAVE or self.is_deaf

        yield from self._wait_beyond_calls(look, then=lambda: True)
        if not found:
            raise Leaves
        return found[0]

    def _join(self) -> Main:
        self._is_deferred = True

        def attempt() -> Main:
            form = yield from self._wait_for_generation(is_trying=False)
            yield from self._meet(form)
            yield from self._collective("hand over", form.members)
            self.world.copy(self, form)
            yield from self._sleep(0.01)
            self._go_on_in(form)
            self._form = form

        while self._form is None:
            self._stop()
            yield from self._is_through(attempt)

    def _entered(self, form: NewGeneration) -> None:
        self.is_stopped, self._error = False, None
        self.world.entered(self, form)

    def _meet(self, form: NewGeneration) -> Main:
        """`meet_again`: all members come, and connect to each other."""
        yield from self._collective("meet", form.members)
        yield from self._sleep(0.02)
        yield from self._collective("connect", form.members)

    def _go_on_in(self, form: NewGeneration) -> None:
        if not self.is_clean:
            raise self.world.violation(f"{self} goes on without its state")
        self.state.settle()
        self.post_news()

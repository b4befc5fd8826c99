"""Membership: no history of failures and messages lets two generations commit the same step."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.launch.calls import Calls
from lightning_ddp.supervise.failure_record import FailureRecord, Identity
from lightning_ddp.supervise.members import Vacancies
from lightning_ddp.supervise.membership import REPEAT_S, SETTLE_S, STEPS_TO_FORGET, Member, Membership, Phase
from lightning_ddp.supervise.protocol import (
    Form,
    Gather,
    Joined,
    MeetAfter,
    Message,
    Muster,
    Position,
    Present,
)
from lightning_ddp.supervise.settings import RecoverySettings, ReplaceSettings
from lightning_ddp.supervise.stop_main import Alarm, StepBoundary

ANSWER_S = 30.0
MANY = RecoverySettings(max_recoveries=100)


def anywhere(place: int) -> bool:
    return True


def record(place: int) -> FailureRecord:
    return FailureRecord(rank=place, message="killed", exit_code=-9)


@dataclass
class Process:
    """A process of the run. Its state is the list of its commits, as (step, generation)."""

    member: Member
    log: list[tuple[int, int]] = field(default_factory=list)
    is_clean: bool = True
    is_alive: bool = True
    has_answered: bool = False
    is_stopped: bool = False
    """Since it has answered a call, until it is in a generation again."""
    copies_from: int | None = None
    """In the generation that it enters: whose state it has still to copy."""
    position: int = 0
    """Boundaries that it has passed in its generation."""
    is_held: bool = False
    meets_at: int | None = None
    is_out: bool = False
    """Whether it has left, as it was asked to."""

    @property
    def step(self) -> int:
        return len(self.log)

    @property
    def trains(self) -> bool:
        return self.is_alive and not self.is_stopped and self.copies_from is None

    @property
    def may_pass(self) -> bool:
        """Whether it passes the next boundary."""
        return not self.is_held or (self.meets_at is not None and self.position < self.meets_at)


IN_ORDER = Gather, MeetAfter, Position
"""Messages that a connection neither loses nor delivers in another order, as nobody says them again."""


class World:
    """Processes, a server, and a network that delays, repeats, reorders and, on request, loses messages."""

    def __init__(self, size: int) -> None:
        self.now = 0.0
        self.server = Membership(range(size), MANY, ANSWER_S)
        self.processes = [Process(Member(place)) for place in range(size)]
        self.network: list[tuple[int | None, int, Message]] = []
        """(receiver or None for the server, sender, message)"""
        self.gave: dict[tuple[int, int], set[int]] = {}
        """(generation, step) -> who has given its gradients to all"""
        self.members_of: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self.offered: dict[tuple[int, int | None], list[tuple[int, int]]] = {}
        """(generation, source) -> the state that it sends"""
        self.released: set[int] = set()
        """Those that have been let go."""

    # ---------------------------------------------------------------- what may happen

    def moves(self) -> list[tuple[str, int]]:
        """Everything that can happen now."""
        found: list[tuple[str, int]] = [("wait", 0)]
        for place, process in enumerate(self.processes):
            if not process.is_alive:
                continue
            if self.can_give(place):
                found.append(("give", place))
            if self.can_commit(place):
                found.append(("commit", place))
            if process.member.is_called and not process.has_answered and self.may_answer(place):
                found.append(("answer", place))
            if (
                process.copies_from is not None
                and (process.member.generation, process.copies_from) in self.offered
            ):
                found += [("half copy", place), ("copy", place)]
            found += [("die", place)] if self.num_members() > 1 else []
            found += [("vanish", place)] if self.num_members() > 1 else []
            found += [("leave", place)] if place in self.server.members and not process.is_out else []
        found += [("execute", place) for place in sorted(self.server.condemned)]
        found += [("deliver", i) for i in range(len(self.network)) if self.is_next(i)]
        found += [
            (move, i)
            for move in ("repeat", "lose")
            for i, entry in enumerate(self.network)
            if not self.is_sure(*entry) and self.is_next(i)
        ]
        return found

    def is_sure(self, receiver: int | None, sender: int, message: Message) -> bool:
        """Whether a message is never lost, nor repeated."""
        is_answer = isinstance(message, Present) and not message.is_trying
        is_release = isinstance(message, Form) and receiver not in message.members
        return isinstance(message, IN_ORDER) or is_answer or is_release

    def is_next(self, which: int) -> bool:
        """Whether a message may come now: of those that come in order the others have come."""
        receiver, sender, message = self.network[which]
        before = [m for r, s, m in self.network[:which] if (r, s) == (receiver, sender)]
        return not any(isinstance(m, IN_ORDER) or isinstance(message, IN_ORDER) for m in before)

    def may_answer(self, place: int) -> bool:
        """A call stops a process wherever it is; one to meet others does at the boundary."""
        process = self.processes[place]
        if process.meets_at is None:
            return True
        given = self.gave.get((process.member.generation, process.step), set())
        return process.trains and place not in given and process.position >= process.meets_at

    def num_members(self) -> int:
        return len(self.server.remaining)

    def can_give(self, place: int) -> bool:
        process = self.processes[place]
        given = self.gave.get((process.member.generation, process.step), set())
        return process.trains and place not in given and process.may_pass

    def can_commit(self, place: int) -> bool:
        process = self.processes[place]
        generation = process.member.generation
        given = self.gave.get((generation, process.step), set())
        return process.trains and given == set(self.members_of[generation])

    def do(self, move: str, which: int) -> None:
        if move == "wait":
            self.wait(SETTLE_S)
        elif move in ("deliver", "repeat", "lose"):
            receiver, sender, message = self.network[which]
            if move != "repeat":
                del self.network[which]
            if move != "lose":
                self.deliver(receiver, sender, message)
        elif move == "execute":
            self.processes[which].is_alive = False
            self.server.ended(which)
        elif move in ("die", "vanish"):  # the server learns of it at once; or only that the link is cut
            self.processes[which].is_alive = move == "vanish"
            self.send_all(self.server.lost(which, record(which), self.now, has_ended=move == "die"))
        elif move == "leave":
            self.server.leave([which], self.now)
        else:
            getattr(self, move.replace(" ", "_"))(which)
        self.check()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for place in self.server.late(self.now):
            self.send_all(self.server.lost(place, record(place), self.now, has_ended=False))
        self.send_all(self.server.due(self.now))
        if self.server.why_to_stop(self.now) is not None:
            self.server.stay()
        self.send_all(self.server.gather(self.now))

    def give(self, place: int) -> None:
        process = self.processes[place]
        process.position += 1
        self.gave.setdefault((process.member.generation, process.step), set()).add(place)

    def commit(self, place: int) -> None:
        process = self.processes[place]
        process.log.append((process.step, process.member.generation))

    def answer(self, place: int) -> None:
        process = self.processes[place]
        process.has_answered, process.is_stopped, process.copies_from = True, True, None
        is_trying = process.meets_at is None
        answer = process.member.answer(process.step, is_clean=process.is_clean, is_trying=is_trying)
        self.network.append((None, place, answer))

    def half_copy(self, place: int) -> None:
        self.processes[place].is_clean = False

    def copy(self, place: int) -> None:
        process = self.processes[place]
        assert process.copies_from is not None
        process.log = list(self.offered[process.member.generation, process.copies_from])
        process.is_clean, process.copies_from = True, None
        self.network.append((None, place, Joined(process.member.generation)))

    def send_all(self, messages: list[tuple[int, Message]]) -> None:
        self.released.update(*(message.left for _, message in messages if isinstance(message, Form)))
        self.network += [(place, -1, message) for place, message in messages]

    def deliver(self, receiver: int | None, sender: int, message: Message) -> None:
        if receiver is None:
            if isinstance(message, Present):
                self.server.present(sender, message)
            elif isinstance(message, Joined):
                self.server.joined(sender, message.generation)
            elif isinstance(message, Position):
                self.send_all(self.server.stands(sender, message.position))
            self.send_all(self.server.due(self.now))
            return
        process = self.processes[receiver]
        if not process.is_alive:
            return
        if isinstance(message, Gather):
            process.is_held = True
            self.network.append((None, receiver, Position(process.position)))
        elif isinstance(message, MeetAfter):
            if process.member.hear_call(message):
                process.has_answered, process.meets_at = False, message.position
        elif isinstance(message, Muster):
            if process.member.hear_call(message):
                process.has_answered, process.meets_at = False, None
            elif (again := process.member.repeat()) is not None and message.call == again.call:
                self.network.append((None, receiver, again))
        elif isinstance(message, Form):
            if process.member.fits(message):
                self.enter(receiver, message)
            elif process.member.is_released(message):
                assert process.is_stopped
                process.is_out = True
            elif message.generation == process.member.generation and process.trains:
                self.network.append((None, receiver, Joined(message.generation)))

    def enter(self, place: int, form: Form) -> None:
        others = {p for p in range(len(self.processes)) if p not in form.members}
        alive = {p for p in others if self.processes[p].is_alive}
        assert not any(self.processes[p].trains for p in alive), "one that has left still runs"
        assert alive <= self.released, "an expelled process still runs"
        process = self.processes[place]
        process.member.enter(form)
        process.has_answered = process.is_stopped = process.is_held = False
        process.position, process.meets_at = 0, None
        self.members_of[form.generation] = form.members
        if place in form.behind:
            process.copies_from = form.source
        else:
            assert process.is_clean
            assert process.step == form.step
            if place == form.source:
                self.offered[form.generation, place] = list(process.log)
            self.network.append((None, place, Joined(form.generation)))

    # ---------------------------------------------------------------- what has to hold

    def check(self) -> None:
        present = [self.processes[p] for p in self.server.remaining]
        for one in present:
            assert [step for step, _ in one.log] == list(range(one.step))
            generations = [generation for _, generation in one.log]
            assert generations == sorted(generations)
            for other in present:
                if one.is_clean and other.is_clean:
                    assert abs(one.step - other.step) <= 1
                    shared = min(one.step, other.step)
                    assert one.log[:shared] == other.log[:shared], "a step was committed twice"

    def settle(self) -> None:
        """From here on nothing fails and nothing is lost: the run has to come to rest."""
        for _ in range(40):
            while self.network:
                self.do("deliver", 0)
            for place in sorted(self.server.condemned):
                self.do("execute", place)
            for move, which in self.moves():
                is_gathered = move == "give" and self.processes[which].is_held
                is_due = move in ("answer", "copy", "commit") or is_gathered
                if is_due and (move, which) in self.moves():
                    self.do(move, which)
            self.wait(REPEAT_S)
            self.check()
            if self.server.phase is Phase.OVER or (self.server.phase is Phase.RUNNING and not self.network):
                break
        if self.server.phase is Phase.OVER:
            assert self.server.reason is not None
            assert not any(self.processes[place].is_clean for place in self.server.remaining)
            return
        assert self.server.phase is Phase.RUNNING
        assert not self.server._leaving
        for place in self.server.members:
            process = self.processes[place]
            assert process.member.generation == self.server.generation
            assert process.trains
            assert process.is_clean
        before = max(self.processes[place].step for place in self.server.members)
        for _ in range(2):  # one may be a step behind
            for move in ("give", "commit"):
                for place in self.server.members:
                    if (move, place) in self.moves() and self.processes[place].step <= before:
                        self.do(move, place)
        assert min(self.processes[place].step for place in self.server.members) > before


WEIGHTS = {"die": 2, "vanish": 1, "lose": 1, "repeat": 2, "leave": 4, "half copy": 20}
"""How likely a thing is, where that is not as likely as a delivered message: 8."""


def play(size: int, draws: list[int]) -> World:
    """A history: each number chooses one of the things that can happen."""
    world = World(size)
    for draw in draws:
        moves = [move for move in world.moves() for _ in range(WEIGHTS.get(move[0], 8))]
        world.do(*moves[draw % len(moves)])
    world.settle()
    return world


@settings(max_examples=400)
@given(st.integers(2, 5), st.lists(st.integers(0, 10_000), max_size=120))
def test_no_history_commits_a_step_in_two_generations(size, draws) -> None:
    play(size, draws)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(i, marks=pytest.mark.exhaustive if i else pytest.mark.slow) for i in range(10)],
)
def test_a_hundred_thousand_histories(seed) -> None:
    generator = random.Random(seed)
    reached = set()
    for _ in range(10_000):
        size = generator.randint(2, 5)
        world = play(size, [generator.randrange(10_000) for _ in range(generator.randint(5, 120))])
        reached.add((world.server.phase, world.server.generation))
    assert {(Phase.RUNNING, generation) for generation in range(4)} <= reached


def at_rest(membership: Membership, step: int, now: float, *, is_trying: bool = True) -> None:
    """All that are left answer that they have committed `step` steps, and join."""
    for place in membership.remaining:
        membership.present(place, Present(membership._call, step, is_clean=True, is_trying=is_trying))
    membership.due(now + SETTLE_S)
    for place in membership.members:
        membership.joined(place, membership.generation)


def fail(membership: Membership, place: int, step: int, **how: Any) -> None:
    """A process is lost, at a step that it may have begun again; the others meet."""
    if how.pop("has_begun", True):
        membership.begun(place, membership.generation)
    cause = replace(record(place), **how)
    membership.lost(place, cause, 0.0, has_ended=True)
    if membership.phase is not Phase.OVER:
        at_rest(membership, step, 0.0)


def test_too_few_ranks_end_the_run() -> None:
    membership = Membership(range(3), RecoverySettings(min_world_size=2), ANSWER_S)
    fail(membership, 2, 5)
    assert (membership.phase, membership.members) == (Phase.RUNNING, (0, 1))
    fail(membership, 1, 9)
    assert membership.phase is Phase.OVER
    assert "min_world_size" in str(membership.reason)
    assert membership.cause is not None
    assert membership.cause.rank == 1


def test_too_few_ranks_take_no_step_until_others_have_joined_or_their_time_is_over() -> None:
    membership = Membership(range(3), ReplaceSettings(min_world_size=3, wait_s=5.0), ANSWER_S)
    membership.lost(2, record(2), 0.0, has_ended=True)
    for place in (0, 1):
        membership.present(place, Present(1, 5, is_clean=True, is_trying=True))
    sent = membership.due(SETTLE_S)
    for place in (0, 1):  # in this order
        assert [type(message) for receiver, message in sent if receiver == place] == [Form, Gather]
        membership.joined(place, membership.generation)
    assert (membership.phase, membership.members) == (Phase.GATHERING, (0, 1))
    assert membership.stands(0, 0) == membership.stands(1, 0) == membership.gather(0.0) == []
    assert membership.deadline() == 5.0
    membership.ready(2)
    assert membership.gather(0.0) == [(place, MeetAfter(2, 0, has_new=True)) for place in (0, 1)]
    assert membership.gather(0.0) == []
    for place in (0, 1):
        membership.present(place, Present(2, 5, is_clean=True, is_trying=False))
    membership.due(1.0)
    for place in range(3):
        membership.joined(place, membership.generation)
    assert (membership.phase, membership.members, membership.cause) == (Phase.RUNNING, (0, 1, 2), None)
    membership.lost(0, record(0), 7.0, has_ended=True)
    at_rest(membership, 6, 7.0)
    assert membership.deadline() == 12.0
    membership.due(12.0)
    assert membership.phase is Phase.OVER
    assert "wait_s=5 s no others" in str(membership.reason)
    assert membership.cause is not None


EXITED, RAISED = {"exit_code": 3}, {"exception_class": "builtins:ValueError", "exit_code": None}
CRASHED, VANISHED = {"exit_code": -signal.SIGSEGV}, {"exit_code": None}


@pytest.mark.parametrize("how", [EXITED, RAISED, CRASHED], ids=str)
@pytest.mark.parametrize("step", [6, 7], ids="step {}".format)
def test_samples_that_end_two_processes_alike_end_the_run(step, how) -> None:
    """With fewer ranks a part of the samples of a step comes one step later."""
    membership = Membership(range(5), MANY, ANSWER_S)
    fail(membership, 4, 3, **how)
    fail(membership, 3, 6, **how)
    assert membership.phase is Phase.RUNNING
    fail(membership, 2, step, **how)
    assert membership.phase is Phase.OVER
    assert f"step {step} failed twice alike: the data" in str(membership.reason)


@pytest.mark.parametrize(
    "second",
    [{}, CRASHED, {**EXITED, "has_begun": False}, {**EXITED, "step": 8}],
    ids=["killed", "otherwise", "before it began", "later"],
)
def test_chance_that_ends_a_second_process_at_one_step_does_not_end_the_run(second) -> None:
    membership = Membership(range(5), MANY, ANSWER_S)
    fail(membership, 4, 6, **EXITED)
    fail(membership, 3, **{"step": 6, **second})
    assert (membership.phase, membership.members) == (Phase.RUNNING, (0, 1, 2))


@pytest.mark.parametrize("how", [{}, VANISHED, {"exit_code": -signal.SIGTERM}], ids=str)
def test_what_comes_from_outside_ends_the_run_at_the_third_time(how) -> None:
    membership = Membership(range(7), MANY, ANSWER_S)
    for step in (5, 6, 6, 7):
        fail(membership, membership.members[-1], step, **how)
    fail(membership, 2, 7, **how, has_begun=False)
    assert membership.phase is Phase.RUNNING
    fail(membership, 1, 7, **how)
    assert membership.phase is Phase.RUNNING
    assert membership.members == (0,)
    membership = Membership(range(4), MANY, ANSWER_S)
    for place in (3, 2, 1):
        fail(membership, place, 6, **how)
    assert "step 6 failed three times alike" in str(membership.reason)


def test_a_process_that_has_begun_again_while_others_still_meet_is_another_failure() -> None:
    membership = Membership(range(4), MANY, ANSWER_S)
    for place in (3, 2):
        membership.begun(place, membership.generation)
        membership.lost(place, replace(record(place), **EXITED), 0.0, has_ended=True)
        assert membership.phase is Phase.CALLING
        for other in membership.remaining:
            membership.present(other, Present(membership._call, 6, is_clean=True, is_trying=True))
        membership.due(SETTLE_S)  # and nobody says yet that it is in the generation
    assert "failed twice alike" in str(membership.reason)


def test_another_loss_while_a_generation_is_formed_is_the_same_recovery() -> None:
    membership = Membership(range(4), MANY, ANSWER_S)
    membership.lost(3, record(3), 0.0, has_ended=True)
    for place in (0, 1, 2):
        membership.present(place, Present(1, 5, is_clean=True, is_trying=True))
    assert [form.generation for _, form in membership.due(SETTLE_S)] == [1, 1, 1]
    fail(membership, 2, 5, has_begun=False)
    assert (membership.phase, membership.members, membership.generation) == (Phase.RUNNING, (0, 1), 2)
    assert membership.num_recoveries == 1


@pytest.mark.parametrize("distance", [1, STEPS_TO_FORGET])
def test_recoveries_without_progress_end_the_run(distance) -> None:
    membership = Membership(range(6), RecoverySettings(max_recoveries=2), ANSWER_S)
    for number in range(3):
        fail(membership, 5 - number, number * distance)
    assert membership.phase is (Phase.OVER if distance == 1 else Phase.RUNNING)


def test_a_rank_without_an_answer_is_lost_as_well() -> None:
    membership = Membership(range(3), MANY, ANSWER_S)
    membership.lost(2, record(2), 0.0, has_ended=True)
    membership.present(0, Present(1, 5, is_clean=True, is_trying=True))
    assert membership.late(ANSWER_S - 1) == ()
    assert membership.late(ANSWER_S) == (1,)
    membership.lost(1, record(1), ANSWER_S, has_ended=False)
    assert membership.due(ANSWER_S + SETTLE_S) == []  # it may still run
    membership.ended(1)
    (form,) = [message for _, message in membership.due(ANSWER_S + SETTLE_S)]
    assert (form.members, form.lost, form.before) == ((0,), (1, 2), (0, 1, 2))


def test_a_state_that_is_half_copied_is_no_source() -> None:
    membership = Membership(range(3), MANY, ANSWER_S)
    membership.lost(2, record(2), 0.0, has_ended=True)
    membership.present(0, Present(1, 5, is_clean=False, is_trying=True))
    membership.present(1, Present(1, 5, is_clean=True, is_trying=True))
    form = membership.due(SETTLE_S)[0][1]
    assert isinstance(form, Form)
    assert (form.source, form.behind, form.step) == (1, (0,), 5)


def test_those_that_join_are_met_at_one_boundary_and_take_the_state_of_the_lowest() -> None:
    membership = Membership(range(3), MANY, ANSWER_S)
    fail(membership, 1, 5)
    assert membership.gather(0.0) == []  # nobody asks
    membership.ready(1)
    assert [place for place, _ in membership.gather(0.0)] == [0, 2]
    assert membership.phase is Phase.GATHERING
    assert membership.stands(0, 7) == []
    (_, first), (_, second) = membership.stands(2, 8)
    assert first == second == MeetAfter(2, 8, has_new=True)
    for place in (0, 2):
        assert membership.due(0.0) == []
        membership.present(place, Present(2, 9, is_clean=True, is_trying=False))
    forms = membership.due(0.0)
    assert [place for place, _ in forms] == [0, 1, 2]
    form = forms[0][1]
    assert isinstance(form, Form)
    assert (form.members, form.joined, form.lost, form.source) == ((0, 1, 2), (1,), (), 0)
    assert (form.behind, form.step, form.is_retried) == ((), 9, False)
    for place in range(3):
        membership.joined(place, form.generation)
    assert (membership.phase, membership.num_recoveries) == (Phase.RUNNING, 1)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_loss_while_others_join_leaves_them_out_until_they_ask_again(victim) -> None:
    """The one that joins dies, or the one that gives it its state: that is no step that fails twice."""
    membership = Membership(range(3), RecoverySettings(max_recoveries=3), ANSWER_S)
    fail(membership, 1, 5)
    membership.ready(1)
    membership.gather(0.0)
    for place in (0, 2):
        membership.stands(place, 0)
        membership.present(place, Present(2, 5, is_clean=True, is_trying=False))
    membership.due(0.0)
    membership.joined(2, membership.generation)
    called = membership.lost(victim, record(victim), 1.0, has_ended=True)
    assert [place for place, _ in called] == [place for place in range(3) if place != victim]
    assert membership.remaining == ((0, 2) if victim == 1 else (2,))
    at_rest(membership, 5, 1.0)
    assert (membership.phase, membership.members) == (Phase.RUNNING, (0, 2) if victim == 1 else (2,))


def test_a_member_says_that_it_goes_on_once_it_has_its_state_and_then_as_often_as_it_is_asked() -> None:
    """The server says again who is in a generation, to those that are slow and those that it did not hear."""
    posted: list[Message] = []
    calls = Calls(0, Interrupt(), Alarm(), StepBoundary())
    watch: Any = SimpleNamespace(
        post=posted.append, identity=Identity(rank=0, node_rank=0, pid=1, host="a"), failure=None
    )
    calls.watch = watch
    calls.on_message(MeetAfter(1, 5, has_new=True))
    form = Form(1, 1, (0, 1), (), (0,), 7, 0, (), is_retried=False, phase=0, joined=(1,))
    calls.on_message(form)
    how: dict[str, Any] = {"is_clean": True, "is_trying": False, "phase": 0, "check": lambda: None}
    calls.enter(calls.wait_for_form(7, **how))
    calls.on_message(form)
    assert not any(isinstance(message, Joined) for message in posted)
    calls.go_on()
    calls.on_message(form)
    assert [message for message in posted if isinstance(message, Joined)] == [Joined(1)] * 2


def test_a_failure_voids_a_meeting_and_one_that_does_not_get_its_state_in_time_is_lost() -> None:
    membership = Membership(range(3), MANY, ANSWER_S)
    fail(membership, 1, 5)
    membership.ready(1)
    membership.gather(0.0)
    membership.stands(0, 3)
    fail(membership, 2, 6)
    assert membership.members == (0,)
    assert membership.gather(0.0) == [(0, Gather())]
    membership.stands(0, 0)
    membership.present(0, Present(4, 6, is_clean=True, is_trying=False))
    membership.due(0.0)
    membership.joined(0, membership.generation)
    assert membership.late(ANSWER_S - 1) == ()
    assert membership.late(ANSWER_S) == (1,)


def gather(membership: Membership, *, step: int) -> list[tuple[int, Form]]:
    """All members meet at a boundary; what the server tells whom then."""
    assert [place for place, _ in membership.gather(SETTLE_S)] == list(membership.members)
    for place in membership.members:
        called = membership.stands(place, 0)
    assert {place for place, _ in called} == set(membership.members)
    for place in membership.members:
        membership.present(place, Present(membership._call, step, is_clean=True, is_trying=False))
    return [(place, form) for place, form in membership.due(SETTLE_S) if isinstance(form, Form)]


def test_those_that_are_asked_to_leave_are_let_go_at_a_boundary_and_nothing_failed() -> None:
    membership = Membership(range(4), MANY, ANSWER_S)
    membership.leave([0], 0.0)
    membership.leave([0, 2], 0.0)
    assert membership.gather(SETTLE_S / 2) == []  # others may be asked at the same time
    assert membership.deadline() == SETTLE_S
    told = gather(membership, step=5)
    (form,) = {form for _, form in told}
    assert [place for place, _ in told] == [1, 3, 0, 2]
    assert (form.members, form.left, form.lost, form.joined) == ((1, 3), (0, 2), (), ())
    assert (form.step, form.source, form.behind, form.is_retried) == (5, 1, (), False)
    for place in (1, 3):
        membership.joined(place, 1)
    assert (membership.phase, membership.num_recoveries, membership.deadline()) == (Phase.RUNNING, 0, None)


def test_who_leaves_may_be_lost_before_and_who_stays_is_asked_again_after_a_loss() -> None:
    membership = Membership(range(4), MANY, ANSWER_S)
    membership.leave([2, 3], 0.0)
    membership.gather(SETTLE_S)
    called = membership.lost(2, record(2), SETTLE_S, has_ended=True)
    assert [place for place, _ in called] == [0, 1, 3]
    at_rest(membership, 5, SETTLE_S)
    assert (membership.phase, membership.members) == (Phase.RUNNING, (0, 1, 3))
    (form,) = {form for _, form in gather(membership, step=5)}
    assert (form.members, form.left, form.lost) == ((0, 1), (3,), ())


def test_a_loss_while_others_leave_does_not_take_them_for_lost() -> None:
    membership = Membership(range(4), MANY, ANSWER_S)
    membership.leave([2], 0.0)
    gather(membership, step=5)
    membership.lost(3, record(3), 1.0, has_ended=True)
    for place in (0, 1):
        membership.present(place, Present(membership._call, 5, is_clean=True, is_trying=True))
    (form,) = {form for _, form in membership.due(1.0 + SETTLE_S)}
    assert isinstance(form, Form)
    assert (form.members, form.left, form.lost) == ((0, 1), (2,), (3,))


def test_one_leaves_and_another_joins_at_one_boundary() -> None:
    membership = Membership(range(3), MANY, ANSWER_S)
    fail(membership, 1, 5)
    membership.ready(1)
    membership.leave([0], 0.0)
    told = gather(membership, step=6)
    (form,) = {form for _, form in told}
    assert [place for place, _ in told] == [1, 2, 0]
    assert (form.members, form.left, form.joined, form.source) == ((1, 2), (0,), (1,), 2)


@pytest.mark.parametrize(("least", "leaving"), [(1, [0, 1, 2]), (2, [1, 2])])
def test_all_stop_where_too_few_would_stay(least, leaving) -> None:
    membership = Membership(range(3), RecoverySettings(min_world_size=least), ANSWER_S)
    membership.leave(leaving, 0.0)
    assert membership.why_to_stop(SETTLE_S / 2) is None
    assert f"min_world_size={least}" in str(membership.why_to_stop(SETTLE_S))
    assert membership.gather(SETTLE_S) == []
    membership.stay()
    assert membership.why_to_stop(SETTLE_S) is None
    assert membership.deadline() is None


def test_a_place_that_fails_again_soon_waits_longer_each_time_and_then_stays_vacant() -> None:
    vacancies = Vacancies(most=3)
    vacancies.lost([1], 10, 0.0)
    waited, now = [], 0.0
    while (at := vacancies.deadline(anywhere)) is not None:
        waited.append(at - now)
        assert vacancies.due(at - 0.01, anywhere) == []
        now = at
        for place in vacancies.due(at, anywhere):
            assert vacancies.is_expected(place)
            assert vacancies.ended(place, now)
    assert waited == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert not vacancies.ended(1, now)


@pytest.mark.parametrize("distance", [1, STEPS_TO_FORGET])
def test_steps_in_between_are_progress_of_a_place(distance) -> None:
    vacancies = Vacancies(most=3)
    vacancies.lost([1], 10, 0.0)
    vacancies.due(0.0, anywhere)
    vacancies.joined([1], 20)
    vacancies.lost([1], 20 + distance, 5.0)
    assert vacancies.deadline(anywhere) == (5.5 if distance == 1 else 5.0)


def test_the_place_of_a_spare_is_filled_again_once_it_was_called() -> None:
    vacancies = Vacancies(most=3)
    vacancies.open([4], 0.0)
    assert vacancies.due(0.0, anywhere) == [4]
    vacancies.waits(4, 1.0)
    vacancies.lost([1], 50, 2.0)
    assert vacancies.due(2.0, anywhere) == [1]
    vacancies.called(4, 2.0)
    assert vacancies.is_expected(1)
    assert not vacancies.is_expected(4)
    assert vacancies.deadline(anywhere) == 3.0
    assert vacancies.due(3.0, anywhere) == [4]
    vacancies.close(4)
    assert not vacancies.ended(4, 4.0)
    assert vacancies.deadline(anywhere) is None


@pytest.mark.parametrize(("waited_s", "delay_s"), [(1.0, 1.0), (100.0, 0.5)])
def test_a_spare_that_has_waited_long_is_started_again_soon(waited_s, delay_s) -> None:
    vacancies = Vacancies(most=3)
    vacancies.open([4], 0.0)
    vacancies.due(0.0, anywhere)
    vacancies.ended(4, 0.0)
    vacancies.due(0.5, anywhere)
    vacancies.waits(4, 1.0)
    assert vacancies.ended(4, 1.0 + waited_s)
    assert vacancies.deadline(anywhere) == 1.0 + waited_s + delay_s

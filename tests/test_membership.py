"""Membership: who goes on after a failure, from which step; `test_simulation.py` has its histories."""

from __future__ import annotations

import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.launch.calls import Calls
from lightning_ddp.supervise.failure_record import FailureRecord, Identity
from lightning_ddp.supervise.members import Vacancies
from lightning_ddp.supervise.membership import SETTLE_S, STEPS_TO_FORGET, Membership, Phase
from lightning_ddp.supervise.protocol import (
    Form,
    Gather,
    Joined,
    MeetAfter,
    Message,
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


def answer(membership: Membership, place: int, call: int, step: int, **how: Any) -> list[tuple[int, Message]]:
    """A process has stopped, and says where."""
    fields = {"is_clean": True, "is_trying": True, "phase": 0, "generation": 0, "has_state": True, **how}
    return membership.present(place, Present(call, step, **fields), record(place), 0.0)


def at_rest(membership: Membership, step: int, now: float, *, is_trying: bool = True) -> None:
    """All that are left answer that they have committed `step` steps, and join."""
    for place in membership.remaining:
        answer(membership, place, membership._call, step, is_clean=True, is_trying=is_trying)
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
        answer(membership, place, 1, 5)
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
        answer(membership, place, 2, 5, is_trying=False)
    membership.due(1.0)
    for place in range(3):
        membership.joined(place, membership.generation)
    assert (membership.phase, membership.members, membership.cause) == (Phase.RUNNING, (0, 1, 2), None)
    membership.lost(0, record(0), 7.0, has_ended=True)
    at_rest(membership, 6, 7.0)
    assert membership.deadline() == 12.0
    membership.due(12.0)
    assert membership.phase is Phase.OVER
    assert "within wait_s=5 s" in str(membership.reason)
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
    assert f"step {step} failed twice in the same way" in str(membership.reason)


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
    assert "step 6 failed three times in the same way" in str(membership.reason)


def test_a_process_that_has_begun_again_while_others_still_meet_is_another_failure() -> None:
    membership = Membership(range(4), MANY, ANSWER_S)
    for place in (3, 2):
        membership.begun(place, membership.generation)
        membership.lost(place, replace(record(place), **EXITED), 0.0, has_ended=True)
        assert membership.phase is Phase.CALLING
        for other in membership.remaining:
            answer(membership, other, membership._call, 6)
        membership.due(SETTLE_S)  # and nobody says yet that it is in the generation
    assert "failed twice in the same way" in str(membership.reason)


def test_another_loss_while_a_generation_is_formed_is_the_same_recovery() -> None:
    membership = Membership(range(4), MANY, ANSWER_S)
    membership.lost(3, record(3), 0.0, has_ended=True)
    for place in (0, 1, 2):
        answer(membership, place, 1, 5)
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
    answer(membership, 0, 1, 5)
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
    answer(membership, 0, 1, 5, is_clean=False, is_trying=True)
    answer(membership, 1, 1, 5)
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
        answer(membership, place, 2, 9, is_trying=False)
    forms = membership.due(0.0)
    assert [place for place, _ in forms] == [0, 1, 2]
    form = forms[0][1]
    assert isinstance(form, Form)
    assert (form.members, form.joined, form.lost, form.source) == ((0, 1, 2), (1,), (), 0)
    assert (form.behind, form.step, form.is_retried) == ((), 9, False)
    for place in range(3):
        membership.joined(place, form.generation)
    assert (membership.phase, membership.num_recoveries) == (Phase.RUNNING, 1)


def joined_by_1() -> Membership:
    """A generation of 0, 1 and 2 is formed, in which 1 is new and has no state yet."""
    membership = Membership(range(3), RecoverySettings(max_recoveries=3), ANSWER_S)
    fail(membership, 1, 5)
    membership.ready(1)
    membership.gather(0.0)
    for place in (0, 2):
        membership.stands(place, 0)
        answer(membership, place, 2, 5, is_trying=False)
    membership.due(0.0)
    return membership


@pytest.mark.parametrize("victim", [0, 1])
def test_a_loss_while_others_join_leaves_them_out_until_they_ask_again(victim) -> None:
    """The one that joins dies, or the one that gives it its state: that is no step that fails twice."""
    membership = joined_by_1()
    membership.joined(2, membership.generation)
    called = membership.lost(victim, record(victim), 1.0, has_ended=True)
    assert [place for place, _ in called] == [place for place in range(3) if place != victim]
    assert membership.remaining == ((0, 2) if victim == 1 else (1, 2))
    if victim == 0:
        answer(membership, 1, membership._call, 0, is_clean=False, has_state=False)
    at_rest(membership, 5, 1.0)
    assert (membership.phase, membership.members) == (Phase.RUNNING, (0, 2) if victim == 1 else (2,))


def test_who_is_asked_to_leave_before_it_has_its_state_is_let_go_with_the_next_generation() -> None:
    membership = joined_by_1()
    membership.leave([1], 0.5)
    membership.lost(0, record(0), 1.0, has_ended=True)
    answer(membership, 1, membership._call, 0, is_clean=False, has_state=False)
    answer(membership, 2, membership._call, 5)
    told = dict(membership.due(1.0 + SETTLE_S))
    form = told[1]
    assert isinstance(form, Form)
    assert (form.members, form.left, membership.leaving) == ((2,), (1,), frozenset())


def test_a_member_says_that_it_goes_on_once_it_has_its_state_and_then_as_often_as_it_is_asked() -> None:
    """The server says again who is in a generation, to those that are slow and those that it did not hear."""
    posted: list[Message] = []
    calls = Calls(0, Interrupt(), Alarm(), StepBoundary(), is_new=False)
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
    answer(membership, 0, 4, 6, is_trying=False)
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
        answer(membership, place, membership._call, step, is_trying=False)
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
        answer(membership, place, membership._call, 5)
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


def test_where_the_process_has_ended_for_good_none_is_started() -> None:
    vacancies = Vacancies(most=3)
    vacancies.lost([1], 50, 0.0)
    assert vacancies.due(0.0, anywhere) == [1]
    vacancies.close(1)
    assert not vacancies.ended(1, 1.0)
    assert vacancies.deadline(anywhere) is None

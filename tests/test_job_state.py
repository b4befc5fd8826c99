"""The job and its ranks by themselves: reasons, counts, delays; `test_simulation.py` has their histories."""

from __future__ import annotations

import itertools
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from simulation.network import Socket

from lightning_ddp.supervise.connections import Peer
from lightning_ddp.supervise.failure_record import FailureRecord, History, Identity, Where
from lightning_ddp.supervise.job_control import JobControl, LocalProcesses
from lightning_ddp.supervise.job_state import SETTLE_S, JobState
from lightning_ddp.supervise.orders import (
    JobPhase,
    NewGeneration,
    Order,
    Progress,
    RankPhase,
    Report,
    Task,
    Wish,
    WishKind,
)
from lightning_ddp.supervise.processes import (
    STEPS_TO_FORGET,
    Accuse,
    Action,
    End,
    OrderBook,
    Process,
    ProcessState,
    Say,
    Send,
    Slot,
    StartProcess,
    Unexplained,
)
from lightning_ddp.supervise.protocol import Failed, Hello, Message, ProtocolError
from lightning_ddp.supervise.rank_state import Passage, RankState
from lightning_ddp.supervise.settings import RecoverySettings, ReplaceSettings, SupervisionSettings

GRACE_S = 30.0
MANY = RecoverySettings(max_recoveries=100)
LEAVE, STOP = Wish(WishKind.LEAVE, signal.SIGTERM), Wish(WishKind.STOP, signal.SIGTERM)


class Job:
    """A job whose processes hear and answer at once, but for those that a test holds back."""

    def __init__(
        self, num_ranks: int, recovery: RecoverySettings | None = MANY, *, num_nodes: int = 1, **more: Any
    ) -> None:
        settings = SupervisionSettings(failure_grace_s=GRACE_S, recovery=recovery, **more)
        self.state = JobState(num_ranks, settings)
        self.node_of = [place * num_nodes // num_ranks for place in range(num_ranks)]
        self.now = 0.0
        self.step = 0  # optimizer steps that all have committed
        self.progress: dict[int, Progress] = {}  # where a process has stopped, if not after this step
        self.deaf: set[int] = set()  # places whose processes hear nothing
        self.stuck: set[int] = set()  # places whose processes enter a generation, and do not get its state
        self.sent: list[Send] = []
        self.done: list[Action] = []
        self._ranks: dict[Process, RankState] = {}
        for place in range(num_ranks):
            self.connect(place)
        self.go()

    def connect(self, place: int, start: int | None = None, *, is_launcher: bool = False) -> Process:
        node, pid = self.node_of[place], 100 + len(self._ranks)
        who = Identity(rank=place, node_rank=node, host="h", pid=pid, start=start)
        process = self.state.connected(who, self.now, is_launcher=is_launcher)
        rank = self._ranks[process] = RankState(place, is_new=start is not None)
        rank.begin_run("fit")
        if start is not None:
            rank.stand()
        self.say(process)
        return process

    def member(self, place: int) -> Process:
        return next(process for process in self.state.roster.remaining if process.place == place)

    def rank(self, place: int) -> RankState:
        return self._ranks[self.member(place)]

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(process.place for process in self.state.roster.remaining)

    def say(self, process: Process, count: int = 0, *, is_due: bool = False) -> None:
        report = self._ranks[process].news(lambda: Where(count=count), is_due=is_due)
        if report is not None:
            self.state.reported(process, report, self.now)

    def go(self, seconds: float = 0.0) -> None:
        """So much later all is done that is due, also meanwhile."""
        until = self.now + seconds
        while (at := self.state.deadline(self.now)) is not None and self.now < at < until:
            self.now = at
            self._tick()
        self.now = until
        self._tick()

    def _tick(self) -> None:
        for num_ticks in itertools.count():
            actions = self.state.tick(self.now)
            if not actions:
                break
            assert num_ticks < 100, actions
            for action in actions:
                if isinstance(action, Send):
                    self.sent.append(action)
                    if action.process.place not in self.deaf:
                        self._follow(action.process, action.order)
                else:
                    self.done.append(action)

    def _follow(self, process: Process, order: Order) -> None:
        rank = self._ranks[process]
        rank.hear(order)
        self.say(process)
        match order.task:
            case Task.RECOVER if rank.is_called:
                rank.stop()
                rank.answer(self.progress.get(process.place, Progress(self.step, True, True, 0)))
            case Task.MEET | Task.STOP:
                while (passage := rank.look()) is Passage.GO:
                    pass
                if passage is Passage.MEET:
                    rank.stop(has_met=True)
                    rank.answer(Progress(self.step, True, False, 0))
            case Task.ENTER if rank.enter_next() is not None and process.place not in self.stuck:
                rank.settle()
        self.say(process)

    def lose(self, place: int, *, has_ended: bool = True, **how: Any) -> None:
        """A member is lost: killed, if `how` says nothing else."""
        process = self.member(place)
        record = FailureRecord.of_identity(process.who, "killed", **{"exit_code": -signal.SIGKILL, **how})
        assert self.state.lose(process, record, self.now, has_ended=has_ended)
        self.go()
        self.go(SETTLE_S)

    def fail(self, place: int, step: int, **how: Any) -> None:
        """A member is lost after so many steps."""
        self.step = step
        self.lose(place, **how)

    def ask(self, place: int, wish: Wish) -> None:
        self.rank(place).ask(wish)
        self.say(self.member(place))

    def require_over(self, *words: str) -> None:
        assert self.state.phase is JobPhase.OVER
        for text in words:
            assert text in str(self.state.reason)

    def starts(self) -> list[tuple[int, int]]:
        """Places in which processes were to be started since this was asked last, and their numbers."""
        found = [(action.place, action.number) for action in self.done if isinstance(action, StartProcess)]
        self.done.clear()
        return found

    def last_order(self, place: int) -> Order:
        return next(send.order for send in reversed(self.sent) if send.process.place == place)

    def new_generation(self) -> NewGeneration:
        found = (send.order.generation for send in reversed(self.sent))
        return next(generation for generation in found if generation is not None)


# ---------------------------------------------------------------------- when something is due


def test_a_member_that_says_only_that_it_fails_is_told_of_after_a_while() -> None:
    job = Job(2)
    job.rank(1).fail("cannot continue: bad sample")
    job.say(job.member(1))
    job.go()
    assert job.state.deadline(job.now) == job.now + 5.0
    job.go(4.99)
    assert job.done == []
    job.go(0.01)
    job.go(1.0)
    assert job.done == [Unexplained(job.member(1))]


def test_a_process_that_is_told_to_end_and_does_not_is_killed_so_that_its_place_is_free() -> None:
    job = Job(2, ReplaceSettings())
    job.fail(1, 5)
    job.starts()
    job.deaf.add(1)
    new = job.connect(1, start=1)
    job.state.dismiss(0, job.now)  # its node is asked to leave
    job.go(GRACE_S - 0.1)
    assert End(new) not in job.done
    job.go(0.2)
    assert [action for action in job.done if isinstance(action, Unexplained | End)] == [End(new)]


# ---------------------------------------------------------------------- replicas that have parted


@pytest.mark.parametrize(
    ("parted", "behind", "source"), [((0,), (0,), 1), ((0, 1, 2, 3), (1, 2, 3), 0)], ids=["one", "all"]
)
def test_a_member_that_has_parted_copies_another_one_at_the_next_boundary(parted, behind, source) -> None:
    job = Job(4)
    job.step = 7
    assert job.state.heal(map(job.member, parted))
    job.go()
    new = job.new_generation()
    assert (new.members, new.behind, new.source, new.step) == ((0, 1, 2, 3), behind, source, 7)
    assert new.is_met
    assert job.state.phase is JobPhase.RUNNING
    healed = ", ".join(map(str, parted))
    assert f"step 7: 4 -> 4 ranks after 0.00 s; healed: rank {healed}\n" in job.state.history.tell()
    generation = job.state.generation
    job.go(100.0)
    assert job.state.generation == generation


def test_a_member_that_has_parted_is_no_source_after_a_loss_either() -> None:
    job = Job(3)
    job.deaf.add(1)  # so that nobody meets
    assert job.state.heal([job.member(0)])
    job.go()
    job.deaf.clear()
    job.fail(2, 5)
    new = job.new_generation()
    assert (new.members, new.behind, new.source) == ((0, 1), (0,), 1)


def test_who_joins_comes_before_who_has_parted() -> None:
    job = Job(2, ReplaceSettings())
    job.fail(1, 5)
    ((place, number),) = job.starts()
    job.deaf.add(0)
    job.connect(place, start=number)
    assert job.state.heal([job.member(0)])
    job.deaf.clear()
    job.go(100.0)
    joins, heals = job.state.history._generations[-2:]
    assert "joined: rank 1" in joins[1]
    assert "healed" not in joins[1]
    assert "healed: rank 0" in heals[1]
    assert job.new_generation().source == 1


@pytest.mark.parametrize("why", ["on_failure='stop'", "it stops for a signal", "the run ends"])
def test_a_job_without_another_boundary_heals_nobody(why: str) -> None:
    job = Job(2, None if "stop'" in why else MANY)
    if "signal" in why:
        job.ask(1, STOP)
    if "ends" in why:
        job.rank(1).end_run()
        job.say(job.member(1))
    assert not job.state.heal([job.member(1)])


def test_a_node_that_is_back_waits_until_its_processes_from_before_are_lost() -> None:
    job = Job(4, ReplaceSettings(), num_nodes=2)
    old, new = job.member(2), job.connect(2, start=1, is_launcher=True)
    job.go(100.0)
    assert (job.state.generation, job.member(2)) == (0, old)
    job.lose(2)
    job.go(100.0)
    assert job.members == (0, 1, 2, 3)
    assert job.member(2) is new


# ---------------------------------------------------------------------- why a run ends


def test_too_few_ranks_take_no_step_until_others_have_joined_or_their_time_is_over() -> None:
    job = Job(3, ReplaceSettings(min_world_size=3, wait_s=5.0))
    job.fail(2, 5)
    assert (job.state.phase, job.members) == (JobPhase.SHORT, (0, 1))
    assert {job.rank(place).look() for place in (0, 1)} == {Passage.WAIT}
    job.connect(2, start=1)
    job.go()
    assert (job.state.phase, job.members, job.state.cause) == (JobPhase.RUNNING, (0, 1, 2), None)
    job.fail(0, 6)
    assert job.state.deadline(job.now) == job.now + 5.0
    job.go(4.9)
    assert job.state.phase is JobPhase.SHORT
    job.go(0.11)
    job.require_over("2 ranks remain", "no new ranks have joined within wait_s=5 s")
    assert job.state.cause is not None
    assert job.state.cause.rank == 0


def test_ranks_that_cannot_connect_try_again_for_half_a_minute() -> None:
    job = Job(3)
    job.stuck = {0, 1}
    job.fail(2, 5)

    def fail_to_connect() -> None:
        assert job.state.phase is JobPhase.FORMING
        rank = job.rank(1)
        rank.stop()
        rank.answer(Progress(5, True, False, 0))
        job.say(job.member(1))
        job.go()
        job.go(SETTLE_S)

    begun_at, generation = job.now, job.state.generation
    for number in range(8):
        fail_to_connect()
        assert job.state.generation == generation + number + 1
    job.go(begun_at + 29.5 - job.now)
    fail_to_connect()
    assert job.state.generation == generation + 9
    job.go(begun_at + 30.1 - job.now)
    fail_to_connect()
    job.require_over("the remaining ranks could not connect to each other")


EXITED, RAISED = {"exit_code": 3}, {"exception_class": "builtins:ValueError", "exit_code": None}
KILLED, CRASHED, VANISHED = {}, {"exit_code": -signal.SIGSEGV}, {"exit_code": None}
TOO_MANY = "more than 2 recoveries (max_recoveries) without 100 optimizer steps between them"
LOSSES: dict[str, tuple[RecoverySettings, list[tuple[int, dict[str, Any]]], str | None]] = {
    "too few ranks": (
        RecoverySettings(min_world_size=4),
        [(5, KILLED), (9, KILLED), (9, KILLED)],
        "3 ranks remain, fewer than min_world_size",
    ),
    **{  # with fewer ranks a part of the samples of a step comes one step later
        f"alike at steps 6 and {step}: {how}": (
            MANY,
            [(3, how), (6, how), (step, how)],
            f"step {step} failed twice in the same way",
        )
        for step in (6, 7)
        for how in (EXITED, RAISED, CRASHED)
    },
    "killed after another has exited": (MANY, [(6, EXITED), (6, KILLED)], None),
    "crashed after another has exited": (MANY, [(6, EXITED), (6, CRASHED)], None),
    "alike, before the first step and two later": (MANY, [(0, EXITED), (2, EXITED)], None),
    **{
        f"from outside: {how}": (MANY, [(6, how)] * 5, None)
        for how in (KILLED, VANISHED, {"exit_code": -signal.SIGTERM})
    },
    **{
        f"{distance} steps apart": (
            RecoverySettings(max_recoveries=2),
            [(number * distance, KILLED) for number in range(3)],
            None if distance == STEPS_TO_FORGET else TOO_MANY,
        )
        for distance in (1, STEPS_TO_FORGET - 1, STEPS_TO_FORGET)
    },
}
"""Settings, what happens at which steps to the last of six ranks, the one before ..., why the run ends."""


@pytest.mark.parametrize("losses", LOSSES)
def test_samples_that_end_two_alike_and_too_many_losses_end_the_run_and_chance_does_not(losses) -> None:
    recovery, ends, reason = LOSSES[losses]
    job = Job(6, recovery)
    for number, (step, how) in enumerate(ends):
        assert (job.state.phase, job.members) == (JobPhase.RUNNING, tuple(range(6 - number)))
        job.fail(5 - number, step, **how)
    if reason is None:
        assert (job.state.phase, job.members) == (JobPhase.RUNNING, tuple(range(6 - len(ends))))
        assert job.state.reason is None
    else:
        job.require_over(reason)
        assert job.state.cause is not None
        assert job.state.cause.rank == 6 - len(ends)


def test_two_that_end_alike_in_one_recovery_are_one_failure() -> None:
    """The second one while the generation is formed that follows the first."""
    job = Job(4, RecoverySettings(max_recoveries=1))
    job.stuck = {2}
    job.fail(3, 5, **EXITED)
    assert (job.state.phase, job.state.generation) == (JobPhase.FORMING, 1)
    job.fail(2, 5, **EXITED)
    assert (job.state.phase, job.members, job.state.generation) == (JobPhase.RUNNING, (0, 1), 2)


@pytest.mark.parametrize(
    ("progress", "reason"),
    [
        ([(5, False), (5, False)], "no remaining rank holds a whole state"),
        ([(5, True), (7, True)], "have committed different steps, [5, 7], and no state fits all of them"),
        ([(5, True), (6, False)], "have committed different steps, [5, 6], and no state fits all of them"),
    ],
)
def test_ranks_without_a_common_state_end_the_run(progress, reason) -> None:
    job = Job(3)
    for place, (step, is_clean) in enumerate(progress):
        job.progress[place] = Progress(step, is_clean, is_trying=True, phase=0)
    job.lose(2)
    job.require_over(reason)


def test_a_rank_that_cannot_go_on_says_why_and_that_is_the_reason() -> None:
    job = Job(3)
    job.deaf = {1}
    job.lose(2)
    rank, process = job.rank(1), job.member(1)
    rank.fail("rank 1 cannot continue: no space left")
    job.say(process)
    job.go()
    assert (job.state.phase, job.state.reason) == (JobPhase.OVER, "rank 1 cannot continue: no space left")
    assert job.state.cause is not None
    assert job.state.cause.rank == 2


# ---------------------------------------------------------------------- who goes on, and from where


def test_those_that_are_a_step_behind_or_half_through_copy_the_state_of_one_that_is_not() -> None:
    job = Job(4)
    job.progress[0] = Progress(5, is_clean=True, is_trying=True, phase=3)
    job.progress[1] = Progress(6, is_clean=False, is_trying=True, phase=1)
    job.step = 6
    job.lose(3)
    new = job.new_generation()
    assert (new.members, new.before, new.step, new.source) == ((0, 1, 2), (0, 1, 2, 3), 6, 2)
    assert (new.behind, new.is_retried, new.is_met, new.phase) == ((0, 1), True, False, 3)
    assert (new.joined, new.left) == ((), ())


def test_one_leaves_and_another_joins_at_one_boundary_and_nothing_failed() -> None:
    job = Job(3, ReplaceSettings(max_recoveries=1))
    job.fail(1, 5)
    for place, position in ((0, 7), (2, 8)):
        job.rank(place).position = position
    job.step = 9
    job.ask(0, LEAVE)
    job.connect(1, start=1)
    job.deaf = {0, 2}  # until both are asked at once
    job.go()
    assert (job.last_order(2).task, job.last_order(0)) == (Task.HOLD, job.last_order(2))
    job.deaf = set()
    job.now += SETTLE_S
    for place in (0, 2):
        job._follow(job.member(place), job.last_order(place))
    leaver = job.member(0)
    job.go()
    (meet,) = {send.order for send in job.sent if send.order.task is Task.MEET}
    assert (meet.position, meet.has_new) == (8, True)
    new = job.new_generation()
    assert (new.members, new.before, new.joined, new.left) == ((1, 2), (0, 2), (1,), (0,))
    assert (new.step, new.source, new.behind, new.is_retried, new.is_met) == (9, 2, (), False, True)
    assert job.last_order(0).task is Task.LEAVE
    assert (leaver.is_member, job.state.phase, job.state.cause) == (False, JobPhase.RUNNING, None)
    job.fail(1, 9 + STEPS_TO_FORGET)
    assert job.state.phase is JobPhase.RUNNING, "that was no recovery"


def test_all_stop_where_too_few_would_stay() -> None:
    job = Job(3)
    for place in range(3):
        job.ask(place, LEAVE)
    job.go(SETTLE_S / 2)
    assert job.state.phase is JobPhase.RUNNING, "others may be asked at the same time"
    assert job.state.deadline(job.now) == SETTLE_S
    job.go(SETTLE_S / 2)
    assert job.state.phase is JobPhase.STOPPING
    assert {job.last_order(place).wish for place in range(3)} == {Wish(WishKind.STOP, signal.SIGTERM)}
    (text,) = [action.text for action in job.done if isinstance(action, Say)]
    assert "3 of 3 ranks were asked to leave, but fewer than min_world_size=1" in text


def test_a_rank_without_an_answer_is_lost_as_well_and_known_to_have_ended_before_the_others_go_on() -> None:
    job = Job(3)
    job.deaf = {1}
    job.lose(2)
    job.go(GRACE_S - 2 * SETTLE_S)
    assert job.members == (0, 1)
    job.go(SETTLE_S)
    late = [action.process for action in job.done if isinstance(action, End)][-1]
    assert (job.members, late.place) == ((0,), 1)
    job.go(SETTLE_S)
    assert job.state.phase is JobPhase.RECOVERING
    record = FailureRecord.of_identity(late.identity, "killed", exit_code=-signal.SIGKILL)
    assert not job.state.exited(record, job.now)
    job.go()
    assert (job.state.phase, job.new_generation().before) == (JobPhase.RUNNING, (0, 1, 2))
    assert f"it did not stop within failure_grace_s={GRACE_S:g} s" in job.state.history.tell()


def test_a_time_in_which_the_whole_job_is_stopped_is_no_silence_of_its_ranks() -> None:
    """Ctrl-Z stops the server too: when it looks again no process can have come that it waits for."""
    job = Job(3, ReplaceSettings(min_world_size=3, wait_s=GRACE_S))
    job.lose(2)
    job.go(GRACE_S - 1.0)
    job.now += 100.0
    job.go()
    job.go(GRACE_S - 0.1)
    assert job.state.phase is JobPhase.SHORT
    job.go(0.2)
    assert job.state.phase is JobPhase.OVER, "from then on it counts"


def test_the_last_report_has_a_line_for_each_change_of_ranks() -> None:
    job = Job(3, ReplaceSettings())
    job.fail(1, 10)
    job.step = 20
    job.connect(1, start=1)
    job.go()
    job.step = 30
    job.ask(1, LEAVE)  # the second process of this rank
    job.go(SETTLE_S)
    assert job.state.history.tell() == (
        "lightning_ddp: this run continued 3 times with other ranks, 0.10 s lost:\n"
        "  step 10: 3 -> 2 ranks after 0.10 s; left: rank 1 (host h, pid 101) killed\n"
        "  step 20: 2 -> 3 ranks after 0.00 s; joined: rank 1\n"
        "  step 30: 3 -> 2 ranks after 0.00 s; left: rank 1 (host h, pid 103) was asked to leave\n"
    )
    assert job.state.history.tell() == "", "it is told once"
    history = History()
    for step in range(22):
        history.formed(step, (0, 1), (0,), 0.0)
    first, left_out, *shown = history.tell().splitlines()
    assert ("continued 22 times" in first, left_out, len(shown)) == (True, "  ... 2 more before", 20)
    assert shown[-1] == "  step 21: 2 -> 1 ranks"


# ---------------------------------------------------------------------- all stop


def test_all_ranks_stop_after_the_greatest_position_that_they_say_when_they_are_held() -> None:
    job = Job(3, recovery=None)
    for place, position in enumerate((5, 4, 6)):
        job.rank(place).position = position
    job.deaf = {2}
    job.ask(0, STOP)
    job.go()
    assert job.state.phase is JobPhase.HOLDING
    assert [job.rank(place).look() for place in range(3)] == [Passage.WAIT, Passage.WAIT, Passage.GO]
    job.say(job.member(2), is_due=True)  # it has not heard of this
    job.go()
    assert (job.state.phase, job.member(2).report.position) == (JobPhase.HOLDING, 7)
    job.rank(2).look()
    job.deaf = set()
    job._follow(job.member(2), job.last_order(2))
    job.go()
    assert [job.last_order(place).position for place in range(3)] == [8, 8, 8]
    assert [job.rank(place).position for place in range(3)] == [8, 8, 8]
    assert [job.member(place).phase for place in range(3)] == [RankPhase.FINISHED] * 3
    job.ask(1, Wish(WishKind.STOP, signal.SIGINT))
    job.go()
    assert job.last_order(0).wish == STOP, "the first signal counts"


@pytest.mark.parametrize("num_batches", [0, 11], ids=["it is stuck", "it comes from a long validation"])
def test_a_rank_that_does_not_come_to_the_boundary_at_which_all_stop_is_a_failure(num_batches) -> None:
    """It is waited for while it makes progress."""
    job = Job(3, recovery=None)
    job.deaf = {2}
    job.ask(0, STOP)
    job.go()
    job.rank(2).hear(job.last_order(2))  # by the thread of its channel: the main one trains on
    job.say(job.member(2))
    job.go()
    for count in range(1, 1 + num_batches):
        job.go(10.0)
        job.say(job.member(2), count, is_due=True)
        job.go()
    assert job.state.phase is JobPhase.STOPPING
    job.go(GRACE_S - 0.1)
    assert not job.done
    assert job.state.deadline(job.now) == 10.0 * num_batches + GRACE_S
    job.go(0.2)
    (action,) = job.done
    assert isinstance(action, Accuse)
    assert action.record.rank == 2
    assert "rank(s) 2 did not reach the next step boundary" in action.record.message
    assert "made no progress for failure_grace_s=30 s" in action.record.message
    assert job.state.deadline(job.now) is None


def test_ranks_that_wait_for_the_one_that_is_stuck_are_not_named_where_all_stop() -> None:
    """All have heard of the boundary, by the threads of their channels."""
    job = Job(3, recovery=None)
    job.deaf = {0, 1, 2}
    job.ask(0, STOP)
    for _ in ("held", "told to stop", "later"):
        job.go(1.0)
        for place in range(3):
            rank, where = job.rank(place), Where(waits_for=None if place == 2 else "all_reduce")
            rank.hear(job.last_order(place))
            said = rank.news(lambda where=where: where, is_due=True)
            job.state.reported(job.member(place), said, job.now)
    assert job.state.phase is JobPhase.STOPPING
    job.go(GRACE_S + 0.1)
    (action,) = job.done
    assert isinstance(action, Accuse)
    assert action.record.rank == 2
    assert "rank(s) 2 did not reach" in action.record.message


def test_a_rank_that_has_left_after_a_run_need_not_end_the_next_one() -> None:
    job = Job(2, recovery=None)

    def change(place: int, *changes: Any) -> None:
        for each in changes:
            each(job.rank(place))
        job.say(job.member(place))
        job.go()

    for place in range(2):
        change(place, RankState.end_run)
    change(1, RankState.leave)
    change(0, lambda state: state.begin_run("test"))
    assert job.state.all_ended == 1
    change(0, RankState.end_run)
    assert job.state.all_ended == 2


def test_a_rank_that_does_not_hear_that_all_stop_is_a_failure() -> None:
    """Where no rank may be lost, nothing else ends the others, which are held."""
    job = Job(3, recovery=None)
    job.deaf = {2}
    job.ask(0, STOP)
    job.go()
    job.go(GRACE_S - 0.1)
    assert (job.state.phase, job.done) == (JobPhase.HOLDING, [])
    job.go(0.2)
    (action,) = job.done
    assert isinstance(action, Accuse)
    assert action.record.rank == 2
    assert "rank(s) 2 did not reach" in action.record.message


@pytest.mark.parametrize("is_asked", [False, True], ids=["before", "while it is asked"])
def test_a_rank_that_ends_is_not_waited_for_where_all_stop(is_asked) -> None:
    job = Job(3, recovery=None)
    ended = job.member(1)
    if is_asked:
        job.deaf = {1}
        job.ask(0, STOP)
        job.go()
        assert job.state.phase is JobPhase.HOLDING
    job.rank(1).leave()
    job.say(ended)
    job.state.disconnected(ended, job.now)
    job.go()
    if not is_asked:
        job.ask(0, STOP)
        job.go()
    assert [job.member(place).phase for place in (0, 2)] == [RankPhase.FINISHED] * 2


# ---------------------------------------------------------------------- new processes


def test_a_place_that_fails_again_soon_waits_longer_each_time_and_then_stays_empty() -> None:
    job = Job(2, ReplaceSettings(max_recoveries=3))
    job.fail(1, 10)
    assert job.starts() == [(1, 1)]
    waited = []
    for number in range(2, 6):
        end_early(job, number - 1)
        at = job.state.deadline(job.now)
        assert at is not None
        waited.append(at - job.now)
        job.go(waited[-1] - 0.01)
        assert job.starts() == []
        job.go(0.011)
        assert job.starts() == ([(1, number)] if number < 5 else [])
    assert waited == pytest.approx([0.5, 1.0, 2.0, 4.0])
    assert (job.state.deadline(job.now), job.members) == (None, (0,))


def end_early(job: Job, start: int) -> None:
    """A process in place 1 ends before it has connected."""
    record = FailureRecord(rank=1, node_rank=0, pid=900, start=start, message="exited", exit_code=1)
    assert not job.state.exited(record, job.now)
    job.go()


def test_the_end_of_a_process_that_has_not_connected_counts_once() -> None:
    job = Job(2, ReplaceSettings())
    job.fail(1, 10)
    assert job.starts() == [(1, 1)]
    end_early(job, 1)
    job.go(0.5)
    assert job.starts() == [(1, 2)]
    end_early(job, 1)  # its launcher tells of it once more
    job.connect(1, start=2)
    job.go()
    assert job.members == (0, 1)


@pytest.mark.parametrize("distance", [1, STEPS_TO_FORGET])
def test_steps_in_between_are_progress_of_a_place(distance) -> None:
    job = Job(2, ReplaceSettings(max_recoveries=3))
    job.fail(1, 10)
    job.step = 20
    job.connect(1, start=1)
    job.go()
    job.starts()
    job.fail(1, 20 + distance)
    assert job.starts() == ([] if distance == 1 else [(1, 2)])
    job.go(0.5)
    assert job.starts() == ([(1, 2)] if distance == 1 else [])


def test_a_start_is_asked_for_again_with_its_number_and_only_that_one_may_come() -> None:
    job = Job(2, ReplaceSettings())
    job.fail(1, 10)
    assert job.starts() == [(1, 1)]
    at = job.state.deadline(job.now)
    assert at is not None
    assert at == job.now + 15.0
    job.go(14.9)
    assert job.starts() == []
    job.go(0.1)
    assert job.starts() == [(1, 1)]
    with pytest.raises(ProtocolError, match="there is no place for rank 1"):
        job.connect(1, start=2)
    job.connect(1, start=1)
    job.go()
    assert job.members == (0, 1)
    job.go(100.0)
    assert job.starts() == []


@pytest.mark.parametrize(
    "rank",
    [0, 1, 2],
    ids=["of one that is there", "of one that has ended before it came", "that the run has not"],
)
def test_a_process_without_a_place_is_refused_before_all_have_come(rank) -> None:
    state = JobState(2, SupervisionSettings())
    state.connected(Identity(rank=0, node_rank=0, host="h", pid=2), 0.0, is_launcher=False)
    state.exited(FailureRecord(rank=1, node_rank=0, pid=1, message="exited", exit_code=1), 0.0)
    with pytest.raises(ProtocolError, match=f"there is no place for rank {rank}"):
        state.connected(Identity(rank=rank, node_rank=0, host="h", pid=1), 0.0, is_launcher=False)
    state.tick(0.0)
    assert not state.has_met


@pytest.mark.parametrize(
    ("other", "is_launcher"),
    [({"node_rank": 1}, False), ({"start": 0}, True), ({"rank": 0}, False)],
    ids=["another node", "a launcher on the first node", "a place that is taken"],
)
def test_only_the_process_that_was_asked_for_may_replace_a_lost_one_and_once(other, is_launcher) -> None:
    job = Job(2, ReplaceSettings())
    job.fail(1, 10)
    asked = Identity(rank=1, node_rank=0, host="h", pid=900, start=1)
    with pytest.raises(ProtocolError, match="there is no place"):
        job.state.connected(replace(asked, **other), job.now, is_launcher=is_launcher)
    job.state.connected(asked, job.now, is_launcher=False)
    with pytest.raises(ProtocolError, match="there is no place"):
        job.state.connected(replace(asked, pid=901), job.now, is_launcher=False)


@pytest.mark.parametrize("recovery", [MANY, ReplaceSettings()], ids=["shrink", "replace"])
def test_a_node_that_is_back_may_join_unasked_where_ranks_are_replaced_and_nobody_else(recovery) -> None:
    job = Job(2, recovery, num_nodes=2)
    job.fail(1, 10)
    assert (job.starts(), job.state.deadline(job.now)) == ([], None), "its launcher is gone"
    refused = [(1, False), (0, False), (None, True), *([(0, True)] if recovery is MANY else [])]
    for start, is_launcher in refused:
        with pytest.raises(ProtocolError, match="there is no place for rank 1"):
            job.connect(1, start, is_launcher=is_launcher)
    if recovery is not MANY:
        job.connect(1, 0, is_launcher=True)
        job.go()
        assert job.members == (0, 1)


# ---------------------------------------------------------------------- reports and orders


def report_of(state: RankState, *, is_due: bool = False) -> Report | None:
    return state.news(lambda: Where(count=state.position % 2**32), is_due=is_due)


def test_a_process_that_changes_its_class_is_sent_an_order_that_is_newer_than_its_last() -> None:
    def process(number: int, state: ProcessState) -> Process:
        who = Identity(rank=number, node_rank=0)
        return Process(number=number, identity=who, state=state, rank=0, is_launcher=False, heard_at=0.0)

    book, template = OrderBook(GRACE_S, None), Order(task=Task.RUN)
    first, second = process(1, ProcessState.RELEASED), process(2, ProcessState.STANDING)
    numbers = [send.order.number for send in book.give(template, [], [first, second], 0.0)]
    assert numbers == [1, 2]
    second.state = ProcessState.RELEASED
    (sent,) = book.give(template, [second], [first, second], 0.0)
    assert (sent.order.task, sent.order.number) == (Task.LEAVE, 3)


def test_a_run_has_ended_everywhere_once_all_have_ended_it_and_the_next_one_has_not() -> None:
    job = Job(2)
    for ended, place in enumerate((0, 1)):
        assert job.state.all_ended == 0, ended
        job.rank(place).end_run()
        job.say(job.member(place))
        job.go()
    assert job.state.all_ended == 1
    job.rank(0).begin_run("test")
    job.rank(0).end_run()
    job.say(job.member(0))
    job.go()
    assert job.state.all_ended == 1
    assert not job.rank(0).has_ended_everywhere()


def test_an_older_report_changes_nothing() -> None:
    job = Job(2)
    process = job.member(1)
    newest = process.report
    older = replace(newest, number=newest.number - 1, phase=RankPhase.STOPPED, wish=STOP, ended=9)
    for report in (older, replace(older, number=newest.number)):
        job.state.reported(process, report, job.now)
        job.go()
    assert (process.report, job.state.phase) == (newest, JobPhase.RUNNING)
    job.state.reported(process, replace(older, number=newest.number + 1), job.now)
    job.go()
    assert job.state.phase is not JobPhase.RUNNING


def test_an_older_order_changes_nothing() -> None:
    state = RankState(1, is_new=False)
    record = FailureRecord(rank=0, message="gone")
    state.hear(Order(5, Task.RUN))
    for number in (4, 5):
        assert state.hear(Order(number, Task.RECOVER, record=record)) is None
        assert (state.task, state.is_called, state.look()) == (Task.RUN, False, Passage.GO)
    error = state.hear(Order(6, Task.RECOVER, record=record))
    assert error is not None
    assert error.rank == 0
    assert state.hear(Order(7, Task.RECOVER, record=record)) is None, "the main thread is stopped once"


def test_a_generation_is_entered_once_and_by_its_members() -> None:
    fields: dict[str, Any] = {"before": (1, 2, 3), "behind": (), "joined": (), "left": (), "phase": 0}
    new = NewGeneration(2, (1, 3), step=5, source=1, is_retried=True, is_met=False, **fields)
    state = RankState(3, is_new=False)
    state.begin_run("fit")
    state.hear(Order(1, Task.ENTER, generation=new))
    assert (state.enter_next(), state.rank, state.phase) == (new, 1, RankPhase.ENTERING)
    state.place_boundary(7, may_meet=True)
    assert state.position == 7, "as in a new process, which may have begun another number of runs"
    assert state.enter_next() is None
    state.hear(Order(2, Task.ENTER, generation=replace(new, number=3, members=(0, 1))))
    assert (state.enter_next(), state.generation, state.goes_on_without(3)) == (None, 2, True)


def test_ranks_meet_where_they_may_and_stop_at_any_boundary() -> None:
    state = RankState(0, is_new=False)
    state.begin_run("fit")
    state.place_boundary(7, may_meet=False)  # between accumulated batches
    state.hear(Order(1, Task.MEET, position=state.position))
    assert state.look() is Passage.GO
    state.place_boundary(8, may_meet=True)
    assert state.look() is Passage.MEET
    state.place_boundary(9, may_meet=False)
    state.hear(Order(2, Task.STOP, position=state.position + 1, wish=STOP))
    assert [state.look(), state.look()] == [Passage.GO, Passage.STOP]


def test_a_report_is_news_only_where_a_fact_has_changed() -> None:
    state = RankState(0, is_new=False)
    state.begin_run("fit")
    assert report_of(state) is None, "not all have connected"
    state.hear(Order(6, Task.RUN))
    first = report_of(state)
    assert first is not None
    assert (first.number, first.heard, first.run, first.begun) == (1, 6, "fit", 1)
    assert report_of(state) is None
    state.look()  # where it is changes all the time
    assert report_of(state) is None
    due = report_of(state, is_due=True)
    assert due is not None
    assert (due.number, due.where.count) == (2, 1)
    state.hear(Order(7, Task.HOLD))
    held = report_of(state)
    assert held is not None
    assert (held.number, held.heard, held.position) == (3, 7, state.position)
    assert report_of(state) is None
    changes = [lambda: state.ask(STOP), state.end_run, lambda: state.fail("no"), state.leave]
    for change in changes:
        change()
        assert report_of(state) is not None
        assert report_of(state) is None
        change()  # is what it is already
        assert report_of(state) is None


@pytest.mark.parametrize(
    "change", [lambda state: state.ask(STOP), RankState.leave, lambda state: state.fail(None)]
)
def test_a_signal_or_an_end_is_news_before_all_have_connected(change) -> None:
    state = RankState(0, is_new=False)
    state.begin_run("fit")
    change(state)
    assert report_of(state) is not None


def test_boundaries_of_a_run_have_the_same_numbers_however_many_the_ranks_passed_before() -> None:
    positions = []
    for num_batches in (2, 6):
        state = RankState(0, is_new=False)
        state.begin_run("predict")
        passed = [state.look() for _ in range(num_batches)]
        assert passed == [Passage.GO] * num_batches
        before = state.position
        state.end_run()
        state.begin_run("fit")
        assert state.position > before
        state.place_boundary(3, may_meet=True)
        positions.append(state.position)
    assert positions[0] == positions[1]


def test_a_rank_that_has_left_a_run_alone_is_in_the_next_one_as_any_other() -> None:
    """It was done long before the others, and its end would have been no failure."""
    state = RankState(0, is_new=False)
    state.begin_run("fit")
    state.end_run()
    state.leave()
    state.begin_run("test")
    assert state.phase is RankPhase.RUNNING


@pytest.mark.parametrize("answers", [True, False])
def test_a_report_is_answered_again_where_its_rank_may_miss_the_server_or_an_order(answers) -> None:
    """Where stalls are looked for each periodic report is: a server that is silent is one that is stopped."""
    job = Job(2, stall_timeout_s=1.6 if answers else None)
    process = job.member(1)
    for is_deaf in (False, True):
        job.sent.clear()
        if is_deaf:
            job.deaf = {1}
            job.lose(0)
            assert [send.order.task for send in job.sent] == [Task.RECOVER]
        for _ in range(2):
            job.now += 1.0
            job.say(process, is_due=True)
            job.go()
        assert len(job.sent) == (3 if is_deaf else 2 if answers else 0)
        assert len({id(send.order) for send in job.sent}) <= 1


def test_nobody_is_told_anything_before_all_have_connected() -> None:
    """With 16,384 ranks an order to each, as it connects, takes half a second of the server."""
    state, told = JobState(3, SupervisionSettings()), []
    for place in range(3):
        who = Identity(rank=place, node_rank=0, host="h", pid=place)
        state.reported(state.connected(who, 0.0, is_launcher=False), Report(number=1), 0.0)
        told.append([(send.process.place, send.order.task) for send in state.tick(0.0)])
    assert told == [[], [], [(rank, Task.RUN) for rank in range(3)]]


# ---------------------------------------------------------------------- the server by itself


def control_of(num_ranks: int, recovery: RecoverySettings | None = None) -> tuple[JobControl, list[int]]:
    """Return a server that all ranks have greeted, rank 0 from its process, and to whom it sends orders."""
    sent: list[int] = []

    def send(peer: Peer, message: Message) -> None:
        if isinstance(message, Order) and peer.identity is not None:
            sent.append(peer.identity.rank)

    connections: Any = SimpleNamespace(
        send=send, admit=lambda peer: None, hang_up=lambda peer: None, send_all=lambda message: None
    )
    control = JobControl(
        connections,
        token="t",
        world_size=num_ranks,
        settings=SupervisionSettings(recovery=recovery),
        processes=LocalProcesses(),
        say=lambda text: None,
        with_stack=lambda record: record,
        pid=100,
    )
    for rank in range(num_ranks):
        peer: Any = Peer(Socket())  # type: ignore[arg-type]
        control.hear(peer, Hello("t", Identity(rank=rank, node_rank=0, pid=100 + rank), False), 0.0)
        control.hear(peer, Report(number=1, phase=RankPhase.RUNNING, begun=1), 0.0)
        control.decide(0.0)
    return control, sent


def test_the_rank_whose_process_has_the_server_hears_last_as_both_may_end_at_once() -> None:
    assert control_of(3)[1][-3:] == [1, 2, 0]


@pytest.mark.parametrize(
    ("kind", "rank", "takes_exceptions", "goes_on"),
    [
        ("builtins:ValueError", 1, True, True),
        ("builtins:ValueError", 1, False, False),
        ("builtins:ValueError", 0, True, False),  # with its process the server ends
        ("builtins:KeyboardInterrupt", 1, True, False),  # somebody wants the job to end
        ("lightning_ddp.errors:CollectiveError", 1, True, False),
        ("builtins:SystemExit", 1, False, True),
    ],
)
def test_what_a_rank_raises_concerns_it_alone_if_asked_for(kind, rank, takes_exceptions, goes_on) -> None:
    control, _ = control_of(3, RecoverySettings(exceptions=takes_exceptions))
    who = Identity(rank=rank, node_rank=0, pid=100 + rank)
    error = {"exception_type": kind.partition(":")[2], "exception_class": kind}
    control.report(Failed(FailureRecord.of_identity(who, "bad sample", **error)), 1.0)
    first = control.decide(1.0)
    assert (first is None, control.job.phase is JobPhase.RECOVERING) == (goes_on, goes_on)


def test_processes_that_fail_are_counted_in_a_row_alone() -> None:
    slot = Slot()
    for _ in range(4):
        slot.ended(0.0)
    late_s = slot.opens_at
    slot.joined(5)
    slot.lost(5 + STEPS_TO_FORGET, 100.0)
    assert slot.opens_at == 100.0, "at once, as it has trained"
    slot.ended(100.0)
    assert 100.0 < slot.opens_at < 100.0 + late_s

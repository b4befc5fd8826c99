"""Simulated histories of recovery (`simulation/`): no step is committed twice, whoever waits is answered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from simulation.__main__ import failure_of, shrink
from simulation.explore import explore
from simulation.plan import plan_of
from simulation.world import World

from lightning_ddp.supervise.job_state import JobState
from lightning_ddp.supervise.orders import JobPhase, NewGeneration, Order, RankPhase, Task
from lightning_ddp.supervise.processes import Process
from lightning_ddp.supervise.rank_state import RankState

FIRST_TIER = range(2000)


def failures_of(seeds: Iterable[int], most: int = 3) -> list[str]:
    """What does not hold in some histories; the first few."""
    found = []
    for seed in seeds:
        failure = failure_of(plan_of(seed))
        if failure is not None:
            found.append(failure)
            if len(found) == most:
                break
    return found


@pytest.mark.parametrize("half", [0, 1])
def test_two_thousand_histories(half) -> None:
    assert failures_of(FIRST_TIER[half::2]) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_twenty_thousand_histories(part) -> None:
    assert failures_of(range(2000 + 4500 * part, 2000 + 4500 * (part + 1))) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("half", [0, 1])
def test_histories_of_a_range(half, request) -> None:
    """`pytest --exhaustive --seeds 20000:320000`."""
    first, last = map(int, request.config.getoption("--seeds").split(":"))
    assert failures_of(range(first, last)[half::2]) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", ["kill", "sigterm"], ids=["one joins", "one leaves"])
def test_the_small_world_in_all_ways(first) -> None:
    """Two members, one that joins or leaves, and up to two more faults or messages that are held up."""
    explored = explore(first, within_s=60)
    assert explored.failures == ()
    assert explored.depth >= 1
    print(
        f"{explored.num_histories} histories, all of depth {explored.depth}, {explored.share:.0%} of the next"
    )


@pytest.mark.parametrize("seed", [46, 4901, 16477])
def test_a_seed_is_one_history(seed) -> None:
    def played() -> list[str]:
        world = World(plan_of(seed), traces=True)
        world.play()
        return world.kernel.trace or []

    assert len(played()) > 20
    assert played() == played()


def takes_old_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has said before an order counts as its answer to that."""
    monkeypatch.setattr(Process, "has_heard", property(lambda self: self.report is not None))


def meets_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are to meet at a boundary that some of them have passed already."""

    def enter(self, phase, now):
        if phase is JobPhase.MEETING:
            self._position = min(process.report.position for process in self.roster.remaining)
        whole(self, phase, now)

    whole = JobState._enter
    monkeypatch.setattr(JobState, "_enter", enter)


def stands_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process that was called while it joined does not stand in its place again."""

    def stand(self):
        if self.phase is not RankPhase.ENTERING:
            whole(self)

    whole = RankState.stand
    monkeypatch.setattr(RankState, "stand", stand)


def enters_what_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank enters a generation, and goes on in it, although it has been called since."""

    def hear(self, order: Order):
        error = whole_hear(self, order)
        if self.order is order and order.generation is not None:
            self.last_new = order.generation
        return error

    def enter_next(self):
        new: NewGeneration | None = getattr(self, "last_new", None)
        order = self.order
        if new is not None and order is not None and order.task is Task.RECOVER:
            self.order = replace(order, task=Task.ENTER, generation=new)
        try:
            return whole_enter(self)
        finally:
            self.order = order

    def settle(self):
        self.state_of, self.phase = self.generation, RankPhase.RUNNING

    whole_hear, whole_enter = RankState.hear, RankState.enter_next
    monkeypatch.setattr(RankState, "hear", hear)
    monkeypatch.setattr(RankState, "enter_next", enter_next)
    monkeypatch.setattr(RankState, "settle", settle)


def forgets_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a process that was to join is not heard."""

    def exited(self, record, now):
        process = self.roster.of(record)
        return whole(self, record, now) if process is not None and process.is_member else None

    whole = JobState.exited
    monkeypatch.setattr(JobState, "exited", exited)


def knows_process_ids_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a process that has not connected is taken for that of an older one with its process id."""

    def exited(self, record, now):
        process = self.roster.of(record)
        if process is not None:
            record = replace(record, rank=process.place, start=process.identity.start)
        return whole(self, record, now)

    whole = JobState.exited
    monkeypatch.setattr(JobState, "exited", exited)


@pytest.mark.parametrize(
    "defect",
    [
        takes_old_answers,
        meets_too_early,
        stands_once,
        enters_what_is_void,
        forgets_ends,
        knows_process_ids_alone,
    ],
    ids=lambda defect: defect.__name__,
)
def test_a_defect_of_the_protocol_is_found(defect, monkeypatch) -> None:
    defect(monkeypatch)
    assert failures_of(FIRST_TIER, most=1) != []


def test_a_failing_history_is_made_smaller(monkeypatch) -> None:
    forgets_ends(monkeypatch)
    plan = next(plan for plan in map(plan_of, FIRST_TIER) if len(plan.faults) > 3 and failure_of(plan))
    smaller = shrink(plan)
    assert failure_of(smaller) is not None
    assert len(smaller.faults) <= len(plan.faults)
    assert smaller != plan
    assert all(failure_of(simpler) is None for simpler in smaller.smaller())

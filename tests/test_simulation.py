"""Simulated histories of recovery (`simulation/`): no step is committed twice, whoever waits is answered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partialmethod
from itertools import islice

import pytest
from harness import slow
from simulation.__main__ import failure_of, shrink
from simulation.explore import explore
from simulation.plan import plan_of
from simulation.world import World

from lightning_ddp.supervise.job_state import JobState
from lightning_ddp.supervise.orders import JobPhase, RankPhase, Task
from lightning_ddp.supervise.processes import Process
from lightning_ddp.supervise.rank_state import RankState

FIRST_TIER = range(2000)


def failures_of(seeds: Iterable[int], most: int = 3) -> list[str]:
    """What does not hold in some histories; the first few."""
    return list(islice(filter(None, map(failure_of, map(plan_of, seeds))), most))


@pytest.mark.parametrize(
    "seeds",
    [
        *(FIRST_TIER[half::2] for half in range(2)),
        *(slow(range(2000 + part, 20_000, 4)) for part in range(4)),
    ],
    ids=str,
)
def test_histories(seeds) -> None:
    assert failures_of(seeds) == []


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(627100, id="a node is back twice, with the process ids of before"),
        pytest.param(706522, id="a node is back before the end of its launcher is judged"),
        pytest.param(
            709913, id="a launcher that leaves disconnects after the next one was asked to start a process"
        ),
        pytest.param(757045, id="a new process has the id of one whose end is not known"),
        pytest.param(655316, id="ranks fail in their setup while all processes are stopped"),
        pytest.param(
            843667, id="all processes are stopped while a lost connection waits for its explanation"
        ),
        pytest.param(767916, id="a rank is stopped, and another dies, as all are to stop"),
        pytest.param(2014509, id="a node is cut off while all stop, and one of its ranks has ended"),
        pytest.param(2018130, id="a node of which one rank has ended is lost in a stop"),
        pytest.param(5000379, id="all are ready for the next generation before a failure is explained"),
    ],
)
def test_a_history_that_failed(seed) -> None:
    assert failures_of([seed]) == []


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


def meets_too_early(self, whole, phase, now):
    """All are to meet at a boundary that some of them have passed already."""
    if phase is JobPhase.MEETING:
        self._position = min(process.report.position for process in self.roster.remaining)
    whole(self, phase, now)


def stands_once(self, whole):
    """A new process that was called while it joined does not stand in its place again."""
    if self.phase is not RankPhase.ENTERING:
        whole(self)


def hears_a_generation(self, whole, order):
    error = whole(self, order)
    if self.order is order and order.generation is not None:
        self.last_new = order.generation
    return error


def enters_what_is_void(self, whole):
    """A rank enters a generation, and goes on in it, although it has been called since."""
    order, new = self.order, getattr(self, "last_new", None)
    if new is not None and order.task is Task.RECOVER:
        self.order = replace(order, task=Task.ENTER, generation=new)
    try:
        return whole(self)
    finally:
        self.order = order


def settles_although_called(self, whole):
    self.state_of, self.phase = self.generation, RankPhase.RUNNING


def forgets_ends(self, whole, record, now):
    """The end of a process that was to join is not heard."""
    process = self.roster.of(record)
    return whole(self, record, now) if process is not None and process.is_member else None


def knows_process_ids_alone(self, whole, record, now):
    """The end of a process that has not connected is taken for that of an older one with its process id."""
    process = self.roster.of(record)
    if process is not None:
        record = replace(record, rank=process.place, start=process.identity.start)
    return whole(self, record, now)


def takes_sleep_for_silence(self, whole, now):
    """A time in which all processes were stopped counts as one in which nobody has answered."""


DEFECTS = {
    "what was said before an order is its answer": {(Process, "has_heard"): property(lambda self: True)},
    "meets too early": {(JobState, "_enter"): meets_too_early},
    "stands once": {(RankState, "stand"): stands_once},
    "enters what is void": {
        (RankState, "hear"): hears_a_generation,
        (RankState, "enter_next"): enters_what_is_void,
        (RankState, "settle"): settles_although_called,
    },
    "forgets ends": {(JobState, "exited"): forgets_ends},
    "knows process ids alone": {(JobState, "exited"): knows_process_ids_alone},
    "takes sleep for silence": {(JobState, "restart_limits"): takes_sleep_for_silence},
}
"""Owner and name of a method -> what is called in its place, with the object and the method itself."""


def put_in(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for (owner, name), what in DEFECTS[defect].items():
        defective = partialmethod(what, getattr(owner, name)) if callable(what) else what
        monkeypatch.setattr(owner, name, defective)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_of_the_protocol_is_found(defect, monkeypatch) -> None:
    put_in(defect, monkeypatch)
    assert failures_of(reversed(FIRST_TIER), most=1) != []  # the last ones find each sooner


def test_a_failing_history_is_made_smaller(monkeypatch) -> None:
    put_in("forgets ends", monkeypatch)
    plan = next(plan for plan in map(plan_of, FIRST_TIER) if len(plan.faults) > 3 and failure_of(plan))
    smaller = shrink(plan)
    assert failure_of(smaller) is not None
    assert len(smaller.faults) <= len(plan.faults)
    assert smaller != plan
    assert all(failure_of(simpler) is None for simpler in smaller.smaller())

"""Simulated histories of recovery (`simulation/`): no step is committed twice, whoever waits is answered."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from simulation.__main__ import failure_of, shrink
from simulation.explore import explore
from simulation.plan import plan_of
from simulation.world import World

from lightning_ddp.supervise.failure_record import FailureRecord
from lightning_ddp.supervise.members import Members
from lightning_ddp.supervise.membership import Membership, Phase
from lightning_ddp.supervise.protocol import Form
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


def test_a_seed_is_one_history() -> None:
    def played() -> list[str]:
        world = World(plan_of(46), traces=True)
        world.play()
        return world.kernel.trace or []

    assert len(played()) > 20
    assert played() == played()


def meets_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second meeting begins with the positions of the one before."""

    def gather(self, now):
        before = dict(self._positions)
        outgoing = whole(self, now)
        if outgoing and self.phase is Phase.GATHERING and not self._positions:
            self._positions = before
        return outgoing

    whole = Membership.gather
    monkeypatch.setattr(Membership, "gather", gather)


def asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process that was called while it joined does not ask again."""

    def ask_to_join(self):
        said = [] if getattr(self, "has_said", False) else whole(self)
        self.has_said = True
        return said

    whole = RankState.ask_to_join
    monkeypatch.setattr(RankState, "ask_to_join", ask_to_join)


def enters_what_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank enters a generation, and goes on in it, although it has been called since."""

    def next_form(self):
        form = self._form
        is_mine = isinstance(form, Form) and self.place in form.members and form.generation > self.generation
        return form if is_mine else whole(self)

    whole = RankState.next_form
    monkeypatch.setattr(RankState, "next_form", next_form)
    monkeypatch.setattr(RankState, "_check_called", lambda self: None)


def forgets_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a process that was to join is not heard."""

    def exited(self, record: FailureRecord, now):
        return None if record.rank not in self.membership.members else whole(self, record, now)

    whole = Members.exited
    monkeypatch.setattr(Members, "exited", exited)


@pytest.mark.parametrize(
    "defect",
    [meets_where_they_were, asks_once, enters_what_is_void, forgets_ends],
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

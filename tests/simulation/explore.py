"""All histories of a small world with few deviations: two members, one that joins or leaves, up to two more.

A deviation is a fault before an event, or an event that is held up while others happen. All delays are equal,
so that a history is named by its deviations: those with one come first, then those with two.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from simulation.kernel import Violation
from simulation.plan import Fault, Plan
from simulation.world import World

__all__ = ["Explored", "explore"]

_FAULTS = (("kill", 0), ("kill", 1), ("sigterm", 0), ("sigterm", 1))
_HELD_S = 0.4
_FIRST_EVENT = 60
"""All train by then."""

Deviation = tuple[int, str, int]
"""Before which event, what, and whose process."""


@dataclass(frozen=True)
class Explored:
    """How far it went."""

    num_histories: int
    depth: int
    """So many deviations, in all ways."""
    share: float
    """Of the histories with one more."""
    failures: tuple[tuple[Plan, str], ...]


def _base(first: str) -> Plan:
    return Plan(
        seed=0,
        is_random=False,
        faults=(Fault(kind=first, place=1, at_s=0.0, at_event=_FIRST_EVENT),),
    )


def _plan(base: Plan, deviations: tuple[Deviation, ...]) -> Plan:
    faults = [
        Fault(kind=kind, place=place, at_s=0.0, at_event=event)
        for event, kind, place in deviations
        if kind != "hold"
    ]
    held = tuple((event, _HELD_S) for event, kind, _ in deviations if kind == "hold")
    return replace(base, faults=(*base.faults, *faults), held=held)


def _deviations(events: range) -> list[Deviation]:
    kinds = (*_FAULTS, ("hold", 0))
    return [(event, kind, place) for event in events for kind, place in kinds]


def _histories(base: Plan, depth: int, events: range) -> Iterator[Plan]:
    for chosen in itertools.combinations(_deviations(events), depth):
        yield _plan(base, chosen)


def explore(first: str, *, within_s: float, most: int = 2) -> Explored:
    """Plays histories in their order, as many as the time allows.

    Args:
        first: what happens to rank 1 in each: "kill", so that a new process joins, or "sigterm".
        within_s: seconds of this machine.
        most: deviations.
    """
    deadline, base = time.monotonic() + within_s, _base(first)
    world = World(base)
    world.play()
    events = range(_FIRST_EVENT + 1, world.whole_after)
    num_histories, failures = 1, []
    for depth in range(1, most + 1):
        plans = list(_histories(base, depth, events))
        stride = 7919  # a part of them is spread over all
        for number in range(len(plans)):
            if time.monotonic() > deadline:
                return Explored(num_histories, depth - 1, number / len(plans), tuple(failures))
            plan = plans[number * stride % len(plans)]
            num_histories += 1
            try:
                World(plan).play()
            except Violation as error:
                failures.append((plan, str(error)))
    return Explored(num_histories, most, 0.0, tuple(failures))

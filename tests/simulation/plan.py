"""What a history is made of: the run, its faults, and how long things take."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Fault", "Plan", "plan_of"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens to the run."""

    kind: str
    at_s: float
    """When: so many seconds after a generation was formed."""
    generation: int = 0
    """Which; 0 for the first processes, that were started at time 0."""
    at_step: int | None = None
    """In place of a generation: after the first rank is through the all-reduce of this step."""
    after: str | None = None
    """In place of a generation: after a message of this kind, or what a process begins (`World.occurs`)."""
    count: int = 1
    """Which of these."""
    at_event: int | None = None
    """In place of a time: before the event of this number."""
    place: int
    """Whose process it hits; of a cut or a dismissal, whose node."""
    for_s: float = 1.0
    """How long it lasts: a freeze, or until a lost node comes back."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a history is made of; all of it follows from its seed, unless it was made smaller."""

    seed: int
    num_ranks: int = 2
    num_nodes: int = 1
    replaces: bool = True
    """`on_failure="replace"`; else "shrink"."""
    leaves: bool = True
    """`on_preemption="leave"`."""
    exceptions: bool = False
    min_world_size: int = 1
    max_recoveries: int = 1000
    wait_s: float = 0.0
    stall_timeout_s: float | None = None
    is_hosted_by_rank_0: bool = False
    """`python`; else `run`, whose server outlives all ranks."""
    tests_after: bool = False
    """Whether a `test` follows the fit."""
    last_step: int | None = None
    """After which the fit ends; None for when all is well again."""
    faults: tuple[Fault, ...] = ()
    is_random: bool = True
    """Whether delays are."""
    held: tuple[tuple[int, float], ...] = ()
    """Events that happen so much later, by their numbers."""

    def smaller(self) -> list[Plan]:
        """Plans that are simpler by one thing."""
        found = [
            replace(self, faults=self.faults[:i] + self.faults[i + 1 :]) for i in range(len(self.faults))
        ]
        found += [replace(self, held=self.held[:i] + self.held[i + 1 :]) for i in range(len(self.held))]
        if self.num_nodes == 1 and self.num_ranks > 2:
            faults = tuple(replace(f, place=min(f.place, self.num_ranks - 2)) for f in self.faults)
            found.append(replace(self, num_ranks=self.num_ranks - 1, faults=faults))
        simple: dict[str, Any] = {
            "stall_timeout_s": None, "wait_s": 0.0, "min_world_size": 1, "max_recoveries": 1000,
            "exceptions": False, "is_hosted_by_rank_0": False, "tests_after": False, "last_step": None,
            "is_random": False,
        }  # fmt: skip
        found += [replace(self, **{k: v}) for k, v in simple.items() if getattr(self, k) != v]
        return found


_LOSSES = ("kill", "exit", "kill", "quit", "glitch", "glitch")
_STYLES: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    # how often of 100, what happens first, and what then
    "mixed": (
        22,
        (),
        (*_LOSSES, "kill", "kill", "sigterm", "sigterm", "sigterm", "freeze", "freeze", "raise"),
    ),
    "dense": (18, (), (*_LOSSES, "kill source", "freeze")),
    "skew": (24, ("kill", "kill source"), ("kill", "exit", "quit", "kill source")),
    "leaving": (15, (), ("sigterm", "sigterm", "sigterm", "kill", "quit", "freeze")),
    "stopping": (15, ("kill", "sigterm", "exit"), ("sigterm", "kill", "quit", "kill", "freeze")),
    "long": (6, ("kill", "glitch", "kill", "glitch"), ("glitch", "kill")),
    "moments": (30, ("kill",), (*_LOSSES, "kill source", "sigterm", "sigterm", "freeze", "raise")),
}
"""Kinds of histories: anything at all; losses while others join; a loss when some have committed a step; many
that are asked to leave; a stop of all with losses; long pauses between faults; faults that come just after a
message of some kind."""
_JOINS = ("Gather", "Position", "MeetAfter", "Present", "Form", "Joined")
_STOPS = ("Hold", "Position", "StopAfter", "Stopped", "Muster", "Form")
_MOMENTS = {
    "skew": ("copies", "copies", "Form", "Muster", "Present", "Joined"),
    "leaving": _JOINS,
    "stopping": (*_STOPS, "Gather", "MeetAfter", "MeetAfter"),
    "moments": (
        *_JOINS,
        *_STOPS,
        "Gather",
        "MeetAfter",
        "Left",
        "Ready",
        "Start",
        "Start",
        "copies",
        "ended",
    ),
}
"""Style -> after what its faults may come."""
_PHASES = ("Hold", "Gather", "MeetAfter", "Muster", "Form", "StopAfter", "Start")
"""Messages that begin a phase of the job: all processes may be stopped then for a while, as by Ctrl-Z."""


def plan_of(seed: int) -> Plan:
    """The history that a seed stands for."""
    draw = random.Random(seed)
    num_nodes = 2 if draw.random() < 0.3 else 1
    style = draw.choices(list(_STYLES), [weight for weight, _, _ in _STYLES.values()])[0]
    num_ranks = 4 if num_nodes == 2 else draw.choice((3, 3, 4) if style == "skew" else (2, 2, 3, 3, 4))
    kinds = list(_STYLES[style][2])
    if num_nodes == 2 and style in ("mixed", "leaving", "moments"):
        kinds += ["dismiss", "dismiss"] if style == "leaving" else ["cut", "dismiss", "cut", "dismiss", "cut"]
    replaces = draw.random() < 0.85
    waits = replaces and draw.random() < 0.15
    ends = style != "long" and draw.random() < 0.3
    plan = Plan(
        seed=seed,
        tests_after=ends and draw.random() < 0.2,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        replaces=replaces,
        leaves=style != "stopping" and draw.random() < (0.6 if style == "moments" else 0.9),
        exceptions=draw.random() < 0.8,
        min_world_size=draw.choice((2, num_ranks)) if waits else draw.choice((1, 1, 1, 2)),
        wait_s=30.0 if waits else 0.0,
        stall_timeout_s=3.0 if draw.random() < 0.12 else None,
        is_hosted_by_rank_0=draw.random() < (0.5 if style == "stopping" else 0.1),
        last_step=draw.randrange(3, 25) if ends else None,
        faults=tuple(_faults(draw, style, kinds, (0, 1, 2, 3, 3, 3) if num_nodes == 2 else range(num_ranks))),
    )
    if plan.last_step is not None and draw.random() >= 0.5:
        last = Fault(kind="kill ended", at_s=0.2 * draw.random() ** 2, after="ended", place=0)
        plan = replace(plan, faults=(*plan.faults, last))
    return _with_more(plan, style)


def _with_more(plan: Plan, style: str) -> Plan:
    """Add faults of kinds that are rare, from random numbers of their own."""
    draw = random.Random(~plan.seed)
    places = sorted({fault.place for fault in plan.faults if fault.kind not in ("cut", "dismiss")}) or [0]
    more = []
    if draw.random() < 0.08:
        hang = Fault(
            kind="hang",
            at_s=2.0 * draw.random(),
            generation=draw.choice((0, 1, 1, 2)),
            after=draw.choice((None, None, "MeetAfter", "Ready")),
            place=draw.choice(places),
            for_s=40.0,
        )
        more.append(hang)
    if style == "leaving" and draw.random() < 0.4:
        place, after_s = draw.choice(places), draw.random()
        more += [
            Fault(kind="sigterm", at_s=1.0, place=place),
            Fault(kind="stop", at_s=1.0 + 0.5 * after_s**2, place=place),
        ]
    if style == "leaving" and plan.min_world_size > 1:
        more.append(
            Fault(kind="sigterm", at_s=0.02 * draw.random(), after="MeetAfter", place=draw.choice(places))
        )
    if style == "skew" and draw.random() < 0.5:
        more.append(Fault(kind="kill source", at_s=0.02 * draw.random(), after="copies", place=0))
    if plan.num_nodes == 2 and draw.random() < 0.3:
        launcher = 2  # of the second node
        more.append(Fault(kind="kill", at_s=0.05 * draw.random(), after="Present", place=launcher))
    if draw.random() < 0.15:
        kind = draw.choice(("sigterm", "dismiss")) if plan.num_nodes == 2 else "sigterm"
        place = 1 if kind == "dismiss" else draw.choice(places)
        more.append(Fault(kind=kind, at_s=0.1 * draw.random(), after="Hello", place=place))
    if draw.random() < 0.1:
        more.append(Fault(kind="raise", at_s=0.01, after="Start", place=draw.choice(places)))
    most = draw.choice((1, 2, 3)) if draw.random() < 0.15 else plan.max_recoveries
    if any(fault.kind == "cut" for fault in plan.faults) and draw.random() < 0.5:  # before it connects
        more.append(Fault(kind="kill", at_s=0.03 * draw.random(), after="started", place=3))
    draw = random.Random(plan.seed + 0.5)
    for _ in range(draw.choice((1, 2)) if draw.random() < 0.15 else 0):
        after = draw.choice((None, None, "MeetAfter", "Form", "copies", "Joined"))
        at_s = 0.02 * draw.random() if after else 0.3 + draw.random()
        generation, place = draw.choice((0, 0, 1)), draw.choice(places)
        more.append(Fault(kind="part", at_s=at_s, generation=generation, after=after, place=place))
    draw = random.Random(plan.seed + 0.25)
    if plan.num_nodes == 1 and draw.random() < 0.12:
        after, at_s, for_s = draw.choice(_PHASES), 0.02 * draw.random(), draw.choice((5.0, 14.0, 40.0))
        more.append(Fault(kind="sleep", at_s=at_s, after=after, place=0, for_s=for_s))
    return replace(plan, max_recoveries=most, faults=(*plan.faults, *more))


def _faults(draw: random.Random, style: str, kinds: list[str], places: Sequence[int]) -> Iterator[Fault]:
    at_s, generation, first = 0.3 + draw.random(), 0, _STYLES[style][1]
    for number in range(max(len(first), draw.choice((2, 3, 4, 5, 6, 8)))):
        is_skew = style == "skew" and number == 0
        moments = _MOMENTS.get(style, ())
        is_moment = number > 0 and bool(moments) and draw.random() < (1.0 if style == "moments" else 0.5)
        yield Fault(
            kind=first[number] if number < len(first) else draw.choice(kinds),
            at_s=0.001 * draw.random() if is_skew else at_s,
            generation=generation,
            after=draw.choice(moments) if is_moment else None,
            count=draw.choice((1, 1, 1, 2, 3, 4)) if is_moment else 1,
            at_step=draw.randrange(1, 12) if is_skew or draw.random() < 0.05 else None,
            place=draw.choice(places),
            for_s=0.01 * 10 ** (3 * draw.random()) if draw.random() < 0.8 else 30.0,
        )
        if style == "long" and number % 2:
            at_s += 31.0
        elif style in ("mixed", "leaving", "stopping") and draw.random() < 0.5:
            at_s += 0.005 * 10 ** (2.9 * draw.random())
        else:  # while the next generation, or the one after, is formed
            generation += 1 if style == "skew" else draw.choice((1, 1, 2))
            at_s = 0.002 * 10 ** (2.5 * draw.random())

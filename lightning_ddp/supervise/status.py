"""Status of the ranks: what each says that it is doing, and the sentence that says where they disagree.

Everything that a rank says is bounded in size, and cut where it is longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

__all__ = [
    "Findings",
    "GroupStatus",
    "Name",
    "RankStatus",
    "State",
    "Text",
    "explain",
    "join_ranks",
    "members",
    "split_ranks",
]

_RANKS_CHARACTERS = 200
_SENTENCE_CHARACTERS = 1_500
_TABLE_CHARACTERS = 2_000
_MOST_GROUPS = 6
_MOST_ROWS = 16
_CERTAIN_AFTER_S = 1.0

State = Literal["waits", "starts", "runs", "finished", "ending", "silent", "gone"]
Name = Annotated[str, 80]
Text = Annotated[str, 200]
"""Of at most so many characters; the protocol cuts what is longer."""


@dataclass(frozen=True, kw_only=True)
class GroupStatus:
    """What a rank has done with one process group."""

    name: Name
    """The same on all ranks of the group."""
    ranks: Annotated[str, _RANKS_CHARACTERS]
    """Its global ranks, as `join_ranks` writes them."""
    number: int
    """How many collectives it has started there."""
    calls: dict[int, Text] = field(default_factory=dict)
    """Number -> what it was, for the last few."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """What a rank says that it is doing."""

    rank: int
    state: State
    """'waits' for a collective, 'starts' one with the others, 'runs', 'finished' its run, is 'ending' because
    of a failure, 'silent' or 'gone'."""
    label: Text | None = None
    """The collective that it waits for; of one that has finished, what."""
    group: Text | None = None
    """Name of the process group of that."""
    number: int = 0
    """Its number there; 0 where it is not known."""
    for_s: float = 0.0
    """Seconds since that began."""
    step: int | None = None
    phase: Text | None = None
    at: Text | None = None
    """Line of the program at which its main thread is."""
    groups: Annotated[tuple[GroupStatus, ...], _MOST_GROUPS] = ()
    blocked_on: Annotated[tuple[tuple[Text, int, bool], ...], _MOST_GROUPS] = ()
    """Group, number and whether it has not been started, of the collectives without which the rank does not
    get on; empty where it may get on by itself."""

    def on(self, group: str) -> GroupStatus | None:
        """What it has done with one group."""
        return next((known for known in self.groups if known.name == group), None)

    def describe(self) -> str:
        """Its state in words, after 'rank 3' or 'ranks 0-2'."""
        step = f" at step {self.step}" if self.step is not None else ""
        phase = f" in {self.phase}" if self.phase else ""
        place = f" ({self.at})" if self.at else ""
        if self.state == "waits":
            return f"waits in {self.label}{step}{phase}"
        if self.state == "starts":
            return f"is about to start {self.label}{step}{phase}"
        if self.state == "runs":
            beside = f", while a thread beside it waits in {self.label}" if self.label else ""
            return f"waits for no collective{step}{phase}{place}{beside}"
        return {
            "finished": f"has finished {self.label or 'its run'}{step}",
            "ending": f"ends because of a failure{step}{phase}",
            "silent": "does not answer: it is stopped, or something holds its interpreter",
            "gone": "is gone",
        }[self.state]


# ---------------------------------------------------------------------- ranks in words


def join_ranks(ranks: Iterable[int]) -> str:
    """Ranks as people write them.

    >>> join_ranks([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in runs)


def split_ranks(text: str) -> set[int] | None:
    """The ranks that `join_ranks` has written; None if that was cut, or is something else.

    >>> sorted(split_ranks("0-2, 5"))
    [0, 1, 2, 5]
    """
    ranks: set[int] = set()
    if len(text) >= _RANKS_CHARACTERS:
        return None
    for part in text.split(", "):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal() or len(first + last) > 12:
            return None
        if int(last) - int(first) > 100_000:
            return None
        ranks.update(range(int(first), int(last) + 1))
    return ranks


def _who(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {join_ranks(ranks)}"


def _plural(text: str, count: int) -> str:
    """A state in words after one rank, or after several."""
    verb, _, rest = text.partition(" ")
    plural = {"waits": "wait", "is": "are", "has": "have", "does": "do", "ends": "end", "called": "called"}
    return f"{plural.get(verb, verb)} {rest}" if count > 1 else text


# ---------------------------------------------------------------------- where they disagree


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What comparing the statuses has shown."""

    sentence: str
    """Where the ranks disagree."""
    table: str
    """Each rank, its state, since when."""
    missing: tuple[int, ...]
    """Global ranks that have not come to the collective."""
    is_contradiction: bool = False
    """Whether ranks wait in different ones in its place, so that it cannot end well."""


def explain(
    statuses: Mapping[int, RankStatus], asker: int, group: str | None = None, number: int = 0
) -> Findings:
    """Says where the ranks disagree. Pure.

    Args:
        statuses: of all ranks of the run.
        asker: the rank that wants to know.
        group: the process group in question; None to choose the one that most ranks wait in.
        number: the collective in question.
    """
    if group is None or not any(status.on(group) for status in statuses.values()):
        group, number = _busiest(statuses)
    parted = _first_difference(statuses, group) if group is not None else None
    missing = _missing(statuses, asker, group, number) if group is not None else ()
    if parted is not None:
        sentence = parted
    else:
        concerned = members(statuses, group) if group is not None else set(statuses)
        present = [r for r in sorted(concerned) if r not in missing]
        sentence = "; ".join(filter(None, (_sum_up(statuses, present), _sum_up(statuses, missing))))
        if not missing:
            sentence += (
                ". All have called the same: the link is slow or broken, or a call from outside of this"
            )
            sentence += " package is in between"
    return Findings(
        sentence=sentence[:_SENTENCE_CHARACTERS],
        table=_table(statuses),
        missing=tuple(missing),
        is_contradiction=_contradicts(statuses, group, number),
    )


def _contradicts(statuses: Mapping[int, RankStatus], group: str | None, number: int) -> bool:
    called = set()
    for status in statuses.values():
        known = status.on(group) if group is not None else None
        is_there = status.state == "waits" and (status.group, status.number) == (group, number)
        if known is not None and is_there and status.for_s >= _CERTAIN_AFTER_S and number in known.calls:
            called.add(known.calls[number].rpartition(": ")[2])  # a label alone makes no difference
    return len(called) > 1


def _busiest(statuses: Mapping[int, RankStatus]) -> tuple[str | None, int]:
    """The collective that most ranks wait for."""
    waits = [(a.group, a.number) for a in statuses.values() if a.group is not None and a.number]
    return max(waits, key=waits.count, default=(None, 0))


def members(statuses: Mapping[int, RankStatus], group: str) -> set[int]:
    """Global ranks of a group, as far as the statuses tell."""
    for status in statuses.values():
        known = status.on(group)
        ranks = split_ranks(known.ranks) if known is not None else None
        if ranks is not None:
            return ranks & statuses.keys()
    return {rank for rank, status in statuses.items() if status.on(group) is not None}


def _missing(statuses: Mapping[int, RankStatus], asker: int, group: str, number: int) -> tuple[int, ...]:
    """Ranks that have not come to a collective, or called another one in its place."""
    mine = statuses[asker].on(group) if asker in statuses else None
    expected = mine.calls.get(number) if mine is not None else None
    missing = []
    for rank in sorted(members(statuses, group)):
        known = statuses[rank].on(group)
        has_come = known is not None and known.number >= number
        called = known.calls.get(number) if known is not None else None
        if not has_come or (expected is not None and called not in (None, expected)):
            missing.append(rank)
    return tuple(missing)


def _first_difference(statuses: Mapping[int, RankStatus], group: str) -> str | None:
    """The first collective of a group that ranks remember differently, in words."""
    calls = {r: known.calls for r, a in statuses.items() if (known := a.on(group)) is not None}
    for number in sorted({n for known in calls.values() for n in known}):
        groups: dict[str, list[int]] = {}
        for rank in sorted(calls):
            if number in calls[rank]:
                groups.setdefault(calls[rank][number], []).append(rank)
        if len(groups) > 1:
            called = [
                f"{_who(ranks)} called {text}{_place(statuses, ranks)}" for text, ranks in groups.items()
            ]
            return f"as collective {number} of {group} " + "; ".join(called)
    return None


def _place(statuses: Mapping[int, RankStatus], ranks: Sequence[int]) -> str:
    places = {(statuses[r].step, statuses[r].phase) for r in ranks}
    if len(places) > 1:
        return ""
    ((step, phase),) = places
    return (f" at step {step}" if step is not None else "") + (f" in {phase}" if phase else "")


def _grouped(statuses: Mapping[int, RankStatus], ranks: Iterable[int]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(statuses[rank].describe(), []).append(rank)
    return groups


def _sum_up(statuses: Mapping[int, RankStatus], ranks: Sequence[int]) -> str:
    groups = _grouped(statuses, ranks)
    parts = [f"{_who(same)} {_plural(text, len(same))}" for text, same in groups.items()]
    return "; ".join(parts[:_MOST_ROWS])


def _table(statuses: Mapping[int, RankStatus]) -> str:
    groups: dict[Any, list[int]] = {}
    is_long = len(statuses) > _MOST_ROWS
    for rank in sorted(statuses):
        status = statuses[rank]
        text = status.describe()
        if status.number and status.group:
            text += f" (collective {status.number} of {status.group})"
        groups.setdefault(text if is_long else (text, rank), []).append(rank)
    rows = [("rank", "state", "for")]
    for key, ranks in list(groups.items())[:_MOST_ROWS]:
        times = sorted(statuses[rank].for_s for rank in ranks)
        spread = f"{times[0]:.1f} s" if len(times) == 1 else f"{times[0]:.1f} to {times[-1]:.1f} s"
        rows.append((join_ranks(ranks), key if is_long else key[0], spread))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"  {rank.ljust(widths[0])}  {text.ljust(widths[1])}  {since}" for rank, text, since in rows]
    more = len(groups) - _MOST_ROWS
    return "\n".join([*lines, *([f"  and {more} more states"] if more > 0 else [])])[:_TABLE_CHARACTERS]

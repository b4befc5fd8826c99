"""Status of the ranks: what each says that it is doing, and the sentence that says where they disagree.

Everything that a rank says is bounded in size, and cut where it is longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Account", "Findings", "LaneAccount", "explain", "join_ranks", "members", "split_ranks"]

_NAME_CHARACTERS = 80
_CALL_CHARACTERS = 200
_RANKS_CHARACTERS = 200
_SENTENCE_CHARACTERS = 1_500
_TABLE_CHARACTERS = 2_000
_MOST_LANES = 6
_MOST_CALLS = 4
_MOST_ROWS = 16
_CERTAIN_AFTER_S = 1.0
_STATES = ("waits", "starts", "runs", "finished", "ending", "silent", "gone")


@dataclass(frozen=True, kw_only=True)
class LaneAccount:
    """What a rank has done with one process group."""

    name: str
    """The same on all ranks of the group."""
    ranks: str
    """Its global ranks, as `join_ranks` writes them."""
    number: int
    """How many collectives it has started there."""
    calls: Mapping[int, str] = field(default_factory=dict)
    """Number -> what it was, for the last few."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """What a rank says that it is doing."""

    rank: int
    state: str
    """'waits' for a collective, 'starts' one with the others, 'runs', 'finished' its run, is 'ending' because
    of a failure, 'silent' or 'gone'."""
    label: str | None = None
    """The collective that it waits for; of one that has finished, what."""
    lane: str | None = None
    """Name of the process group of that."""
    number: int = 0
    """Its number there; 0 where it is not known."""
    for_s: float = 0.0
    """Seconds since that began."""
    step: int | None = None
    phase: str | None = None
    at: str | None = None
    """Line of the program at which its main thread is."""
    lanes: tuple[LaneAccount, ...] = ()
    blocked_on: tuple[tuple[str, int, bool], ...] = ()
    """Group, number and whether it has not been started, of the collectives without which the rank does not
    get on; empty where it may get on by itself."""

    def to_message(self) -> dict[str, Any]:
        """In types that JSON has."""
        values = asdict(self)
        values["lanes"] = [
            [lane.name, lane.ranks, lane.number, [[n, text] for n, text in lane.calls.items()]]
            for lane in self.lanes[:_MOST_LANES]
        ]
        return values

    @classmethod
    def from_message(cls, rank: int, message: Mapping[str, Any]) -> Account:
        """What rank `rank` says; whatever is malformed in it is left out."""
        state = message.get("state")
        for_s = message.get("for_s")
        lanes = message.get("lanes")
        return cls(
            rank=rank,
            state=state if isinstance(state, str) and state in _STATES else "runs",
            label=_text(message, "label"),
            lane=_text(message, "lane"),
            number=_int(message.get("number")) or 0,
            for_s=float(for_s) if isinstance(for_s, (int, float)) else 0.0,
            step=_int(message.get("step")),
            phase=_text(message, "phase"),
            at=_text(message, "at"),
            lanes=tuple(map(_lane, lanes[:_MOST_LANES])) if isinstance(lanes, list) else (),
            blocked_on=_blocked(message.get("blocked_on")),
        )

    def on(self, lane: str) -> LaneAccount | None:
        """What it has done with one group."""
        return next((known for known in self.lanes if known.name == lane), None)

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


def _text(message: Mapping[str, Any], name: str) -> str | None:
    value = message.get(name)
    return value[:_CALL_CHARACTERS] if isinstance(value, str) else None


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _blocked(value: object) -> tuple[tuple[str, int, bool], ...]:
    known = value[:_MOST_LANES] if isinstance(value, list) else []
    if not all(isinstance(v, list) and len(v) == 3 and _int(v[1]) is not None for v in known):
        return ()
    return tuple((str(lane), number, is_start is True) for lane, number, is_start in known)


def _lane(value: object) -> LaneAccount:
    fields: list[Any] = value if isinstance(value, list) and len(value) == 4 else ["?", "", 0, []]
    name, ranks, number, calls = fields
    pairs = [p for p in calls if isinstance(p, list) and len(p) == 2] if isinstance(calls, list) else []
    return LaneAccount(
        name=str(name)[:_NAME_CHARACTERS],
        ranks=str(ranks)[:_RANKS_CHARACTERS],
        number=_int(number) or 0,
        calls={n: str(text)[:_CALL_CHARACTERS] for n, text in pairs[-_MOST_CALLS:] if _int(n) is not None},
    )


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
    """What comparing the accounts has shown."""

    sentence: str
    """Where the ranks disagree."""
    table: str
    """Each rank, its state, since when."""
    missing: tuple[int, ...]
    """Global ranks that have not come to the collective."""
    is_contradiction: bool = False
    """Whether ranks wait in different ones in its place, so that it cannot end well."""


def explain(
    accounts: Mapping[int, Account], asker: int, lane: str | None = None, number: int = 0
) -> Findings:
    """Says where the ranks disagree. Pure.

    Args:
        accounts: of all ranks of the run.
        asker: the rank that wants to know.
        lane: the process group in question; None to choose the one that most ranks wait in.
        number: the collective in question.
    """
    if lane is None or not any(account.on(lane) for account in accounts.values()):
        lane, number = _busiest(accounts)
    parted = _first_difference(accounts, lane) if lane is not None else None
    missing = _missing(accounts, asker, lane, number) if lane is not None else ()
    if parted is not None:
        sentence = parted
    else:
        concerned = members(accounts, lane) if lane is not None else set(accounts)
        present = [r for r in sorted(concerned) if r not in missing]
        sentence = "; ".join(filter(None, (_sum_up(accounts, present), _sum_up(accounts, missing))))
        if not missing:
            sentence += (
                ". All have called the same: the link is slow or broken, or a call from outside of this"
            )
            sentence += " package is in between"
    return Findings(
        sentence=sentence[:_SENTENCE_CHARACTERS],
        table=_table(accounts),
        missing=tuple(missing),
        is_contradiction=_contradicts(accounts, lane, number),
    )


def _contradicts(accounts: Mapping[int, Account], lane: str | None, number: int) -> bool:
    called = set()
    for account in accounts.values():
        known = account.on(lane) if lane is not None else None
        is_there = account.state == "waits" and (account.lane, account.number) == (lane, number)
        if known is not None and is_there and account.for_s >= _CERTAIN_AFTER_S and number in known.calls:
            called.add(known.calls[number].rpartition(": ")[2])  # a label alone makes no difference
    return len(called) > 1


def _busiest(accounts: Mapping[int, Account]) -> tuple[str | None, int]:
    """The collective that most ranks wait for."""
    waits = [(a.lane, a.number) for a in accounts.values() if a.lane is not None and a.number]
    return max(waits, key=waits.count, default=(None, 0))


def members(accounts: Mapping[int, Account], lane: str) -> set[int]:
    """Global ranks of a group, as far as the accounts tell."""
    for account in accounts.values():
        known = account.on(lane)
        ranks = split_ranks(known.ranks) if known is not None else None
        if ranks is not None:
            return ranks & accounts.keys()
    return {rank for rank, account in accounts.items() if account.on(lane) is not None}


def _missing(accounts: Mapping[int, Account], asker: int, lane: str, number: int) -> tuple[int, ...]:
    """Ranks that have not come to a collective, or called another one in its place."""
    mine = accounts[asker].on(lane) if asker in accounts else None
    expected = mine.calls.get(number) if mine is not None else None
    missing = []
    for rank in sorted(members(accounts, lane)):
        known = accounts[rank].on(lane)
        has_come = known is not None and known.number >= number
        called = known.calls.get(number) if known is not None else None
        if not has_come or (expected is not None and called not in (None, expected)):
            missing.append(rank)
    return tuple(missing)


def _first_difference(accounts: Mapping[int, Account], lane: str) -> str | None:
    """The first collective of a group that ranks remember differently, in words."""
    calls = {r: known.calls for r, a in accounts.items() if (known := a.on(lane)) is not None}
    for number in sorted({n for known in calls.values() for n in known}):
        groups: dict[str, list[int]] = {}
        for rank in sorted(calls):
            if number in calls[rank]:
                groups.setdefault(calls[rank][number], []).append(rank)
        if len(groups) > 1:
            called = [
                f"{_who(ranks)} called {text}{_place(accounts, ranks)}" for text, ranks in groups.items()
            ]
            return f"as collective {number} of {lane} " + "; ".join(called)
    return None


def _place(accounts: Mapping[int, Account], ranks: Sequence[int]) -> str:
    places = {(accounts[r].step, accounts[r].phase) for r in ranks}
    if len(places) > 1:
        return ""
    ((step, phase),) = places
    return (f" at step {step}" if step is not None else "") + (f" in {phase}" if phase else "")


def _grouped(accounts: Mapping[int, Account], ranks: Iterable[int]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(accounts[rank].describe(), []).append(rank)
    return groups


def _sum_up(accounts: Mapping[int, Account], ranks: Sequence[int]) -> str:
    groups = _grouped(accounts, ranks)
    parts = [f"{_who(same)} {_plural(text, len(same))}" for text, same in groups.items()]
    return "; ".join(parts[:_MOST_ROWS])


def _table(accounts: Mapping[int, Account]) -> str:
    groups: dict[Any, list[int]] = {}
    is_long = len(accounts) > _MOST_ROWS
    for rank in sorted(accounts):
        account = accounts[rank]
        text = account.describe()
        if account.number and account.lane:
            text += f" (collective {account.number} of {account.lane})"
        groups.setdefault(text if is_long else (text, rank), []).append(rank)
    rows = [("rank", "state", "for")]
    for key, ranks in list(groups.items())[:_MOST_ROWS]:
        times = sorted(accounts[rank].for_s for rank in ranks)
        spread = f"{times[0]:.1f} s" if len(times) == 1 else f"{times[0]:.1f} to {times[-1]:.1f} s"
        rows.append((join_ranks(ranks), key if is_long else key[0], spread))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"  {rank.ljust(widths[0])}  {text.ljust(widths[1])}  {since}" for rank, text, since in rows]
    more = len(groups) - _MOST_ROWS
    return "\n".join([*lines, *([f"  and {more} more states"] if more > 0 else [])])[:_TABLE_CHARACTERS]

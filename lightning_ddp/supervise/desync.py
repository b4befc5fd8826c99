"""Who is stuck where: questions between ranks, the comparison of their calls, ranks without progress.

The server's side, and pure: told who says what and when, it says what to send to whom. A roll call asks all
ranks what they are doing, and waits a second for their threads to answer. With debug="detail" every rank
announces each collective, and is told to go on once all members of its group have announced the same. Where
some do not come a roll call shows whether they still may, or whether everybody waits for somebody else.

It is long because a rank that hangs is explained by all of it: what it says, and what the others wait for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning_ddp.supervise.protocol as protocol
from lightning_ddp.supervise.failure_record import FailureRecord, Identity, Where
from lightning_ddp.supervise.protocol import Findings, Message, Outgoing, ProtocolError, RankStatus

__all__ = [
    "ANSWER_WAIT_S",
    "REPORTS_A_TIMEOUT",
    "DesyncDetector",
    "StallWatch",
    "explain",
    "join_ranks",
    "silent",
    "split_ranks",
]

ANSWER_WAIT_S = 1.0
"""How long a roll call waits for the ranks that do not answer."""
REPORTS_A_TIMEOUT = 4
"""How often a rank reports, at least, within the time after which it counts as stalled."""
_FIRST_LOOK_S = 1.0
"""How old an announced collective is when the first roll call looks for the ranks that do not come."""
_LONGEST_PAUSE_S = 30.0
_FRESH_S = 3.0
_CERTAIN_AFTER_S = 1.0
_REPORT_EVERY_S = 0.25
_REPORTS_A_S = 64
"""Of all ranks together: each costs the server some 50 us."""
_MOST_MISSING = 1000
_MOST_ROWS = 16
_MOST_STALLED_ROWS = 20
_RANKS_CHARACTERS = 200
_SENTENCE_CHARACTERS = 1_500
_TABLE_CHARACTERS = 2_000

_Question = tuple[str | None, int]
"""A collective: the name of its process group, and its number there."""


@dataclass
class _RollCall:
    """A question that is under way."""

    number: int
    deadline: float
    waiting: set[int]
    """Ranks that have not answered."""
    statuses: dict[int, RankStatus]
    askers: set[tuple[int, _Question]] = field(default_factory=set)


@dataclass
class _Announced:
    """A collective that some members of its group are about to start."""

    ranks: frozenset[int]
    number: int
    since: float
    texts: dict[int, str] = field(default_factory=dict)
    """Rank -> what it is about to call."""
    run: int = 0
    """The latest run, as the ranks count them, in which one of them is."""


class DesyncDetector:
    """Answers the questions of one run's ranks.

    Args:
        world_size: ranks of the run.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._present: set[int] = set()
        self._finished: dict[int, tuple[int, str]] = {}
        self._num_rolls = 0
        self._roll: _RollCall | None = None
        self._last: tuple[float, dict[int, RankStatus]] = (float("-inf"), {})
        self._unchecked: dict[int, RankStatus] = {}
        self._announced: dict[str, _Announced] = {}
        self._pause_s = _FIRST_LOOK_S
        self._broken: dict[str | None, Findings | None] = {}
        """Group in which the ranks disagree -> where, once that is known."""

    # ------------------------------------------------------------------ who is there

    def joined(self, rank: int) -> None:
        """A rank has connected."""
        if rank >= 0:
            self._present.add(rank)

    def begun(self, rank: int) -> None:
        """A rank has begun a run (a fit, a test ...)."""
        self._finished.pop(rank, None)

    def finished(self, rank: int, run: int, name: str) -> None:
        """A rank has finished a run; `run` is how many it has begun."""
        self._finished[rank] = (run, name)

    def left(self, rank: int, now: float) -> Outgoing:
        """A rank has disconnected."""
        self._present.discard(rank)
        return self._heard(rank, now)

    # ------------------------------------------------------------------ what they say

    def handle(self, rank: int, message: Message, now: float) -> Outgoing:
        """What a rank says.

        Raises:
            ProtocolError: it is nothing that a rank says.
        """
        match message:
            case protocol.DiagnoseRequest(group, number):
                return self._ask(rank, (group, number), now)
            case protocol.StatusReply(number, status):
                if self._roll is None or number != self._roll.number:
                    return []
                self._roll.statuses[rank] = replace(status, rank=rank)
                return self._heard(rank, now)
            case protocol.CollectiveFingerprint():
                return self._announce(rank, message, now)
            case protocol.CheckOrphanedWaits():
                return self._call(now) if self._roll is None and now - self._last[0] >= _FRESH_S else []
            case protocol.SendValue(to, topic, value):
                return [(to, protocol.PeerValue(rank, topic, value))] if to in self._present else []
        raise ProtocolError(f"a message {message.kind}")

    def deadline(self) -> float | None:
        """When `due` has something to do at the latest."""
        if self._roll is not None:
            return self._roll.deadline
        return self._next_look() if self._announced else None

    def _next_look(self) -> float:
        oldest = min(announced.since for announced in self._announced.values())
        return max(oldest + _FIRST_LOOK_S, self._last[0] + self._pause_s)

    def due(self, now: float) -> Outgoing:
        """What is sent because nobody has answered for long enough."""
        if self._roll is not None:
            return self._finish(self._roll, now) if now >= self._roll.deadline else []
        if not self._announced or now < self._next_look():
            return []
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return self._call(now)

    # ------------------------------------------------------------------ roll call

    def _ask(self, rank: int, question: _Question, now: float) -> Outgoing:
        when, statuses = self._last
        if self._roll is None and now - when < _FRESH_S and rank in statuses:
            known = statuses[rank]
            if (known.group, known.number) == question:  # the others have left their waits since
                return [self._explain(statuses, rank, question)]
        outgoing = self._call(now) if self._roll is None else []
        if self._roll is not None:
            self._roll.askers.add((rank, question))
        return outgoing

    def _call(self, now: float) -> Outgoing:
        self._num_rolls += 1
        self._roll = _RollCall(self._num_rolls, now + ANSWER_WAIT_S, set(self._present), {})
        return [(rank, protocol.StatusRequest(self._num_rolls)) for rank in sorted(self._present)]

    def _heard(self, rank: int, now: float) -> Outgoing:
        """Nothing more is to be heard of a rank; ends the roll call if it was the last."""
        if self._roll is None or rank not in self._roll.waiting:
            return []
        self._roll.waiting.discard(rank)
        return self._finish(self._roll, now) if not self._roll.waiting else []

    def _finish(self, roll: _RollCall, now: float) -> Outgoing:
        self._roll = None
        statuses = {r: roll.statuses.get(r) or self._mute(r, roll) for r in range(self._world_size)}
        self._last = (now, statuses)
        self._unchecked = statuses
        if self._is_deadlock(statuses):
            for group, announced in self._announced.items():
                self._broken[group] = None
                roll.askers.update((rank, (group, announced.number)) for rank in announced.texts)
            self._announced.clear()
        return [self._explain(statuses, *asked) for asked in sorted(roll.askers, key=str)]

    def _explain(
        self, statuses: dict[int, RankStatus], rank: int, question: _Question
    ) -> tuple[int, Message]:
        findings = explain(statuses, rank, *question)
        if question[0] in self._broken:
            self._broken[question[0]] = findings
        return rank, protocol.Diagnosis(*question, findings)

    def stranded(self, leaving: Callable[[], set[int]]) -> tuple[int, str] | None:
        """A rank that waits in vain for some that are leaving, and for what, by the last roll call; once."""
        statuses, self._unchecked = self._unchecked, {}
        ended = leaving() if statuses else set()
        for rank in sorted(statuses.keys() - ended):
            for group, number, is_start in statuses[rank].blocked_on:
                never = [statuses[r].on(group) for r in ended & members(statuses, group)]
                if not is_start and any(known is None or known.number < number for known in never):
                    return rank, explain(statuses, rank, group, number).sentence
        return None

    def _mute(self, rank: int, roll: _RollCall) -> RankStatus:
        """The status of a rank that has given none."""
        if rank in self._finished:
            return RankStatus(rank=rank, state="finished", label=self._finished[rank][1])
        return RankStatus(rank=rank, state="silent" if rank in roll.waiting else "gone")

    # ------------------------------------------------------------------ before each collective

    def _announce(self, rank: int, message: protocol.CollectiveFingerprint, now: float) -> Outgoing:
        group, number, text = message.group, message.number, message.text
        if group in self._broken:
            findings = self._broken[group]
            if findings is not None:
                return [(rank, protocol.Diagnosis(group, number, findings))]
            return self._ask(rank, (group, number), now)
        announced = self._announced.get(group)
        if announced is None:
            ranks = split_ranks(message.ranks)
            concerned = frozenset(range(self._world_size) if ranks is None else ranks)
            announced = _Announced(concerned, number, now)
        if rank not in announced.ranks:
            raise ProtocolError(f"rank {rank} is not in {group}")
        self._announced[group] = announced
        known = next(iter(announced.texts.values()), text)  # those that have come are the same
        announced.texts[rank] = text
        announced.run = max(announced.run, message.run)
        if announced.number != number or known != text:
            del self._announced[group]
            self._broken[group] = None
            question = (group, announced.number)
            return [told for r in sorted(announced.texts) for told in self._ask(r, question, now)]
        if len(announced.texts) == len(announced.ranks):
            del self._announced[group]
            self._pause_s = _FIRST_LOOK_S
            return [(r, protocol.CollectiveApproved(group, number)) for r in sorted(announced.ranks)]
        return []

    def _is_deadlock(self, statuses: dict[int, RankStatus]) -> bool:
        """Whether no rank gets on without a collective for which some other rank never comes.

        Exact: a rank that is blocked is freed only by a `go` of this object, which is sent when all have
        come, or by the end of a collective that all have started.
        """
        if not self._announced:
            return False
        latest = max(announced.run for announced in self._announced.values())
        for rank, status in statuses.items():
            if status.state == "finished" and self._finished.get(rank, (0, ""))[0] >= latest:
                continue
            if not status.blocked_on or any(self._may_end(rank, statuses, *c) for c in status.blocked_on):
                return False
        return True

    def _may_end(
        self, rank: int, statuses: dict[int, RankStatus], group: str, number: int, is_start: bool
    ) -> bool:
        """Whether a rank may be freed from a collective for which it waits."""
        if is_start:
            announced = self._announced.get(group)
            return announced is None or announced.number != number or rank not in announced.texts
        started = (statuses[r].on(group) for r in members(statuses, group))
        return all(known is not None and known.number >= number for known in started)


# ---------------------------------------------------------------------- where they disagree


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
    if not any(status.on(group) for status in statuses.values()):
        group, number = _busiest(statuses)
    missing = _missing(statuses, asker, group, number)
    sentence = _first_difference(statuses, group)
    if sentence is None:
        concerned = members(statuses, group) if group is not None else set(statuses)
        present = [rank for rank in sorted(concerned) if rank not in missing]
        sentence = "; ".join(filter(None, (_sum_up(statuses, present), _sum_up(statuses, missing))))
        if not missing:
            sentence += (
                ". All ranks have called the same collective. The link is slow or broken, or a collective"
                " from outside this package is in between"
            )
    return Findings(
        sentence=sentence[:_SENTENCE_CHARACTERS],
        table=_table(statuses),
        missing=tuple(missing[:_MOST_MISSING]),
        is_contradiction=_contradicts(statuses, group, number),
    )


def _contradicts(statuses: Mapping[int, RankStatus], group: str | None, number: int) -> bool:
    called = set()
    for status in statuses.values():
        known = status.on(group)
        is_there = status.state == "waits" and (status.group, status.number) == (group, number)
        if known is not None and is_there and status.for_s >= _CERTAIN_AFTER_S and number in known.calls:
            called.add(known.calls[number].rpartition(": ")[2])  # a label alone makes no difference
    return len(called) > 1


def _busiest(statuses: Mapping[int, RankStatus]) -> tuple[str | None, int]:
    """The collective that most ranks wait for."""
    waits = [(a.group, a.number) for a in statuses.values() if a.group is not None and a.number]
    return max(waits, key=waits.count, default=(None, 0))


def members(statuses: Mapping[int, RankStatus], group: str | None) -> set[int]:
    """Global ranks of a group, as far as the statuses tell."""
    for status in statuses.values():
        known = status.on(group)
        ranks = split_ranks(known.ranks) if known is not None else None
        if ranks is not None:
            return ranks & statuses.keys()
    return {rank for rank, status in statuses.items() if status.on(group) is not None}


def _missing(statuses: Mapping[int, RankStatus], asker: int, group: str | None, number: int) -> list[int]:
    """Ranks that have not come to a collective, or called another one in its place."""
    mine = statuses[asker].on(group) if asker in statuses else None
    expected = mine.calls.get(number) if mine is not None else None
    missing = []
    for rank in sorted(members(statuses, group)):
        known = statuses[rank].on(group)
        called = known.calls.get(number) if known is not None else None
        is_other = expected is not None and called not in (None, expected)
        if known is None or known.number < number or is_other:
            missing.append(rank)
    return missing


def _first_difference(statuses: Mapping[int, RankStatus], group: str | None) -> str | None:
    """The first collective of a group that ranks remember differently, in words."""
    calls = {r: known.calls for r, a in sorted(statuses.items()) if (known := a.on(group)) is not None}
    for number in sorted({n for known in calls.values() for n in known}):
        callers = _same({rank: known[number] for rank, known in calls.items() if number in known})
        if len(callers) > 1:
            called = [f"{_who(rs)} called {what}{_place(statuses, rs)}" for what, rs in callers.items()]
            return f"as collective {number} of {group} " + "; ".join(called)
    return None


def _place(statuses: Mapping[int, RankStatus], ranks: Sequence[int]) -> str:
    places = {Where(step=statuses[r].step, phase=statuses[r].phase) for r in ranks}
    return places.pop().in_words() if len(places) == 1 else ""


def _same(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """Ranks that have the same value."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def _sum_up(statuses: Mapping[int, RankStatus], ranks: Sequence[int]) -> str:
    states = _same({rank: statuses[rank].describe() for rank in ranks})
    return "; ".join([f"{_who(rs)} {_plural(text, len(rs))}" for text, rs in states.items()][:_MOST_ROWS])


def _table(statuses: Mapping[int, RankStatus]) -> str:
    """A row for each rank; where there are many, for each state."""
    states = {}
    for rank, status in sorted(statuses.items()):
        text = status.describe()
        if status.number and status.group:
            text += f" (collective {status.number} of {status.group})"
        states[rank] = (text, rank if len(statuses) <= _MOST_ROWS else 0)
    groups = _same(states)
    rows = [("rank", "state", "for")]
    for (text, _), ranks in list(groups.items())[:_MOST_ROWS]:
        times = sorted(statuses[rank].for_s for rank in ranks)
        spread = f"{times[0]:.1f} s" if len(times) == 1 else f"{times[0]:.1f} to {times[-1]:.1f} s"
        rows.append((join_ranks(ranks), text, spread))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"  {rank.ljust(widths[0])}  {text.ljust(widths[1])}  {since}" for rank, text, since in rows]
    if len(groups) > _MOST_ROWS:
        lines.append(f"  and {len(groups) - _MOST_ROWS} more states")
    return "\n".join(lines)[:_TABLE_CHARACTERS]


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


# ---------------------------------------------------------------------- ranks without progress


def silent(identity: Identity, timeout_s: float) -> FailureRecord:
    """The failure of a process that does not even answer."""
    why = "it is stopped (SIGSTOP), swapped out, or holds its interpreter"
    return FailureRecord.of_identity(identity, f"the process has not answered for {timeout_s:g} s: {why}")


@dataclass
class _Progress:
    identity: Identity
    where: Where
    changed_at: float
    reported_at: float


class StallWatch:
    """Told what the ranks report; says which one has stalled. Pure.

    Args:
        timeout_s: how long a rank may take to get on; None for as long as it likes.
        num_ranks: how many there are.
    """

    def __init__(self, timeout_s: float | None, num_ranks: int) -> None:
        often = max(_REPORT_EVERY_S, num_ranks / _REPORTS_A_S)
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self.interval_s = None if timeout_s is None else min(timeout_s / REPORTS_A_TIMEOUT, often)
        """How often ranks are to report: by so much later than the timeout a stopped one is found."""
        self._ranks: dict[int, _Progress] = {}
        self._looked_at: float | None = None

    def begin(self, identities: Iterable[Identity], now: float) -> None:
        """All ranks have come. Before, those that were there waited for others that still started."""
        for identity in identities:
            self._ranks.setdefault(identity.rank, _Progress(identity, Where(), now, now))
        if self.interval_s is not None:
            self._restart(now)

    def _restart(self, now: float) -> None:
        self._looked_at = now
        for progress in self._ranks.values():
            progress.changed_at = progress.reported_at = now

    def report(self, identity: Identity, where: Where, now: float) -> None:
        """What a rank says that it is doing."""
        known = self._ranks.get(identity.rank)
        changed_at = now if known is None or known.where.count != where.count else known.changed_at
        self._ranks[identity.rank] = _Progress(identity, where, changed_at, now)

    def forget(self, rank: int) -> None:
        """A rank has finished or is gone."""
        self._ranks.pop(rank, None)

    def next_look(self, now: float) -> float | None:
        """When to look again; None for never."""
        if self.interval_s is None:
            return None
        return (self._looked_at if self._looked_at is not None else now) + self.interval_s

    def find(self, now: float, *, may_all_wait: bool = False) -> FailureRecord | None:
        """The rank that has stalled; it is none that all wait, if they may, as for one that is lost."""
        if self._looked_at is None or self.interval_s is None or now < self._looked_at + self.interval_s:
            return None
        if now > self._looked_at + self._timeout_s / 2:  # this very process slept, and could not hear others
            self._restart(now)
            return None
        self._looked_at = now
        quietest = min(self._ranks.values(), key=lambda p: p.reported_at, default=None)
        if quietest is not None and now - quietest.reported_at > self._timeout_s / 2:
            # the others may wait for it; it was well until then
            is_mute = now - quietest.reported_at > self._timeout_s + self.interval_s
            return silent(quietest.identity, self._timeout_s) if is_mute else None
        stuck = [p for p in self._ranks.values() if p.reported_at - p.changed_at > self._timeout_s]
        busy = [p for p in stuck if p.where.waits_for is None]
        if busy:
            return self._describe(busy[0], "no progress", now)
        if not may_all_wait and stuck and len(stuck) == len(self._ranks) > 1:
            return self._describe(stuck[0], "all ranks wait for different collectives", now)
        return None

    def _describe(self, culprit: _Progress, what: str, now: float) -> FailureRecord:
        rows = [
            f"  rank {rank}: {_state(progress.where)} for {now - progress.changed_at:.0f} s"
            for rank, progress in sorted(self._ranks.items())[:_MOST_STALLED_ROWS]
        ]
        return FailureRecord.of_identity(
            culprit.identity,
            "\n".join([f"{what} within stall_timeout={self._timeout_s:g} s; ranks:", *rows]),
            step=culprit.where.step,
            phase=culprit.where.phase,
        )


def _state(where: Where) -> str:
    state = f"waits in {where.waits_for}" if where.waits_for is not None else "does not wait for others"
    return state + where.in_words()

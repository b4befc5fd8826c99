"""Questions between ranks: who waits for what, and whether all call the same collective (pure).

A roll call asks all ranks what they do, and waits a second for their threads to answer. With debug="detail"
every rank announces each collective, which starts once all members of its group have announced the same. If
some do not come, a roll call shows whether they still may, or all wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import lightning_ddp.supervise.protocol as protocol
from lightning_ddp.supervise.failure_record import FailureRecord, Where
from lightning_ddp.supervise.orders import Report
from lightning_ddp.supervise.processes import Process
from lightning_ddp.supervise.protocol import Findings, Message, Outgoing, ProtocolError, RankStatus

ANSWER_WAIT_S = 1.0  # seconds that a roll call waits for answers
_FIRST_LOOK_S = 1.0  # age of an announced collective at which ranks that do not come are looked for
_PAUSE_S = 5.0  # least time between two roll calls that look for ranks that do not come
_FRESH_S = 3.0
_CERTAIN_AFTER_S = 1.0
_MOST_MISSING, _MOST_ROWS = 1000, 16
_SENTENCE_CHARACTERS, _TABLE_CHARACTERS, _RANKS_CHARACTERS = 1_500, 2_000, 200
_PLURAL = {"waits": "wait", "is": "are", "has": "have", "does": "do", "ends": "end"}

Statuses = Mapping[int, RankStatus]  # status of each rank
_Question = tuple[str | None, int]  # a collective: the name of its process group, and its number there


@dataclass
class _RollCall:
    number: int
    deadline: float
    waiting: set[int]  # ranks that have not answered
    statuses: dict[int, RankStatus] = field(default_factory=dict)
    askers: set[tuple[int, _Question]] = field(default_factory=set)


@dataclass
class _Announced:
    """A collective that some ranks of its process group have announced; it may start once all have."""

    ranks: frozenset[int]
    number: int
    since: float
    texts: dict[int, str] = field(default_factory=dict)  # collective that each rank is about to call


class DesyncDetector:
    """Detector of ranks that wait for different collectives, or for one that some rank never calls.

    Methods return messages to send. `members` are the processes of the generation, by rank.
    """

    def __init__(self, world_size: int, members: Mapping[int, Process]) -> None:
        self._world_size, self._members = world_size, members
        self._num_rolls = 0
        self._roll: _RollCall | None = None
        self._last: tuple[float, dict[int, RankStatus]] = (float("-inf"), {})
        self._unchecked: dict[int, RankStatus] = {}  # of the last roll call, until `stranded` has seen them
        self._announced: dict[str, _Announced] = {}
        self._broken: dict[str | None, Findings | None] = {}
        """Findings for each group in which the ranks disagree; None until they are known."""

    def handle(self, rank: int, message: Message, now: float) -> Outgoing:
        """Handle a rank's question, status, announced collective or value to relay; return messages to send.

        Raise `ProtocolError` for any other message.
        """
        match message:
            case protocol.DiagnoseRequest(group, number):
                return self._ask(rank, (group, number), now)
            case protocol.StatusReply(number, status):
                if self._roll is None or number != self._roll.number:
                    return []
                self._roll.statuses[rank] = replace(status, rank=rank)
                self._roll.waiting.discard(rank)
                return self.due(now)
            case protocol.CollectiveFingerprint():
                return self._announce(rank, message, now)
            case protocol.CheckOrphanedWaits():
                return self._call(now) if self._roll is None and now - self._last[0] >= _FRESH_S else []
            case protocol.SendValue(to, topic, value):
                return [(to, protocol.PeerValue(rank, topic, value))]
        raise ProtocolError(f"a message {message.kind}")

    def deadline(self) -> float | None:
        if self._roll is not None:
            return self._roll.deadline
        if not self._announced:
            return None
        oldest = min(announced.since for announced in self._announced.values())
        return max(oldest + _FIRST_LOOK_S, self._last[0] + _PAUSE_S)

    def due(self, now: float) -> Outgoing:
        """Return status requests to all ranks if a collective is late, or the results of a finished query."""
        deadline, roll = self.deadline(), self._roll
        is_late = deadline is not None and now >= deadline
        if roll is not None:
            return self._finish(roll, now) if is_late or not any(map(self._is_there, roll.waiting)) else []
        return self._call(now) if is_late else []

    def _is_there(self, rank: int) -> bool:
        return rank in self._members and self._members[rank].is_connected

    def _report(self, rank: int) -> Report:
        return self._members[rank].report if rank in self._members else Report()

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
        there = sorted(filter(self._is_there, self._members))
        self._roll = _RollCall(self._num_rolls, now + ANSWER_WAIT_S, set(there))
        request = protocol.StatusRequest(self._num_rolls)
        return [(rank, request) for rank in there]

    def _finish(self, roll: _RollCall, now: float) -> Outgoing:
        self._roll = None
        statuses = {r: roll.statuses.get(r) or self._mute(r) for r in range(self._world_size)}
        self._last, self._unchecked = (now, statuses), statuses
        if self._is_deadlock(statuses):
            for group, announced in self._announced.items():
                self._broken[group] = None
                roll.askers.update((rank, (group, announced.number)) for rank in announced.texts)
            self._announced.clear()
        return [self._explain(statuses, *asked) for asked in sorted(roll.askers, key=str)]

    def _mute(self, rank: int) -> RankStatus:
        report = self._report(rank)
        if 0 < report.begun == report.ended:
            return RankStatus(rank=rank, state="finished", label=report.run)
        return RankStatus(rank=rank, state="silent" if self._is_there(rank) else "gone")

    def _explain(
        self, statuses: dict[int, RankStatus], rank: int, question: _Question
    ) -> tuple[int, Message]:
        findings = explain(statuses, rank, *question)
        if question[0] in self._broken:
            self._broken[question[0]] = findings
        return rank, protocol.Diagnosis(*question, findings)

    def stranded(self, all_ended: int) -> FailureRecord | None:
        """Return a failure if the last query found a rank waiting for ranks that ended the run; else None."""
        statuses, self._unchecked = self._unchecked, {}
        ended = {rank for rank in statuses if self._report(rank).ended > all_ended}
        for rank in sorted(statuses.keys() - ended):
            for group, number, is_start in statuses[rank].blocked_on:
                never = ended & members_of(statuses, group)
                if not is_start and any(statuses[r].on(group).number < number for r in never):
                    return self._members[rank].failure(explain(statuses, rank, group, number).sentence)
        return None

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
        if announced.number != number or known != text:
            del self._announced[group]
            self._broken[group] = None
            question = (group, announced.number)
            return [sent for r in sorted(announced.texts) for sent in self._ask(r, question, now)]
        if len(announced.texts) == len(announced.ranks):
            del self._announced[group]
            approved = protocol.CollectiveApproved(group, number)
            return [(r, approved) for r in sorted(announced.ranks)]
        return []

    def _is_deadlock(self, statuses: dict[int, RankStatus]) -> bool:
        """Return True if all unfinished ranks are blocked in collectives that some other rank never calls.

        Exact: a rank that is blocked is freed only by a `CollectiveApproved` of this object, which is sent
        when all have come, or by the end of a collective that all have started.
        """
        if not self._announced:
            return False
        reports = [self._report(rank) for known in self._announced.values() for rank in known.texts]
        latest = max(report.begun + (report.begun == report.ended) for report in reports)
        for rank, status in statuses.items():
            if status.state == "finished" and self._report(rank).ended >= latest:
                continue
            if not status.blocked_on or any(self._may_end(rank, statuses, *c) for c in status.blocked_on):
                return False
        return True

    def _may_end(
        self, rank: int, statuses: dict[int, RankStatus], group: str, number: int, is_start: bool
    ) -> bool:
        """Return True if a collective that blocks a rank may still start, or complete."""
        if is_start:
            announced = self._announced.get(group)
            return announced is None or announced.number != number or rank not in announced.texts
        return all(statuses[r].on(group).number >= number for r in members_of(statuses, group))


# ---------------------------------------------------------------------- in sentences


def explain(statuses: Statuses, asker: int, group: str | None = None, number: int = 0) -> Findings:
    """Return where ranks disagree about a collective that rank `asker` calls, and who has not called it.

    The collective has a `number` in its `group`; None is for the group in which most ranks wait.
    """
    if all(status.on(group).number < 0 for status in statuses.values()):
        waits = [(a.group, a.number) for a in statuses.values() if a.group is not None and a.number]
        group, number = max(waits, key=waits.count, default=(None, 0))
    missing = _missing(statuses, asker, group, number)
    sentence = _first_difference(statuses, group)
    if sentence is None:
        concerned = members_of(statuses, group) if group is not None else set(statuses)
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


def members_of(statuses: Statuses, group: str | None) -> set[int]:
    """Return the global ranks of a process group, as far as the ranks' statuses tell them."""
    for status in statuses.values():
        ranks = split_ranks(status.on(group).ranks)
        if ranks is not None:
            return ranks & statuses.keys()
    return {rank for rank, status in statuses.items() if status.on(group).number >= 0}


def _contradicts(statuses: Statuses, group: str | None, number: int) -> bool:
    """Return True if ranks have waited 1 s or more in different collectives with the same number."""
    called = set()
    for status in statuses.values():
        calls = status.on(group).calls
        is_there = status.state == "waits" and (status.group, status.number) == (group, number)
        if is_there and status.for_s >= _CERTAIN_AFTER_S and number in calls:
            called.add(calls[number].rpartition(": ")[2])  # a label alone makes no difference
    return len(called) > 1


def _missing(statuses: Statuses, asker: int, group: str | None, number: int) -> list[int]:
    """Return the ranks that have not called a collective yet, or have called another one in its place."""
    expected = statuses[asker].on(group).calls.get(number) if asker in statuses else None
    missing = []
    for rank in sorted(members_of(statuses, group)):
        known = statuses[rank].on(group)
        is_other = expected is not None and known.calls.get(number, expected) != expected
        if known.number < number or is_other:
            missing.append(rank)
    return missing


def _first_difference(statuses: Statuses, group: str | None) -> str | None:
    """Return a sentence on the first collective of a group that ranks called differently, or None."""
    calls = {rank: status.on(group).calls for rank, status in sorted(statuses.items())}
    for number in sorted({n for known in calls.values() for n in known}):
        callers = _by_value({rank: known[number] for rank, known in calls.items() if number in known})
        if len(callers) > 1:
            called = [
                f"{name_ranks(rs)} called {what}{_position(statuses, rs)}" for what, rs in callers.items()
            ]
            return f"as collective {number} of {group} " + "; ".join(called)
    return None


def _position(statuses: Statuses, ranks: Sequence[int]) -> str:
    positions = {Where(step=statuses[r].step, phase=statuses[r].phase) for r in ranks}
    return positions.pop().in_words() if len(positions) == 1 else ""


def _sum_up(statuses: Statuses, ranks: Sequence[int]) -> str:
    parts = []
    for text, same in list(_by_value({r: statuses[r].describe() for r in ranks}).items())[:_MOST_ROWS]:
        verb, _, rest = text.partition(" ")
        parts.append(f"{name_ranks(same)} {_PLURAL.get(verb, verb) if len(same) > 1 else verb} {rest}")
    return "; ".join(parts)


def _table(statuses: Statuses) -> str:
    rows = ["rank  state  for"]
    for rank, status in sorted(statuses.items())[:_MOST_ROWS]:
        of_group = (
            f" (collective {status.number} of {status.group})" if status.number and status.group else ""
        )
        rows.append(f"{rank}  {status.describe()}{of_group}  {status.for_s:.1f} s")
    if len(statuses) > _MOST_ROWS:
        rows.append(f"and {len(statuses) - _MOST_ROWS} more ranks")
    return "\n".join(f"  {row}" for row in rows)[:_TABLE_CHARACTERS]


# ---------------------------------------------------------------------- ranks in words


def _by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def name_ranks(ranks: Sequence[int]) -> str:
    """Return a phrase that names ranks, such as `rank 3` or `ranks 0-2, 5`."""
    return f"rank{'s' * (len(ranks) > 1)} {join_ranks(ranks)}"


def join_ranks(ranks: Iterable[int]) -> str:
    """Return a text that lists ranks, with consecutive ones as ranges: `0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in runs)


def split_ranks(text: str) -> set[int] | None:
    """Return the ranks in a text such as `0-2, 5`; None if it was cut off, or is something else."""
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

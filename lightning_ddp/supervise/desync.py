"""The server's side of questions between ranks: who is stuck where, and is everybody about to call the same.

Pure: told who says what and when, it says what to send to whom. A roll call asks all ranks what they are
doing, and waits a second for their threads to answer. With debug="detail" every rank announces each
collective, and is told to go on once all members of its group have announced the same. Where some do not come
a roll call shows whether they still may, or whether everybody waits for somebody else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lightning_ddp.supervise.protocol import (
    Active,
    Announce,
    Ask,
    Found,
    Go,
    Look,
    Message,
    ProtocolError,
    RollCall,
    Status,
    Tell,
    Told,
)
from lightning_ddp.supervise.status import Findings, RankStatus, explain, members, split_ranks

__all__ = ["ANSWER_WAIT_S", "Inspection", "Outgoing"]

ANSWER_WAIT_S = 1.0
"""How long a roll call waits for the ranks that do not answer."""
FIRST_LOOK_S = 1.0
"""How old an announced collective is when the first roll call looks for the ranks that do not come."""

_LONGEST_PAUSE_S = 30.0

_FRESH_S = 3.0
_MOST_MISSING = 1000

Outgoing = list[tuple[int, Message]]
"""To which rank, and what."""


@dataclass
class _RollCall:
    """A question that is under way."""

    number: int
    deadline: float
    waiting: set[int]
    """Ranks that have not answered."""
    statuses: dict[int, RankStatus]
    askers: set[tuple[int, str | None, int]] = field(default_factory=set)
    """Rank, group and number of the collective in question."""


@dataclass
class _Announced:
    """A collective that some members of its group are about to start."""

    group: str
    ranks: frozenset[int]
    number: int
    since: float
    texts: dict[int, str] = field(default_factory=dict)
    """Rank -> what it is about to call."""
    run: int = 0
    """The latest run, as the ranks count them, in which one of them is."""


class Inspection:
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
        self._pause_s = FIRST_LOOK_S
        self._broken: dict[str, Findings | None] = {}

    # ------------------------------------------------------------------ who is there

    def joined(self, rank: int) -> None:
        """A rank has connected."""
        if rank >= 0:
            self._present.add(rank)

    def entered(self, rank: int, message: Active) -> None:
        """A rank has begun or finished a run (a fit, a test ...)."""
        if message.is_active:
            self._finished.pop(rank, None)
        else:
            self._finished[rank] = (message.run, message.name)

    def left(self, rank: int, now: float) -> Outgoing:
        """A rank has disconnected."""
        self._present.discard(rank)
        if self._roll is not None and rank in self._roll.waiting:
            self._roll.waiting.discard(rank)
            return self._finish_if_complete(now)
        return []

    # ------------------------------------------------------------------ what they say

    def handle(self, rank: int, message: Message, now: float) -> Outgoing:
        """What a rank says.

        Raises:
            ProtocolError: it is nothing that a rank says.
        """
        match message:
            case Ask(group, number):
                return self._ask(rank, group, number, now)
            case Status(number, status):
                return self._answer(rank, number, replace(status, rank=rank), now)
            case Announce():
                return self._announce(rank, message, now)
            case Look():
                return self._call(now) if self._roll is None and now - self._last[0] >= _FRESH_S else []
            case Tell(to, topic, value):
                return [(to, Told(rank, topic, value))] if to in self._present else []
        raise ProtocolError(f"a message {message.kind}")

    def deadline(self) -> float | None:
        """When `due` has something to do at the latest."""
        if self._roll is not None:
            return self._roll.deadline
        return self._next_look() if self._announced else None

    def _next_look(self) -> float:
        oldest = min(announced.since for announced in self._announced.values())
        return max(oldest + FIRST_LOOK_S, self._last[0] + self._pause_s)

    def due(self, now: float) -> Outgoing:
        """What is sent because nobody has answered for long enough."""
        if self._roll is not None:
            return self._finish(now) if now >= self._roll.deadline else []
        if not self._announced or now < self._next_look():
            return []
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return self._call(now)

    # ------------------------------------------------------------------ roll call

    def _ask(self, rank: int, group: str | None, number: int, now: float) -> Outgoing:
        when, statuses = self._last
        if self._roll is None and now - when < _FRESH_S and rank in statuses:
            known = statuses[rank]
            if (known.group, known.number) == (group, number):  # the others have left their waits since
                return [self._explain(statuses, rank, group, number)]
        outgoing = self._call(now) if self._roll is None else []
        if self._roll is not None:
            self._roll.askers.add((rank, group, number))
        return outgoing

    def _call(self, now: float) -> Outgoing:
        self._num_rolls += 1
        self._roll = _RollCall(self._num_rolls, now + ANSWER_WAIT_S, set(self._present), {})
        return [(rank, RollCall(self._num_rolls)) for rank in sorted(self._present)]

    def _answer(self, rank: int, number: int, status: RankStatus, now: float) -> Outgoing:
        roll = self._roll
        if roll is None or number != roll.number:
            return []
        roll.statuses[rank] = status
        roll.waiting.discard(rank)
        return self._finish_if_complete(now)

    def _finish_if_complete(self, now: float) -> Outgoing:
        return self._finish(now) if self._roll is not None and not self._roll.waiting else []

    def _finish(self, now: float) -> Outgoing:
        roll, self._roll = self._roll, None
        if roll is None:
            return []
        statuses = {r: roll.statuses.get(r) or self._mute(r, roll) for r in range(self._world_size)}
        self._last = (now, statuses)
        self._unchecked = statuses
        if self._is_deadlock(statuses):
            for announced in self._announced.values():
                self._broken[announced.group] = None
                roll.askers.update((rank, announced.group, announced.number) for rank in announced.texts)
            self._announced.clear()
        return [self._explain(statuses, *asked) for asked in sorted(roll.askers, key=str)]

    def _explain(
        self, statuses: dict[int, RankStatus], rank: int, group: str | None, number: int
    ) -> tuple[int, Message]:
        findings = explain(statuses, rank, group, number)
        if group is not None and group in self._broken:
            self._broken[group] = findings
        return (rank, _found(findings, group, number))

    def stranded(self, leaving: Callable[[], set[int]]) -> tuple[int, str] | None:
        """A rank that waits in vain, and the sentence that says for what, of the last roll call; once.

        Args:
            leaving: tells the ranks that have ended a run, and call nothing before the others have as well.
        """
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

    def _announce(self, rank: int, message: Announce, now: float) -> Outgoing:
        group, number, text = message.group, message.number, message.text
        if group in self._broken:
            findings = self._broken[group]
            if findings is not None:
                return [(rank, _found(findings, group, number))]
            return self._ask(rank, group, number, now)
        announced = self._announced.get(group)
        if announced is None:
            ranks = split_ranks(message.ranks)
            concerned = frozenset(range(self._world_size) if ranks is None else ranks)
            announced = _Announced(group, concerned, number, now)
        if rank not in announced.ranks:
            raise ProtocolError(f"rank {rank} is not in {group}")
        self._announced[group] = announced
        known = next(iter(announced.texts.values()), text)  # those that have come are the same
        announced.texts[rank] = text
        announced.run = max(announced.run, message.run)
        if announced.number != number or known != text:
            del self._announced[group]
            self._broken[group] = None
            return [x for r in sorted(announced.texts) for x in self._ask(r, group, announced.number, now)]
        if len(announced.texts) == len(announced.ranks):
            del self._announced[group]
            self._pause_s = FIRST_LOOK_S
            return [(r, Go(group, number)) for r in sorted(announced.ranks)]
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


def _found(findings: Findings, group: str | None, number: int) -> Found:
    return Found(group, number, replace(findings, missing=findings.missing[:_MOST_MISSING]))

"""The server's side of questions between ranks: who is stuck where, and is everybody about to call the same.

Pure: told who says what and when, it says what to send to whom. A roll call asks all ranks what they are
doing, and waits a second for their threads to answer. With debug="detail" every rank announces each
collective, and is told to go on once all members of its group have announced the same. Where some do not come
a roll call shows whether they still may, or whether everybody waits for somebody else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_ddp.supervise.framing import ProtocolError
from lightning_ddp.supervise.status import Account, Findings, explain, members, split_ranks

__all__ = ["ANSWER_WAIT_S", "Inspection", "Letters"]

ANSWER_WAIT_S = 1.0
"""How long a roll call waits for the ranks that do not answer."""
FIRST_LOOK_S = 1.0
"""How old an announced collective is when the first roll call looks for the ranks that do not come."""

_LONGEST_PAUSE_S = 30.0

_FRESH_S = 3.0
_NAME_CHARACTERS = 80

Message = dict[str, Any]
Letters = list[tuple[int, Message]]
"""To which rank, and what."""


@dataclass
class _RollCall:
    """A question that is under way."""

    number: int
    deadline: float
    waiting: set[int]
    """Ranks that have not answered."""
    accounts: dict[int, Account]
    askers: set[tuple[int, str | None, int]] = field(default_factory=set)
    """Rank, group and number of the collective in question."""


@dataclass
class _Announced:
    """A collective that some members of its group are about to start."""

    lane: str
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

    KINDS = ("ask", "account", "call", "look", "tell")
    """Kinds of message that `handle` takes."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._present: set[int] = set()
        self._finished: dict[int, tuple[int, str]] = {}
        self._num_rolls = 0
        self._roll: _RollCall | None = None
        self._last: tuple[float, dict[int, Account]] = (float("-inf"), {})
        self._unchecked: dict[int, Account] = {}
        self._announced: dict[str, _Announced] = {}
        self._pause_s = FIRST_LOOK_S
        self._broken: dict[str, Findings | None] = {}

    # ------------------------------------------------------------------ who is there

    def joined(self, rank: int) -> None:
        """A rank has connected."""
        if rank >= 0:
            self._present.add(rank)

    def entered(self, rank: int, message: Message) -> None:
        """A rank has begun or finished a run (a fit, a test ...), as its message 'active' says."""
        if message.get("is_active") is True:
            self._finished.pop(rank, None)
        elif isinstance(message.get("run"), int) and isinstance(message.get("name"), str):
            self._finished[rank] = (message["run"], message["name"][:_NAME_CHARACTERS])

    def left(self, rank: int, now: float) -> Letters:
        """A rank has disconnected."""
        self._present.discard(rank)
        if self._roll is not None and rank in self._roll.waiting:
            self._roll.waiting.discard(rank)
            return self._finish_if_complete(now)
        return []

    # ------------------------------------------------------------------ what they say

    def handle(self, rank: int, message: Message, now: float) -> Letters:
        """What a rank says, of one of the `KINDS`.

        Raises:
            ProtocolError: it is malformed.
        """
        kind = message["kind"]
        if kind == "ask":
            lane = message.get("lane")
            return self._ask(rank, lane if isinstance(lane, str) else None, _int(message, "number"), now)
        if kind == "account":
            return self._answer(rank, message, now)
        if kind == "call":
            return self._announce(rank, message, now)
        if kind == "look":
            return self._call(now) if self._roll is None and now - self._last[0] >= _FRESH_S else []
        to, topic = _int(message, "to"), _text(message, "topic")
        if to not in self._present:
            return []
        return [(to, {"kind": "told", "from": rank, "topic": topic, "value": message.get("value")})]

    def deadline(self) -> float | None:
        """When `due` has something to do at the latest."""
        if self._roll is not None:
            return self._roll.deadline
        return self._next_look() if self._announced else None

    def _next_look(self) -> float:
        oldest = min(announced.since for announced in self._announced.values())
        return max(oldest + FIRST_LOOK_S, self._last[0] + self._pause_s)

    def due(self, now: float) -> Letters:
        """What is sent because nobody has answered for long enough."""
        if self._roll is not None:
            return self._finish(now) if now >= self._roll.deadline else []
        if not self._announced or now < self._next_look():
            return []
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return self._call(now)

    # ------------------------------------------------------------------ roll call

    def _ask(self, rank: int, lane: str | None, number: int, now: float) -> Letters:
        when, accounts = self._last
        if self._roll is None and now - when < _FRESH_S and rank in accounts:
            known = accounts[rank]
            if (known.lane, known.number) == (lane, number):  # the others have left their waits since
                return [self._explain(accounts, rank, lane, number)]
        letters = self._call(now) if self._roll is None else []
        if self._roll is not None:
            self._roll.askers.add((rank, lane, number))
        return letters

    def _call(self, now: float) -> Letters:
        self._num_rolls += 1
        self._roll = _RollCall(self._num_rolls, now + ANSWER_WAIT_S, set(self._present), {})
        return [(rank, {"kind": "roll_call", "id": self._num_rolls}) for rank in sorted(self._present)]

    def _answer(self, rank: int, message: Message, now: float) -> Letters:
        roll = self._roll
        if roll is None or message.get("id") != roll.number:
            return []
        roll.accounts[rank] = Account.from_message(rank, message)
        roll.waiting.discard(rank)
        return self._finish_if_complete(now)

    def _finish_if_complete(self, now: float) -> Letters:
        return self._finish(now) if self._roll is not None and not self._roll.waiting else []

    def _finish(self, now: float) -> Letters:
        roll, self._roll = self._roll, None
        if roll is None:
            return []
        accounts = {r: roll.accounts.get(r) or self._mute(r, roll) for r in range(self._world_size)}
        self._last = (now, accounts)
        self._unchecked = accounts
        if self._is_deadlock(accounts):
            for announced in self._announced.values():
                self._broken[announced.lane] = None
                roll.askers.update((rank, announced.lane, announced.number) for rank in announced.texts)
            self._announced.clear()
        return [self._explain(accounts, *asked) for asked in sorted(roll.askers, key=str)]

    def _explain(
        self, accounts: dict[int, Account], rank: int, lane: str | None, number: int
    ) -> tuple[int, Message]:
        findings = explain(accounts, rank, lane, number)
        if lane is not None and lane in self._broken:
            self._broken[lane] = findings
        return (rank, _findings_message(findings, lane, number))

    def stranded(self, leaving: Callable[[], set[int]]) -> tuple[int, str] | None:
        """A rank that waits in vain, and the sentence that says for what, of the last roll call; once.

        Args:
            leaving: tells the ranks that have ended a run, and call nothing before the others have as well.
        """
        accounts, self._unchecked = self._unchecked, {}
        ended = leaving() if accounts else set()
        for rank in sorted(accounts.keys() - ended):
            for lane, number, is_start in accounts[rank].blocked_on:
                never = [accounts[r].on(lane) for r in ended & members(accounts, lane)]
                if not is_start and any(known is None or known.number < number for known in never):
                    return rank, explain(accounts, rank, lane, number).sentence
        return None

    def _mute(self, rank: int, roll: _RollCall) -> Account:
        """The account of a rank that has given none."""
        if rank in self._finished:
            return Account(rank=rank, state="finished", label=self._finished[rank][1])
        return Account(rank=rank, state="silent" if rank in roll.waiting else "gone")

    # ------------------------------------------------------------------ before each collective

    def _announce(self, rank: int, message: Message, now: float) -> Letters:
        lane, number = _text(message, "lane"), _int(message, "number")
        text, run = _text(message, "text"), _int(message, "run")
        if lane in self._broken:
            findings = self._broken[lane]
            if findings is not None:
                return [(rank, _findings_message(findings, lane, number))]
            return self._ask(rank, lane, number, now)
        announced = self._announced.get(lane)
        if announced is None:
            ranks = split_ranks(_text(message, "ranks"))
            concerned = frozenset(range(self._world_size) if ranks is None else ranks)
            announced = _Announced(lane, concerned, number, now)
        if rank not in announced.ranks:
            raise ProtocolError(f"rank {rank} is not in {lane}")
        self._announced[lane] = announced
        known = next(iter(announced.texts.values()), text)  # those that have come are the same
        announced.texts[rank] = text
        announced.run = max(announced.run, run)
        if announced.number != number or known != text:
            del self._announced[lane]
            self._broken[lane] = None
            return [x for r in sorted(announced.texts) for x in self._ask(r, lane, announced.number, now)]
        if len(announced.texts) == len(announced.ranks):
            del self._announced[lane]
            self._pause_s = FIRST_LOOK_S
            return [(r, {"kind": "go", "lane": lane, "number": number}) for r in sorted(announced.ranks)]
        return []

    def _is_deadlock(self, accounts: dict[int, Account]) -> bool:
        """Whether no rank gets on without a collective for which some other rank never comes.

        Exact: a rank that is blocked is freed only by a `go` of this object, which is sent when all have
        come, or by the end of a collective that all have started.
        """
        if not self._announced:
            return False
        latest = max(announced.run for announced in self._announced.values())
        for rank, account in accounts.items():
            if account.state == "finished" and self._finished.get(rank, (0, ""))[0] >= latest:
                continue
            if not account.blocked_on or any(self._may_end(rank, accounts, *c) for c in account.blocked_on):
                return False
        return True

    def _may_end(
        self, rank: int, accounts: dict[int, Account], lane: str, number: int, is_start: bool
    ) -> bool:
        """Whether a rank may be freed from a collective for which it waits."""
        if is_start:
            announced = self._announced.get(lane)
            return announced is None or announced.number != number or rank not in announced.texts
        started = (accounts[r].on(lane) for r in members(accounts, lane))
        return all(known is not None and known.number >= number for known in started)


def _findings_message(findings: Findings, lane: str | None, number: int) -> Message:
    message = {"kind": "findings", "lane": lane, "number": number, **vars(findings)}
    return {**message, "missing": list(findings.missing)[:1000]}


def _int(message: Message, name: str) -> int:
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ProtocolError(f"{name}={value!r}"[:_NAME_CHARACTERS])
    return value


def _text(message: Message, name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str):
        raise ProtocolError(f"{name}={value!r}"[:_NAME_CHARACTERS])
    return value

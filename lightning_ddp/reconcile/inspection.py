"""The server's side of questions between ranks: who is stuck where, and is everybody about to call the same.

Pure: told who says what and when, it says what to send to whom. A roll call asks all ranks what they are
doing, and waits a second for their threads to answer. With debug="detail" every rank announces each
collective, and is told to go on once all members of its group have announced the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_ddp.reconcile.accounts import Account, Findings, explain, split_ranks
from lightning_ddp.reconcile.wire import ProtocolError

__all__ = ["ANSWER_WAIT_S", "Inspection", "Letters"]

ANSWER_WAIT_S = 1.0
"""How long a roll call waits for the ranks that do not answer."""

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
    askers: dict[int, tuple[str | None, int]] = field(default_factory=dict)
    """Rank -> group and number of the collective in question."""


@dataclass
class _Announced:
    """A collective that some members of its group are about to start."""

    lane: str
    ranks: frozenset[int]
    number: int
    is_side: bool
    texts: dict[int, str] = field(default_factory=dict)
    """Rank -> what it is about to call."""
    run: int = 0
    """The latest run, as the ranks count them, in which one of them is."""

    @property
    def absent(self) -> frozenset[int]:
        """Members that have not announced it."""
        return self.ranks - self.texts.keys()


class Inspection:
    """Answers the questions of one run's ranks.

    Args:
        world_size: ranks of the run.
    """

    KINDS = ("ask", "account", "call", "tell")
    """Kinds of message that `handle` takes."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._present: set[int] = set()
        self._finished: dict[int, tuple[int, str]] = {}
        self._num_rolls = 0
        self._roll: _RollCall | None = None
        self._last: tuple[float, dict[int, Account]] = (float("-inf"), {})
        self._announced: dict[str, _Announced] = {}
        self._broken: dict[str, Findings | None] = {}

    # ------------------------------------------------------------------ who is there

    def joined(self, rank: int) -> None:
        """A rank has connected."""
        if rank >= 0:
            self._present.add(rank)

    def entered(self, rank: int, message: Message, now: float) -> Letters:
        """A rank has begun or finished a run (a fit, a test ...), as its message 'active' says."""
        if message.get("is_active") is True:
            self._finished.pop(rank, None)
            return []
        run, name = message.get("run"), message.get("name")
        if not isinstance(run, int) or not isinstance(name, str):
            return []
        self._finished[rank] = (run, name[:_NAME_CHARACTERS])
        for announced in list(self._announced.values()):
            if self._never_comes(announced, rank):
                return self._mismatch([announced], now)
        return []

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
        to, topic = _int(message, "to"), _text(message, "topic")
        if to not in self._present:
            return []
        return [(to, {"kind": "told", "from": rank, "topic": topic, "value": message.get("value")})]

    def deadline(self) -> float | None:
        """When `due` has something to do at the latest."""
        return self._roll.deadline if self._roll is not None else None

    def due(self, now: float) -> Letters:
        """What is sent because nobody has answered for long enough."""
        if self._roll is None or now < self._roll.deadline:
            return []
        return self._finish(now)

    # ------------------------------------------------------------------ roll call

    def _ask(self, rank: int, lane: str | None, number: int, now: float) -> Letters:
        when, accounts = self._last
        if self._roll is None and now - when < _FRESH_S and rank in accounts:
            known = accounts[rank]
            if (known.lane, known.number) == (lane, number):  # the others have left their waits since
                return [self._explain(accounts, rank, lane, number)]
        letters: Letters = []
        if self._roll is None:
            self._num_rolls += 1
            self._roll = _RollCall(self._num_rolls, now + ANSWER_WAIT_S, set(self._present), {})
            letters = [(r, {"kind": "roll_call", "id": self._num_rolls}) for r in sorted(self._present)]
        self._roll.askers[rank] = (lane, number)
        return letters

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
        return [self._explain(accounts, rank, *asked) for rank, asked in sorted(roll.askers.items())]

    def _explain(
        self, accounts: dict[int, Account], rank: int, lane: str | None, number: int
    ) -> tuple[int, Message]:
        findings = explain(accounts, rank, lane, number)
        if lane is not None and lane in self._broken:
            self._broken[lane] = findings
        return (rank, _findings_message(findings, lane, number))

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
            members = frozenset(range(self._world_size) if ranks is None else ranks)
            announced = _Announced(lane, members, number, message.get("is_side") is True)
        if rank not in announced.ranks:
            raise ProtocolError(f"rank {rank} is not in {lane}")
        self._announced[lane] = announced
        known = next(iter(announced.texts.values()), text)  # those that have come are the same
        announced.texts[rank] = text
        announced.run = max(announced.run, run)
        if announced.number != number or known != text:
            return self._mismatch([announced], now)
        if len(announced.texts) == len(announced.ranks):
            del self._announced[lane]
            return [(r, {"kind": "go", "lane": lane, "number": number}) for r in sorted(announced.ranks)]
        crossing = self._crossing(announced)
        if crossing or any(self._never_comes(announced, r) for r in self._finished):
            return self._mismatch([announced, *crossing], now)
        return []

    def _never_comes(self, announced: _Announced, rank: int) -> bool:
        """Whether an absent member has finished the run in which the others are."""
        is_absent = rank in announced.ranks and rank not in announced.texts
        return is_absent and self._finished[rank][0] >= announced.run

    def _crossing(self, mine: _Announced) -> list[_Announced]:
        """Collectives for which a member waits whom this one waits for, with the same thread."""
        if mine.is_side:
            return []
        others = [other for other in self._announced.values() if other is not mine and not other.is_side]
        return [o for o in others if mine.absent & o.texts.keys() and o.absent & mine.texts.keys()]

    def _mismatch(self, several: list[_Announced], now: float) -> Letters:
        """All that wait for these collectives are told why they will not be."""
        letters: Letters = []
        for announced in several:
            self._broken[announced.lane] = None
            self._announced.pop(announced.lane, None)
            for rank in sorted(announced.texts):
                letters += self._ask(rank, announced.lane, announced.number, now)
        return letters


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

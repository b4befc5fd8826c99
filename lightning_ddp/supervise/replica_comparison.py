"""Comparison of the replicas by the hashes that their ranks report (pure).

Ranks hash a slice of their state after each step, and send the hashes with their periodic reports. Where two
differ, all ranks are asked what they have hashed then: the answers show the parameter and the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

import lightning_ddp.supervise.protocol as protocol
from lightning_ddp.supervise.desync import name_ranks
from lightning_ddp.supervise.protocol import Message, Outgoing

_ANSWERS_WITHIN_S = 2.0
_MOST_NAMES = 5
_PAGE = "lightning_ddp/docs/guides/replica-check.md"


@dataclass(frozen=True)
class Difference:
    """Result of comparing replicas: which ranks differ from the majority, and a text on where."""

    ranks: tuple[int, ...]  # ranks that are not in the majority; all if there is none
    has_majority: bool
    can_be_copied: bool  # False if a part differs that a rank does not take over from another one
    text: str


@dataclass
class _Question:
    number: int
    deadline: float
    answers: dict[int, protocol.StateValues] = field(default_factory=dict)


class ReplicaComparison:
    """Comparison of the state hashes that the ranks of one generation report in one run."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = sorted(ranks)
        self._run = 0
        self._values: dict[int, Counter[int]] = {}  # number of a hash -> values, and how many ranks have it
        self._question: _Question | None = None

    def handle(self, rank: int, message: Message, now: float) -> Outgoing:
        """Process hashes from a rank; return messages that ask all ranks for details if hashes differ."""
        match message:
            case protocol.StateHashes(run=run, hashes=hashes):
                if run > self._run:
                    self._run, self._values, self._question = run, {}, None
                if run == self._run and rank in self._ranks:
                    return self._add(hashes, now)
            case protocol.StateValues(run=run, number=number):
                if self._question is not None and (run, number) == (self._run, self._question.number):
                    self._question.answers[rank] = message
        return []

    def _add(self, hashes: Mapping[int, int], now: float) -> Outgoing:
        if self._question is not None:  # which explains the first difference
            return []
        for number, value in sorted(hashes.items()):
            counts = self._values.setdefault(number, Counter())
            counts[value] += 1
            if counts.total() < len(self._ranks):
                continue
            # what all have by now is complete, but for hashes that a rank had too many of to send
            self._values = {later: c for later, c in self._values.items() if later > number}
            if len(counts) > 1:
                self._question = _Question(number, now + _ANSWERS_WITHIN_S)
                self._values.clear()
                return [(each, protocol.StateRequest(number)) for each in self._ranks]
        return []

    def deadline(self) -> float | None:
        """Return the time at which `due` is to be called at the latest; None if nothing is pending."""
        return self._question.deadline if self._question is not None else None

    def due(self, now: float) -> Difference | None:
        """Return a difference once all answered or time is up, else None; leave its ranks out after that."""
        question = self._question
        if question is None or (now < question.deadline and len(question.answers) < len(self._ranks)):
            return None
        self._question = None
        found = _explain({rank: question.answers[rank] for rank in self._ranks if rank in question.answers})
        if found is not None:  # else all have forgotten, and are asked about the next difference
            self._ranks = [rank for rank in self._ranks if rank not in found.ranks]
        return found


def _explain(answers: Mapping[int, protocol.StateValues]) -> Difference | None:
    """Return how the answers of ranks about their state differ, with a text; None if they are equal."""
    states = {rank: dict(zip(each.names, each.values, strict=False)) for rank, each in answers.items()}
    ranks = list(states)
    parted = [ranks[position] for position in minority(str(state) for state in states.values())]
    if not parted:
        return None
    alike = [rank for rank in ranks if rank not in parted]
    right = states[alike[0] if alike else parted[0]]
    names = {
        n: None for rank in parted for n in (*right, *states[rank]) if states[rank].get(n) != right.get(n)
    }
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    what = ", ".join([*names][:_MOST_NAMES]) + more
    who, last = name_ranks(parted), answers[parted[0]]
    when = f"after step {last.step}"
    when += f" (equal after step {last.before})" if last.before is not None else ""
    if alike:
        verb = "has" if len(parted) == 1 else "have"
        text = f"{who} {verb} another {what} than {name_ranks(alike)}, the majority, {when}"
    else:
        text = f"{who} have different {what} {when}; nobody knows which is right without a majority"
    notes: dict[str, list[int]] = {}
    for rank, each in answers.items():
        for note in each.notes:
            notes.setdefault(note, []).append(rank)
    whose = {note: "all ranks" if having == ranks else name_ranks(having) for note, having in notes.items()}
    causes = "".join(f"\n  {having}: {note}" for note, having in whose.items())
    text = f"lightning_ddp: the replicas differ: {text}{causes}\n  Causes and what to do: {_PAGE}"
    return Difference(tuple(parted), bool(alike), all(a.can_be_copied for a in answers.values()), text)


def minority(values: Iterable[Hashable]) -> list[int]:
    """Return the indices of values that are not the majority's; all indices if there is no majority.

    >>> minority("aabaa"), minority("aaaa"), minority("ab"), minority("")
    ([2], [], [0, 1], [])
    """
    listed = list(values)
    most, number = next(iter(Counter(listed).most_common(1)), (None, 0))
    return [i for i, each in enumerate(listed) if each != most or 2 * number <= len(listed)]

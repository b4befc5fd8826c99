"""Failures that the server finds from what it hears of all ranks (pure).

The first failure of a job; ranks that make no progress; ranks whose replica differs. For the last, ranks hash
a slice of their state after each step, and send the hashes with their periodic reports. Where two differ, all
ranks are asked what they have hashed then: the answers show the parameter and the ranks.

A `deadline` is the time at which something is to be decided at the latest; None if nothing is pending.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import lightning_ddp.supervise.protocol as protocol
from lightning_ddp.supervise.desync import name_ranks
from lightning_ddp.supervise.failure_record import FailureRecord, Identity
from lightning_ddp.supervise.processes import Process
from lightning_ddp.supervise.protocol import Message, Outgoing

EXIT_WAIT_S = 0.25  # seconds that a process which vanished waits for its exit code, from its launcher
ECHO_WAIT_S = 2.0  # seconds that a lost connection waits for the failure behind it
_ANSWERS_WITHIN_S = 2.0
_MOST_NAMES = 5
_PAGE = "lightning_ddp/docs/guides/replica-check.md"


class RootCauseTracker:
    """Tracker that decides which of a job's reported failures was the first (the root cause).

    A process that dies takes others along: their connections to it break, and they report that too, often
    sooner. So a broken connection and a process that vanished wait a moment for a better explanation; an
    exception of the user's code needs none.
    """

    def __init__(self) -> None:
        self.first: FailureRecord | None = None  # changes only where the others continue without that rank
        self._vanished: dict[object, tuple[float, FailureRecord]] = {}
        self.echoes: list[tuple[float, FailureRecord]] = []  # until when they wait for what they echo

    def accuse(self, record: FailureRecord) -> None:
        """Set the job's first failure, if none is set: `record`, or an earlier loss of another process."""
        if self.first is not None:
            return
        self.first = record
        if self._vanished and _key(record) not in self._vanished:
            deadline, self.first = min(self._vanished.values(), key=lambda entry: entry[0])  # noticed earlier
            self._vanished[_key(record)] = deadline, record  # the next, if the others go on without that one

    def vanished(self, record: FailureRecord, now: float) -> None:
        """Record a closed connection or an exit: a failure once both are known, or after 0.25 s."""
        known = self._vanished.get(_key(record))
        if known is None:
            self._vanished[_key(record)] = (now + EXIT_WAIT_S, record)
        elif known[1].exit_code is not None:  # its launcher had been sooner: all is known
            self.accuse(known[1])

    def echo(self, record: FailureRecord, now: float) -> None:
        """Record an error of a lost connection; it is the first failure if no other follows within 2 s."""
        self.echoes.append((now + ECHO_WAIT_S, record))

    def exited(self, record: FailureRecord, now: float) -> None:
        """Record an exit as a failure if no error is known: certain once disconnected, or after 0.25 s."""
        if self.first is not None or record.exit_code is None:
            return
        if any(_key(echo) == _key(record) for _, echo in self.echoes):
            return  # it failed in the open, and is waiting for a better explanation already
        known = self._vanished.get(_key(record))
        if known is not None:
            self.accuse(record if known[1].exception_type is None else known[1])
        else:  # the last that it said may still be unread
            self.vanished(record, now)

    def decide(self, now: float) -> FailureRecord | None:
        """Return the job's first failure once it is certain, as no better explanation may come; else None."""
        deadline = self.deadline()
        if deadline is not None and deadline <= now:
            named = list(self._vanished.values()) or self.echoes
            self.first = min(named, key=lambda entry: entry[0])[1]
        return self.first

    def restart_limits(self, now: float) -> None:
        """Restart the waits for better explanations, as this process was suspended and could hear none."""
        self._vanished = {key: (now + EXIT_WAIT_S, record) for key, (_, record) in self._vanished.items()}
        self.echoes = [(now + ECHO_WAIT_S, record) for _, record in self.echoes]

    def set_aside(self, record: FailureRecord) -> None:
        """Forget the first failure and all records of its process, without which the job continues."""
        self.first = None
        self._vanished.pop(_key(record), None)
        self.echoes = [echo for echo in self.echoes if _key(echo[1]) != _key(record)]

    def deadline(self) -> float | None:
        waiting = [*self._vanished.values(), *self.echoes]
        return min((deadline for deadline, _ in waiting), default=None) if self.first is None else None


def _key(record: FailureRecord) -> object:
    return record.rank if record.pid is None else (record.node_rank, record.pid)


# ---------------------------------------------------------------------- ranks without progress


def silent(identity: Identity, timeout_s: float) -> FailureRecord:
    """Build the failure record for a process that has sent nothing for `timeout_s` seconds."""
    why = "it is stopped (SIGSTOP), swapped out, or holds its interpreter"
    return FailureRecord.of_identity(identity, f"the process has not answered for {timeout_s:g} s: {why}")


class StallWatch:
    """Detector of ranks that send no reports, or make no progress though they wait for no other rank.

    A rank reports every `period_s` seconds. Without a timeout nothing is looked for.
    """

    def __init__(self, timeout_s: float | None, period_s: float) -> None:
        self._timeout_s, self._period_s = timeout_s, period_s
        self._since: float | None = None
        self._looked_at = 0.0

    def begin(self, now: float) -> None:
        """Start the detector, or restart it: silence and lack of progress before `now` do not count."""
        self._since = self._looked_at = now

    def next_look(self) -> float | None:
        """Return the time at which `find` is to be called again; None for never."""
        is_on = self._timeout_s is not None and self._since is not None
        return self._looked_at + self._period_s if is_on else None

    def find(self, members: Iterable[Process], now: float) -> tuple[Process, FailureRecord] | None:
        """Return the process of a stalled rank and a failure record for it; None if none has stalled."""
        next_look, timeout_s = self.next_look(), self._timeout_s
        if next_look is None or timeout_s is None or self._since is None or now < next_look:
            return None
        if now > self._looked_at + timeout_s / 2:  # this very process slept, and could not hear others
            self.begin(now)
            return None
        self._looked_at = now
        times = {
            process: (max(process.heard_at, self._since), max(process.moved_at, self._since))
            for process in members
            if process.is_member and process.is_active and process.is_connected
        }
        quietest = min(times, key=lambda process: times[process][0], default=None)
        if quietest is not None and (silent_s := now - times[quietest][0]) > timeout_s / 2:
            # the others may wait for it; it was well until then
            is_mute = silent_s > timeout_s + self._period_s
            return (quietest, silent(quietest.who, timeout_s)) if is_mute else None
        for process, (heard_at, moved_at) in times.items():
            where = process.report.where
            if heard_at - moved_at > timeout_s and where.waits_for is None:
                text = f"no progress within stall_timeout={timeout_s:g} s"
                return process, process.failure(text, step=where.step, phase=where.phase)
        return None


# ---------------------------------------------------------------------- replicas that differ


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
        """Handle a rank's hashes or details; return requests for details to all ranks if hashes differ."""
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
        return self._question.deadline if self._question is not None else None

    def due(self, now: float) -> Difference | None:
        """Return how replicas differ once all answered or time is up, else None; then ignore those ranks."""
        question = self._question
        if question is None or (now < question.deadline and len(question.answers) < len(self._ranks)):
            return None
        self._question = None
        found = _explain({rank: question.answers[rank] for rank in self._ranks if rank in question.answers})
        if found is not None:  # else all have forgotten, and are asked about the next difference
            self._ranks = [rank for rank in self._ranks if rank not in found.ranks]
        return found


def _explain(answers: Mapping[int, protocol.StateValues]) -> Difference | None:
    """Return the `Difference` between the ranks' answers about their state; None if they are equal."""
    states = {rank: dict(zip(each.names, each.values, strict=False)) for rank, each in answers.items()}
    ranks, texts = [*states], {rank: str(state) for rank, state in states.items()}
    most, number = next(iter(Counter(texts.values()).most_common(1)), ("", 0))
    alike = [rank for rank, text in texts.items() if text == most and 2 * number > len(texts)]
    parted = [rank for rank in ranks if rank not in alike]
    if not parted:
        return None
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

"""Verdict on the first failure of a job (pure)."""

from __future__ import annotations

from lightning_ddp.supervise.failure_record import FailureRecord

EXIT_WAIT_S = 0.25  # seconds that a process which vanished waits for its exit code, from its launcher
ECHO_WAIT_S = 2.0  # seconds that a lost connection waits for the failure behind it


class RootCauseTracker:
    """Tracker that decides which of a job's reported failures was the first (the root cause).

    A process that dies takes others along: their connections to it break, and they report that too, often
    sooner. So a broken connection and a process that vanished wait a moment for a better explanation; an
    exception of the user's code needs none.
    """

    def __init__(self) -> None:
        self.first: FailureRecord | None = None  # changes only where the others continue without that rank
        self._vanished: dict[object, tuple[float, FailureRecord]] = {}
        self._echoes: list[tuple[float, FailureRecord]] = []

    def accuse(self, record: FailureRecord) -> None:
        """Take a failure as the first, as it explains itself: an exception of user code, or an exit code."""
        if self.first is not None:
            return
        self.first = record
        if self._vanished and _key(record) not in self._vanished:
            deadline, self.first = min(self._vanished.values(), key=lambda entry: entry[0])  # noticed earlier
            self._vanished[_key(record)] = deadline, record  # the next, if the others go on without that one

    def vanished(self, record: FailureRecord, now: float) -> None:
        """Record that a process's connection closed without a report; its exit code may follow."""
        known = self._vanished.get(_key(record))
        if known is None:
            self._vanished[_key(record)] = (now + EXIT_WAIT_S, record)
        elif known[1].exit_code is not None:  # its launcher had been sooner: all is known
            self.accuse(known[1])

    def echo(self, record: FailureRecord, now: float) -> None:
        """Record an error of a lost connection, which is usually the consequence of another failure."""
        self._echoes.append((now + ECHO_WAIT_S, record))

    def exited(self, record: FailureRecord, now: float) -> None:
        """Record a child's failing exit code; it is the first failure if its connection has closed."""
        if self.first is not None or record.exit_code is None:
            return
        if any(_key(echo) == _key(record) for echo in self.echoes):
            return  # it failed in the open, and is waiting for a better explanation already
        known = self._vanished.get(_key(record))
        if known is not None:
            self.accuse(record if known[1].exception_type is None else known[1])
        else:  # the last that it said may still be unread
            self.vanished(record, now)

    def decide(self, now: float) -> FailureRecord | None:
        """Return the first failure if it is certain, as no better explanation is to come; else None."""
        deadline = self.deadline()
        if deadline is not None and deadline <= now:
            named = list(self._vanished.values()) or self._echoes
            self.first = min(named, key=lambda entry: entry[0])[1]
        return self.first

    @property
    def echoes(self) -> list[FailureRecord]:
        return [record for _, record in self._echoes]

    def set_aside(self, record: FailureRecord) -> None:
        """Forget the first failure and all others of its process, as the job continues without that."""
        self.first = None
        self._vanished.pop(_key(record), None)
        self._echoes = [echo for echo in self._echoes if _key(echo[1]) != _key(record)]

    def deadline(self) -> float | None:
        """Return the time at which `decide` is to be called at the latest; None if nothing is pending."""
        waiting = [*self._vanished.values(), *self._echoes]
        return min((deadline for deadline, _ in waiting), default=None) if self.first is None else None


def _key(record: FailureRecord) -> object:
    """Return a key of a failure's process: node and process id, as its rank may be outdated."""
    return record.rank if record.pid is None else (record.node_rank, record.pid)

"""Verdict: decides which failure was first. Pure: told what happened and when.

A process that dies takes others along: their connections to it break, and they report that too, often
sooner. So a broken connection and a process that vanished wait a moment for a better explanation; an
exception of the user's code needs none.
"""

from __future__ import annotations

from lightning_ddp.supervise.failure_record import FailureRecord

__all__ = ["ECHO_WAIT_S", "EXIT_WAIT_S", "Verdict"]

EXIT_WAIT_S = 0.25
"""How long a process that vanished waits for its exit code, which its launcher learns at the same time."""
ECHO_WAIT_S = 2.0
"""How long a lost connection waits for the failure behind it."""


class Verdict:
    """Collects accusations; the first one that needs no better explanation wins and never changes."""

    def __init__(self) -> None:
        self.first: FailureRecord | None = None
        self._vanished: dict[int, tuple[float, FailureRecord]] = {}
        self._echoes: list[tuple[float, FailureRecord]] = []

    def accuse(self, record: FailureRecord) -> None:
        """A failure that explains itself: an exception of user code, or a process with its exit code."""
        if self.first is not None:
            return
        known = self._vanished.get(record.rank)
        if known is None and self._vanished:
            record = min(self._vanished.values(), key=lambda entry: entry[0])[1]  # it was noticed earlier
        self.first = record

    def vanished(self, record: FailureRecord, now: float) -> None:
        """A process whose connection closed without a word."""
        known = self._vanished.get(record.rank)
        if known is None:
            self._vanished[record.rank] = (now + EXIT_WAIT_S, record)
        elif known[1].exit_code is not None:  # its launcher had been sooner: all is known
            self.accuse(known[1])

    def echo(self, record: FailureRecord, now: float) -> None:
        """An exception that is usually the consequence of a failure elsewhere: a lost connection."""
        self._echoes.append((now + ECHO_WAIT_S, record))

    def exited(self, record: FailureRecord, description: str, now: float) -> None:
        """A launcher's report of a child that ended without success; `exit_code` is set."""
        if self.first is not None or record.exit_code is None:
            return
        own_words = [echo for _, echo in self._echoes if echo.rank == record.rank]
        if own_words:  # it failed in the open, and is waiting for a better explanation already
            return
        record = record.with_exit(record.exit_code, description)
        if record.rank in self._vanished:
            self.accuse(record)
        else:  # the last that it said may still be unread
            self.vanished(record, now)

    def decide(self, now: float) -> FailureRecord | None:
        """The first failure, as soon as it is certain."""
        if self.first is None:
            waiting = [*self._vanished.values(), *self._echoes]
            if any(deadline <= now for deadline, _ in waiting):
                named = list(self._vanished.values()) or waiting
                self.first = min(named, key=lambda entry: entry[0])[1]
        return self.first

    def set_aside(self, rank: int) -> None:
        """The others go on without a rank: what is known of it, and what followed from it, is settled."""
        self.first = None
        self._vanished.pop(rank, None)
        self._echoes.clear()

    def deadline(self) -> float | None:
        """When to decide at the latest; None if nothing is pending."""
        waiting = [*self._vanished.values(), *self._echoes]
        return min((deadline for deadline, _ in waiting), default=None) if self.first is None else None

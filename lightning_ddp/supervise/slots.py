"""The slots of a job, and when a new process is started in one (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ddp.supervise.actions import StartProcess
from lightning_ddp.supervise.failure_record import Identity
from lightning_ddp.supervise.orders import RankPhase
from lightning_ddp.supervise.processes import Process, ProcessState, Roster

__all__ = ["STEPS_TO_FORGET", "Slots"]

STEPS_TO_FORGET = 100
"""Committed steps after which earlier failures count no more."""
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 60.0
_ASK_AGAIN_S = 15.0


@dataclass
class _Slot:
    opens_at: float | None = None
    """Time of the next start."""
    is_awaited: bool = False
    """True if the last process that was started is no member yet."""
    joined_at: int | None = None
    """Step at which its present process has joined; None for a first one."""
    asked_at: float = 0.0
    num_failed: int = 0
    num_started: int = 0

    def open(self, now: float) -> None:
        """Have another process started, later after each failure."""
        delay_s = min(_FIRST_DELAY_S * 2 ** (self.num_failed - 1), _LONGEST_DELAY_S)
        self.opens_at = now + (delay_s if self.num_failed else 0.0)


class Slots:
    """The slots of a job by their places.

    Args:
        roster: the processes.
        most: most starts in a slot without `STEPS_TO_FORGET` steps in between; None to start no process.
    """

    def __init__(self, roster: Roster, most: int | None) -> None:
        self._roster, self._most = roster, most
        self._slots: dict[int, _Slot] = {}

    def _slot(self, place: int) -> _Slot:
        return self._slots.setdefault(place, _Slot())

    def num_started(self, place: int) -> int:
        """Return how many processes were to be started in a slot, the first one not counted."""
        return self._slot(place).num_started

    def is_awaited(self, place: int, start: int | None) -> bool:
        """Return True if a slot waits for the process of this start."""
        slot = self._slot(place)
        return slot.is_awaited and start == slot.num_started

    def lost(self, place: int, step: int, now: float) -> None:
        """Note that a member is lost, and has ended, after `step` steps are committed."""
        slot = self._slot(place)
        is_soon = slot.joined_at is not None and step - slot.joined_at < STEPS_TO_FORGET
        slot.num_failed = slot.num_failed + 1 if is_soon else 0
        slot.joined_at = None
        slot.open(now)

    def failed(self, place: int, now: float) -> None:
        """Note that a process has ended before it was a member."""
        slot = self._slot(place)
        slot.num_failed += 1
        slot.is_awaited, slot.joined_at = False, None
        slot.open(now)

    def left(self, place: int, now: float) -> None:
        """Note that a member has left on request, and has ended: that is no failure of its slot."""
        self._slots[place] = _Slot(opens_at=now, num_started=self.num_started(place))

    def close(self, place: int) -> None:
        """Start no process in a slot whose process is to end."""
        slot = self._slot(place)
        slot.is_awaited, slot.opens_at = False, None

    def joined(self, place: int, step: int) -> None:
        """Note that a process is a member from a step on."""
        self.close(place)
        self._slot(place).joined_at = step

    def stands_again(self, place: int) -> None:
        """Note that a process that was to be a member did not get its state, and may yet."""
        slot = self._slot(place)
        slot.is_awaited, slot.joined_at = True, None

    def reopen(self, node: int, now: float) -> None:
        """Have processes started in all empty slots of a node, whose launcher has come or gone.

        Also where that was given up, or asked of another launcher. The slot of a lost member is empty once
        the next generation is formed: `lost`.
        """
        of_members = {process.place for process in self._roster.members}
        for place, its in self._roster.nodes.items():
            if its == node and place not in of_members and not self._roster.at(place):
                slot = self._slot(place)
                slot.is_awaited = False
                if slot.opens_at is None:
                    slot.num_failed, slot.opens_at = 0, now

    def may_come(self, who: Identity, *, is_launcher: bool) -> bool:
        """Return True if a new process was asked for, or is the launcher of a node that is back.

        The latter may come before its loss is known: then it waits.
        """
        if self._most is None or self._roster.nodes.get(who.rank) != who.node_rank:
            return False
        if any(process.state is ProcessState.STANDING for process in self._roster.at(who.rank)):
            return False
        return self.is_awaited(who.rank, who.start) or (is_launcher and who.node_rank != 0)

    def ready(self, now: float) -> list[Process]:
        """Return the processes that stand before their first step in slots that are empty and open."""
        return [
            process
            for process in self._roster.standing
            if process.phase is RankPhase.STANDING
            and process.is_connected
            and not process.has_exited
            and self._roster.at(process.place) == [process]
            and (self._slot(process.place).opens_at or 0.0) <= now
        ]

    def due(self, now: float) -> list[StartProcess]:
        """Return the processes to start now.

        A start is asked for again with its number after a while, in case that the first request was lost.
        """
        if self._most is None:
            return []
        for process in self._roster.standing:  # whom nobody was asked to start
            slot = self._slot(process.place)
            if slot.opens_at is not None and slot.opens_at <= now:
                slot.opens_at = None
        found = []
        for place, slot in sorted(self._slots.items()):
            is_open = slot.opens_at is not None and slot.opens_at <= now
            is_again = slot.is_awaited and slot.asked_at + _ASK_AGAIN_S <= now
            if (is_open or is_again) and self._may_start(place):
                slot.opens_at = None
                if is_again or slot.num_failed <= self._most:
                    slot.num_started += not is_again
                    slot.is_awaited, slot.asked_at = True, now
                    found.append(StartProcess(self._roster.launcher_of(place), place, slot.num_started))
        return found

    def deadline(self) -> float | None:
        """Return when `due` or `ready` next has an answer; None for never."""
        found = []
        for place, slot in self._slots.items() if self._most is not None else ():
            there = self._roster.at(place)
            may_start = not there and self._may_start(place)
            if slot.is_awaited and may_start:
                found.append(slot.asked_at + _ASK_AGAIN_S)
            is_stood_at = any(process.state is ProcessState.STANDING for process in there)
            if slot.opens_at is not None and (is_stood_at or may_start):
                found.append(slot.opens_at)
        return min(found, default=None)

    def _may_start(self, place: int) -> bool:
        """Return True if a place is empty, and somebody starts processes on its node."""
        is_here = self._roster.nodes.get(place, 0) == 0
        return (is_here or self._roster.launcher_of(place) is not None) and not self._roster.at(place)

"""Slots: the places of a job, and when a new process is started in one. Pure: told what happened and when."""

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
    """When the next process is to be started."""
    is_awaited: bool = False
    """Whether one was started that is no member yet."""
    joined_at: int | None = None
    """The step at which its present process has joined; None for a first one."""
    asked_at: float = 0.0
    num_failed: int = 0
    num_started: int = 0

    def open(self, now: float) -> None:
        """Another process is to be started; later after each failure."""
        delay_s = min(_FIRST_DELAY_S * 2 ** (self.num_failed - 1), _LONGEST_DELAY_S)
        self.opens_at = now + (delay_s if self.num_failed else 0.0)


class Slots:
    """The places of a job.

    Args:
        roster: the processes.
        most: how often a process may be started in a place without `STEPS_TO_FORGET` steps in between; None
            if none is.
    """

    def __init__(self, roster: Roster, most: int | None) -> None:
        self._roster, self._most = roster, most
        self._slots: dict[int, _Slot] = {}

    def _slot(self, place: int) -> _Slot:
        return self._slots.setdefault(place, _Slot())

    def num_started(self, place: int) -> int:
        """How many processes were started in a place, the first one not counted."""
        return self._slot(place).num_started

    def is_awaited(self, place: int, start: int | None) -> bool:
        """Tell whether the start of this number is the one that a place waits for."""
        slot = self._slot(place)
        return slot.is_awaited and start == slot.num_started

    def lost(self, place: int, step: int, now: float) -> None:
        """A member is lost, and known to have ended, after `step` steps are committed."""
        slot = self._slot(place)
        is_soon = slot.joined_at is not None and step - slot.joined_at < STEPS_TO_FORGET
        slot.num_failed = slot.num_failed + 1 if is_soon else 0
        slot.joined_at = None
        slot.open(now)

    def failed(self, place: int, now: float) -> None:
        """A process has ended before it was a member."""
        slot = self._slot(place)
        slot.num_failed += 1
        slot.is_awaited, slot.joined_at = False, None
        slot.open(now)

    def left(self, place: int, now: float) -> None:
        """A member has left as it was asked to, and has ended: that is no failure of its place."""
        self._slots[place] = _Slot(opens_at=now, num_started=self.num_started(place))

    def close(self, place: int) -> None:
        """The process there is told to end, and none is to follow."""
        slot = self._slot(place)
        slot.is_awaited, slot.opens_at = False, None

    def joined(self, place: int, step: int) -> None:
        """A process is a member from a step on."""
        slot = self._slot(place)
        slot.is_awaited, slot.opens_at, slot.joined_at = False, None, step

    def stands_again(self, place: int) -> None:
        """A process that was to be a member did not get its state, and may yet."""
        slot = self._slot(place)
        slot.is_awaited, slot.joined_at = True, None

    def reopen(self, node: int, now: float) -> None:
        """The launcher of a node has come or gone: processes are asked for in all places that are empty.

        Also where that was given up, or begun by another launcher. That of a lost member is empty once the
        next generation is formed: `lost`.
        """
        of_members = {process.place for process in self._roster.members}
        for place, its in self._roster.nodes.items():
            if its == node and place not in of_members and not self._roster.at(place):
                slot = self._slot(place)
                slot.is_awaited = False
                if slot.opens_at is None:
                    slot.num_failed, slot.opens_at = 0, now

    def may_come(self, who: Identity, *, is_launcher: bool) -> bool:
        """Tell whether a new process is one that was asked for, or the launcher of a node that comes back.

        That may be sooner back than it is known to be lost: then it waits.
        """
        if self._most is None or self._roster.nodes.get(who.rank) != who.node_rank:
            return False
        if any(process.state is ProcessState.STANDING for process in self._roster.at(who.rank)):
            return False
        return self.is_awaited(who.rank, who.start) or (is_launcher and who.node_rank != 0)

    def ready(self, now: float) -> list[Process]:
        """Those that stand before their first step, in places that are empty and open."""
        return [
            process
            for process in self._roster.standing
            if process.phase is RankPhase.STANDING
            and process.is_connected
            and not process.has_exited
            and self._roster.at(process.place) == [process]
            and ((opens_at := self._slot(process.place).opens_at) is None or opens_at <= now)
        ]

    def due(self, now: float) -> list[StartProcess]:
        """Processes that are to be started now.

        A start comes again with the same number after a while, in case that the first one was lost.
        """
        for process in self._roster.standing:  # whom nobody was asked to start
            slot = self._slot(process.place)
            if slot.opens_at is not None and slot.opens_at <= now:
                slot.opens_at = None
        found = []
        for place, slot in sorted(self._slots.items()) if self._most is not None else ():
            opens = slot.opens_at is not None and slot.opens_at <= now
            is_again = slot.is_awaited and slot.asked_at + _ASK_AGAIN_S <= now
            if not (opens or is_again) or not self._may_start(place):
                continue
            slot.opens_at = None
            if is_again or (self._most is not None and slot.num_failed <= self._most):
                slot.num_started += not is_again
                slot.is_awaited, slot.asked_at = True, now
                found.append(StartProcess(self._roster.launcher_of(place), place, slot.num_started))
        return found

    def deadline(self) -> float | None:
        """When a slot opens next that concerns anybody, or is asked for again; None if none does."""
        found = []
        for place, slot in self._slots.items() if self._most is not None else ():
            there = self._roster.at(place)
            may_start = not there and self._may_start(place)
            if slot.is_awaited and may_start:
                found.append(slot.asked_at + _ASK_AGAIN_S)
            if slot.opens_at is not None:
                waits = any(process.state is ProcessState.STANDING for process in there)
                found += [slot.opens_at] if waits or may_start else []
        return min(found, default=None)

    def _may_start(self, place: int) -> bool:
        """Tell whether there is somebody who starts processes on the node of a place, and none is there."""
        is_here = self._roster.nodes.get(place, 0) == 0
        return (is_here or self._roster.launcher_of(place) is not None) and not self._roster.at(place)

"""The slots of a job, and when a new process is started in one (pure)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from lightning_ddp.supervise.failure_record import Identity
from lightning_ddp.supervise.orders import RankPhase
from lightning_ddp.supervise.processes import Process, ProcessState, Roster, StartProcess

STEPS_TO_FORGET = 100  # committed steps after which earlier failures count no more
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 60.0
_ASK_AGAIN_S = 15.0


@dataclass
class Slot:
    opens_at: float | None = None  # time of the next start
    is_awaited: bool = False  # True if the last process that was started is no member yet
    joined_at: int | None = None  # step at which its present process has joined; None for a first one
    asked_at: float = 0.0
    num_failed: int = 0
    num_started: int = 0  # number of processes that were to be started here, the first one not counted

    def awaits(self, start: int | None) -> bool:
        return self.is_awaited and start == self.num_started

    def is_open(self, now: float) -> bool:
        return self.opens_at is not None and self.opens_at <= now

    def lost(self, step: int, now: float) -> None:
        """Record that this rank's process was lost at committed step `step`, and plan its replacement."""
        is_soon = self.joined_at is not None and step - self.joined_at < STEPS_TO_FORGET
        self.ended(now, is_failure=is_soon)

    def ended(self, now: float, *, is_failure: bool = True) -> None:
        """Plan the next start, as this rank's process has ended: at once, or later with each failure."""
        self.num_failed = self.num_failed + 1 if is_failure else 0
        self.is_awaited, self.joined_at = False, None
        delay_s = min(_FIRST_DELAY_S * 2 ** (self.num_failed - 1), _LONGEST_DELAY_S)
        self.opens_at = now + (delay_s if self.num_failed else 0.0)

    def close(self) -> None:
        """Cancel the planned start of a new process for this rank."""
        self.is_awaited, self.opens_at = False, None

    def joined(self, step: int) -> None:
        """Record that this rank's new process trains from committed step `step` on."""
        self.close()
        self.joined_at = step

    def stands_again(self) -> None:
        """Record that this rank's new process did not get the training state, and waits to join again."""
        self.is_awaited, self.joined_at = True, None


class Slots:
    """The slots of a job, one for each initial rank: when a new process is to be started in each.

    Args:
        most: most starts in a slot without `STEPS_TO_FORGET` steps in between; None to start no process.
    """

    def __init__(self, roster: Roster, most: int | None) -> None:
        self._roster, self._most = roster, most
        self._slots: defaultdict[int, Slot] = defaultdict(Slot)

    def __getitem__(self, place: int) -> Slot:
        return self._slots[place]

    def reopen(self, node: int, now: float) -> None:
        """Plan new processes for all vacant ranks of a node whose launcher has connected or gone.

        Also where that was given up, or asked of another launcher. The slot of a lost member is empty once
        the next generation is formed: `Slot.lost`.
        """
        of_members = {process.place for process in self._roster.members}
        for place, its in self._roster.nodes.items():
            if its == node and place not in of_members and not self._roster.at(place):
                slot = self[place]
                slot.is_awaited = False
                if slot.opens_at is None:
                    slot.num_failed, slot.opens_at = 0, now

    def may_come(self, who: Identity, *, is_launcher: bool) -> bool:
        """Return True if a connecting process was requested, or is the launcher of a node that is back.

        The latter waits if it comes before the loss of its node is known.
        """
        if self._most is None or self._roster.nodes.get(who.rank) != who.node_rank:
            return False
        if any(process.state is ProcessState.STANDING for process in self._roster.at(who.rank)):
            return False
        return self[who.rank].awaits(who.start) or (is_launcher and who.node_rank != 0)

    def ready(self, now: float) -> list[Process]:
        """Return the new processes that may join now: ready, connected, and alone in their rank's slot."""
        return [
            process
            for process in self._roster.standing
            if process.phase is RankPhase.STANDING
            and process.is_connected
            and not process.has_exited
            and self._roster.at(process.place) == [process]
            and (self[process.place].opens_at or 0.0) <= now
        ]

    def due(self, now: float) -> list[StartProcess]:
        """Return requests to start new processes now, or again if an earlier request may have been lost."""
        if self._most is None:
            return []
        for process in self._roster.standing:  # whom nobody was asked to start
            if self[process.place].is_open(now):
                self[process.place].opens_at = None
        found = []
        for place, slot in sorted(self._slots.items()):
            is_again = slot.is_awaited and slot.asked_at + _ASK_AGAIN_S <= now
            if (is_again or slot.is_open(now)) and self._may_start(place):
                slot.opens_at = None
                if is_again or slot.num_failed <= self._most:
                    slot.num_started += not is_again
                    slot.is_awaited, slot.asked_at = True, now
                    found.append(StartProcess(self._roster.launcher_of(place), place, slot.num_started))
        return found

    def deadline(self) -> float | None:
        """Return the time at which `due` or `ready` next finds a process; None for never."""
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
        """Return True if an initial rank has no living process, and its node has a launcher to start one."""
        is_here = self._roster.nodes.get(place, 0) == 0
        return (is_here or self._roster.launcher_of(place) is not None) and not self._roster.at(place)

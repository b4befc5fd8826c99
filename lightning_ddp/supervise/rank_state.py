"""The state of a process in its run, and what it is to do (pure).

The thread of the control channel brings orders (`hear`), the main thread says where it is; after each of both
`news` has the report to send, if any.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from lightning_ddp.errors import PeerFailure
from lightning_ddp.supervise.failure_record import FailureRecord, Where
from lightning_ddp.supervise.orders import (
    NewGeneration,
    Order,
    Progress,
    RankPhase,
    Report,
    Task,
    Wish,
    WishKind,
)

_RUN_BITS = 64  # of a position; the bits above are the number of the run
_FACTS = ("phase", "generation", "state_of", "begun", "ended", "run", "progress", "wish", "why")
"""Fields of a report that are attributes of `RankState`."""
_OUTSIDE = frozenset({RankPhase.IDLE, RankPhase.STARTING, RankPhase.FINISHED, RankPhase.ENDED})
"""Phases from which a run leads to RUNNING."""
_CONNECTING = frozenset({RankPhase.STARTING, RankPhase.RUNNING})
_STOPPED = frozenset({RankPhase.STOPPED, RankPhase.MEETING, RankPhase.STANDING})
_UNINTERRUPTED = _STOPPED | {RankPhase.FINISHED, RankPhase.FAILED, RankPhase.ENDED}


class Passage(Enum):
    """Task of a rank at a step boundary: pass, wait, stop for ranks that join or leave, or end."""

    GO = auto()  # it passes
    WAIT = auto()  # it waits for the next order
    MEET = auto()  # it stays, as others join or leave here
    STOP = auto()  # it stays, as all stop here


class RankState:
    """A process's own state in the job, and its last order from the server. Not thread-safe: use a lock.

    Its `place` is its rank in the first generation; `is_new` if it is in the place of a lost one.
    """

    def __init__(self, place: int, *, is_new: bool) -> None:
        self.place = self.rank = place
        self.phase = RankPhase.STARTING
        self.generation = 0  # the last one that it has entered
        self.state_of = -1 if is_new else 0  # the last generation whose state it has; -1 for none
        self.order = Order()  # the last order that was heard
        self.members: tuple[int, ...] | None = None  # in the last generation heard of; None for the first one
        self.cause: FailureRecord | None = None  # first failure of the last recovery
        self.position = 0  # number of the boundary that comes next
        self.may_meet = True  # True if ranks may join or leave at the boundary that comes next
        self.wish: Wish | None = None
        self.stops_for: Wish | None = None  # wish for which all have stopped at a boundary, where they have
        self.begun = self.ended = 0  # numbers of runs that it has begun, and ended
        self.run = ""  # name of the last one
        self.progress: Progress | None = None
        self.why: str | None = None
        self._base = 0
        self._num_reports = 0
        self._known: object = self._know()  # facts of the last report

    # ------------------------------------------------------------------ the thread of the channel

    def hear(self, order: Order) -> PeerFailure | None:
        """Store an order of the server; return the error that is to interrupt the main thread, or None."""
        if order.number <= self.order.number:
            return None
        was_called = self.is_called
        self.order = order
        if order.generation is not None:
            self.members = order.generation.members
        self.cause = order.record or self.cause
        return self.error if self.is_called and not was_called else None

    def news(self, where: Callable[[], Where], *, is_due: bool = False) -> Report | None:
        """Return the report to send to the server if a fact has changed or it `is_due`, else None."""
        known = self._know()
        # a run that has begun is no news before all have connected: 16,384 reports would hold that up
        is_connecting = not self.has_met and self.phase in _CONNECTING and self.wish is None
        if (known == self._known or is_connecting) and not is_due:
            return None
        self._known = known
        self._num_reports += 1
        facts = {name: getattr(self, name) for name in _FACTS}
        heard, position = self.order.number, self.position
        return Report(number=self._num_reports, heard=heard, position=position, where=where(), **facts)

    def say_again(self) -> None:
        """Make `news` return a report at the next call, as the server's answer is needed soon."""
        self._known = None

    def _know(self) -> object:
        """Return the facts whose change is reported: position if HOLD, order number unless WAIT or RUN."""
        heard = 0 if self.task in (Task.WAIT, Task.RUN) else self.order.number
        position = self.position if self.task is Task.HOLD else -1
        return heard, position, *(getattr(self, name) for name in _FACTS)

    # ------------------------------------------------------------------ what is known

    @property
    def task(self) -> Task:
        return self.order.task

    @property
    def has_met(self) -> bool:
        return self.order.number > 0

    @property
    def is_called(self) -> bool:
        """True if a recovery is ordered and the main thread still has to be interrupted for it."""
        return self.task is Task.RECOVER and self.phase not in _UNINTERRUPTED

    @property
    def error(self) -> PeerFailure | None:
        """`PeerFailure` with which a recovery interrupts the main thread; None if no recovery is ordered."""
        record = self.order.record
        return record.to_error(self.rank) if record is not None and self.task is Task.RECOVER else None

    @property
    def is_entering(self) -> bool:
        return self.phase is RankPhase.ENTERING

    def has_ended_everywhere(self) -> bool:
        return self.order.all_ended >= self.ended == self.begun

    def goes_on_without(self, place: int) -> bool:
        """Return True if the latest known generation has no process for the initial rank `place`."""
        return self.members is not None and place not in self.members

    # ------------------------------------------------------------------ the main thread

    def begin_run(self, name: str) -> None:
        """Begin run `name` (fit ...); number its step boundaries above earlier ones, alike on all ranks."""
        self.begun, self.run = self.begun + 1, name
        self.position = self._base = self.begun << _RUN_BITS
        if self.phase in _OUTSIDE and self.state_of >= 0:
            self.phase = RankPhase.RUNNING

    def end_run(self) -> None:
        self.ended = self.begun
        if self.phase in (RankPhase.RUNNING, RankPhase.STARTING):
            self.phase = RankPhase.IDLE

    def fail(self, why: str | None) -> None:
        """Set the phase to failed, unless it is ended; `why` is given if the others cannot continue then."""
        if self.phase is not RankPhase.ENDED:
            self.phase, self.why = RankPhase.FAILED, why

    def leave(self) -> None:
        """Set the phase to ended: from now on the exit of this process is no failure."""
        self.phase = RankPhase.ENDED

    def place_boundary(self, number: int, *, may_meet: bool) -> None:
        """Set the number of the fit's next step boundary, and whether ranks may join or leave there.

        All ranks say the same, as those that repeat a step, or are new, cannot count what they have passed.
        """
        self.position, self.may_meet = self._base + number, may_meet

    def look(self) -> Passage:
        """Return what the main thread is to do at a step boundary; count it if passed. Repeat after WAIT."""
        order = self.order
        match self.task:
            case Task.MEET if self.position >= order.position and self.may_meet:
                return Passage.MEET
            case Task.STOP if self.position >= order.position:
                self.phase, self.stops_for = RankPhase.FINISHED, order.wish
                return Passage.STOP
            case Task.HOLD | Task.ENTER | Task.RECOVER:
                return Passage.WAIT
        self.position += 1
        return Passage.GO

    def ask(self, wish: Wish) -> None:
        """Record what a signal requests, to leave or to stop, for the next report. Safe in a handler."""
        if self.wish is None or wish.kind is WishKind.STOP:
            self.wish = wish

    def end_boundaries(self) -> None:
        """Allow no rank to join or leave in this fit any more; a request to leave becomes one to stop all."""
        self.may_meet = False
        if self.wish is not None and self.wish.kind is not WishKind.STOP:
            self.wish = Wish(WishKind.STOP, self.wish.signal)

    def stand(self) -> None:
        """Set the phase to waiting for admission, as this process has no training state; does not block."""
        self.phase, self.progress, self.rank = RankPhase.STANDING, None, self.place

    def stop(self, *, has_met: bool = False) -> None:
        """Set the phase: stopped, meeting at a step boundary, or waiting if without training state."""
        if self.state_of < 0:
            self.stand()
        else:
            is_meeting = has_met and self.task is Task.MEET
            self.phase, self.progress = RankPhase.MEETING if is_meeting else RankPhase.STOPPED, None

    def answer(self, progress: Progress) -> None:
        """Store how far this process had trained when it stopped, unless that is stored already."""
        if self.progress is None and self.phase in (RankPhase.STOPPED, RankPhase.MEETING):
            self.progress = progress

    def enter_next(self) -> NewGeneration | None:
        """Enter and return the generation that the server orders this stopped process into, if any."""
        new = self.order.generation if self.task is Task.ENTER else None
        if new is None or self.place not in new.members or new.number <= self.generation:
            return None
        self.generation, self.rank = new.number, new.members.index(self.place)
        self.phase, self.progress = RankPhase.ENTERING, None
        self.position = self._base = 0
        return new

    def settle(self) -> None:
        """Set the phase to running with the generation's state; raise if a recovery is ordered already."""
        if self.is_called and self.error is not None:
            raise self.error
        self.state_of, self.phase = self.generation, RankPhase.RUNNING

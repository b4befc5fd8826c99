"""The state of a process in its run, and what it is to do (pure).

The thread of the control channel brings orders (`hear`), the main thread says where it is; after each of both
`news` has the report to send, if any.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from lightning_ddp.errors import PeerFailure
from lightning_ddp.supervise.failure_record import Where
from lightning_ddp.supervise.orders import (
    NO_ORDER,
    NewGeneration,
    Order,
    Progress,
    RankPhase,
    Report,
    Task,
    Wish,
    WishKind,
)

__all__ = ["Passage", "RankState"]

_FACTS = ("phase", "generation", "state_of", "begun", "ended", "run", "progress", "wish", "why")
"""Fields of a report that are attributes of `RankState`."""
_OUTSIDE = frozenset({RankPhase.IDLE, RankPhase.STARTING, RankPhase.FINISHED, RankPhase.ENDED})
"""Phases from which a run leads to RUNNING."""
_STOPPED = frozenset({RankPhase.STOPPED, RankPhase.MEETING, RankPhase.STANDING})
_UNINTERRUPTED = _STOPPED | {RankPhase.FINISHED, RankPhase.FAILED, RankPhase.ENDED}


class Passage(Enum):
    """Action of a rank at a boundary."""

    GO = auto()  # it passes
    WAIT = auto()  # it waits for the next order
    MEET = auto()  # it stays, as others join or leave here
    STOP = auto()  # it stays, as all stop here


class RankState:
    """A process's side of `JobState`. Not thread-safe: whoever shares it has a lock.

    Its `place` is its rank in the first generation; `is_new` if it is in the place of a lost one.
    """

    def __init__(self, place: int, *, is_new: bool) -> None:
        self.place = self.rank = place
        self.phase = RankPhase.STARTING
        self.generation = 0  # the last one that it has entered
        self.state_of = -1 if is_new else 0  # the last generation whose state it has; -1 for none
        self.order = NO_ORDER  # the last order that was heard
        self.members: tuple[int, ...] | None = None  # in the last generation heard of; None for the first one
        self.position = 0  # number of boundaries that were passed
        self.may_meet = True  # True if ranks may join or leave at the boundary that comes next
        self.wish: Wish | None = None
        self.stops_for: Wish | None = None  # wish for which all have stopped at a boundary, where they have
        self.begun = self.ended = 0  # numbers of runs that it has begun, and ended
        self.run = ""  # name of the last one
        self.progress: Progress | None = None
        self.why: str | None = None
        self._is_new = is_new
        self._base = 0
        self._num_reports = 0
        self._known: object = self._know()  # facts of the last report

    # ------------------------------------------------------------------ the thread of the channel

    def hear(self, order: Order) -> PeerFailure | None:
        """Take in an order; return the error with which the main thread is to be stopped, if it is."""
        if order.number <= self.order.number:
            return None
        was_called = self.is_called
        self.order = order
        if order.generation is not None:
            self.members = order.generation.members
        return self.error if self.is_called and not was_called else None

    def news(self, where: Callable[[], Where], *, is_due: bool = False) -> Report | None:
        """Return the report to send: all facts, if one of them has changed, or it is time."""
        known = self._know()
        if known == self._known and not is_due:
            return None
        self._known = known
        self._num_reports += 1
        facts = {name: getattr(self, name) for name in _FACTS}
        heard, position = self.order.number, self.position
        return Report(number=self._num_reports, heard=heard, position=position, where=where(), **facts)

    def say_again(self) -> None:
        """Have the last report repeated, as its answer is needed soon."""
        self._known = None

    def _know(self) -> object:
        """Return the facts that are news: the position only under HOLD, no order that asks for nothing."""
        heard = 0 if self.task in (Task.WAIT, Task.RUN) else self.order.number
        position = self.position if self.task is Task.HOLD else -1
        return heard, position, *(getattr(self, name) for name in _FACTS)

    # ------------------------------------------------------------------ what is known

    @property
    def task(self) -> Task:
        return self.order.task

    @property
    def has_met(self) -> bool:
        """True if all ranks of the run have been connected."""
        return self.order is not NO_ORDER and (self._is_new or self.task is not Task.WAIT)

    @property
    def is_called(self) -> bool:
        """True if the main thread has to stop, as a rank is lost."""
        return self.task is Task.RECOVER and self.phase not in _UNINTERRUPTED

    @property
    def error(self) -> PeerFailure | None:
        """Error that stops the main thread, from a call until the generation that it leads to."""
        record = self.order.record
        return record.to_error(self.rank) if record is not None and self.task is Task.RECOVER else None

    @property
    def is_entering(self) -> bool:
        """True in a generation without its state: others may fail to get into it, too."""
        return self.phase is RankPhase.ENTERING

    @property
    def has_new(self) -> bool:
        return self.order.has_new

    @property
    def is_released(self) -> bool:
        """True if this process is to end with code 0."""
        return self.task is Task.LEAVE

    def has_ended_everywhere(self) -> bool:
        """Return True if this process has ended its run, and all members have."""
        return self.order.all_ended >= self.ended == self.begun

    def goes_on_without(self, place: int) -> bool:
        """Return True if the last generation that was heard of has nobody in a place."""
        return self.members is not None and place not in self.members

    # ------------------------------------------------------------------ runs

    def begin_run(self, name: str) -> None:
        self.begun, self.run = self.begun + 1, name
        if self.phase in _OUTSIDE and self.state_of >= 0:
            self.phase = RankPhase.RUNNING

    def end_run(self) -> None:
        self.ended = self.begun
        if self.phase in (RankPhase.RUNNING, RankPhase.STARTING):
            self.phase = RankPhase.IDLE

    def fail(self, why: str | None) -> None:
        """Note that this process ends because of a failure, and why the others need it, if they do."""
        if self.phase is not RankPhase.ENDED:
            self.phase, self.why = RankPhase.FAILED, why

    def leave(self) -> None:
        """Leave the job: the end of this process is no failure from now on."""
        self.phase = RankPhase.ENDED

    # ------------------------------------------------------------------ boundaries

    def begin_fit(self) -> None:
        """Begin a fit, in which boundaries have places; all ranks have passed equally many."""
        self._base = self.position

    def place_boundary(self, number: int, *, may_meet: bool) -> None:
        """Set how many boundaries of the fit lie before the one that comes next.

        Where ranks are lost some take a step again and others do not, and new ones have taken none: nobody
        can count what it has passed, and all give the same boundary the same number.
        """
        self.position, self.may_meet = self._base + number, may_meet

    def look(self) -> Passage:
        """Return what the main thread does at a boundary; it looks again while it waits."""
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

    # ------------------------------------------------------------------ leaving

    def ask(self, wish: Wish) -> None:
        """Note what a signal asks of this process. Also in a signal handler."""
        if self.wish is None or wish.kind is WishKind.STOP:
            self.wish = wish

    def end_boundaries(self) -> None:
        """Note that ranks meet at no boundary any more in this fit: if this one was to leave, all stop."""
        self.may_meet = False
        if self.wish is not None and self.wish.kind is not WishKind.STOP:
            self.wish = Wish(WishKind.STOP, self.wish.signal)

    # ------------------------------------------------------------------ generations

    def stand(self) -> None:
        """Note that this process has no state yet, and is ready to be let in; does not block."""
        self.phase, self.progress, self.rank = RankPhase.STANDING, None, self.place

    def stop(self, *, has_met: bool = False) -> None:
        """Note that the main thread has stopped, at the boundary where all meet if `has_met`.

        It commits nothing until it enters another generation.
        """
        if self.state_of < 0:
            self.stand()
        else:
            is_meeting = has_met and self.task is Task.MEET
            self.phase, self.progress = RankPhase.MEETING if is_meeting else RankPhase.STOPPED, None

    def answer(self, progress: Progress) -> None:
        """Set where this process has stopped: the same until it enters another generation."""
        if self.progress is None and self.phase in (RankPhase.STOPPED, RankPhase.MEETING):
            self.progress = progress

    def enter_next(self) -> NewGeneration | None:
        """Enter and return the generation that this process is to enter, if any; it has stopped before."""
        new = self.order.generation if self.task is Task.ENTER else None
        if new is None or self.place not in new.members or new.number <= self.generation:
            return None
        self.generation, self.rank = new.number, new.members.index(self.place)
        self.phase, self.progress = RankPhase.ENTERING, None
        self.position = self._base = 0
        return new

    def settle(self) -> None:
        """Note that this process has the state of its generation; raise if another rank is lost already."""
        if self.is_called and self.error is not None:
            raise self.error
        self.state_of, self.phase = self.generation, RankPhase.RUNNING

"""The processes of a job, as the control server knows them: slots, orders and actions (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from lightning_ddp.supervise.failure_record import FailureRecord, Identity
from lightning_ddp.supervise.orders import JobPhase, Order, RankPhase, Report, Task, WishKind

ASLEEP_S = 1.0  # seconds after a deadline at which a first look shows that this very process was stopped
STEPS_TO_FORGET = 100  # committed steps after which earlier failures count no more
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 60.0
_ASK_AGAIN_S = 15.0
_REPEAT_S = 0.5  # least time between an order and its repetition to a process that has not heard it
_AWAITS = frozenset({JobPhase.HOLDING, JobPhase.MEETING, JobPhase.RECOVERING, JobPhase.FORMING})
"""Phases whose order the members have to follow in time."""
_STOPPED = frozenset({RankPhase.STOPPED, RankPhase.MEETING})
OUT = frozenset({RankPhase.FINISHED, RankPhase.ENDED})  # phases in which a process answers nobody
_INACTIVE = OUT | {RankPhase.IDLE, RankPhase.FAILED}


class ProcessState(Enum):
    """Role of a process in the job, from waiting to gone: see `docs/concepts/elastic-protocol.md`."""

    STANDING = auto()
    JOINING = auto()
    MEMBER = auto()
    CONDEMNED = auto()
    RELEASED = auto()
    GONE = auto()


_TRAINING = (ProcessState.MEMBER, ProcessState.JOINING)
_LOST = (ProcessState.CONDEMNED, ProcessState.GONE)


@dataclass(eq=False, kw_only=True)
class Process:
    """A connected process as the server knows it: identity, rank, state, last report and last order."""

    number: int  # of the connection
    identity: Identity  # of its hello; its rank is the place, that in the first generation
    state: ProcessState
    rank: int  # in the last generation that it was a member of
    is_launcher: bool
    heard_at: float  # time of the last report, or of the connection
    moved_at: float = 0.0  # time of the first report with the present count of progress
    report: Report = field(default_factory=Report)  # the last one
    order: Order | None = None  # the last one that was sent
    ordered_at: float = 0.0
    is_connected: bool = True
    has_exited: bool = False
    is_dismissed: bool = False  # True if its node was asked to leave

    def __hash__(self) -> int:
        return self.number  # not the address: sets of processes have the same order whenever the same happens

    @property
    def place(self) -> int:
        return self.identity.rank

    @property
    def node(self) -> int:
        return self.identity.node_rank

    @property
    def who(self) -> Identity:
        """Identity of this process, with its rank in the last generation that it belonged to."""
        return self.identity if self.rank == self.place else replace(self.identity, rank=self.rank)

    def failure(self, message: str, **more: Any) -> FailureRecord:
        return FailureRecord.of_identity(self.who, message, **more)

    @property
    def is_member(self) -> bool:
        """True if this process is one of the ranks of the current generation, and not lost."""
        return self.state in _TRAINING

    @property
    def phase(self) -> RankPhase:
        return self.report.phase

    @property
    def is_active(self) -> bool:
        """True if this process is in a run (a fit, a test ...), or on the way to its first one."""
        return self.phase not in _INACTIVE

    @property
    def has_state(self) -> bool:
        return self.report.state_of >= 0

    @property
    def has_heard(self) -> bool:
        """True if the last report of this process confirms the last order that it was sent."""
        return self.order is not None and self.report.heard == self.order.number

    @property
    def wants_to_leave(self) -> bool:
        wish = self.report.wish
        return self.is_dismissed or (wish is not None and wish.kind is not WishKind.STOP)


class Roster:
    """All processes of a job of `num_places` initial ranks: those that train, wait or have left."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.living: dict[int, Process] = {}  # processes that are not gone, by their numbers
        self.members: list[Process] = []  # of the last generation formed, by rank, with those lost since
        self.outside: dict[int, Process] = {}  # those that belong to no generation, by their numbers
        self.nodes: dict[int, int] = {}  # place -> its node
        self.ended_early: set[tuple[int, int | None]] = set()  # place and start: ended before they connected
        self._known: defaultdict[tuple[int | None, int | None], list[Process]] = defaultdict(list)
        """Node and process id -> the processes that had them, one after another, also if they are gone."""
        self._num_connected = 0

    @property
    def remaining(self) -> list[Process]:
        """Processes of the current generation that are not lost, by rank."""
        return [process for process in self.members if process.is_member]

    @property
    def standing(self) -> list[Process]:
        """New processes that wait to be admitted to the next generation."""
        return [process for process in self.outside.values() if process.state is ProcessState.STANDING]

    def of(self, record: FailureRecord | Identity) -> Process | None:
        """Return the process with a record's node and process id, as its rank may be outdated, or None.

        A node that is back may use ids again: then it is the one with the record's start, or the last.
        """
        known = self._known.get((record.node_rank, record.pid), [])
        last = known[-1] if known else None
        return next((process for process in known if process.identity.start == record.start), last)

    def at(self, place: int) -> list[Process]:
        """Return the living processes of an initial rank: two if its node is back before its loss is seen."""
        return [process for process in self.living.values() if process.place == place]

    def launcher_of(self, place: int) -> Process | None:
        """Return the launcher on the node of an initial rank, or None; always None on the server's node."""
        node = self.nodes.get(place, 0)
        for process in self.living.values() if node else ():
            is_it = process.is_launcher and process.node == node and process.is_connected
            if is_it and process.state is not ProcessState.RELEASED and not process.wants_to_leave:
                return process
        return None

    def add(self, who: Identity, now: float, *, is_launcher: bool) -> Process:
        """Register and return a connected process: in training, or waiting if it was started later."""
        self._num_connected += 1
        process = Process(
            number=self._num_connected,
            identity=who,
            state=ProcessState.MEMBER if who.start is None else ProcessState.STANDING,
            rank=who.rank,
            is_launcher=is_launcher,
            heard_at=now,
            moved_at=now,
        )
        self._known[who.node_rank, who.pid].append(process)
        self.living[process.number] = process
        if who.start is None:
            self.nodes[who.rank] = who.node_rank
            self.members.append(process)
        else:
            self.outside[process.number] = process
        return process

    def put_out(self, process: Process) -> None:
        """Remove a process from the current generation, but keep it as a process of the job."""
        self.members.remove(process)
        self.outside[process.number] = process

    def set_members(self, members: list[Process]) -> None:
        """Set the processes of the next generation in the order of their new ranks, and assign these."""
        self.members, inside = members, set(members)
        self.outside = {n: process for n, process in self.living.items() if process not in inside}
        for rank, process in enumerate(members):
            process.rank = rank

    def remove(self, process: Process) -> None:
        process.state = ProcessState.GONE
        self.living.pop(process.number, None)
        self.outside.pop(process.number, None)


# ---------------------------------------------------------------------- actions


@dataclass(frozen=True)
class Send:
    process: Process
    order: Order


@dataclass(frozen=True)
class End:  # close its connection, and kill it if it is on the server's node
    process: Process


@dataclass(frozen=True)
class StartProcess:  # have a launcher (None: this node's) start a process for an initial rank
    launcher: Process | None
    place: int
    number: int


@dataclass(frozen=True)
class Say:  # print to standard error
    text: str


@dataclass(frozen=True)
class Accuse:  # end the job with this failure
    record: FailureRecord


@dataclass(frozen=True)
class Unexplained:  # lose this member, or end the job: it has said only that it fails
    process: Process


Action = Send | End | StartProcess | Say | Accuse | Unexplained


# ---------------------------------------------------------------------- slots


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
        """Plan the replacement of a process that was lost at committed step `step`."""
        is_soon = self.joined_at is not None and step - self.joined_at < STEPS_TO_FORGET
        self.ended(now, is_failure=is_soon)

    def ended(self, now: float, *, is_failure: bool = True) -> None:
        """Plan the start of the next process: at once, or after a delay that doubles with each failure."""
        self.num_failed = self.num_failed + 1 if is_failure else 0
        self.is_awaited, self.joined_at = False, None
        delay_s = min(_FIRST_DELAY_S * 2 ** (self.num_failed - 1), _LONGEST_DELAY_S)
        self.opens_at = now + (delay_s if self.num_failed else 0.0)

    def close(self) -> None:
        self.is_awaited, self.opens_at = False, None

    def joined(self, step: int) -> None:
        """Record that the new process trains from committed step `step` on; plan no other start."""
        self.close()
        self.joined_at = step

    def stands_again(self) -> None:
        """Record that the new process did not get the training state, and waits to join again."""
        self.is_awaited, self.joined_at = True, None


class Slots:
    """The slots of a job, one for each initial rank: when a new process is to be started in each."""

    def __init__(self, roster: Roster, most: int | None) -> None:
        self._roster = roster
        self._most = most  # starts in a slot without `STEPS_TO_FORGET` steps in between; None for none at all
        self._slots: defaultdict[int, Slot] = defaultdict(Slot)

    def __getitem__(self, place: int) -> Slot:
        return self._slots[place]

    def reopen(self, node: int, now: float) -> None:
        """Plan new processes for all vacant ranks of a node whose launcher has connected or gone.

        The slot of a lost member is empty once the next generation is formed: `Slot.lost`.
        """
        of_members = {process.place for process in self._roster.members}
        for place, its in self._roster.nodes.items():
            if its == node and place not in of_members and not self._roster.at(place):
                slot = self[place]
                slot.is_awaited = False
                if slot.opens_at is None:
                    slot.num_failed, slot.opens_at = 0, now

    def may_come(self, who: Identity, *, is_launcher: bool) -> bool:
        """Return True if a connecting process was requested, or is the launcher of a node that is back."""
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
        """Return the time at which `due` or `ready` next has something to return; None for never."""
        found, stood_at = [], {process.place for process in self._roster.standing}
        for place, slot in self._slots.items() if self._most is not None else ():
            may_start = self._may_start(place)
            if slot.is_awaited and may_start:
                found.append(slot.asked_at + _ASK_AGAIN_S)
            if slot.opens_at is not None and (may_start or place in stood_at):
                found.append(slot.opens_at)
        return min(found, default=None)

    def _may_start(self, place: int) -> bool:
        """Return True if an initial rank has no living process, and its node has a launcher to start one."""
        is_here = self._roster.nodes.get(place, 0) == 0
        return not self._roster.at(place) and (is_here or self._roster.launcher_of(place) is not None)


# ---------------------------------------------------------------------- orders in force


class OrderBook:
    """Orders of a job's phase: who has not followed them in time, and to whom they are sent when.

    A process has to follow an order, or to report while others wait for it, within `grace_s` seconds. Orders
    are numbered, and repeated until a process confirms them. All processes of one state get the same object,
    so that it is packed once.
    """

    def __init__(self, grace_s: float, answer_s: float | None) -> None:
        self.phase = JobPhase.CONNECTING
        self.since = 0.0  # time when the phase began
        self.awaited: set[Process] = set()  # have not followed the order, or are lost and have not ended
        self._grace_s, self._look_at = grace_s, 0.0
        self._answer_s = answer_s  # least time between answers to a process; None: only if it is not informed
        self._template: Order | None = None
        self._orders: dict[ProcessState, Order] = {}
        self._number = 0

    def begin(self, phase: JobPhase, members: Iterable[Process], now: float) -> None:
        """Set the job's phase, and note which of `members` have to follow an order in it. Does not block."""
        self.phase = phase
        self.restart(now)
        asked = members if phase in _AWAITS else ()
        self.awaited = {process for process in asked if process.is_active or phase is not JobPhase.HOLDING}

    def restart(self, now: float) -> None:
        """Restart the time limits of the job's phase, as if it began at time `now`."""
        self.since, self._look_at = now, now + self._grace_s

    def note(self, process: Process, generation: int) -> None:
        """Update whether the job still waits for a rank to follow the order; `generation` is the job's."""
        report = process.report
        if not process.is_member or self.phase not in _AWAITS:
            return
        follows = process.has_heard
        match self.phase:
            case JobPhase.HOLDING:
                follows |= not process.is_active
            case JobPhase.MEETING:
                follows &= report.phase is RankPhase.MEETING and report.progress is not None
            case JobPhase.RECOVERING:
                has_stopped = report.phase in _STOPPED and report.progress is not None
                follows &= has_stopped or report.phase is RankPhase.STANDING
            case JobPhase.FORMING:
                follows = report.generation == report.state_of == generation
        if follows:
            self.awaited.discard(process)
        else:
            self.awaited.add(process)

    def deadline(self) -> float | None:
        """Return the earliest time at which a process can be late in following its order; None for never."""
        return self._look_at if self.awaited else None

    def late(self, now: float) -> list[Process]:
        """Return the processes that have not followed the order in time, sorted by connection number."""
        at = self.deadline()
        if at is None or now < at:
            return []
        late = {process for process in self.awaited if self._is_late(process, now)}
        heard_at = (max(process.heard_at, self.since) for process in self.awaited - late)
        self._look_at = max(self._look_at, min(heard_at, default=now) + self._grace_s)
        return sorted(late, key=lambda process: process.number)

    def _is_late(self, process: Process, now: float) -> bool:
        is_strict = self.phase is JobPhase.RECOVERING and process.state is not ProcessState.CONDEMNED
        is_strict |= process.state is ProcessState.JOINING
        heard_at = self.since if is_strict else max(process.heard_at, self.since)
        return heard_at + self._grace_s <= now

    def give(
        self, template: Order, touched: Iterable[Process], living: Iterable[Process], now: float
    ) -> list[Send]:
        """Return the orders to send now, and record them as sent; `template` is that of the training ranks.

        Processes that have reported, or changed, since the last call are `touched`, all are `living`.
        """
        if template != self._template:
            self._template, self._orders, touched = template, {}, living
        found = []
        for process in touched:
            if process.state in _LOST or not process.is_connected:
                continue
            order = self._order_of(process, template)
            knows = process.report.heard >= order.number
            is_old = now - process.ordered_at >= (self._answer_s or _REPEAT_S)
            if process.order is not order or (is_old and (not knows or self._answer_s is not None)):
                process.order, process.ordered_at = order, now
                found.append(Send(process, order))
        return found

    def _order_of(self, process: Process, template: Order) -> Order:
        """Return the order to send to a process, never older than the last one that it was sent."""
        state = ProcessState.MEMBER if process.is_member else process.state
        last, order = process.order, self._orders.get(state)
        if order is None or (last is not None and last.number > order.number):
            self._number += 1
            order = template
            if state is not ProcessState.MEMBER:
                task = Task.WAIT if state is ProcessState.STANDING else Task.LEAVE
                order = Order(task=task, all_ended=template.all_ended)
            order = self._orders[state] = replace(order, number=self._number)
        return order

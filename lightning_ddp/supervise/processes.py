"""The processes of a job, as the control server knows them, and actions that `JobState` requests (pure)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from lightning_ddp.supervise.failure_record import FailureRecord, Identity
from lightning_ddp.supervise.orders import NO_REPORT, Order, RankPhase, Report, WishKind

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


@dataclass(eq=False, kw_only=True)
class Process:
    """A connected process as the server knows it: identity, rank, state, last report and last order."""

    number: int  # of the connection
    identity: Identity  # of its hello, with its place as rank
    state: ProcessState
    rank: int  # in the last generation that it was a member of
    is_launcher: bool
    heard_at: float  # time of the last report, or of the connection
    moved_at: float = 0.0  # time of the first report with the present count of progress
    report: Report = NO_REPORT  # the last one
    order: Order | None = None  # the last one that was sent
    ordered_at: float = 0.0
    is_connected: bool = True
    has_exited: bool = False
    is_dismissed: bool = False  # True if its node was asked to leave

    def __hash__(self) -> int:
        return self.number  # not the address: sets of processes have the same order whenever the same happens

    @property
    def place(self) -> int:
        """Rank that this process, or the lost one that it replaces, had in the first generation."""
        return self.identity.rank

    @property
    def node(self) -> int:
        return self.identity.node_rank

    @property
    def who(self) -> Identity:
        """Identity of this process (node, host, pid) with its rank in the current generation."""
        return self.identity if self.rank == self.place else replace(self.identity, rank=self.rank)

    def failure(self, message: str, **more: Any) -> FailureRecord:
        """Return a failure record of this process, with a message and more fields."""
        return FailureRecord.of_identity(self.who, message, **more)

    @property
    def is_member(self) -> bool:
        """True if this process is one of the ranks of the current generation, and not lost."""
        return self.state in (ProcessState.MEMBER, ProcessState.JOINING)

    @property
    def phase(self) -> RankPhase:
        return self.report.phase

    @property
    def is_active(self) -> bool:
        """True if this process is in a run (a fit, a test ...), or on the way to its first one."""
        return self.phase not in _INACTIVE

    @property
    def has_state(self) -> bool:
        """True if this process has ever had the training state."""
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
        self._known: dict[tuple[int | None, int | None], Process] = {}
        """Node and process id -> the last process that had them, also if it is gone."""
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
        """Return the process with a record's node and process id, as its rank may be outdated, or None."""
        return self._known.get((record.node_rank, record.pid))

    def at(self, place: int) -> list[Process]:
        """Return the living processes of an initial rank: two if its node is back before its loss is seen."""
        return [process for process in self.living.values() if process.place == place]

    def launcher_of(self, place: int) -> Process | None:
        """Return the launcher process on the node of an initial rank, or None; None on the server's node."""
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
        self._known[who.node_rank, who.pid] = self.living[process.number] = process
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
    """Action of the server: send an order to a process."""

    process: Process
    order: Order


@dataclass(frozen=True)
class End:
    """Action of the server: close the connection to a process, and kill it if it is on the server's node."""

    process: Process


@dataclass(frozen=True)
class StartProcess:
    """Action of the server: have a launcher (None: this node's) start a new process for an initial rank."""

    launcher: Process | None
    place: int
    number: int


@dataclass(frozen=True)
class Say:
    """Action of the server: print a text to standard error."""

    text: str


@dataclass(frozen=True)
class Accuse:
    """Action of the server: end the job with the failure `record`."""

    record: FailureRecord


Action = Send | End | StartProcess | Say | Accuse

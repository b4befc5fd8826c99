"""The processes of a job, as the control server knows them, and actions that `JobState` requests (pure)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from lightning_ddp.supervise.failure_record import FailureRecord, Identity
from lightning_ddp.supervise.orders import NO_REPORT, Order, RankPhase, Report, WishKind

__all__ = ["OUT", "Accuse", "End", "Process", "ProcessState", "Roster", "Say", "Send", "StartProcess"]

OUT = frozenset({RankPhase.FINISHED, RankPhase.ENDED})  # phases in which a process answers nobody
_INACTIVE = OUT | {RankPhase.IDLE, RankPhase.FAILED}


class ProcessState(Enum):
    """Part of a process in the job; `docs/concepts/elastic-protocol.md` describes each."""

    STANDING = auto()
    JOINING = auto()
    MEMBER = auto()
    CONDEMNED = auto()
    RELEASED = auto()
    GONE = auto()


@dataclass(eq=False, kw_only=True)
class Process:
    """A process that has connected: it has one place and one connection."""

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
        """Number of its slot, which is its rank in the first generation."""
        return self.identity.rank

    @property
    def node(self) -> int:
        return self.identity.node_rank

    @property
    def who(self) -> Identity:
        """Identity with the present rank."""
        return self.identity if self.rank == self.place else replace(self.identity, rank=self.rank)

    def failure(self, message: str, **more: Any) -> FailureRecord:
        """Return the record of a failure of this process, as `FailureRecord.of_identity`."""
        return FailureRecord.of_identity(self.who, message, **more)

    @property
    def is_member(self) -> bool:
        """True if it is in the present generation and not lost."""
        return self.state in (ProcessState.MEMBER, ProcessState.JOINING)

    @property
    def phase(self) -> RankPhase:
        return self.report.phase

    @property
    def is_active(self) -> bool:
        """True if it is in a run, or on the way to its first one."""
        return self.phase not in _INACTIVE

    @property
    def has_state(self) -> bool:
        """True if it has ever had the state of a generation."""
        return self.report.state_of >= 0

    @property
    def has_heard(self) -> bool:
        """True if its last report was made in the knowledge of its last order."""
        return self.order is not None and self.report.heard == self.order.number

    @property
    def wants_to_leave(self) -> bool:
        wish = self.report.wish
        return self.is_dismissed or (wish is not None and wish.kind is not WishKind.STOP)


class Roster:
    """All processes of a job with `num_places` places."""

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
        """Members that are not lost."""
        return [process for process in self.members if process.is_member]

    @property
    def standing(self) -> list[Process]:
        """New processes that wait to be let in."""
        return [process for process in self.outside.values() if process.state is ProcessState.STANDING]

    def of(self, record: FailureRecord | Identity) -> Process | None:
        """Return the process of a record, whose rank may be of another generation."""
        return self._known.get((record.node_rank, record.pid))

    def at(self, place: int) -> list[Process]:
        """Return the living processes of a place: two, where a node is back before its loss is known."""
        return [process for process in self.living.values() if process.place == place]

    def launcher_of(self, place: int) -> Process | None:
        """Return the process that starts others on the node of a place; None on the server's node."""
        node = self.nodes.get(place, 0)
        for process in self.living.values() if node else ():
            is_it = process.is_launcher and process.node == node and process.is_connected
            if is_it and process.state is not ProcessState.RELEASED and not process.wants_to_leave:
                return process
        return None

    def add(self, who: Identity, now: float, *, is_launcher: bool) -> Process:
        """Add a process that has connected: a member if it follows no start."""
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
        """Take a process out of the present generation."""
        self.members.remove(process)
        self.outside[process.number] = process

    def set_members(self, members: list[Process]) -> None:
        """Set the members of the next generation, by their ranks in it."""
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
    """Action of the server: close a connection, and kill its process on the server's node."""

    process: Process


@dataclass(frozen=True)
class StartProcess:
    """Action of the server: start a process in a place, by a launcher, or on its own node if that is None."""

    launcher: Process | None
    place: int
    number: int


@dataclass(frozen=True)
class Say:
    """Action of the server: print a text for people."""

    text: str


@dataclass(frozen=True)
class Accuse:
    """Action of the server: end the job with this failure."""

    record: FailureRecord


Action = Send | End | StartProcess | Say | Accuse

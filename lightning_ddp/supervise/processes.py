"""The processes of a job, as the control server knows them. Pure: no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from lightning_ddp.supervise.failure_record import FailureRecord, Identity
from lightning_ddp.supervise.orders import Order, RankPhase, Report, WishKind

__all__ = ["OUT", "Process", "ProcessState", "Roster"]

OUT = frozenset({RankPhase.FINISHED, RankPhase.ENDED})
"""In which a process answers nobody any more."""
_INACTIVE = OUT | {RankPhase.IDLE, RankPhase.FAILED}


class ProcessState(Enum):
    """What a process is to the job."""

    STANDING = auto()
    """It was started in the place of a lost one, and is no member."""
    JOINING = auto()
    """A member of the present generation that has not got its state."""
    MEMBER = auto()
    CONDEMNED = auto()
    """It is lost, and not yet known to have ended: it is killed, and waited for."""
    RELEASED = auto()
    """It is told to end, and is no failure."""
    GONE = auto()


@dataclass(eq=False, kw_only=True)
class Process:
    """A process that has connected: an incarnation, which has one place and one connection."""

    number: int
    """Grows from connection to connection."""
    identity: Identity
    """As it has said in the beginning, with its place as rank."""
    state: ProcessState
    rank: int
    """In the last generation that it was a member of."""
    is_launcher: bool
    start: int | None
    """Which start in its place it follows, if it was to join."""
    heard_at: float
    report: Report | None = None
    """The last."""
    order: Order | None = None
    """The last that was sent."""
    ordered_at: float = 0.0
    is_connected: bool = True
    has_exited: bool = False
    is_dismissed: bool = False
    """Whether its node was asked to leave."""

    def __hash__(self) -> int:
        return self.number  # not the address: sets of processes have the same order whenever the same happens

    @property
    def place(self) -> int:
        """The rank of its slot in the beginning, which never changes."""
        return self.identity.rank

    @property
    def node(self) -> int:
        """Where it runs."""
        return self.identity.node_rank

    @property
    def who(self) -> Identity:
        """The process with its present rank."""
        return self.identity if self.rank == self.place else replace(self.identity, rank=self.rank)

    @property
    def is_member(self) -> bool:
        """Whether it belongs to the present generation, and is not lost: those in `Roster.members` may be."""
        return self.state in (ProcessState.MEMBER, ProcessState.JOINING)

    @property
    def phase(self) -> RankPhase:
        """What it says that it is."""
        return RankPhase.STARTING if self.report is None else self.report.phase

    @property
    def is_active(self) -> bool:
        """Whether it is in a run, or on the way to its first one."""
        return self.phase not in _INACTIVE

    @property
    def num_ended(self) -> int:
        """Runs that it has ended."""
        return 0 if self.report is None else self.report.ended

    @property
    def has_state(self) -> bool:
        """Whether it has ever had the state of a generation."""
        return self.report is not None and self.report.state_of >= 0

    @property
    def has_heard(self) -> bool:
        """Whether its last report was made in the knowledge of its last order."""
        is_told = self.report is not None and self.order is not None
        return is_told and self.report.heard == self.order.number  # type: ignore[union-attr]

    @property
    def wants_to_leave(self) -> bool:
        """Whether it was asked to leave."""
        wish = self.report.wish if self.report is not None else None
        return self.is_dismissed or (wish is not None and wish.kind is not WishKind.STOP)


class Roster:
    """All processes of a job, by what they are known by.

    Args:
        num_places: places of the job.
    """

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.living: dict[int, Process] = {}
        """Those that are not gone, by their numbers."""
        self.members: list[Process] = []
        """Of the last generation that was formed, by rank; also those that were lost since."""
        self.outside: dict[int, Process] = {}
        """Those of the living that belong to no generation, by their numbers."""
        self.nodes: dict[int, int] = {}
        """Place -> its node."""
        self._known: dict[tuple[int | None, int | None], Process] = {}
        """By node and process id: those that are gone, too."""
        self.ended_early: set[tuple[int, int | None]] = set()
        """Place and start of those that have ended before they had connected."""
        self._num_connected = 0

    @property
    def remaining(self) -> list[Process]:
        """Members that are not lost."""
        return [process for process in self.members if process.is_member]

    @property
    def standing(self) -> list[Process]:
        """Those that were started in the place of lost ones, and wait to be let in."""
        return [process for process in self.outside.values() if process.state is ProcessState.STANDING]

    def of(self, record: FailureRecord | Identity) -> Process | None:
        """The process that a record tells of. Ranks are not asked for: they may be of another generation."""
        known = self._known.get((record.node_rank, record.pid))
        if known is None and record.pid is None:
            known = next((process for process in self.members if process.rank == record.rank), None)
        return known

    def at(self, place: int) -> list[Process]:
        """Those that have a place: two, where a node is back before its loss is known."""
        return [process for process in self.living.values() if process.place == place]

    def launcher_of(self, place: int) -> Process | None:
        """Who starts processes on the node of a place, unless that is the server's own, or leaves."""
        node = self.nodes.get(place, 0)
        for process in self.living.values() if node else ():
            is_it = process.is_launcher and process.node == node and process.is_connected
            if is_it and process.state is not ProcessState.RELEASED and not process.wants_to_leave:
                return process
        return None

    def add(self, who: Identity, now: float, *, start: int | None, is_launcher: bool) -> Process:
        """A process has connected: as a first one if it follows no start."""
        self._num_connected += 1
        process = Process(
            number=self._num_connected,
            identity=who,
            state=ProcessState.MEMBER if start is None else ProcessState.STANDING,
            rank=who.rank,
            is_launcher=is_launcher,
            start=start,
            heard_at=now,
        )
        self._known[who.node_rank, who.pid] = self.living[process.number] = process
        if start is None:
            self.nodes[who.rank] = who.node_rank
            self.members.append(process)
        else:
            self.outside[process.number] = process
        return process

    def put_out(self, process: Process) -> None:
        """A process belongs to the present generation no more."""
        self.members.remove(process)
        self.outside[process.number] = process

    def set_members(self, members: list[Process]) -> None:
        """The next generation is formed."""
        self.members, inside = members, set(members)
        self.outside = {n: process for n, process in self.living.items() if process not in inside}

    def remove(self, process: Process) -> None:
        """A process is gone."""
        process.state = ProcessState.GONE
        self.living.pop(process.number, None)
        self.outside.pop(process.number, None)

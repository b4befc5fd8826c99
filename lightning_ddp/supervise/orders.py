"""Reports and orders: what a process is, and what it is to do.

`docs/concepts/elastic-protocol.md` describes their fields and values. A report carries all facts, so that the
next one makes good for one that was lost, doubled or late. Whatever is older than the last is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from lightning_ddp.supervise.failure_record import FailureRecord, Where
from lightning_ddp.supervise.protocol import Message, Text


class RankPhase(StrEnum):
    """Phase of a process, as it reports itself: starting, running, stopped, failed, ended ..."""

    STARTING = "starting"
    STANDING = "standing"
    RUNNING = "running"
    MEETING = "meeting"
    STOPPED = "stopped"
    ENTERING = "entering"
    FINISHED = "finished"
    IDLE = "idle"
    FAILED = "failed"
    ENDED = "ended"


class WishKind(StrEnum):
    """Kind of request that a signal makes: this process or its node leaves the run, or all ranks stop."""

    LEAVE = "leave"
    LEAVE_NODE = "leave_node"
    STOP = "stop"


@dataclass(frozen=True)
class Wish:
    """Request that a signal made to a process, to leave or to stop; part of all its later reports."""

    kind: WishKind
    signal: int
    is_requeue: bool = False  # True if the cluster starts the run again


@dataclass(frozen=True)
class Progress:
    """Training progress of a rank when it was interrupted, or stopped for others to join or leave."""

    step: int
    is_clean: bool
    is_trying: bool
    phase: int


class Report(Message):
    """Message with all facts of a process for the server: sent when one changes, and periodically.

    The defaults are what is known of a process that has sent none.
    """

    number: int = 0
    heard: int = 0
    phase: RankPhase = RankPhase.STARTING
    generation: int = 0
    state_of: int = -1
    position: int = 0
    begun: int = 0
    ended: int = 0
    run: Text = ""
    progress: Progress | None = None
    wish: Wish | None = None
    why: Text | None = None
    where: Where = Where()


class Task(StrEnum):
    WAIT = "wait"
    RUN = "run"
    HOLD = "hold"
    MEET = "meet"
    STOP = "stop"
    RECOVER = "recover"
    ENTER = "enter"
    LEAVE = "leave"


class JobPhase(Enum):
    """Phase of a job: the task of its ranks in that phase, and what the job waits for."""

    CONNECTING = Task.WAIT, "all ranks to connect"
    RUNNING = Task.RUN, "nothing: all train"
    SHORT = Task.ENTER, "enough processes to join, while nobody takes a step"
    HOLDING = Task.HOLD, "the position of each member, none of which passes a boundary"
    MEETING = Task.MEET, "all members to stop at one boundary, where others join or leave"
    STOPPING = Task.STOP, "all members to stop at one boundary, and end"
    RECOVERING = Task.RECOVER, "all members to stop, and those that are lost to end"
    FORMING = Task.ENTER, "all members of the next generation to have its state"
    OVER = Task.LEAVE, "nothing: the run ends"

    @property
    def task(self) -> Task:
        return self.value[0]


@dataclass(frozen=True)
class NewGeneration:
    """A new set of ranks of an elastic job (by initial rank), and the state from which they continue."""

    number: int
    members: tuple[int, ...]  # by their new ranks
    before: tuple[int, ...]  # members of the generation before, by their ranks there
    step: int
    source: int
    behind: tuple[int, ...]
    joined: tuple[int, ...]
    left: tuple[int, ...]
    is_retried: bool
    is_met: bool
    phase: int


class Order(Message):
    """Message of the server that tells a process what to do until the next one: run, stop, recover ...

    The defaults are what a process does before the first one.
    """

    number: int = 0
    task: Task = Task.WAIT
    position: int = 0
    has_new: bool = False
    wish: Wish | None = None
    record: FailureRecord | None = None
    generation: NewGeneration | None = None
    all_ended: int = -1

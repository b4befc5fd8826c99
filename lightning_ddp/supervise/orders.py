"""Reports and orders: the two kinds of message that say what a process is, and what it is to do.

A rank reports facts, never events: each report says all, so that one that is lost, doubled or late changes
nothing once the next has come. The server answers with the order that is in force for the sender. Reports and
orders carry numbers that grow; whoever receives an older one ignores it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from lightning_ddp.supervise.failure_record import FailureRecord, Where
from lightning_ddp.supervise.protocol import Message, Text

__all__ = [
    "TASKS",
    "JobPhase",
    "NewGeneration",
    "Order",
    "Progress",
    "RankPhase",
    "Report",
    "Task",
    "Wish",
    "WishKind",
]


class RankPhase(StrEnum):
    """What a process of the run is, by its own word."""

    STARTING = "starting"
    """It has connected, and is no member that trains yet."""
    STANDING = "standing"
    """It was started in the place of a lost process, and waits before its first step to be let in."""
    RUNNING = "running"
    """It has the state of its generation, and trains, tests ..."""
    MEETING = "meeting"
    """It stands at the boundary on which all have agreed."""
    STOPPED = "stopped"
    """A failure has interrupted it; it commits nothing until it enters another generation."""
    ENTERING = "entering"
    """It connects to the others of a generation, and takes or gives its state."""
    FINISHED = "finished"
    """It has stopped for a signal, and answers nobody any more."""
    IDLE = "idle"
    """Its run has ended, and no other one has begun."""
    FAILED = "failed"
    """It ends because of a failure."""
    ENDED = "ended"
    """It has left the run: the end of its process is no failure."""


class WishKind(StrEnum):
    """What a signal asks of a process."""

    LEAVE = "leave"
    """That the others go on without it."""
    LEAVE_NODE = "leave_node"
    """That the others go on without its node."""
    STOP = "stop"
    """That all stop."""


@dataclass(frozen=True)
class Wish:
    """What a process was asked by a signal; it stays in each of its reports from then on."""

    kind: WishKind
    signal: int
    is_requeue: bool = False
    """Whether the cluster starts the run again."""


@dataclass(frozen=True)
class Progress:
    """Where a rank was interrupted, or has met the others."""

    step: int
    """Optimizer steps that it has committed."""
    is_clean: bool
    """Whether its state is that after this step."""
    is_trying: bool
    """Whether the next step had begun."""
    phase: int
    """Parts of the loops (batches, validations, ends of epochs ...) that it has finished."""


class Report(Message):
    """All that a process says of itself: sent when a fact changes, and once a period."""

    number: int
    """Grows from report to report."""
    heard: int
    """Number of the last order that it has heard."""
    phase: RankPhase
    generation: int
    """The last that it has entered."""
    state_of: int
    """The last generation whose state it has; -1 for none."""
    position: int
    """Number of the boundary that it has passed last: of all that it has passed, or, where a fit may lose
    ranks, as `committed << 32` and the batches since then."""
    begun: int
    """Runs (fits, tests ...) that it has begun."""
    ended: int
    """Runs that it has ended."""
    run: Text
    """Name of the last."""
    progress: Progress | None
    """Once it has stopped or met the others."""
    wish: Wish | None
    why: Text | None
    """Why it cannot go on."""
    where: Where
    """What it does, to find one that stalls; no change of this alone is reported at once."""


class Task(StrEnum):
    """What a process is to do."""

    WAIT = "wait"
    """Nothing yet: not all have come, or it is not let in yet."""
    RUN = "run"
    """Go on."""
    HOLD = "hold"
    """Pass no boundary until the next order; the answer is the position in the report."""
    MEET = "meet"
    """Stop at the first boundary numbered `position` or more that may be one: others join or leave there."""
    STOP = "stop"
    """Stop at the first boundary numbered `position` or more, for a signal, and end."""
    RECOVER = "recover"
    """Stop at once and say where: a rank is lost."""
    ENTER = "enter"
    """Enter `generation`, and pass no boundary until the next order."""
    LEAVE = "leave"
    """End with code 0: the others go on without this process, or have ended."""


class JobPhase(Enum):
    """What the job waits for."""

    CONNECTING = auto()
    """All ranks to connect."""
    RUNNING = auto()
    """Nothing: all train."""
    HOLDING = auto()
    """The position of each member, none of which passes a boundary; or for enough processes to join."""
    MEETING = auto()
    """All members to stop at one boundary, where others join or leave."""
    STOPPING = auto()
    """All members to stop at one boundary, and end."""
    RECOVERING = auto()
    """All members to stop, and those that are lost to end."""
    FORMING = auto()
    """All members of the next generation to have its state."""
    OVER = auto()
    """Nothing: the run ends."""


TASKS = {
    JobPhase.CONNECTING: Task.WAIT,
    JobPhase.RUNNING: Task.RUN,
    JobPhase.HOLDING: Task.HOLD,
    JobPhase.MEETING: Task.MEET,
    JobPhase.STOPPING: Task.STOP,
    JobPhase.RECOVERING: Task.RECOVER,
    JobPhase.FORMING: Task.ENTER,
    JobPhase.OVER: Task.LEAVE,
}
"""Phase -> the order of a member."""


@dataclass(frozen=True)
class NewGeneration:
    """Who goes on, and from which state. Processes are named by their places: their first ranks."""

    number: int
    members: tuple[int, ...]
    """By their new ranks."""
    before: tuple[int, ...]
    """The members of the generation before, by their ranks there."""
    step: int
    """Optimizer steps that are committed."""
    source: int
    """Who has that state."""
    behind: tuple[int, ...]
    """Who copies it."""
    joined: tuple[int, ...]
    """Members that were not in the generation before: they take over all that `source` has."""
    left: tuple[int, ...]
    """Who has left, as it was asked to, since a generation was whole."""
    is_retried: bool
    """Whether the next step had begun, and is done again."""
    is_met: bool
    """Whether all stand at one boundary, and not where a failure has interrupted them."""
    phase: int
    """The most that a member has finished: the others finish theirs alone, and then all go on together."""


class Order(Message):
    """What a process is to do until the next one."""

    number: int
    """Grows from order to order."""
    task: Task
    position: int
    """Of MEET and STOP."""
    has_new: bool
    """Of MEET: whether others join, to whom the state is to be given."""
    wish: Wish | None
    """Of STOP: what all stop for."""
    record: FailureRecord | None
    """Of RECOVER: the failure."""
    generation: NewGeneration | None
    """Of ENTER."""
    all_ended: int
    """Runs that all members have ended."""
    period_s: float
    """How often a rank reports of which no fact changes."""

"""Protocol of the control channel: a dataclass for each kind of message, and what they are made of.

`connections.py` has how they travel, and checks what comes against the types of their fields.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, dataclass_transform

from lightning_ddp.supervise.failure_record import FailureRecord, Identity, Where

__all__ = ["VERSION", "Message", "Outgoing", "ProtocolError"]

VERSION = 1
"""Of the protocol: greater with each change of a message."""
_MOST_GROUPS = 6


class ProtocolError(Exception):
    """Bytes that are no message of this protocol. Whoever sent them is hung up on; nobody else notices."""


@dataclass_transform(frozen_default=True)
class Message:
    """Base of all kinds of message: each is a frozen dataclass, found by its `kind`."""

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        Message.kinds[cls.kind] = cls


# ---------------------------------------------------------------------- what ranks say of themselves


State = Literal["waits", "starts", "runs", "finished", "ending", "silent", "gone"]
Text = Annotated[str, 200]
"""Of at most so many characters; the protocol cuts what is longer."""


@dataclass(frozen=True, kw_only=True)
class GroupStatus:
    """What a rank has done with one process group."""

    name: Text
    """The same on all ranks of the group."""
    ranks: Text
    """Its global ranks, as `join_ranks` writes them."""
    number: int
    """How many collectives it has started there."""
    calls: dict[int, Text] = field(default_factory=dict)
    """Number -> what it was, for the last few."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """What a rank says that it is doing."""

    rank: int
    state: State
    """'waits' for a collective, 'starts' one with the others, 'runs', 'finished' its run, is 'ending' because
    of a failure, 'silent' or 'gone'."""
    label: Text | None = None
    """The collective that it waits for; of one that has finished, what."""
    group: Text | None = None
    """Name of the process group of that."""
    number: int = 0
    """Its number there; 0 where it is not known."""
    for_s: float = 0.0
    """Seconds since that began."""
    step: int | None = None
    phase: Text | None = None
    at: Text | None = None
    """Line of the program at which its main thread is."""
    groups: Annotated[tuple[GroupStatus, ...], _MOST_GROUPS] = ()
    blocked_on: Annotated[tuple[tuple[Text, int, bool], ...], _MOST_GROUPS] = ()
    """Group, number and whether it has not been started, of the collectives without which the rank does not
    get on; empty where it may get on by itself."""

    def on(self, group: str | None) -> GroupStatus | None:
        """What it has done with one group."""
        return next((known for known in self.groups if known.name == group), None)

    def describe(self) -> str:
        """Its state in words, after 'rank 3' or 'ranks 0-2'."""
        at = Where(step=self.step, phase=self.phase).in_words()
        match self.state:
            case "waits":
                return f"waits in {self.label}{at}"
            case "starts":
                return f"is about to start {self.label}{at}"
            case "runs":
                line = f" ({self.at})" if self.at else ""
                beside = f", while a thread beside it waits in {self.label}" if self.label else ""
                return f"waits for no collective{at}{line}{beside}"
            case "finished":
                return f"has finished {self.label or 'its run'}{Where(step=self.step).in_words()}"
            case "ending":
                return f"ends because of a failure{at}"
            case "silent":
                return "does not answer: it is stopped, or something holds its interpreter"
            case "gone":
                return "is gone"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What comparing the statuses has shown."""

    sentence: str
    """Where the ranks disagree."""
    table: str
    """Each rank, its state, since when."""
    missing: tuple[int, ...]
    """Global ranks that have not come to the collective."""
    is_contradiction: bool = False
    """Whether ranks wait in different ones in its place, so that it cannot end well."""


# ---------------------------------------------------------------------- from a process of the run


class Hello(Message):
    """The first message of a connection."""

    token: str
    """The secret of the run."""
    identity: Identity
    start: int | None = None
    """Number of the `Start` that it follows; 0 for the launcher of a node that is back, None for others."""
    is_launcher: bool = False
    """True if it starts the processes of its node: `Start`."""
    version: int = VERSION
    """Of the protocol; a process of another one is refused."""

    @property
    def is_new(self) -> bool:
        """True if it is to join the run while that goes on."""
        return self.start is not None


class ListRanks(Message):
    """Asks which ranks are connected: `RankList`."""


class DrainNode(Message):
    """A node is to leave: `DrainNodeReply`. Also of a process that is no rank."""

    node: int


class Failed(Message):
    """A process has failed."""

    record: FailureRecord


class SecondaryFailure(Message):
    """A call that communicates has failed, probably because another rank has."""

    record: FailureRecord


class PeerDisconnected(Message):
    """A process that another one watches is gone."""

    record: FailureRecord


class Exited(Message):
    """A child has ended without success, as its launcher sees it."""

    record: FailureRecord


class Saved(Message):
    """A rank has saved the last checkpoint of a run that a failure ends."""

    path: Annotated[str, 4000]


class DiagnoseRequest(Message):
    """Asks where the ranks disagree about a collective, of a process group and a number: `Diagnosis`."""

    group: Text | None
    number: int


class CheckOrphanedWaits(Message):
    """Has the server look whether a rank waits for what nobody will call."""


class StatusReply(Message):
    """Answers `StatusRequest`."""

    number: int
    status: RankStatus


class CollectiveFingerprint(Message):
    """With debug="detail": this rank is about to start a collective.

    Answered by `CollectiveApproved` or `Diagnosis`.
    """

    group: Text
    ranks: Text
    """Of the group, as `join_ranks` writes them."""
    number: int
    text: Text
    """What it is, with shapes and dtypes."""
    run: int
    """In which run, as `Report` counts them."""


class SendValue(Message):
    """A value for another rank: `PeerValue`."""

    to: int
    topic: Text
    value: Any
    """Of types that JSON has."""


# ---------------------------------------------------------------------- from the server


class Failure(Message):
    """The first failure of the run."""

    record: FailureRecord


class RankList(Message):
    """Answers `ListRanks`."""

    ranks: tuple[int, ...]


class DrainNodeReply(Message):
    """Answers `DrainNode`: which ranks leave, or why none does."""

    ranks: tuple[int, ...]
    why: Text | None


class Closing(Message):
    """The server's process ends, and that is no failure."""


class Start(Message):
    """To the launcher of another node: a new process is to be started in the place of a lost one."""

    place: int
    number: int
    """How many have been started in that place, with this one."""


class StatusRequest(Message):
    """Asks what a rank is doing: `StatusReply`."""

    number: int


class CollectiveApproved(Message):
    """All ranks of the group are about to start this collective."""

    group: Text
    number: int


class Diagnosis(Message):
    """Where the ranks disagree about a collective."""

    group: Text | None
    number: int
    findings: Findings


class PeerValue(Message):
    """A value of another rank."""

    sender: int
    topic: Text
    value: Any


Outgoing = list[tuple[int, Message]]
"""To which rank or place, and what."""

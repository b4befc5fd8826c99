"""Protocol of the control channel: a dataclass per kind of message.

`message_bytes.py` converts them to bytes, and checks what comes against the types of their fields.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, dataclass_transform

from lightning_ddp.supervise.failure_record import FailureRecord, Identity, Where

__all__ = ["VERSION", "Message", "Outgoing", "ProtocolError"]

VERSION = 2  # version of the protocol: greater with each change of a message
_MOST_GROUPS = 6
_MOST_NAMES, _MOST_NOTES = 64, 8


class ProtocolError(Exception):
    """Bytes that are no message of this protocol: their connection is closed."""


@dataclass_transform(frozen_default=True)
class Message:
    """Base of all messages: frozen dataclasses, found by their `kind`."""

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        Message.kinds[cls.kind] = cls


# ---------------------------------------------------------------------- status of a rank


State = Literal["waits", "starts", "runs", "finished", "ending", "silent", "gone"]
"""A rank waits for a collective, starts one with the others, runs, has finished its run, or ends because of a
failure."""
Text = Annotated[str, 200]  # a text that the protocol cuts to so many characters


@dataclass(frozen=True, kw_only=True)
class GroupStatus:
    """Collectives of a rank in one process group."""

    name: Text
    ranks: Text  # global ranks, as `join_ranks` writes them
    number: int  # number of started collectives
    calls: dict[int, Text] = field(default_factory=dict)  # the last few collectives, by number


_NO_GROUP = GroupStatus(name="", ranks="", number=-1)


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Present activity of a rank."""

    rank: int
    state: State
    label: Text | None = None  # awaited collective, or finished run
    group: Text | None = None
    number: int = 0  # number of the collective in its group; 0 if unknown
    for_s: float = 0.0  # seconds since the state began
    step: int | None = None
    phase: Text | None = None
    at: Text | None = None  # line of the program that the main thread executes
    groups: Annotated[tuple[GroupStatus, ...], _MOST_GROUPS] = ()
    blocked_on: Annotated[tuple[tuple[Text, int, bool], ...], _MOST_GROUPS] = ()
    """Group, number and `is_start` of the collectives that block the rank; empty if it may continue."""

    def on(self, group: str | None) -> GroupStatus:
        """Return the status of one group; its number is -1 if the rank does not know the group."""
        return next((known for known in self.groups if known.name == group), _NO_GROUP)

    def describe(self) -> str:
        """Return the state as a predicate of 'rank 3'."""
        at = Where(step=self.step, phase=self.phase).in_words()
        line = f" ({self.at})" if self.at else ""
        beside = f", while a thread beside it waits in {self.label}" if self.label else ""
        return {
            "waits": f"waits in {self.label}{at}",
            "starts": f"is about to start {self.label}{at}",
            "runs": f"waits for no collective{at}{line}{beside}",
            "finished": f"has finished {self.label or 'its run'}{Where(step=self.step).in_words()}",
            "ending": f"ends because of a failure{at}",
            "silent": "does not answer: it is stopped, or something holds its interpreter",
            "gone": "is gone",
        }[self.state]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Result of comparing the statuses of all ranks."""

    sentence: str  # description of the disagreement
    table: str  # state of each rank, and for how long
    missing: tuple[int, ...]  # global ranks that have not called the collective
    is_contradiction: bool = False  # True if ranks wait in different collectives of the same number, for ever


# ---------------------------------------------------------------------- from a process of the job


class Hello(Message):
    """The first message of a connection; `is_launcher` if its sender handles `Start`."""

    token: str
    identity: Identity
    is_launcher: bool = False
    version: int = VERSION


class ListRanks(Message):
    """Request for the connected ranks: `RankList`."""


class DrainNode(Message):
    """Request that a node leaves, also of a process that is no rank: `DrainNodeReply`."""

    node: int


class Failed(Message):
    """Failure of a process; base of all messages that the server handles by `JobControl.report`."""

    record: FailureRecord


class SecondaryFailure(Failed):
    """Failure of a call that communicates, probably because another rank failed."""


class PeerDisconnected(Failed):
    """Disappearance of a process that another one watches."""


class Exited(Failed):
    """Exit of a child, reported by its launcher, with its place as rank."""


class Saved(Message):
    """Path of the checkpoint that a rank saved at the end of a failed job."""

    path: Annotated[str, 4000]


class DiagnoseRequest(Message):
    """Question where the ranks disagree about a collective: `Diagnosis`."""

    group: Text | None
    number: int


class CheckOrphanedWaits(Message):
    """Request to check whether a rank waits for what nobody will call."""


class StatusReply(Message):
    """Answer to `StatusRequest`."""

    number: int
    status: RankStatus


class CollectiveFingerprint(Message):
    """Collective, with shapes and dtypes, that a rank is about to start."""

    group: Text
    ranks: Text
    number: int
    text: Text


class SendValue(Message):
    """Value of JSON's types for another rank: `PeerValue`."""

    to: int
    topic: Text
    value: Any


class StateHashes(Message):
    """Hashes of slices of a rank's state since its last message of this kind, by their numbers."""

    generation: int
    run: int
    hashes: dict[int, int]


class StateValues(Message):
    """Answer to `StateRequest`: what a rank hashed; no names if it has forgotten."""

    generation: int
    run: int
    number: int
    step: int
    before: int | None  # step after which the same was hashed before
    names: Annotated[tuple[Text, ...], _MOST_NAMES]
    values: Annotated[tuple[int, ...], _MOST_NAMES]
    can_be_copied: bool
    notes: Annotated[tuple[Text, ...], _MOST_NOTES]  # events since then that may be the cause of a difference


# ---------------------------------------------------------------------- from the server


class Failure(Message):
    """The first failure of the job."""

    record: FailureRecord


class RankList(Message):
    """Answer to `ListRanks`."""

    ranks: tuple[int, ...]


class DrainNodeReply(Message):
    """Answer to `DrainNode`: the ranks that leave, or the reason why none does."""

    ranks: tuple[int, ...]
    why: Text | None


class Closing(Message):
    """Notice that the server's process exits without a failure."""


class Start(Message):
    """Request to the launcher of another node to start process `number` in the slot of a lost one."""

    slot: int
    number: int


class StatusRequest(Message):
    """Question what a rank does: `StatusReply`."""

    number: int


class CollectiveApproved(Message):
    """Permission to start a collective, as all ranks of the group are about to."""

    group: Text
    number: int


class Diagnosis(Message):
    """Answer where the ranks disagree about a collective."""

    group: Text | None
    number: int
    findings: Findings


class StateRequest(Message):
    """Question what a rank has hashed at a number: `StateValues`."""

    number: int


class PeerValue(Message):
    """Value of another rank."""

    sender: int
    topic: Text
    value: Any


Outgoing = list[tuple[int, Message]]  # messages, and the rank of each

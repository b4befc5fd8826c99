"""Protocol of the control channel: a dataclass per kind of message, and their bytes.

A message is a JSON object behind its length, without the fields that have their default. Bytes from a
socket are not trusted: reading them ends in messages or in a `ProtocolError`, within the memory limit. Texts
and lists over the limit of their field are cut.
"""

from __future__ import annotations

import functools
import json
import re
import struct
import types
import typing
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, dataclass_transform

from lightning_ddp.supervise.failure_record import FailureRecord, Identity, Where

VERSION = 4  # version of the protocol: greater with each change of a message
LIMIT_BYTES = 256 * 1024  # longest message, without its length
_LENGTH = struct.Struct(">I")
_MAX_DEPTH_BYTES = b"[" * 64
_SHOWN_CHARACTERS = 80
_LARGEST = 1e300
_MOST_GROUPS = 6
_MOST_NAMES, _MOST_NOTES = 64, 8


class ProtocolError(Exception):
    """Error for invalid bytes, or a message that is refused: the connection that sent them is closed."""


@dataclass_transform(frozen_default=True)
class Message:
    """Base class of all control messages, which are frozen dataclasses, registered by their `kind`."""

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
    """Collectives that a rank has started in one process group: their number, and the last few."""

    name: Text
    ranks: Text  # global ranks, as `join_ranks` writes them
    number: int  # number of started collectives
    calls: dict[int, Text] = field(default_factory=dict)  # the last few collectives, by number


_NO_GROUP = GroupStatus(name="", ranks="", number=-1)


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Present state of a rank: the awaited collective, step and hook, and its process groups."""

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
        """Return this rank's collectives in one group; their number is -1 if it does not know the group."""
        return next((known for known in self.groups if known.name == group), _NO_GROUP)

    def describe(self) -> str:
        """Return a phrase on what the rank is doing, such as 'waits in all_reduce', to follow 'rank 3'."""
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
    """Result of comparing what all ranks do: sentence, table, and ranks that have not called a collective."""

    sentence: str  # description of the disagreement
    table: str  # state of each rank, and for how long
    missing: tuple[int, ...]  # global ranks that have not called the collective
    is_contradiction: bool = False  # True if ranks wait in different collectives of the same number, for ever


# ---------------------------------------------------------------------- from a process of the job


class Hello(Message):
    """First message of a connection: token and identity; `is_launcher` if its sender can start processes."""

    token: str
    identity: Identity
    is_launcher: bool = False
    version: int = field(default_factory=lambda: VERSION)  # always sent: the default is another one elsewhere


class ListRanks(Message):
    """Message that asks the server which ranks are connected."""


class DrainNode(Message):  # asks that a node leaves the run, from any process
    node: int


class Failed(Message):
    """Message that a process has failed; base class of the messages that `JobControl.report` takes."""

    record: FailureRecord


class SecondaryFailure(Failed):
    """Message that a call that communicates has failed, probably because another rank had failed."""


class PeerDisconnected(Failed):
    """Message that a process which the sender watches, such as its parent, has disappeared."""


class Exited(Failed):
    """Message that a launcher's child process has exited; the record has the child's initial rank."""


class Saved(Message):  # a rank has saved the last step of a failed job
    path: Annotated[str, 4000]


class DiagnoseRequest(Message):  # asks where ranks disagree about a collective
    group: Text | None
    number: int


class CheckOrphanedWaits(Message):
    """Message that asks the server to look for ranks that wait for a collective nobody will call."""


class StatusReply(Message):  # what a rank is doing
    number: int
    status: RankStatus


class CollectiveFingerprint(Message):  # a rank is about to start this collective
    group: Text
    ranks: Text
    number: int
    text: Text


class SendValue(Message):  # a JSON value for another rank, which gets it as `PeerValue`
    to: int
    topic: Text
    value: Any


class StateHashes(Message):  # new hashes of slices of a rank's state, by number
    generation: int
    run: int
    hashes: dict[int, int]


class StateValues(Message):
    """Answer to `StateRequest`: names and hashes of the parts of a rank's state; empty if it dropped them."""

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


class Failure(Message):  # the first failure of the job
    record: FailureRecord


class RankList(Message):  # the connected ranks
    ranks: tuple[int, ...]


class DrainNodeReply(Message):  # the ranks that leave, or why none does
    ranks: tuple[int, ...]
    why: Text | None


class Closing(Message):
    """Last message of the server, which closes without a failure."""


class Start(Message):  # asks another node's launcher for replacement `number` of a rank's process
    slot: int
    number: int


class StatusRequest(Message):  # asks what a rank is doing
    number: int


class CollectiveApproved(Message):  # all ranks of the group have announced this collective, which may start
    group: Text
    number: int


class Diagnosis(Message):  # where the ranks disagree
    group: Text | None
    number: int
    findings: Findings


class StateRequest(Message):  # asks for the details of the hash with this number
    number: int


class PeerValue(Message):  # sent by another rank
    sender: int
    topic: Text
    value: Any


Outgoing = list[tuple[int, Message]]  # messages, and the rank of each


# ---------------------------------------------------------------------- bytes


def pack(message: Message) -> bytes:
    """Return a message as length-prefixed JSON bytes; raise `ProtocolError` above `LIMIT_BYTES`."""
    values = {"kind": message.kind, **_facts(message)}
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False, default=_facts)
    data = text.encode(errors="surrogatepass")
    if len(data) > LIMIT_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes; the limit is {LIMIT_BYTES}")
    return _LENGTH.pack(len(data)) + data


def _facts(value: Any) -> dict[str, Any]:
    """Return those fields of a dataclass instance that differ from their defaults, by name."""
    known = _defaults_of(typing.cast(Any, type(value)))
    return {name: fact for name, fact in vars(value).items() if name not in known or fact != known[name]}


@functools.cache
def _defaults_of(kind: Any) -> dict[str, Any]:
    return {part.name: part.default for part in fields(kind) if part.default is not MISSING}


class Unpacker:
    """Incremental decoder of one connection's bytes into messages of at most `limit_bytes` each."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that the bytes `data` complete; raise `ProtocolError` at an invalid one."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self.limit_bytes:
                raise ProtocolError(f"a message of {length} bytes; the limit is {self.limit_bytes}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(_parse(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages


def _parse(data: bytes) -> Message:
    if _MAX_DEPTH_BYTES in data.replace(b" ", b""):
        raise ProtocolError("nested too deeply")
    try:
        values = json.loads(data.decode(errors="surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"no JSON: {error}") from None
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in Message.kinds:
        raise ProtocolError("no object with a known kind")
    try:
        message: Message = _read(_type_of(Message.kinds[kind]), values)
    except ProtocolError as error:
        raise ProtocolError(f"{kind}{error}") from None
    return message


_Type = tuple[Any, Any, tuple[Any, ...]]
"""Hint of a field, its origin, and the types of its parts; also the choices of a text, or its longest length.
Hints are taken apart once, as 16,384 ranks read a message at the same time."""


@functools.cache
def _type_of(hint: Any) -> _Type:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        parts = (
            (part.name, _type_of(hints[part.name]), part.default is not MISSING) for part in fields(hint)
        )
        return hint, "fields", tuple(parts)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint, StrEnum, tuple(hint)
    if hint is float:  # of which not all may be sent
        return None, float, ()
    if origin is Literal:
        return hint, origin, arguments
    return hint, origin, tuple(part if type(part) is int else _type_of(part) for part in arguments)


def _read(kind: _Type, value: Any) -> Any:
    """Return a JSON value converted to the type of its field; raise `ProtocolError` if it does not fit."""
    hint, origin, parts = kind
    if type(value) is hint or hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _read(parts[0], value)
    if origin is Annotated:
        return _read(parts[0], value[: parts[1]] if isinstance(value, str | list) else value)
    if origin == "fields" and type(value) is dict:
        found = {}
        for name, part, has_default in parts:
            if name not in value:
                if not has_default:
                    raise ProtocolError(f" has no {name}")
                continue
            fact = value[name]
            try:
                found[name] = fact if type(fact) is part[0] else _read(part, fact)
            except ProtocolError as error:
                raise ProtocolError(f".{name}{error}") from None
        return hint(**found)
    if origin is tuple and type(value) is list:
        if parts[-1][0] is ...:
            return tuple(_read(parts[0], part) for part in value)
        if len(value) == len(parts):
            return tuple(map(_read, parts, value))
    elif origin is dict and type(value) is dict and all(map(str.isdecimal, value)):
        return {int(key): _read(parts[1], part) for key, part in value.items()}
    elif origin in (Literal, StrEnum) and value in parts:
        return hint(value) if origin is StrEnum else value
    elif origin is float and type(value) in (int, float) and abs(value) < _LARGEST:
        return float(value)
    raise ProtocolError(f"={value!r}"[:_SHOWN_CHARACTERS])

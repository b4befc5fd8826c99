"""Protocol of the control channel: a dataclass for each kind of message, and the codec that checks them.

A message travels as a JSON object behind its length, bounded in size, never pickled. Bytes from a socket are
not trusted: whatever they are, reading them ends in messages or in a `ProtocolError`, and never takes more
memory than the limit. Texts and lists that are longer than their field allows are cut.
"""

from __future__ import annotations

import functools
import json
import re
import struct
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from lightning_ddp.supervise.failure_record import FailureRecord, Identity, Where
from lightning_ddp.supervise.status import Findings, Name, RankStatus, Text

__all__ = ["LIMIT_BYTES", "Message", "ProtocolError", "Unpacker", "pack"]

LIMIT_BYTES = 64 * 1024
"""Longest message in bytes, without its length."""

_LENGTH = struct.Struct(">I")
_MAX_DEPTH_BYTES = b"[" * 64
_SHOWN_CHARACTERS = 80


class ProtocolError(Exception):
    """Bytes that are no message of this protocol. Whoever sent them is hung up on; nobody else notices."""


class Message:
    """Base of all kinds of message, which are found by `kind`."""

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls) -> None:
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        Message.kinds[cls.kind] = cls


# ---------------------------------------------------------------------- from a process of the run


@dataclass(frozen=True)
class Hello(Message):
    """The first message of a connection."""

    token: str
    """The secret of the run."""
    identity: Identity
    """Who speaks."""


@dataclass(frozen=True)
class Active(Message):
    """A rank has begun or ended a run, such as a fit."""

    is_active: bool
    run: int
    """How many it has begun."""
    name: Name
    """Of the run."""


@dataclass(frozen=True)
class Bye(Message):
    """The end of this connection is no failure."""


@dataclass(frozen=True)
class Who(Message):
    """Asks which ranks are connected: `Here`."""


@dataclass(frozen=True)
class Progress(Message):
    """What a rank is doing, where stalls are looked for; answered by `Beat`."""

    where: Where


@dataclass(frozen=True)
class Failed(Message):
    """A process has failed."""

    record: FailureRecord


@dataclass(frozen=True)
class Echoed(Message):
    """A call that communicates has failed, probably because another rank has."""

    record: FailureRecord


@dataclass(frozen=True)
class Vanished(Message):
    """A process that another one watches is gone."""

    record: FailureRecord


@dataclass(frozen=True)
class Exited(Message):
    """A child has ended without success, as its launcher sees it."""

    record: FailureRecord


@dataclass(frozen=True)
class Stop(Message):
    """A signal asks for the end of the run at a step boundary."""

    signal: int
    is_requeue: bool
    """Whether the cluster starts the run again."""


@dataclass(frozen=True)
class Position(Message):
    """Answers `Hold`: the step boundaries that this rank has passed."""

    position: int


@dataclass(frozen=True)
class Stopped(Message):
    """This rank has stopped at the boundary."""


@dataclass(frozen=True)
class Ask(Message):
    """Asks where the ranks disagree: `Found`."""

    group: Text | None
    """Name of the process group in question."""
    number: int
    """Of the collective there."""


@dataclass(frozen=True)
class Look(Message):
    """Has the server look whether a rank waits for what nobody will call."""


@dataclass(frozen=True)
class Status(Message):
    """Answers `RollCall`."""

    number: int
    status: RankStatus


@dataclass(frozen=True)
class Announce(Message):
    """With debug="detail": this rank is about to start a collective; answered by `Go` or `Found`."""

    group: Text
    ranks: Text
    """Of the group, as `join_ranks` writes them."""
    number: int
    text: Text
    """What it is, with shapes and dtypes."""
    run: int
    """In which run, as `Active` counts them."""


@dataclass(frozen=True)
class Tell(Message):
    """A value for another rank: `Told`."""

    to: int
    topic: Text
    value: Any
    """Of types that JSON has."""


# ---------------------------------------------------------------------- from the server


@dataclass(frozen=True)
class Failure(Message):
    """The first failure of the run."""

    record: FailureRecord


@dataclass(frozen=True)
class AllHere(Message):
    """All ranks have connected."""


@dataclass(frozen=True)
class Here(Message):
    """Answers `Who`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Left(Message):
    """All ranks have ended a run."""


@dataclass(frozen=True)
class Beat(Message):
    """The server lives."""


@dataclass(frozen=True)
class Closing(Message):
    """The server's process ends, and that is no failure."""


@dataclass(frozen=True)
class Hold(Message):
    """No boundary is passed until `StopAfter`; answered by `Position`."""


@dataclass(frozen=True)
class StopAfter(Message):
    """All ranks stop at the boundary after this one."""

    position: int
    signal: int
    is_requeue: bool


@dataclass(frozen=True)
class RollCall(Message):
    """Asks what a rank is doing: `Status`."""

    number: int


@dataclass(frozen=True)
class Go(Message):
    """All ranks of the group are about to start this collective."""

    group: Text
    number: int


@dataclass(frozen=True)
class Found(Message):
    """Where the ranks disagree about a collective."""

    group: Text | None
    number: int
    findings: Findings


@dataclass(frozen=True)
class Told(Message):
    """A value of another rank."""

    sender: int
    topic: Text
    value: Any


# ---------------------------------------------------------------------- codec


def pack(message: Message) -> bytes:
    """The bytes of a message.

    Raises:
        ProtocolError: it is longer than `LIMIT_BYTES`.
    """
    values = asdict(message)  # type: ignore[call-overload]  # all kinds are dataclasses
    data = json.dumps({"kind": message.kind, **values}, separators=(",", ":")).encode()
    if len(data) > LIMIT_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes; the limit is {LIMIT_BYTES}")
    return _LENGTH.pack(len(data)) + data


class Unpacker:
    """Collects the bytes of one connection into messages.

    Args:
        limit_bytes: longest message that is taken; a connection that has not said who it is gets a small one.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete with `data`.

        Raises:
            ProtocolError: a length over the limit, no JSON, or JSON that is no message.
        """
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
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"no JSON: {error}") from None
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in Message.kinds:
        raise ProtocolError("no object with a known kind")
    message: Message = _read(Message.kinds[kind], values, kind)
    return message


def _read(hint: Any, value: Any, where: str) -> Any:
    """What JSON has for a field of type `hint`, as that type."""
    if hint is Any:
        return value
    if is_dataclass(hint) and isinstance(value, Mapping):
        hints = _hints(hint)  # type: ignore[arg-type]  # of the class, not of an object
        missing = [name for name in hints if name not in value]
        if missing:
            raise ProtocolError(f"{where} has no {missing[0]}")
        read = {name: _read(of, value[name], f"{where}.{name}") for name, of in hints.items()}
        return hint(**read)  # type: ignore[operator]  # a class, which mypy takes for an object of it
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (only,) = (argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else _read(only, value, where)
    if origin is Annotated:
        kind, longest = arguments
        return _read(kind, value[:longest] if isinstance(value, str | list) else value, where)
    if origin is Literal and value in arguments:
        return value
    if origin is dict and isinstance(value, dict) and all(key.isdecimal() for key in value):
        return {int(key): _read(arguments[1], part, where) for key, part in value.items()}
    if origin is tuple and isinstance(value, list):
        if arguments[-1] is ...:
            return tuple(_read(arguments[0], part, where) for part in value)
        if len(value) == len(arguments):
            return tuple(_read(of, part, where) for of, part in zip(arguments, value, strict=True))
    if hint is float and type(value) is int:
        value = _to_float(value, where)
    if type(value) is not hint:
        raise ProtocolError(f"{where}={value!r}"[:_SHOWN_CHARACTERS])
    return value


def _to_float(value: int, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ProtocolError(f"{where} is too large") from None


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}

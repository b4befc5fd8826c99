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
from collections.abc import Callable
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
_LARGEST = 1e300


class ProtocolError(Exception):
    """Bytes that are no message of this protocol. Whoever sent them is hung up on; nobody else notices."""


class Message:
    """Base of all kinds of message, which are found by `kind`."""

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, Any]] = {}

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
    is_new: bool = False
    """Whether it is a process in the place of a lost one, which joins the run while that goes on."""
    is_launcher: bool = False
    """Whether it starts the processes of its node: `Start`."""


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
class Dismiss(Message):
    """A node is to leave: `Dismissed`. Also of a process that is no rank."""

    node: int


@dataclass(frozen=True)
class WhoIsMissing(Message):
    """Asks which nodes are lost, and have not come back: `Missing`. Also of a process that is no rank."""


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
class Saved(Message):
    """A rank has saved the last checkpoint of a run that a failure ends."""

    path: Annotated[str, 4000]


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
class Present(Message):
    """Answers `Muster`: this process has stopped, and commits nothing more in its generation."""

    call: int
    step: int
    """Optimizer steps that it has committed."""
    is_clean: bool
    """Whether its state is that after this step."""
    is_trying: bool
    """Whether the next step had begun."""
    phase: int = 0
    """Parts of the loops (batches, validations, ends of epochs ...) that it has finished."""


@dataclass(frozen=True)
class Joined(Message):
    """This process is in a generation, and has its state."""

    generation: int


@dataclass(frozen=True)
class Begun(Message):
    """This process begins again what a failure has interrupted; told before it does anything of it."""

    generation: int


@dataclass(frozen=True)
class Declined(Message):
    """Answers `Muster`: this process cannot go on."""

    call: int
    why: Text


@dataclass(frozen=True)
class Prepared(Message):
    """The first epoch begins: what a new process needs to know of the set-up is written for it."""


@dataclass(frozen=True)
class Ready(Message):
    """A new process stands before its first step, and asks to be a member of the next generation: `Form`.

    A spare does not ask before it is to `Take` a place.
    """


@dataclass(frozen=True)
class Leave(Message):
    """This process is asked to end; the others are to go on without it from a step boundary on: `Form`."""

    is_node: bool
    """Whether all ranks of its node are."""


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
class Dismissed(Message):
    """Answers `Dismiss`."""

    ranks: tuple[int, ...]
    """Those that leave."""
    why: Text | None
    """Why none does."""


@dataclass(frozen=True)
class Missing(Message):
    """Answers `WhoIsMissing`."""

    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Left(Message):
    """All ranks have ended a run."""


@dataclass(frozen=True)
class Beat(Message):
    """Answers `Progress`: the server lives."""

    next_s: float | None
    """In how many seconds it expects the next one; None: not at all."""


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
class Gather(Message):
    """Others are to join, or to leave: no boundary is passed until `MeetAfter`; answered by `Position`."""


@dataclass(frozen=True)
class MeetAfter(Message):
    """All members stop at the boundary after this one, where others join or leave; answered by `Present`."""

    call: int
    """Its number, as of `Muster`."""
    position: int
    has_new: bool
    """Whether others join, to whom the state is to be given."""


@dataclass(frozen=True)
class Take(Message):
    """A spare is to have this place, of a process that is lost; answered by `Ready`."""

    place: int


@dataclass(frozen=True)
class Muster(Message):
    """A process is lost: the others stop, and say where; answered by `Present` or `Declined`."""

    call: int
    """From 1; a later one makes the earlier ones void."""
    record: FailureRecord
    """The failure."""


@dataclass(frozen=True)
class Form(Message):
    """The next generation; its members answer with `Joined`. Processes are named by their places."""

    call: int
    """The call that they have answered."""
    generation: int
    members: tuple[int, ...]
    """By their new ranks."""
    lost: tuple[int, ...]
    before: tuple[int, ...]
    """The members of the generation before, by their ranks there."""
    step: int
    """Optimizer steps that are committed."""
    source: int
    """Who has that state."""
    behind: tuple[int, ...]
    """Who copies it."""
    is_retried: bool
    """Whether the next step had begun, and is done again."""
    phase: int = 0
    """The most that a member has finished: the others finish theirs alone, and then all go on together."""
    joined: tuple[int, ...] = ()
    """Members that were not in the generation before: they take over all that `source` has."""
    is_met: bool = False
    """Whether all stand at one boundary, and not where a failure has interrupted them."""
    left: tuple[int, ...] = ()
    """Those that have asked to leave since a generation was whole; they are told, and end."""


@dataclass(frozen=True)
class Start(Message):
    """To the launcher of another node: a new process is to be started in the place of a lost one."""

    place: int


@dataclass(frozen=True)
class Moved(Message):
    """To the launcher of another node: a spare, which it has started, takes the place of a lost process."""

    pid: int
    place: int


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
    try:
        message: Message = _reader(Message.kinds[kind])(values)
    except ProtocolError as error:
        raise ProtocolError(f"{kind}{error}") from None
    return message


_Reader = Callable[[Any], Any]
"""Turns what JSON has for a field into the field's type; raises ProtocolError with what is wrong."""


@functools.cache
def _reader(hint: Any) -> _Reader:
    """Reads values of one type; made once for each, as a message is read by 16,384 ranks at once."""
    if hint is Any:
        return lambda value: value
    if is_dataclass(hint):
        return _reader_of_fields(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (only,) = (_reader(argument) for argument in arguments if argument is not types.NoneType)
        return lambda value: None if value is None else only(value)
    if origin is Annotated:
        whole, longest = _reader(arguments[0]), arguments[1]
        return lambda value: whole(value[:longest] if isinstance(value, str | list) else value)
    if origin is Literal:
        return _reader_of(lambda value: isinstance(value, str) and value in arguments)
    if origin is dict:
        part = _reader(arguments[1])
        check = _reader_of(lambda value: type(value) is dict and all(key.isdecimal() for key in value))
        return lambda value: {int(key): part(of) for key, of in check(value).items()}
    if origin is tuple:
        return _reader_of_tuple(arguments)
    if hint is float:
        check = _reader_of(lambda value: type(value) in (int, float) and abs(value) < _LARGEST)
        return lambda value: float(check(value))
    return _reader_of(lambda value: type(value) is hint)


def _reader_of(is_right: Callable[[Any], bool]) -> _Reader:
    def read(value: Any) -> Any:
        if not is_right(value):
            raise ProtocolError(f"={value!r}"[:_SHOWN_CHARACTERS])
        return value

    return read


def _reader_of_tuple(arguments: tuple[Any, ...]) -> _Reader:
    is_open = arguments[-1] is ...
    readers = [_reader(argument) for argument in arguments if argument is not ...]
    check = _reader_of(lambda value: type(value) is list and (is_open or len(value) == len(readers)))
    if is_open:
        return lambda value: tuple(map(readers[0], check(value)))
    return lambda value: tuple(read(part) for read, part in zip(readers, check(value), strict=True))


def _reader_of_fields(kind: Any) -> _Reader:
    hints = get_type_hints(kind, include_extras=True)
    readers = [(field.name, _reader(hints[field.name])) for field in fields(kind)]
    check = _reader_of(lambda value: type(value) is dict)

    def read(value: Any) -> Any:
        values = {}
        for name, read_field in readers:
            if name not in check(value):
                raise ProtocolError(f" has no {name}")
            try:
                values[name] = read_field(value[name])
            except ProtocolError as error:
                raise ProtocolError(f".{name}{error}") from None
        return kind(**values)

    return read

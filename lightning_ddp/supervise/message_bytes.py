"""Messages of the control channel as bytes: a JSON object behind its length.

Bytes from a socket are not trusted: reading them ends in messages or in a `ProtocolError`, within the memory
limit. Texts and lists over the limit of their field are cut.
"""

from __future__ import annotations

import functools
import json
import struct
import types
from dataclasses import asdict, fields, is_dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_ddp.supervise.protocol import Message, ProtocolError

LIMIT_BYTES = 256 * 1024  # longest message, without its length
_LENGTH = struct.Struct(">I")
_MAX_DEPTH_BYTES = b"[" * 64
_SHOWN_CHARACTERS = 80
_LARGEST = 1e300


def pack(message: Message) -> bytes:
    """Return a message as JSON bytes behind their length; raise `ProtocolError` above `LIMIT_BYTES`."""
    values = {"kind": message.kind, **asdict(message)}  # type: ignore[call-overload]  # all are dataclasses
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False)
    data = text.encode(errors="surrogatepass")  # as `json.loads` decodes it
    if len(data) > LIMIT_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes; the limit is {LIMIT_BYTES}")
    return _LENGTH.pack(len(data)) + data


class Unpacker:
    """Incremental decoder of one connection's bytes into messages; before its hello the limit is less."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Add received bytes to the buffer; return the messages that are complete now.

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
        message: Message = _read(_type_of(Message.kinds[kind]), values)
    except ProtocolError as error:
        raise ProtocolError(f"{kind}{error}") from None
    return message


_Type = tuple[Any, Any, tuple[Any, ...]]
"""Hint of a field, its origin, and the types of its parts; also the choices of a text, or its longest length.

Hints are taken apart once, as 16,384 ranks read a message at the same time.
"""


@functools.cache
def _type_of(hint: Any) -> _Type:
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        return hint, "fields", tuple((field.name, _type_of(hints[field.name])) for field in fields(hint))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint, StrEnum, tuple(hint)
    if origin is Literal:
        return hint, origin, arguments
    return hint, origin, tuple(part if type(part) is int else _type_of(part) for part in arguments)


def _read(kind: _Type, value: Any) -> Any:
    """Return a JSON value converted to the type of its field; raise `ProtocolError` if it does not fit."""
    hint, origin, parts = kind
    if (type(value) is hint and hint is not float) or hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return None if value is None else _read(parts[0], value)
    if origin is Annotated:
        return _read(parts[0], value[: parts[1]] if isinstance(value, str | list) else value)
    if origin == "fields" and type(value) is dict:
        return hint(**dict(_read_field(name, part, value) for name, part in parts))
    if origin is tuple and type(value) is list:
        if parts[-1][0] is ...:
            return tuple(_read(parts[0], part) for part in value)
        if len(value) == len(parts):
            return tuple(map(_read, parts, value))
    elif origin is dict and type(value) is dict and all(map(str.isdecimal, value)):
        return {int(key): _read(parts[1], part) for key, part in value.items()}
    elif origin in (Literal, StrEnum) and value in parts:
        return hint(value) if origin is StrEnum else value
    elif hint is float and type(value) in (int, float) and abs(value) < _LARGEST:
        return float(value)
    raise ProtocolError(f"={value!r}"[:_SHOWN_CHARACTERS])


def _read_field(name: str, kind: _Type, values: dict[str, Any]) -> tuple[str, Any]:
    if name not in values:
        raise ProtocolError(f" has no {name}")
    try:
        return name, _read(kind, values[name])
    except ProtocolError as error:
        raise ProtocolError(f".{name}{error}") from None

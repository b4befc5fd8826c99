"""Messages of the control channel as bytes: a JSON object behind its length.

Bytes from a socket are not trusted: reading them ends in messages or in a `ProtocolError`, within the memory
limit. Texts and lists over the limit of their field are cut.
"""

from __future__ import annotations

import functools
import json
import struct
import types
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_ddp.supervise.protocol import Message, ProtocolError

__all__ = ["LIMIT_BYTES", "Unpacker", "pack"]

LIMIT_BYTES = 256 * 1024
"""Longest message, without its length."""
_LENGTH = struct.Struct(">I")
_MAX_DEPTH_BYTES = b"[" * 64
_SHOWN_CHARACTERS = 80
_LARGEST = 1e300


def pack(message: Message) -> bytes:
    """Return the bytes of a message.

    Raises:
        ProtocolError: it is longer than `LIMIT_BYTES`.
    """
    values = {"kind": message.kind, **asdict(message)}  # type: ignore[call-overload]  # all are dataclasses
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False)
    data = text.encode(errors="surrogatepass")  # as `json.loads` decodes it
    if len(data) > LIMIT_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes; the limit is {LIMIT_BYTES}")
    return _LENGTH.pack(len(data)) + data


class Unpacker:
    """Collects the bytes of one connection into messages.

    Args:
        limit_bytes: longest message; less for a connection without a hello.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are complete with `data`.

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
"""Converts a JSON value into the type of a field; raises ProtocolError with what is wrong."""


@functools.cache
def _reader(hint: Any) -> _Reader:
    """Return the reader of a type; cached, as 16,384 ranks read a message at once."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if is_dataclass(hint):
        return _reader_of_fields(hint)
    if origin in (Union, types.UnionType):
        (only,) = (_reader(argument) for argument in arguments if argument is not types.NoneType)
        return lambda value: None if value is None else only(value)
    if origin is Annotated:
        whole, longest = _reader(arguments[0]), arguments[1]
        return lambda value: whole(value[:longest] if isinstance(value, str | list) else value)
    if origin is dict:
        part = _reader(arguments[1])
        check = _checked(lambda value: type(value) is dict and all(key.isdecimal() for key in value))
        return lambda value: {int(key): part(of) for key, of in check(value).items()}
    if origin is tuple:
        return _reader_of_tuple(arguments)
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, StrEnum)):
        known = {str(choice): choice for choice in arguments or hint}
        check = _checked(lambda value: isinstance(value, str) and value in known)
        return lambda value: known[check(value)]
    if hint is float:
        check = _checked(lambda value: type(value) in (int, float) and abs(value) < _LARGEST)
        return lambda value: float(check(value))
    return _checked(lambda value: type(value) is hint)


def _checked(is_right: Callable[[Any], bool]) -> _Reader:
    def read(value: Any) -> Any:
        if not is_right(value):
            raise ProtocolError(f"={value!r}"[:_SHOWN_CHARACTERS])
        return value

    return read


def _reader_of_tuple(arguments: tuple[Any, ...]) -> _Reader:
    is_open = arguments[-1] is ...
    readers = [_reader(argument) for argument in arguments if argument is not ...]
    check = _checked(lambda value: type(value) is list and (is_open or len(value) == len(readers)))
    if is_open:
        return lambda value: tuple(map(readers[0], check(value)))
    return lambda value: tuple(read(part) for read, part in zip(readers, check(value), strict=True))


def _reader_of_fields(kind: Any) -> _Reader:
    hints = get_type_hints(kind, include_extras=True)
    readers = [(field.name, _reader(hints[field.name])) for field in fields(kind)]
    check = _checked(lambda value: type(value) is dict)

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

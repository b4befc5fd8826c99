"""Messages of the control channel: JSON objects behind their length, bounded in size, never pickled.

Bytes from a socket are not trusted: whatever they are, reading them ends in a list of JSON objects or in a
`ProtocolError`, and never takes more memory than the limit.
"""

from __future__ import annotations

import errno
import json
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

__all__ = ["LIMIT_BYTES", "ProtocolError", "Unpacker", "keep_alive", "pack"]

LIMIT_BYTES = 64 * 1024
"""Longest message in bytes, without its length."""

_LENGTH = struct.Struct(">I")
_MAX_DEPTH_BYTES = b"[" * 64

Message = dict[str, Any]


class ProtocolError(Exception):
    """Bytes that are no message of this protocol. Whoever sent them is hung up on; nobody else notices."""


def pack(message: Mapping[str, Any]) -> bytes:
    """The bytes of a message.

    Raises:
        ProtocolError: it is longer than `LIMIT_BYTES`.
    """
    data = json.dumps(message, separators=(",", ":")).encode()
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
            ProtocolError: a length over the limit, no JSON, or JSON that is no object.
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
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"no JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError("no object with a kind")
    return message


def keep_alive(connection: socket.socket, timeout_s: float) -> None:
    """Has the kernel notice within about `timeout_s` seconds that the other host is unreachable.

    The probes of the two kernels are the heartbeats: they cost no Python, and a process that holds the GIL
    for long, or is stopped, is not mistaken for a lost node.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval = max(1, round(timeout_s / 4))
    options = {
        "TCP_KEEPIDLE": interval,
        "TCP_KEEPALIVE": interval,  # the same under macOS's name
        "TCP_KEEPINTVL": interval,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": round(timeout_s * 1000),  # for what is sent and not acknowledged
    }
    for name, value in options.items():
        if hasattr(socket, name):
            with suppress(OSError):  # an option that this kernel lacks; the others remain
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}
"""Errors of a socket whose other host is unreachable, as opposed to a process that ended."""

"""The record of a failure: what is known of it, as it travels and as people read it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import traceback as traceback_module
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lightning_ddp.errors import PeerFailure

__all__ = ["GONE", "FailureRecord", "Identity", "Where", "describe_exit"]

GONE = "the process is gone without a word (killed by a signal, or ended by os._exit)"
"""What is known of a process whose connection closed."""

_LONGEST = {
    "message": 16_000,
    "traceback": 36_000,
    "host": 1_200,
    "phase": 1_200,
    "exception_type": 1_200,
    "exception_class": 1_200,
    "checkpoint": 4_100,
}
"""In bytes as JSON, where a character takes up to twelve; together they fit into a message of the channel."""
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_ASCII_CONTROL_CHARACTERS = bytes(code for code in range(128) if _CONTROL_CHARACTERS.match(chr(code)))


def describe_exit(code: int) -> str:
    """How a process ended, in words.

    >>> describe_exit(3), describe_exit(-9)
    ('exited with code 3', 'was killed by SIGKILL')
    """
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which process of the run this is."""

    rank: int
    """Global rank; -1 for a launching process that is no rank."""
    node_rank: int
    """Its node."""
    host: str = field(default_factory=socket.gethostname)
    """Its host name."""
    pid: int = field(default_factory=os.getpid)
    """Its process id."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """What a rank is doing."""

    step: int | None = None
    """Its global step, or None outside of training."""
    phase: str | None = None
    """The hook or stage that runs, or None."""
    waits_for: str | None = None
    """The collective that it waits for, or None."""
    count: int = 0
    """Grows while the rank makes progress."""


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """The first failure of a run; the first fields are those of `PeerFailure`."""

    rank: int
    message: str
    node_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    step: int | None = None
    phase: str | None = None
    exception_type: str | None = None
    exception_class: str | None = None
    traceback: str | None = None
    exit_code: int | None = None
    checkpoint: str | None = None
    """Where a rank that was left has saved the last step."""
    time: float = field(default_factory=time.time)
    """Seconds since the epoch when it was noticed."""

    def __post_init__(self) -> None:
        """The texts are printed, and may be of anybody: none of them controls a terminal."""
        for name in _LONGEST:
            text = getattr(self, name)
            if text is not None:
                object.__setattr__(self, name, _escaped(text))

    @classmethod
    def of_exception(cls, error: BaseException, identity: Identity, where: Where) -> FailureRecord:
        """What is known of an exception on this process."""
        kind = type(error)
        return cls.of_identity(
            identity,
            _text_of(error),
            step=where.step,
            phase=where.phase,
            exception_type=kind.__name__,
            exception_class=f"{kind.__module__}:{kind.__qualname__}",
            traceback="".join(traceback_module.format_exception(error)),
        )

    @classmethod
    def of_identity(cls, identity: Identity, message: str, **more: Any) -> FailureRecord:
        """A failure of a process that says nothing itself."""
        return cls(**vars(identity), message=message, **more)

    def cut(self) -> FailureRecord:
        """This record with its texts cut to what a message of the control channel may hold."""
        shorter: dict[str, Any] = {}
        for name, longest in _LONGEST.items():
            text = getattr(self, name)
            if text is not None:
                shorter[name] = _cut(text, longest, keeps_end=name == "traceback")
        return replace(self, **shorter)

    def to_error(self, healthy_rank: int | None = None, *, is_rank: bool = True) -> PeerFailure:
        """The error that the process `healthy_rank` raises.

        Args:
            healthy_rank: its rank.
            is_rank: False for a launching process that is none.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("checkpoint", "time")}
        if self.checkpoint is not None:
            values["message"] += f"\n  The last step was saved: {self.checkpoint}"
        return PeerFailure(**values, is_own=healthy_rank == self.rank if is_rank else None)

    def with_exit(self, exit_code: int, description: str) -> FailureRecord:
        """This record, with what the process that waited for the dead one knows."""
        if self.exception_type is not None or self.message not in ("", GONE):
            return replace(self, exit_code=exit_code)
        return replace(self, exit_code=exit_code, message=description)


def _escaped(text: str) -> str:
    if text.isascii() and len(text.encode().translate(None, _ASCII_CONTROL_CHARACTERS)) == len(text):
        return text  # nearly always, and ten times as fast: 16,384 ranks read one record at once
    return _CONTROL_CHARACTERS.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 (the user's own method, which may raise anything)
        return f"(its own text cannot be had: __str__ raises {type(failure).__name__})"


def _cut(text: str, longest: int, *, keeps_end: bool) -> str:
    """As much of a text as takes about `longest` bytes as JSON."""
    kept = text[-longest:] if keeps_end else text[:longest]
    while (size := len(json.dumps(kept))) > longest + 2:
        number = len(kept) * longest // size
        kept = kept[len(kept) - number :] if keeps_end else kept[:number]
    if len(kept) == len(text):
        return text
    return f"... {kept}" if keeps_end else f"{kept} ..."

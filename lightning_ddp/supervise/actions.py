"""What `JobState` has done by those around it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ddp.supervise.failure_record import FailureRecord
from lightning_ddp.supervise.orders import Order
from lightning_ddp.supervise.processes import Process

__all__ = ["Accuse", "Action", "HangUp", "Kill", "Say", "Send", "StartProcess"]


@dataclass(frozen=True)
class Send:
    """An order is to be sent."""

    process: Process
    order: Order


@dataclass(frozen=True)
class Kill:
    """A lost process of the server's node is to be ended."""

    process: Process


@dataclass(frozen=True)
class HangUp:
    """The connection to a lost process is to be closed."""

    process: Process


@dataclass(frozen=True)
class StartProcess:
    """A process is to be started in a place: by that launcher, or on the server's node if it is None."""

    launcher: Process | None
    place: int
    number: int


@dataclass(frozen=True)
class Say:
    """A text for people."""

    text: str


@dataclass(frozen=True)
class Accuse:
    """A failure that no rank can be lost for."""

    record: FailureRecord


Action = Send | Kill | HangUp | StartProcess | Say | Accuse

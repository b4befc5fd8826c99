"""Actions that `JobState` requests."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ddp.supervise.failure_record import FailureRecord
from lightning_ddp.supervise.orders import Order
from lightning_ddp.supervise.processes import Process

__all__ = ["Accuse", "Action", "End", "Say", "Send", "StartProcess"]


@dataclass(frozen=True)
class Send:
    """Send an order."""

    process: Process
    order: Order


@dataclass(frozen=True)
class End:
    """Close the connection of a process, and kill it if it is on the server's node."""

    process: Process


@dataclass(frozen=True)
class StartProcess:
    """Start a process in a place: by that launcher, or on the server's node if it is None."""

    launcher: Process | None
    place: int
    number: int


@dataclass(frozen=True)
class Say:
    """Print a text for people."""

    text: str


@dataclass(frozen=True)
class Accuse:
    """End the job with a failure."""

    record: FailureRecord


Action = Send | End | StartProcess | Say | Accuse

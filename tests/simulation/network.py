"""Messages between the server and its processes: what the server's code needs of sockets, and their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning_ddp.supervise.protocol as protocol
from lightning_ddp.supervise.connections import Peer
from lightning_ddp.supervise.failure_record import FailureRecord
from lightning_ddp.supervise.protocol import Message

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["Connections", "Socket", "describe", "moment_of"]


class Socket:
    """What a `Peer` needs of its connection."""

    def __init__(self) -> None:
        self.is_open = True

    def fileno(self) -> int:
        return 3 if self.is_open else -1


class Connections:
    """The server's sockets."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.peers: dict[Peer, None] = {}

    def send(self, peer: Peer, message: Message) -> None:
        self._world.to_rank(peer, message)

    def send_all(self, messages: list[Message]) -> None:
        for message in messages:
            self._world.check_left(message)
            for peer in list(self.peers):
                self.send(peer, message)

    def admit(self, peer: Peer, heartbeat_timeout_s: float) -> None:
        self.peers[peer] = None

    def hang_up(self, peer: Peer) -> None:
        if peer.connection.is_open:  # type: ignore[attr-defined]
            peer.connection.is_open = False  # type: ignore[attr-defined]
            self.peers.pop(peer, None)
            self._world.closed_by_server(peer)


def moment_of(message: Message) -> str:
    """Name the kind of a message, after which a fault may come."""
    is_end = isinstance(message, protocol.Active) and not message.is_active
    return "ended" if is_end else type(message).__name__


def describe(message: Message) -> str:
    """A message in few words."""
    fields = []
    for name in message.__dataclass_fields__:  # type: ignore[attr-defined]
        value = getattr(message, name)
        if isinstance(value, FailureRecord):
            value = f"rank {value.rank}: {value.message[:40]}"
        if name != "token":
            fields.append(f"{name}={value}")
    return f"{type(message).__name__}({', '.join(fields)})"

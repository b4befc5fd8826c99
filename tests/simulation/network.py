"""What goes between processes: messages of the server, on what its code takes for sockets; collectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from lightning_ddp.supervise.connections import Peer
from lightning_ddp.supervise.failure_record import FailureRecord
from lightning_ddp.supervise.protocol import Message

if TYPE_CHECKING:
    from simulation.rank import Process
    from simulation.world import World

__all__ = ["Collective", "Connections", "Socket", "describe"]


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

    def send_all(self, message: Message) -> None:
        for peer in list(self.peers):
            self.send(peer, message)

    def admit(self, peer: Peer) -> None:
        self.peers[peer] = None

    def hang_up(self, peer: Peer) -> None:
        if peer.connection.is_open:  # type: ignore[attr-defined]
            peer.connection.is_open = False  # type: ignore[attr-defined]
            self.peers.pop(peer, None)
            self._world.closed_by_server(peer)


@dataclass
class Collective:
    """A call that all members of a generation take part in."""

    members: tuple[int, ...]
    is_of_setup: bool
    """Whether it is one of those by which a generation becomes whole."""
    is_rendezvous: bool
    """Whether it is by the store, where nobody notices that one is gone."""
    present: set[int] = field(default_factory=set)
    arrived: list[Process] = field(default_factory=list)
    through: set[int] = field(default_factory=set)
    is_broken: bool = False

    @property
    def is_complete(self) -> bool:
        return len(self.present) == len(self.members)

    def arrive(self, process: Process) -> None:
        if process.node not in process.world.isolated:
            self.present.add(process.state.place)
            self.arrived.append(process)
        if self.is_complete:
            if process.world.has_glitch and self.is_of_setup:
                process.world.has_glitch, self.is_broken = False, True
            for other in self.arrived:
                other.poke()

    def leave(self, process: Process) -> None:
        self.through.add(process.pid)

    def lose(self, process: Process) -> None:
        if process.state.place in self.members and process.pid not in self.through and not self.is_rendezvous:
            self.is_broken = True
            for other in self.arrived:
                other.poke()


def describe(message: Message) -> str:
    """A message in few words."""
    fields = []
    for name in message.__dataclass_fields__:  # type: ignore[attr-defined]
        value = getattr(message, name)
        if isinstance(value, FailureRecord):
            value = f"rank {value.rank}: {value.message[:40]}"
        if isinstance(value, Enum):
            value = value.value
        if name != "token" and value not in (None, 0, False, "", ()):
            fields.append(f"{name}={value}")
    return f"{type(message).__name__}({', '.join(fields)})"

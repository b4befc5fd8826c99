"""The server's sockets: the one that listens, and what is known of each connection."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack

from lightning_ddp.errors import RendezvousError
from lightning_ddp.reconcile.record import Identity
from lightning_ddp.reconcile.wire import Unpacker

__all__ = ["Peer", "listen"]

_HELLO_LIMIT_BYTES = 1024
_BACKLOG = 1024


class Peer:
    """One connection: a stranger until its hello, then a process of the run."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.unpacker = Unpacker(_HELLO_LIMIT_BYTES)
        self.unsent = bytearray()
        self.since = time.monotonic()
        self.identity: Identity | None = None
        self.is_active = False
        self.has_left = False
        self.num_ended = 0
        """Runs that it has ended, such as a fit."""


def listen(address: str) -> socket.socket:
    """A socket that listens on any free port of an address of this host; '' for all of them.

    Raises:
        RendezvousError: the address is none of this host.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(
            address or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.bind(where)
            listener.listen(_BACKLOG)
            stack.pop_all()
    except OSError as error:
        raise RendezvousError(
            f"cannot listen on {address}, the address of the first node: {error}. Set MASTER_ADDR to an"
            " address of the node with NODE_RANK=0."
        ) from error
    return listener

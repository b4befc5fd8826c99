"""Sockets of the control server: strangers, processes of the job, and the kernels' heartbeats."""

from __future__ import annotations

import errno
import os
import resource
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice, takewhile

from lightning_ddp.errors import RendezvousError
from lightning_ddp.supervise.failure_record import GONE, Identity
from lightning_ddp.supervise.protocol import LIMIT_BYTES, Message, Unpacker, pack

_UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}
"""Errors of a socket whose other host is unreachable, while a process that exits causes others."""
_HELLO_LIMIT_BYTES = 1024
_RECEIVE_BYTES = 64 * 1024
_HELLO_WAIT_S = 10.0
_BACKLOG = 65_535  # the kernel has a limit of its own
_MOST_UNSENT_BYTES = 4 * 1024 * 1024
_SPARE_CONNECTIONS = 64  # connections without a hello, beyond those of ranks that have not connected
_ACCEPTED_AT_ONCE = 256
_RETRY_S = 0.05


class Peer:
    """An accepted TCP connection: unauthenticated until its hello, then that of a process of the job."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.unpacker = Unpacker(_HELLO_LIMIT_BYTES)
        self.unsent = bytearray()
        self.events = selectors.EVENT_READ
        self.since = time.monotonic()
        self.identity: Identity | None = None
        self.reads_nothing = False  # True if the connection was closed for that
        self.error: OSError | None = None  # the first one of a write

    @property
    def is_closed(self) -> bool:
        return self.connection.fileno() < 0


_Received = tuple[Peer, bytes, OSError | None]
"""Sender and data: no bytes, but perhaps an error, if it has closed the connection."""


class Connections:
    """All sockets of the control server, listener and connections; only `wake` is thread-safe.

    The interface of `address` is bound; of '' all, of IPv6 too. The other host of a connection counts as
    unreachable after `heartbeat_timeout_s` seconds.
    """

    def __init__(self, address: str, num_ranks: int, heartbeat_timeout_s: float) -> None:
        self.peers: dict[Peer, None] = {}  # processes of the job
        self.strangers: dict[Peer, None] = {}  # connections without a hello, the oldest first
        self._packed: tuple[Message, bytes] | None = None  # the last message, and its bytes
        self._listener = _listen(address)
        keep_alive(self._listener, heartbeat_timeout_s)  # its connections have the same options
        self.port: int = self._listener.getsockname()[1]
        self._restore_limit = _allow_descriptors(2 * num_ranks + _SPARE_CONNECTIONS)  # with the store's
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for sock in (self._listener, self._wake_receiver):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)

    def wake(self) -> None:
        """Wake the server's thread from `wait`. Thread-safe."""
        with suppress(OSError):  # closed already, or so many wake-ups are pending that it sees them anyway
            self._wake_sender.send(b"x")

    def wait(self, until: float | None, num_awaited: int) -> Iterator[_Received]:
        """Wait for traffic until time `until` at most; accept connections, and yield what each has received.

        `num_awaited` ranks have yet to connect: it limits the number of connections without a hello.
        """
        deadlines = [stranger.since + _HELLO_WAIT_S for stranger in islice(self.strangers, 1)]
        deadlines += [until] if until is not None else []
        timeout_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                yield from self._accept(num_awaited + _SPARE_CONNECTIONS)
            elif key.fileobj is self._wake_receiver:
                self._wake_receiver.recv(4096)
            else:
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ:
                    yield from self._receive(key.data)
        oldest = time.monotonic() - _HELLO_WAIT_S
        for stranger in list(takewhile(lambda s: s.since <= oldest, self.strangers)):
            self.hang_up(stranger)

    def _accept(self, most_strangers: int) -> Iterator[_Received]:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # there are no more, or one hung up while it was queued
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._hang_up_on_strangers(len(self.strangers) - 1)
                    time.sleep(_RETRY_S)  # the listener stays ready: without this, the loop would spin
                return
            connection.setblocking(False)
            peer = Peer(connection)
            self.strangers[peer] = None
            self._selector.register(connection, selectors.EVENT_READ, peer)
            yield from self._receive(peer)  # its hello, mostly
            self._hang_up_on_strangers(most_strangers)

    def _hang_up_on_strangers(self, num_left: int) -> None:
        """Close the oldest connections that have not authenticated, until `num_left` of them are left."""
        for stranger in list(islice(self.strangers, max(0, len(self.strangers) - num_left))):
            self.hang_up(stranger)

    def _receive(self, peer: Peer) -> Iterator[_Received]:
        if peer.is_closed:
            return
        try:
            data = peer.connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            yield peer, b"", peer.error or error
        else:
            yield peer, data, None if data else peer.error

    def admit(self, peer: Peer) -> None:
        """Accept an authenticated connection as that of a process of the job."""
        peer.unpacker.limit_bytes = LIMIT_BYTES
        self.strangers.pop(peer, None)
        self.peers[peer] = None

    def send(self, peer: Peer, message: Message) -> None:
        """Send a message to `peer` without blocking; shut its connection down if over 4 MiB are unsent.

        A message to several peers in turn is packed once.
        """
        if self._packed is None or self._packed[0] is not message:
            self._packed = message, pack(message)
        peer.unsent += self._packed[1]
        if len(peer.unsent) <= _MOST_UNSENT_BYTES:
            self._flush(peer)
        else:  # it reads nothing, and must not cost this process its memory
            peer.unsent.clear()
            peer.reads_nothing = True
            with suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)  # which reading from it will say

    def send_all(self, message: Message) -> None:
        """Send a message to all processes of the job, to this one last, as the message may make it exit."""
        here = os.getpid()
        for peer in sorted(self.peers, key=lambda p: p.identity is not None and p.identity.pid == here):
            self.send(peer, message)

    def _flush(self, peer: Peer) -> None:
        if peer.is_closed:
            return
        try:
            with suppress(BlockingIOError):  # sent once the socket can be written to
                del peer.unsent[: peer.connection.send(peer.unsent)]
        except OSError as error:  # reading then finds the end, while the kernel tells the reason once
            peer.error = peer.error or error
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        if peer.events != wanted:
            peer.events = wanted
            self._selector.modify(peer.connection, wanted, peer)

    def hang_up(self, peer: Peer) -> None:
        if not peer.is_closed:
            self._selector.unregister(peer.connection)
            peer.connection.close()
            self.strangers.pop(peer, None)
            self.peers.pop(peer, None)

    def close(self) -> None:
        """Close all sockets and restore the limit of open files; also called in a process that was forked."""
        for peer in (*self.peers, *self.strangers):
            peer.connection.close()
        self._listener.close()
        self._wake_receiver.close()
        self._wake_sender.close()
        self._selector.close()
        self._restore_limit()


def _allow_descriptors(num_more: int) -> Callable[[], None]:
    """Raise the soft limit of open files; return a function that restores it if nobody has changed it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + num_more if hard == resource.RLIM_INFINITY else min(soft + num_more, hard)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        with suppress(OSError, ValueError):  # above what this kernel lets anybody have
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

    def restore() -> None:
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] == wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return restore


def _listen(address: str) -> socket.socket:
    try:
        if not address and socket.has_dualstack_ipv6():
            everywhere = ("", 0)
            return socket.create_server(
                everywhere, family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
            )
        known = socket.getaddrinfo(address or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, where = known[0]
        return socket.create_server(where, family=family, backlog=_BACKLOG)
    except OSError as error:
        raise RendezvousError(
            f"cannot listen on {address}, the address of the first node: {error}. Set MASTER_ADDR to an"
            " address of the node with NODE_RANK=0."
        ) from error


def keep_alive(connection: socket.socket, timeout_s: float) -> None:
    """Turn on TCP keepalive, which notices a host that is unreachable for about `timeout_s` seconds.

    The kernels' probes are the heartbeats: a process that holds the GIL, or is stopped, is not lost.
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


def explain_loss(error: OSError | None, who: Identity, timeout_s: float) -> str:
    """Return a sentence on why the connection to a process was lost: node unreachable, or process died."""
    if error is None or error.errno not in _UNREACHABLE:
        return GONE
    return (
        f"node {who.node_rank} is unreachable: no heartbeat of its control connection for {timeout_s:g} s"
        " (link down, or the node is gone)"
    )

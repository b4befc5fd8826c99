"""Sockets of the control channel: the one that listens, what is known of a connection, heartbeats."""

from __future__ import annotations

import errno
import selectors
import socket
import sys
import time
from contextlib import ExitStack, suppress

from lightning_ddp.errors import RendezvousError
from lightning_ddp.supervise.failure_record import Identity
from lightning_ddp.supervise.protocol import Unpacker

if sys.platform != "win32":
    import resource

__all__ = ["UNREACHABLE", "NumDescriptors", "Peer", "keep_alive", "listen"]

_HELLO_LIMIT_BYTES = 1024
_BACKLOG = 65_535  # the kernel has a limit of its own


class Peer:
    """One connection: a stranger until its hello, then a process of the run."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.unpacker = Unpacker(_HELLO_LIMIT_BYTES)
        self.unsent = bytearray()
        self.events = selectors.EVENT_READ
        self.since = time.monotonic()
        self.identity: Identity | None = None
        self.is_active = False
        self.has_left = False
        self.is_new = False
        """Whether it is in the place of a lost process, and no member yet."""
        self.is_ready = False
        """Whether such a one stands before its first step."""
        self.is_launcher = False
        """Whether it starts the processes of its node."""
        self.is_out = False
        """Whether it was a member, and has left as it was asked to: what it says concerns nobody any more."""
        self.num_ended = 0
        """Runs that it has ended, such as a fit."""

    @property
    def is_closed(self) -> bool:
        """Whether this process has hung up."""
        return self.connection.fileno() < 0


class NumDescriptors:
    """Raises the soft limit of open files, so that connections take none of what the process has itself.

    Args:
        num_more: connections.
    """

    def __init__(self, num_more: int) -> None:
        self._before = self._raised = 0
        if sys.platform == "win32":
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = soft + num_more if hard == resource.RLIM_INFINITY else min(soft + num_more, hard)
        if soft != resource.RLIM_INFINITY and wanted > soft:
            with suppress(OSError, ValueError):  # above what this kernel lets anybody have
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                self._before, self._raised = soft, wanted

    def restore(self) -> None:
        """Sets the limit back, unless somebody else has changed it."""
        if sys.platform == "win32" or not self._raised:
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == self._raised:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._before, hard))
        self._raised = 0


def listen(address: str) -> socket.socket:
    """A socket that listens on any free port of an address of this host; '' for all of them, of IPv6 too.

    Raises:
        RendezvousError: the address is none of this host.
    """
    try:
        if not address and socket.has_dualstack_ipv6():
            everywhere = ("", 0)
            return socket.create_server(
                everywhere, family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
            )
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

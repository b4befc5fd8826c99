"""A process's end of the control channel: a thread that reports and receives."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import lightning_ddp.supervise.protocol as protocol
from lightning_ddp.errors import PeerFailure, RendezvousError
from lightning_ddp.supervise.connections import explain_loss, keep_alive
from lightning_ddp.supervise.failure_detection import silent
from lightning_ddp.supervise.failure_record import GONE, FailureRecord, Identity, Where
from lightning_ddp.supervise.guard import with_stack
from lightning_ddp.supervise.orders import Order, Task, Wish
from lightning_ddp.supervise.protocol import Message, Unpacker, pack
from lightning_ddp.supervise.rank_state import RankState
from lightning_ddp.supervise.settings import REPORTS_A_TIMEOUT, ReplaceSettings, SupervisionSettings

_T = TypeVar("_T")
_RECEIVE_BYTES = 64 * 1024
_FLUSH_WAIT_S = 1.0
_LAST_FLUSH_WAIT_S = 5.0  # longer, as without the last report the exit of this process is a failure
_LOOK_AGAIN_S = 5.0
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    host: str
    port: int
    token: str  # secret of the job
    identity: Identity  # process of the server, which is named if it vanishes
    period_s: float = 1.0  # time between two reports of a process while no fact changes


class ControlClient:
    """Connection of this process to the control server; its own thread calls the callbacks.

    Args:
        on_failure: called once, with the first failure of the job.
        on_order: called while `lock` is held, with the error of an order that stops the main thread, or None.
        where: returns what this rank does.
        parent: process that started this one, if it is of this job: its end is noticed.
        on_message: called with each message that is not for the client itself.
    """

    def __init__(
        self,
        server: ServerAddress,
        identity: Identity,
        settings: SupervisionSettings,
        *,
        on_failure: Callable[[FailureRecord], None],
        on_order: Callable[[PeerFailure | None], None] = lambda error: None,
        where: Callable[[], Where] = Where,
        parent: Identity | None = None,
        on_message: Callable[[Message], None] = lambda message: None,
        is_launcher: bool = False,
    ) -> None:
        self.state = RankState(identity.rank, is_new=identity.start is not None)
        """Read and changed while `lock` is held."""
        self.lock = threading.RLock()
        self.failure: FailureRecord | None = None
        self.has_lost_server = False  # True if the failure is the end of the server, which reports others
        self.server, self._period_s = server.identity, server.period_s
        self._settings, self._parent = settings, parent
        self._first_identity = identity
        self._on_failure, self._on_message, self._where = on_failure, on_message, where
        self._on_order = on_order
        self._heard_at = time.monotonic()
        self._unpacker = Unpacker()
        self._outbox: deque[bytes | threading.Event] = deque()
        """Messages to write, and events to set once all before them is written."""
        self._next_report = time.monotonic() + server.period_s
        self._learned, self._ordered = threading.Event(), threading.Event()  # the latter with each order, too
        self.attachment: Callable[[], Message | None] = lambda: None  # sent with reports, and as a run ends
        self._when_all_left: Callable[[], None] = lambda: None
        self._here: list[int] | None = None
        self._here_answered = threading.Event()
        self._is_closed = self._is_deaf = False
        self._write_error: OSError | None = None
        self._connection = self._connect(server, protocol.Hello(server.token, identity, is_launcher))
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._parent_fd = _open_pid(parent)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, self._send_posted)
        self._selector.register(self._connection, selectors.EVENT_READ, self._receive)
        if self._parent_fd is not None:
            self._selector.register(self._parent_fd, selectors.EVENT_READ, self._lost_parent)
        self._thread = threading.Thread(target=self._run, daemon=True, name="control-watch")
        self._thread.start()

    def _connect(self, server: ServerAddress, hello: Message) -> socket.socket:
        host, port = server.host, server.port
        try:
            connection = socket.create_connection((host, port), timeout=self._settings.heartbeat_timeout_s)
        except OSError as error:
            raise RendezvousError(
                f"rank {self.identity.rank}: cannot reach the control server at {host}, port {port}: {error}."
                " Check that the first node is up and that no firewall blocks the connection."
            ) from error
        connection.settimeout(None)
        keep_alive(connection, self._settings.heartbeat_timeout_s)
        with suppress(OSError):  # at once: the server does not wait long; reading will say what is wrong
            connection.sendall(pack(hello))
        return connection

    # ------------------------------------------------------------------ what is known

    @property
    def identity(self) -> Identity:
        """Identity of this process (node, host, pid), with its rank in the current generation."""
        return replace(self._first_identity, rank=self.state.rank)

    @property
    def has_met(self) -> bool:
        return self.state.has_met

    @property
    def has_been_left(self) -> bool:
        """True if the server has dismissed this process, or has closed, and no failure is known."""
        return self.failure is None and (self._is_deaf or self.state.task is Task.LEAVE)

    # ------------------------------------------------------------------ called by the main thread

    def post(self, message: Message) -> None:
        """Queue a message for the control server and wake the sending thread. Safe in a signal handler."""
        self._outbox.append(pack(message))
        self._wake()

    def update(self, change: Callable[[RankState], _T]) -> _T:
        """Call `change` on this rank's state, send what changed to the server; return the call's result."""
        with self.lock:
            result = change(self.state)
        self._wake()
        return result

    def ask(self, wish: Wish) -> None:
        """Tell the server what a signal has requested (to leave or to stop). Safe in a signal handler."""
        self.state.ask(wish)
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # full of wake-ups: then the thread wakes anyway; or closed
            self._wake_sender.send(b"x")

    def flush(self, timeout_s: float = _FLUSH_WAIT_S) -> bool:
        """Wait until messages and changes are written to the socket; return False if that takes too long."""
        is_written = threading.Event()
        self._outbox.append(is_written)
        self._wake()
        return self._thread.is_alive() and is_written.wait(timeout_s)

    def report(self, record: FailureRecord, *, is_echo: bool) -> None:
        self.post(protocol.SecondaryFailure(record) if is_echo else protocol.Failed(record))
        self.flush()

    def wait_for_verdict(self, timeout_s: float) -> FailureRecord | None:
        """Wait up to `timeout_s` seconds for the first failure of the job; return it, or None."""
        self._learned.wait(timeout_s)
        return self.failure

    def wait_for_all(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Wait until all ranks have connected, polling `check`; raise RendezvousError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self.has_met:
            self.wait_for_order()
            check()
            if self._is_deaf and self.failure is None:
                raise RendezvousError(
                    f"rank {self.identity.rank}: the control server has closed, as the program of rank 0 has"
                    " ended before all ranks had connected. Its output says why."
                )
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"rank {self.identity.rank}: after {timeout_s:g} s not all ranks have arrived;"
                    f" connected are {self.who_is_here()}. Check that the program was started on every"
                    " node."
                )

    def wait_for_order(self) -> None:
        """Block the main thread until the server sends an order or ends, or the job fails; 50 ms at most."""
        self._ordered.wait(_LOOK_EVERY_S)
        self._ordered.clear()

    def who_is_here(self) -> list[int] | None:
        """Ask the server which ranks are connected; return them, or None if it has never answered."""
        self._here_answered.clear()
        self.post(protocol.ListRanks())
        self._here_answered.wait(_FLUSH_WAIT_S)
        return self._here

    def leave_run(
        self, end: Callable[[], None], timeout_s: float, when_all_left: Callable[[], None] = lambda: None
    ) -> None:
        """Call `end`, which ends this rank's run; return once all ranks have ended theirs or one has failed.

        After `timeout_s` seconds this rank leaves alone. Once all have ended the run, the client's thread
        calls `when_all_left`, before it can learn of a later failure.
        """
        deadline, looks_at = time.monotonic() + timeout_s, time.monotonic() + _LOOK_AGAIN_S
        try:
            self._when_all_left = when_all_left
            if (attached := self.attachment()) is not None:
                self.post(attached)
            end()
            while self.failure is None and not self.state.has_ended_everywhere() and not self._is_deaf:
                self.wait_for_order()
                if time.monotonic() >= deadline:
                    self.update(RankState.leave)
                    return
                if time.monotonic() >= looks_at:  # a rank may wait for what this rank will never call
                    looks_at = time.monotonic() + _LOOK_AGAIN_S
                    self.post(protocol.CheckOrphanedWaits())
        finally:
            self._when_all_left = lambda: None

    def close(self) -> None:
        """Tell the server that this process may exit without failing the job; end the client's thread."""
        self.update(RankState.leave)
        self.flush(_LAST_FLUSH_WAIT_S)
        self._is_closed = True
        self._wake()
        self._thread.join(timeout=_FLUSH_WAIT_S)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select(self._report()):
                if not self._is_deaf or key.fileobj is self._wake_receiver:
                    key.data()
        self.close_sockets()

    def _write(self, data: bytes) -> None:
        try:
            self._connection.sendall(data)
        except OSError as error:  # reading then finds the end, while the kernel tells the reason once
            self._write_error = self._write_error or error

    def _report(self) -> float | None:
        """Send a due or changed report; take a silent server as a failure; return seconds to next call."""
        if self._is_deaf:
            return None
        now = time.monotonic()
        is_due = now >= self._next_report
        with self.lock:
            report = self.state.news(self._where, is_due=is_due)
        for message in (report, self.attachment() if is_due else None):
            if message is not None:
                self._write(pack(message))
        if is_due and now - self._next_report > self._period_s:  # this process was stopped itself
            self._heard_at = now
        if is_due:
            self._next_report = now + self._period_s
        stall_s = self._settings.stall_timeout_s
        if stall_s is None or not self.has_met:  # before, the server says nothing
            return max(0.0, self._next_report - now)
        silent_at = self._heard_at + stall_s * (1 + 1 / REPORTS_A_TIMEOUT)
        if now >= silent_at:
            failure = with_stack(silent(self.server, stall_s))
            self.post(protocol.Failed(failure))  # which the server reads when it is continued
            self._learn(failure)
            return None
        return max(0.0, min(self._next_report, silent_at) - now)

    def _stop_listening(self) -> None:
        """Stop hearing the server and the parent process; queued messages are still sent."""
        self._is_deaf = True
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._wake_receiver:
                self._selector.unregister(key.fileobj)

    def _send_posted(self) -> None:
        self._wake_receiver.recv(4096)
        while self._outbox:
            match self._outbox.popleft():
                case threading.Event() as is_written:
                    self._report()
                    is_written.set()
                case data:
                    self._write(data)
        self._report()

    def _receive(self) -> None:
        try:
            data = self._connection.recv(_RECEIVE_BYTES)
        except OSError as error:
            self._lost_server(self._write_error or error)
            return
        if not data:
            self._lost_server(self._write_error)
            return
        try:
            for message in self._unpacker.feed(data):
                self._handle(message)
        except Exception as error:  # noqa: BLE001 (without this thread the rank would hear of nothing)
            text = f"control channel: {type(error).__name__}: {error}"
            self._learn(FailureRecord.of_identity(self.server, text))

    def _handle(self, message: Message) -> None:
        self._heard_at = time.monotonic()
        match message:
            case protocol.Failure(record):
                self._learn(record)
            case Order():
                with self.lock:
                    self._on_order(self.state.hear(message))
                    if self.failure is None and self.state.has_ended_everywhere():
                        self._when_all_left()
                self._ordered.set()
            case protocol.RankList(ranks):
                self._here = list(ranks)
                self._here_answered.set()
            case protocol.Closing():
                self._stop_listening()
                self._ordered.set()
            case _:
                self._on_message(message)

    def _lost_server(self, error: OSError | None) -> None:
        text = explain_loss(error, self.server, self._settings.heartbeat_timeout_s)
        is_elsewhere = self.identity.node_rank != self.server.node_rank
        if is_elsewhere and isinstance(self._settings.recovery, ReplaceSettings):
            text += (
                "\n  The other ranks may continue. This node can join again: start the same program here"
                f" with the same NODE_RANK={self.identity.node_rank}"
            )
        self.has_lost_server = self.failure is None
        self._learn(FailureRecord.of_identity(self.server, text))

    def _lost_parent(self) -> None:
        assert self._parent is not None
        if self._parent == self.server:
            self._lost_server(None)
        else:  # it lives on another node than the server, which may know better why
            self._selector.unregister(self._parent_fd or 0)
            self.post(protocol.PeerDisconnected(FailureRecord.of_identity(self._parent, GONE)))

    def _learn(self, record: FailureRecord) -> None:
        if self.failure is None:
            self.failure = record
            self._stop_listening()
            self._learned.set()
            self._ordered.set()
            self._on_failure(record)

    def close_sockets(self) -> None:
        """Close all sockets of this client; also called in a forked process, for its inherited copies."""
        for closed in (self._connection, self._wake_receiver, self._wake_sender, self._selector):
            closed.close()
        if self._parent_fd is not None:
            with suppress(OSError):
                os.close(self._parent_fd)


def ask(server: ServerAddress, question: Message, *, timeout_s: float) -> Message:
    """Send a question to the control server from a process that is no rank; return its first answer."""
    try:
        with socket.create_connection((server.host, server.port), timeout=timeout_s) as connection:
            hello = protocol.Hello(server.token, Identity(rank=-1, node_rank=-1))
            connection.sendall(pack(hello) + pack(question))
            unpacker = Unpacker()
            while data := connection.recv(_RECEIVE_BYTES):
                for message in unpacker.feed(data):
                    return message
    except OSError as error:
        raise RendezvousError(
            f"cannot reach the control server at {server.host}, port {server.port}: {error}"
        ) from error
    raise RendezvousError(f"the control server at {server.host}, port {server.port} does not answer")


def _open_pid(process: Identity | None) -> int | None:
    """Return a pidfd that gets readable when the process ends; None if it is gone, or there are no pidfds."""
    if process is None or not hasattr(os, "pidfd_open"):
        return None
    with suppress(OSError):  # it is gone: then its connection is closed as well
        return os.pidfd_open(process.pid)
    return None

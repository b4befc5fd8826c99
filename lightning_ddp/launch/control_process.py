"""The control process of `python -m lightning_ddp run`: it hosts a run's store and control server.

The supervisor forks it when rank 0 asks for it, and hosts nothing itself, so that its later forks are sound.
To rank 0 the server is then as to any other rank: in another process, which outlives it.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from lightning_ddp.launch.rendezvous import HostedStore
from lightning_ddp.supervise.failure_record import FailureRecord, Identity, describe_exit, render
from lightning_ddp.supervise.guard import PATIENCE_S, tell_guard
from lightning_ddp.supervise.job_control import LocalProcesses
from lightning_ddp.supervise.protocol import Exited, Message
from lightning_ddp.supervise.root_cause import ECHO_WAIT_S, EXIT_WAIT_S
from lightning_ddp.supervise.server import ControlServer
from lightning_ddp.supervise.settings import SupervisionSettings

__all__ = ["ALL_ENDED", "LONGEST_MESSAGE", "REPORTED", "START", "WENT_ON", "ControlProcess", "serve"]

LONGEST_MESSAGE = 150_000
START = 0
"""In the place of a signal: the supervisor is to start processes, whose places follow."""
ALL_ENDED = b"all"
"""What the supervisor says last."""
REPORTED, WENT_ON = 1, 2
"""Exit codes: it has reported a failure; the others went on without rank 0, so that its end was none."""
_LOOK_EVERY_S = 0.05
_ORPHANS_S = 10.0


# ---------------------------------------------------------------------- in the control process


def serve(rank_0: socket.socket, supervisor: socket.socket) -> int:
    """Answers rank 0 until the supervisor says that all ranks have ended; then reports a failure.

    Args:
        rank_0: where rank 0 asks.
        supervisor: where the supervisor tells of ranks that have ended, and is asked to signal some.

    Returns:
        The exit code: `REPORTED`, `WENT_ON`, or 0 where there was nothing to do.
    """
    host = _Host(supervisor)
    heard = [rank_0, supervisor]
    while True:
        for ready in select.select(heard, (), ())[0]:
            data = _receive(ready)
            if ready is supervisor:
                if not data:  # killed, as this process is in a moment: all ranks see their connections close
                    os._exit(1)
                if data == ALL_ENDED:
                    return host.report()
                host.ended(*json.loads(data))
            elif data:
                with suppress(OSError):  # it has ended
                    rank_0.send(host.answer(data))
            else:
                heard.remove(rank_0)


def _receive(connection: socket.socket) -> bytes:
    with suppress(ConnectionResetError):  # the other end has closed, and left something unread
        return connection.recv(LONGEST_MESSAGE)
    return b""


class _Host(LocalProcesses):
    """What rank 0 would host under `python`; its public methods without a docstring are called for that."""

    def __init__(self, supervisor: socket.socket) -> None:
        self._supervisor = supervisor
        self._store: HostedStore | None = None
        self._server: ControlServer | None = None
        self._grace_s = 0.0
        self._is_failing = False
        self._has_rank_0_ended = False
        self._rank_0_pid = 0

    def answer(self, data: bytes) -> bytes:
        """Does what rank 0 asks for."""
        number, name, args, options = pickle.loads(data)
        result: Any
        try:
            result = getattr(self, name)(*args, **options)
        except Exception as error:  # noqa: BLE001 (raised in rank 0)
            result = error
        return pickle.dumps((number, result))

    def open_store(self, address: str, port: int | None, named_by: str) -> int:
        self._store = None
        self._store = HostedStore(address, port, named_by)
        return int(self._store.store.port)

    def close_store(self) -> None:
        self._store = None

    def open_server(self, address: str, settings: SupervisionSettings, **options: Any) -> int:
        self.close_server()
        self._grace_s = settings.failure_grace_s
        self._is_failing = False
        self._server = ControlServer(address, settings=settings, processes=self, **options)
        return self._server.port

    def close_server(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None

    def tell(self, message: Message) -> None:
        if self._server is not None:
            self._server.tell(message)

    def first_failure(self) -> FailureRecord | None:
        first = None if self._server is None else self._server.first_failure
        return None if first is None else first.cut()

    def ended(self, pid: int, code: int, is_rank_0: bool, place: int) -> None:
        """A rank has ended."""
        if is_rank_0:
            self._rank_0_pid = pid
            self._has_rank_0_ended = True
        server = self._server
        if server is None:
            return
        how, is_well = describe_exit(code), code == 0 and server.has_met
        if server.goes_on and (not is_rank_0 or is_well):
            identity: Identity | None = Identity(rank=place, node_rank=0, pid=pid)
        elif is_well or not (is_rank_0 or self._has_rank_0_ended):  # rank 0 knows of it
            return
        else:
            identity = server.member(pid, node_rank=0)
            if identity is None and is_rank_0:
                identity = Identity(rank=0, node_rank=0, pid=pid)
            how += " before it had joined the others" if code == 0 else ""
            self._is_failing |= identity is not None
        if identity is not None:
            message = f"the process {how}; its output is above"
            server.tell(Exited(FailureRecord.of_identity(identity, message, exit_code=code)))

    def report(self) -> int:
        """All ranks have ended; says which one failed first, if rank 0 has not. Returns the exit code."""
        if self._server is None:
            return 0
        known = [identity.pid for identity in self._here(self._server)]
        has_gone_on = self._server.has_met and self._rank_0_pid not in known
        wait_s = ECHO_WAIT_S + EXIT_WAIT_S if self._is_failing and not has_gone_on else 0.0
        failure = self._server.wait_for_verdict(wait_s)
        deadline = time.monotonic() + _ORPHANS_S
        while failure is not None and any(map(_is_alive, known)) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)  # ranks that the supervisor has not forked
        self._server.close()
        if failure is None:
            return WENT_ON if has_gone_on else 0
        print(render(failure), file=sys.stderr, end="", flush=True)
        return REPORTED

    # ------------------------------------------------------------------ in the server's thread

    def kill_one(self, pid: int) -> None:
        self._ask(signal.SIGKILL, [pid])

    def start_again(self, place: int, number: int) -> None:
        self._ask(START, [place, number])

    def failed(self, record: FailureRecord) -> None:
        """All ranks are to end; those that are stopped are continued for that."""
        assert self._server is not None
        self._signal(signal.SIGCONT, self._here(self._server))
        limit_s = min(self._grace_s, PATIENCE_S) if self._has_rank_0_ended else self._grace_s
        tell_guard(os.getppid(), -1, True, limit_s)

    def _here(self, server: ControlServer) -> list[Identity]:
        return [identity for identity in server.identities if identity.node_rank == 0]

    def _signal(self, number: signal.Signals, ranks: Iterable[Identity]) -> None:
        """Has the supervisor, which alone knows that a process id is still that of its child, signal some."""
        self._ask(number, [identity.pid for identity in ranks])

    def _ask(self, what: int, about: list[int]) -> None:
        with suppress(OSError):
            self._supervisor.send(json.dumps([what, about]).encode())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# ---------------------------------------------------------------------- in rank 0


class ControlProcess:
    """The control process, as rank 0 has it: in the place of a `ControlServer` of its own, once that is open.

    Args:
        pid: its process id.
        connection: where it is asked.
    """

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.identity = Identity(rank=-1, node_rank=0, pid=pid)
        self.token, self.port = "", 0
        self._connection = connection
        self._lock = threading.Lock()
        self._num_asked = 0

    def open_store(self, address: str, port: int | None, named_by: str) -> Any:
        """As `HostedStore`, and connects to it.

        Raises:
            RendezvousError: the port is taken, or the address is none of this host.
        """
        bound = self._ask("open_store", address, port, named_by)
        return dist.TCPStore(address, bound, is_master=False)

    def close_store(self) -> None:
        """Frees its port."""
        self._try_to_ask("close_store")

    def open_server(self, address: str, **options: Any) -> None:
        """Opens a control server in the place of the one before; arguments as of `ControlServer`."""
        self.token, self.port = options["token"], self._ask("open_server", address, **options)

    def _try_to_ask(self, name: str, *args: Any) -> Any:
        """None if it is gone, which all ranks are told as a failure."""
        with suppress(OSError):
            return self._ask(name, *args)
        return None

    def _ask(self, name: str, *args: Any, **options: Any) -> Any:
        with self._lock:
            number = self._num_asked = self._num_asked + 1
            self._connection.send(pickle.dumps((number, name, args, options)))
            answered, result = 0, None
            while answered != number:  # an answer is left over where a failure has interrupted who asked
                data = self._connection.recv(LONGEST_MESSAGE)
                if not data:
                    raise ConnectionResetError("the control process has ended")
                answered, result = pickle.loads(data)
        if isinstance(result, Exception):
            raise result
        return result

    # ------------------------------------------------------------------ as `ControlServer`

    @property
    def first_failure(self) -> FailureRecord | None:
        failure: FailureRecord | None = self._try_to_ask("first_failure")
        return failure

    def wait_for_verdict(self, timeout_s: float) -> FailureRecord | None:
        deadline = time.monotonic() + timeout_s
        while (failure := self.first_failure) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        return failure

    def tell(self, message: Message) -> None:
        self._try_to_ask("tell", message)

    def close(self) -> None:
        """The failure, if there was one, is this process's to report."""
        self._try_to_ask("close_server")

    def close_sockets(self) -> None:
        self._connection.close()

"""The control server: a thread to which every process of the job is connected."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque

import lightning_ddp.supervise.protocol as protocol
from lightning_ddp.supervise.connections import Connections, Peer
from lightning_ddp.supervise.failure_record import FailureRecord, Identity
from lightning_ddp.supervise.guard import with_stack
from lightning_ddp.supervise.job_control import JobControl, LocalProcesses
from lightning_ddp.supervise.settings import SupervisionSettings

_log = logging.getLogger("lightning_ddp")


class ControlServer:
    """Server thread to which all processes of a job connect; it tells all of them the first failure.

    Binds the interface of this host's `address`; all with `any_interface`, if that is the loopback here only.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str,
        world_size: int,
        settings: SupervisionSettings,
        any_interface: bool = False,
        processes: LocalProcesses | None = None,
    ) -> None:
        self.token = token
        self._processes = processes or LocalProcesses()
        interface = "" if any_interface else address
        self._connections = Connections(interface, world_size, settings.heartbeat_timeout_s)
        self.port = self._connections.port
        self._control = JobControl(
            self._connections,
            token=token,
            world_size=world_size,
            settings=settings,
            processes=self._processes,
            say=_say,
            with_stack=with_stack,
            pid=os.getpid(),
        )
        self._job = self._control.job
        self._injected: deque[protocol.Failed] = deque()
        self._is_closed = False
        self._decided = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="control-server")
        self._thread.start()

    # ------------------------------------------------------------------ called by other threads

    @property
    def first_failure(self) -> FailureRecord | None:
        return self._control.first_failure

    @property
    def has_met(self) -> bool:
        return self._job.has_met

    @property
    def identities(self) -> list[Identity]:
        return [member.who for member in self._job.roster.remaining]

    @property
    def goes_on(self) -> bool:
        """True if recovery is on: the job continues without lost ranks, so each exit has to be reported."""
        return self._job.goes_on

    def knows(self, who: Identity) -> bool:
        return self._job.roster.of(who) is not None

    def wait_for_verdict(self, timeout_s: float) -> FailureRecord | None:
        """Wait up to `timeout_s` seconds until the job's first failure is certain; return it, or None."""
        self._decided.wait(timeout_s)
        return self.first_failure

    def goes_on_without(self, slot: int) -> bool:
        """Return True if recovery is on and the current generation has no process for initial rank `slot`."""
        return self.goes_on and all(member.place != slot for member in self._job.roster.members)

    def tell(self, message: protocol.Failed) -> None:
        """Pass a failure report from this very process to the server's thread. Thread-safe."""
        self._injected.append(message)
        self._connections.wake()

    def close(self) -> None:
        """Tell all processes that the server ends without a failure, end its thread, and free the port."""
        self._is_closed = True
        self._connections.wake()
        self._thread.join(timeout=5)

    def close_sockets(self) -> None:
        """Close all sockets of the server; also called in a forked process, for its inherited copies."""
        self._connections.close()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        control, roster = self._control, self._job.roster
        while not self._is_closed:
            num_awaited = roster.num_places - len(roster.members)
            for peer, data, error in self._connections.wait(control.deadline(time.monotonic()), num_awaited):
                if data:
                    self._hear(peer, data)
                else:
                    control.lost(peer, error, time.monotonic())
            while self._injected:
                control.report(self._injected.popleft(), time.monotonic())
            first = control.decide(time.monotonic())
            if first is not None:
                self._decided.set()
                self._processes.failed(first)
        _say(self._job.history.tell())
        self._connections.send_all(protocol.Closing())
        self.close_sockets()

    def _hear(self, peer: Peer, data: bytes) -> None:
        try:
            for message in peer.unpacker.feed(data):
                self._control.hear(peer, message, time.monotonic())
        except Exception:  # noqa: BLE001 (whatever one process says, the others keep their server)
            _log.debug(
                "control channel: closed the connection to %s", peer.identity or "a stranger", exc_info=True
            )
            self._control.hang_up(peer, time.monotonic())


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)

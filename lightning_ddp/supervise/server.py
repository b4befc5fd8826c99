"""The control server: every process of the run is connected to it, and it says what happened first.

It runs in one thread of the process that started the run (rank 0, the launching process of spawned ranks, or
a supervisor's control process) and sleeps until a message comes. It never takes part in a collective. Between
two runs (a fit, a test ...) the thread can rest: what the others say waits in the kernel.
"""

from __future__ import annotations

import hmac
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import replace

import lightning_ddp.supervise.protocol as protocol
from lightning_ddp.supervise.connections import Connections, Peer, explain_loss
from lightning_ddp.supervise.failure_record import GONE, FailureRecord, Identity
from lightning_ddp.supervise.members import LocalProcesses, Members
from lightning_ddp.supervise.membership import Phase
from lightning_ddp.supervise.protocol import Message, ProtocolError
from lightning_ddp.supervise.settings import ReconcileSettings
from lightning_ddp.supervise.stop_main import StopAgreement

__all__ = ["ECHO_WAIT_S", "EXIT_WAIT_S", "ControlServer", "Verdict"]

EXIT_WAIT_S = 0.25
"""How long a process that vanished waits for its exit code, which its launcher learns at the same time."""
ECHO_WAIT_S = 2.0
"""How long a lost connection waits for the failure behind it."""

_log = logging.getLogger("lightning_ddp")


class Verdict:
    """Decides which failure was first. Pure: told what happened and when.

    A process that dies takes others along: their connections to it break, and they report that too, often
    sooner. So a broken connection and a process that vanished wait a moment for a better explanation; an
    exception of the user's code needs none.
    """

    def __init__(self) -> None:
        self.first: FailureRecord | None = None
        """It never changes, but where the others go on without that rank."""
        self._vanished: dict[int, tuple[float, FailureRecord]] = {}
        self._echoes: list[tuple[float, FailureRecord]] = []

    def accuse(self, record: FailureRecord) -> None:
        """A failure that explains itself: an exception of user code, or a process with its exit code."""
        if self.first is not None:
            return
        known = self._vanished.get(record.rank)
        if known is None and self._vanished:
            record = min(self._vanished.values(), key=lambda entry: entry[0])[1]  # it was noticed earlier
        self.first = record

    def vanished(self, record: FailureRecord, now: float) -> None:
        """A process whose connection closed without a word."""
        known = self._vanished.get(record.rank)
        if known is None:
            self._vanished[record.rank] = (now + EXIT_WAIT_S, record)
        elif known[1].exit_code is not None:  # its launcher had been sooner: all is known
            self.accuse(known[1])

    def echo(self, record: FailureRecord, now: float) -> None:
        """An exception that is usually the consequence of a failure elsewhere: a lost connection."""
        self._echoes.append((now + ECHO_WAIT_S, record))

    def exited(self, record: FailureRecord, description: str, now: float) -> None:
        """A launcher's report of a child that ended without success; `exit_code` is set."""
        if self.first is not None or record.exit_code is None:
            return
        if any(echo.rank == record.rank for _, echo in self._echoes):
            return  # it failed in the open, and is waiting for a better explanation already
        record = record.with_exit(record.exit_code, description)
        if record.rank in self._vanished:
            self.accuse(record)
        else:  # the last that it said may still be unread
            self.vanished(record, now)

    def decide(self, now: float) -> FailureRecord | None:
        """The first failure, as soon as it is certain."""
        deadline = self.deadline()
        if deadline is not None and deadline <= now:
            named = list(self._vanished.values()) or self._echoes
            self.first = min(named, key=lambda entry: entry[0])[1]
        return self.first

    def set_aside(self, rank: int) -> None:
        """The others go on without a rank: what is known of it, and what followed from it, is settled."""
        self.first = None
        self._vanished.pop(rank, None)
        self._echoes.clear()

    def deadline(self) -> float | None:
        """When to decide at the latest; None if nothing is pending."""
        waiting = [*self._vanished.values(), *self._echoes]
        return min((deadline for deadline, _ in waiting), default=None) if self.first is None else None


class ControlServer:
    """Listens for the processes of a run, and tells all of them the first failure.

    Args:
        address: name or address of this host under which the others reach it; its interface is bound.
        token: the run's secret; a connection that does not begin with it is closed.
        world_size: number of ranks.
        settings: times.
        any_interface: bind all interfaces, for an address that resolves to the loopback on this host only.
        processes: those of this node. Launchers of other nodes are told by messages.

    Raises:
        RendezvousError: the address is not one of this host.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str,
        world_size: int,
        settings: ReconcileSettings,
        any_interface: bool = False,
        processes: LocalProcesses | None = None,
    ) -> None:
        self.token = token
        self._settings, self._processes = settings, processes or LocalProcesses()
        self._verdict = Verdict()
        self._stop = StopAgreement(settings.failure_grace_s)
        self._connections = Connections("" if any_interface else address, world_size)
        self.port = self._connections.port
        self._members = Members(self._connections, world_size, settings, self._processes)
        self._num_ended: Counter[int] = Counter()
        """Number of a run -> ranks that have ended it."""
        self._num_left = 0
        """Runs that all ranks have ended, and so may leave."""
        self._is_told = False
        self._checkpoint: str | None = None
        self._injected: deque[Message] = deque()
        self._is_closed = self._is_resting = False
        self._decided = threading.Event()
        self._thread = self._start()

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, daemon=True, name="control-server")
        thread.start()
        return thread

    # ------------------------------------------------------------------ called by other threads

    @property
    def first_failure(self) -> FailureRecord | None:
        """The first failure of the run, once it is certain, with the checkpoint that was saved then."""
        first = self._verdict.first if self._is_told else None  # before, the others may go on without it
        return first if first is None else replace(first, checkpoint=self._checkpoint)

    @property
    def has_met(self) -> bool:
        """Whether all ranks have been connected."""
        return self._members.has_met

    @property
    def identities(self) -> list[Identity]:
        """The ranks that have connected, and belong to the run."""
        return list(self._members.identities.values())

    @property
    def goes_on(self) -> bool:
        """Whether the run goes on without ranks that it loses, so that each end is told, however it came."""
        return self._members.goes_on

    def member(self, pid: int, node_rank: int) -> Identity | None:
        """A process as launchers know it, with the rank that it had in the beginning; None for a stranger."""
        for place, who in list(self._members.identities.items()):
            if (who.pid, who.node_rank) == (pid, node_rank):
                return replace(who, rank=place)
        return None

    def wait_for_verdict(self, timeout_s: float) -> FailureRecord | None:
        """The first failure, waiting up to `timeout_s` seconds for it to be certain."""
        self._decided.wait(timeout_s)
        return self.first_failure

    def goes_on_without(self, place: int) -> bool:
        """Whether there is a generation of ranks without the one that had the rank `place` at first."""
        return self.goes_on and place not in self._members.membership.members

    def tell(self, message: Message) -> None:
        """Handles a message of this very process, as if a peer had sent it."""
        self._injected.append(message)
        self._connections.wake()

    def rest(self) -> None:
        """Ends the thread; nobody is heard until `resume`. No deadline is judged meanwhile."""
        self._is_resting = True
        self._connections.wake()
        self._thread.join()

    def resume(self) -> None:
        """Starts the thread again, if it rests. What has come meanwhile it takes as coming now."""
        if self._is_resting:
            self._is_resting = False
            self._thread = self._start()

    def close(self) -> None:
        """Tells the processes that are connected that this is no failure, ends the thread, frees the port."""
        self.resume()
        self._is_closed = True
        self._connections.wake()
        self._thread.join(timeout=5)

    def close_sockets(self) -> None:
        """Called in a forked process, so that a socket does not live on there."""
        self._connections.close()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        members = self._members
        while not (self._is_closed or self._is_resting):
            num_awaited = members.world_size - len(members.ranks)
            for peer, data, error in self._connections.wait(self._deadline(), num_awaited):
                if data:
                    self._hear(peer, data)
                else:
                    self._lost(peer, error)
            while self._injected:
                self._handle_report(self._injected.popleft(), time.monotonic())
            self._decide(time.monotonic())
        if self._is_closed:
            self._tell_history()
            self._connections.send_all([protocol.Closing()])
            self.close_sockets()

    def _deadline(self) -> float | None:
        members = self._members
        deadlines = [self._verdict.deadline(), self._stop.deadline(), members.inspection.deadline()]
        if self._verdict.first is None:
            deadlines.append(members.stall.next_look(time.monotonic()))
        if not self._is_told:
            deadlines.append(members.deadline())
            if not self._waits_for_verdict:
                deadlines.append(members.membership.deadline())
        return min((at for at in deadlines if at is not None), default=None)

    def _hear(self, peer: Peer, data: bytes) -> None:
        try:
            for message in peer.unpacker.feed(data):
                self._handle(peer, message, time.monotonic())
        except Exception:  # noqa: BLE001 (whatever one process says, the others keep their server)
            _log.debug("control channel: hung up on %s", peer.identity or "a stranger", exc_info=True)
            self._members.hang_up(peer)

    def _handle(self, peer: Peer, message: Message, now: float) -> None:
        who, members, send = peer.identity, self._members, self._connections.send
        if who is None:
            self._greet(peer, message)
            return
        match message:
            case protocol.WhoIsMissing():
                send(peer, protocol.Missing(members.missing_nodes()))
            case protocol.Dismiss(node):
                send(peer, self._dismiss(node, now))
            case protocol.Progress(where) if peer.is_new or (who.rank >= 0 and not peer.is_out):
                if peer.is_active and not peer.is_new:
                    members.stall.report(who, where, now)
                send(peer, protocol.Beat(members.stall.interval_s))
            case _ if peer.is_new:
                members.handle_new(peer, who, message, now)
            case _ if who.rank >= 0 and not peer.is_out:
                self._handle_member(peer, who, message, now)

    def _handle_member(self, peer: Peer, who: Identity, message: Message, now: float) -> None:
        members, send_all = self._members, self._connections.send_all
        match message:
            case protocol.Active(is_active):
                peer.is_active = is_active
                if is_active:
                    peer.has_left = False
                else:
                    send_all(self._stop.left(who.rank))
                    members.stall.forget(who.rank)
                    self._note_end(peer)
                members.inspection.entered(who.rank, message)
            case protocol.Stopped():
                send_all(self._stop.left(who.rank))
            case protocol.Saved(path):
                self._checkpoint = path
            case protocol.Who():
                self._connections.send(peer, protocol.Here(tuple(sorted(members.ranks))))
            case protocol.Bye():
                peer.has_left = True
            case protocol.Stop():
                self._have_all_stop(message, now)
            case protocol.Leave(is_node):
                place = members.place_of(who.rank)
                self._ask_to_leave(members.on_node(who.node_rank) if is_node else [place], now)
            case protocol.Failed() | protocol.Echoed() | protocol.Vanished() | protocol.Exited():
                self._handle_report(message, now)
            case protocol.Position(position):
                send_all(self._stop.report(who.rank, position))
                members.heard(members.place_of(who.rank), message, now)
            case protocol.Present() | protocol.Joined() | protocol.Begun() | protocol.Declined():
                members.heard(members.place_of(who.rank), message, now)
            case protocol.Prepared():
                members.start_spares(now)
            case _:
                members.deliver(members.inspection.handle(who.rank, message, now))

    def _greet(self, peer: Peer, message: Message) -> None:
        if not isinstance(message, protocol.Hello):
            raise ProtocolError("no hello")
        if not hmac.compare_digest(message.token.encode(), self.token.encode()):
            raise ProtocolError("another token")
        self._members.admit(peer, message)
        if self._verdict.first is not None and message.identity.rank >= 0 and not peer.is_new:
            self._connections.send(peer, protocol.Failure(self._verdict.first.cut()))

    def _note_end(self, peer: Peer) -> None:
        """A rank has ended a run. It leaves it when all have: until then one of them may still fail."""
        peer.num_ended += 1
        self._num_ended[peer.num_ended] += 1
        if self._num_ended[peer.num_ended] == self._members.world_size:
            self._num_left = max(self._num_left, peer.num_ended)
            del self._num_ended[peer.num_ended]
            self._connections.send_all([protocol.Left()])
        self._members.close_late()

    def _handle_report(self, message: Message, now: float) -> None:
        match message:
            case protocol.Failed(record):
                self._verdict.accuse(record)
            case protocol.Echoed(record):
                self._verdict.echo(record, now)
            case protocol.Vanished(record):
                if (news := self._members.vanished(record)) is not None:
                    self._verdict.vanished(news, now)
            case protocol.Exited(record):
                if (news := self._members.exited(record, now)) is not None:
                    self._verdict.exited(news, record.message, now)

    def _lost(self, peer: Peer, error: OSError | None) -> None:
        who, now = peer.identity, time.monotonic()
        self._members.hang_up(peer)
        if who is None or peer.is_new or peer.is_out:
            return  # if it is one of the run its launcher tells of its end
        self._members.stall.forget(who.rank)
        is_in_run = peer.is_active or peer.num_ended > self._num_left
        if not is_in_run or peer.has_left:
            return
        message = explain_loss(error, who, self._settings.heartbeat_timeout_s)
        record = FailureRecord.of_identity(who, message)
        if message == GONE:
            self._verdict.vanished(record, now)
        elif not self._lose(record, now, has_ended=True):
            self._verdict.accuse(record)
        else:
            for other in [self._members.identities[place] for place in self._members.on_node(who.node_rank)]:
                self._lose(FailureRecord.of_identity(other, message), now, has_ended=True)

    def _lose(self, record: FailureRecord, now: float, *, has_ended: bool) -> bool:
        """A rank is lost; returns whether the others may go on without it."""
        return not self._is_told and self._members.lose(record, now, has_ended=has_ended)

    # ------------------------------------------------------------------ what is to be done

    def _decide(self, now: float) -> None:
        members = self._members
        is_meeting = members.membership.phase not in (Phase.RUNNING, Phase.OVER)
        stalled = members.stall.find(now, may_all_wait=is_meeting)
        if stalled is not None and not self._lose(stalled, now, has_ended=False):
            self._verdict.accuse(stalled)
        members.deliver(members.inspection.due(now))
        stranded = members.inspection.stranded(self._leaving_ranks)
        if stranded is not None and stranded[0] in members.ranks:
            identity = members.identities[members.place_of(stranded[0])]
            self._verdict.accuse(FailureRecord.of_identity(identity, stranded[1]))
        late = self._stop.overdue(now)
        if late is not None:
            self._verdict.accuse(late)
        if not self._is_told:
            self._go_on(now)
            members.fill_vacancies(now)
            self._change_members(now)
        first = self._verdict.decide(now)
        if first is not None and not self._is_told:
            self._is_told = True
            self._tell_history()
            self._connections.send_all([protocol.Failure(first.cut())])
            self._decided.set()
            self._processes.failed(first)

    def _go_on(self, now: float) -> None:
        """Takes what the ranks may go on without out of the verdict, and forms a generation if it is time."""
        membership = self._members.membership
        while (first := self._verdict.decide(now)) is not None and self._is_of_one_rank(first):
            if not self._lose(first, now, has_ended=first.exit_code is not None):
                break
            self._verdict.set_aside(first.rank)
        if not self._waits_for_verdict and self._members.go_on(now):
            self._connections.send_all(self._stop.restart(set(range(self._members.world_size))))
        if membership.phase is Phase.OVER and membership.cause is not None and self._verdict.first is None:
            message = f"{membership.cause.message}\n  The others did not go on: {membership.reason}"
            self._verdict.accuse(replace(membership.cause, message=message))

    @property
    def _waits_for_verdict(self) -> bool:
        """Whether one of those that gather may be lost: then it is not to be a member of what follows."""
        is_gathering = self._members.membership.phase is Phase.GATHERING
        return is_gathering and self._verdict.deadline() is not None

    def _is_of_one_rank(self, record: FailureRecord) -> bool:
        """Whether the others may go on: a process has ended, or its code has raised where that is allowed."""
        recovery, kind = self._settings.recovery, record.exception_type
        if record.exception_class is None or recovery is None or not recovery.exceptions:
            has_ended = record.exit_code is not None or record.message == GONE
            return kind == "SystemExit" or (kind is None and has_ended)
        is_of_user = not record.exception_class.startswith("lightning_ddp.")
        return is_of_user and kind != "KeyboardInterrupt" and record.pid != os.getpid()

    def _change_members(self, now: float) -> None:
        """Lets in those that are ready, and has those leave that are asked to."""
        if self._stop.deadline() is not None:
            return
        why = self._members.membership.why_to_stop(now)
        if why is not None:
            print(f"lightning_ddp: {why}", file=sys.stderr, flush=True)
            self._have_all_stop(protocol.Stop(signal.SIGTERM, is_requeue=False), now)
        self._members.send_to_places(self._members.membership.gather(now))

    def _have_all_stop(self, reason: protocol.Stop, now: float) -> None:
        self._members.membership.stay()
        active = {rank for rank, peer in self._members.ranks.items() if peer.is_active}
        self._connections.send_all(self._stop.request(active, now, reason))

    def _ask_to_leave(self, places: list[int], now: float) -> None:
        """Members are asked to leave."""
        if self.goes_on and self._stop.deadline() is None:
            self._members.membership.leave(places, now)

    def _dismiss(self, node: int, now: float) -> protocol.Dismissed:
        """Asks the members of a node to leave; returns which do, or why not."""
        identities, places = self._members.identities, self._members.on_node(node)
        why = None
        if not self.goes_on:
            why = "the others of this run would not go on: it has on_failure='stop'"
        elif node == 0:
            why = "the run needs its first node, with the control server; SIGTERM to its process stops all"
        elif not places:
            nodes = sorted({who.node_rank for who in identities.values()})
            why = f"no rank of node {node} is in the run; there are nodes {', '.join(map(str, nodes))}"
        elif self._stop.deadline() is not None:
            why = "all ranks stop already"
        else:
            self._ask_to_leave(places, now)
        leaving = [] if why is not None else places
        return protocol.Dismissed(tuple(sorted(identities[place].rank for place in leaving)), why)

    def _leaving_ranks(self) -> set[int]:
        return {rank for rank, peer in self._members.ranks.items() if peer.num_ended > self._num_left}

    def _tell_history(self) -> None:
        """Prints which generations there were; before a failure that ends the run is reported."""
        print(self._members.history.tell(), end="", file=sys.stderr, flush=True)

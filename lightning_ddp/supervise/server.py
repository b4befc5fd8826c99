"""The control server: every process of the run is connected to it, and it says what happened first.

It runs in one thread of the process that started the run (rank 0, the launching process of spawned ranks, or
a supervisor's control process) and sleeps until a message comes. It never takes part in a collective. Between
two runs (a fit, a test ...) the thread can rest: what the others say waits in the kernel.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import islice, takewhile

from lightning_ddp.supervise.connections import UNREACHABLE, NumDescriptors, Peer, keep_alive, listen
from lightning_ddp.supervise.desync import Inspection, Outgoing
from lightning_ddp.supervise.failure_record import GONE, FailureRecord, Identity
from lightning_ddp.supervise.graceful_stop import StopAgreement
from lightning_ddp.supervise.history import History
from lightning_ddp.supervise.membership import Membership, Phase
from lightning_ddp.supervise.protocol import (
    Active,
    AllHere,
    Beat,
    Begun,
    Bye,
    Closing,
    Declined,
    Dismiss,
    Dismissed,
    Echoed,
    Exited,
    Failed,
    Failure,
    Form,
    Hello,
    Here,
    Joined,
    Leave,
    Left,
    Message,
    Missing,
    Moved,
    Position,
    Prepared,
    Present,
    Progress,
    ProtocolError,
    Ready,
    Saved,
    Start,
    Stop,
    Stopped,
    Take,
    Vanished,
    Who,
    WhoIsMissing,
    pack,
)
from lightning_ddp.supervise.settings import ReconcileSettings, ReplaceSettings
from lightning_ddp.supervise.stall import StallWatch
from lightning_ddp.supervise.vacancies import Vacancies
from lightning_ddp.supervise.verdict import Verdict

__all__ = ["ControlServer"]

_HELLO_WAIT_S = 10.0
_RECEIVE_BYTES = 64 * 1024
_MOST_UNSENT_BYTES = 4 * 1024 * 1024
_SPARE_CONNECTIONS = 64
"""Strangers whose hello is waited for, on top of the ranks that have not come."""
_ACCEPTED_AT_ONCE = 256
_RETRY_S = 0.05
_TAKES_WITHIN_S = 5.0
"""How long a spare may take to answer that it is called; then it is killed, as it may be stopped."""

_log = logging.getLogger("lightning_ddp")


class ControlServer:
    """Listens for the processes of a run, and tells all of them the first failure.

    Args:
        address: name or address of this host under which the others reach it; its interface is bound.
        token: the run's secret; a connection that does not begin with it is closed.
        world_size: number of ranks.
        settings: times.
        on_failure: called once, in the server's thread, with the first failure.
        any_interface: bind all interfaces, for an address that resolves to the loopback on this host only.
        on_condemned: called in the server's thread with a rank that the others go on without, and that may
            still run: it is to be killed, and its end to be told as of any child.
        on_vacant: called in the server's thread with the place of a lost rank of this node, or of a spare, in
            which a new process is to be started. Launchers of other nodes are told to.
        on_called: called in the server's thread with a spare of this node, and the place that it takes.

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
        on_failure: Callable[[FailureRecord], None] | None = None,
        any_interface: bool = False,
        on_condemned: Callable[[Identity], None] = lambda identity: None,
        on_vacant: Callable[[int], None] = lambda place: None,
        on_called: Callable[[Identity, int], None] = lambda identity, place: None,
    ) -> None:
        self._on_failure = on_failure
        self._on_condemned, self._on_vacant, self._on_called = on_condemned, on_vacant, on_called
        self.token = token
        self._world_size = world_size
        self._settings = settings
        self._verdict = Verdict()
        self._stop = StopAgreement(settings.failure_grace_s)
        self._stall = StallWatch(settings.stall_timeout_s, world_size) if settings.stall_timeout_s else None
        self._inspection = Inspection(world_size)
        self._membership = self._membership_of(settings)
        self._history = History()
        self._vacancies: Vacancies | None = None
        self._spares = range(0)
        """Places of spares, behind those of the ranks."""
        if isinstance(settings.recovery, ReplaceSettings):
            self._vacancies = Vacancies(settings.recovery.max_recoveries)
        self._called: dict[tuple[int | None, int | None], int] = {}
        """Node and process id of a spare -> the place that it was called to."""
        self._takes_by: dict[int, float] = {}
        """Such a place -> when the spare has answered at the latest."""
        self._new: dict[int, Peer] = {}
        """Place -> a process that is to join there."""
        self._fallen: set[int] = set()
        """Places of such ones that were lost as they joined, and have not ended yet."""
        self._ended_pids: set[tuple[int | None, int | None]] = set()
        self._lost_pids: set[tuple[int | None, int | None]] = set()
        """Of members that were lost: a node and a process id, as in `_ended_pids`."""
        self._released_pids: set[tuple[int | None, int | None]] = set()
        """Of members that have left as they were asked to, and whose launcher tells of their end."""
        self._ended_places: set[int] = set()
        self._identities: dict[int, Identity] = {}
        """Place, the rank that a process had in the beginning, -> who has it, with its present rank."""
        self._places: dict[tuple[int | None, int | None], int] = {}
        """Node and process id, also of those that are lost -> place."""
        self._nodes: dict[int, int] = {}
        """Place -> its node."""
        self.has_met = False
        """Whether all ranks have been connected."""
        self._num_ended: Counter[int] = Counter()
        """Number of a run -> ranks that have ended it."""
        self._num_left = 0
        """Runs that all ranks have ended, and so may leave."""
        self._is_told = False
        self._checkpoint: str | None = None
        self._peers: dict[int, Peer] = {}
        self._ranks: dict[int, Peer] = {}
        self._strangers: dict[Peer, None] = {}  # the oldest first
        self._injected: list[Message] = []
        self._lock = threading.Lock()
        self._is_closed = self._is_resting = False
        self._decided = threading.Event()
        self._listener = listen("" if any_interface else address)
        self._num_descriptors = NumDescriptors(2 * world_size + _SPARE_CONNECTIONS)  # with the store's
        self.port: int = self._listener.getsockname()[1]
        self.address = address
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for sock in (self._listener, self._wake_receiver):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread = self._start()

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, daemon=True, name="control-server")
        thread.start()
        return thread

    def _membership_of(self, settings: ReconcileSettings) -> Membership | None:
        if settings.recovery is None:
            return None
        return Membership(range(self._world_size), settings.recovery, settings.failure_grace_s)

    # ------------------------------------------------------------------ called by other threads

    @property
    def first_failure(self) -> FailureRecord | None:
        """The first failure of the run, once it is certain, with the checkpoint that was saved then."""
        first = self._verdict.first
        return first if first is None else replace(first, checkpoint=self._checkpoint)

    @property
    def identities(self) -> list[Identity]:
        """The ranks that have connected, and belong to the run."""
        return list(self._identities.values())

    @property
    def goes_on(self) -> bool:
        """Whether the run goes on without ranks that it loses, so that each end is told, however it came."""
        return self._membership is not None

    def member(self, pid: int, node_rank: int) -> Identity | None:
        """A process as launchers know it, with the rank that it had in the beginning; None for a stranger."""
        known = list(self._identities.items())
        found = [
            replace(who, rank=place) for place, who in known if (who.pid, who.node_rank) == (pid, node_rank)
        ]
        return found[0] if found else None

    def wait_for_verdict(self, timeout_s: float) -> FailureRecord | None:
        """The first failure, waiting up to `timeout_s` seconds for it to be certain."""
        self._decided.wait(timeout_s)
        return self.first_failure

    def goes_on_without(self, place: int) -> bool:
        """Whether there is a generation of ranks without the one that had the rank `place` at first."""
        return self._membership is not None and place not in self._membership.members

    def tell(self, message: Message) -> None:
        """Handles a message of this very process, as if a peer had sent it."""
        with self._lock:
            self._injected.append(message)
        self._wake()

    def rest(self) -> None:
        """Ends the thread; nobody is heard until `resume`. No deadline is judged meanwhile."""
        self._is_resting = True
        self._wake()
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
        self._wake()
        self._thread.join(timeout=5)

    def _wake(self) -> None:
        with suppress(OSError):  # closed already, or so many wake-ups are pending that it sees them anyway
            self._wake_sender.send(b"x")

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not (self._is_closed or self._is_resting):
            for key, events in self._selector.select(self._timeout()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_receiver:
                    self._wake_receiver.recv(4096)
                else:
                    self._serve(key.data, events)
            with self._lock:
                injected, self._injected = self._injected, []
            for message in injected:
                self._handle_report(message)
            self._decide()
        if self._is_closed:
            self._tell_history()
            self._send_all([Closing()])
            self.close_sockets()

    def _timeout(self) -> float | None:
        deadlines = [self._verdict.deadline(), self._stop.deadline(), self._inspection.deadline()]
        if self._stall is not None and self._verdict.first is None:
            deadlines.append(self._stall.next_look(time.monotonic()))
        deadlines += [stranger.since + _HELLO_WAIT_S for stranger in islice(self._strangers, 1)]
        if self._membership is not None and not self._is_told and not self._waits_for_verdict:
            deadlines.append(self._membership.deadline())
        if self._vacancies is not None and not self._is_told:
            deadlines.append(self._vacancies.deadline(lambda p: self._may_start(p) or self._waits(p)))
            deadlines.append(min(self._takes_by.values(), default=None))
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # there are no more, or one hung up while it was queued
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._hang_up_on_strangers(len(self._strangers) - 1)
                    time.sleep(_RETRY_S)  # the listener stays ready: without this, the loop would spin
                return
            connection.setblocking(False)
            peer = Peer(connection)
            self._strangers[peer] = None
            self._selector.register(connection, selectors.EVENT_READ, peer)
            self._serve(peer, selectors.EVENT_READ)  # its hello, mostly
            self._hang_up_on_strangers(self._world_size - len(self._ranks) + _SPARE_CONNECTIONS)

    def _hang_up_on_strangers(self, num_left: int) -> None:
        """Hangs up on the oldest, so that `num_left` remain: a process of the run speaks at once."""
        for stranger in list(islice(self._strangers, max(0, len(self._strangers) - num_left))):
            self._hang_up(stranger)

    def _serve(self, peer: Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(peer)
        if not events & selectors.EVENT_READ or peer.is_closed:
            return
        try:
            data = peer.connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(peer, error)
            return
        if not data:
            self._lost(peer, None)
            return
        try:
            for message in peer.unpacker.feed(data):
                self._handle(peer, message)
        except Exception:  # noqa: BLE001 (whatever one process says, the others keep their server)
            _log.debug("control channel: hung up on %s", peer.identity or "a stranger", exc_info=True)
            self._hang_up(peer)

    def _handle(self, peer: Peer, message: Message) -> None:
        if peer.identity is None:
            self._greet(peer, message)
            return
        if isinstance(message, WhoIsMissing):
            self._send(peer, Missing(self._missing_nodes()))
            return
        if isinstance(message, Dismiss):
            self._send(peer, self._dismiss(message.node))
            return
        if peer.is_new:
            self._handle_new(peer, peer.identity, message)
            return
        if peer.identity.rank < 0 or peer.is_out:
            return
        rank, now = peer.identity.rank, time.monotonic()
        match message:
            case Active(is_active):
                peer.is_active = is_active
                if is_active:
                    peer.has_left = False
                else:
                    self._send_all(self._stop.left(rank))
                    self._forget(rank)
                    self._note_end(peer)
                self._inspection.entered(rank, message)
            case Stopped():
                self._send_all(self._stop.left(rank))
            case Saved(path):
                self._checkpoint = path
            case Progress(where):
                if self._stall is not None and peer.is_active:
                    self._stall.report(peer.identity, where, now)
                self._send(peer, Beat(self._stall.interval_s if self._stall is not None else None))
            case Who():
                self._send(peer, Here(tuple(sorted(self._ranks))))
            case Bye():
                peer.has_left = True
            case Stop():
                self._have_all_stop(message, now)
            case Leave(is_node):
                place = self._place_of(rank)
                self._note_leaving(self._on_node(peer.identity.node_rank) if is_node else [place], now)
            case Position(position):
                self._send_all(self._stop.report(rank, position))
                if self._membership is not None:
                    self._send_to_places(self._membership.stands(self._place_of(rank), position))
            case Failed() | Echoed() | Vanished() | Exited():
                self._handle_report(message)
            case Present() | Joined() | Begun() | Declined():
                self._handle_member(self._place_of(rank), message)
            case Prepared():
                self._start_spares(now)
            case _:
                self._deliver(self._inspection.handle(rank, message, now))

    def _greet(self, peer: Peer, message: Message) -> None:
        if not isinstance(message, Hello):
            raise ProtocolError("no hello")
        if not hmac.compare_digest(message.token.encode(), self.token.encode()):
            raise ProtocolError("another token")
        rank = message.identity.rank
        is_known = rank < self._world_size
        if message.is_new:
            is_known = self._may_come(message)
            if rank in self._new:
                text = f"another process has come before this one, to join as rank {rank}"
                self._send(peer, Failure(FailureRecord.of_identity(message.identity, text)))
        if not is_known:
            raise ProtocolError(f"rank {rank}")
        peer.identity, peer.is_new = message.identity, message.is_new
        peer.is_launcher = message.is_launcher
        peer.is_active = rank >= 0
        peer.unpacker.limit_bytes = _RECEIVE_BYTES
        with suppress(OSError):  # it is gone already, which reading from it will say
            keep_alive(peer.connection, self._settings.heartbeat_timeout_s)
        self._strangers.pop(peer, None)
        self._peers[id(peer)] = peer
        if peer.is_new:
            self._new[rank] = peer
            self._ended_places.discard(rank)
            self._send(peer, AllHere())
            if self._launcher_of(rank) is peer:  # its node has come back
                self._reopen(message.identity.node_rank)
        if peer.is_new or rank < 0:
            return
        self._ranks[rank] = peer
        self._identities[rank] = message.identity
        self._places[message.identity.node_rank, message.identity.pid] = rank
        self._nodes[rank] = message.identity.node_rank
        self._inspection.joined(rank)
        if self._verdict.first is not None:
            self._send(peer, Failure(self._verdict.first.cut()))
        if len(self._ranks) == self._world_size:
            self.has_met = True
            if self._stall is not None:
                identities = [p.identity for p in self._ranks.values() if p.identity is not None]
                self._stall.begin(identities, time.monotonic())
            self._send_all([AllHere()])

    def _note_end(self, peer: Peer) -> None:
        """A rank has ended a run. It leaves it when all have: until then one of them may still fail."""
        peer.num_ended += 1
        self._num_ended[peer.num_ended] += 1
        if self._num_ended[peer.num_ended] == self._world_size:
            self._num_left = max(self._num_left, peer.num_ended)
            del self._num_ended[peer.num_ended]
            self._send_all([Left()])
        for new in list(self._new.values()):
            self._close_if_late(new)

    def _handle_report(self, message: Message) -> None:
        now = time.monotonic()
        match message:
            case Failed(record):
                self._verdict.accuse(record)
            case Echoed(record):
                self._verdict.echo(record, now)
            case Vanished(record):
                self._vanished(record, now)
            case Exited(record):
                record = replace(record, rank=self._called.get((record.node_rank, record.pid), record.rank))
                if self._membership is None or not self._has_met_its_end(record):
                    self._verdict.exited(self._renumbered(record), record.message, now)

    def _vanished(self, record: FailureRecord, now: float) -> None:
        """A process is gone, says one that it has started: it may be a rank, or one that is lost already."""
        place = self._places.get((record.node_rank, record.pid))
        if self._membership is not None and place is not None:
            if place not in self._membership.remaining or self._identities[place].pid != record.pid:
                return
            record = replace(record, rank=self._identities[place].rank)
        self._verdict.vanished(record, now)

    def _lost(self, peer: Peer, error: OSError | None) -> None:
        identity = peer.identity
        self._hang_up(peer)
        if peer.is_new or peer.is_out:
            return  # its launcher tells of its end
        if identity is not None:
            self._forget(identity.rank)
        is_in_run = peer.is_active or peer.num_ended > self._num_left
        if identity is None or not is_in_run or peer.has_left:
            return
        if error is not None and error.errno in UNREACHABLE:
            message = (
                f"node {identity.node_rank} is unreachable: no heartbeat of its control connection for"
                f" {self._settings.heartbeat_timeout_s:g} s (link down, or the node is gone)"
            )
            record = FailureRecord.of_identity(identity, message)
            if not self._lose(record, time.monotonic(), has_ended=True):
                self._verdict.accuse(record)
                return
            for other in [o for o in self._identities.values() if o.node_rank == identity.node_rank]:
                self._lose(FailureRecord.of_identity(other, message), time.monotonic(), has_ended=True)
        else:
            self._verdict.vanished(FailureRecord.of_identity(identity, GONE), time.monotonic())

    def _forget(self, rank: int) -> None:
        if self._stall is not None:
            self._stall.forget(rank)

    def _decide(self) -> None:
        now = time.monotonic()
        is_meeting = self._membership is not None and self._membership.phase not in (
            Phase.RUNNING,
            Phase.OVER,
        )
        stalled = self._stall.find(now, may_all_wait=is_meeting) if self._stall is not None else None
        if stalled is not None and not self._lose(stalled, now, has_ended=False):
            self._verdict.accuse(stalled)
        for stranger in list(takewhile(lambda s: s.since + _HELLO_WAIT_S <= now, self._strangers)):
            self._hang_up(stranger)
        self._deliver(self._inspection.due(now))
        stranded = self._inspection.stranded(self._leaving_ranks)
        if stranded is not None and stranded[0] in self._ranks:
            identity = self._ranks[stranded[0]].identity
            assert identity is not None  # it is that of a rank
            self._verdict.accuse(FailureRecord.of_identity(identity, stranded[1]))
        late = self._stop.overdue(now)
        if late is not None:
            self._verdict.accuse(late)
        self._go_on(now)
        self._fill_vacancies(now)
        self._change_members(now)
        first = self._verdict.decide(now)
        if first is not None and not self._is_told:
            self._is_told = True
            self._tell_history()
            self._send_all([Failure(first.cut())])
            self._decided.set()
            if self._on_failure is not None:
                self._on_failure(first)

    # ------------------------------------------------------------------ going on without a rank

    def _is_of_one_rank(self, record: FailureRecord) -> bool:
        """Whether the others may go on: a process has ended, or its code has raised where that is allowed."""
        recovery = self._settings.recovery
        if record.exception_class is None or recovery is None or not recovery.exceptions:
            return _is_of_a_process(record)
        is_of_user = not record.exception_class.startswith("lightning_ddp.")
        return is_of_user and record.exception_type != "KeyboardInterrupt" and record.pid != os.getpid()

    def _tell_history(self) -> None:
        """Prints which generations there were, once; before a failure that ends the run is reported."""
        history, self._history = self._history, History()
        print(history.render(), end="", file=sys.stderr, flush=True)

    def _place_of(self, rank: int) -> int:
        return next((place for place, known in self._identities.items() if known.rank == rank), rank)

    def _renumbered(self, record: FailureRecord) -> FailureRecord:
        """A record of a launcher, which knows places."""
        known = None if self._membership is None else self._identities.get(record.rank)
        return record if known is None else replace(record, rank=known.rank)

    def _has_met_its_end(self, record: FailureRecord) -> bool:
        """A child has ended; whether that is no news of a failure."""
        assert self._membership is not None
        process = (record.node_rank, record.pid)
        if process in self._ended_pids:  # two have told of it
            return True
        self._ended_pids.add(process)
        if process in self._released_pids:
            self._leave_vacant(record.rank)
            return True
        was_lost = process in self._lost_pids
        if was_lost and record.rank in self._membership.remaining:  # another one is there already
            return True
        vacancies = None if was_lost else self._vacancies
        if vacancies is not None and record.rank in self._spares and record.exit_code == 0:
            vacancies.close(record.rank)
        if vacancies is not None and vacancies.ended(record.rank, time.monotonic()):
            self._membership.withdrew(record.rank)
            self._membership.ended(record.rank)
            return True
        if record.rank in self._fallen:
            self._leave_vacant(record.rank)
        self._ended_places.add(record.rank)
        if record.rank not in self._membership.remaining:
            self._membership.ended(record.rank)
            return True
        return record.exit_code == 0 and self.has_met  # what its connection says counts

    def _lose(self, record: FailureRecord, now: float, *, has_ended: bool) -> bool:
        """A rank is lost; returns whether the others may go on without it."""
        membership = self._membership
        if membership is None or membership.phase is Phase.OVER or self._is_told or not self.has_met:
            return False
        place = self._place_of(record.rank)
        if place not in membership.members:
            return False
        # one of another node cannot be killed from here; it is told nothing more, and its node does that
        who = self._identities[place]
        has_ended |= place in self._ended_places or who.node_rank != 0
        self._lost_pids.add((who.node_rank, who.pid))
        self._history.lost(place, record, now)
        before = membership.members
        outgoing = membership.lost(place, record, now, has_ended=has_ended)
        self._send_to_places(outgoing)
        self._demote(set(before) - set(membership.members) - {place})
        if place in membership.condemned:
            self._on_condemned(who)
        if place not in membership.members:  # it has not got as far as the others, to whom it is no loss
            self._fallen.add(place)
            if place not in membership.condemned:
                self._leave_vacant(place)
        peer = self._ranks.get(record.rank)
        if peer is not None:
            peer.has_left = True
            self._hang_up(peer)
        self._forget(record.rank)
        return True

    # ------------------------------------------------------------------ processes in the place of lost ones

    def _handle_new(self, peer: Peer, identity: Identity, message: Message) -> None:
        """What happens to one that is no member yet is nobody's failure but its own."""
        assert self._membership is not None
        assert self._vacancies is not None
        now = time.monotonic()
        match message:
            case Ready():
                peer.is_ready = True
                self._takes_by.pop(identity.rank, None)
                if identity.rank in self._spares:
                    self._vacancies.waits(identity.rank, now)
                self._close_if_late(peer)
            case Active(is_active=False):  # a run that the others have ended long ago, such as a validation
                peer.num_ended += 1
                self._send(peer, Left())
            case Failed(record) | Echoed(record):
                self._send(peer, Failure(record.cut()))
            case Progress():
                self._send(peer, Beat(self._stall.interval_s if self._stall is not None else None))
            case Stop() | Leave():
                peer.is_ready = False
                self._membership.withdrew(identity.rank)
                self._send(peer, Closing())
            case _:
                pass

    def _close_if_late(self, new: Peer) -> None:
        """Has one leave that comes after the last step."""
        if any(peer.num_ended > new.num_ended for peer in self._ranks.values()):
            assert new.identity is not None
            assert self._membership is not None
            new.is_ready = False
            assert self._vacancies is not None
            self._membership.withdrew(new.identity.rank)
            self._vacancies.close(new.identity.rank)
            self._send(new, Closing())

    def _promote(self, places: Iterable[int]) -> None:
        """They are members from now on."""
        for place in places:
            peer = self._new.pop(place, None)
            if peer is not None and peer.identity is not None:
                peer.is_new = peer.is_ready = False
                self._identities[place] = peer.identity
                self._places[peer.identity.node_rank, peer.identity.pid] = place

    def _demote(self, places: Iterable[int]) -> None:
        """They have not got their state, and may ask again."""
        for place in places:
            identity = self._identities.pop(place)
            self._forget(identity.rank)
            peer = self._ranks.pop(identity.rank, None)
            if peer is not None:
                peer.is_new, peer.identity = True, replace(identity, rank=place)
                self._new[place] = peer
                assert self._vacancies is not None
                self._vacancies.expect(place)

    def _leave_vacant(self, place: int) -> None:
        """One that was lost as it joined has ended, or one that has left as it was asked to."""
        if self._vacancies is None:
            return
        if place in self._fallen:
            self._fallen.discard(place)
            self._vacancies.lost([place], 0, time.monotonic())
        else:
            self._vacancies.left(place, time.monotonic())

    def _fill_vacancies(self, now: float) -> None:
        """Has processes started."""
        if self._membership is None or self._vacancies is None or self._is_told:
            return
        for place in self._vacancies.due(now, self._may_start):
            spare, launcher = self._spare_for(place), self._launcher_of(place)
            if spare is not None:
                self._call(spare, place, now)
            elif launcher is None:
                self._on_vacant(place)
            else:
                self._send(launcher, Start(place))
        for place in filter(self._waits, self._new):
            if self._vacancies.may_enter(place, now):
                self._membership.ready(place)
        for place in [place for place, by in self._takes_by.items() if by <= now]:
            self._drop_spare(place, now)

    def _may_come(self, hello: Hello) -> bool:
        """Whether a new process is one that was asked for, or the launcher of a node that comes back.

        That may be sooner back than it is known to be lost: then it waits.
        """
        place, node = hello.identity.rank, hello.identity.node_rank
        if self._vacancies is None or place in self._new or self._nodes.get(place) != node:
            return False
        return self._vacancies.is_expected(place) or (hello.is_launcher and node != 0)

    def _reopen(self, node: int) -> None:
        """The launcher of a node has come: it is asked for processes in the other places there."""
        assert self._membership is not None
        assert self._vacancies is not None
        taken = {*self._membership.members, *self._new}
        places = [place for place, its in self._nodes.items() if its == node and place not in taken]
        self._vacancies.reopen(places, time.monotonic())

    def _missing_nodes(self) -> tuple[int, ...]:
        members = () if self._membership is None else self._membership.members
        here = {self._nodes[place] for place in (*members, *self._new)}
        return tuple(sorted(set(self._nodes.values()) - here))

    def _may_start(self, place: int) -> bool:
        """Whether there is somebody who starts processes on the node of a place, and none is there."""
        has_launcher = self._nodes.get(place, 0) == 0 or self._launcher_of(place) is not None
        return has_launcher and place not in self._new

    def _waits(self, place: int) -> bool:
        """Whether a process is there that is let in once it is time."""
        assert self._membership is not None
        is_vacant = place not in self._membership.members and place not in self._spares
        return is_vacant and place in self._new and self._new[place].is_ready

    def _launcher_of(self, place: int) -> Peer | None:
        """Who starts processes on the node of a place; None for the first one, where this process does."""
        node = self._nodes.get(place, 0)
        for peer in self._peers.values():
            if peer.is_launcher and peer.identity is not None and peer.identity.node_rank == node != 0:
                return peer
        return None

    # ------------------------------------------------------------------ spares

    def _start_spares(self, now: float) -> None:
        """Training begins; from now on there are spares."""
        if self._vacancies is None or self._spares:
            return
        recovery, first = self._settings.recovery, len(self._nodes)
        number = recovery.spares if isinstance(recovery, ReplaceSettings) else 0
        nodes = sorted(set(self._nodes.values()))
        self._spares = range(first, first + number * len(nodes))
        self._nodes |= {place: nodes[(place - first) // number] for place in self._spares}
        self._vacancies.open(self._spares, now)

    def _spare_for(self, place: int) -> Peer | None:
        """One of the same node that waits; None where a process is to be started."""
        if place in self._spares:
            return None
        for spare in self._spares:
            peer = self._new.get(spare)
            if peer is None or peer.identity is None or not peer.is_ready:
                continue
            process = (peer.identity.node_rank, peer.identity.pid)
            if process[0] == self._nodes[place] and process not in self._ended_pids:
                return peer
        return None

    def _call(self, spare: Peer, place: int, now: float) -> None:
        """Has a spare take the place of a lost process."""
        assert self._vacancies is not None
        assert spare.identity is not None
        identity, spare.is_ready = spare.identity, False
        self._new[place] = self._new.pop(identity.rank)
        spare.identity = replace(identity, rank=place)
        self._vacancies.called(identity.rank, now)
        self._called[identity.node_rank, identity.pid] = place
        self._takes_by[place] = now + _TAKES_WITHIN_S
        self._ended_places.discard(place)
        launcher = self._launcher_of(place)
        if launcher is None:
            self._on_called(identity, place)
        else:
            self._send(launcher, Moved(identity.pid, place))
        self._send(spare, Take(place))

    def _drop_spare(self, place: int, now: float) -> None:
        """One that was called has not answered: it is stopped, or hangs."""
        assert self._vacancies is not None
        del self._takes_by[place]
        peer = self._new.get(place)
        if peer is None or peer.identity is None:
            return
        if peer.identity.node_rank == 0:
            self._on_condemned(peer.identity)
        else:  # its launcher kills it before the next one is started
            self._lost_pids.add((peer.identity.node_rank, peer.identity.pid))
            self._hang_up(peer)
            self._vacancies.ended(place, now)

    # ------------------------------------------------------------------ members

    def _note_leaving(self, places: Iterable[int], now: float) -> None:
        """Members are asked to leave."""
        if self._membership is not None and self._stop.deadline() is None:
            self._membership.leave(places, now)

    def _on_node(self, node: int) -> list[int]:
        return [place for place, who in self._identities.items() if who.node_rank == node]

    def _dismiss(self, node: int) -> Dismissed:
        """Asks the members of a node to leave; returns which do, or why not."""
        places = self._on_node(node)
        why = None
        if self._membership is None:
            why = "the others of this run would not go on: it has on_failure='stop'"
        elif node == 0:
            why = "the run needs its first node, with the control server; SIGTERM to its process stops all"
        elif not places:
            nodes = sorted({who.node_rank for who in self._identities.values()})
            why = f"no rank of node {node} is in the run; there are nodes {', '.join(map(str, nodes))}"
        elif self._stop.deadline() is not None:
            why = "all ranks stop already"
        else:
            self._note_leaving(places, time.monotonic())
        return Dismissed(tuple(self._identities[place].rank for place in places if why is None), why)

    def _change_members(self, now: float) -> None:
        """Lets in those that are ready, and has those leave that are asked to."""
        if self._membership is None or self._is_told or self._stop.deadline() is not None:
            return
        why = self._membership.why_to_stop(now)
        if why is not None:
            print(f"lightning_ddp: {why}", file=sys.stderr, flush=True)
            self._have_all_stop(Stop(signal.SIGTERM, is_requeue=False), now)
        self._send_to_places(self._membership.gather(now))

    def _have_all_stop(self, reason: Stop, now: float) -> None:
        if self._membership is not None:
            self._membership.stay()
        self._send_all(self._stop.request(self._active_ranks(), now, reason))

    @property
    def _waits_for_verdict(self) -> bool:
        """Whether one of those that gather may be lost: then it is not to be a member of what follows."""
        is_gathering = self._membership is not None and self._membership.phase is Phase.GATHERING
        return is_gathering and self._verdict.deadline() is not None

    def _handle_member(self, place: int, message: Message) -> None:
        membership = self._membership
        if membership is None:
            return
        match message:
            case Present():
                membership.present(place, message)
            case Joined(generation):
                membership.joined(place, generation)
                if membership.phase is Phase.RUNNING:
                    self._history.went_on(time.monotonic())
            case Begun(generation):
                membership.begun(place, generation)
            case Declined(call, why):
                self._send_to_places(membership.declined(place, call, why))

    def _go_on(self, now: float) -> None:
        """Takes what the ranks may go on without out of the verdict, and forms a generation if it is time."""
        membership = self._membership
        if membership is None or self._is_told:
            return
        while (first := self._verdict.decide(now)) is not None and self._is_of_one_rank(first):
            if not self._lose(first, now, has_ended=first.exit_code is not None):
                break
            self._verdict.set_aside(first.rank)
        for place in membership.late(now):
            identity = self._identities[place]
            message = f"it did not stop within failure_grace_s={self._settings.failure_grace_s:g} s"
            self._lose(FailureRecord.of_identity(identity, message), now, has_ended=False)
        before, members = membership.generation, membership.members
        outgoing = [] if self._waits_for_verdict else membership.due(now)
        has_formed = membership.generation != before
        if has_formed:
            form = next(message for _, message in outgoing if isinstance(message, Form))
            self._release(form)
            self._history.formed(form.generation, form.step, members, form.members, now)
            self._note_form(form, now)
            self._renumber(membership.members)
        self._send_to_places(outgoing)
        if has_formed:
            self._send_all(self._stop.restart(set(range(self._world_size))))
        if membership.phase is Phase.OVER and membership.cause is not None and self._verdict.first is None:
            self._verdict.accuse(replace(membership.cause, message=_with_reason(membership)))

    def _release(self, form: Form) -> None:
        """Lets go of members that were asked to leave."""
        released = {place: self._identities.pop(place) for place in form.left if place in self._identities}
        for place, who in released.items():
            self._history.released(place, FailureRecord.of_identity(who, "the process was asked to leave"))
            self._released_pids.add((who.node_rank, who.pid))
            self._forget(who.rank)
            self._verdict.set_aside(who.rank)
            peer = self._ranks.pop(who.rank, None)
            if peer is not None:
                peer.is_out, peer.is_launcher = True, False
                self._send(peer, form)
                self._send(peer, Closing())
        for place in released:
            if not self._may_start(place):  # nobody is left there who would tell of its end
                self._leave_vacant(place)

    def _note_form(self, form: Form, now: float) -> None:
        """Some have left with the generation before, or have joined."""
        if self._vacancies is not None:
            self._vacancies.lost(form.lost, form.step, now)
            self._vacancies.joined(form.joined, form.step)

    def _renumber(self, members: tuple[int, ...]) -> None:
        """From now on ranks are those of the new generation."""
        new = {place: self._new[place] for place in members if place in self._new}
        self._promote(new)
        peers = {place: self._ranks.get(self._identities[place].rank) for place in members} | new
        self._world_size = len(members)
        self._ranks, self._inspection = {}, Inspection(len(members))
        for rank, place in enumerate(members):
            identity = self._identities[place] = replace(self._identities[place], rank=rank)
            peer = peers[place]
            if peer is not None:
                peer.identity = identity
                self._ranks[rank] = peer
                self._inspection.joined(rank)
        self._identities = {place: self._identities[place] for place in members}
        if self._stall is not None and self._settings.stall_timeout_s is not None:
            self._stall = StallWatch(self._settings.stall_timeout_s, len(members))
            self._stall.begin(self._identities.values(), time.monotonic())

    def _send_to_places(self, messages: list[tuple[int, Message]]) -> None:
        for place, message in messages:
            peer = self._ranks.get(self._identities[place].rank) if place in self._identities else None
            if peer is not None:
                self._send(peer, message)

    # ------------------------------------------------------------------ sending

    def _active_ranks(self) -> set[int]:
        return {rank for rank, peer in self._ranks.items() if peer.is_active}

    def _leaving_ranks(self) -> set[int]:
        return {rank for rank, peer in self._ranks.items() if peer.num_ended > self._num_left}

    def _send_all(self, messages: list[Message]) -> None:
        for data in map(pack, messages):
            for peer in list(self._peers.values()):
                self._send_packed(peer, data)

    def _deliver(self, outgoing: Outgoing) -> None:
        for rank, message in outgoing:
            if rank in self._ranks:
                self._send(self._ranks[rank], message)

    def _send(self, peer: Peer, message: Message) -> None:
        self._send_packed(peer, pack(message))

    def _send_packed(self, peer: Peer, data: bytes) -> None:
        peer.unsent += data
        if len(peer.unsent) > _MOST_UNSENT_BYTES:
            self._hang_up(peer)  # it reads nothing, and must not cost this process its memory
        else:
            self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        if peer.is_closed:
            return
        try:
            with suppress(BlockingIOError):  # sent once the socket can be written to
                del peer.unsent[: peer.connection.send(peer.unsent)]
        except OSError:
            return  # reading from it will say the same, and that is where it is handled
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        if peer.events != wanted:
            peer.events = wanted
            self._selector.modify(peer.connection, wanted, peer)

    def _hang_up(self, peer: Peer) -> None:
        if peer.is_closed:
            return
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._strangers.pop(peer, None)
        self._peers.pop(id(peer), None)
        if peer.is_new and peer.identity is not None and self._new.get(peer.identity.rank) is peer:
            del self._new[peer.identity.rank]
            if self._membership is not None:
                self._membership.withdrew(peer.identity.rank)
        elif peer.identity is not None and self._ranks.get(peer.identity.rank) is peer:
            del self._ranks[peer.identity.rank]
            self._deliver(self._inspection.left(peer.identity.rank, time.monotonic()))
        if peer.is_launcher and peer.identity is not None and self._vacancies is not None:
            self._reopen(peer.identity.node_rank)  # what it was asked for is of another one, if there is one

    def close_sockets(self) -> None:
        """Called at the end; and in a forked process, so that a socket does not live on there."""
        for peer in [*self._peers.values(), *self._strangers]:
            peer.connection.close()
        self._listener.close()
        self._wake_receiver.close()
        self._wake_sender.close()
        self._selector.close()
        self._num_descriptors.restore()


def _is_of_a_process(record: FailureRecord) -> bool:
    """Whether a process has ended, and not user code in it raised."""
    return record.exception_type in (None, "SystemExit") and (
        record.exit_code is not None or record.message == GONE or record.exception_type is not None
    )


def _with_reason(membership: Membership) -> str:
    assert membership.cause is not None
    return f"{membership.cause.message}\n  The others did not go on: {membership.reason}"

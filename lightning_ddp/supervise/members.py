"""Members of a run, as the control server knows them: who has which rank, and who comes in whose place.

`Membership` decides who goes on after a failure; here its decisions meet the connections. A process keeps its
place, the rank that it had in the beginning, while its rank is another one in each generation. A process that
is started in the place of a lost one is new until a generation has it as a member.

It is long because its tables are one state: each loss, call and join changes most of them together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import lightning_ddp.supervise.protocol as protocol
from lightning_ddp.supervise.connections import Connections, Peer
from lightning_ddp.supervise.desync import Inspection, StallWatch
from lightning_ddp.supervise.failure_record import FailureRecord, History, Identity
from lightning_ddp.supervise.membership import STEPS_TO_FORGET, Membership, Phase
from lightning_ddp.supervise.protocol import Message, Outgoing, ProtocolError
from lightning_ddp.supervise.settings import ReconcileSettings, RecoverySettings, ReplaceSettings

__all__ = ["LocalProcesses", "Members", "Vacancies"]

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 60.0


@dataclass
class _Process:
    """What launchers and others have said of a process, which they know by its node and process id."""

    place: int
    has_ended: bool = False
    is_lost: bool = False
    """Whether it was a member, and the others go on without it."""
    has_fallen: bool = False
    """Whether it was lost as it joined, and is to be killed."""
    is_released: bool = False
    """Whether it has left, as it was asked to."""
    has_greeted: bool = False
    """Whether it has ever connected."""
    start: int | None = None
    """Which one in its place it is of those that were asked for, if it was to join."""


class LocalProcesses:
    """What the server asks of whoever has started the processes of its node, in its thread; here nothing."""

    def failed(self, record: FailureRecord) -> None:
        """The first failure is certain. Called once."""

    def kill_one(self, pid: int) -> None:
        """Ends a rank that the others go on without. Its end is to be told as of any child."""

    def start_again(self, place: int, number: int) -> None:
        """Starts a process in the place of one that is lost, to join the run: the `number`-th there."""


class Members:
    """The processes of a run, and what becomes of them. In the server's thread.

    Args:
        connections: of the server.
        world_size: number of ranks.
        settings: times, and whether the run goes on without ranks that it loses.
        processes: those of the server's node.
    """

    def __init__(
        self,
        connections: Connections,
        world_size: int,
        settings: ReconcileSettings,
        processes: LocalProcesses,
    ) -> None:
        self._connections, self._settings, self._processes = connections, settings, processes
        recovery = settings.recovery or RecoverySettings()
        self.goes_on = settings.recovery is not None
        """Whether the run goes on without ranks that it loses."""
        self._replaces = isinstance(recovery, ReplaceSettings)
        self.membership = Membership(range(world_size), recovery, settings.failure_grace_s)
        self._vacancies = Vacancies(recovery.max_recoveries)
        self.history = History()
        self.world_size = world_size
        self.has_met = False
        """Whether all ranks have been connected."""
        self.ranks: dict[int, Peer] = {}
        """Those that are connected."""
        self.identities: dict[int, Identity] = {}
        """Place -> who has it, with its present rank."""
        self.inspection = Inspection(world_size)
        self.stall = StallWatch(settings.stall_timeout_s, world_size)
        self._nodes: dict[int, int] = {}
        """Place -> its node."""
        self._known: dict[tuple[int | None, int | None], _Process] = {}
        """By node and process id."""
        self._new: dict[int, Peer] = {}
        """Place -> a process that is to join there."""
        self._num_ended = 0
        """Runs that a member has ended."""
        self._ended_parts: set[int] = set()
        """Places of processes that have stopped for a signal, or left the run well: they answer no call."""

    # ------------------------------------------------------------------ who is there

    def admit(self, peer: Peer, hello: protocol.Hello, now: float) -> None:
        """A process that knows the run's secret has connected.

        Raises:
            ProtocolError: there is no place for it.
        """
        who = hello.identity
        if hello.is_new and who.rank in self._new:
            text = f"another process has come before this one, to join as rank {who.rank}"
            self._connections.send(peer, protocol.Failure(FailureRecord.of_identity(who, text)))
        if not (self._may_come(hello) if hello.is_new else who.rank < self.world_size):
            raise ProtocolError(f"rank {who.rank}")
        peer.identity, peer.is_new, peer.is_launcher = who, hello.is_new, hello.is_launcher
        peer.is_active = who.rank >= 0
        self._connections.admit(peer, self._settings.heartbeat_timeout_s)
        if who.rank >= 0:  # process ids are used again, in containers at once
            self._known[_key(who)] = _Process(who.rank, has_greeted=True)
        if peer.is_new:
            self._process(who, who.rank).start = hello.start or self._vacancies.num_started(who.rank)
            self._new[who.rank] = peer
            self._connections.send(peer, protocol.AllHere())
            if self._launcher_of(who.rank) is peer:  # its node has come back
                self._reopen(who.node_rank, now)
            elif who.node_rank and self._launcher_of(who.rank) is None:  # its node has left
                self._close(peer, who.rank)
        elif who.rank >= 0:
            self.ranks[who.rank], self.identities[who.rank] = peer, who
            self._nodes[who.rank] = who.node_rank
            self.inspection.joined(who.rank)
            if len(self.ranks) == self.world_size:
                self.has_met = True
                self.stall.begin(self.identities.values(), now)
                self._connections.send_all([protocol.AllHere()])

    def _may_come(self, hello: protocol.Hello) -> bool:
        """Whether a new process is one that was asked for, or the launcher of a node that comes back.

        That may be sooner back than it is known to be lost: then it waits.
        """
        place, node = hello.identity.rank, hello.identity.node_rank
        before = self._known.get(_key(hello.identity))
        if before is not None and before.has_ended and not before.has_greeted:  # its launcher was sooner
            del self._known[_key(hello.identity)]
            return False
        if not self._replaces or place in self._new or self._nodes.get(place) != node:
            return False
        is_asked_for = self._vacancies.is_expected(place) and hello.start == self._vacancies.num_started(
            place
        )
        return is_asked_for or (hello.is_launcher and node != 0)

    def _process(self, who: Identity | FailureRecord, place: int) -> _Process:
        return self._known.setdefault(_key(who), _Process(place))

    def hang_up(self, peer: Peer, now: float) -> None:
        """Closes a connection, and has its process connected no more."""
        if peer.is_closed:
            return
        self._connections.hang_up(peer)
        if peer.identity is None:
            return
        rank = peer.identity.rank
        if peer.has_left and not peer.is_new:
            self.note_part_ended(peer.identity)
        if peer.is_new and self._new.get(rank) is peer:
            del self._new[rank]
            self.membership.withdrew(rank)
            process = self._process(peer.identity, rank)
            is_last = process.start == self._vacancies.num_started(rank)
            if peer.identity.node_rank != 0 and is_last and not process.has_ended:  # as its launcher may have
                process.has_ended = True
                self._vacancies.ended(rank, now)
        elif not peer.is_new and self.ranks.get(rank) is peer:
            del self.ranks[rank]
            self.deliver(self.inspection.left(rank, now))
        if peer.is_launcher and self._replaces:
            self._reopen(peer.identity.node_rank, now)  # what it was asked for is another one's, if any

    def deliver(self, outgoing: Outgoing) -> None:
        """Sends messages to ranks."""
        for rank, message in outgoing:
            if rank in self.ranks:
                self._connections.send(self.ranks[rank], message)

    def send_to_places(self, outgoing: Outgoing) -> None:
        """Sends messages to members that are known by their places."""
        known = self.identities
        self.deliver([(known[place].rank, message) for place, message in outgoing if place in known])

    def place_of_process(self, record: FailureRecord | Identity) -> int | None:
        """The place of a member whose process is known; None if that is no member any more.

        Ranks are not asked for, as they may be those of a generation before.
        """
        process = self._known.get(_key(record))
        if process is None:
            return self.place_of(record.rank)
        who = self.identities.get(process.place)
        is_there = who is not None and _key(who) == _key(record)
        return process.place if is_there and process.place in self.membership.remaining else None

    def place_of(self, rank: int) -> int:
        """The place of a member."""
        if rank in self.identities and self.identities[rank].rank == rank:  # none of them is lost yet, mostly
            return rank
        return next((place for place, who in self.identities.items() if who.rank == rank), rank)

    def on_node(self, node: int) -> list[int]:
        """Places of the members of a node."""
        return [place for place, who in self.identities.items() if who.node_rank == node]

    # ------------------------------------------------------------------ who is lost

    def exited(self, record: FailureRecord, now: float) -> FailureRecord | None:
        """A child has ended: that record with its present rank, or None if it is no news of a failure."""
        if not self.goes_on:
            return record
        process = self._process(record, record.rank)
        place = process.place
        if process.has_ended:  # two have told of it
            return None
        process.has_ended = True
        if process.is_released:
            self._vacancies.left(place, now)
            return None
        is_member = place in self.membership.remaining
        is_before = process.start not in (None, self._vacancies.num_started(place))
        if is_before or (process.is_lost and is_member):  # another one is started, or there already
            return None
        if not process.is_lost and self._vacancies.ended(place, now):
            self.membership.withdrew(place)
            self.membership.ended(place)
            return None
        if process.has_fallen:
            self._vacancies.lost([place], 0, now)
        if not is_member:
            self.membership.ended(place)
            return None
        if record.exit_code == 0 and self.has_met:  # what its connection says counts
            return None
        return replace(record, rank=self.identities[place].rank) if place in self.identities else record

    def vanished(self, record: FailureRecord) -> FailureRecord | None:
        """A process is gone, says one that it has started: it may be a rank, or one that is lost already."""
        process = self._known.get((record.node_rank, record.pid)) if self.goes_on else None
        if process is None:
            return record
        who = self.identities.get(process.place)
        if process.place not in self.membership.remaining or who is None or who.pid != record.pid:
            return None
        return replace(record, rank=who.rank)

    def lose(self, record: FailureRecord, now: float, *, has_ended: bool) -> bool:
        """A rank is lost; returns whether the others may go on without it."""
        membership, place = self.membership, self.place_of_process(record)
        is_possible = self.goes_on and self.has_met and membership.phase is not Phase.OVER
        if not is_possible or place is None or place not in membership.members:
            return False
        # one of another node cannot be killed from here; it is told nothing more, and its node does that
        who = self.identities[place]
        process = self._process(who, place)
        has_ended |= process.has_ended or who.node_rank != 0
        process.is_lost = True
        self.history.lost(place, record, now)
        self.send_to_places(membership.lost(place, record, now, has_ended=has_ended))
        if place in membership.condemned:
            self._processes.kill_one(who.pid)
        if place not in membership.members:  # it has not got as far as the others, to whom it is no loss
            process.has_fallen = place in membership.condemned
            if not process.has_fallen:
                self._vacancies.lost([place], 0, now)
        peer = self.ranks.get(who.rank)
        if peer is not None:
            peer.has_left = True
            self.hang_up(peer, now)
        self.stall.forget(who.rank)
        return True

    def _demote(self, places: Iterable[int], form: protocol.Form, now: float) -> None:
        """They have not got their state, and may ask again."""
        for place in places:
            identity = self.identities.pop(place)
            self.stall.forget(identity.rank)
            peer = self.ranks.pop(identity.rank, None)
            if peer is None or self._process(identity, place).has_ended:  # its place is vacant again
                self._vacancies.lost([place], 0, now)
            if peer is not None and place in self._new:  # its node is back already, sooner than it is lost
                peer.is_out, peer.is_launcher = True, False
                self._connections.send(peer, protocol.Closing())
            elif peer is not None:
                self._connections.send(peer, form)
                peer.is_new, peer.identity = True, replace(identity, rank=place)
                self._new[place] = peer
                if not self._process(identity, place).has_ended:
                    self._vacancies.expect(place)

    # ------------------------------------------------------------------ the next generation

    def heard(self, place: int, message: Message, now: float) -> None:
        """What a member says of calls and generations."""
        membership = self.membership
        match message:
            case protocol.Position(position):
                self.send_to_places(membership.stands(place, position))
            case protocol.Present():
                cause = FailureRecord.of_identity(
                    self.identities[place], "it could not connect to the other ranks"
                )
                self.send_to_places(membership.present(place, message, cause, now))
            case protocol.Joined(generation):
                membership.joined(place, generation)
                if membership.phase is Phase.RUNNING:
                    self.history.went_on(now)
            case protocol.Begun(generation):
                membership.begun(place, generation)
            case protocol.Declined(call, why):
                self.send_to_places(membership.declined(place, call, why))

    def gave_up(self, record: FailureRecord) -> None:
        """A process fails as it has lost a connection: the run ends if it is one that is called."""
        place = self.place_of_process(record)
        if place is not None:
            self.membership.gave_up(place, f"rank {record.rank} cannot continue: {record.message}")

    def note_part_ended(self, who: Identity) -> None:
        """A member has stopped for a signal, or left the run well."""
        self._ended_parts.add(self._process(who, who.rank).place)

    def note_part_begun(self, who: Identity) -> None:
        """A member takes part in a run, again."""
        self._ended_parts.discard(self._process(who, who.rank).place)

    def go_on(self, now: float) -> bool:
        """Says to members what is due; returns whether the next generation has formed."""
        membership = self.membership
        for place in filter(membership.is_unjoined, self._ended_parts):
            cause = FailureRecord.of_identity(self.identities[place], "it exited before it had joined")
            self.send_to_places(membership.void(cause, now))
        for place in filter(membership.is_called, self._ended_parts):
            membership.stopped(place)
            if (peer := self.ranks.get(self.identities[place].rank)) is not None:
                peer.is_out = True
        for place in membership.late(now):
            message = f"it did not stop within failure_grace_s={self._settings.failure_grace_s:g} s"
            record = FailureRecord.of_identity(self.identities[place], message)
            self.lose(record, now, has_ended=False)
        before, members = membership.generation, membership.members
        outgoing = membership.due(now)
        if membership.generation == before:
            self.send_to_places(outgoing)
            return False
        form = next(message for _, message in outgoing if isinstance(message, protocol.Form))
        self._release(form, now)
        self._demote({*members} - {*form.members, *form.lost, *form.left}, form, now)
        self.history.formed(form.step, members, form.members, now)
        self._vacancies.lost(form.lost, form.step, now)
        self._vacancies.joined(form.joined, form.step)
        self._renumber(form, now)
        self.send_to_places(outgoing)
        return True

    def _release(self, form: protocol.Form, now: float) -> None:
        """Lets go of members that were asked to leave."""
        released = {place: self.identities.pop(place) for place in form.left if place in self.identities}
        for place, who in released.items():
            self.history.released(place, FailureRecord.of_identity(who, "the process was asked to leave"))
            self._process(who, place).is_released = True
            self.stall.forget(who.rank)
            peer = self.ranks.pop(who.rank, None)
            if peer is not None:
                peer.is_out, peer.is_launcher = True, False
                self._connections.send(peer, form)
                self._connections.send(peer, protocol.Closing())
        for place, new in self._new.items():  # those that join where nobody is left who has started them
            if new.identity is not None and new.identity.node_rank and self._launcher_of(place) is None:
                self._close(new, place)
        for place, who in released.items():  # its end is told already, or nobody is left there to tell of it
            if self._process(who, place).has_ended or not self._may_start(place):
                self._vacancies.left(place, now)

    def _renumber(self, form: protocol.Form, now: float) -> None:
        """From now on ranks are those of the new generation."""
        connected = {place: self.ranks.get(who.rank) for place, who in self.identities.items()}
        members = form.members
        for place in form.joined:  # a node may be back in a place whose process is not known to be lost
            peer = self._new.pop(place, None)
            if peer is not None and peer.identity is not None:
                peer.is_new = peer.is_ready = False
                self._ended_parts.discard(place)
                connected[place], self.identities[place] = peer, peer.identity
        self.identities = {
            place: replace(self.identities[place], rank=rank) for rank, place in enumerate(members)
        }
        self.world_size = len(members)
        self.ranks, self.inspection = {}, Inspection(self.world_size)
        for rank, place in enumerate(members):
            peer = connected[place]
            if peer is not None:
                peer.identity = self.identities[place]
                self.ranks[rank] = peer
                self.inspection.joined(rank)
        self.stall = StallWatch(self._settings.stall_timeout_s, self.world_size)
        self.stall.begin(self.identities.values(), now)

    # ------------------------------------------------------------------ processes in the place of lost ones

    def handle_new(self, peer: Peer, who: Identity, message: Message, now: float) -> None:
        """What happens to one that is no member yet is nobody's failure but its own."""
        match message:
            case protocol.Ready() if not peer.is_out:
                peer.is_ready = True
                self.close_late()
            case protocol.Active(is_active=False):  # a run that the others have ended long ago
                peer.num_ended += 1
                self._connections.send(peer, protocol.Left())
            case protocol.Failed(record) | protocol.Echoed(record):
                self._connections.send(peer, protocol.Failure(record.cut()))
            case protocol.Stop() | protocol.Leave() if peer.is_launcher:
                self.drain(who.node_rank, now)
            case protocol.Stop() | protocol.Leave():
                self._close(peer, who.rank)

    def _close(self, new: Peer, place: int) -> None:
        """Has a process end that was to join; whatever it says later."""
        new.is_ready, new.is_out = False, True
        self.membership.withdrew(place)
        self._connections.send(new, protocol.Closing())

    def note_end(self, num_ended: int) -> None:
        """A member has ended so many runs."""
        self._num_ended = max(self._num_ended, num_ended)
        self.close_late()

    def close_late(self) -> None:
        """Has those leave that come after the last step."""
        for place, new in self._new.items():
            if new.num_ended < self._num_ended:
                self._vacancies.close(place)
                self._close(new, place)

    def fill_vacancies(self, now: float) -> None:
        """Has processes started, and asks for those that are ready to be members."""
        if not self._replaces:
            return
        for place in self._vacancies.due(now, self._may_start):
            launcher, number = self._launcher_of(place), self._vacancies.num_started(place)
            if launcher is None:
                self._processes.start_again(place, number)
            else:
                self._connections.send(launcher, protocol.Start(place, number))
        for place in filter(self._waits, self._new):
            if self._vacancies.may_enter(place, now):
                self.membership.ready(place)

    def deadline(self) -> float | None:
        """When to fill vacancies at the latest; None if nothing is pending."""
        if not self._replaces:
            return None
        return self._vacancies.deadline(lambda p: self._may_start(p) or self._waits(p))

    def _reopen(self, node: int, now: float) -> None:
        """The launcher of a node has come or gone: processes are asked for in the other places there."""
        taken = {*self.membership.members, *self._new}
        places = [place for place, its in self._nodes.items() if its == node and place not in taken]
        self._vacancies.reopen(places, now)

    def _may_start(self, place: int) -> bool:
        """Whether there is somebody who starts processes on the node of a place, and none is there."""
        has_launcher = self._nodes.get(place, 0) == 0 or self._launcher_of(place) is not None
        return has_launcher and place not in self._new

    def _waits(self, place: int) -> bool:
        """Whether a process is there that is let in once it is time."""
        is_vacant = place not in self.membership.members
        peer = self._new.get(place)
        if not is_vacant or peer is None or peer.identity is None or not peer.is_ready:
            return False
        if self._process(peer.identity, place).has_ended:  # what it said has come later
            return False
        return not self._node_leaves(peer.identity.node_rank)

    def _node_leaves(self, node: int) -> bool:
        """Whether a node was asked to leave, or has: nobody joins there."""
        if node == 0:
            return False
        launchers = [p.identity for p in self._connections.peers if p.is_launcher and p.identity is not None]
        places = {self.place_of(who.rank) for who in launchers if who.node_rank == node}
        return not places or not places.isdisjoint(self.membership.leaving)

    def drain(self, node: int, now: float) -> None:
        """Ask all members on a node to leave, and let nobody join there."""
        self.membership.leave(self.on_node(node), now)
        for place, new in self._new.items():
            if new.identity is not None and new.identity.node_rank == node:
                new.is_launcher = False
                self._close(new, place)

    def _launcher_of(self, place: int) -> Peer | None:
        """Who starts processes on the node of a place; None for the first one, where this process does."""
        node = self._nodes.get(place, 0)
        for peer in self._connections.peers:
            if peer.is_launcher and peer.identity is not None and peer.identity.node_rank == node != 0:
                return peer
        return None


def _key(who: Identity | FailureRecord) -> tuple[int | None, int | None]:
    """What a process is known by, whatever its rank is."""
    return who.node_rank, who.pid


@dataclass
class _Vacancy:
    """A place in which processes are started."""

    opens_at: float | None = None
    """When the next one is to be."""
    is_started: bool = False
    """Whether one was that is no member yet."""
    joined_at: int | None = None
    """The step at which its present process has joined; None for a first one."""
    num_failed: int = 0
    num_started: int = 0

    def failed(self, now: float) -> None:
        """Another one is to be started; later each time."""
        delay_s = min(_FIRST_DELAY_S * 2 ** (self.num_failed - 1), _LONGEST_DELAY_S)
        self.opens_at = now + (delay_s if self.num_failed else 0.0)


class Vacancies:
    """Says when a new process is started in a place, and when no more. Pure: told what happened.

    Args:
        most: how often a process may be started in a place without `STEPS_TO_FORGET` steps in between.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: defaultdict[int, _Vacancy] = defaultdict(_Vacancy)

    def close(self, place: int) -> None:
        """The process there ends, and none is to follow."""
        vacancy = self._places[place]
        vacancy.is_started, vacancy.opens_at = False, None

    def lost(self, places: Iterable[int], step: int, now: float) -> None:
        """Members are lost, when `step` steps are committed, and known to have ended."""
        for place in places:
            vacancy = self._places[place]
            is_soon = vacancy.joined_at is not None and step - vacancy.joined_at < STEPS_TO_FORGET
            vacancy.num_failed = vacancy.num_failed + 1 if is_soon else 0
            vacancy.joined_at = None
            vacancy.failed(now)

    def left(self, place: int, now: float) -> None:
        """A member has left as it was asked to, and has ended: that is no failure of its place."""
        self._places[place] = _Vacancy(opens_at=now, num_started=self._places[place].num_started)

    def ended(self, place: int, now: float) -> bool:
        """A process has ended; returns whether it was one that had not joined."""
        vacancy = self._places[place]
        if not vacancy.is_started:
            return False
        vacancy.num_failed += 1
        vacancy.is_started = False
        vacancy.failed(now)
        return True

    def joined(self, places: Iterable[int], step: int) -> None:
        """Processes that were started here are members."""
        for place in places:
            vacancy = self._places[place]
            vacancy.is_started, vacancy.opens_at, vacancy.joined_at = False, None, step

    def reopen(self, places: Iterable[int], now: float) -> None:
        """Who starts processes there has come or gone: also where that was given up, or begun by another."""
        for place in places:
            vacancy = self._places[place]
            vacancy.is_started = False
            if vacancy.opens_at is None:
                vacancy.num_failed, vacancy.opens_at = 0, now

    def may_enter(self, place: int, now: float) -> bool:
        """Whether a process that nobody was asked to start is let in there; it may have to wait as others."""
        vacancy = self._places[place]
        if vacancy.opens_at is not None and vacancy.opens_at > now:
            return False
        vacancy.opens_at = None
        return True

    def expect(self, place: int) -> None:
        """The process there has not joined after all, and may yet."""
        vacancy = self._places[place]
        vacancy.is_started, vacancy.joined_at = True, None

    def num_started(self, place: int) -> int:
        """How many processes were started there."""
        return self._places[place].num_started

    def is_expected(self, place: int) -> bool:
        """Whether a process was started there that has not joined."""
        return self._places[place].is_started

    def due(self, now: float, may_start: Callable[[int], bool]) -> list[int]:
        """Places in which a process is to be started now, if somebody is there who does; each once."""
        found = []
        for place, vacancy in sorted(self._places.items()):
            if vacancy.opens_at is not None and vacancy.opens_at <= now and may_start(place):
                vacancy.opens_at = None
                if vacancy.num_failed <= self._most:
                    vacancy.is_started = True
                    vacancy.num_started += 1
                    found.append(place)
        return found

    def deadline(self, may_start: Callable[[int], bool]) -> float | None:
        """When to ask `due` at the latest; None if nothing is pending."""
        opens = {place: v.opens_at for place, v in self._places.items() if v.opens_at is not None}
        return min((at for place, at in opens.items() if may_start(place)), default=None)

"""What the control server decides: what was first, who goes on. Pure: told who says what, and when.

`server.py` carries it: the thread, the sockets and the clock.
"""

from __future__ import annotations

import hmac
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import lightning_ddp.supervise.protocol as protocol
from lightning_ddp.errors import one_of
from lightning_ddp.supervise.connections import Connections, Peer, explain_loss
from lightning_ddp.supervise.failure_record import GONE, FailureRecord, Identity
from lightning_ddp.supervise.members import LocalProcesses, Members
from lightning_ddp.supervise.membership import Phase
from lightning_ddp.supervise.protocol import Message, ProtocolError
from lightning_ddp.supervise.settings import ReconcileSettings
from lightning_ddp.supervise.stop_main import StopAgreement

__all__ = ["ECHO_WAIT_S", "EXIT_WAIT_S", "RunControl", "Verdict"]

EXIT_WAIT_S = 0.25
"""How long a process that vanished waits for its exit code, which its launcher learns at the same time."""
ECHO_WAIT_S = 2.0
"""How long a lost connection waits for the failure behind it."""


class Verdict:
    """Decides which failure was first. Pure: told what happened and when.

    A process that dies takes others along: their connections to it break, and they report that too, often
    sooner. So a broken connection and a process that vanished wait a moment for a better explanation; an
    exception of the user's code needs none.
    """

    def __init__(self) -> None:
        self.first: FailureRecord | None = None
        """It never changes, but where the others go on without that rank."""
        self._vanished: dict[object, tuple[float, FailureRecord]] = {}
        self._echoes: list[tuple[float, FailureRecord]] = []

    def accuse(self, record: FailureRecord) -> None:
        """A failure that explains itself: an exception of user code, or a process with its exit code."""
        if self.first is not None:
            return
        self.first = record
        if self._vanished and _key(record) not in self._vanished:
            deadline, self.first = min(self._vanished.values(), key=lambda entry: entry[0])  # noticed earlier
            self._vanished[_key(record)] = deadline, record  # the next, if the others go on without that one

    def vanished(self, record: FailureRecord, now: float) -> None:
        """A process whose connection closed without a word."""
        known = self._vanished.get(_key(record))
        if known is None:
            self._vanished[_key(record)] = (now + EXIT_WAIT_S, record)
        elif known[1].exit_code is not None:  # its launcher had been sooner: all is known
            self.accuse(known[1])

    def echo(self, record: FailureRecord, now: float) -> None:
        """An exception that is usually the consequence of a failure elsewhere: a lost connection."""
        self._echoes.append((now + ECHO_WAIT_S, record))

    def exited(self, record: FailureRecord, description: str, now: float) -> None:
        """A launcher's report of a child that ended without success; `exit_code` is set."""
        if self.first is not None or record.exit_code is None:
            return
        if any(_key(echo) == _key(record) for _, echo in self._echoes):
            return  # it failed in the open, and is waiting for a better explanation already
        record = record.with_exit(record.exit_code, description)
        known = self._vanished.get(_key(record))
        if known is not None:
            self.accuse(record if known[1].exception_type is None else known[1])
        else:  # the last that it said may still be unread
            self.vanished(record, now)

    def decide(self, now: float) -> FailureRecord | None:
        """The first failure, as soon as it is certain."""
        deadline = self.deadline()
        if deadline is not None and deadline <= now:
            named = list(self._vanished.values()) or self._echoes
            self.first = min(named, key=lambda entry: entry[0])[1]
        return self.first

    @property
    def echoes(self) -> list[FailureRecord]:
        """Those that wait for the failure behind them."""
        return [record for _, record in self._echoes]

    def set_aside(self, record: FailureRecord) -> None:
        """The others go on without a process: what is known of it is settled."""
        self.first = None
        self._vanished.pop(_key(record), None)
        self._echoes = [echo for echo in self._echoes if _key(echo[1]) != _key(record)]

    def settle(self, record: FailureRecord) -> None:
        """The failure that ends the run is known, whatever else is."""
        self.first = self.first or record

    def deadline(self) -> float | None:
        """When to decide at the latest; None if nothing is pending."""
        waiting = [*self._vanished.values(), *self._echoes]
        return min((deadline for deadline, _ in waiting), default=None) if self.first is None else None


def _key(record: FailureRecord) -> object:
    """What a process is known by: its rank may be that of an earlier generation."""
    return record.rank if record.pid is None else (record.node_rank, record.pid)


class RunControl:
    """The state of one run as its control server knows it.

    Args:
        connections: of the server; what is sent goes there.
        token: the run's secret; a connection that does not begin with it is closed.
        world_size: number of ranks.
        settings: times, and whether the run goes on without ranks that it loses.
        processes: those of the server's node.
        say: prints a text for people.
        with_stack: adds the stack of a process that says nothing, where it can be had.
        pid: of the server's process: if a rank is there, the others do not go on without it.
    """

    def __init__(
        self,
        connections: Connections,
        *,
        token: str,
        world_size: int,
        settings: ReconcileSettings,
        processes: LocalProcesses,
        say: Callable[[str], None],
        with_stack: Callable[[FailureRecord], FailureRecord],
        pid: int,
    ) -> None:
        self._connections, self._settings = connections, settings
        self._say, self._with_stack = say, with_stack
        self._token, self._pid = token, pid
        self._verdict = Verdict()
        self._stop = StopAgreement(settings.failure_grace_s)
        self.members = Members(connections, world_size, settings, processes)
        self._num_ended: Counter[int] = Counter()
        """Number of a run -> ranks that have ended it."""
        self._num_left = 0
        """Runs that all ranks have ended, and so may leave."""
        self._gone_between: list[FailureRecord] = []
        """Processes that were gone between two runs: a failure if another run begins."""
        self._is_told = False
        self._checkpoint: str | None = None

    @property
    def first_failure(self) -> FailureRecord | None:
        """The first failure of the run, once it is certain, with the checkpoint that was saved then."""
        first = self._verdict.first if self._is_told else None  # before, the others may go on without it
        return first if first is None else replace(first, checkpoint=self._checkpoint)

    def deadline(self, now: float) -> float | None:
        """When to `decide` at the latest; None if nothing is pending."""
        members = self.members
        deadlines = [self._verdict.deadline(), self._stop.deadline(), members.inspection.deadline()]
        if self._verdict.first is None:
            deadlines.append(members.stall.next_look(now))
        if not self._is_told:
            deadlines.append(members.deadline())
            if members.has_met and not self._waits_for_verdict:
                deadlines.append(members.membership.deadline())
        return min((at for at in deadlines if at is not None), default=None)

    # ------------------------------------------------------------------ what is heard

    def hear(self, peer: Peer, message: Message, now: float) -> None:
        """A message of a process, or of a stranger.

        Raises:
            ProtocolError: it is none that may come from there: the connection is to be closed.
        """
        who, members, send = peer.identity, self.members, self._connections.send
        if who is None:
            self._greet(peer, message, now)
            return
        match message:
            case protocol.Dismiss(node):
                send(peer, self._dismiss(node, now))
            case protocol.Progress(where) if peer.is_new or (who.rank >= 0 and not peer.is_out):
                if peer.is_active and not peer.is_new:
                    members.stall.report(who, where, now)
                send(peer, protocol.Beat(members.stall.interval_s))
            case protocol.Exited() | protocol.Vanished():  # of a launcher, which may be no member
                self.report(message, now)
            case _ if peer.is_new:
                members.handle_new(peer, who, message, now)
            case _ if who.rank >= 0 and not peer.is_out:
                self._handle_member(peer, who, message, now)

    def _handle_member(self, peer: Peer, who: Identity, message: Message, now: float) -> None:
        members, send_all = self.members, self._connections.send_all
        match message:
            case protocol.Active(is_active):
                peer.is_active = is_active
                if is_active:
                    for record in self._gone_between:
                        self._verdict.vanished(record, now)
                    self._gone_between.clear()
                    peer.has_left = False
                    members.note_part_begun(who)
                    if members.membership.leaving and message.name != "fit":  # nobody leaves there
                        self._have_all_stop(protocol.Stop(signal.SIGTERM, is_requeue=False), now)
                else:
                    send_all(self._stop.left(who.rank))
                    members.stall.forget(who.rank)
                    self._note_end(peer)
                members.inspection.entered(who.rank, message)
            case protocol.Stopped():
                send_all(self._stop.left(who.rank))
                members.note_part_ended(who)
            case protocol.Saved(path):
                self._checkpoint = path
            case protocol.Who():
                self._connections.send(peer, protocol.Here(tuple(sorted(members.ranks))))
            case protocol.Bye():
                peer.has_left = True
            case protocol.Stop():
                self._have_all_stop(message, now)
            case protocol.Leave(is_node):
                if members.goes_on and self._stop.deadline() is None:
                    if is_node:
                        members.drain(who.node_rank, now)
                    else:
                        members.membership.leave([members.place_of(who.rank)], now)
            case protocol.Failed() | protocol.Echoed():
                self.report(message, now)
            case protocol.Position(position):
                send_all(self._stop.report(who.rank, position))
                members.heard(members.place_of(who.rank), message, now)
            case protocol.Present() | protocol.Joined() | protocol.Begun() | protocol.Declined():
                members.heard(members.place_of(who.rank), message, now)
            case protocol.Ready():
                pass  # it stands again, as its `Present` says; it asks once more when it is new again
            case _:
                members.deliver(members.inspection.handle(who.rank, message, now))

    def _greet(self, peer: Peer, message: Message, now: float) -> None:
        if not isinstance(message, protocol.Hello):
            raise ProtocolError("no hello")
        if not hmac.compare_digest(message.token.encode(), self._token.encode()):
            raise ProtocolError("another token")
        self.members.admit(peer, message, now)
        is_known = self._is_told if peer.is_new else self._verdict.first is not None
        if self._verdict.first is not None and is_known and message.identity.rank >= 0:
            self._connections.send(peer, protocol.Failure(self._verdict.first.cut()))

    def _note_end(self, peer: Peer) -> None:
        """A rank has ended a run. It leaves it when all have: until then one of them may still fail."""
        peer.num_ended += 1
        self._num_ended[peer.num_ended] += 1
        ranks = self.members.ranks
        is_last = self._num_ended[peer.num_ended] >= self.members.world_size  # some may be lost since
        if is_last and all(other.num_ended >= peer.num_ended for other in ranks.values()):
            self._num_left = max(self._num_left, peer.num_ended)
            del self._num_ended[peer.num_ended]
            self._connections.send_all([protocol.Left()])
        self.members.note_end(peer.num_ended)

    def report(self, message: Message, now: float) -> None:
        """What a process says of a failure; also one that runs in the server's own process."""
        match message:
            case protocol.Failed(record):
                self._verdict.accuse(record)
            case protocol.Echoed(record):
                self._verdict.echo(record, now)
                self._end_with_echoes()
            case protocol.Vanished(record):
                if (news := self.members.vanished(record)) is not None:
                    self._verdict.vanished(news, now)
            case protocol.Exited(record):
                if (news := self.members.exited(record, now)) is not None:
                    self._verdict.exited(news, record.message, now)

    def lost(self, peer: Peer, error: OSError | None, now: float) -> None:
        """A connection has ended."""
        who = peer.identity
        self.members.hang_up(peer, now)
        if who is None or peer.is_new or peer.is_out:
            return  # if it is one of the run its launcher tells of its end
        self.members.stall.forget(who.rank)
        if peer.has_left or who.rank < 0:
            return
        is_in_run = peer.is_active or peer.num_ended > self._num_left
        if not is_in_run and not any(other.is_active for other in self.members.ranks.values()):
            self._gone_between.append(FailureRecord.of_identity(who, GONE))
            return
        message = explain_loss(error, who, self._settings.heartbeat_timeout_s)
        record = FailureRecord.of_identity(who, message)
        if message == GONE:
            self._verdict.vanished(record, now)
        elif not self._lose(record, now, has_ended=True):
            self._verdict.accuse(record)
        else:
            for other in [self.members.identities[place] for place in self.members.on_node(who.node_rank)]:
                self._lose(FailureRecord.of_identity(other, message), now, has_ended=True)

    def _lose(self, record: FailureRecord, now: float, *, has_ended: bool) -> bool:
        """A rank is lost; returns whether the others may go on without it."""
        if self._is_told or not self.members.lose(record, now, has_ended=has_ended):
            return False
        self._end_with_echoes()
        return True

    def _end_with_echoes(self) -> None:
        """Has the run end if a process has failed that is called: it does not answer."""
        if self._settings.recovery is not None and not self._settings.recovery.exceptions:
            for echo in self._verdict.echoes:
                self.members.gave_up(echo)

    # ------------------------------------------------------------------ what is to be done

    def decide(self, now: float) -> FailureRecord | None:
        """Does what is due; returns the first failure of the run once, when it is certain."""
        members = self.members
        is_meeting = members.membership.phase not in (Phase.RUNNING, Phase.OVER)
        stalled = members.stall.find(now, may_all_wait=is_meeting)
        if stalled is not None and not self._is_told:
            stalled = self._with_stack(stalled)
            if not self._lose(stalled, now, has_ended=False):
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
            self._say(members.history.tell())
            self._connections.send_all([protocol.Failure(first.cut())])
            return first
        return None

    def _go_on(self, now: float) -> None:
        """Takes what the ranks may go on without out of the verdict, and forms a generation if it is time."""
        membership = self.members.membership
        while membership.phase is not Phase.OVER:
            first = self._verdict.decide(now)
            if first is None or not self._is_of_one_rank(first):
                break
            is_settled = self.members.goes_on and self.members.place_of_process(first) is None
            if not is_settled and not self._lose(first, now, has_ended=first.exit_code is not None):
                break
            self._verdict.set_aside(first)
        if not self._waits_for_verdict and self.members.go_on(now):
            self._connections.send_all(self._stop.restart(set(range(self.members.world_size))))
        if membership.phase is Phase.OVER and membership.cause is None:
            self._stop.end()
            self.members.note_end(sys.maxsize)  # whoever comes now is late
        elif membership.phase is Phase.OVER and membership.cause is not None and self._verdict.first is None:
            message = f"{membership.cause.message}\n  The other ranks did not continue: {membership.reason}"
            self._verdict.settle(replace(membership.cause, message=message))

    @property
    def _waits_for_verdict(self) -> bool:
        """Whether one of those that gather may be lost: then it is not to be a member of what follows."""
        is_gathering = self.members.membership.phase is Phase.GATHERING
        return is_gathering and self._verdict.deadline() is not None

    def _is_of_one_rank(self, record: FailureRecord) -> bool:
        """Whether the others may go on: a process has ended, or its code has raised where that is allowed."""
        recovery, kind = self._settings.recovery, record.exception_type
        if record.exception_class is None or recovery is None or not recovery.exceptions:
            has_ended = record.exit_code is not None or record.message == GONE
            return kind == "SystemExit" or (kind is None and has_ended)
        is_of_user = not record.exception_class.startswith("lightning_ddp.")
        return is_of_user and kind != "KeyboardInterrupt" and record.pid != self._pid

    def _change_members(self, now: float) -> None:
        """Lets in those that are ready, and has those leave that are asked to."""
        if self._stop.deadline() is not None or not self.members.has_met:
            return
        why = self.members.membership.why_to_stop(now)
        if why is not None:
            self._say(f"lightning_ddp: {why}\n")
            self._have_all_stop(protocol.Stop(signal.SIGTERM, is_requeue=False), now)
        self.members.send_to_places(self.members.membership.gather(now))

    def _have_all_stop(self, reason: protocol.Stop, now: float) -> None:
        self.members.membership.stay()
        active = {rank for rank, peer in self.members.ranks.items() if peer.is_active}
        self._connections.send_all(self._stop.request(active, now, reason))

    def _dismiss(self, node: int, now: float) -> protocol.Dismissed:
        """Asks the members of a node to leave; returns which do, or why not."""
        identities, places = self.members.identities, self.members.on_node(node)
        why = None
        if not self.members.goes_on:
            why = "the other ranks of this run would not continue, because it has on_failure='stop'"
        elif node == 0:
            why = (
                "the run needs its first node, which has the control server. SIGTERM to the process there"
                " stops all ranks"
            )
        elif not self.members.has_met:
            why = "not all ranks have connected yet"
        elif not places:
            nodes = sorted({who.node_rank for who in identities.values()})
            why = f"no rank of node {node} is in the run; expected node {one_of(map(str, nodes))}"
        elif self._stop.deadline() is not None:
            why = "all ranks are stopping already"
        else:
            self.members.drain(node, now)
        leaving = [] if why is not None else places
        return protocol.Dismissed(tuple(sorted(identities[place].rank for place in leaving)), why)

    def _leaving_ranks(self) -> set[int]:
        return {rank for rank, peer in self.members.ranks.items() if peer.num_ended > self._num_left}

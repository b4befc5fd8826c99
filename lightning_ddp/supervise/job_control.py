"""Decisions of the control server: which failure was first, and who continues (pure).

Connects `JobState`, which has the processes and their orders, with connections, root cause and roll calls.
`server.py` has the thread, the sockets and the clock.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import lightning_ddp.supervise.protocol as protocol
from lightning_ddp.errors import one_of
from lightning_ddp.supervise.connections import Connections, Peer, explain_loss
from lightning_ddp.supervise.desync import DesyncDetector
from lightning_ddp.supervise.failure_detection import (
    Difference,
    ReplicaComparison,
    RootCauseTracker,
    StallWatch,
)
from lightning_ddp.supervise.failure_record import GONE, FailureRecord, Identity
from lightning_ddp.supervise.job_state import JobState
from lightning_ddp.supervise.orders import JobPhase, RankPhase, Report
from lightning_ddp.supervise.processes import (
    ASLEEP_S,
    Accuse,
    Action,
    End,
    Process,
    ProcessState,
    Say,
    Send,
    StartProcess,
    Unexplained,
)
from lightning_ddp.supervise.protocol import Message, Outgoing, ProtocolError
from lightning_ddp.supervise.settings import SupervisionSettings


class LocalProcesses:
    """Interface by which the control server has its node's processes killed or restarted, in its thread."""

    def failed(self, record: FailureRecord) -> None:
        """React to the job's first failure; called once, when it is certain which one that was."""

    def kill_one(self, pid: int) -> None:
        """Kill the process `pid` of a lost rank as the job continues; its exit is reported like any other."""

    def start_again(self, slot: int, number: int) -> None:
        """Start replacement number `number` for the process of a lost rank, unless started already."""


class JobControl:
    """Decision logic of the control server for a job: which failure was first, and which ranks continue.

    The others do not continue without a rank in the server's process `pid`.
    """

    def __init__(
        self,
        connections: Connections,
        *,
        token: str,
        world_size: int,
        settings: SupervisionSettings,
        processes: LocalProcesses,
        say: Callable[[str], None],
        with_stack: Callable[[FailureRecord], FailureRecord],
        pid: int,
    ) -> None:
        self._connections, self._settings, self._processes = connections, settings, processes
        self._say, self._with_stack = say, with_stack
        self._token, self._pid = token, pid
        # True if the others may continue without a rank whose code has raised
        self._takes_exceptions = settings.recovery is not None and settings.recovery.exceptions
        self._stall = StallWatch(settings.stall_timeout_s, settings.report_period_s(world_size))
        self.job = JobState(world_size, settings)
        self._verdict = RootCauseTracker()
        self._peers: dict[Process, Peer] = {}
        self._process_of: dict[Peer, Process] = {}
        self._members: dict[int, Process] = {}  # members by rank
        self._inspection = DesyncDetector(world_size, self._members)
        self._replicas = ReplicaComparison(range(world_size))
        self._seen = -1  # generation for which the detector and the comparison were made
        self._gone_between: list[FailureRecord] = []  # vanished between runs: failures if another one begins
        self._is_told = False
        self._checkpoint: str | None = None

    @property
    def first_failure(self) -> FailureRecord | None:
        """Record of the job's first failure, with any emergency checkpoint's path; None until certain."""
        first = self._verdict.first if self._is_told else None  # before, the others may go on without it
        return first if first is None else replace(first, checkpoint=self._checkpoint)

    def deadline(self, now: float) -> float | None:
        deadlines = [self._verdict.deadline(), self._inspection.deadline()]
        if self._verdict.first is None:
            deadlines.append(self._stall.next_look())
        if not self._is_told:
            deadlines += [self._replicas.deadline(), self.job.deadline(now)]
        return min((at for at in deadlines if at is not None), default=None)

    # ------------------------------------------------------------------ messages

    def hear(self, peer: Peer, message: Message, now: float) -> None:
        """Handle a message: admit its sender, update the job, answer; raise `ProtocolError` to hang up."""
        if peer.identity is None:
            self._greet(peer, message, now)
            return
        process = self._process_of.get(peer)
        match message:
            case protocol.DrainNode(node):
                self._connections.send(peer, self._dismiss(node, now))
            case protocol.Failed():
                self.report(message, now)
            case Report() if process is not None:
                num_begun = process.report.begun
                self.job.reported(process, message, now)
                if process.report is message and process.is_member and message.begun > num_begun:
                    for record in self._gone_between:
                        self._verdict.vanished(record, now)
                    self._gone_between.clear()
                if self._is_told and self._verdict.first is not None:  # it may not have heard so
                    self._connections.send(peer, protocol.Failure(self._verdict.first))
            case protocol.Saved(path):
                self._checkpoint = path
            case protocol.ListRanks():
                ranks = [member.rank for member in self.job.roster.remaining if member.is_connected]
                self._connections.send(peer, protocol.RankList(tuple(sorted(ranks))))
            case protocol.StateHashes() | protocol.StateValues() if process is not None:
                if process.is_member and message.generation == self.job.generation:
                    self._deliver(self._replicas.handle(process.rank, message, now))
            case _ if process is not None and process.is_member:
                self._deliver(self._inspection.handle(process.rank, message, now))

    def _greet(self, peer: Peer, message: Message, now: float) -> None:
        if not isinstance(message, protocol.Hello):
            raise ProtocolError("no hello")
        if not hmac.compare_digest(message.token.encode(), self._token.encode()):
            raise ProtocolError("another token")
        who = message.identity
        if message.version != protocol.VERSION:
            text = (
                f"it speaks version {message.version} of the control protocol, and the server version"
                f" {protocol.VERSION}. Install the same lightning_ddp on all nodes"
            )
            self._refuse(peer, who, text)
        if who.rank >= 0:
            try:
                process = self.job.connected(who, now, is_launcher=message.is_launcher)
            except ProtocolError as error:
                if who.start is not None:  # its launcher knows why
                    raise
                self._refuse(peer, who, f"{error}: check NODE_RANK, num_nodes and devices on all nodes")
            self._peers[process], self._process_of[peer] = peer, process
            if process.is_member:
                self._members[process.rank] = process
        peer.identity = who
        self._connections.admit(peer)
        first = self._verdict.first
        if first is not None and who.rank >= 0 and (self._is_told or who.start is None):
            self._connections.send(peer, protocol.Failure(first))

    def _refuse(self, peer: Peer, who: Identity, text: str) -> NoReturn:
        """Tell a process why it has no part in the run, and raise `ProtocolError` to hang up."""
        self._connections.send(peer, protocol.Failure(FailureRecord.of_identity(who, text)))
        raise ProtocolError(text)

    def report(self, message: protocol.Failed, now: float) -> None:
        """Pass a failure, exit or disconnection that concerns the job on to the search for the root cause."""
        record = message.record
        process = self.job.roster.of(record)
        counts_exit = isinstance(message, protocol.Exited) and self.job.exited(record, now)
        rank = record.rank if process is None else process.rank
        if process is not None:  # of which another one may take over the process id before this is judged
            record = replace(record, start=process.identity.start)
        is_of_run = process is None or process.state is ProcessState.MEMBER
        match message:
            case protocol.SecondaryFailure():
                if is_of_run:
                    self._verdict.echo(record, now)
                    self._end_with_echoes()
            case protocol.PeerDisconnected():
                if process is None and self.job.goes_on and record.node_rank != 0 and self.job.has_met:
                    # a launching process that is no rank: nobody is left who starts ranks there
                    self._lose_node(record.node_rank, "its launching process died", now, has_ended=False)
                elif process is None or process.is_member:
                    self._verdict.vanished(replace(record, rank=rank), now)
            case protocol.Exited():
                if counts_exit:
                    self._verdict.exited(replace(record, rank=rank), now)
            case _:
                if process is None or is_of_run:
                    self._verdict.accuse(record)
                else:  # it is not in training (yet, or any more): that concerns it alone
                    self._send(process, protocol.Failure(record))

    def lost(self, peer: Peer, error: OSError | None, now: float) -> None:
        process = self._process_of.get(peer)
        self.hang_up(peer, now)
        if process is None or not process.is_member:
            return  # if it is one of the run its launcher tells of its end
        if process.phase is RankPhase.ENDED or (peer.reads_nothing and not self.job.goes_on):
            return  # what it has missed it says itself, or its launcher
        said = process.report
        if said.phase is RankPhase.FINISHED and said.ended == said.begun:
            return  # it has unwound for a signal; if its exit is a failure, its launcher reports that
        is_in_run = process.phase is not RankPhase.IDLE or said.ended > self.job.all_ended
        members = self.job.roster.members
        if not is_in_run and not any(other.is_member and other.is_active for other in members):
            self._gone_between.append(process.failure(GONE))
            return
        message = explain_loss(error, process.who, self._settings.heartbeat_timeout_s)
        record = process.failure(message)
        if message == GONE:
            self._verdict.vanished(record, now)
        elif not self._lose(process, record, now, has_ended=True):
            self._verdict.accuse(record)
        else:
            self._lose_node(process.node, message, now, has_ended=True)

    def hang_up(self, peer: Peer, now: float) -> None:
        self._connections.hang_up(peer)
        process = self._process_of.pop(peer, None)
        if process is not None:
            del self._peers[process]
            self.job.disconnected(process, now)

    def _lose(self, process: Process, record: FailureRecord, now: float, *, has_ended: bool) -> bool:
        """Remove a failed rank from the job and start a recovery; return False if the job has to end."""
        if self._is_told or not self.job.lose(process, record, now, has_ended=has_ended):
            return False
        self._end_with_echoes()
        return True

    def _lose_node(self, node: int | None, message: str, now: float, *, has_ended: bool) -> None:
        for member in self.job.roster.remaining:
            if member.node == node and member.phase is not RankPhase.ENDED:
                self._lose(member, member.failure(message), now, has_ended=has_ended)

    def _end_with_echoes(self) -> None:
        """End the job if the others wait in a recovery for a rank that failed in a call that communicates."""
        for _, echo in self._verdict.echoes if not self._takes_exceptions else ():
            process = self.job.roster.of(echo)
            if process is not None:
                self.job.gave_up(process, f"rank {echo.rank} cannot continue: {echo.message}")

    def _send(self, process: Process, message: Message) -> None:
        if process in self._peers:
            self._connections.send(self._peers[process], message)

    def _deliver(self, outgoing: Outgoing) -> None:
        for rank, message in outgoing:
            if rank in self._members:
                self._send(self._members[rank], message)

    # ------------------------------------------------------------------ decisions

    def decide(self, now: float) -> FailureRecord | None:
        """Look for failures, and react; once the first one is certain, send it to all ranks and return it."""
        job = self.job
        self._renew(now)
        waits_until = self._verdict.deadline()
        if waits_until is not None and now > waits_until + ASLEEP_S:
            self._verdict.restart_limits(now)
            job.restart_limits(now)
        self._deliver(self._inspection.due(now))
        if self._is_told:
            return None
        stalled = self._stall.find(job.roster.members, now)
        if stalled is not None:
            process, record = stalled[0], self._with_stack(stalled[1])
            if not self._lose(process, record, now, has_ended=False):
                self._verdict.accuse(record)
        stranded = self._inspection.stranded(job.all_ended)
        if stranded is not None:
            self._verdict.accuse(stranded)
        difference = self._replicas.due(now)
        if difference is not None:
            self._differ(difference)
        self._go_on(now)
        first = self._verdict.decide(now)
        if first is not None:
            self._is_told = True
            self._say(job.history.tell())
            self._connections.send_all(protocol.Failure(first))
        return first

    def _differ(self, found: Difference) -> None:
        settings, parted = self._settings.replicas, [self._members[rank] for rank in found.ranks]
        action = settings.name if settings is not None else "warn"
        heals = action == "heal" and found.has_majority and found.can_be_copied
        if heals and self.job.heal(parted):
            self._say(f"{found.text}\n  It takes the state of the majority at the next step boundary.\n")
        elif action == "warn":
            self._say(f"{found.text}\n")
        else:
            self._verdict.accuse(parted[0].failure(found.text))

    def _failed(self, process: Process, now: float) -> None:
        """Remove a rank that reported the phase failed but no error, or else make that the job's failure."""
        if not process.is_member:  # it was lost at the same moment
            return
        record = process.failure(process.report.why or "it has failed")
        concerns_itself_alone = self._takes_exceptions and record.pid != self._pid
        if not (concerns_itself_alone and self._lose(process, record, now, has_ended=False)):
            self._verdict.accuse(record)

    def _go_on(self, now: float) -> None:
        """Remove failed ranks if the job may continue without them; send orders, kill and start processes."""
        job = self.job
        while job.phase is not JobPhase.OVER:
            first = self._verdict.decide(now)
            process = None if first is None else job.roster.of(first)
            if first is None or process is None or not job.goes_on or not self._is_of_one_rank(first):
                break
            is_to_lose = process.is_member and process.phase is not RankPhase.ENDED
            has_ended = first.exit_code is not None
            if is_to_lose and not self._lose(process, first, now, has_ended=has_ended):
                break
            self._verdict.set_aside(first)
        job.is_pending = self._verdict.deadline() is not None
        while actions := job.tick(now):
            for action in sorted(actions, key=self._is_to_own_process):
                self._act(action, now)
            self._renew(now)
        if job.phase is JobPhase.OVER and job.reason is not None and self._verdict.first is None:
            cause = job.cause or FailureRecord(rank=0, message=job.reason)
            message = f"{cause.message}\n  The other ranks did not continue: {job.reason}"
            self._verdict.first = replace(cause, message=message)

    def _is_to_own_process(self, action: Action) -> bool:
        who = action.process.identity if isinstance(action, Send) else None
        return who is not None and (who.node_rank, who.pid) == (0, self._pid)

    def _act(self, action: Action, now: float) -> None:
        match action:
            case Send(process, order):
                self._send(process, order)
            case End(process):
                if process in self._peers:
                    self.hang_up(self._peers[process], now)
                if process.node == 0:
                    self._processes.kill_one(process.identity.pid)
            case StartProcess(None, slot, number):
                self._processes.start_again(slot, number)
            case StartProcess(launcher, slot, number) if launcher is not None:
                self._send(launcher, protocol.Start(slot, number))
            case Say(text):
                self._say(text)
            case Accuse(record):
                self._verdict.accuse(record)
            case Unexplained(process):
                self._failed(process, now)

    def _renew(self, now: float) -> None:
        """Reset the desync detector, replica comparison and stall watch when the set of ranks has changed."""
        if not self.job.has_met or self.job.generation == self._seen:
            return
        if self._seen >= 0:
            self._members = {member.rank: member for member in self.job.roster.members}
            self._inspection = DesyncDetector(len(self._members), self._members)
            self._replicas = ReplicaComparison(self._members)
        self._seen = self.job.generation
        self._stall.begin(now)

    def _is_of_one_rank(self, record: FailureRecord) -> bool:
        """Return True if a failure is of a kind that concerns one rank only, so that others may continue."""
        kind = record.exception_type
        if record.exception_class is None or not self._takes_exceptions:
            has_ended = record.exit_code is not None or record.message == GONE
            return kind == "SystemExit" or (kind is None and has_ended)
        is_of_user = not record.exception_class.startswith("lightning_ddp.")
        return is_of_user and kind != "KeyboardInterrupt" and record.pid != self._pid

    def _dismiss(self, node: int, now: float) -> protocol.DrainNodeReply:
        """Ask all ranks of a node to leave the run; return a reply with these ranks, or why none does."""
        job, why = self.job, None
        there = {member.node for member in job.roster.remaining}
        nodes = map(str, sorted(job.roster.nodes.values()) if not there else sorted(there))
        if not job.goes_on:
            why = "the other ranks of this run would not continue, because it has on_failure='stop'"
        elif node == 0:
            why = (
                "the run needs its first node, which has the control server. SIGTERM to the process there"
                " stops all ranks"
            )
        elif not job.has_met:
            why = "not all ranks have connected yet"
        elif node not in there:
            why = f"no rank of node {node} is in the run; expected node {one_of(nodes)}"
        elif job.stopping is not None:
            why = "all ranks are stopping already"
        leaving = job.dismiss(node, now) if why is None else []
        return protocol.DrainNodeReply(tuple(sorted(member.rank for member in leaving)), why)

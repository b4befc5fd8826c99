"""The world of one history: the server, its processes, the network, faults, and what has to hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning_ddp.supervise.protocol as protocol
from lightning_ddp.supervise.connections import Peer
from lightning_ddp.supervise.failure_record import GONE, FailureRecord, Identity
from lightning_ddp.supervise.job_control import JobControl, LocalProcesses
from lightning_ddp.supervise.orders import JobPhase, NewGeneration, Order, RankPhase, Report, Task
from lightning_ddp.supervise.processes import ProcessState
from lightning_ddp.supervise.protocol import Message
from lightning_ddp.supervise.settings import RecoverySettings, ReplaceSettings, SupervisionSettings
from simulation.checks import GRACE_S, Checks
from simulation.kernel import Kernel, Violation, ends_within
from simulation.network import Collective, Connections, Socket, describe
from simulation.plan import Fault, Plan
from simulation.rank import Process

__all__ = ["World"]

HEARTBEAT_S = 2.0
COMES_S = 6.0
LATE_STEP = 25
CONVERGES_S = 150.0
ENDS_S = 60.0
MORE_STEPS = 2
_SECONDS = 30.0
"""Real time that a history may take; a usual one takes 10 ms."""
_SERVER = Identity(rank=-1, node_rank=0, host="node0", pid=1)


class _Node0(LocalProcesses):
    """Who starts and ends the processes of the server's node."""

    def __init__(self, world: World) -> None:
        self._world = world

    def kill_one(self, pid: int) -> None:
        process = self._world.processes[pid]
        is_frozen = any(p.is_held for p in self._world.processes.values())  # who waits for it looks alike
        if process.is_alive and process.is_sound and not is_frozen:
            raise self._world.violation(f"{process} is sound, and is killed")
        self._world.later("launcher", 0.1, lambda: self._world.processes[pid].end(-9))

    def start_again(self, place: int, number: int) -> None:
        self._world.later("launcher", 0.002, lambda: self._world.start_again(place, number))


class World:
    """All of one history."""

    def __init__(self, plan: Plan, *, traces: bool = False) -> None:
        self.plan = plan
        self.kernel = Kernel(plan.seed, is_random=plan.is_random, held=dict(plan.held))
        self.kernel.trace = [] if traces else None
        options: dict[str, Any] = {
            "min_world_size": plan.min_world_size,
            "max_recoveries": plan.max_recoveries,
        }
        options["exceptions"] = plan.exceptions
        recovery = RecoverySettings(**options)
        if plan.replaces:
            recovery = ReplaceSettings(**options, wait_s=plan.wait_s)
        self.settings = SupervisionSettings(
            heartbeat_timeout_s=HEARTBEAT_S,
            failure_grace_s=GRACE_S,
            stall_timeout_s=plan.stall_timeout_s,
            recovery=recovery,
        )
        self.period_s = self.settings.report_period_s(plan.num_ranks)
        connections: Any = Connections(self)
        self.control = JobControl(
            connections,
            token="t",
            world_size=plan.num_ranks,
            settings=self.settings,
            processes=_Node0(self),
            say=lambda text: None,
            with_stack=lambda record: record,
            pid=100 if plan.is_hosted_by_rank_0 else 1,
        )
        self.job = self.control.job
        self.last_step = plan.last_step if plan.last_step is not None else 10**9
        self.server_gone = FailureRecord.of_identity(_SERVER, GONE)
        self.has_server = True
        self.is_failing = False
        self.isolated: set[int] = set()
        """Nodes whose network is cut."""
        self.processes: dict[int, Process] = {}
        self.members_of: dict[int, tuple[int, ...]] = {0: tuple(range(plan.num_ranks))}
        self.peers: dict[int, Peer] = {}
        self._pid_of: dict[Peer, int] = {}
        self.of_job: dict[Any, Process] = {}
        """Process as the server knows it -> that process."""
        self._calls: dict[tuple[int, Any], Collective] = {}
        self._offered: dict[int, tuple[list[tuple[int, int]], bool]] = {}
        self._num_exits = 0
        self.reports: dict[int, Report] = {}
        """Process id -> its last report that was heard."""
        self._num_all_ended = 0
        self._asked: dict[int, list[int]] = {}
        """Place -> process ids of those that were started there, in turn."""
        self._num_started_on: Counter[int] = Counter()
        """Node -> how many processes were started there since its machine was."""
        self._parents: dict[int, Process] = {}
        """Process id -> the launcher that has started it, on another node than the server's."""
        self._timer_at: float | None = None
        self.source = 0
        """Whose state is taken in the last generation."""
        self.has_glitch = False
        """Whether ranks lose their connections when they set up the next generation, and nobody is lost."""
        self.has_declined = False
        """Whether a process could not go on after a loss, as it did not train yet, or any more."""
        self.was_killed_late = self._is_quiet = False
        self._struck: set[int] = set()
        """Steps that somebody has got the gradients of."""
        self._moments: Counter[str] = Counter()
        """Kind -> how often it has occurred."""
        self.whole_after = 0
        """Number of the event after which all were well again."""
        self._loaded, self._num_pending = 0, len(plan.faults)
        self.checks = Checks(self)
        self._news_at = 0.0
        """When a fault has come last, or a generation."""

    # ------------------------------------------------------------------ time and network

    def later(self, lane: str, typical_s: float, event: Callable[[], None]) -> None:
        self.kernel.send(lane, self.kernel.delay(lane, typical_s), event)

    def to_server(self, process: Process, message: Message) -> None:
        peer = self.peers.get(process.pid)
        if peer is None or process.node in self.isolated or not self.has_server:
            return
        self._transmit(process.lane + ">", message, lambda: self._server_hears(peer, message))

    def _transmit(self, lane: str, message: Message, arrives: Callable[[], None]) -> None:
        """A message is under way: it may be lost, come twice, or behind others that were sent later."""
        draw = self.kernel.random("network").random() if self.plan.is_random else 1.0
        if draw < 0.03 and not self.kernel.is_calm:
            self.kernel.note(lambda: f"lost: {describe(message)}")
            return
        if draw < 0.12:
            delay = self.kernel.delay(lane, 0.05)
            self.kernel.at(self.kernel.now + delay, arrives)
            if draw >= 0.06:
                return
        self.later(lane, 0.001, arrives)

    def _server_hears(self, peer: Peer, message: Message) -> None:
        process = self.processes[self._pid_of[peer]]
        if not peer.connection.is_open or not self.has_server or process.node in self.isolated:  # type: ignore[attr-defined]
            return
        if peer.identity is None:  # the first message of a connection is the first
            self.kernel.at(self.kernel.now + 0.01, lambda: self._server_hears(peer, message))
            return
        self.kernel.note(lambda: f"server hears of {process}: {describe(message)}")
        for name in self._moments_of_report(process, message):
            self.occurs(name)
        try:
            self.control.hear(peer, message, self.kernel.now)
        except Violation:
            raise
        except Exception as error:
            raise self.violation(
                f"the server hangs up on {process}, which said {describe(message)}"
            ) from error
        self.server_acts()

    def server_acts(self) -> None:
        try:
            first = self.control.decide(self.kernel.now)
        except KeyError as error:
            raise self.violation(f"the server fails: {error!r}") from error
        self.checks.look()
        if self.job.generation > self._loaded:
            self._load_faults(self.job.generation)
            self.checks.formed()
        if first is not None:
            self.kernel.note(lambda: f"the run has failed: {first.message}")
            self.is_failing = True
            self.checks.reason(first)
            self.kernel.at(self.kernel.now + GRACE_S + 3.0, self._end_late)
        deadline = self.control.deadline(self.kernel.now)
        if deadline is not None and (self._timer_at is None or deadline < self._timer_at):
            self._timer_at = deadline
            self.kernel.at(deadline, lambda: self._tick(deadline))

    def _tick(self, due: float) -> None:
        if self._timer_at == due:
            self._timer_at = None
        if self.has_server:
            self.server_acts()

    def to_rank(self, peer: Peer, message: Message) -> None:
        process = self.processes[self._pid_of[peer]]
        for name in self._moments_of_order(message):
            self.occurs(name)
        if process.node not in self.isolated:
            self._transmit(process.lane + "<", message, lambda: self._arrives(process, message))

    def _moments_of_report(self, process: Process, message: Message) -> list[str]:
        """What a report tells that is new: faults come after it."""
        if not isinstance(message, Report):
            return [type(message).__name__]
        before, names = self.reports.get(process.pid), []
        if before is not None and message.number <= before.number:
            return []
        self.reports[process.pid] = message
        if before is None or message.phase is not before.phase:
            kinds = {
                RankPhase.FINISHED: "Stopped", RankPhase.STANDING: "Ready", RankPhase.IDLE: "ended",
                RankPhase.STOPPED: "Present", RankPhase.MEETING: "Present",
            }  # fmt: skip
            names += [kinds[message.phase]] if message.phase in kinds else []
        if before is not None and message.state_of > before.state_of:
            names.append("Joined")
        if before is not None and message.heard > before.heard and self.job.phase is JobPhase.HOLDING:
            names.append("Position")
        return names

    def _moments_of_order(self, message: Message) -> list[str]:
        if not isinstance(message, Order):
            return [type(message).__name__]
        self.checks.may_leave(message, self._num_all_ended)
        kinds = {
            Task.HOLD: ["Hold"] if self.job.stopping is not None else ["Gather"], Task.MEET: ["MeetAfter"],
            Task.STOP: ["StopAfter"], Task.RECOVER: ["Muster"], Task.ENTER: ["Form"],
        }  # fmt: skip
        has_ended = message.all_ended > self._num_all_ended
        self._num_all_ended = max(self._num_all_ended, message.all_ended)
        return kinds.get(message.task, []) + ["Left"] * has_ended

    def _arrives(self, process: Process, message: Message) -> None:
        if process.node not in self.isolated:
            process.hear(message)

    def closed_by_server(self, peer: Peer) -> None:
        process = self.processes[self._pid_of[peer]]
        self.later(process.lane + "<", 0.001, process.lost_server)

    # ------------------------------------------------------------------ processes

    def begin(self) -> None:
        """The launchers start the first processes."""
        for place in range(self.plan.num_ranks):
            node = self.node_of(place)
            self._start(place, None, is_launcher=node > 0 and self._is_first(place))

    def node_of(self, place: int) -> int:
        return place * self.plan.num_nodes // self.plan.num_ranks

    def _is_first(self, place: int) -> bool:
        return place == 0 or self.node_of(place - 1) != self.node_of(place)

    def _start(self, place: int, start: int | None, *, is_launcher: bool) -> None:
        pid = 100 + len(self.processes)
        node = self.node_of(place)
        self._num_started_on[node] += 1
        seen_pid = 1000 * node + self._num_started_on[node] if node else pid  # the first node never returns
        process = Process(self, pid, place, node, seen_pid=seen_pid, start=start, is_launcher=is_launcher)
        if (parent := self.launcher_of(process.node)) is not None and not is_launcher:
            self._parents[pid] = parent
        self.processes[pid] = process
        if start:
            self._asked.setdefault(place, []).append(pid)
        self.kernel.note(lambda: f"{process} is started")
        process.start()

    def process_of(self, who: Identity | FailureRecord) -> Process | None:
        """The last process that was known by a node and a process id."""
        known = (p for p in reversed(self.processes.values()) if p.node == who.node_rank)
        return next((p for p in known if p.seen_pid == who.pid), None)

    def launcher_of(self, node: int) -> Process | None:
        return next(
            (p for p in self.processes.values() if p.is_launcher and p.node == node and p.is_alive), None
        )

    def asked_to_start(self, launcher: Process, place: int, number: int) -> None:
        """A launcher of another node hears `Start`: maybe once more, and it has told of the end."""
        for process in self.processes.values():
            if process.place == place and process.start_number == number and number:
                if not process.is_alive:
                    self._reaped(process)
                return
        self.start_again(place, number)

    def start_again(self, place: int, number: int) -> None:
        """As `Children.start_again`."""
        node = self.node_of(place)
        if any(p.place == place and p.start_number == number for p in self.processes.values()):
            return  # asked once more
        if self.is_failing or (self.plan.is_hosted_by_rank_0 and node == 0 and not self.has_server):
            return
        for process in list(self.processes.values()):
            if process.is_alive and process.place == place:
                is_held = node in self.isolated or any(p.is_held for p in self.processes.values())
                if node == 0 or (process.is_sound and not is_held):
                    raise self.violation(f"{process} lives, and another one is started in its place")
                process.end(-9)
        if node and self.launcher_of(node) is None:
            return
        self._start(place, number, is_launcher=False)
        if node:
            self.occurs("started")

    def connect(self, process: Process) -> None:
        if not self.has_server or process.node in self.isolated:
            process.learn(self.server_gone)
            return
        peer = Peer(Socket())  # type: ignore[arg-type]
        self.peers[process.pid], self._pid_of[peer] = peer, process.pid
        hello = protocol.Hello("t", process.identity, process.is_launcher)
        self.later(process.lane + ">", 0.001, lambda: self._greets(process, peer, hello))

    def _greets(self, process: Process, peer: Peer, hello: Message) -> None:
        if not self.has_server or process.node in self.isolated:
            return
        self.kernel.note(lambda: f"server hears of {process}: {describe(hello)}")
        try:
            self.control.hear(peer, hello, self.kernel.now)
        except protocol.ProtocolError as error:  # nobody has asked for it any more
            others = [p for p in self.job.roster.living.values() if p.place == process.place]
            is_taken = any(p.state is ProcessState.STANDING for p in others)  # its end is not known yet
            is_orphan = (
                process.node and self.job.roster.launcher_of(process.place) is None
            )  # of one that is lost
            is_known = is_taken or is_orphan
            if process.is_alive and process.is_sound and self.is_running() and not is_known:
                raise self.violation(f"{process} is sound, and is refused") from error
            self.kernel.note(lambda: f"the server refuses {process}")
            self._hang_up_on_stranger(process, peer)
        else:
            self.of_job[self.control._process_of[peer]] = process
            if process.is_new:
                self.occurs("Hello")
        self.server_acts()

    def _hang_up_on_stranger(self, process: Process, peer: Peer) -> None:
        peer.connection.is_open = False  # type: ignore[attr-defined]
        self.later(process.lane + "<", 0.001, process.lost_server)

    def ended(self, process: Process) -> None:
        """A process is gone: its connections close, its launcher learns of it, and its children die."""
        if process.node not in self.isolated:  # else others notice as `_cut` says
            self.let_go(process)
        peer = self.peers.get(process.pid)
        if self.is_host(process):
            self._lose_server()
        if peer is not None and process.node not in self.isolated:
            self.later(process.lane + ">", 0.001, lambda: self._connection_ends(peer, None))
        if process.is_launcher:
            for other in list(self.processes.values()):
                if other.node == process.node and other is not process:
                    says_so = self.plan.is_random and self.kernel.random("orphans").random() < 0.5
                    if says_so and other.is_alive:
                        parent = FailureRecord.of_identity(process.identity, GONE)
                        other.post(protocol.PeerDisconnected(parent))
                    other.end(-9)
        else:
            self.later(f"launcher{process.node}", 0.003, lambda: self._reaped(process))
        for other in self.processes.values():
            if other.is_alive:
                other.poke()

    def _lose_server(self) -> None:
        self.has_server = False
        for process in self.processes.values():
            if process.is_alive:
                self.later(process.lane + "<", 0.001, process.lost_server)

    def _connection_ends(self, peer: Peer, error: OSError | None) -> None:
        if self.has_server and peer.connection.is_open:  # type: ignore[attr-defined]
            self.control.lost(peer, error, self.kernel.now)
            self.server_acts()

    def _reaped(self, process: Process) -> None:
        if not self.has_server:
            return
        assert process.exit_code is not None
        identity = process.identity
        record = FailureRecord.of_identity(identity, "the process ended", exit_code=process.exit_code)
        launcher = self._parents.get(process.pid)
        if process.node == 0:
            self.kernel.note(lambda: f"server hears of the end of {process}")
            self.control.report(protocol.Exited(record), self.kernel.now)
            self.server_acts()
        elif launcher is not None and launcher.is_alive:
            launcher.post(protocol.Exited(record))

    def is_host(self, process: Process) -> bool:
        """Whether the server runs in a process."""
        return self.plan.is_hosted_by_rank_0 and process.pid == 100

    def waits_for_children(self, process: Process) -> bool:
        """Whether a launching process that has ended its script waits for its children."""
        if self.is_host(process) and self.has_server:
            for other in list(self.processes.values()):  # `Children.end_new`
                is_left_out = other.place not in [p.place for p in self.job.roster.members]
                if other.is_alive and other.is_new and other.node == 0 and is_left_out:
                    other.end(-9)
        elif not process.is_launcher:
            return False
        return any(
            p.is_alive and p.node == process.node and p is not process for p in self.processes.values()
        )

    def _end_late(self) -> None:
        for process in list(self.processes.values()):
            if process.is_alive:
                self.was_killed_late |= not process.is_held
                self.kernel.note(lambda process=process: f"{process} has not ended by itself")  # type: ignore[misc]
                process.end(-9)

    # ------------------------------------------------------------------ training

    def collective(self, generation: int, what: Any, members: tuple[int, ...]) -> Collective:
        key = generation, what
        if key not in self._calls:
            self._calls[key] = Collective(
                members,
                is_rendezvous=what == "meet",
                is_of_setup=what in ("connect", "copy", "hand over"),
            )
        return self._calls[key]

    def let_go(self, process: Process) -> None:
        """A process has aborted its groups, or is gone."""
        for (generation, _), call in self._calls.items():
            if generation == process.state.generation and not call.is_broken:
                call.lose(process)

    def entered(self, process: Process, form: NewGeneration) -> None:
        if form.number <= process.entered_last:
            raise self.violation(f"{process} enters generation {form.number} after {process.entered_last}")
        process.entered_last = form.number
        self.members_of[form.number], self.source = form.members, form.source
        if process.state.place == form.source:
            self._offered[form.number] = list(process.log), process.has_parted

    def copy(self, process: Process, form: NewGeneration) -> None:
        if process.state.place in (*form.behind, *form.joined):
            log, process.has_parted = self._offered[form.number]
            process.log, process.is_clean = list(log), True
        if process.committed != form.step:
            raise self.violation(f"{process} has copied step {process.committed}, and not {form.step}")
        process.is_training = True

    def through(self, process: Process) -> None:
        """A process has got the gradients of all, and is about to commit the step."""
        step = process.committed + 1
        for fault in self.plan.faults:
            if fault.at_step == step and step not in self._struck:
                self.kernel.at(self.kernel.now + fault.at_s, lambda fault=fault: self.strike(fault))
        self._struck.add(step)

    def commit(self, process: Process) -> None:
        generation = process.state.generation
        members = self.members_of[generation]
        if process.state.place not in members:
            raise self.violation(f"{process} commits in a generation that it is no member of")
        process.log.append((generation, len(members)))
        if process.committed <= LATE_STEP:
            self._news_at = self.kernel.now
        for other in self.processes.values():
            if other.is_alive and other.is_training and other.node not in self.isolated and other.is_clean:
                shared = min(other.committed, process.committed)
                if other.log[:shared] != process.log[:shared] and self._is_member(other):
                    raise self.violation(f"{process} and {other} have committed step {shared} differently")
                if abs(other.committed - process.committed) > 1 and other.state.generation == generation:
                    raise self.violation(f"{process} and {other} are more than a step apart")

    def _is_member(self, process: Process) -> bool:
        """Whether the server has not given a process up, and with it what it alone has."""
        return any(member.is_member for member, its in self.of_job.items() if its is process)

    # ------------------------------------------------------------------ what happens, and what has to hold

    def note_decline(self, process: Process) -> None:
        """A process ends that is called."""
        self.has_declined |= not process.is_training

    def violation(self, text: str) -> Violation:
        return Violation(f"seed {self.plan.seed}, {self.kernel.now:.3f} s: {text}")

    def _living(self, place: int) -> Process | None:
        return next((p for p in self.processes.values() if p.is_alive and p.place == place), None)

    def _load_faults(self, generation: int) -> None:
        """A generation has been formed."""
        for fault in self.plan.faults:
            if fault.at_event is not None:
                self.kernel.before[fault.at_event] = lambda fault=fault: self.strike(fault)
            elif fault.at_step is None and fault.after is None and self._is_next(fault, generation):
                self.kernel.at(self.kernel.now + fault.at_s, lambda fault=fault: self.strike(fault))
        self._loaded, self._news_at = generation, self.kernel.now

    def _is_next(self, fault: Fault, generation: int) -> bool:
        is_first = fault.generation == generation == 0
        return is_first or self._loaded < fault.generation <= generation

    def occurs(self, name: str) -> None:
        """A message is sent by the server or heard by it, or a process begins something: faults come then."""
        self._moments[name] += 1
        for fault in self.plan.faults:
            if fault.after == name and fault.count == self._moments[name]:
                self.kernel.at(self.kernel.now + fault.at_s, lambda fault=fault: self.strike(fault))

    def strike(self, fault: Fault) -> None:
        self._num_pending -= 1
        self._news_at = self.kernel.now
        if self._is_quiet:
            return
        process, node = self._living(fault.place), self.node_of(fault.place)
        self.kernel.note(lambda: f"*** {fault.kind} {process or fault.place}")
        match fault.kind:
            case "kill" if process is not None:
                process.end(-9)
            case "kill ended":
                for other in list(self.processes.values()):
                    if other.is_alive and other.has_ended_fit:
                        other.end(-9)
                        break
            case "kill source" if (source := self._living(self.source)) is not None:
                source.end(-9)
            case "quit" if process is not None:  # by os._exit(0)
                process.end(0)
            case "exit" if process is not None:
                self._num_exits += 1
                process.end(100 + self._num_exits)
            case "freeze" if process is not None:
                process.is_sound = False
                process.freeze()
                self.kernel.at(self.kernel.now + fault.for_s, process.thaw)
            case "sleep" if not self.is_failing:  # Ctrl-Z: all that is due meanwhile happens at the end
                self.kernel.now += fault.for_s
                self._news_at = self.kernel.now
                self.checks.sleep(fault.for_s)
            case "sigterm" if process is not None and process.is_connected:
                process.sigterm()
            case "glitch":
                self.has_glitch = True
            case "stop" if process is not None and process.is_connected:
                process.ask_to_stop()
            case "hang" if process is not None:
                process.is_sound = False
                process.hang()
                self.kernel.at(self.kernel.now + fault.for_s, process.go_on_after_hanging)
            case "part" if process is not None and process.is_connected and self.has_server:
                member = self.job.roster.of(process.identity)
                if member is not None and member.is_member and self.job.heal([member]):
                    process.has_parted = True
                    self.server_acts()
            case "raise" if process is not None:
                process.user_error = True
            case "cut" if node != 0:
                self._cut(node)
                self.kernel.at(self.kernel.now + HEARTBEAT_S + 1.0 + fault.for_s, lambda: self._return(node))
            case "dismiss" if node != 0 and self.has_server:
                told = self.control._dismiss(node, self.kernel.now)
                for other in self.processes.values():
                    is_asked = other.is_alive and other.node == node and other.state.rank in told.ranks
                    other.was_asked_to_leave |= is_asked
                self.server_acts()

    def _cut(self, node: int) -> None:
        self.isolated.add(node)
        for process in self.processes.values():
            if process.node == node and process.is_alive:
                delay = HEARTBEAT_S * (0.7 + 0.3 * self.kernel.random("cut").random())
                self.kernel.at(self.kernel.now + delay, process.lost_server)
                self.kernel.at(self.kernel.now + delay, lambda process=process: self.let_go(process))
                peer = self.peers.get(process.pid)
                if peer is not None:
                    error = TimeoutError(110, "Connection timed out")
                    self.kernel.at(
                        self.kernel.now + HEARTBEAT_S,
                        lambda peer=peer, error=error: self._connection_ends(peer, error),
                    )

    def _return(self, node: int) -> None:
        """The same command again on a node that is lost."""
        for process in list(self.processes.values()):
            if process.node == node:
                process.end(-9)
        self.isolated.discard(node)
        self._num_started_on[node] = 0
        if self.plan.replaces and not self.is_failing and self.has_server and not self._is_over:
            place = next(p for p in range(self.plan.num_ranks) if self.node_of(p) == node)
            self._start(place, 0, is_launcher=True)

    @property
    def _is_over(self) -> bool:
        return not any(p.is_alive for p in self.processes.values())

    def is_running(self) -> bool:
        """Whether the run has neither failed nor ended on a rank."""
        has_begun = self.job.has_met and not self.is_failing
        return has_begun and not any(p.has_ended_fit for p in self.processes.values())

    def is_whole(self) -> bool:
        """Whether every place that may be filled is filled, and all train."""
        alive = [p for p in self.processes.values() if p.is_alive]
        fails = any(p.user_error or p.state.phase is RankPhase.FAILED for p in alive)
        if not alive or fails or any(p.was_asked_to_leave or p.is_held for p in alive):
            return False
        generation = max(p.state.generation for p in alive)
        members = self.members_of[generation]
        if sorted(p.state.place for p in alive) != list(members):
            return False
        if self.job.phase is not JobPhase.RUNNING or len({p.has_parted for p in alive}) > 1:
            return False
        gives_up = not self.plan.replaces or self.plan.max_recoveries < 1000  # some places may stay empty
        return gives_up or all(p in members for p in self._fillable())

    @property
    def _is_disturbed(self) -> bool:
        """Whether a fault lasts: a process is stopped, or about to raise, or a node cut off."""
        alive = [p for p in self.processes.values() if p.is_alive]
        return bool(self.isolated) or any(p.is_held or p.user_error for p in alive)

    def _fillable(self) -> list[int]:
        return [
            place
            for place in range(self.plan.num_ranks)
            if self.node_of(place) == 0 or self.launcher_of(self.node_of(place)) is not None
        ]

    def play(self) -> None:
        """The whole history. Raises `Violation`."""
        with ends_within(_SECONDS):
            self._play()

    def _play(self) -> None:
        self.begin()
        self._load_faults(0)
        last_s = max((fault.at_s for fault in self.plan.faults), default=0.0) + COMES_S
        is_due = True
        while is_due and self._num_pending and self.kernel.now < max(self._news_at + COMES_S, last_s):
            is_due = self.kernel.step()
        longest_s = max((fault.for_s for fault in self.plan.faults), default=0.0) + HEARTBEAT_S + 1.01
        self._run_until(self.kernel.now + longest_s, lambda: not self._is_disturbed)
        quiet_at = self.kernel.now + HEARTBEAT_S + 1.01
        self._run_until(quiet_at, lambda: not self.plan.is_random and self.is_whole())
        self._is_quiet = True
        self.kernel.is_calm = True
        if not self._run_until(quiet_at + CONVERGES_S, lambda: self._is_over or self.is_whole()):
            raise self.violation(f"not whole again: {self.state()}")
        self.whole_after = self.kernel.num_events
        alive = [p for p in self.processes.values() if p.is_alive]
        if alive and self.plan.last_step is None:
            steps = {p.pid: p.committed + MORE_STEPS for p in alive}

            def has_moved() -> bool:
                living = [p for p in self.processes.values() if p.is_alive]
                return all(p.committed >= steps.get(p.pid, 0) for p in living)

            if not self._run_until(self.kernel.now + 30.0, has_moved):
                raise self.violation(f"no steps are taken: {self.state()}")
            self.last_step = max((p.committed for p in alive), default=0) + MORE_STEPS
        if not self._run_until(self.kernel.now + ENDS_S, lambda: self._is_over):
            raise self.violation(f"does not end: {self.state()}")
        self.checks.end()

    def _run_until(self, until: float, condition: Callable[[], bool] = lambda: False) -> bool:
        while not condition():
            if self.kernel.now >= until or not self.kernel.step():
                return condition()
        return True

    def state(self) -> str:
        """Where all are, for a report."""
        members = [
            str(member.place) + ("" if member.is_member else "!") for member in self.job.roster.members
        ]
        lines = [f"phase {self.job.phase.name}, members {members}"]
        for process in self.processes.values():
            if process.is_alive:
                wait = process._wait
                lines.append(
                    f"{process}: {process.state.phase.value}, generation {process.state.generation}, step"
                    f" {process.committed}, order {process.state.task.value},"
                    f" {'frozen, ' if process.is_frozen else ''}"
                    f"{'deaf, ' if process.is_deaf else ''}waits {wait is not None}"
                )
        return "\n    ".join(lines)

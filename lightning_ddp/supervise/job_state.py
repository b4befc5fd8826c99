"""The job as the control server knows it: what each process is, and what it is to do (pure).

`docs/concepts/elastic-protocol.md` has the states, the orders, and why they suffice. Call `tick` after each
event, and at `deadline`: it does what is due.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace

from lightning_ddp.supervise.failure_record import FailureRecord, History, Identity
from lightning_ddp.supervise.orders import (
    JobPhase,
    NewGeneration,
    Order,
    RankPhase,
    Report,
    Task,
    Wish,
    WishKind,
)
from lightning_ddp.supervise.processes import (
    ASLEEP_S,
    OUT,
    Accuse,
    Action,
    End,
    OrderBook,
    Process,
    ProcessState,
    Roster,
    Say,
    Slots,
    Unexplained,
)
from lightning_ddp.supervise.protocol import ProtocolError
from lightning_ddp.supervise.recoveries import Recoveries, new_generation
from lightning_ddp.supervise.settings import RecoverySettings, ReplaceSettings, SupervisionSettings

SETTLE_S = 0.1  # seconds after a failure, or a wish to leave, in which others become part of the same change
_EXPLAINED_WITHIN_S = 5.0  # seconds after which the report of a member that it fails is its failure
_MOST_VOIDS = 5
_MEETS_WITHIN_S = 30.0
"""Seconds in which ranks that are all there fail to connect at least `_MOST_VOIDS` times, until the run ends:
one that is stopped for a while makes a single attempt long."""
_GOING = frozenset({JobPhase.RUNNING, JobPhase.SHORT, JobPhase.HOLDING, JobPhase.STOPPING})
"""Phases in which no member stops."""


class JobState:
    """State machine of a job on the control server: its processes, generations of ranks, and orders."""

    def __init__(self, world_size: int, settings: SupervisionSettings) -> None:
        recovery = settings.recovery
        self.goes_on = recovery is not None  # True if the job continues without ranks that it loses
        self._settings = recovery or RecoverySettings()
        self._wait_s = recovery.wait_s if isinstance(recovery, ReplaceSettings) else 0.0
        self._grace_s = settings.failure_grace_s
        answers = settings.stall_timeout_s is not None
        self._orders = OrderBook(self._grace_s, settings.report_period_s(world_size) / 2 if answers else None)
        self.generation = 0
        self.roster = Roster(world_size)
        self.history = History()
        self.reason: str | None = None  # reason for which the job cannot continue
        self.cause: FailureRecord | None = None  # first failure since all were running
        self.all_ended = 0  # number of runs that all members have ended
        self.is_pending = False  # True while a failure waits for its explanation: no generation is formed
        self.left: list[int] = []  # places of processes that have left since a generation was whole
        replaces = isinstance(recovery, ReplaceSettings)
        self._slots = Slots(self.roster, self._settings.max_recoveries if replaces else None)
        self._recoveries = Recoveries(self._settings.max_recoveries)
        self._not_ended: set[Process] = set()  # members that have not ended the next run
        self._most_ended = 0  # most runs that a member has ended
        self._position = 0  # boundary where all meet or stop
        self._has_new = False  # True if those that meet expect others to join
        self.stopping: Wish | None = None  # set once all are to stop at a boundary, for a signal
        self._stops_by: float | None = None  # time at which the job fails unless all have stopped
        self._leaves_at: float | None = None  # time at which those that were asked to leave do
        self._settles_at = 0.0
        self._parted: set[Process] = set()  # members that are to copy another one in the next generation
        self._healed: set[Process] = set()  # those of them that do so in the generation that was formed last
        self._lost: dict[Process, FailureRecord] = {}  # members that were lost since a generation was formed
        self._new: NewGeneration | None = None  # the generation that was formed last
        self._whole = 0  # the last generation all of whose members had its state
        self._voids: list[float] = []  # times at which one did not become whole, though nobody was lost
        self._ending: dict[Process, float] = {}  # processes that fail, or are to end -> until when they may
        self._touched: dict[Process, None] = {}  # processes that have reported, or changed, since `tick`
        self._actions: list[Action] = []

    @property
    def phase(self) -> JobPhase:
        return self._orders.phase

    @property
    def has_met(self) -> bool:
        return self.phase is not JobPhase.CONNECTING

    # ------------------------------------------------------------------ events

    def connected(self, who: Identity, now: float, *, is_launcher: bool) -> Process:
        """Register a connected process; raise `ProtocolError` if its rank is taken or not requested."""
        place, roster = who.rank, self.roster
        if who.start is None:
            may_come = self.phase is JobPhase.CONNECTING and place not in roster.nodes
        else:
            may_come = self._slots.may_come(who, is_launcher=is_launcher)
        if not may_come or place >= roster.num_places or (place, who.start) in roster.ended_early:
            raise ProtocolError(f"there is no place for rank {place}")
        if who.start == 0:
            self._slots[place].num_started += 1
            who = replace(who, start=self._slots[place].num_started)
        process = roster.add(who, now, is_launcher=is_launcher)
        self._touched[process] = None
        if process.is_member:
            self._not_ended.add(process)
        elif roster.launcher_of(place) is process:  # its node has come back
            self._slots.reopen(who.node_rank, now)
        return process

    def reported(self, process: Process, report: Report, now: float) -> None:
        """Store a process's report and react to it; ignore one that is not newer than the last."""
        before, process.heard_at = process.report, now
        if process.state is ProcessState.GONE or report.number <= before.number:
            return
        process.report = report
        self._touched[process] = None
        if report.where.count != before.where.count or not process.is_active:
            process.moved_at = now
        if process.state is ProcessState.JOINING and report.state_of == self.generation:
            process.state = ProcessState.MEMBER
        if report.ended > self.all_ended or report.phase is RankPhase.ENDED:
            self._not_ended.discard(process)
        if process.is_member:
            self._most_ended = max(self._most_ended, report.ended)
            if report.phase is RankPhase.FAILED:
                self._ending.setdefault(process, now + _EXPLAINED_WITHIN_S)
        if report.wish is not None and before.wish != report.wish:
            self._wished(process, report.wish, now)
        begins = report.begun > before.begun
        if begins and report.run != "fit" and self._leaves_at is not None:  # nobody leaves there
            self.stop(Wish(WishKind.STOP, signal.SIGTERM), now)
        self._orders.note(process, self.generation)
        is_stopped = process.is_member and report.phase in (RankPhase.STOPPED, RankPhase.MEETING)
        if is_stopped and process.has_heard and self.phase in _GOING:  # it was called a moment ago, perhaps
            self._recover(process.failure("it has stopped"), now)

    def _wished(self, process: Process, wish: Wish, now: float) -> None:
        if wish.kind is WishKind.LEAVE_NODE:
            self.dismiss(process.node, now)
        elif not process.is_member:
            if process.state is ProcessState.STANDING:
                self._release(process, now)
        elif wish.kind is WishKind.STOP:
            self.stop(wish, now)
        else:
            self._leaves_at = now + SETTLE_S

    def heal(self, parted: Iterable[Process]) -> bool:
        """Plan that ranks copy another's state at the next step boundary; return False if impossible."""
        is_over = not self.goes_on or not self._all_are_active or self.stopping is not None
        if is_over or self.phase is JobPhase.FORMING:  # then what was found is about a state before that
            return False
        self._parted.update(parted)
        return True

    def dismiss(self, node: int, now: float) -> list[Process]:
        """Make all processes of a node leave the run, without replacement; return those that train."""
        there = [process for process in self.roster.living.values() if process.node == node]
        for process in there:
            process.is_dismissed = True
            if process.state is ProcessState.STANDING:
                self._release(process, now)
        self._leaves_at = now + SETTLE_S
        return [process for process in there if process.is_member]

    def stop(self, wish: Wish, now: float) -> None:
        """Plan that all ranks stop at one step boundary, for a signal; later calls change nothing."""
        if self.stopping is None and any(process.is_active for process in self.roster.remaining):
            self.stopping, self._leaves_at = wish, None

    def disconnected(self, process: Process, now: float) -> None:
        """Record that a connection has closed. If a training rank is lost by it, the caller calls `lose`."""
        was_asked = process.is_launcher and self.roster.launcher_of(process.place) is process
        process.is_connected = False
        if process.node != 0 and process.state in (ProcessState.STANDING, ProcessState.RELEASED):
            self._exit(process, now)  # its launcher may be gone with it
        if was_asked:
            self._slots.reopen(process.node, now)  # what it was asked for is another one's, if any

    def exited(self, record: FailureRecord, now: float) -> bool:
        """Record a child's exit, perhaps reported twice; return True if it may be a failure of the job."""
        process, key = self.roster.of(record), (record.rank, record.start)
        # one that has not connected may have the process id of another from before its node came back
        if process is None or (process.place, process.identity.start) != key:
            if key not in self.roster.ended_early and self._slots[record.rank].awaits(record.start):
                self._slots[record.rank].ended(now)
            self.roster.ended_early.add(key)
            return not (self.goes_on and self.has_met)
        if process.has_exited:
            return False
        process.has_exited = True
        if process.is_member:  # with code 0 its connection says what it was
            return record.exit_code != 0 or not (self.goes_on and self.has_met)
        self._exit(process, now)
        return False

    def _exit(self, process: Process, now: float) -> None:
        """Remove an exited process that was not training; plan the start of another if its rank needs one."""
        process.has_exited, slot = True, self._slots[process.place]
        match process.state:
            case ProcessState.RELEASED if process.has_state:
                slot.ended(now, is_failure=False)
            case ProcessState.STANDING | ProcessState.RELEASED:
                if slot.awaits(process.identity.start):
                    slot.ended(now)
            case ProcessState.CONDEMNED if process not in self._lost:
                slot.ended(now)
        self._remove(process)

    def _remove(self, process: Process) -> None:
        self.roster.remove(process)
        self._not_ended.discard(process)
        self._orders.awaited.discard(process)

    def _release(self, process: Process, now: float) -> None:
        process.state = ProcessState.RELEASED
        self._ending[process] = now + self._grace_s
        self._not_ended.discard(process)
        self._touched[process] = None

    def lose(self, process: Process, record: FailureRecord, now: float, *, has_ended: bool) -> bool:
        """Remove a lost rank and start a recovery; return False, changing nothing, if that is not allowed."""
        if not self.goes_on or not self.has_met or self.phase is JobPhase.OVER or not process.is_member:
            return False
        self.history.lost(process.place, record, now)
        # one of another node cannot be killed from here; it is told nothing more, and its node does that
        has_ended |= process.has_exited or process.node != 0  # it certainly does nothing any more
        if process.state is ProcessState.JOINING:  # it has not got as far as the others
            self.roster.put_out(process)
            if has_ended:
                self._slots[process.place].ended(now)
        else:
            self._lost[process] = record
        self._actions.append(End(process))
        self._recover(record, now)
        if has_ended:
            self._remove(process)
        else:  # its end is awaited as the answers of the others
            process.state, process.heard_at = ProcessState.CONDEMNED, now
            self._not_ended.discard(process)
            self._orders.awaited.add(process)
        remaining = self.roster.remaining
        self._give_up_if_short(remaining, remaining)
        return True

    def gave_up(self, process: Process, why: str) -> None:
        """End the job if its ranks wait in a recovery for this process, which fails."""
        if self.phase in (JobPhase.RECOVERING, JobPhase.FORMING) and process.is_member:
            self._give_up(why)

    # ------------------------------------------------------------------ what is due

    def deadline(self, now: float) -> float | None:
        found = self._limits()
        match self.phase:
            case JobPhase.RUNNING if self._leaves_at is not None and self._all_are_active:
                found.append(self._leaves_at)
            case JobPhase.RECOVERING if not self._orders.awaited and self._is_settled():
                found.append(self._settles_at)
        if self.phase is not JobPhase.OVER:
            found.append(self._slots.deadline())
        return min((at for at in found if at is not None), default=None)

    def _limits(self) -> list[float | None]:
        """Return the deadlines by which other processes have to act; None for each that is not set."""
        joins_by = self._orders.since + self._wait_s if self.phase is JobPhase.SHORT else None
        stops_by = self._stops_by if not self.is_pending else None
        return [self._orders.deadline(), stops_by, joins_by, *self._ending.values()]

    def tick(self, now: float) -> list[Action]:
        """Advance the job and time out late processes; return actions: orders to send, kills, starts."""
        if any(at is not None and now > at + ASLEEP_S for at in self._limits()):
            self.restart_limits(now)
        self._lose_late(now)
        while self._advance(now):
            pass
        # before, all wait without an order; after the end for a reason the failure is told to all
        if self.has_met and (self.phase is not JobPhase.OVER or self.reason is None):
            touched, self._touched = self._touched, {}
            self._actions += self._orders.give(self._template(), touched, self.roster.living.values(), now)
        if self.has_met and self.phase is not JobPhase.OVER:
            self._actions += self._slots.due(now)  # after the orders, as a fork takes 20 ms
        actions, self._actions = self._actions, []
        return actions

    def restart_limits(self, now: float) -> None:
        """Restart all time limits of processes, as this server was suspended (Ctrl-Z), and heard nobody."""
        self._orders.restart(now)
        self._stops_by = None if self._stops_by is None else now + self._grace_s
        for process in self._ending:
            self._ending[process] = now + (_EXPLAINED_WITHIN_S if process.is_member else self._grace_s)

    def _template(self) -> Order:
        task = self.phase.task
        return Order(
            task=task,
            position=self._position if task in (Task.MEET, Task.STOP) else 0,
            has_new=self._has_new and task is Task.MEET,
            wish=self.stopping if task is Task.STOP else None,
            record=self.cause if task is Task.RECOVER else None,
            generation=self._new if task is Task.ENTER else None,
            all_ended=self.all_ended,
        )

    def _advance(self, now: float) -> bool:
        """Switch the job to its next phase if the condition is met; return True if it has switched."""
        self._count_ended()
        self._release_late(now)
        before = self.phase, self.generation, self._orders.since
        match self.phase:
            case JobPhase.CONNECTING if len(self.roster.members) == self.roster.num_places:
                self.roster.set_members(sorted(self.roster.members, key=lambda process: process.place))
                self._enter(JobPhase.RUNNING, now)
            case JobPhase.RUNNING if self._wants_boundary(now):
                self._enter(JobPhase.HOLDING, now)
            case JobPhase.SHORT:
                self._advance_short(now)
            case JobPhase.HOLDING:
                self._advance_holding(now)
            case JobPhase.MEETING:
                self._advance_meeting(now)
            case JobPhase.RECOVERING:
                self._advance_recovering(now)
            case JobPhase.FORMING:
                self._advance_forming(now)
        return (self.phase, self.generation, self._orders.since) != before

    def _enter(self, phase: JobPhase, now: float) -> None:
        self._orders.begin(phase, self.roster.remaining, now)
        is_stop = self.stopping is not None and phase in (JobPhase.HOLDING, JobPhase.STOPPING)
        self._stops_by = now + self._grace_s if is_stop else None

    def _resume(self, now: float) -> None:
        self._enter(JobPhase.SHORT if self._is_short(self.roster.remaining) else JobPhase.RUNNING, now)

    def _advance_short(self, now: float) -> None:
        if self._wants_boundary(now):
            self._enter(JobPhase.HOLDING, now)
        elif not self._all_are_active:  # the run ends
            self.cause = None
            self._enter(JobPhase.RUNNING, now)
        elif now >= self._orders.since + self._wait_s:
            self._give_up(
                f"{len(self.roster.remaining)} ranks remain, fewer than min_world_size, and no new ranks have"
                f" joined within wait_s={self._wait_s:g} s"
            )

    def _advance_holding(self, now: float) -> None:
        if not self._wants_boundary(now):
            self._resume(now)
        elif not self._orders.awaited:
            self._position = max(process.report.position for process in self.roster.remaining)
            if self.stopping is not None:
                self._enter(JobPhase.STOPPING, now)
            elif self._is_settled():
                self._has_new = bool(self._slots.ready(now))
                self._enter(JobPhase.MEETING, now)

    def _advance_meeting(self, now: float) -> None:
        remaining = self.roster.remaining
        over = [process for process in remaining if not process.is_active]
        if not self._orders.awaited:
            if self._is_settled():
                self._form(now)
        elif over and any(process.phase is RankPhase.MEETING for process in remaining):
            self._recover(over[0].failure("it has ended its run before the others"), now)
        elif over:
            self._enter(JobPhase.RUNNING, now)

    def _advance_recovering(self, now: float) -> None:
        for process in self._awaited_and_touched():
            if process.phase in OUT:  # it has ended its part, and does not answer
                process.state = ProcessState.RELEASED
                self.left.append(process.place)
                self.roster.put_out(process)
                self._orders.awaited.discard(process)
            elif process.phase is RankPhase.FAILED and process.report.why:
                self._give_up(process.report.why)
                return
        if not self.roster.remaining:
            self.cause = None  # all that are not lost have ended well
            self._enter(JobPhase.OVER, now)
        elif not self._orders.awaited and now >= self._settles_at and self._is_settled():
            self._form(now)

    def _awaited_and_touched(self) -> list[Process]:
        return [process for process in self._touched if process in self._orders.awaited]

    def _is_settled(self) -> bool:
        """Return True if no remaining rank has disconnected or exited, and no failure is unexplained yet."""
        is_there = (process.is_connected and not process.has_exited for process in self.roster.remaining)
        return not self.is_pending and all(is_there)

    def _advance_forming(self, now: float) -> None:
        for process in self._awaited_and_touched():
            report = process.report
            has_stopped = report.generation == self.generation and process.has_heard
            has_stopped &= report.phase in (RankPhase.STOPPED, RankPhase.STANDING, RankPhase.MEETING)
            if report.phase is RankPhase.FAILED and report.why and process.state is ProcessState.MEMBER:
                self._give_up(report.why)
                return
            if has_stopped or report.phase in OUT:
                self._void(process, now)
                return
        if self._orders.awaited:
            return
        self._whole, self.left, self._voids = self.generation, [], []
        if not self._is_short(self.roster.remaining):  # else it is why the job ends if nobody joins
            self.cause = None
        self._parted -= self._healed
        self.history.went_on(now)
        if self.stopping is not None:
            self._position = -1
            self._enter(JobPhase.STOPPING, now)
        else:
            self._resume(now)

    def _void(self, process: Process, now: float) -> None:
        """Start another recovery, as a rank stopped while a generation was formed; end the job after many."""
        self._voids.append(now)
        cause = process.failure("it could not connect to the other ranks")
        if len(self._voids) >= _MOST_VOIDS and now - self._voids[0] >= _MEETS_WITHIN_S:
            self.cause = self.cause or cause
            self._give_up("the remaining ranks could not connect to each other")
        else:
            self._recover(cause, now)

    def _recover(self, cause: FailureRecord, now: float) -> None:
        """Start a recovery, in which all ranks are told to stop, unless one is under way."""
        self._settles_at = now + SETTLE_S
        if self.phase is not JobPhase.RECOVERING:
            self.cause = self.cause or cause
            self._enter(JobPhase.RECOVERING, now)
            self._touched |= dict.fromkeys(self.roster.remaining)  # some may have ended their part already

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._enter(JobPhase.OVER, self._orders.since)

    def _give_up_if_short(self, members: list[Process], staying: list[Process]) -> bool:
        """End the job and return True if it has too few ranks and does not wait for more; else False."""
        if self._is_short(members) and not (self._wait_s and staying):
            self._give_up(f"{len(members)} ranks remain, fewer than min_world_size")
            return True
        return False

    def _count_ended(self) -> None:
        while self.roster.members and not self._not_ended:
            there = [p for p in self.roster.remaining if p.phase is not RankPhase.ENDED]
            if not there:
                break
            self.all_ended += 1
            self._not_ended = {process for process in there if process.report.ended <= self.all_ended}

    def _release_late(self, now: float) -> None:
        """Tell waiting replacements to exit if the run to join has ended, or their launcher is gone."""
        for process in self.roster.standing:
            is_over = self.phase is JobPhase.OVER and self.reason is None
            if process.report.ended < self._most_ended or is_over:
                self._slots[process.place].close()
                self._release(process, now)
            elif process.node != 0 and self.roster.launcher_of(process.place) is None:
                self._release(process, now)

    def _lose_late(self, now: float) -> None:
        """Remove ranks that ignore an order for too long; fail the job if they do not stop for a signal."""
        for process in [process for process, at in self._ending.items() if at <= now]:
            del self._ending[process]
            is_stuck = process.state is ProcessState.RELEASED and process.phase not in OUT
            if process.is_member and self.reason is None:
                self._actions.append(Unexplained(process))
            elif is_stuck and process.node == 0:  # elsewhere its launcher does it
                self._actions.append(End(process))
        for process in self._orders.late(now):
            if process.state is ProcessState.CONDEMNED:  # not even the kernel ends it: it runs nothing more
                self._remove(process)
                continue
            message = f"it did not stop within failure_grace_s={self._grace_s:g} s"
            self.lose(process, process.failure(message), now, has_ended=False)
        if self._stops_by is not None and now >= self._stops_by and not self.is_pending:
            late = self._holding_up(now)
            moved_at = max((process.moved_at for process in late), default=now - self._grace_s)
            # while one makes progress, as in a long validation, the others may wait for it
            self._stops_by = moved_at + self._grace_s if moved_at + self._grace_s > now else None
            if late and self._stops_by is None:
                ranks = ", ".join(str(process.rank) for process in late)
                message = (
                    f"all were asked to stop by a signal, but rank(s) {ranks} did not reach the next step"
                    f" boundary, and made no progress for failure_grace_s={self._grace_s:g} s"
                )
                self._actions.append(Accuse(late[0].failure(message)))

    def _holding_up(self, now: float) -> list[Process]:
        """Return the ranks that hold up a stop: those that are silent, else those that wait for no other."""
        active = [process for process in self.roster.remaining if process.is_active]
        asked = [process for process in active if process in self._orders.awaited] or active
        silent = [process for process in asked if process.heard_at + self._grace_s <= now]
        return silent or [p for p in asked if p.report.where.waits_for is None] or asked

    # ------------------------------------------------------------------ who joins and leaves

    def _wants_boundary(self, now: float) -> bool:
        """Return True if ranks must stop at a step boundary: for a signal, or as some join, leave or copy."""
        if self.stopping is not None:
            return True
        parted = [process for process in self._parted if process.is_member]
        if self._leaves_at is None and not self.roster.standing and not parted:  # as for most of a run
            return False
        if not self._all_are_active:  # the run ends, and nobody meets in it any more
            return False
        remaining, ready = self.roster.remaining, self._slots.ready(now)
        if self._is_short(remaining):
            return not self._is_short([*remaining, *ready])
        if self._leaves_at is not None and now >= self._leaves_at:
            leavers = [process for process in remaining if process.wants_to_leave]
            if leavers and self._may_go(leavers):
                return True
            self._leaves_at = None
            if leavers:
                number, least = len(leavers), self._settings.min_world_size
                text = (
                    f"lightning_ddp: {number} of {len(self.roster.members)} ranks were asked to leave, but"
                    f" fewer than min_world_size={least} would remain, so all ranks stop at the next step"
                    " boundary\n"
                )
                self._actions.append(Say(text))
                self.stop(Wish(WishKind.STOP, signal.SIGTERM), now)
                return True
        return bool(ready or parted)

    @property
    def _all_are_active(self) -> bool:
        return all(process.is_active for process in self.roster.remaining)

    def _may_go(self, leavers: Iterable[Process]) -> bool:
        gone = set(leavers)
        return not self._is_short([process for process in self.roster.remaining if process not in gone])

    def _is_short(self, processes: list[Process]) -> bool:
        return len(processes) < self._settings.min_world_size

    # ------------------------------------------------------------------ the next generation

    def _form(self, now: float) -> None:
        """Form the next generation from the ranks that stay and join, or end the job if there is none."""
        is_met = self.phase is JobPhase.MEETING
        remaining = self.roster.remaining
        stand = [process for process in remaining if not process.has_state]
        leaving = [p for p in remaining if p.wants_to_leave and (is_met or not p.has_state)]
        if is_met and not self._may_go(leaving):
            leaving = []
        staying = [p for p in remaining if p not in stand and p not in leaving]
        joined = self._slots.ready(now) if is_met and self._has_new else []
        members = sorted([*staying, *joined], key=lambda process: process.place)
        if self._give_up_if_short(members, staying):
            return
        known = {p.place: p.report.progress for p in staying if p.report.progress}
        is_new = self._whole == self.generation
        obstacle = self._recoveries.count(known.values(), self._lost.values(), is_new=is_new)
        if obstacle is not None:
            self._give_up(obstacle)
            return
        before = tuple(process.place for process in self.roster.members if process not in stand)
        self.left += [process.place for process in leaving if process.has_state]
        self.generation += 1
        self._new = new_generation(
            self.generation,
            known,
            joined=tuple(process.place for process in joined),
            before=before,
            parted=[process.place for process in staying if process in self._parted],
            left=tuple(sorted(self.left)),
            is_met=is_met,
        )
        for process in stand:
            process.state, process.rank = ProcessState.STANDING, process.place
            self._slots[process.place].stands_again()
        for process in leaving:
            self.history.lost(process.place, process.failure("the process was asked to leave"), now)
            self._release(process, now)
        for process in self._lost:
            self._slots[process.place].lost(self._new.step, now)
        for process in joined:
            process.state = ProcessState.JOINING
            self._slots[process.place].joined(self._new.step)
        self._lost = {}
        self.roster.set_members(members)
        self._not_ended = {process for process in members if process.report.ended <= self.all_ended}
        if not any(process.wants_to_leave for process in members):
            self._leaves_at = None
        self._healed = self._parted.intersection(members) if not joined else set()
        healed = sorted(process.rank for process in self._healed)
        self.history.formed(self._new.step, before, self._new.members, now, healed=healed)
        self._enter(JobPhase.FORMING, now)

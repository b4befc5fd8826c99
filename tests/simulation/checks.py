"""What has to hold in every history, beside what processes find when they compare their committed steps."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from lightning_ddp.supervise.failure_record import GONE, FailureRecord
from lightning_ddp.supervise.orders import JobPhase, Order, RankPhase
from lightning_ddp.supervise.processes import ProcessState

if TYPE_CHECKING:
    from simulation.rank import Process
    from simulation.world import World

__all__ = ["GRACE_S", "Checks"]

GRACE_S = 12.0
_SLACK_S = 5.0
_LEAVES_WITHIN_S = 5.0


class Checks:
    """What has to hold in a world; its processes and server are looked at after each event of the server."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._job: Any = world.job
        self._lose, self._job.lose = self._job.lose, self._lost
        self._held_up = (-1, JobPhase.RUNNING), 0.0
        """Generation and phase in which all wait for a process that does not answer, and since when."""
        self._whole, self._num_waves = 0, 0
        """The last generation that was whole, and in how many of those members were lost."""
        self._struck_in = -1
        self._released: dict[int, float] = {}
        """Process id of those that are told to end -> since when."""

    def _lost(self, process: Any, record: FailureRecord, now: float, *, has_ended: bool) -> bool:
        """In the place of `JobState.lose`."""
        newest = self._world.reports.get(self._world.of_job[process].pid)
        has_said = newest is not None and newest.phase is RankPhase.ENDED
        is_lost: bool = self._lose(process, record, now, has_ended=has_ended)
        if is_lost and has_said:
            raise self._world.violation(f"rank {process.rank} has ended well, and counts as lost")
        if is_lost and self._whole == self._job.generation != self._struck_in:
            self._struck_in, self._num_waves = self._whole, self._num_waves + 1
        return is_lost

    def sleep(self, seconds: float) -> None:
        """All processes were stopped for a while, which counts for nobody."""
        where, since = self._held_up
        self._held_up = where, since + seconds
        self._released = {pid: since + seconds for pid, since in self._released.items()}

    def look(self) -> None:
        """After each event of the server."""
        job = self._job
        self.no_released_lives_on()
        if job.phase in (JobPhase.RUNNING, JobPhase.SHORT, JobPhase.HOLDING, JobPhase.STOPPING):
            self._whole = job.generation
        now, processes = self._world.kernel.now, self._world.processes.values()
        held = [p for p in processes if p.is_held and p.is_alive]
        is_held_up = job.phase is JobPhase.RECOVERING or (
            job.phase is JobPhase.FORMING and bool(held) and all(p.is_new and not p.is_training for p in held)
        )
        where = job.generation, job.phase
        if not is_held_up or self._world.is_failing or where != self._held_up[0]:
            self._held_up = where, now
        if now - self._held_up[1] > GRACE_S + _SLACK_S:
            text = f"{job.phase.name} lasts longer than any grace: {self._world.state()}"
            raise self._world.violation(text)

    def no_released_lives_on(self) -> None:
        """Nobody of the server's node lives for long that was told to end: its slot could not be filled."""
        now = self._world.kernel.now
        released = {
            p.identity.pid
            for p in self._job.roster.living.values()
            if p.state is ProcessState.RELEASED and p.node == 0 and p.phase is not RankPhase.ENDED
        }
        self._released = {pid: self._released.get(pid, now) for pid in released}
        for pid, since in self._released.items():
            process = self._world.processes[pid]
            if now - since > GRACE_S + _SLACK_S and process.is_alive and not self._world.is_failing:
                raise self._world.violation(f"{process} was told to end, and lives")

    def formed(self) -> None:
        """A generation is formed: nobody is left out who may still commit a step, or is not dead yet."""
        job, processes = self._job, self._world.processes.values()
        places = [member.place for member in job.roster.members] + job.left
        for other in processes:
            is_there = other.is_alive and other.node == 0 and other.is_training and not other.is_stopped
            if is_there and other.place not in places:
                text = f"{other} still trains, while a generation is formed without it"
                raise self._world.violation(text)
        if self._world.control._verdict.deadline() is not None:
            raise self._world.violation("a generation is formed while a failure waits for its explanation")
        for process in job.roster.living.values():
            if process.state is ProcessState.CONDEMNED:
                text = f"rank {process.rank} is condemned, and a generation is formed before its end"
                raise self._world.violation(text)

    def may_leave(self, order: Order, num_ended: int) -> None:
        """All may leave a fit only when all have ended it."""
        for other in self._world.processes.values() if order.all_ended > num_ended else ():
            is_there = other.is_alive and other.is_sound and other.node not in self._world.isolated
            is_member = other.place in [member.place for member in self._job.roster.members]
            if is_there and other.is_training and is_member:
                raise self._world.violation(f"all may leave, and {other} trains")

    def left_alone(self, process: Process) -> None:
        """A process leaves the others: not long after it was asked to have all stop."""
        asked_at, now = process.asked_to_stop_at, self._world.kernel.now
        others = [p for p in self._world.processes.values() if p is not process and p.is_alive]
        is_outside = process.state.state_of < 0  # a new process stops itself alone
        if asked_at is None or is_outside or now - asked_at < _LEAVES_WITHIN_S or self._world.is_failing:
            return
        if any(p.is_training and p.asked_to_stop_at is None for p in others) and not self._job.stopping:
            raise self._world.violation(f"{process} was to stop all, and leaves alone")

    def reason(self, first: FailureRecord) -> None:
        """Whether the run had to end."""
        text, world = first.message, self._world
        process = world.process_of(first)
        is_good = (
            (
                "bad sample" in text
                and not world.plan.exceptions
                and (process is None or not process.raised_outside)
            )
            or (world.plan.is_hosted_by_rank_0 and first.pid == 100)  # the server goes with it
            or ("SIGTERM before" in text and (process is None or not process.is_new))
            or "not all ranks have arrived" in text
            or ("asked to stop by a signal" in text and self._was_held_long)
            or ("min_world_size" in text and not self._are_enough())
            or "in the same way" in text
            or "holds a whole state" in text
            or ("max_recoveries" in text and self._num_waves > world.plan.max_recoveries)
            or not self._job.has_met
            or not any(p.is_alive for p in world.processes.values())
            or ("cannot continue" in text and world.has_declined)
        )
        if not is_good:
            raise world.violation(f"the run ends for no good reason: {text}")

    def _are_enough(self) -> bool:
        """Whether so many members train undisturbed that the others could be done without."""
        places = [member.place for member in self._job.roster.remaining]
        sound = [
            p
            for p in self._world.processes.values()
            if p.is_alive
            and p.is_training
            and p.is_sound
            and p.node not in self._world.isolated
            and p.state.place in places
            and p.state.state_of >= 0
        ]
        return len(sound) >= self._world.plan.min_world_size

    @property
    def _was_held_long(self) -> bool:
        """Whether a process may have been stopped for most of the time in which all are to stop."""
        faults = self._world.plan.faults
        return any(fault.kind in ("freeze", "hang") and fault.for_s > GRACE_S / 4 for fault in faults)

    def end(self) -> None:
        """The history is over."""
        if self._world.was_killed_late:
            raise self._world.violation("a process had to be killed at the end")
        causes = Counter(
            (p.cause.rank, p.cause.message[:80])
            for p in self._world.processes.values()
            if p.cause is not None and not p.raised_outside and p.node not in self._world.isolated
        )
        known = {cause for cause in causes if cause[1] != GONE and not cause[1].startswith("another process")}
        if len(known) > 1:
            raise self._world.violation(f"the ranks know different causes: {known}")

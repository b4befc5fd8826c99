"""The other ranks of a node: started, each watched by a thread, and ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ddp.hydra_jobs.jobs import STARTER
from lightning_ddp.launch.child_process import PARENT_VARIABLE, child_environment
from lightning_ddp.launch.rendezvous import JOIN_VARIABLE
from lightning_ddp.launch.zygote import Fork, Launch, SupervisorLink
from lightning_ddp.supervise.failure_record import FailureRecord, Identity, describe_exit
from lightning_ddp.supervise.guard import Guard
from lightning_ddp.supervise.job_control import LocalProcesses

if TYPE_CHECKING:
    ChildProcess = subprocess.Popen[bytes] | Fork

_LAST_LINES, _LAST_BYTES = 30, 64 * 1024
_STOP_GRACE_S = 5.0


@dataclass(eq=False)
class _Slot:
    """A rank of this node, whose process may be replaced, with the number and end of its last process."""

    local_rank: int
    rank: int
    number: int = 0
    """Number of the last process that was started in the place of a lost one."""
    end: FailureRecord | None = None
    """End of its last process."""


@dataclass(eq=False)
class _Child:
    slot: _Slot
    number: int
    """Number of its start in its slot; 0 for a process that began with the job."""
    process: ChildProcess
    log: Path | None


def exit_message(code: int, log: Path | None = None) -> str:
    """Return a sentence on how a process ended, and where its output is."""
    how = describe_exit(code) + (" before it had joined the others" if code == 0 else "")
    return f"the process {how}; its output is {'above' if log is None else f'in {log}'}"


def exit_record(who: Identity, code: int, log: Path | None = None) -> FailureRecord:
    """Return the failure record of a process that ended, with exit code and last lines of its log."""
    last_lines = None
    if log is not None:
        with contextlib.suppress(OSError), log.open("rb") as file:  # somebody may have removed it
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
            last_lines = "\n".join(lines[-_LAST_LINES:]) or None
    return FailureRecord.of_identity(who, exit_message(code, log), exit_code=code, traceback=last_lines)


class Children(LocalProcesses):
    """Child processes of a launcher, one for each other rank of the node: started, watched and ended.

    `on_end` is called with each child that ends, in the thread that watches it; one that ends before all have
    met has failed. Without a `starter` Python is started, and this process is the first rank of the node.
    """

    def __init__(
        self,
        on_end: Callable[[FailureRecord], None],
        has_met: Callable[[], bool] = lambda: True,
        starter: Callable[[Launch, Mapping[str, str], Path | None], ChildProcess] | None = None,
    ) -> None:
        self.remote: SupervisorLink | None = None
        """Starts and ends the others of its node instead, in rank 0 under `run`."""
        self.launch: Launch | None = None  # ranks of this node, if this process starts them
        self.are_ending = False  # True once no other process is started in the place of a lost one
        self._on_end = on_end
        self._has_met = has_met
        self._starter, self._is_rank = starter or _start_python, starter is None
        self._slots: dict[int, _Slot] = {}
        self._started: list[_Child] = []
        self._alive: list[_Child] = []  # children that have not ended, or whose end is not reported yet
        self._changed = threading.Condition()
        self._is_stopping = False
        self._first: FailureRecord | None = None
        self._guard: Guard | None = None

    @property
    def procs(self) -> list[ChildProcess]:
        return [child.process for child in self._started]

    @property
    def are_of_this_process(self) -> bool:
        """True if this process launched the other ranks of its node, by itself or by its supervisor."""
        return self.launch is not None or self.remote is not None

    @property
    def first_rank(self) -> int:
        """Global rank of the first process of this node; 0 unless this process starts the others."""
        return 0 if self.launch is None else self.launch.first_rank

    @property
    def node_rank(self) -> int:
        return 0 if self.launch is None else self.launch.node_rank

    # ------------------------------------------------------------------ start

    def start_all(self) -> None:
        """Start the node's other ranks, unless started on request; start a guard that kills stuck ranks."""
        assert self.launch is not None  # it was set
        for local_rank in range(int(self._is_rank), self.launch.num_ranks):
            self._slots[local_rank] = _Slot(local_rank, self.first_rank + local_rank)
            if local_rank > 0 and not self.launch.is_later:
                self._start(self.launch, self._slots[local_rank])
        if self.launch.world_size > 1:
            self._guard = Guard(ends_launcher=self._is_rank)

    def start_again(self, place: int, number: int) -> None:
        """Start replacement `number` of initial rank `place`, once; kill the process before. Thread-safe."""
        if self.remote is not None:
            self.remote.ask("start_again", place, number)
            return
        slot = self._slots.get(place - self.first_rank)
        if self.launch is None or slot is None or self.are_ending:
            return
        if number <= slot.number:
            if slot.end is not None:  # was started already, and has ended: that is reported once more
                self._on_end(slot.end)
            return
        slot.number, slot.end = number, None
        with self._changed:
            lost = [child.process for child in self._alive if child.slot is slot]
        for process in lost:
            process.send_signal(signal.SIGKILL)
        try:
            self._start(self.launch, slot)
        except (
            OSError,
            RuntimeError,
        ) as error:  # no memory, no thread; the server plans another start, later
            why = f"it could not be started: {error}"
            print(f"lightning_ddp: another process for rank {slot.rank}: {why}", file=sys.stderr)
            who = Identity(rank=slot.rank, node_rank=self.node_rank, pid=0, start=number)
            slot.end = FailureRecord.of_identity(who, why, exit_code=1)
            self._on_end(slot.end)

    def _start(self, launch: Launch, slot: _Slot) -> None:
        started: Future[None] = Future()
        arguments, name = (launch, slot, started), f"child-{slot.rank}"
        threading.Thread(target=self._start_and_watch, args=arguments, daemon=True, name=name).start()
        started.result()

    def _start_and_watch(self, launch: Launch, slot: _Slot, started: Future[None]) -> None:
        # Linux sends a process its death signal when the thread ends that has started it
        environment = {**launch.environment, "LOCAL_RANK": str(slot.local_rank)}
        if slot.number:
            environment[JOIN_VARIABLE] = str(slot.number)
        log = None if launch.logs is None else launch.logs / f"{slot.rank}.log"
        try:
            child = _Child(slot, slot.number, self._starter(launch, environment, log), log)
        except BaseException as error:  # noqa: BLE001 (raised in the thread that starts it)
            started.set_exception(error)
            return
        with self._changed:
            self._started.append(child)
            self._alive.append(child)
        started.set_result(None)
        self._ended(child, child.process.wait())

    def _ended(self, child: _Child, code: int) -> None:
        rank, pid = child.slot.rank, child.process.pid
        who = Identity(rank=rank, node_rank=self.node_rank, pid=pid, start=child.number or None)
        record, has_failed = exit_record(who, code, child.log), code != 0 or not self._has_met()
        with self._changed:
            is_telling = not self._is_stopping
            if is_telling and has_failed:
                self._first = self._first or record
            if child.number == child.slot.number:
                child.slot.end = record
        if is_telling:
            self._on_end(record)
        with self._changed:
            self._alive.remove(child)
            self._changed.notify_all()

    # ------------------------------------------------------------------ end

    def first_failure(self) -> FailureRecord | None:
        return self._first

    def join(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for all child processes to end; return True if they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._alive, timeout=timeout_s)

    def end(self, grace_s: float) -> None:
        """Wait until all child processes have ended; kill those that have not after `grace_s` seconds."""
        if not self.join(grace_s):
            with self._changed:
                self._is_stopping = True
                late = [child for child in self._alive if child.process.returncode is None]
            self.kill()
            for child in late:
                who = f"rank {child.slot.rank} (pid {child.process.pid})"
                print(f"lightning_ddp: {who} did not end, and was killed", file=sys.stderr)
            self.join(_STOP_GRACE_S)
        if self._guard is not None:
            self._guard.end()

    def end_new(self, is_left_out: Callable[[int], bool]) -> None:
        """Kill processes started for lost ranks if `is_left_out(rank)`: they come too late to join."""
        self._kill_where(lambda child: child.number > 0 and is_left_out(child.slot.rank))

    def kill(self) -> None:
        if self.remote is not None:
            self.remote.ask("children.kill")
        self.send_signal(signal.SIGKILL)

    def kill_one(self, pid: int) -> None:
        self._kill_where(lambda child: child.process.pid == pid)

    def kill_rank(self, rank: int) -> None:
        """Kill the first process of an initial rank, not its replacement, if it is on this node."""
        if self.remote is not None:
            self.remote.ask("children.kill_rank", rank)
        self._kill_where(lambda child: not child.number and child.slot.rank == rank)

    def _kill_where(self, is_meant: Callable[[_Child], bool]) -> None:
        for child in filter(is_meant, self._started):
            child.process.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        for process in self.procs:
            process.send_signal(number)


def _start_python(
    launch: Launch, environment: Mapping[str, str], log: Path | None
) -> subprocess.Popen[bytes]:
    kind, name = launch.program.kind, launch.program.name
    start = ["-m", name] if kind == "module" else [name]
    handed = () if launch.handed is None else (launch.handed.fileno(),)
    if handed:
        start = [STARTER, str(handed[0]), kind, name]
    command = [sys.executable, *start, *launch.program.arguments]
    variables = child_environment({**environment, PARENT_VARIABLE: str(os.getpid())})
    options: dict[str, Any] = {"env": variables, "cwd": launch.cwd, "pass_fds": handed}
    with contextlib.nullcontext() if log is None else log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, **options)

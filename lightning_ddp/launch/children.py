"""The child processes of a launcher: started at once, watched by waiting on them, stopped together."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lightning_ddp.launch.child_process import child_environment
from lightning_ddp.launch.program import ChildCommand
from lightning_ddp.launch.rendezvous import JOIN_VARIABLE
from lightning_ddp.supervise.failure_record import FailureRecord, Identity, describe_exit
from lightning_ddp.supervise.guard import Guard
from lightning_ddp.supervise.job_control import LocalProcesses

if TYPE_CHECKING:
    from lightning_ddp.launch.supervised import SupervisorLink

__all__ = ["ChildProcess", "Children", "exit_message", "exit_record"]

_LAST_LINES = 30
_STOP_GRACE_S = 5.0
_POLL_S = 0.05
"""How often a child is looked at, where the kernel cannot tell of its end."""


class ChildProcess(Protocol):
    """Part of `subprocess.Popen` that is used here."""

    pid: int
    returncode: Any

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""

    def send_signal(self, number: int, /) -> None:
        """Send it a signal unless it has ended."""


@dataclass(eq=False)
class _Child:
    """One that has not ended, as far as is known."""

    local_rank: int
    process: ChildProcess
    log: Path | None
    start: int | None
    """Number of its start in the slot of a lost one; None for a first one."""
    descriptor: int | None
    """Readable when it has ended, unless the process has such a thing itself."""

    @property
    def end(self) -> Any:
        """What is readable when it has ended; None where the kernel has nothing such."""
        return getattr(self.process, "end", self.descriptor)


def exit_message(code: int, log: Path | None = None) -> str:
    """Describe the end of a process, and say where its output is."""
    how = describe_exit(code) + (" before it had joined the others" if code == 0 else "")
    return f"the process {how}; its output is {'above' if log is None else f'in {log}'}"


def exit_record(who: Identity, code: int, log: Path | None = None) -> FailureRecord:
    """Return the failure of a process that ended, with the last lines of its log."""
    last_lines = None
    if log is not None:
        with contextlib.suppress(OSError):  # somebody has removed it
            last_lines = "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:]) or None
    return FailureRecord.of_identity(who, exit_message(code, log), exit_code=code, traceback=last_lines)


class Children(LocalProcesses):
    """Processes that run next to this one; none until the first is started.

    Args:
        on_failure: called once, in a watching thread, with the first child that ends without success
            while not being stopped.
        has_met: tells whether all ranks have found each other: a child that ends before that is no success.
        starter: starts a process of a command, with its environment variables and its log; by default Python.
    """

    def __init__(
        self,
        on_failure: Callable[[FailureRecord], None],
        has_met: Callable[[], bool] = lambda: True,
        starter: Callable[[ChildCommand, Mapping[str, str], Path | None], ChildProcess] | None = None,
    ) -> None:
        self.procs: list[ChildProcess] = []
        self.remote: SupervisorLink | None = None
        """In rank 0 under `run`: what starts and ends the others of its node instead."""
        self.first_rank: int | None = None
        """The rank of this process, if it is the one that starts the others of its node."""
        self.node_rank = 0
        self.ending = threading.Lock()
        """Held by the thread that ends them."""
        self.tells_all = False
        """Whether `on_failure` is called with every child that ends, however it does."""
        self._on_failure = on_failure
        self._has_met = has_met
        self._starter = starter or self._start_python
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._alive: list[_Child] = []
        self._is_stopping = False
        self._may_leave = threading.Event()
        self._guard: Guard | None = None
        self._wake_pair: tuple[socket.socket, socket.socket] | None = None
        self._again: dict[int, Callable[[int], None]] = {}
        """Local rank -> starts a process in its place."""
        self._new: dict[int, int] = {}
        """Process ids of those that were started in the place of lost ones -> local rank."""
        self._starts: dict[int, int] = {}
        """Local rank -> number of the last process that was started in its place."""
        self._ends: dict[int, FailureRecord] = {}
        """Local rank -> how that one has ended."""
        self._first: FailureRecord | None = None

    def start(
        self, local_rank: int, command: ChildCommand, env: Mapping[str, str], *, is_later: bool = False
    ) -> None:
        """Starts one child, of whose end a thread hears.

        Args:
            local_rank: its rank on this node.
            command: how it is started.
            env: all of its environment.
            is_later: whether it is started only by `start_again`, as the run has begun already.
        """
        begin = functools.partial(self._start, local_rank, command)
        self._again[local_rank] = lambda number: begin({**env, JOIN_VARIABLE: str(number)}, number)
        if not is_later:
            begin(env)

    def _start(
        self, local_rank: int, command: ChildCommand, env: Mapping[str, str], number: int | None = None
    ) -> None:
        self._may_leave.clear()
        log = command.log_of((self.first_rank or 0) + local_rank)
        proc = self._starter(command, env, log)
        with self._changed:
            self.procs.append(proc)
            if number is not None:
                self._new[proc.pid] = local_rank
            self._alive.append(_Child(local_rank, proc, log, number, _open_end(proc.pid)))
            self._wake()
            if self._thread is None:
                self._wake_pair = socket.socketpair()
                self._thread = threading.Thread(target=self._watch, daemon=True, name="children-watch")
                self._thread.start()

    def _start_python(
        self, command: ChildCommand, env: Mapping[str, str], log: Path | None
    ) -> subprocess.Popen[bytes]:
        handed = () if command.handed is None else (command.handed.fileno(),)
        options: dict[str, Any] = {"env": child_environment(env), "cwd": command.cwd, "pass_fds": handed}
        with contextlib.nullcontext() if log is None else log.open("ab") as out:
            return _start_for_good(self._may_leave, command.arguments, stdout=out, stderr=out, **options)

    def guard(self) -> None:
        """From now on those that do not hear of a failure are killed."""
        if self._again:
            self._guard = Guard(ends_launcher=True)

    @property
    def are_of_this_process(self) -> bool:
        """Return whether this process launched the others of its node, by itself or by its supervisor."""
        return self.first_rank is not None or self.remote is not None

    def start_again(self, place: int, number: int) -> None:
        """Starts a child in the place of one that is lost, to join the run. Any thread.

        If that only stands still it is killed. `place` is the rank that it had in the beginning, `number` the
        number of this start there. If it was started already, and has ended, that is told once more.
        """
        if self.remote is not None:
            self.remote.start_again(place, number)
            return
        local_rank = place - (self.first_rank or 0)
        if local_rank not in self._again or self.ending.locked():
            return
        if number <= self._starts.get(local_rank, 0):
            if local_rank in self._ends:
                self._on_failure(self._ends[local_rank])
            return
        self._starts[local_rank] = number
        self._ends.pop(local_rank, None)
        with self._changed:
            lost = [child.process for child in self._alive if child.local_rank == local_rank]
        for process in lost:
            process.send_signal(signal.SIGKILL)
        self._again[local_rank](number)

    def end_new(self, is_left_out: Callable[[int], bool]) -> None:
        """Ends those that were started in the place of lost ones and are no members of the run.

        Args:
            is_left_out: whether a place has no member.
        """
        for proc in self.procs:
            if proc.pid in self._new and is_left_out((self.first_rank or 0) + self._new[proc.pid]):
                proc.send_signal(signal.SIGKILL)

    def _wake(self) -> None:
        if self._wake_pair is not None:
            self._wake_pair[1].send(b"x")

    def _watch(self) -> None:
        """In the thread."""
        while (ends := self._awaited()) is not None:
            known = [end for end in ends if end is not None]
            if ends[0] in wait(known, None if len(known) == len(ends) else _POLL_S):
                ends[0].recv(4096)
            for child in list(self._alive):
                code = child.process.poll()
                if code is not None:
                    self._ended(child, code)

    def _awaited(self) -> list[Any] | None:
        """What is readable when there is something to do; None if the thread ends."""
        with self._changed:
            assert self._wake_pair is not None  # made before the thread
            if self._alive:
                return [self._wake_pair[0], *(child.end for child in self._alive)]
            for end in self._wake_pair:
                end.close()
            self._thread = self._wake_pair = None
            return None

    def _ended(self, child: _Child, code: int) -> None:
        has_failed, record = code != 0 or not self._has_met(), None
        if self.tells_all or (has_failed and self._first is None and not self._is_stopping):
            rank, pid = (self.first_rank or 0) + child.local_rank, child.process.pid
            who = Identity(rank=rank, node_rank=self.node_rank, pid=pid, start=child.start)
            record = exit_record(who, code, child.log)
        with self._changed:
            self._alive.remove(child)
            if child.descriptor is not None:
                os.close(child.descriptor)
            is_first = has_failed and self._first is None and not self._is_stopping
            if is_first:
                self._first = record
            if record is not None and child.process.pid in self._new:
                self._ends[child.local_rank] = record
            if not self._alive:
                self._may_leave.set()
            self._changed.notify_all()
        if record is not None and (self.tells_all or is_first):
            self._on_failure(record)

    def first_failure(self, wait_s: float = 0.0) -> FailureRecord | None:
        """The first child that failed, waiting up to `wait_s` seconds for one to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._first is not None, timeout=wait_s)
            return self._first

    def join(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` seconds for all children to end; returns whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._alive, timeout=timeout_s)

    def end(self, grace_s: float) -> None:
        """Wait until all children have ended; kill those that have not after `grace_s` seconds."""
        if not self.join(grace_s):
            with self._changed:
                self._is_stopping = True
                late = [child for child in self._alive if child.process.poll() is None]
            self.kill()
            for child in late:
                who = f"rank {(self.first_rank or 0) + child.local_rank} (pid {child.process.pid})"
                print(f"lightning_ddp: {who} did not end, and was killed", file=sys.stderr)
            self.join(_STOP_GRACE_S)
        if self._guard is not None:
            self._guard.end()

    def wake(self) -> None:
        """Continues children that are stopped, so that they hear of a failure."""
        self.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends the children at once."""
        if self.remote is not None:
            self.remote.kill()
        self.send_signal(signal.SIGKILL)

    def kill_one(self, pid: int) -> None:
        """Ends one child at once, without which the others go on."""
        for proc in self.procs:
            if proc.pid == pid:
                proc.send_signal(signal.SIGKILL)

    def kill_rank(self, rank: int) -> None:
        """Ends the child that was given a rank, if it is one of these."""
        if self.remote is not None:
            self.remote.kill_rank(rank)
        number = rank - (self.first_rank or 0) - 1
        if self.first_rank is not None and 0 <= number < len(self.procs):
            self.procs[number].send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Sends a signal to the children that still run."""
        for proc in self.procs:
            proc.send_signal(number)


def _open_end(pid: int) -> int | None:
    """Open what becomes readable when a child ends; None where the kernel has none."""
    with contextlib.suppress(AttributeError, OSError):
        return os.pidfd_open(pid)
    return None


def _start_for_good(
    may_leave: threading.Event, command: Sequence[str], **options: Any
) -> subprocess.Popen[bytes]:
    """Starts a process from a thread that does not end before `may_leave` is set.

    Linux sends the death signal of a process when the thread that has started it ends. That of the caller may
    end long before the run does, where the Trainer is not called in the main thread.
    """
    if sys.platform != "linux" or threading.current_thread() is threading.main_thread():
        return subprocess.Popen(command, **options)
    started: Future[subprocess.Popen[bytes]] = Future()

    def start_and_stay() -> None:
        try:
            started.set_result(subprocess.Popen(command, **options))
        except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
            started.set_exception(error)
        else:
            may_leave.wait()

    threading.Thread(target=start_and_stay, daemon=True, name="child-parent").start()
    return started.result()

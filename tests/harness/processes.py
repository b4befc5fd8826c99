"""Ranks as real processes: forked from the test, so that importing torch is paid once."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.leftovers import find_processes, kill_processes, require_none
from harness.outcomes import RankOutcome, values_or_raise

FAILURE_GRACE_S = 10.0
"""How long `run_ranks` waits for the other ranks once one of them has failed."""
STACK_SIGNAL = signal.SIGQUIT
"""Makes a rank write the stacks of its threads. Not SIGUSR1 or SIGINT: tests use those."""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0, process_group: bool = True
) -> list[Any]:
    """Runs `fn(rank, world_size, *args)` in one process per rank; results in rank order.

    Every rank has one CPU thread and, with `process_group`, the default gloo group. A rank that returned
    stays alive until all have, so that its connections do not break under its peers. Once one rank has
    failed the others are given `FAILURE_GRACE_S`.

    Args:
        fn: a module-level function (on a machine with CUDA the ranks are not forked from the test).

    Raises:
        RankFailed: a rank raised, died, hung or returned what cannot be pickled; lists all of them.
        ProcessLeftBehind: a rank ended but left a process of its own.
    """
    outcomes = _Run(fn, world_size, args, timeout_s, process_group, stop_on_failure=True).outcomes()
    return values_or_raise(outcomes)


def run_ranks_outcomes(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0, process_group: bool = True
) -> list[RankOutcome]:
    """As `run_ranks`, for ranks that are expected to fail: one outcome per rank, in rank order.

    A rank that raised stays alive until all ranks have an outcome. So a peer that needs it hangs, and is
    reported as hung, instead of being rescued by a broken connection.
    """
    return _Run(fn, world_size, args, timeout_s, process_group, stop_on_failure=False).outcomes()


class _Run:
    """The processes of one call, from start to the last of them being gone."""

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: tuple[Any, ...],
        timeout_s: float,
        process_group: bool,
        *,
        stop_on_failure: bool,
    ) -> None:
        self._fn, self._world_size, self._args = fn, world_size, args
        self._timeout_s, self._process_group = timeout_s, process_group
        self._stop_on_failure = stop_on_failure
        self._outcomes: dict[int, RankOutcome] = {}
        self._first_failure_at = float("inf")
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    def outcomes(self) -> list[RankOutcome]:
        with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
            self._scratch = Path(scratch)
            try:
                self._start()
                self._collect(deadline=time.monotonic() + self._timeout_s)
                self._dump_hung()
            finally:
                sessions = self._stop()
        require_none(sessions)
        return [self._outcomes[rank] for rank in range(self._world_size)]

    def _start(self) -> None:
        context = multiprocessing.get_context(_start_method())
        gc.collect()  # a fork must not inherit gloo groups that await collection: their threads stay here
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(theirs, self._fn, rank, self._world_size, self._args),
                kwargs={
                    "scratch": self._scratch,
                    "group_timeout_s": 2 * self._timeout_s if self._process_group else None,
                    "stay_after_error": not self._stop_on_failure,
                },
                name=f"rank {rank}",
            )
            with warnings.catch_warnings():
                # Python 3.12 warns that a fork copies locks which other threads hold. The threads of the
                # test process are those of finished gloo groups; a rank that hung would be reported.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, deadline: float) -> None:
        while len(self._outcomes) < self._world_size:
            if self._stop_on_failure:
                deadline = min(deadline, self._first_failure_at + FAILURE_GRACE_S)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            pending = [rank for rank in range(self._world_size) if rank not in self._outcomes]
            wait(
                [self._connections[rank] for rank in pending]
                + [self._processes[rank].sentinel for rank in pending],
                timeout=remaining,
            )
            for rank in pending:
                self._look_at(rank)

    def _look_at(self, rank: int) -> None:
        # asked before the pipe is: a rank that has ended can write nothing more
        ended = not self._processes[rank].is_alive()
        try:
            answer = self._connections[rank].recv_bytes() if self._connections[rank].poll() else None
        except (EOFError, OSError):
            self._processes[rank].join(timeout=FAILURE_GRACE_S)
            answer, ended = None, True
        if answer is not None:
            try:
                outcome = pickle.loads(answer)
            except Exception as error:  # noqa: BLE001 (whatever unpickling runs may raise)
                outcome = RankOutcome.from_error(rank, error)
        elif ended:
            exit_code = self._processes[rank].exitcode
            outcome = RankOutcome(
                rank=rank, status="died", message=_describe_exit(exit_code), exit_code=exit_code
            )
        else:
            return
        self._outcomes[rank] = outcome
        if outcome.failed:
            self._first_failure_at = min(self._first_failure_at, time.monotonic())

    def _dump_hung(self) -> None:
        hung = [rank for rank in range(self._world_size) if rank not in self._outcomes]
        for rank in hung:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid or 0, STACK_SIGNAL)
        for rank in hung:
            after = "after another rank failed" if self._first_failure_at < float("inf") else "in time"
            self._outcomes[rank] = RankOutcome(
                rank=rank,
                status="hung",
                message=f"no result {after} (timeout_s={self._timeout_s}); stacks:",
                traceback=self._read_stacks(rank),
            )

    def _read_stacks(self, rank: int) -> str:
        path = _stack_path(self._scratch, rank)
        deadline = time.monotonic() + 2
        # written in one go by the signal handler, but without an end mark: read until it grows no more
        before, text = None, ""
        while time.monotonic() < deadline and (not text or text != before):
            wait([self._processes[rank].sentinel], timeout=0.05)
            before, text = text, path.read_text() if path.exists() else ""
        return text or "(no stacks: it had not started, or was stopped)"

    def _stop(self) -> list[int]:
        """Lets the ranks go, kills those that do not; the sessions that they led."""
        sessions = [process.pid for process in self._processes if process.pid is not None]
        for rank, (process, connection) in enumerate(zip(self._processes, self._connections, strict=True)):
            with contextlib.suppress(OSError):
                connection.send_bytes(b"all ranks have an outcome")
            connection.close()
            if rank not in self._outcomes or self._outcomes[rank].status == "hung":
                process.kill()
        for rank, process in enumerate(self._processes):
            process.join(timeout=10)
            stacks = ""
            if process.is_alive():
                os.kill(process.pid or 0, STACK_SIGNAL)  # which ends one that has left Python
                stacks = f"; stacks:\n{self._read_stacks(rank)}"
                process.kill()
                process.join()
            self._require_clean_exit(rank, process.exitcode, stacks)
        if len(self._outcomes) < self._world_size or any(o.status == "hung" for o in self._outcomes.values()):
            # what a killed rank had started is no leak of the code under test
            kill_processes(find_processes(sessions))
        for process in self._processes:
            process.close()
        return sessions

    def _require_clean_exit(self, rank: int, exit_code: int | None, stacks: str) -> None:
        """A rank that answered must also end well: a crash in the teardown is a failure."""
        outcome = self._outcomes.get(rank)
        if outcome is not None and outcome.status == "returned" and exit_code != 0:
            self._outcomes[rank] = RankOutcome(
                rank=rank,
                status="died",
                message=f"answered, but then {_describe_exit(exit_code)}{stacks}",
                exit_code=exit_code,
            )


def _start_method() -> str:
    # A process that used autograd where CUDA is present cannot run autograd in its forks. Simulated devices
    # (`simcuda`) are present in a torch that was not built for CUDA.
    return "forkserver" if torch.version.cuda and torch.cuda.is_available() else "fork"


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def _stack_path(scratch: Path, rank: int) -> Path:
    return scratch / f"stacks-{rank}"


def _rank_main(
    connection: Connection,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    *,
    scratch: Path,
    group_timeout_s: float | None,
    stay_after_error: bool,
) -> None:
    gc.freeze()  # what the parent left is not for this process to free
    os.setsid()
    die_with_parent()
    torch.set_num_threads(1)
    with _stack_path(scratch, rank).open("w") as stacks:
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        try:
            if group_timeout_s is not None:
                _init_default_group(rank, world_size, scratch, group_timeout_s)
            outcome = RankOutcome(rank=rank, status="returned", value=fn(rank, world_size, *args))
            answer = pickle.dumps(outcome)
        except BaseException as error:  # noqa: BLE001 (a rank reports whatever ended it, SystemExit too)
            outcome = RankOutcome.from_error(rank, error)
            answer = pickle.dumps(outcome)
        connection.send_bytes(answer)
        if not outcome.failed or stay_after_error:
            with contextlib.suppress(EOFError, OSError):
                connection.recv_bytes()
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.unregister(STACK_SIGNAL)


def _init_default_group(rank: int, world_size: int, scratch: Path, timeout_s: float) -> None:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    store = dist.FileStore(str(scratch / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )


@contextlib.contextmanager
def store_elsewhere() -> Iterator[tuple[dist.TCPStore, Callable[[], None]]]:
    """A store that lies in a process of its own, and what stops that process (SIGSTOP)."""
    before = threading.enumerate()
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_host_store, args=(theirs,))
    process.start()
    try:
        assert ours.poll(20)
        store = dist.TCPStore("127.0.0.1", ours.recv(), is_master=False)
        yield store, lambda: _stop(process.pid or 0)
    finally:
        process.kill()
        process.join()
        for thread in [thread for thread in threading.enumerate() if thread not in before]:
            thread.join(10)  # it waits for an answer of the store


def _stop(child: int) -> None:
    """Returns once it is stopped, which is some time after the signal was sent."""
    os.kill(child, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOWAIT)


def _host_store(connection: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    signal.pause()


def die_with_parent() -> None:
    """A test process that is killed takes its ranks with it."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)

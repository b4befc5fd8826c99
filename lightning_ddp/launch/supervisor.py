"""The supervisor of `python -m lightning_ddp run`: imports once, has ranks forked, and hosts their job.

The supervisor is no rank. It forks the zygote, which forks all ranks, and only then starts threads: for the
store, the control server and the requests of rank 0. It ends last, in the way in which rank 0 ended.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import operator
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from lightning_ddp._lightning import read_rank_again
from lightning_ddp.comm.teardown import flush_output
from lightning_ddp.launch.child_process import keep_files, note_launcher
from lightning_ddp.launch.children import Children, exit_record
from lightning_ddp.launch.process_end import show_report
from lightning_ddp.launch.rendezvous import JOIN_VARIABLE, open_store
from lightning_ddp.launch.step_stop import PREEMPTED
from lightning_ddp.launch.zygote import (
    Fork,
    Launch,
    Program,
    Start,
    SupervisorLink,
    Zygote,
    become_supervised,
    fork,
    receive,
    run_as_main,
    send,
    serve,
)
from lightning_ddp.supervise.failure_detection import ECHO_WAIT_S, EXIT_WAIT_S
from lightning_ddp.supervise.failure_record import FailureRecord, Identity, describe_exit
from lightning_ddp.supervise.guard import PATIENCE_S, tell_guard
from lightning_ddp.supervise.job_control import LocalProcesses
from lightning_ddp.supervise.protocol import Exited, Failed
from lightning_ddp.supervise.server import ControlServer
from lightning_ddp.supervise.settings import SupervisionSettings

_PASSED_ON = {
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGALRM, signal.SIGCONT, signal.SIGXCPU),
}
_BLOCKED = {*_PASSED_ON, signal.SIGCHLD, signal.SIGIO}
_BY_KERNEL = 0x80  # the `si_code` of a signal that the terminal sends to its whole process group
_LOOK_EVERY_S = 0.05
_EXIT_GRACE_S = 60.0  # how long the other ranks may take to end after rank 0
_LATER_S = 2.0
_CANNOT_BEGIN = 127  # exit code of a process that ended before its program began


def supervise(program: Program) -> NoReturn:
    """Run a program in forked ranks; exit as rank 0 does. In each rank, raise `SystemExit` at its end."""
    threads = [thread.name for thread in threading.enumerate()]
    assert len(threads) == 1, f"an import started a thread: {threads}"
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    requests, asked = socket.socketpair()
    link, asking = socket.socketpair()
    supervisor, passed_on = os.getpid(), mmap.mmap(-1, 1)  # the last signal passed on, for all ranks
    zygote_pid = fork()
    if zygote_pid == 0:
        requests.close()
        link.close()
        try:
            start, files = serve(asked, supervisor)
            if start.environment is None:
                note_launcher(None)
                become_supervised(SupervisorLink(asking, supervisor), passed_on)
            else:
                asking.detach()
                _become_rank(start, start.environment, files)
                note_launcher(supervisor)
                become_supervised(None, passed_on)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException as error:  # noqa: BLE001 (a fork must not continue as its parent)
            sys.excepthook(type(error), error, error.__traceback__)
            flush_output()
            os._exit(_CANNOT_BEGIN)
        run_as_main(start.program)
    asked.close()
    asking.close()
    zygote = Zygote(requests)
    first = zygote.start(Start(program=program), {})
    host = JobHost(zygote, first, link)
    for target in (
        lambda: _pass_signals_on(host, passed_on),
        lambda: host.lost_zygote(zygote_pid, os.waitstatus_to_exitcode(os.waitpid(zygote_pid, 0)[1])),
        lambda: _answer(link, host),
    ):
        threading.Thread(target=target, daemon=True).start()
    first.wait()
    code = host.end()
    zygote.close()
    _end_as(code)


def _become_rank(start: Start, environment: Mapping[str, str], files: Mapping[int, int]) -> None:
    """Set up a fork as a rank other than the first of its node: files, working directory, environment."""
    output = {1: 1, 2: 2}
    if start.log is not None:
        output = dict.fromkeys(output, os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666))
    wanted = {0: 0, **output, **files}
    keep_files({n: present for n, present in wanted.items() if os.path.exists(f"/proc/self/fd/{present}")})
    if start.cwd is not None:
        os.chdir(start.cwd)
    os.environ.clear()
    os.environ.update(environment)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if JOIN_VARIABLE in os.environ:  # another one is rank 0 until this one has joined
        local_rank = max(1, local_rank)
    read_rank_again(int(os.environ.get("RANK", local_rank)), local_rank)


def _pass_signals_on(host: JobHost, passed_on: mmap.mmap) -> None:
    while True:
        info = signal.sigwaitinfo(_PASSED_ON)
        if info.si_code != _BY_KERNEL:
            passed_on[0] = info.si_signo
            host.send_signal_to_first(info.si_signo)


def _end_as(code: int) -> NoReturn:
    """Exit with rank 0's code or signal, without exit handlers, which ran in rank 0."""
    flush_output()
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # rank 0 has left one
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    signal.raise_signal(-code)  # in this thread: another one waits for signals of the process
    os._exit(128 - code)


def _answer(link: socket.socket, host: JobHost) -> None:
    """Call the methods of `host` that rank 0 asks for, and send the results, until rank 0 ends."""
    while (received := receive(link)) is not None:
        (number, name, args, options), files = received
        result: Any
        try:
            method = operator.attrgetter(name)(host)
            result = method(*args, **options, **({"handed": files[0]} if files else {}))
        except Exception as error:  # noqa: BLE001 (raised in rank 0)
            result = error
        host.tell_first(number, result)


class JobHost(LocalProcesses):
    """Supervisor's part of a job: opens store and control server, starts ranks, as the first rank asks."""

    def __init__(self, zygote: Zygote, first: Fork, link: socket.socket) -> None:
        self._zygote, self._first, self._link = zygote, first, link
        self._link_lock = threading.Lock()
        self._failure: FailureRecord | None = None
        self._store: Any = None
        self._server: ControlServer | None = None
        self.children = Children(self._ended, starter=self._start)
        self._has_lost_zygote = self._is_ending = False

    # ------------------------------------------------------------------ requests of rank 0

    def open_store(self, address: str, port: int | None, named_by: str) -> int:
        """Open the job's store; return its port. Arguments and errors as of `rendezvous.open_store`."""
        self._store = None  # an earlier job's
        self._store = open_store(address, port, named_by)
        return int(self._store.port)

    def open_server(self, address: str, settings: SupervisionSettings, **options: Any) -> int:
        """Open a control server in place of the previous one; return its port."""
        if self._server is not None:
            self._server.close()
        self._server = ControlServer(address, settings=settings, processes=self, **options)
        ended = self.children.first_failure()
        if ended is not None:  # one that will not come
            self._server.tell(Exited(ended))
        return self._server.port

    def launch(self, launch: Launch, handed: int | None = None) -> None:
        """Start the node's other ranks; `handed` is a file descriptor of the job that Hydra composed."""
        if handed is not None:
            launch = replace(launch, handed=os.fdopen(handed, "rb"))
        self.children.launch = launch
        self.children.start_all()

    def note_failure(self, record: FailureRecord) -> None:
        """Store the first failure of a job whose control server is on another node."""
        self._failure = record

    def finish(self) -> FailureRecord | None:
        """Wait for the other ranks to end; return the job's first failure, and reset for the next job."""
        failure = self._wait_for_others()
        self._close()
        self.children, self._failure = Children(self._ended, starter=self._start), None
        return failure

    # ------------------------------------------------------------------ in the thread of the server

    def kill_one(self, pid: int) -> None:
        if pid == self._first.pid:
            self._first.send_signal(signal.SIGKILL)
        self.children.kill_one(pid)

    def start_again(self, place: int, number: int) -> None:
        if place == self.children.first_rank:
            self._first.send_signal(signal.SIGKILL)
        self.children.start_again(place, number)

    def failed(self, record: FailureRecord) -> None:
        """Send this node's ranks SIGCONT as the job failed; have the guard process kill late ones."""
        self._first.send_signal(signal.SIGCONT)
        self.children.send_signal(signal.SIGCONT)
        if self.children.launch is not None:
            is_gone = self._first.returncode is not None
            grace_s = min(self.children.launch.grace_s, PATIENCE_S if is_gone else math.inf)
            tell_guard(os.getpid(), -1, True, grace_s)

    # ------------------------------------------------------------------ ends

    def _start(self, launch: Launch, environment: Mapping[str, str], log: Path | None) -> Fork:
        job = None if launch.handed is None else launch.handed.fileno()
        start = Start(
            program=replace(launch.program, job=job),
            environment=environment,
            cwd=launch.cwd,
            log=None if log is None else str(log),
        )
        return self._zygote.start(start, {} if job is None else {job: job})

    def _ended(self, record: FailureRecord) -> None:
        """Report a rank's exit to the control server, or to the first rank if another node has the server."""
        server = self._server
        if server is None:
            self.tell_first(0, record)
        elif record.exit_code or server.goes_on or not server.has_met:
            server.tell(Exited(record))

    def tell_first(self, number: int, result: Any) -> None:
        """Send rank 0 the result of its request `number`, or with number 0 the exit of a child."""
        with self._link_lock, contextlib.suppress(OSError):  # it has ended
            send(self._link, (number, result, number and self.children.launch is None))

    def send_signal_to_first(self, number: int) -> None:
        """Send a signal to the lowest rank of this node that still runs."""
        processes = [self._first, *self.children.procs]
        running = next((process for process in processes if process.returncode is None), None)
        if running is not None:
            running.send_signal(number)

    def lost_zygote(self, pid: int, code: int) -> None:
        """Fail the job, as the process that forks ranks and tells of their exits has ended."""
        if self._is_ending:
            return
        self._has_lost_zygote = True
        who = Identity(rank=-1, node_rank=self.children.node_rank, pid=pid)
        record = FailureRecord.of_identity(who, f"the process that forks the ranks {describe_exit(code)}")
        if self._server is not None:
            self._server.tell(Failed(record))
        else:
            show_report(record)
            self._first.send_signal(signal.SIGKILL)
            self.children.kill()

    def end(self) -> int:
        """Wait for all ranks to end, print the failure that ended the job, and return the exit code."""
        self._is_ending = not self._has_lost_zygote
        code = self._first.returncode or 0
        node_rank = self.children.node_rank
        who = Identity(rank=self.children.first_rank, node_rank=node_rank, pid=self._first.pid)
        if self.children.launch is not None and not self._has_lost_zygote:
            self._ended(exit_record(who, 0 if code == PREEMPTED else code))
        failure = self._wait_for_others()
        has_gone_on = self._server is not None and failure is None and self._is_left_behind()
        codes = {code, *(process.returncode for process in self.children.procs)}
        self._close()
        if has_gone_on:
            return 0
        if failure is None or codes == {0}:  # the scripts of all ranks here caught it
            return code
        show_report(failure)
        return 1 if self._has_lost_zygote else code or 1

    def _wait_for_others(self) -> FailureRecord | None:
        """Wait until all other ranks have ended; kill those that do not end after rank 0.

        Returns the job's first failure or None, after a short wait if a rank of this node has failed.
        """
        server, code, job = self._server, self._first.returncode, self.children.launch
        grace_s = 0.0 if job is None else job.grace_s
        ends_at = time.monotonic() + max(0.0 if code else _EXIT_GRACE_S, grace_s + _LATER_S)
        if code and server is None and self.children.node_rank == 0:
            self.children.kill()  # nobody has told them
        while not self.children.join(_LOOK_EVERY_S):
            if self._is_left_behind():
                ends_at = math.inf
            elif server is not None and code is not None and not (code and server.goes_on and server.has_met):
                for process in self.children.procs:
                    # one that has not connected does not hear that rank 0 is gone
                    if not server.knows(Identity(rank=-1, node_rank=0, pid=process.pid)):
                        process.send_signal(signal.SIGKILL)
            if time.monotonic() > ends_at:
                self.children.end(0.0)
        if self._server is None:
            return self._failure
        has_failed = any(process.returncode for process in [self._first, *self.children.procs])
        waits = has_failed and not self._is_left_behind()
        return self._server.wait_for_verdict(ECHO_WAIT_S + EXIT_WAIT_S if waits else 0.0)

    def _is_left_behind(self) -> bool:
        """Return True if the other ranks continue without rank 0, as far as is known here."""
        server, job = self._server, self.children.launch
        if server is None:
            return job is not None and job.node_rank != 0 and job.goes_on
        is_member = any(who.pid == self._first.pid for who in server.identities)
        return server.goes_on and server.has_met and not is_member

    def _close(self) -> None:
        """Close the control server, kill the children that are left, and end their guard process."""
        if self._server is not None:
            self._server.close()
        self._server = None
        self.children.end(0.0)

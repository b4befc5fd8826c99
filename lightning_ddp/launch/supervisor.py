"""The supervisor of `python -m lightning_ddp run`: imports once, and forks the ranks of this node.

The supervisor is no rank. It imports torch, Lightning and this package, starts no thread of its own, opens no
store and touches no device, so that a fork of it is as a new interpreter which has imported them. The first
fork is rank 0, and runs the program. Where a launcher there would open a store it asks for another fork, the
control process, and where it would start a child for that, of which it is told how it ends. The supervisor
ends last, in the way in which rank 0 has ended.

How a fork differs from a new interpreter is listed, and tested, in `tests/test_run.py`. Both ends of what the
supervisor and a rank say to each other are here, and so this file is long.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import fcntl
import functools
import importlib
import importlib.util
import json
import mmap
import multiprocessing
import os
import re
import resource
import runpy
import signal
import socket
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

import torch

from lightning_ddp._lightning import read_rank_again
from lightning_ddp.hydra_jobs.jobs import STARTER
from lightning_ddp.launch.child_process import (
    end_with,
    keep_files,
    supervisor_of_rank,
    tie_first_rank,
    tie_to_supervisor,
)
from lightning_ddp.launch.control_process import (
    ALL_ENDED,
    LONGEST_MESSAGE,
    REPORTED,
    START,
    WENT_ON,
    ControlProcess,
    serve,
)
from lightning_ddp.launch.rendezvous import JOIN_VARIABLE
from lightning_ddp.supervise.guard import Guard

__all__ = ["ForkedChild", "Program", "Supervisor", "control_process", "fork_child", "was_passed_on"]

_READ_AT_IMPORT = ("OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH_", "LD_", "PYTHON")
"""Variables that the interpreter, torch, OpenMP or the allocator have read when the supervisor began."""
_SET_BY_IMPORTS = {
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR"),
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # by scikit-learn, against defects of OpenMP
}
_PASSED_ON = {
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGALRM, signal.SIGCONT, signal.SIGXCPU),
}
_AWAITED = {*_PASSED_ON, signal.SIGCHLD, signal.SIGIO}
_BY_KERNEL = 0x80
"""The `si_code` of a signal that the terminal sends, which is to its whole process group."""
_RESET_BY_SUBPROCESS = {signal.SIGPIPE, signal.SIGXFSZ}
_MOST_DESCRIPTORS = 64
_CANNOT_BEGIN = 127
_LAST_REPORT_S = 15.0
_CHILD, _CONTROL = b"child", b"control process"


# ---------------------------------------------------------------------- the supervisor


@dataclass(frozen=True)
class _Child:
    """A rank that rank 0 has asked for, or one in its place."""

    told: int | None
    """The descriptor by which rank 0 hears of its end; None for one in the place of a lost one."""
    place: int
    """Its local rank."""
    may_outlive: mmap.mmap
    """Whose byte the child sets once it hears of rank 0's end from the control channel, and unwinds."""


class Supervisor:
    """Forks the ranks, passes signals on to rank 0, and ends last."""

    def __init__(self) -> None:
        self._requests, self._asking = _socketpair()
        self._pid = os.getpid()
        self._mask: set[Any] = set()
        self._rank_0 = 0
        self._code: int | None = None
        self._passed_on = mmap.mmap(-1, 1)
        self._is_over = mmap.mmap(-1, 1)
        self._children: dict[int, _Child] = {}
        self._orders: dict[int, tuple[dict[str, Any], Sequence[int]]] = {}
        """Place -> what a rank there is made of, and its open files."""
        self._num_forked = 0
        self._control: socket.socket | None = None
        self._control_pid = 0
        self._guard: Guard | None = None

    def run(self, program: Program) -> NoReturn:
        """Forks rank 0 and serves it until all ranks have ended. In a rank it raises `SystemExit`."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        self._listen_to(self._requests)
        self._rank_0 = _fork()
        if self._rank_0 == 0:
            with _last_resort():
                self._become_rank_0()
            _run_as_main(program)
        self._asking.close()
        while self._code is None or self._children:
            self._handle(signal.sigwaitinfo(_AWAITED))
        ended = self._end_control()
        if self._guard is not None:
            self._guard.end()
        code = 0 if ended == WENT_ON else self._code or int(ended == REPORTED)
        self._end_as(code, is_reported=ended == REPORTED)

    def _listen_to(self, ours: socket.socket) -> None:
        """Has the kernel signal what comes there."""
        fcntl.fcntl(ours, fcntl.F_SETOWN, self._pid)
        flags = fcntl.fcntl(ours, fcntl.F_GETFL)
        fcntl.fcntl(ours, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)

    def _become_rank_0(self) -> None:
        end_with(self._pid)
        self._requests.close()
        tie_first_rank(_Rank0(self._asking, os.getpid(), dict(os.environ), self._passed_on))
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _handle(self, info: signal.struct_siginfo) -> None:
        if info.si_signo == signal.SIGCHLD:
            self._reap()
        elif info.si_signo == signal.SIGIO:
            self._serve()
            self._hear_control()
        elif self._code is not None:
            first = [pid for pid, child in self._children.items() if child.place == 0]
            if not first:  # nobody is left who would hear it
                _kill(self._children)
            for pid in first:
                self._pass_on(pid, info.si_signo)
        elif info.si_code != _BY_KERNEL:
            self._pass_on(self._rank_0, info.si_signo)

    def _pass_on(self, pid: int, number: int) -> None:
        self._passed_on[0] = number
        os.kill(pid, number)

    def _reap(self) -> None:
        if self._code is None:
            self._code = _exit_code(self._rank_0)
            if self._code is not None:
                self._tell_control(self._rank_0, self._code, 0)
                self._leave_children()
        for pid in list(self._children):
            code = _exit_code(pid)
            if code is not None:
                child = self._children.pop(pid)
                if child.told is not None:
                    _tell(child.told, code)
                    os.close(child.told)
                self._tell_control(pid, code, child.place)

    def _leave_children(self) -> None:
        """Rank 0 has ended. Children that have met unwind, as they hear of it; if stopped, they could not."""
        self._is_over[0] = 1
        self._requests.close()
        _kill(pid for pid, child in self._children.items() if not child.may_outlive[0])
        for pid in self._children:
            os.kill(pid, signal.SIGCONT)

    def _serve(self) -> None:
        while self._requests.fileno() != -1:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._requests, 64, _MOST_DESCRIPTORS)
            except BlockingIOError:
                return
            if not message:
                return
            if message == _CONTROL:
                self._fork_control(*descriptors)
            else:
                self._fork_child(*descriptors)

    def _fork_child(self, order: int, told: int, *files: int) -> None:
        start = json.loads(os.pread(order, os.fstat(order).st_size, 0))
        os.close(order)
        place = int(start["env"].get("LOCAL_RANK", "0"))
        for descriptor in self._orders.pop(place, ({}, ()))[1]:
            os.close(descriptor)
        self._orders[place] = (start, files)
        pid = self._fork(place, told)
        _tell(told, pid)
        if pid < 0:
            os.close(told)

    def _fork(self, place: int, told: int | None, number: int = 0) -> int:
        """Forks a rank; returns its process id, or the negative number of an error.

        Args:
            place: as of `_Child`.
            told: as of `_Child`.
            number: which one in its place it is, if it is to join the run.
        """
        start, files = self._order_of(place)
        child = _Child(told, place, mmap.mmap(-1, 1))
        pid = _try_to_fork()
        if pid == 0:
            with _last_resort():
                if number:
                    start["env"][JOIN_VARIABLE] = str(number)
                program = self._become_child(child, start, files)
            _run_as_main(program)
        if pid > 0:
            self._children[pid] = child
            self._num_forked += 1
        return pid

    def _order_of(self, place: int) -> tuple[dict[str, Any], Sequence[int]]:
        """What a rank is made of; rank 0, which nobody has ordered, of what another is made of."""
        if place in self._orders:
            return self._orders[place]
        start, files = self._orders[min(self._orders)]
        start = {**start, "env": {**start["env"], "LOCAL_RANK": str(place)}}
        numbered = zip(start["files"], files, strict=True)
        return start, [number if number in (1, 2) else file for number, file in numbered]

    def _become_child(self, child: _Child, start: dict[str, Any], files: Sequence[int]) -> Program:
        """Takes over from rank 0 what a process that it starts would inherit; returns what is to be run."""
        end_with(self._pid)
        self._requests.close()
        for name, limits in start["limits"].items():
            with contextlib.suppress(OSError, ValueError):  # a higher one is not ours to set
                resource.setrlimit(getattr(resource, name), limits)
        for take_over, *arguments in (
            (os.setpgid, 0, start["group"]),
            (os.setpriority, os.PRIO_PROCESS, 0, start["nice"]),
            (os.sched_setaffinity, 0, start["processors"]),
        ):
            with contextlib.suppress(OSError):
                take_over(*arguments)
        os.umask(start["umask"])
        keep_files(dict(zip(start["files"], files, strict=True)))
        os.chdir(start["cwd"])
        os.environ.clear()
        os.environ.update(start["env"])
        for number in start["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        tie_to_supervisor(
            start["launcher"],
            has_ended=lambda: bool(self._is_over[0]),
            on_outliving=lambda: child.may_outlive.__setitem__(0, 1),
        )
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if child.told is None:  # another one is rank 0 until this one has joined
            local_rank = max(1, local_rank)
        read_rank_again(int(os.environ.get("RANK", local_rank)), local_rank)
        signal.pthread_sigmask(signal.SIG_SETMASK, start["mask"])
        return Program(**start["program"])

    # ------------------------------------------------------------------ the control process

    def _fork_control(self, asking: int) -> None:
        self._guard = self._guard or Guard(ends_launcher=False)
        self._control, theirs = _socketpair()
        self._control_pid = _try_to_fork()
        with theirs, socket.socket(fileno=asking) as rank_0:
            if self._control_pid == 0:
                with _last_resort():
                    end_with(self._pid)
                    needed = (0, 1, 2, asking, theirs.fileno())
                    keep_files({number: number for number in needed if _is_open(number)})
                    os._exit(serve(rank_0, theirs))
            self._listen_to(self._control)
            rank_0.send(str(self._control_pid).encode())

    def _tell_control(self, pid: int, code: int, place: int) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(json.dumps([pid, code, pid == self._rank_0, place]).encode())

    def _hear_control(self) -> None:
        """Sends the signals that it asks for, to ranks that have not been waited for."""
        data = b"more"
        while self._control is not None and data:
            try:
                data = self._control.recv(LONGEST_MESSAGE)
            except OSError:
                return
            what, about = json.loads(data) if data else (START, [])
            if what == START and about:
                place, number = about
                if not self._orders or self._fork(place, None, number) < 0:
                    self._tell_control(-1, _CANNOT_BEGIN, place)
            else:
                for pid in about:
                    if pid in self._children or (pid == self._rank_0 and self._code is None):
                        os.kill(pid, what)

    def _end_control(self) -> int:
        """Has it report what ended the run, if rank 0 could not; returns its exit code."""
        if self._control is None or self._control_pid < 0:
            return 0
        with contextlib.suppress(OSError):  # it is gone
            self._control.send(ALL_ENDED)
        deadline = time.monotonic() + _LAST_REPORT_S
        while (code := _exit_code(self._control_pid)) is None:
            if signal.sigtimedwait({signal.SIGCHLD}, max(0.0, deadline - time.monotonic())) is None:
                _kill([self._control_pid])
        self._control.close()
        return code

    def _end_as(self, code: int, *, is_reported: bool) -> NoReturn:
        """Ends as rank 0 did. The exit handlers of what has been imported have run there."""
        if code >= 0:
            os._exit(code)
        name = signal.Signals(-code).name
        if self._num_forked and -code != signal.SIGINT and not is_reported:
            who = f"the process that has launched the others of this node (pid {self._rank_0})"
            print(f"lightning_ddp: {who} was killed by {name}", file=sys.stderr, flush=True)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # rank 0 has left one
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(self._pid, -code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os._exit(128 - code)


def _socketpair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():  # of threads: BLAS has some, and ends them before each fork
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _try_to_fork() -> int:
    """As `_fork`; a negative number is that of an error."""
    try:
        return _fork()
    except OSError as error:
        return -(error.errno or 1)


def _exit_code(pid: int) -> int | None:
    """How a child has ended, as in `subprocess`; None if it has not."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _tell(descriptor: int, number: int) -> None:
    with contextlib.suppress(OSError):  # rank 0 does not want to know any more
        os.write(descriptor, str(number).encode())


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


# ---------------------------------------------------------------------- in a rank


@dataclass(frozen=True)
class Program:
    """What a rank runs."""

    kind: str
    """`script` or `module`."""
    name: str
    arguments: Sequence[str]
    job: int | None = None
    """The descriptor of what Hydra has composed for it."""

    @staticmethod
    def of(command: Sequence[str]) -> Program | None:
        """What a launcher's command line runs; None if it is no such one."""
        if len(command) < 2 or command[0] != sys.executable:
            return None
        first, *rest = command[1:]
        if first == STARTER:
            job, kind, name, *arguments = rest
            return Program(kind, name, arguments, int(job))
        if first == "-m" and rest:
            return Program("module", rest[0], rest[1:])
        return None if first.startswith("-") else Program("script", first, rest)


@contextlib.contextmanager
def _last_resort() -> Any:
    """A process that cannot even begin says why, and does not go on as a second supervisor."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 (whatever it is)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        os._exit(_CANNOT_BEGIN)


def _run_as_main(program: Program) -> NoReturn:
    """Runs a program as the interpreter does, and has the interpreter end as it does after that.

    Raises:
        SystemExit: always.
    """
    code: Any = 0
    try:
        _prepare(program)
        if program.job is None:
            _execute(program)
        else:
            from lightning_ddp.hydra_jobs.child import handed_job

            with handed_job(program.job):
                _execute(program)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 (what the interpreter does at the top)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1 if not isinstance(error, KeyboardInterrupt) else None
    if code is None:
        _end_interrupted()
    raise SystemExit(code)


def _prepare(program: Program) -> None:
    """What belongs to each process by itself, and the supervisor has."""
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    sys.argv = [program.name, *program.arguments]
    flag = ["-m"] if program.kind == "module" else []
    sys.orig_argv = [sys.executable, *flag, *sys.argv]
    importlib.invalidate_caches()
    multiprocessing.current_process().authkey = os.urandom(32)
    torch.default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]


def _execute(program: Program) -> None:
    path = os.path.abspath(program.name)
    if program.kind == "module":
        _put_first(os.getcwd())
        runpy._run_module_as_main(program.name)  # type: ignore[attr-defined]
    elif os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        _put_first(path, always=True)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
    else:
        _put_first(os.path.dirname(os.path.realpath(path)))
        main = vars(sys.modules["__main__"])
        main.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
        exec(code, main)


def _put_first(folder: str, *, always: bool = False) -> None:
    if always or not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _end_interrupted() -> NoReturn:
    """Ends by SIGINT, as the interpreter does after a KeyboardInterrupt that nobody has caught."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()  # files that it has left open are written
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(128 + signal.SIGINT)


# ---------------------------------------------------------------------- in rank 0, for its launcher


@dataclass(frozen=True)
class _Rank0:
    """What rank 0 asks the supervisor with."""

    socket: socket.socket
    pid: int
    environment: Mapping[str, str]
    """When the program began."""
    passed_on: mmap.mmap
    """The byte of the last signal that the supervisor has passed on."""


def _as_rank_0() -> _Rank0 | None:
    """None where this is another process than a supervisor's rank 0, such as a fork of that."""
    rank_0: _Rank0 | None = supervisor_of_rank()
    return rank_0 if rank_0 is not None and rank_0.pid == os.getpid() else None


def was_passed_on(number: int) -> bool:
    """Whether a signal that this rank 0 has got was to its supervisor, and so to the whole run."""
    rank_0 = _as_rank_0()
    return rank_0 is not None and rank_0.passed_on[0] == number


def control_process() -> ControlProcess | None:
    """The process that hosts store and control server for this rank 0; None where there is no supervisor."""
    rank_0 = _as_rank_0()
    return None if rank_0 is None else _ask_for_control(rank_0.socket)


@functools.cache
def _ask_for_control(supervisor: socket.socket) -> ControlProcess:
    ours, theirs = _socketpair()
    with theirs:
        socket.send_fds(supervisor, [_CONTROL], [theirs.fileno()])
    return ControlProcess(_forked(ours), ours)


def _forked(connection: socket.socket) -> int:
    pid = int(connection.recv(64) or -1)
    if pid < 0:
        raise OSError(-pid, f"the supervisor could not fork: {os.strerror(-pid)}")
    return pid


class ForkedChild:
    """A child of the supervisor: what a launcher needs to know of a `subprocess.Popen`.

    Args:
        pid: its process id.
        told: where the supervisor says how it has ended; readable then.
    """

    def __init__(self, pid: int, told: socket.socket) -> None:
        self.pid, self.told = pid, told
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """How it has ended; None if it has not. Any thread."""
        if self.returncode is None:
            with contextlib.suppress(BlockingIOError):
                answer = self.told.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT)  # others read it too
                # without one the supervisor is gone, and all end
                self.returncode = int(answer) if answer else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends it a signal, if it has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def fork_child(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None,
    stdout: Any = None,
    pass_fds: Sequence[int] = (),
) -> ForkedChild | None:
    """Has the supervisor fork a child, as `subprocess.Popen` would start it; all of its output is `stdout`.

    Returns:
        None where the caller has to start it: there is no supervisor, or a fork would not do.
    """
    program, rank_0 = Program.of(command), _as_rank_0()
    if rank_0 is None or program is None:
        return None
    names = {*env, *rank_0.environment} - _SET_BY_IMPORTS
    differing = {name for name in names if env.get(name) != rank_0.environment.get(name)}
    changed = tuple(sorted(name for name in differing if name.startswith(_READ_AT_IMPORT)))
    if changed:
        _explain_start(changed)
        return None
    outputs = {1: 1, 2: 2} if stdout is None else dict.fromkeys((1, 2), stdout.fileno())
    files = {0: 0, **outputs, **{number: number for number in pass_fds}}
    files = {number: present for number, present in files.items() if _is_open(present)}
    ignored = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
    start = {
        "program": vars(program),
        "launcher": rank_0.pid,
        "env": dict(env),
        "cwd": cwd or os.getcwd(),
        "files": list(files),
        "group": os.getpgid(0),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "processors": sorted(os.sched_getaffinity(0)),
        "limits": {
            name: resource.getrlimit(getattr(resource, name))
            for name in dir(resource)
            if name.startswith("RLIMIT_")
        },
        "umask": _umask(),
        "ignored": sorted(ignored - _RESET_BY_SUBPROCESS),
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }
    ours, theirs = _socketpair()
    with theirs, open(os.memfd_create("order"), "wb") as order:
        order.write(json.dumps(start).encode())
        order.flush()
        socket.send_fds(rank_0.socket, [_CHILD], [order.fileno(), theirs.fileno(), *files.values()])
    return ForkedChild(_forked(ours), ours)


@functools.cache
def _explain_start(changed: Sequence[str]) -> None:
    print(
        f"lightning_ddp: {', '.join(changed)} has changed since torch was imported for this run, so Python"
        " starts the other ranks instead of forking them, which takes longer",
        file=sys.stderr,
    )


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _umask() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^Umask:\s*(\d+)$", status, re.MULTILINE)
    return int(found[1], 8) if found else 0o022

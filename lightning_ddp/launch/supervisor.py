"""`python -m lightning_ddp run`: imports once, and forks the ranks of this node.

The supervisor is no rank. It imports torch, Lightning and this package, starts no thread of its own, opens no
store and touches no device, so that a fork of it is as a new interpreter which has imported them. The first
fork is rank 0, and runs the program. Where a launcher there would open a store it asks for another fork, the
control process, and where it would start a child for that, of which it is told how it ends. The supervisor
ends last, in the way in which rank 0 has ended.

How a fork differs from a new interpreter is listed, and tested, in `tests/test_run.py`.
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import contextlib
import fcntl
import functools
import gc
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
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

import torch

from lightning_ddp._lightning import ROOTS, read_rank_again
from lightning_ddp.hydra_jobs.jobs import STARTER
from lightning_ddp.launch.control_process import (
    ALL_ENDED,
    LONGEST_MESSAGE,
    MOVE,
    REPORTED,
    START,
    WENT_ON,
    ControlProcess,
    serve,
)
from lightning_ddp.launch.parent_death import end_with, tie_to_supervisor
from lightning_ddp.launch.prelude import keep_files
from lightning_ddp.launch.rendezvous import JOIN_VARIABLE

__all__ = ["ForkedChild", "add_arguments", "control_process", "fork_child", "run", "was_passed_on"]

_IMPORTED = (
    "lightning_ddp.ddp.module",
    "lightning_ddp.launch.launcher",
    "lightning_ddp.launch.init_process_group",
)
_RARE = (100_000, 10, 10)
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
_passed_on: mmap.mmap | None = None
"""In a supervisor and in its forks: the byte of the last signal that it has passed on."""


# ---------------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options; all that follows the program belongs to that."""
    parser.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this as well, once for all ranks; may be given several times",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is the name of a module")
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="PROGRAM ...", help="the script, and its arguments"
    )


def run(args: argparse.Namespace) -> int:
    """Runs a program; ends as its rank 0 does, with the exit code or by the signal. Returns in ranks only."""
    if not args.program or sys.platform != "linux":
        why = "which program?" if sys.platform == "linux" else "forking torch is safe on Linux alone"
        print(f"error: python -m lightning_ddp run: {why}", file=sys.stderr)
        return 2
    name, *arguments = args.program
    if not args.is_module and not os.path.exists(name):
        path = os.path.abspath(name)
        print(
            f"{sys.executable}: can't open file {path!r}: [Errno 2] No such file or directory",
            file=sys.stderr,
        )
        return 2
    program = _Program("module" if args.is_module else "script", name, arguments)
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of what Python was started with
    _import_once([*_namespaces(program), *_IMPORTED, *args.preload])
    from lightning_ddp.launch.slurm import launch_on_each_node  # which needs the right Lightning

    launch_on_each_node()
    return _Supervisor().run(program)


def _import_once(modules: Sequence[str]) -> None:
    """Imports, and keeps what that makes out of the collections of the ranks, which would copy it."""
    usual = gc.get_threshold()
    gc.set_threshold(*_RARE)
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    gc.set_threshold(*usual)


def _namespaces(program: _Program) -> list[str]:
    """Those of Lightning that the program names; if it names none, one that is installed."""
    path = Path(program.name)
    if program.kind == "module":
        path = Path(*program.name.split(".")).with_suffix(".py")
    text = path.read_text(errors="replace") if path.is_file() else ""
    patterns = (r"\bpytorch_lightning\b", r"\b(import|from) lightning\b|\blightning\.pytorch\b")
    is_named = {root: re.search(pattern, text) for root, pattern in zip(ROOTS, patterns, strict=True)}
    there = [root for root in ROOTS if importlib.util.find_spec(root.partition(".")[0]) is not None]
    return [root for root in there if is_named[root]] or there[:1]


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


class _Supervisor:
    """Forks the ranks, passes signals on to rank 0, and ends last."""

    def __init__(self) -> None:
        self._requests, self._asking = _socketpair()
        self._pid = os.getpid()
        self._mask: set[Any] = set()
        self._rank_0 = 0
        self._code: int | None = None
        global _passed_on
        _passed_on = mmap.mmap(-1, 1)
        self._is_over = mmap.mmap(-1, 1)
        self._children: dict[int, _Child] = {}
        self._orders: dict[int, tuple[dict[str, Any], Sequence[int]]] = {}
        """Place -> what a rank there is made of, and its open files."""
        self._num_forked = 0
        self._control: socket.socket | None = None
        self._control_pid = 0

    def run(self, program: _Program) -> NoReturn:
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
        code = 0 if ended == WENT_ON else self._code or int(ended == REPORTED)
        self._end_as(code, is_reported=ended == REPORTED)

    def _listen_to(self, ours: socket.socket) -> None:
        """Has the kernel signal what comes there."""
        fcntl.fcntl(ours, fcntl.F_SETOWN, self._pid)
        flags = fcntl.fcntl(ours, fcntl.F_GETFL)
        fcntl.fcntl(ours, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)

    def _become_rank_0(self) -> None:
        global _rank_0
        end_with(self._pid)
        self._requests.close()
        _rank_0 = _Rank0(self._asking, os.getpid(), dict(os.environ))
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
                _pass_on(pid, info.si_signo)
        elif info.si_code != _BY_KERNEL:
            _pass_on(self._rank_0, info.si_signo)

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

    def _fork(self, place: int, told: int | None) -> int:
        """Forks a rank, as rank 0 has asked for; returns its process id, or the negative number of an error.

        Args:
            place: its local rank.
            told: where rank 0 hears of its end; None for a process in the place of a lost one.
        """
        start, files = self._order_of(place)
        child = _Child(told, place, mmap.mmap(-1, 1))
        pid = _try_to_fork()
        if pid == 0:
            with _last_resort():
                if told is None:
                    start["env"][JOIN_VARIABLE] = "1"
                program = self._become_child(child, start, files)
            _run_as_main(program)
        if pid > 0:
            self._children[pid] = child
            self._num_forked += 1
        return pid

    def _order_of(self, place: int) -> tuple[dict[str, Any], Sequence[int]]:
        """What a rank is made of; rank 0 and spares, which nobody has ordered, of what another is made of."""
        if place in self._orders:
            return self._orders[place]
        start, files = self._orders[min(self._orders)]
        start = {**start, "env": {**start["env"], "LOCAL_RANK": str(place)}}
        outputs = [
            number if number in (1, 2) else file for number, file in zip(start["files"], files, strict=True)
        ]
        return start, outputs

    def _become_child(self, child: _Child, start: dict[str, Any], files: Sequence[int]) -> _Program:
        """Takes over from rank 0 what a process that it starts would inherit; returns what is to be run."""
        end_with(self._pid)
        self._requests.close()
        for name, limits in start["limits"].items():
            with contextlib.suppress(OSError, ValueError):  # a higher one is not ours to set
                resource.setrlimit(getattr(resource, name), limits)
        with contextlib.suppress(OSError):
            os.setpgid(0, start["group"])
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, start["nice"])
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, start["processors"])
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
        return _Program(**start["program"])

    # ------------------------------------------------------------------ the control process

    def _fork_control(self, asking: int) -> None:
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
            number, pids = json.loads(data) if data else (0, [])
            if number == MOVE:
                pid, place = pids
                if pid in self._children:
                    self._children[pid] = replace(self._children[pid], place=place)
                continue
            for pid in pids:
                if number == START:
                    if not self._orders or self._fork(pid, None) < 0:
                        self._tell_control(-1, _CANNOT_BEGIN, pid)
                elif pid in self._children or (pid == self._rank_0 and self._code is None):
                    os.kill(pid, number)

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


def _pass_on(pid: int, number: int) -> None:
    assert _passed_on is not None
    _passed_on[0] = number
    os.kill(pid, number)


def was_passed_on(number: int) -> bool:
    """Whether a signal that this process has got was to its supervisor, and so to the whole run."""
    return _passed_on is not None and _passed_on[0] == number


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
class _Program:
    """What a rank runs."""

    kind: str
    """`script` or `module`."""
    name: str
    arguments: Sequence[str]
    job: int | None = None
    """The descriptor of what Hydra has composed for it."""

    @staticmethod
    def of(command: Sequence[str]) -> _Program | None:
        """What a launcher's command line runs; None if it is no such one."""
        if len(command) < 2 or command[0] != sys.executable:
            return None
        first, *rest = command[1:]
        if first == STARTER:
            job, kind, name, *arguments = rest
            return _Program(kind, name, arguments, int(job))
        if first == "-m" and rest:
            return _Program("module", rest[0], rest[1:])
        return None if first.startswith("-") else _Program("script", first, rest)


@contextlib.contextmanager
def _last_resort() -> Any:
    """A process that cannot even begin says why, and does not go on as a second supervisor."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 (whatever it is)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        os._exit(_CANNOT_BEGIN)


def _run_as_main(program: _Program) -> NoReturn:
    """Runs a program as the interpreter does, and has the interpreter end as it does after that.

    Raises:
        SystemExit: always.
    """
    code: Any = 0
    try:
        _prepare(program)
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


def _prepare(program: _Program) -> None:
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


def _execute(program: _Program) -> None:
    with contextlib.nullcontext() if program.job is None else _hydra_job(program.job):
        _execute_program(program)


def _hydra_job(descriptor: int) -> contextlib.AbstractContextManager[None]:
    from lightning_ddp.hydra_jobs.child import handed_job

    return handed_job(descriptor)


def _execute_program(program: _Program) -> None:
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


_rank_0: _Rank0 | None = None


def control_process() -> ControlProcess | None:
    """The process that hosts store and control server for this rank 0; None where there is no supervisor."""
    if _rank_0 is None or _rank_0.pid != os.getpid():
        return None
    return _ask_for_control(_rank_0.socket)


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
        told: where the supervisor says how it has ended.
    """

    def __init__(self, pid: int, told: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """As in `subprocess`, once `wait` or `poll` has seen the end."""
        self.told = told
        """Readable once it has ended."""

    def wait(self) -> int:
        """Waits for its end. Any number of threads."""
        code = self._read()
        assert code is not None
        return code

    def poll(self) -> int | None:
        """How it has ended; None if it has not."""
        with contextlib.suppress(BlockingIOError):
            return self._read(socket.MSG_DONTWAIT)
        return None

    def send_signal(self, number: int) -> None:
        """Sends it a signal, if it has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _read(self, flags: int = 0) -> int:
        if self.returncode is None:
            answer = self.told.recv(64, socket.MSG_PEEK | flags)  # left there for other threads
            self.returncode = (
                int(answer) if answer else -signal.SIGKILL
            )  # the supervisor is gone, and all end
        return self.returncode


def fork_child(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None,
    stdout: Any = None,
    pass_fds: Sequence[int] = (),
) -> ForkedChild | None:
    """Has the supervisor fork a child in the place of `subprocess.Popen`.

    Args:
        command: its command line.
        env: all of its environment.
        cwd: its working directory; None for this process's.
        stdout: file for all its output; None for this process's.
        pass_fds: descriptors that it inherits.

    Returns:
        None where the caller has to start it: there is no supervisor, or a fork would not do.
    """
    program = _Program.of(command)
    if _rank_0 is None or _rank_0.pid != os.getpid() or program is None:
        return None
    names = {
        name for name in {*env, *_rank_0.environment} - _SET_BY_IMPORTS if name.startswith(_READ_AT_IMPORT)
    }
    changed = tuple(sorted(name for name in names if env.get(name) != _rank_0.environment.get(name)))
    if changed:
        _explain_start(changed)
        return None
    outputs = {1: 1, 2: 2} if stdout is None else dict.fromkeys((1, 2), stdout.fileno())
    files = {0: 0, **outputs, **{number: number for number in pass_fds}}
    files = {number: present for number, present in files.items() if _is_open(present)}
    ignored = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
    start = {
        "program": vars(program),
        "launcher": _rank_0.pid,
        "env": dict(env),
        "cwd": cwd or os.getcwd(),
        "files": list(files),
        "group": os.getpgid(0),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "processors": sorted(os.sched_getaffinity(0)),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in _limits()},
        "umask": _umask(),
        "ignored": sorted(ignored - _RESET_BY_SUBPROCESS),
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }
    ours, theirs = _socketpair()
    with theirs, open(os.memfd_create("order"), "wb") as order:
        order.write(json.dumps(start).encode())
        order.flush()
        socket.send_fds(_rank_0.socket, [_CHILD], [order.fileno(), theirs.fileno(), *files.values()])
    return ForkedChild(_forked(ours), ours)


@functools.cache
def _explain_start(changed: Sequence[str]) -> None:
    print(
        f"lightning_ddp: {', '.join(changed)} has changed since torch was imported for this run, so that the"
        " other ranks are not forked from that but started by Python, which takes longer",
        file=sys.stderr,
    )


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _limits() -> list[str]:
    return [name for name in dir(resource) if name.startswith("RLIMIT_")]


def _umask() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^Umask:\s*(\d+)$", status, re.MULTILINE)
    return int(found[1], 8) if found else 0o022

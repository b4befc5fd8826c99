"""Ranks under `python -m lightning_ddp run`: forks of a zygote, a process with one thread.

The supervisor forks the zygote after the imports and before it starts a thread, opens a store or touches a
device. A fork of the zygote is therefore like a new interpreter that has imported the same modules. How it
differs from one is listed, and tested, in `tests/test_run.py`.

The supervisor hosts the store and the control server of a job and starts its other ranks, so that rank 0 is a
rank like all others, and may be lost. Rank 0 requests that by its `SupervisorLink`.
"""

from __future__ import annotations

import atexit
import builtins
import errno
import fcntl
import functools
import importlib
import importlib.util
import itertools
import mmap
import multiprocessing
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist

from lightning_ddp.comm.teardown import flush_output
from lightning_ddp.launch.child_process import end_with, is_alive
from lightning_ddp.supervise.failure_record import FailureRecord

_AWAITED = {signal.SIGCHLD, signal.SIGIO}
_SIZE = struct.Struct("!I")
_MOST_FILES = 16
_LOOK_EVERY_S = 0.05
_READ_AT_IMPORT = ("OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH_", "LD_", "PYTHON")
"""Variables that the interpreter, torch, OpenMP or the allocator had read when the supervisor began."""
_SET_BY_IMPORTS = {
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR"),
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # by scikit-learn, against defects of OpenMP
}
_PUSHED = 0  # number of an answer that nobody asked for: the end of a child


# ---------------------------------------------------------------------- what is started


@dataclass(frozen=True)
class Program:
    """Script or module that a rank runs, with its arguments."""

    kind: str
    """`script` or `module`."""
    name: str
    arguments: Sequence[str]
    job: int | None = None
    """File descriptor of the job that Hydra composed for it; None without Hydra."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Request to start the ranks of a node: program, environment, number of ranks, time to end."""

    program: Program
    cwd: str
    handed: IO[bytes] | None = None
    """File with the job that Hydra composed, for all ranks; None without Hydra."""
    logs: Path | None = None
    """Folder for the output of ranks; None for the terminal of this process."""
    environment: Mapping[str, str]
    """Environment variables of all of them, without LOCAL_RANK."""
    first_rank: int
    node_rank: int
    num_ranks: int
    """Number of ranks of this node, with the first one."""
    world_size: int
    is_later: bool
    """True if they are started only on request, as the job has begun already."""
    goes_on: bool
    """True if the job continues without ranks that it loses."""
    grace_s: float
    """Seconds that a process has to end after a failure."""


# ---------------------------------------------------------------------- messages with files


def send(connection: socket.socket, message: Any, files: Sequence[int] = ()) -> None:
    """Send a pickled object and duplicates of file descriptors over a Unix socket."""
    data = pickle.dumps(message)
    socket.send_fds(connection, [_SIZE.pack(len(data))], files)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[Any, list[int]] | None:
    """Receive an object and file descriptors from `send`; return None if the other end is closed."""
    head, files, _, _ = socket.recv_fds(connection, _SIZE.size, _MOST_FILES)
    if len(head) < _SIZE.size:
        return None
    (size,) = _SIZE.unpack(head)
    return pickle.loads(connection.recv(size, socket.MSG_WAITALL)), files


# ---------------------------------------------------------------------- in the supervisor


@dataclass(frozen=True, kw_only=True)
class Start:
    """Request to fork a rank: its program, environment variables, working directory and log file."""

    program: Program
    environment: Mapping[str, str] | None = None
    """Environment variables; None for those of the supervisor."""
    cwd: str | None = None
    """Working directory; None for that of the supervisor."""
    log: str | None = None
    """Path of the file to which the output is appended; None for the output of the supervisor."""


class Zygote:
    """The supervisor's handle on the process that forks ranks (the zygote), which runs `serve`."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._lock = threading.Lock()

    def start(self, start: Start, files: Mapping[int, int]) -> Fork:
        """Have the zygote fork a rank with `files` (its number -> ours); return a `Fork` or raise OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._lock:
            send(self._requests, (start, list(files)), [theirs.fileno(), *files.values()])
        pid = int(ours.recv(64) or -errno.EPIPE)
        if pid < 0:
            ours.close()
            raise OSError(-pid, f"the zygote could not fork: {os.strerror(-pid)}")
        return Fork(pid, ours)

    def close(self) -> None:
        self._requests.close()


class Fork:
    """A rank forked by the zygote: `pid`, `returncode`, `wait`, `send_signal` as in `subprocess.Popen`."""

    def __init__(self, pid: int, told: socket.socket) -> None:
        self.pid = pid
        self._told = told  # on which the zygote sends its exit code
        self.returncode: int | None = None  # exit code; None until `wait` has returned

    def wait(self) -> int:
        """Wait until this process has ended; return its exit code. Called once."""
        with self._told:
            answer = self._told.recv(64)
        while not answer and is_alive(self.pid):  # the zygote is gone
            time.sleep(_LOOK_EVERY_S)
        self.returncode = int(answer) if answer else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def fork() -> int:
    """Fork this process, after flushing output; return the child's process id, and 0 in the child."""
    flush_output()
    with warnings.catch_warnings():  # about threads of BLAS, which ends them before each fork
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


# ---------------------------------------------------------------------- in the zygote


def serve(requests: socket.socket, supervisor: int) -> tuple[Start, dict[int, int]]:
    """Fork ranks on request and report their exits, until the supervisor ends; return only in the forks.

    Returns the request and the files in the fork: number that the rank is to have -> present number. SIGCHLD
    and SIGIO are to be blocked before.
    """
    end_with(supervisor)
    fcntl.fcntl(requests, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(requests, fcntl.F_SETFL, fcntl.fcntl(requests, fcntl.F_GETFL) | os.O_ASYNC)
    ranks: dict[int, int] = {}
    here = os.getpid()
    while True:
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _tell(ranks[pid], os.waitstatus_to_exitcode(status))
                os.close(ranks.pop(pid))
        while select.select([requests], (), (), 0.0)[0]:
            received = receive(requests)
            if received is None:
                os._exit(0)
            (start, numbers), (told, *files) = received
            try:
                pid = os.fork()
            except OSError as error:
                pid = -(error.errno or 1)
            if pid == 0:
                end_with(here)
                requests.close()
                for descriptor in (told, *ranks.values()):
                    os.close(descriptor)
                return start, dict(zip(numbers, files, strict=True))
            _tell(told, pid)
            for descriptor in files:
                os.close(descriptor)
            if pid > 0:
                ranks[pid] = told
            else:
                os.close(told)
        signal.sigwaitinfo(_AWAITED)


def _tell(descriptor: int, number: int) -> None:
    with suppress(OSError):  # the supervisor is gone
        os.write(descriptor, str(number).encode())


# ---------------------------------------------------------------------- the program in a rank


def run_as_main(program: Program) -> NoReturn:
    """Run a program as `__main__`, as the interpreter does, then raise `SystemExit` with its exit code."""
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
    """Replace in a fork what it inherited but has to own: main module, arguments, random states."""
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
    """End this process by SIGINT, as the interpreter does after an uncaught KeyboardInterrupt."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()  # files that it has left open are written
    flush_output()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(128 + signal.SIGINT)


# ---------------------------------------------------------------------- rank 0's requests to the supervisor


class SupervisorLink:
    """Rank 0's connection to the supervisor, through which it calls methods of the `JobHost` there."""

    def __init__(self, connection: socket.socket, supervisor: int) -> None:
        self.supervisor = supervisor
        self.pid = os.getpid()
        self.on_child_ended: Callable[[FailureRecord], None] = lambda record: None
        """Called in a thread where this process has to tell the others of the end of a child."""
        self._connection = connection
        self._environment = dict(os.environ)
        self._numbers = itertools.count(_PUSHED + 1)
        self._answers: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._is_listening = False

    def can_start(self, environment: Mapping[str, str]) -> bool:
        """Return True if ranks can be forked with this environment; else print the changed variables."""
        names = {*environment, *self._environment} - _SET_BY_IMPORTS
        differing = {name for name in names if environment.get(name) != self._environment.get(name)}
        changed = tuple(sorted(name for name in differing if name.startswith(_READ_AT_IMPORT)))
        if changed:
            _explain_start(changed)
        return not changed

    def open_store(self, address: str, port: int | None, named_by: str) -> dist.TCPStore:
        bound = self.ask("open_store", address, port, named_by)
        return dist.TCPStore(address, bound, is_master=False)

    def launch(self, launch: Launch) -> None:
        files = () if launch.handed is None else (launch.handed.fileno(),)
        self.ask("launch", replace(launch, handed=None), files=files)

    def note_failure(self, record: FailureRecord) -> None:
        with suppress(OSError):  # it was killed
            self._post("note_failure", (record,), {}, ())

    def ask(self, name: str, *args: Any, files: Sequence[int] = (), **options: Any) -> Any:
        """Call a method of `JobHost`, or of its `children`; return its result or raise its error."""
        return self._post(name, args, options, files).result()

    def _post(
        self, name: str, args: Sequence[Any], options: Mapping[str, Any], files: Sequence[int]
    ) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._answers[number] = answer
            send(self._connection, (number, name, args, options), files)
            if not self._is_listening:
                self._is_listening = True
                threading.Thread(target=self._listen, daemon=True, name="supervisor-link").start()
        return answer

    def _listen(self) -> None:
        """Deliver the supervisor's answers to waiting calls, and exits of children, until the job ends."""
        while True:
            received = None
            with suppress(ConnectionResetError):
                received = receive(self._connection)
            if received is None:  # the supervisor was killed
                with self._lock:
                    self._is_listening = False
                    for answer in self._answers.values():
                        answer.set_exception(ConnectionResetError("the supervisor has ended"))
                    self._answers.clear()
                return
            number, result, is_last = received[0]
            if number == _PUSHED:
                self.on_child_ended(result)
                continue
            with self._lock:
                answer = self._answers.pop(number)
                if is_last:
                    self._is_listening = False
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)
            if is_last:
                return


@functools.cache
def _explain_start(changed: Sequence[str]) -> None:
    print(
        f"lightning_ddp: {', '.join(changed)} has changed since torch was imported for this run, so Python"
        " starts the other ranks instead of forking them, which takes longer",
        file=sys.stderr,
    )


_link: SupervisorLink | None = None
_passed_on: mmap.mmap | None = None
"""Global: they are known when a rank is forked, long before it has a job."""


def become_supervised(link: SupervisorLink | None, passed_on: mmap.mmap) -> None:
    """Store the connection to the supervisor (in rank 0) and the memory with the last signal it passed on."""
    global _link, _passed_on
    _link, _passed_on = link, passed_on


def supervisor_link() -> SupervisorLink | None:
    """Return the link of rank 0 to its supervisor; None in all other processes, such as a fork of rank 0."""
    return _link if _link is not None and _link.pid == os.getpid() else None


def was_passed_on(number: int) -> bool:
    """Return True if `number` is the last signal that the supervisor passed on, for the whole job."""
    return _passed_on is not None and _passed_on[0] == number

"""Starts the scripts of tests as forks of a process that has imported torch and Lightning, or afresh.

Starting Python and importing Lightning takes most of the time of a run with several ranks. So one process
imports both, once, and forks for each script. Where that starts Python again (a launcher its children,
torchrun its workers, multiprocessing what it spawns), a copy of the process from before the script began
forks in its place. All else is as in a user's run: real processes, parents, signals, files, exit codes. The
package and Hydra are not imported beforehand: what importing them changes belongs to the run.

    python script_server.py DESCRIPTOR

DESCRIPTOR is a socket on which `scripts.py` sends one message a run, with the socket for its answers. The
processes: this one forks a keeper for each run, which forks the main process and stays until all are gone.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import inspect
import json
import multiprocessing.util
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

LONGEST_MESSAGE = 200_000
TEMPLATE_NAME = "template"
"""What the system calls the processes that are copied for the children of scripts."""

_SET_DEATH_SIGNAL, _SET_NAME, _SET_SUBREAPER = 1, 15, 36
_NEW_NETWORK = 0x40000000
_IMPORTED = ("torch", "pytorch_lightning", "torch.distributed.launcher", "torchmetrics")
_RESET_BY_SUBPROCESS = {signal.SIGPIPE, signal.SIGXFSZ}
_libc = ctypes.CDLL(None, use_errno=True)
_CHILD_PROCESS = Path(__file__).parents[2] / "lightning_ddp" / "launch" / "child_process.py"
_keep_files = runpy.run_path(str(_CHILD_PROCESS))["keep_files"]  # which imports nothing else of the package


def _prctl(option: int, value: Any) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


# ---------------------------------------------------------------------- the server and the keepers


def serve(control: socket.socket) -> None:
    """Starts what it is asked for, until the other end of `control` is closed."""
    given = set(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    search_path = [folder for folder in sys.path[1:] if folder not in given]
    is_loaded = False
    signal.signal(signal.SIGCHLD, _reap_keepers)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, LONGEST_MESSAGE, 1)
        if not message:
            os._exit(0)  # taking apart all that was imported takes long, and frees nothing
        order = json.loads(message)
        if not order["is_fresh"] and not is_loaded:
            _load()
            is_loaded = True
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _keep(order, socket.socket(fileno=descriptors[0]), search_path)
        os.close(descriptors[0])


def _reap_keepers(number: int, frame: types.FrameType | None) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _load() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    num_threads = len(os.listdir("/proc/self/task"))
    assert num_threads == 1, f"importing has started {num_threads - 1} threads, which forks would lack"
    gc.collect()
    gc.freeze()  # a collection would write to, and so copy, the memory that the forks share


def _keep(order: dict[str, Any], client: socket.socket, search_path: list[str]) -> NoReturn:
    """Says the main process's id, then how it ended, and ends when all that the run started has ended."""
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    _prctl(_SET_SUBREAPER, 1)  # what loses its parent becomes a child of this process
    main = os.fork()
    if main == 0:
        with _last_resort():
            _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
            _start_main(order, search_path)
    client.send(json.dumps({"keeper": os.getpid(), "main": main}).encode())
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            os._exit(0)
        if pid == main:
            with contextlib.suppress(OSError):  # the client has seen enough
                client.send(str(os.waitstatus_to_exitcode(status)).encode())


def _start_main(order: dict[str, Any], search_path: list[str]) -> None:
    files = {0: os.open(os.devnull, os.O_RDONLY)}
    for number, name in ((1, "stdout"), (2, "stderr")):
        files[number] = os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    if order["namespace"]:
        _enter_namespace(order["namespace"])
    _become(order, files)
    if order["is_fresh"]:
        for ignored in _RESET_BY_SUBPROCESS:
            signal.signal(ignored, signal.SIG_DFL)
        os.execvp(order["command"][0], order["command"])
    _run(order, search_path)


@contextlib.contextmanager
def _last_resort() -> Iterator[None]:
    """A process that cannot even begin says why, and does not go on as the copy of another one."""
    try:
        yield
    except BaseException:  # noqa: BLE001 (whatever it is)
        traceback.print_exc()
    finally:
        os._exit(127)


def _enter_namespace(name: str) -> None:
    with open(f"/run/netns/{name}") as file:
        if _libc.setns(file.fileno(), _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")


# ---------------------------------------------------------------------- what a new process is


def _become(start: Mapping[str, Any], files: Mapping[int, int]) -> None:
    """Gives this process the environment, folder, session and open files (number -> present number)."""
    if start["group"] is None:
        os.setsid()
    else:
        os.setpgid(0, start["group"])
    _keep_files(files)
    os.chdir(start["cwd"])
    os.environ.clear()
    os.environ.update(start["env"])


def _run(start: Mapping[str, Any], search_path: list[str]) -> NoReturn:
    """Runs a command line of Python in this process, which is the copy of one that has imported much."""
    command = start["command"]
    program = _program_of(command)
    assert program is not None, f"cannot be run by a fork: {command}"
    kind, name, arguments = program
    _fork_instead_of_starting(_open_template(start["folder"], search_path))
    if "-u" in command[1:3]:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv = [name if kind == "script" else kind, *arguments]
    _end_after(lambda: _execute(kind, name, main, search_path))


def _program_of(command: Sequence[str]) -> tuple[str, str, list[str]] | None:
    """`("script" | "-m" | "-c", name or code, arguments)`; None for what has to be started afresh."""
    if not command or command[0] != sys.executable:
        return None
    rest = list(command[1:])
    while rest and rest[0] in ("-u", "-B"):
        del rest[0]
    is_code = rest[:1] == ["-c"] and re.match(r"from multiprocessing\.(spawn|forkserver) import", rest[1])
    if is_code or (len(rest) > 1 and rest[0] == "-m"):
        return rest[0], rest[1], rest[2:]
    if rest and rest[0].endswith(".py"):
        return "script", rest[0], rest[1:]
    return None


def _execute(kind: str, name: str, main: types.ModuleType, search_path: list[str]) -> None:
    """As Python does it from the import of `site` on."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = dict.fromkeys([*map(os.path.abspath, given), *search_path])
    is_ours = [isinstance(finder, type) and issubclass(finder, PathFinder) for finder in sys.meta_path]
    sys.meta_path[is_ours.index(True)] = PathFinder  # as it was before `light/sitecustomize.py`
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    _tell_rank()
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.path.insert(0, "")
        exec(compile(name, "<string>", "exec"), vars(main))
    else:
        path = os.path.abspath(name)
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
        vars(main).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
        exec(code, vars(main))


def _tell_rank() -> None:
    """Lightning and torchmetrics read the rank when they are imported: those of a fork were before."""
    for name in ("lightning_fabric.utilities.rank_zero", "torchmetrics.utilities.prints"):
        variables = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
        ranks = [os.environ[variable] for variable in variables if variable in os.environ]
        sys.modules[name].rank_zero_only.rank = int(ranks[0]) if ranks else 0  # type: ignore[attr-defined]


def _end_after(function: Callable[[], None]) -> NoReturn:
    """Ends this process as the interpreter does after a script: traceback, threads, handlers, exit code."""
    code, is_interrupted = 0, False
    try:
        function()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 (what the interpreter does at the top)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code, is_interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


# ---------------------------------------------------------------------- the processes that a script starts


def _open_template(folder: str, search_path: list[str]) -> str:
    """Forks a copy of this process that starts its children; returns where that listens."""
    path = f"{folder}/{os.getpid()}.socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        owner = os.getpid()
        if os.fork() == 0:
            _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
            _prctl(_SET_NAME, TEMPLATE_NAME.encode())
            os.setpgid(0, 0)  # signals of the terminal are for the script
            faulthandler.disable()  # it has no stacks to show
            if os.getppid() == owner:
                _start_siblings(listener, search_path)
            os._exit(0)
    return path


def _start_siblings(listener: socket.socket, search_path: list[str]) -> None:
    """Starts processes whose parent is the parent of this one: its own children, once they are orphans."""
    while True:
        asking, _ = listener.accept()
        message, descriptors, _, _ = socket.recv_fds(asking, LONGEST_MESSAGE, 64)
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                with _last_resort():
                    os.close(writing)
                    os.read(reading, 1)  # until the parent is the right one
                    start = json.loads(message)
                    faulthandler.enable()
                    _prctl(_SET_NAME, b"python")
                    _become(start, dict(zip(start["files"], descriptors, strict=True)))
                    for number in start["ignored"]:
                        signal.signal(number, signal.SIG_IGN)
                    _run(start, search_path)
            asking.send(str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        for descriptor in (reading, writing, *descriptors):
            os.close(descriptor)
        asking.close()


_starting = threading.Lock()


def _fork_instead_of_starting(template: str) -> None:
    """From here on, where this process would start Python on a script, `template` starts a fork of itself."""
    owner = os.getpid()
    execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    signature = inspect.signature(execute_child)
    spawn = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]

    def start(
        command: list[str], env: Mapping[str, str], cwd: str, files: Mapping[int, int], group: int | None
    ) -> int:
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        ignored = {number for number, handler in handlers.items() if handler is signal.SIG_IGN}
        order = {
            "command": command,
            "env": dict(env),
            "cwd": cwd,
            "group": group,
            "files": list(files),
            "ignored": sorted(ignored - _RESET_BY_SUBPROCESS),
            "folder": os.path.dirname(template),
        }
        with _starting, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.connect(template)
            _prctl(_SET_SUBREAPER, 1)  # the nearest one adopts orphans
            socket.send_fds(asking, [json.dumps(order).encode()], list(files.values()))
            pid = int(asking.recv(64))
            asking.recv(1)  # it hangs up when the process is an orphan
            _prctl(_SET_SUBREAPER, 0)
        return pid

    def _execute_child(self: Any, *args: Any) -> None:
        given = signature.bind(self, *args).arguments
        words = given["args"]
        command = [words] if isinstance(words, str | bytes | os.PathLike) else list(words)
        command = [os.fsdecode(word) for word in command]
        is_plain = given["close_fds"] and not given["shell"] and given["preexec_fn"] is None
        if os.getpid() != owner or not is_plain or _program_of(command) is None:
            execute_child(self, *args)
            return
        ours = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        files = {number: present if present != -1 else number for number, present in enumerate(ours)}
        self.pid = start(
            command,
            os.environ if given["env"] is None else given["env"],
            os.fspath(given["cwd"] or os.getcwd()),
            files | {number: number for number in given["pass_fds"]},
            None if given["start_new_session"] else os.getpgid(0),
        )
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))

    def spawnv_passfds(path: Any, args: Any, passfds: Any) -> int:
        command = [os.fsdecode(word) for word in args]
        if os.getpid() != owner or _program_of(command) is None:
            return int(spawn(path, args, passfds))
        files = {int(number): int(number) for number in (0, 1, 2, *passfds)}
        return start(command, os.environ, os.getcwd(), files, os.getpgid(0))

    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = spawnv_passfds  # type: ignore[attr-defined]


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))

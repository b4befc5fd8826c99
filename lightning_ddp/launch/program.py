"""The program of a rank: how a child is started; run it in a fork as the interpreter would.

How a fork differs from a new interpreter is listed, and tested, in `tests/test_run.py`.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import types
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from lightning_ddp.hydra_jobs.jobs import STARTER

CANNOT_BEGIN = 127
"""Exit code of a process that ended before its program began."""


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
class ChildCommand:
    """Command, working directory and log folder of a node's other ranks, made before anything else."""

    program: Program
    cwd: str
    """Working directory."""
    handed: IO[bytes] | None = None
    """File with the job that Hydra composed, for all ranks; None without Hydra."""
    logs: Path | None = None
    """Folder for the output of ranks; None for the terminal of this process."""

    @property
    def arguments(self) -> list[str]:
        kind, name = self.program.kind, self.program.name
        start = ["-m", name] if kind == "module" else [name]
        if self.handed is not None:
            start = [STARTER, str(self.handed.fileno()), kind, name]
        return [sys.executable, *start, *self.program.arguments]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Request to start the ranks of a node: command, environment, number of ranks, time to end."""

    command: ChildCommand
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


@contextlib.contextmanager
def last_resort() -> Generator[None, None, None]:
    """Print an exception in this context and exit, as a fork must not continue as its parent."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 (whatever it is)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        os._exit(CANNOT_BEGIN)


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
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(128 + signal.SIGINT)

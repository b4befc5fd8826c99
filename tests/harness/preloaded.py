"""Runs a function as the main process of a user's script, forked from a process that has imported everything.

Starting Python and importing Lightning takes most of the time of a run with several ranks. So one process
imports once, and forks a main process for each run; where the launcher would start a child by the command
line, the child is forked as well. Everything else is as in a user's run: real processes, signals, exit codes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.leftovers import find_processes, in_sessions, kill_processes
from harness.scripts import ROOT, environment


@dataclass(frozen=True, kw_only=True)
class PreloadedResult:
    """How a run ended, and which of its processes were left."""

    exit_code: int | None
    """Of the main process; negative is the number of the signal that killed it; None: it did not end."""
    stdout: str
    stderr: str
    seconds: float
    left: Sequence[str]
    """Commands of processes that were still there `leftover_grace_s` later. They have been killed."""


class Preloaded:
    """The process that has imported everything."""

    def __init__(self, module: str) -> None:
        """Args: module: name of a module in `tests`, with `main(arguments: list[str])`."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.preloaded", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT / "tests",
            env=environment({"PYTHONPATH": str(ROOT / "tests")}, "preloaded"),
            text=True,
        )
        self._runs: list[PreloadedRun] = []

    def run(
        self, arguments: Sequence[str], *, timeout_s: float, leftover_grace_s: float = 8.0
    ) -> PreloadedResult:
        """Runs `main(arguments)` in a session of its own, and waits until all of its processes are gone."""
        return self.start(arguments).wait(timeout_s, leftover_grace_s)

    def start(self, arguments: Sequence[str]) -> PreloadedRun:
        """Starts `main(arguments)` in a session of its own."""
        folder = tempfile.TemporaryDirectory(prefix="preloaded-")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"arguments": list(arguments), "folder": folder.name}) + "\n")
        self._process.stdin.flush()
        run = PreloadedRun(self, int(self._process.stdout.readline()), folder)
        self._runs.append(run)
        return run

    def close(self) -> None:
        """Ends it, and the runs of tests that failed before they waited for theirs."""
        for run in self._runs:
            run.end()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


class PreloadedRun:
    """A run that has been started."""

    def __init__(self, owner: Preloaded, pid: int, folder: tempfile.TemporaryDirectory[str]) -> None:
        self.pid = pid
        self._owner, self._folder, self._start = owner, folder, time.monotonic()
        self._has_ended = False

    def wait(self, timeout_s: float, leftover_grace_s: float = 8.0) -> PreloadedResult:
        """How it ended."""
        code_path = Path(self._folder.name, "exit_code")
        mine = in_sessions([self.pid])
        with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            psutil.Process(self.pid).wait(timeout_s)
        seconds = time.monotonic() - self._start
        deadline = time.monotonic() + 2.0
        while not code_path.exists() and time.monotonic() < deadline:
            pass
        exit_code = int(code_path.read_text()) if code_path.exists() else None
        if exit_code is None:
            for process in find_processes(mine):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGABRT)
        psutil.wait_procs(find_processes(mine), timeout=leftover_grace_s)
        left = find_processes(mine)
        described = [f"pid {process.pid} {process.status()}" for process in left]
        kill_processes(left)
        stdout, stderr = (Path(self._folder.name, name).read_text() for name in ("stdout", "stderr"))
        self.end()
        return PreloadedResult(
            exit_code=exit_code, stdout=stdout, stderr=stderr, seconds=seconds, left=described
        )

    def end(self) -> None:
        """Kills what is left of it."""
        if not self._has_ended:
            self._has_ended = True
            kill_processes(find_processes(in_sessions([self.pid])))
            self._folder.cleanup()


@contextlib.contextmanager
def preloaded(module: str) -> Iterator[Preloaded]:
    """A process that has imported `module` and what that imports."""
    process = Preloaded(module)
    try:
        yield process
    finally:
        process.close()


class ForkedProcess:
    """What the launcher needs of `subprocess.Popen`, for a child that is forked instead."""

    def __init__(self, command: Any, env: dict[str, str], cwd: str | None = None) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.clear()
            os.environ.update(env)
            _end_with(_run_as_child)

    def wait(self) -> int:
        """Waits for its end."""
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


_main: Any = None
_arguments: list[str] = []


def _run_as_child() -> None:
    import lightning_ddp.launch.orphans as orphans

    orphans.adopt_from_environment()
    _main(_arguments)


def _end_with(function: Any) -> None:
    """Ends this process as the interpreter would after a script: traceback, exit handlers, exit code."""
    import atexit

    code = 0
    try:
        function()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # noqa: BLE001 (what the interpreter does at the top)
        traceback.print_exc()
        sys.last_value = error
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _start_run(order: dict[str, Any]) -> int:
    global _arguments
    folder = Path(order["folder"])
    ready, started = os.pipe()
    keeper = os.fork()
    if keeper == 0:  # waits for the main process, whose exit code nobody else could learn
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        main = os.fork()
        if main == 0:
            os.setsid()
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            _arguments = order["arguments"]
            os.write(started, f"{os.getpid()}\n".encode())
            _end_with(lambda: _main(_arguments))
        _, status = os.waitpid(main, 0)
        part = folder / "exit_code.part"
        part.write_text(str(os.waitstatus_to_exitcode(status)))
        part.rename(folder / "exit_code")
        os._exit(0)
    pid = int(os.read(ready, 64))
    os.close(ready)
    os.close(started)
    return pid


def _serve() -> None:
    global _main
    _main = importlib.import_module(sys.argv[1]).main
    import lightning_ddp.launch.children

    # in the launcher's eyes alone: what a run starts besides is started as usual
    replaced = types.SimpleNamespace(Popen=ForkedProcess)
    lightning_ddp.launch.children.subprocess = replaced  # type: ignore[assignment]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the keepers
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # where the tests run in the background it is ignored
    for line in sys.stdin:
        print(_start_run(json.loads(line)), flush=True)
    os._exit(0)  # it has nothing to tidy up, and taking everything apart that it imported takes seconds


if __name__ == "__main__":
    import harness.preloaded as myself

    myself._serve()

"""Python scripts, run as a user would run them: in processes of their own, from first line to exit code."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.leftovers import ProcessLeftBehind, describe_process, kill_processes
from harness.script_server import LONGEST_MESSAGE, TEMPLATE_NAME

ROOT = Path(__file__).resolve().parents[2]
RUN = ("-m", "lightning_ddp", "run")
"""The launcher of a script whose ranks are forks of a supervisor."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TRAINS = """
import gc, os, signal, sys, threading, time, weakref
import pytorch_lightning as pl, torch
from pytorch_lightning.demos.boring_classes import BoringModel
import lightning_ddp

names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
quiet = dict.fromkeys(names, False)

def trainer(strategy="custom_ddp", devices=2, **more):
    options = {"limit_val_batches": 0, **quiet, **more}
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=devices, **options)
"""
"""How the text of a script begins that makes a quiet Trainer with `trainer()`."""
HIDDEN_PACKAGES = ("scipy", "matplotlib")
_NOT_INHERITED = ("PYTEST_", "PL_", "TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_", "MASTER_", "LOCAL_")
_NOT_INHERITED_NAMES = {"RANK", "NODE_RANK", "WORLD_SIZE", "PYTHONUNBUFFERED"}
SIMULATED_CUDA = "SIMULATED_CUDA"
"""The variable with the folder of compiled simulated CUDA devices, for scripts that are to have them."""
LEFTOVER_GRACE_S = 8.0
"""How long after the end of the script its processes may take to end."""
_STARTS_WITHIN_S = 240.0


class ScriptFailed(Exception):
    """A script ended with another exit code than 0, or did not end in time."""


@dataclass(frozen=True, kw_only=True)
class ScriptResult:
    """A script that ended by itself and left no process."""

    args: Sequence[str]
    returncode: int
    """Negative is the number of the signal that killed it."""
    stdout: str
    stderr: str

    def check(self) -> ScriptResult:
        """This result.

        Raises:
            ScriptFailed: the exit code is not 0; shows the end of the output.
        """
        if self.returncode != 0:
            raise ScriptFailed(
                f"{' '.join(self.args)} ended with exit code {self.returncode}\n"
                f"--- stdout\n{self.stdout[-4000:]}\n--- stderr\n{self.stderr[-8000:]}"
            )
        return self


def last_screen(text: str) -> str:
    """Return what a terminal of 24 lines and 100 columns shows of a text at its end."""
    lines = [line[at : at + 100] for line in text.splitlines() for at in range(0, max(1, len(line)), 100)]
    return "\n".join(lines[-24:])


def run_script(
    source_or_path: str | Path,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout_s: float = 240.0,
    *,
    leftover_grace_s: float = LEFTOVER_GRACE_S,
    **how: Any,
) -> ScriptResult:
    """Runs a script in a session of its own and waits until it has ended.

    Args:
        timeout_s: after this the processes are made to print their stacks and are killed.
        leftover_grace_s: how long after its end other processes of it may still live.

    Raises:
        ScriptFailed: it did not end within `timeout_s`.
        ProcessLeftBehind: it ended, but not all processes that it started, in its session or another one.
    """
    with start_script(source_or_path, args, env, **how) as script:
        return script.wait(timeout_s, leftover_grace_s)


@contextlib.contextmanager
def start_script(
    source_or_path: str | Path,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    *,
    fresh: bool = False,
    launcher: Sequence[str] = (),
    is_module: bool = False,
    cwd: Path | None = None,
    namespace: str | None = None,
    hidden_packages: Sequence[str] = HIDDEN_PACKAGES,
) -> Iterator[RunningScript]:
    """Starts a script for a test that does something meanwhile; what still runs at the end is killed.

    Args:
        source_or_path: the text of the script, or a `Path` to it.
        args: arguments after the script.
        env: variables on top of this process's environment, less those that describe a rank and the one for
            unbuffered output; `PYTHONPATH` comes after that of the package. `SIMULATED_CUDA` gives the script
            the devices of `simcuda`.
        fresh: whether it and all that it starts are new interpreters, where the import, the command line or
            the start itself is what is tested; if not, forks of one that has imported torch and Lightning
            (see `script_server.py`).
        launcher: what stands between the interpreter and the script, such as `-m torch.distributed.run`.
        is_module: whether `source_or_path` is the name of a module, to be run with `-m`.
        cwd: where it runs; by default a folder that is removed afterwards.
        namespace: the name of the network namespace that it runs in; by default this process's.
        hidden_packages: what Python is to take for not installed; `light/sitecustomize.py` says why.
    """
    with tempfile.TemporaryDirectory(prefix="script-") as scratch:
        program = ["-m", source_or_path] if is_module else [_script_path(source_or_path, Path(scratch))]
        order = {
            "command": [sys.executable, *launcher, *map(str, program), *args],
            "cwd": str(cwd or scratch),
            "env": environment(env or {}, hidden_packages),
            "folder": scratch,
            "group": None,
            "is_fresh": fresh,
            "namespace": namespace,
            "stdout": f"{scratch}/stdout",
            "stderr": f"{scratch}/stderr",
        }
        devices = (env or {}).get(SIMULATED_CUDA, "")
        script = RunningScript(order["command"], Path(scratch), _ask_server(json.dumps(order), devices))
        try:
            yield script
        finally:
            script.kill()


class RunningScript:
    """A script that has been started."""

    def __init__(self, command: Sequence[str], folder: Path, connection: socket.socket) -> None:
        self._command, self._folder, self._connection = command, folder, connection
        connection.settimeout(_STARTS_WITHIN_S)
        ids = json.loads(connection.recv(LONGEST_MESSAGE))
        self.pid: int = ids["main"]
        """Of its main process, which leads a session and a process group."""
        self._keeper: psutil.Process | None = None
        """It lives until all processes of the script are gone, which may be sooner than it is asked for."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._keeper = psutil.Process(ids["keeper"])
        self._returncode: int | None = None

    def wait(self, timeout_s: float = 240.0, leftover_grace_s: float = LEFTOVER_GRACE_S) -> ScriptResult:
        """How it ended; see `run_script`."""
        try:
            self._connection.settimeout(timeout_s)
            self._returncode = int(self._connection.recv(LONGEST_MESSAGE))
        except TimeoutError:
            self._stop_with_stacks()
            raise ScriptFailed(f"{self._what} did not end within {timeout_s} s\n{self.output()}") from None
        is_over = self._have_all_ended(leftover_grace_s)
        left = [] if is_over else [describe_process(process) for process in self.processes()]
        self.kill()
        if left:
            what = f"{self._what} (exit code {self._returncode})"
            raise ProcessLeftBehind(f"{what} left {len(left)} process(es) behind: {'; '.join(left)}")
        stdout, stderr = (self._read(name) for name in ("stdout", "stderr"))
        return ScriptResult(args=self._command, returncode=self._returncode, stdout=stdout, stderr=stderr)

    def wait_until(self, is_so: Callable[[], bool], within_s: float = 240.0) -> None:
        """Waits until something is the case that the script brings about.

        Raises:
            ScriptFailed: it has ended before, or `within_s` seconds have passed.
        """
        deadline = time.monotonic() + within_s
        while not is_so():
            is_readable, _, _ = select.select([self._connection], [], [], 0.02)
            if is_readable and not is_so():
                raise ScriptFailed(f"{self._what} has ended\n{self.output()}")
            if time.monotonic() > deadline:
                self._stop_with_stacks()
                raise ScriptFailed(f"{self._what} did not come so far within {within_s} s\n{self.output()}")

    @property
    def _what(self) -> str:
        return " ".join(self._command)

    def output(self) -> str:
        """The end of what it has printed so far."""
        return f"--- stdout\n{self._read('stdout')[-4000:]}\n--- stderr\n{self._read('stderr')[-12000:]}"

    def processes(self) -> list[psutil.Process]:
        """All living processes of the run, whoever started them in whichever session."""
        return [process for process in self._started() if _is_of_script(process)]

    def kill(self) -> None:
        """Ends all that is left of it."""
        while not self._have_all_ended(0.05):
            with contextlib.suppress(psutil.NoSuchProcess):
                kill_processes(self._started())

    def _started(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [] if self._keeper is None else self._keeper.children(recursive=True)
        return []

    def _have_all_ended(self, within_s: float) -> bool:
        if self._connection.fileno() == -1:
            return True
        self._connection.settimeout(within_s)
        try:
            while self._connection.recv(LONGEST_MESSAGE):  # an exit code that nobody has asked for
                pass
        except TimeoutError:
            return False
        self._connection.close()
        return True

    def _stop_with_stacks(self) -> None:
        processes = self.processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGABRT)
        psutil.wait_procs(processes, timeout=5)
        self.kill()

    def _read(self, name: str) -> str:
        path = self._folder / name
        return path.read_text(errors="replace") if path.exists() else ""  # it has not begun


def _is_of_script(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.name() != TEMPLATE_NAME
    except psutil.NoSuchProcess:
        return False


def _script_path(source_or_path: str | Path, scratch: Path) -> Path:
    if isinstance(source_or_path, Path):
        return source_or_path.resolve()
    script = scratch / "script.py"
    script.write_text(source_or_path)
    return script


def environment(extra: Mapping[str, str], hidden_packages: Sequence[str] = HIDDEN_PACKAGES) -> dict[str, str]:
    """The variables of a user's process; see `run_script`."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED_NAMES and not name.startswith(_NOT_INHERITED)
    }
    env["PYTHONFAULTHANDLER"] = "1"  # SIGABRT prints the stacks
    env["OMP_NUM_THREADS"] = "1"
    env["HIDDEN_PACKAGES"] = ",".join(hidden_packages)
    env.update(extra)
    tests = str(ROOT / "tests") if SIMULATED_CUDA in env else None
    path = [str(ROOT), env.get("PYTHONPATH"), tests, str(Path(__file__).with_name("light"))]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return env


# ---------------------------------------------------------------------- the servers of this process

_starting = threading.Lock()


def _ask_server(message: str, devices: str) -> socket.socket:
    """Has a server start a run; returns the socket for what it says about that."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _starting, theirs:
        socket.send_fds(_server(devices), [message.encode()], [theirs.fileno()])
    return ours


@functools.cache
def _server(devices: str) -> socket.socket:
    """Starts a server, which has the simulated CUDA devices of this folder, if one is given."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("script_server.py")), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env=environment({SIMULATED_CUDA: devices} if devices else {}),
            pass_fds=[theirs.fileno()],
        )

    def close() -> None:
        ours.close()
        process.wait(60)

    atexit.register(close)
    return ours

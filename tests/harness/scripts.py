"""Python scripts, run as a user would run them: in a fresh interpreter, with a fresh environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.leftovers import find_processes, in_sessions, kill_processes, require_none, with_environment

ROOT = Path(__file__).resolve().parents[2]
MARK = "LIGHTNING_DDP_TEST_RUN"
HIDDEN_PACKAGES = ("scipy", "matplotlib")
_NOT_INHERITED = ("PYTEST_", "PL_", "TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_", "MASTER_", "LOCAL_")
_NOT_INHERITED_NAMES = {"RANK", "NODE_RANK", "WORLD_SIZE"}
LEFTOVER_GRACE_S = 5.0
"""How long after the end of the script its processes may take to end."""


class ScriptFailed(Exception):
    """A script ended with another exit code than 0, or did not end in time."""


@dataclass(frozen=True, kw_only=True)
class ScriptResult:
    """A script that ended by itself and left no process."""

    args: Sequence[str]
    returncode: int
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


def run_script(
    source_or_path: str | Path,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout_s: float = 240.0,
    *,
    python: Sequence[str] = (sys.executable,),
    launcher: Sequence[str] = (),
    is_module: bool = False,
    cwd: Path | None = None,
    leftover_grace_s: float = LEFTOVER_GRACE_S,
    hidden_packages: Sequence[str] = HIDDEN_PACKAGES,
) -> ScriptResult:
    """Runs a script in a session of its own and waits until it has ended.

    Args:
        source_or_path: the text of the script, or a `Path` to it.
        args: arguments after the script.
        env: variables on top of this process's environment, less those that describe a rank; `PYTHONPATH`
            comes after that of the package.
        timeout_s: after this the processes are made to print their stacks and are killed.
        python: the interpreter; `ip netns exec NAME python` for one on another node.
        launcher: what stands between `python` and the script, such as `-m torch.distributed.run`.
        is_module: whether `source_or_path` is the name of a module, to be run with `-m`.
        cwd: where it runs; by default a folder that is removed afterwards.
        leftover_grace_s: how long after its end other processes of it may still live.
        hidden_packages: what Python is to take for not installed; `light/sitecustomize.py` says why.

    Raises:
        ScriptFailed: it did not end within `timeout_s`.
        ProcessLeftBehind: it ended, but not all processes that it started, in its session or another one.
    """
    with tempfile.TemporaryDirectory(prefix="script-") as scratch:
        program = (
            ["-m", str(source_or_path)] if is_module else [str(_script_path(source_or_path, Path(scratch)))]
        )
        command = [*python, *launcher, *program, *args]
        mark = uuid.uuid4().hex
        out, err = Path(scratch, "stdout"), Path(scratch, "stderr")
        # files, not pipes: a process that is left behind would keep a pipe open and hide itself
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=cwd or scratch,
                env=environment(env or {}, mark, hidden_packages),
                start_new_session=True,
            )
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                _stop_with_stacks(process, mark)
                raise ScriptFailed(
                    f"{' '.join(command)} did not end within {timeout_s} s\n"
                    f"--- stdout\n{_read(out)[-4000:]}\n--- stderr\n{_read(err)[-12000:]}"
                ) from None
            except BaseException:
                kill_processes(_processes_of(process.pid, mark))
                process.wait()
                raise
        result = ScriptResult(
            args=command, returncode=process.returncode, stdout=_read(out), stderr=_read(err)
        )
        by_session, by_mark = in_sessions([process.pid]), with_environment(MARK, mark)
        require_none(
            lambda other: by_session(other) or by_mark(other),
            grace_s=leftover_grace_s,
            what=f"{' '.join(command)} (exit code {process.returncode})",
        )
        return result


def _script_path(source_or_path: str | Path, scratch: Path) -> Path:
    if isinstance(source_or_path, Path):
        return source_or_path.resolve()
    script = scratch / "script.py"
    script.write_text(source_or_path)
    return script


def environment(
    extra: Mapping[str, str], mark: str, hidden_packages: Sequence[str] = HIDDEN_PACKAGES
) -> dict[str, str]:
    """The variables of a user's process; see `run_script`. Those whose `MARK` is `mark` belong to one run."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED_NAMES and not name.startswith(_NOT_INHERITED)
    }
    env["PYTHONFAULTHANDLER"] = "1"  # SIGABRT prints the stacks
    env["OMP_NUM_THREADS"] = "1"
    env["HIDDEN_PACKAGES"] = ",".join(hidden_packages)
    env.update(extra)
    path = [str(ROOT), env.get("PYTHONPATH"), str(Path(__file__).with_name("light"))]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    env[MARK] = mark
    return env


def _processes_of(session_id: int, mark: str) -> list[psutil.Process]:
    # each once: a second SIGABRT would end the first one's dump of the stacks half-way
    by_session, by_mark = in_sessions([session_id]), with_environment(MARK, mark)
    return find_processes(lambda process: by_session(process) or by_mark(process))


def _stop_with_stacks(process: subprocess.Popen[bytes], mark: str) -> None:
    processes = _processes_of(process.pid, mark)
    for found in processes:
        try:
            found.send_signal(signal.SIGABRT)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=5)
    kill_processes(_processes_of(process.pid, mark))
    process.wait()


def _read(path: Path) -> str:
    return path.read_text(errors="replace")

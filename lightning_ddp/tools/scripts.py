"""Timed scripts, each in a separate session whose processes do not outlive the script."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from lightning_ddp.tools import ToolError, held_back

PACKAGE_ROOT: Final = Path(__file__).resolve().parents[2]
"""Folder from which a script imports this package."""
TRAINING: Final = Path(__file__).with_name("training_script.py")
STRATEGIES: Final = ("custom_ddp", "ddp")
"""Strategies to compare: this package's and Lightning's."""
RUN: Final = ("-m", "lightning_ddp", "run")
"""Arguments of the interpreter for the launcher of this package."""

_TAIL: Final = 4000  # characters of a failed script's output to show
_POLL_S: Final = 0.02
_DEATH_S: Final = 30.0  # a killed process is gone in milliseconds, on a busy machine in seconds


class _Script:
    """A running script, with its processes and its output file."""

    def __init__(self, path: Path, arguments: dict[str, Any], output: Path, launcher: Sequence[str]) -> None:
        self.label = f"{path.name} {arguments.get('strategy', '')}".strip()
        self._output = output
        # The script must start its processes itself, also inside a SLURM job.
        env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), env.get("PYTHONPATH")]))
        if "fault" not in arguments:  # else each start that is timed would compile a source tree
            env.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, *launcher, str(path), json.dumps(arguments)]
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        self.started_at = time.time()
        with output.open("wb") as stream:
            self.process = subprocess.Popen(
                command, env=env, stdout=stream, start_new_session=True, **streams
            )

    @property
    def text(self) -> str:
        """Output of the script so far, as text."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def failed(self, what: str) -> ToolError:
        """Return an error that says `what` and shows the end of the script's output."""
        return ToolError(f"{self.label} {what}:\n{self.text[-_TAIL:]}")

    def events(self, kind: str) -> list[Any]:
        """Return the JSON values of the output lines that begin with `kind`, in order."""
        return [json.loads(value) for value in re.findall(rf"^{kind} (.*)\n", self.text, re.MULTILINE)]

    def run_to(self, kind: str, timeout_s: float, *, ends_there: bool = False) -> Any:
        """Wait for the script's end, or with `ends_there` for a `kind` line; return the line's JSON value."""
        while self.process.poll() is None and not (ends_there and self.events(kind)):
            if time.time() > self.started_at + timeout_s:
                raise self.failed(f"was still running after {timeout_s:g} s")
            time.sleep(_POLL_S)
        status, found = self.process.poll(), self.events(kind)
        if status:
            raise self.failed(f"ended with status {status}")
        if not found:
            raise self.failed(f"did not reach {kind}")
        return found[0]

    def memory_mib(self) -> float:
        """Return the memory of the script's processes in MiB; a page shared by several counts once."""
        total = 0
        for folder in self.alive():
            with suppress(OSError):  # it has ended meanwhile
                found = re.search(r"^Pss:\s+(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)
                total += int(found[1]) if found else 0
        return total / 1024

    def alive(self) -> list[Path]:
        """Return the folders in `/proc` of the script's living processes, its own included."""
        self.process.poll()  # reaps the script, which would be a zombie otherwise
        alive = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it ended meanwhile
                fields = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
                if fields[0] != "Z" and int(fields[3]) == self.process.pid:
                    alive.append(stat.parent)
        return alive

    def kill(self) -> None:
        """Kill all processes of the script, also after success: the rest would disturb the next script."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # the usual case: no process is left
        self.process.wait()
        deadline = time.monotonic() + _DEATH_S
        while self.alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)


@contextmanager
def started(path: Path, arguments: dict[str, Any], launcher: Sequence[str] = ()) -> Iterator[_Script]:
    """Run a script, behind `launcher` and with arguments as JSON, in this block; kill what is left of it."""
    running: _Script | None = None
    with tempfile.TemporaryDirectory(prefix="lightning_ddp_script_") as folder:
        try:
            with held_back():
                running = _Script(path, arguments, Path(folder, "output"), launcher)
            yield running
        finally:
            if running is not None:
                running.kill()


class Commit(NamedTuple):
    """An optimizer step that a rank completed, in seconds since the fault, with the samples of its batch."""

    moment_s: float
    step: int
    rank: int
    samples: list[int]


@dataclass(frozen=True, kw_only=True)
class FailedRun:
    """Outcome of a script in which a rank failed."""

    learned_s: tuple[float, ...]
    """Seconds from the fault to its report in each other rank that received a report."""
    raised: dict[int, str]
    """Error of each of these ranks with the rank that it names, such as 'PeerFailure of 1', by rank."""
    gone_s: float
    """Seconds from the fault until no process was left; the deadline if some had to be killed."""
    num_left: int
    """Number of processes that were left at the deadline."""
    exit_code: int | None
    """Exit code of the script; None if it did not end."""
    regroups_s: tuple[float, ...]
    """Seconds of each recovery."""
    resumed_s: float | None
    """Seconds from the fault to the first step of another rank after it; None if there is none."""
    commits: list[Commit]


def run_to_fault(
    strategy: str, world_size: int, *, timeout_s: float, launcher: Sequence[str] = (), **arguments: Any
) -> FailedRun:
    """Train with one of `STRATEGIES` until the victim fails and all exit; kill the rest; return the outcome.

    The arguments are those of `train` in the script, at least `fault` and `victim`. All of it has
    `2 * timeout_s` seconds. Raises `ToolError` if the script does not reach the fault.
    """
    common = {"strategy": strategy, "devices": world_size, "num_steps": 64}
    deadline = time.monotonic() + 2 * timeout_s
    with started(TRAINING, {**common, **arguments}, launcher) as running:
        while running.alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        gone, num_left = time.time(), len(running.alive())
        exit_code = running.process.wait() if num_left == 0 else running.process.poll()
        faults, raised = running.events("FAULT"), running.events("RAISED")
        regroups, committed = running.events("REGROUP"), running.events("COMMIT")
        if not faults:
            raise running.failed("reached no fault")
    start = faults[0]
    commits = [Commit(at - start, *rest) for at, *rest in committed]
    after = [commit.moment_s for commit in commits if commit.step > arguments.get("fault_step", 3)]
    return FailedRun(
        learned_s=tuple(at - start for at, _, _ in raised),
        raised={rank: what for _, rank, what in raised},
        gone_s=gone - start,
        num_left=num_left,
        exit_code=exit_code,
        regroups_s=tuple(regroups),
        resumed_s=min(after, default=None),
        commits=commits,
    )

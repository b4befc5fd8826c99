"""Scripts that are timed: each in a session of its own, and none of its processes outlives it."""

from __future__ import annotations

import compileall
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning_ddp.tools import ToolError, held_back

PACKAGE_ROOT: Final = Path(__file__).resolve().parents[2]
"""Where a script finds this package."""

TRAINING: Final = Path(__file__).with_name("training_script.py")
"""The script that trains."""

STRATEGIES: Final = ("custom_ddp", "ddp")
"""What takes turns in it: ours and Lightning's."""

_TAIL: Final = 4000  # characters of a failed script's output to show
_POLL_S: Final = 0.02
_DEATH_S: Final = 30.0  # a killed process is gone in milliseconds, on a busy machine in seconds


@contextmanager
def compiled_package() -> Iterator[str]:
    """Make a folder with a copy of this package and its bytecode, as an installer leaves it.

    Without it a script would compile a source tree at each start, where Python may write no bytecode.
    """
    with tempfile.TemporaryDirectory(prefix="lightning_ddp_") as folder:
        package = PACKAGE_ROOT / "lightning_ddp"
        shutil.copytree(package, Path(folder, package.name), ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(folder, quiet=1)
        yield folder


class _Script:
    """A script that runs, and what it has printed."""

    def __init__(self, path: Path, arguments: dict[str, Any], output: Path, launcher: Sequence[str]) -> None:
        self.label = f"{path.name} {arguments.get('strategy', '')}".strip()
        self._output = output
        # inside of a SLURM job as well it starts its processes itself
        env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        if launcher:
            places = [arguments["package_root"], env.get("PYTHONPATH")]
            env["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        command = [sys.executable, *launcher, str(path), json.dumps(arguments)]
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        self.started_at = time.time()
        with output.open("wb") as stream:
            self.process = subprocess.Popen(
                command, env=env, stdout=stream, start_new_session=True, **streams
            )

    @property
    def text(self) -> str:
        """All that it has printed."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def failed(self, what: str) -> ToolError:
        """An error that shows the end of what it has printed."""
        return ToolError(f"{self.label} {what}:\n{self.text[-_TAIL:]}")

    def value_of(self, mark: str) -> str | None:
        """The rest of the first line that begins with a word; None if there is none."""
        found = re.search(rf"^{mark} (.*)$", self.text, re.MULTILINE)
        return found and found[1]

    def run_to(
        self, mark: str, timeout_s: float, *, ends_there: bool = False, may_fail_later: bool = False
    ) -> str:
        """Wait for its end, or (`ends_there`) only for a line that it prints; returns the rest of the line.

        `may_fail_later`: a failure after the line is reported on standard error only. Else what fails, never
        prints the line or takes longer than `timeout_s` from its start is an error.
        """
        while self.process.poll() is None and not (ends_there and self.value_of(mark)):
            if time.time() > self.started_at + timeout_s:
                raise self.failed(f"was still running after {timeout_s:g} s")
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_POLL_S)
        status, found = self.process.poll(), self.value_of(mark)
        if status and not (may_fail_later and found):
            raise self.failed(f"ended with status {status}")
        if found is None:
            raise self.failed(f"did not reach {mark}")
        if status:
            print(f"note: {self.label} ended with status {status}, after {mark}", file=sys.stderr)
        return found

    def memory_mib(self) -> float:
        """Memory of its session: a page that several processes share counts once."""
        total = 0
        for folder in self._alive():
            with suppress(OSError):  # it has ended meanwhile
                found = re.search(r"^Pss:\s+(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)
                total += int(found[1]) if found else 0
        return total / 1024

    def num_alive(self) -> int:
        """Count the processes of its session that still live, itself included."""
        self.process.poll()  # reaps it, so that it is no zombie of ours
        return len(self._alive())

    def _alive(self) -> list[Path]:
        """The folders in `/proc` of the processes of its session."""
        alive = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it ended meanwhile
                fields = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
                if fields[0] != "Z" and int(fields[3]) == self.process.pid:
                    alive.append(stat.parent)
        return alive

    def kill(self) -> None:
        """Kill all of its session. Also after success: who outlives a script would disturb the next one."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # the usual case: nobody is left
        self.process.wait()
        deadline = time.monotonic() + _DEATH_S
        while self.num_alive() > 0 and time.monotonic() < deadline:
            time.sleep(_POLL_S)


@contextmanager
def started(path: Path, arguments: dict[str, Any], launcher: Sequence[str] = ()) -> Iterator[_Script]:
    """Start a script with arguments as JSON; at the end of the block what is left of it is killed.

    `launcher` are arguments of the interpreter before the script.
    """
    running: _Script | None = None
    with tempfile.TemporaryDirectory(prefix="lightning_ddp_script_") as folder:
        try:
            with held_back():
                running = _Script(path, arguments, Path(folder, "output"), launcher)
            yield running
        finally:
            if running is not None:
                running.kill()


@dataclass(frozen=True, kw_only=True)
class FailedRun:
    """What came of a script in which a rank failed."""

    learned_s: tuple[float, ...]
    """Seconds from the fault until each of the other ranks that learned of it did."""
    raised: dict[int, str]
    """What each of them raised, and the rank that it names: 'PeerFailure of 1'."""
    gone_s: float
    """Seconds from the fault until no process was left; the deadline where some had to be killed."""
    num_left: int
    """Processes that were left when the script itself had ended, and did not follow within the deadline."""
    exit_code: int | None
    """Of the script; None if it did not end."""


def run_to_fault(
    strategy: str,
    world_size: int,
    *,
    fault: str,
    victim: int,
    timeout_s: float,
    accelerator: str = "cpu",
    preload: str | None = None,
) -> FailedRun:
    """Train with one of `STRATEGIES` until the victim fails by an "exception" or a "kill", and all are gone.

    There are `timeout_s` seconds to reach the fault, and as many from there. A file to preload is run first
    by each rank. Raises if no fault is reached. No process is left.
    """
    arguments = {"strategy": strategy, "devices": world_size, "package_root": str(PACKAGE_ROOT)}
    arguments |= {"fault": fault, "victim": victim, "accelerator": accelerator, "preload": preload}
    deadline = time.monotonic() + 2 * timeout_s
    with started(TRAINING, {**arguments, "num_steps": 64}) as running:
        while running.num_alive() > 0 and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        gone, num_left = time.time(), running.num_alive()
        exit_code = running.process.wait() if num_left == 0 else running.process.poll()
        text = running.text
        faults = re.findall(r"FAULT (\d+\.\d+)", text)
        if not faults:
            raise running.failed("reached no fault")
    start = float(faults[0])
    told = re.findall(r"RANK (\d+) RAISED (.*): LEARNED (\d+\.\d+)", text)
    return FailedRun(
        learned_s=tuple(float(moment) - start for _, _, moment in told),
        raised={int(rank): what for rank, what, _ in told},
        gone_s=gone - start,
        num_left=num_left,
        exit_code=exit_code,
    )

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning_ddp.tools import ToolError
from lightning_ddp.tools.sigterm import held_back

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


class _Started:
    """A script that runs, and what it has printed."""

    def __init__(
        self, script: Path, arguments: dict[str, Any], output: Path, launcher: Sequence[str] = ()
    ) -> None:
        self.label = f"{script.name} {arguments.get('strategy', '')}".strip()
        self._output = output
        # inside of a SLURM job as well it starts its processes itself
        env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        if launcher:
            path = [arguments["package_root"], env.get("PYTHONPATH")]
            env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        command = [sys.executable, *launcher, str(script), json.dumps(arguments)]
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
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


@contextmanager
def started(script: Path, arguments: dict[str, Any], launcher: Sequence[str] = ()) -> Iterator[_Started]:
    """Start a script; at the end of the block what is left of its processes is killed."""
    running: _Started | None = None
    with tempfile.TemporaryDirectory(prefix="lightning_ddp_script_") as folder:
        try:
            with held_back():
                running = _Started(script, arguments, Path(folder, "output"), launcher)
            yield running
        finally:
            if running is not None:
                _kill_group(running.process)


def run_to_mark(
    script: Path,
    arguments: dict[str, Any],
    mark: str,
    *,
    timeout_s: float,
    may_fail_later: bool = False,
    ends_there: bool = False,
    launcher: Sequence[str] = (),
    at_mark: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> tuple[float, str]:
    """Run a script, with arguments as JSON, to its end, or to a line that it prints.

    Args:
        script: the file to run with this interpreter.
        arguments: given to it as JSON.
        mark: first word of the line.
        timeout_s: seconds after which the script and all of its processes are killed.
        may_fail_later: whether a failure after the mark is reported on standard error only.
        ends_there: whether it is killed, with all of its processes, when it has printed the mark.
        launcher: arguments of the interpreter before the script.
        at_mark: called with its process before that; not where it has ended already.

    Returns:
        When it was started, in seconds since the epoch, and the rest of the line.

    Raises:
        ToolError: the script fails, is not done in time or never prints the mark. No process is left.
    """
    pattern = re.compile(rf"^{mark} (.*)$", re.MULTILINE)
    start = time.time()
    with started(script, arguments, launcher) as running:
        status = running.process.poll()
        while status is None and not (ends_there and pattern.search(running.text)):
            if time.time() > start + timeout_s:
                raise running.failed(f"was still running after {timeout_s:g} s")
            with suppress(subprocess.TimeoutExpired):
                running.process.wait(_POLL_S)
            status = running.process.poll()
        if status is None:
            at_mark(running.process)
        found = pattern.search(running.text)
        if status and not (may_fail_later and found):
            raise running.failed(f"ended with status {status}")
        if found is None:
            raise running.failed(f"did not reach {mark}")
        if status:
            print(f"note: {running.label} ended with status {status}, after {mark}", file=sys.stderr)
    return start, found.group(1)


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
    """Train until a rank fails by an "exception" or a "kill", and wait until all processes are gone.

    Args:
        strategy: of `STRATEGIES`.
        world_size: number of ranks.
        fault: one of the two.
        victim: the rank that fails.
        timeout_s: seconds for the script to reach its fault, and again from there until all are gone.
        accelerator: of the Trainer.
        preload: a Python file that each rank runs first.

    Raises:
        ToolError: it reaches no fault. No process is left.
    """
    arguments = {"strategy": strategy, "devices": world_size, "package_root": str(PACKAGE_ROOT)}
    arguments |= {"fault": fault, "victim": victim, "accelerator": accelerator, "preload": preload}
    deadline = time.monotonic() + 2 * timeout_s
    with started(TRAINING, {**arguments, "num_steps": 64}) as running:
        process = running.process
        while num_alive(process) > 0 and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        gone, num_left = time.time(), num_alive(process)
        exit_code = process.wait() if num_left == 0 else process.poll()
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


def num_alive(process: subprocess.Popen[bytes]) -> int:
    """Count the processes of a started script's session that still live, the script itself included."""
    process.poll()  # reaps it, so that it is no zombie of ours
    return len(_alive(process))


def memory_mib(process: subprocess.Popen[bytes]) -> float:
    """Memory of a started script's session: a page that several processes share counts once."""
    total = 0
    for folder in _alive(process):
        with suppress(OSError):  # it has ended meanwhile
            found = re.search(r"^Pss:\s+(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)
            total += int(found[1]) if found else 0
    return total / 1024


def _alive(process: subprocess.Popen[bytes]) -> list[Path]:
    """The folders in `/proc` of the processes of its session."""
    alive = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        state, session = fields[0], fields[3]
        if state != "Z" and int(session) == process.pid:
            alive.append(stat.parent)
    return alive


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    # Also after success: a rank that outlived its script would disturb the next sample.
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the usual case: nobody is left
    process.wait()
    deadline = time.monotonic() + _DEATH_S
    while num_alive(process) > 0 and time.monotonic() < deadline:
        time.sleep(_POLL_S)

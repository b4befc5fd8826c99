"""Scripts that a benchmark times: each in a session of its own, and none of its processes outlives it."""

from __future__ import annotations

import compileall
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
from pathlib import Path
from typing import Final

from lightning_ddp.tools.bench import BenchmarkError
from lightning_ddp.tools.bench.ending import held_back

__all__ = ["PACKAGE_ROOT", "compiled_package", "num_alive", "read_output", "run_to_mark", "started"]

PACKAGE_ROOT: Final = Path(__file__).resolve().parents[3]
"""Where a script finds this package."""

_TAIL: Final = 4000  # characters of a failed script's output to show
_POLL_S: Final = 0.02
_DEATH_S: Final = 30.0  # a killed process is gone in milliseconds, on a busy machine in seconds


@contextmanager
def compiled_package() -> Iterator[Path]:
    """A folder with a copy of this package and its bytecode, as an installer leaves it.

    Without it a script would compile a source tree at each start, where Python may write no bytecode.
    """
    with tempfile.TemporaryDirectory(prefix="lightning_ddp_") as folder:
        package = PACKAGE_ROOT / "lightning_ddp"
        shutil.copytree(package, Path(folder, package.name), ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(folder, quiet=1)
        yield Path(folder)


@contextmanager
def started(script: Path, arguments: Sequence[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A script from its start on; at the end of the block what is left of its process group is killed.

    Args:
        script: The file to run with this interpreter.
        arguments: The script's own arguments.
        output: The file that gets its standard output and standard error.
    """
    process: subprocess.Popen[bytes] | None = None
    with output.open("wb") as stream:
        try:
            with held_back():
                process = subprocess.Popen(
                    [sys.executable, str(script), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    # inside of a SLURM job as well it starts its processes itself
                    env={name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
                    start_new_session=True,
                )
            yield process
        finally:
            if process is not None:
                _kill_group(process)


def run_to_mark(
    script: Path,
    arguments: Sequence[str],
    mark: re.Pattern[str],
    *,
    what: str,
    timeout_s: float,
    may_fail_later: bool = False,
    ends_there: bool = False,
) -> tuple[float, str]:
    """Run a script to its end, or to the mark.

    Args:
        script: The file to run with this interpreter.
        arguments: The script's own arguments.
        mark: Is looked for in what it printed; its first group is the answer.
        what: Of what the mark tells, for a message.
        timeout_s: Seconds after which the script and all processes of its group are killed.
        may_fail_later: Whether a failure after the mark is reported on standard error only.
        ends_there: Whether it is killed, with all processes of its group, when it has printed the mark.

    Returns:
        When it was started, in seconds since the epoch, and the text of the mark's first group.

    Raises:
        BenchmarkError: If the script fails, is not done in time or never prints the mark. No process is left.
    """
    label = " ".join([script.name, *arguments])
    output = script.with_suffix(".log")
    start = time.time()
    with started(script, arguments, output) as process:
        status = process.poll()
        while status is None and not (ends_there and mark.search(read_output(output))):
            if time.time() > start + timeout_s:
                tail = read_output(output, tail=True)
                raise BenchmarkError(f"{label} was still running after {timeout_s:g} s:\n{tail}")
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
            status = process.poll()
    found = mark.search(read_output(output))
    if status is None and found is not None:
        return start, found.group(1)
    if status != 0 and may_fail_later and found is not None:
        print(f"note: {label} ended with status {status}, after {what}", file=sys.stderr)
    elif status != 0:
        raise BenchmarkError(f"{label} ended with status {status}:\n{read_output(output, tail=True)}")
    if found is None:
        raise BenchmarkError(f"{label} did not reach {what}:\n{read_output(output, tail=True)}")
    return start, found.group(1)


def read_output(path: Path, *, tail: bool = False) -> str:
    """What a script has written: all of it, or its end, for a message."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return text[-_TAIL:] if tail else text


def num_alive(process: subprocess.Popen[bytes]) -> int:
    """Processes of a started script's session that still live, the script itself included."""
    process.poll()  # reaps it, so that it is no zombie of ours
    alive = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        state, session = fields[0], fields[3]
        alive += state != "Z" and int(session) == process.pid
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

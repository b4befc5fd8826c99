"""Scripts that a benchmark times: each in a session of its own, and none of its processes outlives it."""

from __future__ import annotations

import compileall
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["PACKAGE_ROOT", "compiled_package", "read_output", "started"]

PACKAGE_ROOT: Final = Path(__file__).resolve().parents[2]
"""Where a script finds this package."""

_TAIL: Final = 4000  # characters of a failed script's output to show


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
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _kill_group(process)


def read_output(path: Path, *, tail: bool = False) -> str:
    """What a script has written: all of it, or its end, for a message."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return text[-_TAIL:] if tail else text


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    # Also after success: a rank that outlived its script would disturb the next sample.
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the usual case: nobody is left
    process.wait()

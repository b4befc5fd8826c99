"""Command of a child process: what it runs, with what, where, and where its output goes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lightning_ddp.errors import ConfigurationError
from lightning_ddp.hydra_jobs.jobs import STARTER, jobs
from lightning_ddp.launch.session import end_job

__all__ = ["ChildCommand", "child_command"]

_LOGS = "ranks"


@dataclass(frozen=True, kw_only=True)
class ChildCommand:
    """How the children of a run are started. Made before anything is, so that an error leaves nothing."""

    arguments: Sequence[str]
    """The command line."""
    cwd: str | None
    """The working directory; None for this process's."""
    handed: IO[bytes] | None
    """The file with what Hydra has composed, which the children inherit; None without Hydra."""
    logs: Path | None
    """The folder for what the children print; None for this process's terminal."""

    def log_of(self, rank: int) -> Path | None:
        """The file for what a rank prints, or None."""
        return None if self.logs is None else self.logs / f"{rank}.log"


def child_command() -> ChildCommand:
    """The command that runs this program again in a child.

    A script is run by its path, a module by `-m`, with the arguments of this process. Where Hydra has
    composed something the child gets that, and runs in the folder in which the user started the program.

    Raises:
        ConfigurationError: there is no file or module to run again; a configuration does not pickle; or the
            output directory cannot be written.
    """
    elsewhere = jobs.program()
    program, own_arguments = elsewhere or _program(), [] if elsewhere else sys.argv[1:]
    handover = jobs.handover(end_job)
    if handover is None:
        plain = ["-m", program[1]] if program[0] == "module" else [program[1]]
        arguments = [sys.executable, *plain, *own_arguments]
        return ChildCommand(arguments=arguments, cwd=None, handed=None, logs=None)
    logs = _folder_for_logs()
    file = handover.to_file()
    return ChildCommand(
        arguments=[sys.executable, STARTER, str(file.fileno()), *program, *own_arguments],
        cwd=jobs.runtime("cwd"),
        handed=file,
        logs=logs,
    )


def _program() -> tuple[str, str]:
    """What this process runs: `("script", path)` or `("module", name)`."""
    import __main__  # at this moment: it is another module while a program is run by runpy

    spec = getattr(__main__, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return "module", spec.name
    # Python has made the path absolute when it started, while the working directory may have changed since
    path = getattr(__main__, "__file__", None) or sys.argv[0]
    if spec is not None:  # a folder with a __main__.py, which was run by its path
        path = os.path.dirname(path)
    if not os.path.exists(path):
        raise ConfigurationError(
            f"this program is neither a file nor a module (sys.argv[0] is {sys.argv[0]!r}), so that the"
            " child processes cannot run it again. Use strategy='custom_ddp_spawn', 'custom_ddp_fork' or"
            " 'custom_ddp_notebook', or put it into a file."
        )
    return "script", os.path.abspath(path)


def _folder_for_logs() -> Path | None:
    folder = jobs.runtime("output_dir")
    if folder is None:
        return None
    logs = Path(folder, _LOGS)
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the output of the ranks cannot be written to {logs}: {error}. Check hydra.run.dir (or"
            " hydra.sweep.dir), which has to be writable."
        ) from error
    return logs

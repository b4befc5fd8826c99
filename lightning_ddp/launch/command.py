"""Which command a child process runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightning_ddp._lightning import basic_subprocess_cmd, hydra_subprocess_cmd

__all__ = ["child_command"]


def child_command(local_rank: int) -> tuple[Sequence[str], str | None]:
    """The command line that re-runs this program as `local_rank`, and its working directory.

    A script is run by its path, a module by `-m`, with the arguments of this process. Inside a Hydra job the
    child runs in the original directory with the job's output directory.

    Returns:
        The arguments, and the working directory or None for this process's.
    """
    if _is_hydra_job():
        return hydra_subprocess_cmd(local_rank)
    return basic_subprocess_cmd(), None


def _is_hydra_job() -> bool:
    module = sys.modules.get("hydra.core.hydra_config")  # not imported: then the script does not use Hydra
    return module is not None and bool(module.HydraConfig.initialized())

"""``bench step --links``: the ranks' work of ``bench step`` between two network namespaces."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp.tools.bench.links import run_linked
from lightning_ddp.tools.bench.processes import PROGRESS_KEY, RankContext
from lightning_ddp.tools.bench.step_times import StepSettings, time_steps

__all__ = ["time_linked_steps"]

_NUM_STORE_USERS = 3  # two ranks and the process that watches them


@dataclass(frozen=True, kw_only=True)
class _LinkedSettings:
    steps: StepSettings
    progress: str
    """File of the store that counts the progress; in no namespace's network."""


def time_linked_steps(
    settings: StepSettings, *, mbit: float, timeout_s: float, on_progress: Callable[[int], object]
) -> list[Any]:
    """Run ``time_steps`` on two ranks that a link joins.

    Args:
        settings: What is measured.
        mbit: Speed of the link in Mbit/s, each way.
        timeout_s: Seconds after which the ranks are killed.
        on_progress: Called with the number of units of progress since its last call.

    Returns:
        One result per rank.

    Raises:
        BenchmarkError: If namespaces are not permitted, a rank fails, or the deadline passes.
    """
    with tempfile.TemporaryDirectory(prefix="lightning_ddp_progress_") as folder:
        path = str(Path(folder, "store"))
        store = dist.FileStore(path, _NUM_STORE_USERS)
        seen = 0

        def report_progress() -> None:
            nonlocal seen
            count = store.add(PROGRESS_KEY, 0)
            on_progress(count - seen)
            seen = count

        linked = _LinkedSettings(steps=settings, progress=path)
        return run_linked(_time_steps, linked, mbit, timeout_s, report_progress)


def _time_steps(rank: int, settings: _LinkedSettings) -> dict[str, dict[str, list[list[float]]]]:
    store = dist.FileStore(settings.progress, _NUM_STORE_USERS)
    context = RankContext(rank=rank, world_size=2, device=torch.device("cpu"), store=store)
    return time_steps(context, settings.steps)

"""Calibration for `bench scaling`: ranks record steps without communication, and time collectives alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp.comm.cost import TransferCost
from lightning_ddp.comm.group import Group
from lightning_ddp.tools.ranks import RankContext, shuffled
from lightning_ddp.tools.timeline import RecordSettings, record_steps

__all__ = ["CalibrationSettings", "LinkCost", "calibrate"]

_PROBE_BYTES = (4_096, 65_536, 262_144, 1_048_576, 4_194_304, 8_388_608)
_PROBE_BLOCK_BYTES = 2_097_152
_MOST_IN_BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """What `calibrate` measures."""

    models: tuple[str, ...]
    """Models of `lightning_ddp.tools.arguments.MODEL_NAMES`."""
    num_steps: int
    """Recorded steps."""
    num_probes: int
    """Rounds of collectives of each size."""
    folder: str
    """Where ranks leave a folder of recordings for each model."""


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """What a message between two ranks costs."""

    hop: TransferCost
    cpu_seconds_per_byte: float
    """CPU seconds of a rank for each byte of an all-reduce."""

    @classmethod
    def of(cls, probes: Sequence[Sequence[Sequence[float]]]) -> LinkCost:
        """Of all-reduces of two ranks: two messages in a row, each with half of the bytes.

        Args:
            probes: of each rank: bytes, seconds and CPU seconds of an all-reduce, one a size and round.
        """
        by_size: dict[float, list[Sequence[float]]] = {}
        for rows in probes:
            for row in rows:
                by_size.setdefault(row[0], []).append(row)
        line = TransferCost.fit(
            [(int(size), statistics.median(row[1] for row in by_size[size])) for size in sorted(by_size)]
        )
        largest = max(by_size)
        cpu_s = statistics.median(row[2] for row in by_size[largest])
        return cls(hop=replace(line, latency_s=line.latency_s / 2), cpu_seconds_per_byte=cpu_s / largest)


def calibrate(context: RankContext, settings: CalibrationSettings) -> dict[str, Any]:
    """Record each model without communication, then time collectives; all ranks.

    Returns:
        "shapes": model -> shapes of the parameters of each bucket; "probes": bytes, seconds and CPU seconds
        of an all-reduce, one entry a size and round.
    """
    shapes = {}
    for model in settings.models:
        folder = str(Path(settings.folder, model))
        recording = RecordSettings(
            model=model, folder=folder, num_steps=settings.num_steps, communicates=False
        )
        shapes[model] = record_steps(context, recording)
        context.advance()
    probes = [row for number in range(settings.num_probes) for row in _probe(context.device, number)]
    return {"shapes": shapes, "probes": probes}


def _probe(device: torch.device, seed: int) -> list[list[float]]:
    group = Group(dist.group.WORLD)
    rows = []
    for size in shuffled(_PROBE_BYTES, seed=seed):
        tensor = torch.zeros(size // 4, device=device)
        count = max(1, min(_MOST_IN_BLOCK, _PROBE_BLOCK_BYTES // size))
        dist.barrier()
        group.wait(group.all_reduce(tensor), device)  # spends what an idle link has saved up
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            group.wait(group.all_reduce(tensor), device)
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        rows.append([float(size), seconds / count, cpu_s / count])
    return rows

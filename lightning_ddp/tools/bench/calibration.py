"""What ranks measure for `bench scaling`: steps without communication, hooks alone, collectives alone."""

from __future__ import annotations

import pickle
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp.comm.channel import Channel
from lightning_ddp.comm.cost import TransferCost
from lightning_ddp.comm.group import Group
from lightning_ddp.comm.wire import PlainWire
from lightning_ddp.hooks.allreduce import NoOp
from lightning_ddp.hooks.base import HookOptions, Part
from lightning_ddp.observe.recording import Recording, load_folder, save
from lightning_ddp.tools.contenders import OURS, TrainingRun
from lightning_ddp.tools.models import build_workload
from lightning_ddp.tools.perf_model import HookModel, HookTracer, StepProfile, merge_traces
from lightning_ddp.tools.perf_model.profile import Shapes
from lightning_ddp.tools.ranks import RankContext, shuffled

__all__ = ["CalibrationSettings", "LinkCost", "ModelFigures", "calibrate", "load_figures"]

_NUM_WARMUP_STEPS = 5
_PROBE_BYTES = (4_096, 65_536, 262_144, 1_048_576, 4_194_304, 8_388_608)
_PROBE_BLOCK_BYTES = 2_097_152
_MOST_IN_BLOCK = 16
_TRACES = "traces{}.pickle"


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """What `calibrate` measures."""

    models: tuple[str, ...]
    """Models of `lightning_ddp.tools.arguments.MODEL_NAMES`."""
    hooks: Mapping[str, Any]
    """Name -> specification of a hook to be traced with the buckets of each model."""
    num_steps: int
    """Recorded steps, and runs of each hook."""
    num_probes: int
    """Rounds of collectives of each size."""
    folder: str
    """Where ranks leave what they found: a folder of recordings a model, and the hooks."""


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """What was found out about a model without communication."""

    profile: StepProfile
    buckets: tuple[Shapes, ...]
    """Shapes of the parameters of each bucket."""
    hooks: Mapping[str, HookModel]


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
        hop = TransferCost(latency_s=line.latency_s / 2, seconds_per_byte=line.seconds_per_byte)
        return cls(hop=hop, cpu_seconds_per_byte=cpu_s / largest)


class _Look(NoOp):
    """Communicates nothing, and keeps the shapes of each bucket."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel, PlainWire(channel), HookOptions())
        self.shapes: dict[int, Shapes] = {}

    def run(self, part: Part) -> torch.Tensor:
        """Notes the shapes and returns the bucket as it is."""
        self.shapes[part.index] = part.shapes
        return part.buffer


def calibrate(context: RankContext, settings: CalibrationSettings) -> dict[str, Any]:
    """Record each model without communication, trace hooks, time collectives; all ranks.

    Returns:
        "probes", and "rests": seconds of each model's step outside of what is recorded.
    """
    rests = {}
    for model in settings.models:
        folder = Path(settings.folder, model)
        rests[model], buckets = _record(context, model, settings.num_steps, folder)
        tracers = {
            name: HookTracer(spec, buckets, device=context.device) for name, spec in settings.hooks.items()
        }
        for _ in range(_NUM_WARMUP_STEPS + settings.num_steps):
            for tracer in tracers.values():
                dist.barrier()
                tracer.run()
        traces = {name: tracer.trace() for name, tracer in tracers.items()}
        (folder / _TRACES.format(context.rank)).write_bytes(pickle.dumps((buckets, traces)))
        context.advance()
    probes = [row for number in range(settings.num_probes) for row in _probe(context.device, number)]
    return {"rests": rests, "probes": probes}


def _record(
    context: RankContext, model: str, num_steps: int, folder: Path
) -> tuple[float, tuple[Shapes, ...]]:
    """Trains without communication and leaves a recording.

    Returns:
        Seconds from the end of backward to the next forward, and the shapes of each bucket's parameters.
    """
    training = TrainingRun(OURS, build_workload(model, rank=context.rank), context.device)
    wrapped: Any = training.wrapped
    look = _Look(Channel(Group(dist.group.WORLD), context.device))
    wrapped.register_comm_hook(None, look)
    recorder = wrapped.record_steps(num_steps)
    seconds = [context.timed(training.step) for _ in range(_NUM_WARMUP_STEPS + num_steps)]
    steps = list(recorder.records)
    size = context.world_size
    save(folder, Recording(rank=context.rank, world_size=size, host=socket.gethostname(), steps=steps))
    rests = [
        whole - (max(record.backward_end, *(b.ready for b in record.buckets)) - record.forward_start) / 1e9
        for whole, record in zip(seconds[-len(steps) :], steps, strict=True)
    ]
    return max(0.0, statistics.median(rests)), tuple(shapes for _, shapes in sorted(look.shapes.items()))


def load_figures(folder: Path, model: str, rests: Sequence[Mapping[str, float]]) -> ModelFigures:
    """Read what ranks have left about a model.

    Args:
        folder: of the calibration.
        model: its name.
        rests: what each rank returned.
    """
    rest_s = max(of_rank[model] for of_rank in rests)
    profile = StepProfile.from_recordings(load_folder(folder / model), rest_s)
    left = [pickle.loads((folder / model / _TRACES.format(rank)).read_bytes()) for rank in range(len(rests))]
    hooks = {name: merge_traces([traces[name] for _, traces in left]) for name in left[0][1]}
    return ModelFigures(profile=profile, buckets=left[0][0], hooks=hooks)


def _probe(device: torch.device, seed: int) -> list[list[float]]:
    """Bytes, seconds and CPU seconds of an all-reduce, one entry a size; communicates."""
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

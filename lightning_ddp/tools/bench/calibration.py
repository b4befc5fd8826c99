"""What ranks measure for ``bench scaling``: steps without communication, hooks alone, collectives alone."""

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

from lightning_ddp import BucketedDDP
from lightning_ddp.comm.channel import Channel
from lightning_ddp.comm.cost import TransferCost
from lightning_ddp.comm.group import Group
from lightning_ddp.comm.wire import PlainWire
from lightning_ddp.hooks.allreduce import NoOp
from lightning_ddp.hooks.base import HookOptions, Part
from lightning_ddp.observe.recording import Recording, load_folder, save
from lightning_ddp.tools.bench.models import build_workload, compute_loss
from lightning_ddp.tools.bench.processes import RankContext
from lightning_ddp.tools.bench.traffic import Contender
from lightning_ddp.tools.bench.workers import shuffled
from lightning_ddp.tools.perf_model import HookModel, HookTracer, StepProfile, merge_traces
from lightning_ddp.tools.perf_model.profile import Shapes

__all__ = [
    "CalibrationSettings",
    "LinkRunSettings",
    "Measured",
    "ModelFigures",
    "Subject",
    "calibrate",
    "load_figures",
    "run_on_link",
]

_NUM_WARMUP_STEPS = 5
_PROBE_BYTES = (4_096, 65_536, 262_144, 1_048_576, 4_194_304, 8_388_608)
_PROBE_BLOCK_BYTES = 2_097_152
_MOST_IN_BLOCK = 16
_BURSTS = 2
_TRACES = "traces{}.pickle"


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """What ``calibrate`` measures."""

    models: tuple[str, ...]
    """Models of `lightning_ddp.tools.bench.arguments.MODEL_NAMES`."""
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
class Measured:
    """What collectives between two ranks cost."""

    hop: TransferCost
    cpu_seconds_per_byte: float
    """CPU seconds of a rank for each byte of an all-reduce."""

    @classmethod
    def of(cls, probes: Sequence[Sequence[Sequence[float]]], burst_bytes: float = 0.0) -> Measured:
        """Of all-reduces of two ranks: two messages in a row, each with half of the bytes.

        A link that saves up while idle does so during a latency, too, and makes up for it: there the smallest
        size tells the latency, and those of several bursts tell the speed without it.

        Args:
            probes: of each rank: bytes, seconds and CPU seconds of an all-reduce, one a size and round.
            burst_bytes: what the link saves up.
        """
        by_size: dict[float, list[Sequence[float]]] = {}
        for rows in probes:
            for row in rows:
                by_size.setdefault(row[0], []).append(row)
        largest = max(by_size)
        samples = [
            (int(size), statistics.median(row[1] for row in by_size[size])) for size in sorted(by_size)
        ]
        if burst_bytes:
            slopes = [seconds / size for size, seconds in samples if size >= _BURSTS * burst_bytes]
            line = TransferCost(latency_s=samples[0][1], seconds_per_byte=statistics.median(slopes))
        else:
            line = TransferCost.fit(samples)
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


class Subject:
    """A model that is trained without communication, and recorded.

    All ranks make it together.

    Args:
        rank: of this process.
        device: where it is trained.
        model: one of `lightning_ddp.tools.bench.arguments.MODEL_NAMES`.
        num_steps: steps that are kept.
    """

    def __init__(self, rank: int, device: torch.device, model: str, num_steps: int) -> None:
        workload = build_workload(model, rank=rank)
        device_ids = [device.index] if device.type == "cuda" else None
        self._wrapped = BucketedDDP(workload.module.to(device), device_ids=device_ids)
        self._look = _Look(Channel(Group(dist.group.WORLD), device))
        self._wrapped.register_comm_hook(None, self._look)
        self._optimizer = torch.optim.SGD(self._wrapped.parameters(), lr=1e-6)
        self._batch = workload.batch.to(device)
        self._device = device
        self._recorder = self._wrapped.record_steps(num_steps)
        self._seconds: list[float] = []

    def step(self) -> None:
        """One step, all ranks at once."""
        dist.barrier()
        _synchronize(self._device)
        start = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        compute_loss(self._wrapped(self._batch)).backward()
        self._optimizer.step()
        _synchronize(self._device)
        self._seconds.append(time.perf_counter() - start)

    @property
    def buckets(self) -> tuple[Shapes, ...]:
        """Shapes of the parameters of each bucket, once there was a second step."""
        return tuple(shapes for _, shapes in sorted(self._look.shapes.items()))

    def save(self, folder: Path, every: int = 1) -> float:
        """Leaves the recording of this rank; returns the seconds of a step that are not in it.

        These are what lies between the end of backward and the next forward. Of `every` steps only the last
        counts: the ones before it warm the caches.
        """
        records = list(self._recorder.records)[every - 1 :: every]
        wholes = self._seconds[-len(self._recorder.records) :][every - 1 :: every]
        save(
            folder,
            Recording(
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                host=socket.gethostname(),
                steps=records,
            ),
        )
        rests = [
            whole
            - (max(record.backward_end, *(b.ready for b in record.buckets)) - record.forward_start) / 1e9
            for whole, record in zip(wholes, records, strict=True)
        ]
        return max(0.0, float(statistics.median(rests)))


def calibrate(context: RankContext, settings: CalibrationSettings) -> dict[str, Any]:
    """Record each model without communication, trace hooks, time collectives; all ranks.

    Returns:
        The probes, and seconds of each model's step outside of what is recorded.
    """
    folder = Path(settings.folder)
    rests = {}
    for model in settings.models:
        subject = Subject(context.rank, context.device, model, settings.num_steps)
        for _ in range(_NUM_WARMUP_STEPS + settings.num_steps):
            subject.step()
        rests[model] = subject.save(folder / model)
        tracers = {
            name: HookTracer(spec, subject.buckets, device=context.device)
            for name, spec in settings.hooks.items()
        }
        for _ in range(_NUM_WARMUP_STEPS + settings.num_steps):
            for tracer in tracers.values():
                dist.barrier()
                tracer.run()
        _leave_traces(folder / model, context.rank, subject, tracers)
        context.advance()
    probes = [row for number in range(settings.num_probes) for row in _probe(context.device, number)]
    return {"rests": rests, "probes": probes}


def load_figures(folder: Path, model: str, rests: Sequence[Mapping[str, float]]) -> ModelFigures:
    """What ranks have left about a model.

    Args:
        folder: of the calibration.
        model: its name.
        rests: what each rank returned.
    """
    rest_s = max(of_rank[model] for of_rank in rests)
    profile = StepProfile.from_recordings(load_folder(folder / model), rest_s)
    left = [pickle.loads((folder / model / _TRACES.format(rank)).read_bytes()) for rank in range(len(rests))]
    buckets = left[0][0]
    hooks = {name: merge_traces([traces[name] for _, traces in left]) for name in left[0][1]}
    return ModelFigures(profile=profile, buckets=buckets, hooks=hooks)


def _leave_traces(folder: Path, rank: int, subject: Subject, tracers: Mapping[str, HookTracer]) -> None:
    traces = {name: tracer.trace() for name, tracer in tracers.items()}
    (folder / _TRACES.format(rank)).write_bytes(pickle.dumps((subject.buckets, traces)))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


@dataclass(frozen=True, kw_only=True)
class LinkRunSettings:
    """What ``run_on_link`` measures."""

    cases: tuple[tuple[str, str, Any], ...]
    """Model, name and specification of a hook (None for the reducer without one)."""
    num_rounds: int
    """Timed steps of each."""
    num_probes: int
    """Rounds in which collectives of each size are timed as well."""
    folder: str
    """As in `CalibrationSettings`."""


def run_on_link(rank: int, settings: LinkRunSettings) -> dict[str, Any]:
    """Times steps of all cases, in turns with all that their prediction rests on; both ranks.

    That is: steps of the models without communication, each hook alone without link and backward, and
    collectives alone. So a slow minute of the machine is in both, and no step that communicates is in the
    prediction.

    Returns:
        As `calibrate`, and seconds of each case's steps.
    """
    cpu = torch.device("cpu")
    models = list(dict.fromkeys(model for model, _, _ in settings.cases))
    subjects = {model: Subject(rank, cpu, model, 2 * settings.num_rounds) for model in models}
    runs = [Contender(name, model, spec, rank) for model, name, spec in settings.cases]
    for step in (*(s.step for s in subjects.values()), *(run.step for run in runs)):
        for _ in range(_NUM_WARMUP_STEPS):
            step()
    tracers = {
        (model, name): HookTracer(spec, subjects[model].buckets, nums_ranks=(2,))
        for model, name, spec in settings.cases
        if spec is not None
    }
    seconds: list[list[float]] = [[] for _ in runs]
    probes: list[list[float]] = []
    jobs: list[tuple[str, Any]] = [("run", index) for index in range(len(runs))]
    jobs += [("subject", subject) for subject in subjects.values()]
    jobs += [("tracer", tracer) for tracer in tracers.values()]
    for number in range(settings.num_rounds):
        if number * settings.num_probes // settings.num_rounds != (number - 1) * settings.num_probes // (
            settings.num_rounds
        ):
            probes += _probe(cpu, number)
        for kind, what in shuffled(jobs, seed=number):
            dist.barrier()
            if kind == "run":
                runs[what].step()  # wakes the connections, whose windows shrink while others have their turn
                dist.barrier()
                start = time.perf_counter()
                runs[what].step()
                seconds[what].append(time.perf_counter() - start)
            elif kind == "subject":
                what.step()
                what.step()
            else:
                what.run()
    folder = Path(settings.folder)
    rests = {model: subject.save(folder / model, every=2) for model, subject in subjects.items()}
    for model, subject in subjects.items():
        mine = {name: tracer for (of, name), tracer in tracers.items() if of == model}
        _leave_traces(folder / model, rank, subject, mine)
    return {"rests": rests, "probes": probes, "seconds": seconds}

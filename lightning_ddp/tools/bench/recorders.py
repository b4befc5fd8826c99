"""What each spawned rank does for ``timeline``: trains one of the models and keeps a record of its steps."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_ddp import BucketedDDP
from lightning_ddp.observe.recording import Recording, save
from lightning_ddp.tools.bench.models import build_workload, compute_loss
from lightning_ddp.tools.bench.processes import RankContext

_NUM_WARMUP_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """What ``record_steps`` trains."""

    model: str
    """One of `lightning_ddp.tools.bench.arguments.MODEL_NAMES`."""
    folder: str
    """Where each rank leaves its file."""
    num_steps: int
    """Steps that are kept."""


def record_steps(context: RankContext, settings: RecordSettings) -> None:
    """Train, and write the last steps of this rank; all ranks, communicates."""
    workload = build_workload(settings.model, rank=context.rank)
    device_ids = [context.device.index] if context.device.type == "cuda" else None
    model = BucketedDDP(workload.module.to(context.device), device_ids=device_ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = workload.batch.to(context.device)
    recorder = model.record_steps(settings.num_steps)
    for _ in range(_NUM_WARMUP_STEPS + settings.num_steps):
        optimizer.zero_grad(set_to_none=True)
        compute_loss(model(batch)).backward()
        optimizer.step()
        context.synchronize()  # on CUDA a step is kept once the device has finished it
    recording = Recording(
        rank=context.rank,
        world_size=dist.get_world_size(),
        host=socket.gethostname(),
        steps=list(recorder.records),
    )
    save(Path(settings.folder), recording)

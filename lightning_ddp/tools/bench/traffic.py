"""What each rank does for ``bench hooks``: times steps on a link, and trains to compare what is learned."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp import BucketedDDP
from lightning_ddp.comm.group import Group
from lightning_ddp.communication.wiring import Communication
from lightning_ddp.tools.bench.arguments import TORCH_DEFAULT
from lightning_ddp.tools.bench.links import read_sent_bytes
from lightning_ddp.tools.bench.models import build_workload, compute_loss
from lightning_ddp.tools.bench.processes import RankContext
from lightning_ddp.tools.bench.tasks import make_task
from lightning_ddp.tools.bench.workers import shuffled

__all__ = ["Contender", "LearningSettings", "LinkSettings", "time_on_link", "train_tasks"]

_CPU = torch.device("cpu")
_NUM_WARMUP_STEPS = 3  # buckets are rebuilt after the first, and low-rank factors settle


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """What ``time_on_link`` measures."""

    model: str
    """A model of `lightning_ddp.tools.bench.arguments.MODEL_NAMES`."""
    hooks: dict[str, Any]
    """Contender -> specification of a hook; None for the reducer without one."""
    num_rounds: int
    """Timed steps of each contender; they take turns."""


@dataclass(frozen=True, kw_only=True)
class LearningSettings:
    """What ``train_tasks`` trains."""

    contenders: dict[str, dict[str, dict[str, Any]]]
    """Task -> contender -> arguments of `Communication`."""
    num_steps: dict[str, int]
    """Task -> optimizer steps."""
    seeds: tuple[int, ...]
    """One training run each."""


class Contender:
    """A wrapped copy of a model, and what its hook counts."""

    def __init__(self, name: str, model: str, hook: Any, rank: int) -> None:
        workload = build_workload(model, rank=rank)
        self._batch = workload.batch
        self._communication = Communication(hook)
        if name == TORCH_DEFAULT:
            self._wrapped: nn.Module = DistributedDataParallel(workload.module)
        else:
            self._wrapped = BucketedDDP(workload.module)
            self._communication.register(
                self._wrapped, Group(dist.group.WORLD), _CPU, node_size=1, loss_scale=lambda: 1.0
            )
        self._optimizer = torch.optim.SGD(self._wrapped.parameters(), lr=1e-6)

    def step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        compute_loss(self._wrapped(self._batch)).backward()
        self._optimizer.step()

    def counts(self) -> tuple[int, float]:
        """Bytes that the hook has sent by its own count, and seconds of its encoding and decoding."""
        hook = self._communication.hook
        if hook is None:
            return 0, 0.0
        return hook.channel.num_bytes_sent, hook.channel.busy_s - hook.channel.wait_s


def time_on_link(rank: int, settings: LinkSettings) -> dict[str, list[dict[str, float]]]:
    """Times steps of all contenders, which take turns. Both ranks call it; communicates.

    Returns:
        Contender -> one entry a round: seconds, bytes by the kernel's and by the hook's count, codec seconds.
    """
    runs = {name: Contender(name, settings.model, hook, rank) for name, hook in settings.hooks.items()}
    for run in runs.values():
        for _ in range(_NUM_WARMUP_STEPS):
            run.step()
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for number in range(settings.num_rounds):
        for name in shuffled(list(runs), seed=number):
            dist.barrier()
            kernel, (counted, codec), start = read_sent_bytes(), runs[name].counts(), time.perf_counter()
            runs[name].step()
            seconds = time.perf_counter() - start
            after, codec_after = runs[name].counts()
            dist.barrier()  # a peer that is through has received all that is counted here
            rows[name].append(
                {
                    "seconds": seconds,
                    "kernel_bytes": read_sent_bytes() - kernel,
                    "counted_bytes": after - counted,
                    "codec_seconds": codec_after - codec,
                }
            )
    return rows


def train_tasks(
    context: RankContext, settings: LearningSettings
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Trains every contender on every task with every seed. All ranks call it; communicates.

    Returns:
        Task -> contender -> one entry a seed: score and bytes a step.
    """
    return {
        task: {
            name: [_train(context, task, num_steps, arguments, seed) for seed in settings.seeds]
            for name, arguments in settings.contenders[task].items()
        }
        for task, num_steps in settings.num_steps.items()
    }


def _train(
    context: RankContext, name: str, num_steps: int, arguments: dict[str, Any], seed: int
) -> dict[str, float]:
    group = Group(dist.group.WORLD)
    task = make_task(name, rank=context.rank, world_size=group.size, seed=seed)
    model = BucketedDDP(task.module)
    communication = Communication(**arguments)
    communication.register(model, group, _CPU, node_size=1, loss_scale=lambda: 1.0)
    optimizer = task.make_optimizer(communication.momentum)
    communication.start(task.module, [optimizer], group)
    num_local = 0
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = task.learning_rate * _decay(step, num_steps)
        optimizer.zero_grad()
        num_local += not communication.averages_gradients
        task.loss(model, task.next_batch()).backward()
        if task.max_norm < math.inf:
            torch.nn.utils.clip_grad_norm_(task.module.parameters(), task.max_norm)
        optimizer.step()
        communication.after_step(optimizer, was_skipped=False)
    communication.agree()
    numel = sum(p.numel() for p in task.module.parameters())
    full = 2 * (group.size - 1) / group.size * 4 * numel
    sent = 0.0
    if communication.hook is not None:
        sent += communication.hook.channel.num_bytes_sent
    elif communication.averager is not None:
        sent += full * (num_steps - num_local)  # the reducer's own all-reduces before the local phase
    if communication.averager is not None:
        sent += communication.averager.num_bytes_sent
    context.advance()
    return {"score": task.score(task.module), "bytes": sent / num_steps, "part": sent / num_steps / full}


def _decay(step: int, num_steps: int) -> float:
    """A rise over the first twentieth, then half a cosine down to zero."""
    warmup = num_steps / 20
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (num_steps - warmup)))

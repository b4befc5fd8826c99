"""Joint measurements of ranks: they exchange their facts and time an all-reduce."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp._torch import new_gloo
from lightning_ddp.comm.nccl import connect, memory_problem
from lightning_ddp.tools.doctor.machine import gather_facts
from lightning_ddp.tools.ranks import synchronize

_NUM_WARM_UPS = 3  # connections and memory
_NUM_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of the measurement of an all-reduce, the same on all ranks."""

    num_bytes: int
    """Size of the all-reduce."""
    timeout_s: float
    """Time limit of each network step in seconds."""
    interface: str | None
    """Interface for gloo; None for gloo's choice."""


def examine(
    store: Any, plan: Plan, env: Mapping[str, str], *, rank: int, local_rank: int, world_size: int
) -> dict[str, Any]:
    """Return this rank's facts, with the time of an all-reduce, as JSON values.

    Collective: all ranks must call it.
    """
    answer = gather_facts(env, rank=rank, local_rank=local_rank)
    limit = timedelta(seconds=plan.timeout_s)
    gloo = dist.ProcessGroupGloo
    where = gloo.create_device(interface=plan.interface) if plan.interface else gloo.create_default_device()
    control = new_gloo(dist.PrefixStore("gloo", store), rank, world_size, [where], limit)
    device, group = torch.device("cpu"), control
    # Alone in NCCL a rank would wait for the others.
    has_device = torch.tensor([answer["backend"] == "nccl" and local_rank < len(answer["devices"])]).int()
    _all_reduce(control, has_device, limit, dist.ReduceOp.MIN)
    if has_device.item():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        group = connect(dist.PrefixStore("nccl", store), rank, world_size, limit, device)
        answer["bucket_memory"] = memory_problem(group, device)
    tensor = torch.zeros(max(1, plan.num_bytes // 4), device=device)
    seconds = [_all_reduce(group, tensor, limit) for _ in range(_NUM_WARM_UPS + _NUM_REPEATS)]
    slowest = torch.tensor([statistics.median(seconds[_NUM_WARM_UPS:])], dtype=torch.float64)
    _all_reduce(control, slowest, limit, dist.ReduceOp.MAX)
    return {
        **answer,
        "interface": plan.interface,
        "measured_on": "gloo" if group is control else "nccl",
        "all_reduce": {"num_bytes": 4 * tensor.numel(), "seconds": slowest.item()},
    }


def _all_reduce(
    group: Any, tensor: torch.Tensor, limit: timedelta, operation: Any = dist.ReduceOp.SUM
) -> float:
    """All-reduce a tensor; return the seconds until the result is available."""
    options = dist.AllreduceOptions()
    options.reduceOp = operation
    synchronize(tensor.device)
    start = time.perf_counter()
    group.allreduce([tensor], options).wait(limit)
    synchronize(tensor.device)
    return time.perf_counter() - start


def exchange(
    store: Any, answer: dict[str, Any], *, rank: int, world_size: int, timeout_s: float
) -> list[Any]:
    """Exchange answers by a store; return all ranks'. Rank 0, which may host the store, returns last.

    Collective: all ranks must call it.
    """
    limit = timedelta(seconds=timeout_s)
    store.set(f"answer/{rank}", json.dumps(answer))
    store.wait([f"answer/{other}" for other in range(world_size)], limit)
    answers = [json.loads(store.get(f"answer/{other}")) for other in range(world_size)]
    store.set(f"read/{rank}", "")
    if rank == 0:
        store.wait([f"read/{other}" for other in range(world_size)], limit)
    return answers

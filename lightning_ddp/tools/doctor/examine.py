"""Examination by all ranks: they exchange facts, compare clocks and time all-reduces."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp._torch import new_gloo, new_nccl
from lightning_ddp.tools.doctor.facts import gather_facts
from lightning_ddp.tools.doctor.measure import all_have, all_reduce_sizes, clock_offsets, time_all_reduce

__all__ = ["Plan", "examine", "exchange"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every rank is told."""

    largest_bytes: int
    """Of the all-reduces."""
    timeout_s: float
    """Of every single step on the network."""
    interface: str | None
    """For gloo; None for its own choice."""


def examine(
    store: Any,
    plan: Plan,
    env: Mapping[str, str],
    *,
    rank: int,
    local_rank: int,
    world_size: int,
    advance: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """This rank's facts, clock and times, as JSON values. All ranks call it.

    Raises:
        RuntimeError: the ranks do not find each other, or a step did not end in time.
    """
    answer = gather_facts(env, rank=rank, local_rank=local_rank)
    control = _gloo(store, plan, rank, world_size)
    offset, error = clock_offsets(control, rank, world_size, timeout_s=plan.timeout_s)
    answer["clock"] = {"offset_s": offset, "error_s": error}
    answer["interface"] = plan.interface
    device, group = torch.device("cpu"), control
    has_device = answer["backend"] == "nccl" and local_rank < len(answer["devices"])
    if all_have(control, has_device, timeout_s=plan.timeout_s):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        group = _nccl(store, plan, rank, world_size)
    sizes = all_reduce_sizes(plan.largest_bytes)
    timings = time_all_reduce(group, sizes, device=device, timeout_s=plan.timeout_s, advance=advance)
    answer["measured_on"] = "nccl" if group is not control else "gloo"
    answer["timings"] = [asdict(timing) for timing in timings]
    return answer


def exchange(
    store: Any, answer: dict[str, Any], *, rank: int, world_size: int, timeout_s: float
) -> list[Any]:
    """The answers of all ranks. All call it; rank 0, which may host the store, returns last.

    Raises:
        RuntimeError: a rank did not answer in time.
    """
    limit = timedelta(seconds=timeout_s)
    store.set(f"answer/{rank}", json.dumps(answer))
    store.wait([f"answer/{other}" for other in range(world_size)], limit)
    answers = [json.loads(store.get(f"answer/{other}")) for other in range(world_size)]
    store.set(f"read/{rank}", "")
    if rank == 0:
        store.wait([f"read/{other}" for other in range(world_size)], limit)
    return answers


def _gloo(store: Any, plan: Plan, rank: int, world_size: int) -> Any:
    if plan.interface is not None:
        device = dist.ProcessGroupGloo.create_device(interface=plan.interface)
    else:
        device = dist.ProcessGroupGloo.create_default_device()
    limit = timedelta(seconds=plan.timeout_s)
    return new_gloo(dist.PrefixStore("gloo", store), rank, world_size, [device], limit)


def _nccl(store: Any, plan: Plan, rank: int, world_size: int) -> Any:
    limit = timedelta(seconds=plan.timeout_s)
    return new_nccl(dist.PrefixStore("nccl", store), rank, world_size, limit)

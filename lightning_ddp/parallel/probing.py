"""What the transport of gradients costs, found out by using it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp.comm.cost import TransferCost
from lightning_ddp.comm.group import Group
from lightning_ddp.parallel.buckets import MIB

__all__ = ["TransportCost", "agree_on_max", "measure_transport"]

_SIZES_BYTES = (4 * 1024, 64 * 1024, MIB, 8 * MIB)
_LONG_S = 0.02
_NUM_PROBES = {True: 7, False: 3}  # of a size that is small; and of one that is not


@dataclass(frozen=True, kw_only=True)
class TransportCost:
    """What reducing a bucket costs, on the slowest rank."""

    transfer: TransferCost
    """From the launch until it is reduced."""
    launch_s: float
    """Seconds of that for which the thread that launches is busy."""


def agree_on_max(group: Group, values: list[float]) -> list[float]:
    """The greatest of each value over the ranks. All ranks call it; communicates. CPU ranks only."""
    tensor = torch.tensor(values, dtype=torch.float64)
    group.wait(group.all_reduce(tensor, dist.ReduceOp.MAX, label="measured times"), tensor.device)
    return [float(value) for value in tensor.tolist()]


def measure_transport(
    group: Group,
    start_sum: Callable[[torch.Tensor, str], Any],
    memory: torch.Tensor,
    clock: Callable[[], float],
) -> TransportCost:
    """Times sums of several sizes, up to one that takes 20 ms. All ranks call it; communicates.

    Args:
        group: the ranks.
        start_sum: starts the sum of a part of `memory` over the ranks, as that of a bucket; returns its work.
        memory: 1-D, on the CPU, of the same size on all ranks; its values are put back.
        clock: seconds.
    """
    sizes = [size for size in _SIZES_BYTES if size <= memory.numel() * memory.element_size()]
    samples, launches = [], []
    for size in sizes or [memory.numel() * memory.element_size()]:
        part = memory[: max(1, size // memory.element_size())]
        kept = part.clone()
        part.zero_()  # else the sums grow until they overflow
        num_probes = _NUM_PROBES[size < MIB]
        probes = [_probe(group, start_sum, part, clock) for _ in range(1 + num_probes)][1:]
        part.copy_(kept)
        launch_s, seconds = (statistics.median(times) for times in zip(*probes, strict=True))
        launch_s, seconds = agree_on_max(group, [launch_s, seconds])
        launches.append(launch_s)
        samples.append((size, max(seconds, 1e-9)))
        if seconds > _LONG_S:
            break
    return TransportCost(transfer=TransferCost.fit(samples), launch_s=min(launches))


def _probe(
    group: Group,
    start_sum: Callable[[torch.Tensor, str], Any],
    part: torch.Tensor,
    clock: Callable[[], float],
) -> tuple[float, float]:
    """Seconds to start one sum, and until it is there."""
    start_s = clock()
    work = start_sum(part, f"probe of {part.numel()} elements")
    launched_s = clock()
    group.wait(work, part.device)
    return launched_s - start_s, clock() - start_s

"""What each spawned rank does for ``bench memory`` and ``bench allreduce``."""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_ddp.comm.group import Group
from lightning_ddp.comm.hosts import find_hosts
from lightning_ddp.comm.shared_memory import SharedMemory
from lightning_ddp.comm.works import Worker
from lightning_ddp.tools.bench.arguments import GLOO, SHARED
from lightning_ddp.tools.bench.contenders import TrainingRun
from lightning_ddp.tools.bench.models import build_workload
from lightning_ddp.tools.bench.processes import RankContext

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, kw_only=True)
class AllReduceSettings:
    """What ``time_all_reduces`` measures."""

    sizes_kib: tuple[int, ...]
    """Sizes of the float32 tensor in KiB."""

    num_rounds: int
    """Rounds per size."""


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """What ``measure_memory`` measures."""

    model: str
    """The model to train."""

    contender: str
    """What wraps it."""

    num_steps: int
    """Training steps before the peak is read."""


def measure_memory(context: RankContext, settings: MemorySettings) -> dict[str, int]:
    """Train for some steps and read the process's peak of memory; all ranks, communicates.

    The peak belongs to the whole life of the process, so each call needs a fresh one.

    Returns:
        ``peak_bytes`` and ``growth_bytes``, the latter over what was in use just before wrapping.
    """
    workload = build_workload(settings.model, rank=context.rank)
    workload.module.to(context.device)
    dist.barrier()  # connections and their buffers exist before the first reading
    before = _memory_bytes(context.device).current
    run = TrainingRun(settings.contender, workload, context.device)
    for _ in range(settings.num_steps):
        run.step()
    context.synchronize()
    dist.barrier()  # what ranks share is in use by all of them
    peak = _memory_bytes(context.device).peak
    if context.device.type == "cpu":
        peak -= _shared_with_others_bytes()
    dist.barrier()
    return {"peak_bytes": peak, "growth_bytes": peak - before}


def time_all_reduces(context: RankContext, settings: AllReduceSettings) -> dict[str, dict[str, list[float]]]:
    """Time all-reduces over gloo and over shared memory, interleaved; all ranks, communicates.

    Returns:
        Size in KiB -> contender -> seconds of one all-reduce on this rank, by round.

    Raises:
        RuntimeError: If shared memory cannot be used here, or a sum is wrong.
    """
    group = Group(dist.group.WORLD, transport="shared_memory")
    hosts = find_hosts(group, context.device)
    if hosts is None:
        raise RuntimeError("one rank alone has nothing to reduce: ask for a larger --world-size")
    memory, worker = SharedMemory(group, hosts), Worker()
    largest = max(settings.sizes_kib) * 256
    tensors = {SHARED: memory.zeros(largest, torch.float32), GLOO: torch.zeros(largest)}
    memory.connect()
    seconds: dict[str, dict[str, list[float]]] = {}
    for size in settings.sizes_kib:
        parts = {name: tensor[: size * 256] for name, tensor in tensors.items()}
        starts = {
            SHARED: lambda part=parts[SHARED]: worker.submit(lambda: memory.all_reduce(part)),
            GLOO: lambda part=parts[GLOO]: group.all_reduce(part),
        }
        rounds = seconds[str(size)] = {name: [] for name in parts}
        for round_index in range(settings.num_rounds):
            for name in shuffled(list(parts), seed=round_index):
                rounds[name].append(_time_all_reduce(group, starts[name], parts[name], context.rank, size))
            context.advance()
    return seconds


def _time_all_reduce(
    group: Group, start: Callable[[], Any], tensor: torch.Tensor, rank: int, size_kib: int
) -> float:
    """Seconds of one of a few all-reduces in a row."""
    count = max(1, min(16, 4096 // size_kib))
    tensor.fill_(rank + 1)
    dist.barrier()
    begun_at = time.perf_counter()
    for _ in range(count):
        group.wait(start(), tensor.device)
    seconds = (time.perf_counter() - begun_at) / count
    expected = group.size * (group.size + 1) / 2 * group.size ** (count - 1)
    if not bool((tensor == expected).all()):
        raise RuntimeError(f"the sum of {tensor.numel()} elements is {tensor[0]}, expected {expected}")
    return seconds


def shuffled(names: Sequence[ItemT], *, seed: int) -> list[ItemT]:
    """Return the items in an order that depends on the seed alone, hence is the same on all ranks."""
    return random.Random(seed).sample(names, k=len(names))


@dataclass(frozen=True, kw_only=True)
class _Memory:
    current: int
    peak: int


def _memory_bytes(device: torch.device) -> _Memory:
    if device.type == "cuda":
        return _Memory(
            current=torch.cuda.memory_allocated(device), peak=torch.cuda.max_memory_allocated(device)
        )
    if sys.platform == "linux":
        # Not ru_maxrss: Linux carries it over exec, so a child starts from its parent's size at the fork.
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return _Memory(
            current=int(fields["VmRSS"].split()[0]) * 1024, peak=int(fields["VmHWM"].split()[0]) * 1024
        )
    peak = resource.getrusage(
        resource.RUSAGE_SELF
    ).ru_maxrss  # bytes on macOS, which has no cheap current size
    return _Memory(current=peak, peak=peak)


def _shared_with_others_bytes() -> int:
    """The part of this process's shared memory that is the others': each page is split among its users."""
    resident_kib, own_kib = 0, 0
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return 0  # not Linux, where ranks share nothing
    is_shared = False
    for line in lines:
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):  # "7f3c...-7f3d... rw-s 00000000 00:01 7 /memfd:..."
            is_shared = rest.startswith("rw-s")
        elif is_shared and name == "Rss:":
            resident_kib += int(rest.split()[0])
        elif is_shared and name == "Pss:":
            own_kib += int(rest.split()[0])
    return (resident_kib - own_kib) * 1024

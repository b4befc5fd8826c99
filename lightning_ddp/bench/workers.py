"""What each spawned rank does for ``bench step``, ``bench memory`` and ``bench allreduce``."""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_ddp.bench.arguments import GLOO, SHARED, TORCH_DEFAULT
from lightning_ddp.bench.contenders import TrainingRun
from lightning_ddp.bench.models import build_workload
from lightning_ddp.bench.processes import RankContext
from lightning_ddp.comm.group import Group
from lightning_ddp.comm.hosts import find_hosts
from lightning_ddp.comm.shared_memory import SharedMemory
from lightning_ddp.comm.works import Worker

ItemT = TypeVar("ItemT")

_TOLERANCE = (
    1e-3  # relative; rounding stays far below, without communication every model is 5 to 1000 times above
)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What ``time_steps`` measures."""

    models: tuple[str, ...]
    """Models, measured one after the other."""

    contenders: tuple[str, ...]
    """Contenders, which take turns within each round."""

    num_rounds: int
    """Rounds per model."""

    num_steps: int
    """Timed steps of each contender in a round."""

    num_warmup_steps: int
    """Steps of each contender before the first round; torch rebuilds its buckets after the first of them."""


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


def time_steps(context: RankContext, settings: StepSettings) -> dict[str, dict[str, list[list[float]]]]:
    """Time the training steps of all contenders on each model, interleaved; all ranks, communicates.

    Returns:
        Model -> contender -> round -> seconds of each timed step on this rank.

    Raises:
        RuntimeError: If a contender's gradients or buffers differ from those of the others.
    """
    seconds: dict[str, dict[str, list[list[float]]]] = {}
    for model in settings.models:
        runs = {
            name: TrainingRun(name, build_workload(model, rank=context.rank), context.device)
            for name in settings.contenders
        }
        for run in runs.values():
            for _ in range(settings.num_warmup_steps):
                run.step()
        seconds[model] = {name: [] for name in settings.contenders}
        for round_index in range(settings.num_rounds):
            for name in shuffled(settings.contenders, seed=round_index):
                seconds[model][name].append(_timed_block(context, runs[name], settings.num_steps))
            context.advance()
        check_agreement(runs)
    return seconds


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


def check_agreement(runs: Mapping[str, TrainingRun]) -> None:
    """Do one more step from the same weights and compare gradients and buffers with torch's defaults.

    Without those among the contenders, with the first one.

    A wrapper that communicated nothing would be the fastest; this keeps it off the table. The step starts
    from the same weights because from three ranks on sums are rounded in another order, and over many steps a
    deep network makes of that rounding weights that have nothing in common.

    Args:
        runs: Contender -> its run.

    Raises:
        RuntimeError: If values are not finite or differ by more than rounding.
    """
    reference = TORCH_DEFAULT if TORCH_DEFAULT in runs else next(iter(runs))
    for run in runs.values():
        run.take_weights(runs[reference])
    for run in runs.values():
        run.step()
    expected = runs[reference].averaged_state()
    for name, run in runs.items():
        for kind, values in run.averaged_state().items():
            error = ((values - expected[kind]).norm() / expected[kind].norm()).item()
            if not error <= _TOLERANCE:
                raise RuntimeError(
                    f"the {kind} of {name} differ from those of {reference} by a relative {error:g} "
                    f"(at most {_TOLERANCE:g} expected): its times mean nothing"
                )


def _timed_block(context: RankContext, run: TrainingRun, num_steps: int) -> list[float]:
    run.step()  # brings this contender's weights back into the caches
    seconds = []
    for _ in range(num_steps):
        dist.barrier()
        context.synchronize()
        start = time.perf_counter()
        run.step()
        context.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


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

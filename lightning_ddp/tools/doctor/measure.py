"""Joint measurements of ranks: exchange facts, compare clocks, time all-reduces and fit a line.

The model is that of Hockney: a message takes a latency and a time for its bytes, t(n) = a + n / b. A ring
all-reduce of n bytes among p ranks is 2 (p - 1) successive messages of n / p bytes, so a is 2 (p - 1)
latencies, and the bandwidth of a link is b 2 (p - 1) / p.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp._torch import new_gloo, new_nccl
from lightning_ddp.tools.doctor.machine import gather_facts
from lightning_ddp.tools.perf_model import TransferCost
from lightning_ddp.tools.ranks import synchronize

_NUM_PINGS = 8
_NUM_WARM_UPS = 3
_SMALLEST_BYTES = 4 * 1024
_LEAST_REPEATS, _MOST_REPEATS = 3, 30
_SECONDS_A_SIZE = 0.3
_LONGEST_CALL_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of the measurements, the same on all ranks."""

    largest_bytes: int
    """Largest size of an all-reduce in bytes."""
    timeout_s: float
    """Time limit of each network step in seconds."""
    interface: str | None
    """Interface for gloo; None for gloo's choice."""

    @property
    def sizes(self) -> list[int]:
        """Sizes of the all-reduces in bytes: from 4 KiB up to the largest, in factors of 4.

        >>> Plan(largest_bytes=100_000, timeout_s=1.0, interface=None).sizes
        [4096, 16384, 65536]
        """
        sizes = [_SMALLEST_BYTES]
        while sizes[-1] * 4 <= self.largest_bytes:
            sizes.append(sizes[-1] * 4)
        return sizes


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
    """Measure this rank's facts, clock and times, as JSON values.

    Collective: all ranks must call it.
    """
    answer = gather_facts(env, rank=rank, local_rank=local_rank)
    limit = timedelta(seconds=plan.timeout_s)
    gloo = dist.ProcessGroupGloo
    where = gloo.create_device(interface=plan.interface) if plan.interface else gloo.create_default_device()
    control = new_gloo(dist.PrefixStore("gloo", store), rank, world_size, [where], limit)
    offset, error = clock_offsets(control, rank, world_size, timeout_s=plan.timeout_s)
    answer["clock"] = {"offset_s": offset, "error_s": error}
    answer["interface"] = plan.interface
    device, group = torch.device("cpu"), control
    has_device = answer["backend"] == "nccl" and local_rank < len(answer["devices"])
    if _agree(control, float(has_device), device, plan.timeout_s, dist.ReduceOp.MIN):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        group = new_nccl(dist.PrefixStore("nccl", store), rank, world_size, limit)
    timings = time_all_reduce(group, plan.sizes, device=device, timeout_s=plan.timeout_s, advance=advance)
    answer["measured_on"] = "nccl" if group is not control else "gloo"
    answer["timings"] = [asdict(timing) for timing in timings]
    return answer


def exchange(
    store: Any, answer: dict[str, Any], *, rank: int, world_size: int, timeout_s: float
) -> list[Any]:
    """Return the answers of all ranks; rank 0, which may host the store, returns last.

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


def clock_offsets(group: Any, rank: int, world_size: int, *, timeout_s: float) -> tuple[float, float]:
    """Measure the offset of this rank's clock from rank 0's, and its error, in seconds.

    Cristian's method: rank 0 replies with its time, which is assumed to be that of the middle of the round
    trip. The shortest of several trips counts; half of its duration is the error. For a CPU group.

    Collective: all ranks must call it.
    """
    limit = timedelta(seconds=timeout_s)
    value = torch.zeros(1, dtype=torch.float64)
    if rank == 0:
        for other in range(1, world_size):
            for _ in range(_NUM_PINGS):
                group.recv([value], other, 0).wait(limit)
                value.fill_(time.time())
                group.send([value], other, 0).wait(limit)
        return 0.0, 0.0
    trips = []
    for _ in range(_NUM_PINGS):
        begun, start = time.perf_counter(), time.time()  # this order makes the error below correct
        group.send([value], 0, 0).wait(limit)
        group.recv([value], 0, 0).wait(limit)
        trip = time.perf_counter() - begun
        trips.append((trip, start + trip / 2 - float(value.item())))
    trip, offset = min(trips)
    return offset, trip / 2


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Time of one size of message: the median of the slowest rank, in seconds."""

    num_bytes: int
    seconds: float


def time_all_reduce(
    group: Any,
    sizes: Sequence[int],
    *,
    device: torch.device,
    timeout_s: float,
    advance: Callable[[], object] = lambda: None,
) -> list[Timing]:
    """Time float32 all-reduces of several sizes, smallest first, with a process group of torch.

    Each size is repeated for about a third of a second, equally often on all ranks. Larger sizes are left out
    once one takes more than two seconds. `advance` is called after each size.

    Collective: all ranks must call it.
    """
    timings = []
    for num_bytes in sizes:
        tensor = torch.zeros(num_bytes // 4, device=device)
        for _ in range(_NUM_WARM_UPS):
            _all_reduce(group, tensor, timeout_s)  # connections and memory
        first = _agree(group, _all_reduce(group, tensor, timeout_s), device, timeout_s)
        repeats = int(min(_MOST_REPEATS, max(_LEAST_REPEATS, _SECONDS_A_SIZE / first)))
        durations = [_all_reduce(group, tensor, timeout_s) for _ in range(repeats)]
        seconds = _agree(group, statistics.median(durations), device, timeout_s)
        timings.append(Timing(num_bytes=num_bytes, seconds=seconds))
        advance()
        if first > _LONGEST_CALL_S:
            break
    return timings


def _all_reduce(
    group: Any, tensor: torch.Tensor, timeout_s: float, operation: Any = dist.ReduceOp.SUM
) -> float:
    """All-reduce a tensor; return the seconds until the result is available."""
    options = dist.AllreduceOptions()
    options.reduceOp = operation
    synchronize(tensor.device)
    start = time.perf_counter()
    group.allreduce([tensor], options).wait(timedelta(seconds=timeout_s))
    synchronize(tensor.device)
    return time.perf_counter() - start


def _agree(
    group: Any, number: float, device: torch.device, timeout_s: float, operation: Any = dist.ReduceOp.MAX
) -> float:
    """Return the largest value of all ranks, or the smallest with `ReduceOp.MIN`."""
    value = torch.tensor([number], dtype=torch.float64, device=device)
    _all_reduce(group, value, timeout_s, operation)
    return float(value.item())


@dataclass(frozen=True, kw_only=True)
class Line:
    """Model of a collective: t(n) = latency + n / bandwidth."""

    latency_s: float
    bytes_per_s: float
    relative_error: float
    """Median of |time - line| / time."""

    def __str__(self) -> str:
        return f"{self.latency_s * 1e3:.3f} ms + size / {self.bytes_per_s / 1e9:.3g} GB/s"

    def seconds(self, num_bytes: int) -> float:
        """Return the predicted seconds of a collective of `num_bytes`."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def message_latency_s(self, world_size: int) -> float:
        """Return the latency of a message of a ring in seconds."""
        return self.latency_s / max(1, 2 * (world_size - 1))

    def link_bytes_per_s(self, world_size: int) -> float:
        """Return the bandwidth of a link of a ring in bytes/s, each way."""
        return self.bytes_per_s * 2 * (world_size - 1) / world_size


def fit_line(timings: Sequence[Timing]) -> Line | None:
    """Fit the line of `TransferCost`; return None with a single size, or if times do not increase.

    >>> line = fit_line([Timing(num_bytes=n, seconds=1e-3 + n / 1e9) for n in (1000, 10**6, 10**7)])
    >>> round(line.latency_s, 6), round(line.bytes_per_s)
    (0.001, 1000000000)
    """
    if len({timing.num_bytes for timing in timings}) < 2:
        return None
    cost = TransferCost.fit([(timing.num_bytes, timing.seconds) for timing in timings])
    if cost.seconds_per_byte == 0:
        return None
    errors = [abs(cost.seconds(timing.num_bytes) - timing.seconds) / timing.seconds for timing in timings]
    return Line(
        latency_s=cost.latency_s,
        bytes_per_s=1 / cost.seconds_per_byte,
        relative_error=statistics.median(errors),
    )

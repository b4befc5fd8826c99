"""Performance model: the time of a step with more ranks, on another link, with another hook or bucket plan.

Nothing here communicates. A `StepProfile` has the computation of the ranks, from recorded steps; a `Network`
the costs of collectives; `simulate` simulates one step: backward, the thread of a hook, the link, and the
cores that they share; `predict_hook` and `predict_averager` predict its duration; `recommend_buckets` finds
the buckets for the shortest step. Over 500 lines, as each of these builds on the ones before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

import torch

from lightning_ddp.averaging import AveragerPlan
from lightning_ddp.averaging.local_sgd import HierarchicalSGDOptions
from lightning_ddp.averaging.outer import DiLoCoOptions
from lightning_ddp.averaging.streaming import StreamingDiLoCoOptions
from lightning_ddp.encoding.mean import CHUNK_NUMEL
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.telemetry.step_record import StepRecord
from lightning_ddp.telemetry.timeline import Recording
from lightning_ddp.tools.hook_program import HookModel, Kind, Program, Send, Shapes, Work, plain_model

_NS_PER_S = 1e9
_MIB = 2**20
_ITEM_BYTES = 4
_LARGEST_SIDE = 1024

# ---------------------------------------------------------------------- computation of the ranks


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Times of one step, each of the slowest rank, in seconds since its forward began."""

    backward_start_s: float
    """Time at which the first gradient is computed."""
    ready: tuple[tuple[int, float], ...]
    """Bytes of each bucket, and time at which its last gradient is computed; in launch order."""
    backward_end_s: float
    """Time at which all gradients are computed."""
    rest_s: float
    """Duration from the end of the collectives to the next forward: `.grad`, optimizer, next batch."""

    def __post_init__(self) -> None:
        if not self.ready:
            raise ConfigurationError("a step without buckets: it has nothing to communicate")

    @property
    def compute_s(self) -> float:
        """Duration of a step without communication, in seconds."""
        return max(self.backward_end_s, *(seconds for _, seconds in self.ready)) + self.rest_s

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(num_bytes for num_bytes, _ in self.ready)

    @classmethod
    def from_recordings(cls, recordings: Sequence[Recording]) -> StepProfile:
        """Compute the median step of the recordings of some ranks of one run.

        A collective begins once the slowest rank has called it, so the latest time of all ranks counts. Steps
        with other buckets than the last step, and steps that some ranks lack, are left out.
        """
        common = _common_steps(recordings)
        if not common:
            raise ConfigurationError(
                "the recordings have no complete step in common. Record more steps (CommunicationMonitor)"
            )
        rows = [[max(column) for column in zip(*map(_moments, steps), strict=True)] for steps in common]
        start, end, finish, *ready = (statistics.median(column) for column in zip(*rows, strict=True))
        return cls(
            backward_start_s=start,
            backward_end_s=end,
            ready=tuple(zip(_sizes(common[-1][0]), accumulate(ready, max), strict=True)),
            rest_s=finish + max(0.0, *map(_time_between, recordings)),
        )

    def rebucketed(self, sizes: Sequence[int]) -> StepProfile:
        """Return this step with other buckets, of the same total size, in launch order.

        Gradients are assumed to arrive evenly between the known moments.
        """
        if sum(sizes) != self.num_bytes:
            raise ConfigurationError(f"buckets of {sum(sizes)} bytes for {self.num_bytes} bytes of gradients")
        known = [(0, self.backward_start_s)]
        known += zip(accumulate(n for n, _ in self.ready), (s for _, s in self.ready), strict=True)
        moments = (_interpolate(known, reached) for reached in accumulate(sizes))
        return replace(self, ready=tuple(zip(sizes, moments, strict=True)))


def cut_sizes(sizes: Sequence[int], caps_bytes: Sequence[int]) -> list[int]:
    """Return the positions at which the reducer's buckets end.

    Args:
        sizes: sizes of the gradients in bytes, in order of arrival.
        caps_bytes: caps of the first bucket, the second ...; the last one holds for all that follow.

    >>> cut_sizes([4, 8, 12, 4], [4, 20])
    [1, 3, 4]
    """
    ends: list[int] = []
    filled = 0
    for position, size in enumerate(sizes):
        cap = caps_bytes[min(len(ends), len(caps_bytes) - 1)]
        if filled and filled + size > cap:
            ends.append(position)
            filled = 0
        filled += size
    return [*ends, len(sizes)]


def square_shapes(num_bytes: int) -> Shapes:
    """Return shapes of at most 1024 x 1024 with a rest, in total `num_bytes` at 4 bytes per element.

    For recordings, which lack the shapes of parameters.

    >>> square_shapes(4 * (2 * 1024 * 1024 + 3 * 1024 + 5))
    ((1024, 1024), (1024, 1024), (3, 1024), (5,))
    """
    rows, rest = divmod(num_bytes // _ITEM_BYTES, _LARGEST_SIDE)
    heights = [_LARGEST_SIDE] * (rows // _LARGEST_SIDE) + [rows % _LARGEST_SIDE]
    shapes: list[tuple[int, ...]] = [(height, _LARGEST_SIDE) for height in heights if height]
    return (*shapes, *([(rest,)] if rest else []))


def num_bytes_of(shapes: Shapes) -> int:
    """Return the bytes of parameters with 4 bytes per element."""
    return _ITEM_BYTES * sum(map(math.prod, shapes))


def _common_steps(recordings: Sequence[Recording]) -> list[list[StepRecord]]:
    """Return the ranks' records of the complete common steps that have the buckets of the last step."""
    by_rank = [{step.step: step for step in r.steps if _is_complete(step)} for r in recordings]
    numbers = sorted(set(by_rank[0]).intersection(*by_rank[1:])) if by_rank else []
    common = [[steps[number] for steps in by_rank] for number in numbers]
    return [steps for steps in common if all(_sizes(s) == _sizes(common[-1][0]) for s in steps)]


def _sizes(step: StepRecord) -> list[int]:
    return [bucket.num_bytes for bucket in step.buckets]


def _is_complete(step: StepRecord) -> bool:
    moments = [step.forward_start, step.backward_start, step.backward_end, step.comm_end]
    moments += [moment for bucket in step.buckets for moment in (bucket.ready, bucket.done)]
    return bool(step.buckets) and None not in moments


def _moments(step: StepRecord) -> list[float]:
    """Return begin, end of backward, time after the collectives, and each `ready`, in seconds."""
    end = max(step.backward_end, *(bucket.done for bucket in step.buckets))
    moments = [step.backward_start, step.backward_end, *(bucket.ready for bucket in step.buckets)]
    start, backward_end, *ready = ((moment - step.forward_start) / _NS_PER_S for moment in moments)
    return [start, backward_end, max(0, step.comm_end - end) / _NS_PER_S, *ready]


def _time_between(recording: Recording) -> float:
    """Return the median seconds from the end of a step's collectives to the next forward."""
    gaps = [
        (after.forward_start - before.comm_end) / _NS_PER_S
        for before, after in pairwise(recording.steps)
        if _is_complete(before) and _is_complete(after) and after.step == before.step + 1
    ]
    if not gaps:
        raise ConfigurationError(
            f"rank {recording.rank} has recorded no two consecutive steps, so the time between steps is not"
            " known. Record more steps"
        )
    return float(statistics.median(gaps))


def _interpolate(known: Sequence[tuple[int, float]], reached: int) -> float:
    for (low, early), (high, late) in pairwise(known):
        if reached <= high:
            part = (reached - low) / (high - low) if high > low else 1.0
            return early + part * (late - early)
    return known[-1][1]


# ---------------------------------------------------------------------- cost of a collective


@dataclass(frozen=True, kw_only=True)
class TransferCost:
    """Duration of a collective as a line over its bytes (Hockney, Parallel Computing 20, 1994)."""

    latency_s: float
    """Duration of a collective without bytes, in seconds."""
    seconds_per_byte: float
    """Seconds per byte of the reduced tensor."""

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.seconds_per_byte < 0:
            raise ConfigurationError(f"{self}: expected times of at least 0 seconds")

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of a collective of `num_bytes`.

        >>> TransferCost(latency_s=1e-3, seconds_per_byte=1e-6).seconds(2000)
        0.003
        """
        return self.latency_s + num_bytes * self.seconds_per_byte

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, float]]) -> TransferCost:
        """Fit the line with the least sum of squared relative errors and without negative coefficients.

        Relative errors, as the sizes and times of the samples span several magnitudes.

        Args:
            samples: bytes and seconds of collectives; seconds above 0.

        Raises:
            ConfigurationError: there is no sample, or one with a time of 0.

        >>> cost = TransferCost.fit([(0, 0.5), (100, 1.0), (300, 2.0)])
        >>> round(cost.latency_s, 9), round(cost.seconds_per_byte, 9)
        (0.5, 0.005)
        """
        if not samples or min(seconds for _, seconds in samples) <= 0:
            raise ConfigurationError(f"samples {list(samples)!r}: expected bytes with seconds above 0")
        # least squares of  latency / t + slope * n / t = 1
        rows = [(1 / seconds, num_bytes / seconds) for num_bytes, seconds in samples]
        a, b = map(sum, zip(*rows, strict=True))
        aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
        determinant = aa * bb - ab * ab
        if determinant > 1e-12 * aa * bb:
            latency_s, slope = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
            if latency_s < 0:
                return cls(latency_s=0.0, seconds_per_byte=b / bb)
            if slope >= 0:
                return cls(latency_s=latency_s, seconds_per_byte=slope)
        return cls(latency_s=a / aa, seconds_per_byte=0.0)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Cost of one collective on the slowest link."""

    fixed_s: float
    """Seconds independent of the link's speed: latencies, and transfers within the nodes."""
    link_bytes: float
    """Bytes that pass the link in one direction."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Network with links of one speed between nodes, and faster links within nodes.

    * `ring`: 2 (N-1) hops with 1/N of the bytes each, as in gloo, and in NCCL with large tensors;
    * `tree`: two binary trees that share the bytes, up and down: as many bytes, 2 log2(N) hops, as in NCCL
      with many ranks. For sums only: gathered tensors are sent as in a ring;
    * `hierarchical`: a sum within each node, a ring of one rank per node, a copy within each node, as in
      this package's shared-memory transport.

    Links are full duplex; switches and other jobs do not slow them down.
    """

    hop: TransferCost
    """Cost of a message between nodes."""
    ranks_per_node: int = 1
    node_hop: TransferCost | None = None
    """Cost of a message within a node; None for the cost between nodes."""
    algorithm: Literal["ring", "tree", "hierarchical"] = "ring"
    num_in_flight: int = 1
    """Number of collectives in progress at once: 2 with gloo, by its threads, and 1 with NCCL. Their bytes
    pass the link one after the other."""
    cpu_seconds_per_byte: float = 0.0
    """CPU seconds of a rank per byte on the link: kernel, gloo and the sum."""

    def transfer(self, kind: Kind, num_bytes: float, num_ranks: int) -> Transfer:
        """Return the cost of a collective among neighboring ranks.

        `num_bytes` is the size of one rank's tensor: the reduced tensor, all rows that it sends (all-to-all),
        or the tensor that each other rank gets (all-gather).

        >>> network = Network(hop=TransferCost(latency_s=1.0, seconds_per_byte=0.5))
        >>> network.transfer("all_reduce", 100, 4)
        Transfer(fixed_s=6.0, link_bytes=150.0)
        """
        if num_ranks == 1:
            return Transfer(fixed_s=0.0, link_bytes=0.0)
        in_node = min(self.ranks_per_node, num_ranks)
        hops, sent = _flat(kind, num_bytes, num_ranks, is_tree=self.algorithm == "tree")
        if in_node == num_ranks:
            return Transfer(fixed_s=self._node_seconds(hops, sent), link_bytes=0.0)
        if self.algorithm == "hierarchical":
            return self._hierarchical(kind, num_bytes, num_ranks, in_node)
        if kind == "all_to_all":  # all ranks of a node share its link, for rows that leave the node
            sent = in_node * num_bytes * (num_ranks - in_node) / num_ranks
        return Transfer(fixed_s=hops * self.hop.latency_s, link_bytes=sent)

    def seconds(self, transfer: Transfer) -> float:
        """Return the seconds of a transfer on a free link."""
        return transfer.fixed_s + transfer.link_bytes * self.hop.seconds_per_byte

    def _node_seconds(self, hops: float, num_bytes: float) -> float:
        cost = self.node_hop or self.hop
        return hops * cost.latency_s + num_bytes * cost.seconds_per_byte

    def _hierarchical(self, kind: Kind, num_bytes: float, num_ranks: int, in_node: int) -> Transfer:
        num_nodes = math.ceil(num_ranks / in_node)
        others = in_node - 1
        if kind == "all_reduce":
            # Each rank of a node sums its share, and the others read it: half of a ring's hops each.
            hops, sent = _flat(kind, num_bytes, num_nodes, is_tree=False)
            inside = self._node_seconds(2 * others, 2 * others / in_node * num_bytes)
        elif kind == "all_gather":
            hops, sent = num_nodes - 1.0, num_bytes * (num_ranks - in_node)
            inside = self._node_seconds(2 * others, others * num_bytes + sent)
        else:
            hops, sent = num_nodes - 1.0, in_node * num_bytes * (num_ranks - in_node) / num_ranks
            inside = self._node_seconds(others, num_bytes)
        return Transfer(fixed_s=hops * self.hop.latency_s + inside, link_bytes=sent)


def _flat(kind: Kind, num_bytes: float, num_ranks: int, *, is_tree: bool) -> tuple[float, float]:
    """Return the number of successive hops, and the bytes that each rank sends."""
    others = num_ranks - 1
    if kind == "all_reduce":
        hops = 2.0 * math.ceil(math.log2(num_ranks)) if is_tree else 2.0 * others
        return hops, 2 * others / num_ranks * num_bytes
    return float(others), others * num_bytes / (num_ranks if kind == "all_to_all" else 1)


# ---------------------------------------------------------------------- simulation of one step

_LEAST_SHARE = 0.05
"""Least fraction of a core for computation, however much communication uses."""
_INSTANT_S = 1e-12
"""Seconds below which a remaining duration counts as 0."""

_Task = Generator[float | Callable[[], bool], None, None]
"""Generator that yields seconds of arithmetic, or the condition for which it waits."""


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """Result of a simulated step; times in seconds since the forward began."""

    step_s: float
    """Duration from one forward to the next."""
    backward_end_s: float
    """End of backward; later than recorded if communication uses the cores."""
    exposed_s: float
    """Duration from the end of backward to the end of the last bucket."""
    done_s: list[float]
    """End of each bucket."""


def simulate(
    profile: StepProfile,
    programs: Sequence[Program],
    network: Network,
    num_ranks: int,
    *,
    cores: float = math.inf,
    is_queued: bool = True,
) -> SimulatedStep:
    """Simulate one step of equal ranks.

    Collectives pass the network in the order of their start. Backward, the hook's arithmetic and the CPU
    work of sending share the `cores` of a rank evenly; use infinity if they do not compete, as on a GPU with
    its own network card. `is_queued`: one thread handles the buckets one after the other.
    """
    if len(programs) != len(profile.ready):
        raise ConfigurationError(f"{len(programs)} programs for {len(profile.ready)} buckets")
    run = _Run(profile, programs, _Link(network, num_ranks), is_queued)
    run.play(cores)
    last = max(run.done_s)
    return SimulatedStep(
        step_s=max(run.backward_end_s, last) + profile.rest_s,
        backward_end_s=run.backward_end_s,
        exposed_s=max(0.0, last - run.backward_end_s),
        done_s=run.done_s,
    )


@dataclass(kw_only=True)
class _Collective:
    key: object
    fixed_s: float
    """Remaining seconds that do not need the link."""
    link_s: float
    """Remaining seconds on the link."""
    cpu_share: float
    """Cores in use while it is on the link."""


class _Link:
    """Link that passes collectives one after the other; some may pass while others wait for hops."""

    def __init__(self, network: Network, num_ranks: int) -> None:
        self._network = network
        self._num_ranks = num_ranks
        self._queue: list[_Collective] = []
        self.ended: set[object] = set()

    def send(self, key: object, op: Send) -> None:
        network = self._network
        transfer = network.transfer(op.kind, op.num_bytes, self._num_ranks)
        cpu_s = transfer.link_bytes * network.cpu_seconds_per_byte
        link_s = max(transfer.link_bytes * network.hop.seconds_per_byte, cpu_s)  # no faster than the CPU
        share = cpu_s / link_s if link_s else 0.0
        self._queue.append(_Collective(key=key, fixed_s=transfer.fixed_s, link_s=link_s, cpu_share=share))

    @property
    def _under_way(self) -> list[_Collective]:
        return self._queue[: self._network.num_in_flight]

    @property
    def _passing(self) -> _Collective | None:
        """Collective whose bytes are on the link, or None."""
        return next((c for c in self._under_way if c.fixed_s <= _INSTANT_S), None)

    @property
    def cpu_share(self) -> float:
        return self._passing.cpu_share if self._passing is not None else 0.0

    @property
    def remaining_s(self) -> float:
        """Seconds until the next change; infinite if no collective is in progress."""
        left = [c.fixed_s for c in self._under_way if c.fixed_s > _INSTANT_S]
        return min([*left, self._passing.link_s if self._passing is not None else math.inf])

    def pass_time(self, seconds: float) -> None:
        passing = self._passing
        for collective in self._under_way:
            collective.fixed_s -= seconds if collective.fixed_s > _INSTANT_S else 0.0
        if passing is not None:
            passing.link_s -= seconds
            if passing.link_s <= _INSTANT_S:
                self.ended.add(passing.key)
                self._queue.remove(passing)


class _Thread:
    """A task, with the remainder of its last yielded operation."""

    def __init__(self, task: _Task) -> None:
        self._task = task
        self._until: Callable[[], bool] = lambda: True
        self.remaining_s = math.inf
        """Remaining seconds of its arithmetic; infinite while it waits, and after its end."""

    def go_on(self) -> bool:
        """Advance the task if its last operation is done; return True if it was."""
        if self.remaining_s > _INSTANT_S and not (self.remaining_s == math.inf and self._until()):
            return False
        self.remaining_s, self._until = math.inf, lambda: False
        what = next(self._task, None)
        if callable(what):
            self._until = what
        elif what is not None:
            self.remaining_s = what
        return True


class _Run:
    """State of a simulated step between two events."""

    def __init__(
        self, profile: StepProfile, programs: Sequence[Program], link: _Link, is_queued: bool
    ) -> None:
        self._now = 0.0
        self._link = link
        count = len(programs)
        self.ready_s, self.done_s = [math.nan] * count, [math.nan] * count
        self.backward_end_s = math.nan
        jobs = list(enumerate(programs))
        tasks = [self._do(jobs)] if is_queued else [self._do([job]) for job in jobs]
        self._threads = [_Thread(task) for task in (self._backward(profile), *tasks)]

    def _backward(self, profile: StepProfile) -> _Task:
        computed = 0.0
        for index, (_, seconds) in enumerate(profile.ready):
            yield max(0.0, seconds - computed)
            computed = max(computed, seconds)
            self.ready_s[index] = self._now
        yield max(0.0, profile.backward_end_s - computed)
        self.backward_end_s = self._now

    def _do(self, jobs: Sequence[tuple[int, Program]]) -> _Task:
        """Run the programs of some buckets, each once the bucket is ready."""
        for index, program in jobs:
            yield lambda index=index: not math.isnan(self.ready_s[index])  # type: ignore[misc]  # its default
            for op in program:
                if isinstance(op, Work):
                    yield op.seconds
                elif isinstance(op, Send):
                    self._link.send((index, op.ticket), op)
                else:
                    yield lambda key=(index, op.ticket): key in self._link.ended  # type: ignore[misc]
            self.done_s[index] = self._now

    def play(self, cores: float) -> None:
        """Process events until everything has ended."""
        while True:
            while any(thread.go_on() for thread in self._threads):
                pass
            busy = [thread for thread in self._threads if thread.remaining_s < math.inf]
            left = max(cores - self._link.cpu_share, _LEAST_SHARE)
            rate = min(1.0, left / len(busy)) if busy else 1.0
            work_s = min([thread.remaining_s for thread in busy], default=math.inf)
            seconds = min(work_s / rate, self._link.remaining_s)
            if seconds == math.inf:
                break
            self._now += seconds
            self._link.pass_time(seconds)
            for thread in busy:
                thread.remaining_s -= seconds * rate
        if any(map(math.isnan, self.done_s)):
            raise ConfigurationError("a program waits for a collective that it has not started")


# ---------------------------------------------------------------------- duration of a step

_CHUNK_BYTES = 4 * CHUNK_NUMEL
_PART = {"fp32": 1.0, "bf16": 0.5, "int8": 0.25 + 1 / 256}
"""Size of outer gradients relative to float32; int8 has a 4-byte scale for 256 elements."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted step with a given number of ranks; for averagers, the mean over a period."""

    num_ranks: int
    step_s: float
    compute_s: float
    """Duration of the step without communication."""
    exposed_s: float
    """Duration of communication that computation does not hide."""


def predict_hook(
    profile: StepProfile, hook: HookModel, network: Network, num_ranks: int, *, cores: float = math.inf
) -> Prediction:
    """Predict the step in which a hook, or the reducer without a hook, averages the gradients.

    `hook` has the programs for the buckets of this profile; for a rank's `cores` see `simulate`.
    """
    programs = hook.programs(num_ranks)
    step = simulate(profile, programs, network, num_ranks, cores=cores, is_queued=hook.is_queued)
    return Prediction(
        num_ranks=num_ranks, step_s=step.step_s, compute_s=profile.compute_s, exposed_s=step.exposed_s
    )


def predict_averager(
    profile: StepProfile, plan: AveragerPlan, network: Network, num_ranks: int
) -> Prediction:
    """Predict the mean step of the local phase of an averager.

    Parameters are assumed to have as many bytes as gradients. The averager's own arithmetic, buffers and
    averaged optimizer state are not included.
    """
    compute_s = profile.compute_s
    exposed_s = _rounds_s(profile, plan, network, num_ranks)
    if getattr(plan.options, "intra_node_gradients", False):
        plain = plain_model([size for size, _ in profile.ready])
        in_node = min(network.ranks_per_node, num_ranks)
        exposed_s += predict_hook(profile, plain, network, in_node).exposed_s
    return Prediction(
        num_ranks=num_ranks, step_s=compute_s + exposed_s, compute_s=compute_s, exposed_s=exposed_s
    )


def _rounds_s(profile: StepProfile, plan: AveragerPlan, network: Network, num_ranks: int) -> float:
    """Return the seconds per step of waiting for averaged parameters."""
    options = plan.options
    part = _PART[options.encoding] if isinstance(options, DiLoCoOptions) else 1.0
    num_bytes = part * profile.num_bytes
    if isinstance(options, HierarchicalSGDOptions):
        return _levels_s(options, num_bytes, network, num_ranks)
    if isinstance(options, StreamingDiLoCoOptions):
        every = options.period / options.num_fragments
        hidden_s = options.delay * profile.compute_s
        one_s = _exchange_s(num_bytes / options.num_fragments, network, num_ranks)
        return max(0.0, one_s - hidden_s) / every
    return _exchange_s(num_bytes, network, num_ranks) / options.period


def _levels_s(options: HierarchicalSGDOptions, num_bytes: float, network: Network, num_ranks: int) -> float:
    sizes = {period: size or num_ranks for period, size in options.periods.items()}
    total, whole = 0.0, max(sizes)
    for step in range(1, whole + 1):
        due = [period for period in sizes if step % period == 0]
        if due:
            size = sizes[max(due)]
            if num_ranks > 1 and (size > num_ranks or num_ranks % size):
                raise ConfigurationError(
                    f"hierarchical_sgd: periods={dict(options.periods)} with {num_ranks} ranks: each group"
                    " size must divide the number of ranks"
                )
            total += _exchange_s(num_bytes, network, min(size, num_ranks))
    return total / whole


def _exchange_s(num_bytes: float, network: Network, num_ranks: int) -> float:
    """Return the seconds of an average of parameters, in chunks of which several may be in progress."""

    def whole_and_next_s(size: float) -> tuple[float, float]:
        """Return the seconds of a chunk alone, and from the end of the previous chunk to its own."""
        transfer = network.transfer("all_reduce", size, num_ranks)
        whole_s = network.seconds(transfer)
        return whole_s, max(whole_s - transfer.fixed_s, whole_s / network.num_in_flight)

    num_whole, rest = divmod(num_bytes, _CHUNK_BYTES)
    first_s, next_s = whole_and_next_s(min(num_bytes, _CHUNK_BYTES))
    if not num_whole:
        return first_s
    return first_s + (num_whole - 1) * next_s + (whole_and_next_s(rest)[1] if rest else 0.0)


# ---------------------------------------------------------------------- the buckets to use

_MOST_CHUNKS = 128
_MOST_BUCKETS = 64
_TOLERANCE = 0.01
_SLOWDOWNS = (1.0, 2.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """Recommended sizes of buckets, with the predicted duration of a step."""

    num_ranks: int
    caps_mb: tuple[float, ...]
    """Value for `bucket_cap_mb_list`, in MiB."""
    step_s: float
    recorded_s: float
    """Duration of a step with the recorded buckets."""


def recommend_buckets(
    profile: StepProfile,
    shapes: Sequence[tuple[int, ...]],
    network: Network,
    num_ranks: int,
    *,
    cores: float = math.inf,
) -> BucketPlan:
    """Find the buckets for the shortest step without a hook; the recorded ones if none is better.

    Gradients, whose shapes are given in order of arrival, are assumed to arrive evenly between the recorded
    moments. Collectives compete with backward for processors, so plans for slower collectives are tried as
    well, and the simulation decides.
    """
    sizes = [num_bytes_of((shape,)) for shape in shapes]
    sizes[-1] += profile.num_bytes - sum(sizes)  # the rest of less than an element
    fixed_s, whole_s = (
        network.seconds(network.transfer("all_reduce", size, num_ranks)) for size in (0, _MIB)
    )
    ready_s = [max(0.0, s - profile.backward_start_s) for _, s in profile.rebucketed(sizes).ready]
    backward_s = max(0.0, profile.backward_end_s - profile.backward_start_s)

    def best_sizes(slowdown: float) -> list[int]:
        cost = TransferCost(
            latency_s=slowdown * fixed_s, seconds_per_byte=slowdown * (whole_s - fixed_s) / _MIB
        )
        return _sums(sizes, best_boundaries(ready_s, sizes, backward_s, cost))

    def step_s(buckets: Sequence[int]) -> float:
        model = plain_model(buckets)
        return predict_hook(profile.rebucketed(buckets), model, network, num_ranks, cores=cores).step_s

    recorded = [size for size, _ in profile.ready]
    found = []
    for buckets in (recorded, *map(best_sizes, _SLOWDOWNS)):
        caps_mb = _caps_mb(sizes, buckets)
        found.append((step_s(_sums(sizes, _ends(sizes, caps_mb))), len(caps_mb), caps_mb))
    best_s, _, caps_mb = min(found)
    return BucketPlan(num_ranks=num_ranks, caps_mb=caps_mb, step_s=best_s, recorded_s=step_s(recorded))


def _sums(sizes: Sequence[int], ends: Sequence[int]) -> list[int]:
    return [sum(sizes[start:end]) for start, end in pairwise([0, *ends])]


def _ends(sizes: Sequence[int], caps_mb: Sequence[float]) -> list[int]:
    return cut_sizes(sizes, [int(cap * _MIB) for cap in caps_mb])


def _caps_mb(sizes: Sequence[int], buckets: Sequence[int]) -> tuple[float, ...]:
    """Return caps in MiB for these buckets, without redundant caps at the end."""
    exact = [size / _MIB for size in buckets if size]
    rounded = [math.ceil(1e3 * cap) / 1e3 for cap in exact]
    caps = rounded if _ends(sizes, rounded) == _ends(sizes, exact) else exact
    while len(caps) > 1 and _ends(sizes, caps[:-1]) == _ends(sizes, caps):
        caps.pop()
    return tuple(caps)


def best_boundaries(
    ready_s: Sequence[float],
    num_bytes: Sequence[int],
    backward_s: float,
    cost: TransferCost,
    *,
    tolerance: float = _TOLERANCE,
) -> tuple[int, ...]:
    """Find the fastest plan of at most 64 buckets; with equal times, that with the fewest.

    A bucket can be launched once its last gradient is computed, and buckets are reduced one after the other:
    small buckets start early, large buckets have less overhead per byte. Dynamic programming over the
    gradients; a greedy form of the problem is in Shi et al., "MG-WFBP", INFOCOM 2019. Exact for up to 128
    parameters; with more, neighbors are merged up to a 128th of all bytes.

    Args:
        ready_s: for each gradient, in bucket order, seconds from the beginning of backward until a bucket
            that ends with it could be launched.
        num_bytes: size of each gradient in its bucket.
        backward_s: seconds from the beginning of backward to its end, without the wait for buckets.
        cost: cost of the reduction of one bucket.
        tolerance: fraction of the time by which a plan with fewer buckets may be slower.

    Returns:
        The positions at which buckets end: `(2, 5)` is a bucket of parameters 0 and 1, and a bucket of
        parameters 2, 3 and 4.

    >>> cost = TransferCost(latency_s=1.0, seconds_per_byte=0.5)
    >>> best_boundaries([1.0, 2.0, 3.5], [2, 2, 2], 3.5, cost)
    (1, 3)
    """
    chunks = _chunk_boundaries(num_bytes)
    latest, sent = list(accumulate(ready_s, max)), [0, *accumulate(num_bytes)]
    ready = torch.tensor([latest[end - 1] for end in chunks], dtype=torch.float64)
    sent_bytes = torch.tensor([sent[end] for end in (0, *chunks)], dtype=torch.float64)
    # cost_s[i, j]: cost of a bucket of the chunks j to i, both included
    cost_s = cost.latency_s + cost.seconds_per_byte * (sent_bytes[1:, None] - sent_bytes[:-1])
    cost_s.masked_fill_(torch.ones_like(cost_s, dtype=torch.bool).triu(1), math.inf)
    before = torch.full_like(ready, math.inf)  # [j]: time at which the chunks before j are reduced
    before[0] = 0.0
    totals, starts = [], []
    for _ in range(min(len(chunks), _MOST_BUCKETS)):
        reduced_s, first = (torch.maximum(before[None, :], ready[:, None]) + cost_s).min(dim=1)
        totals.append(max(float(reduced_s[-1]), backward_s))
        starts.append(first)
        before = torch.cat([before.new_tensor([math.inf]), reduced_s[:-1]])
    count = next(index for index, total in enumerate(totals) if total <= min(totals) * (1 + tolerance))
    position, ends = len(chunks), []
    while position:
        ends.append(chunks[position - 1])
        position = int(starts[count][position - 1])
        count -= 1
    return tuple(reversed(ends))


def _chunk_boundaries(num_bytes: Sequence[int]) -> list[int]:
    """Return the end positions of at most 128 chunks of similar size, which are not divided further."""
    if len(num_bytes) <= _MOST_CHUNKS:
        return list(range(1, len(num_bytes) + 1))
    total = sum(num_bytes)
    ends, next_share, sent = [], 1, 0
    for position, size in enumerate(num_bytes, start=1):
        sent += size
        if sent * _MOST_CHUNKS >= next_share * total and size:
            ends.append(position)
            next_share = sent * _MOST_CHUNKS // total + 1
    ends[-1:] = [len(num_bytes)]
    return ends

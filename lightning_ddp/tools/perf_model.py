"""Performance model: the duration of a step with more ranks, on another link, with other buckets or a hook.

A `StepProfile` has the computation of the ranks, from recorded steps; a `Link` the cost of a collective.
`schedule` puts the buckets on the link, one after the other, and all predictions follow from it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

from lightning_ddp.averaging import AveragerPlan
from lightning_ddp.averaging.local_sgd import HierarchicalSGDOptions
from lightning_ddp.encoding.mean import CHUNK_NUMEL
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.telemetry.timeline import Recording

_NS_PER_S = 1e9
_CHUNK_BYTES = 4 * CHUNK_NUMEL
_SIZE_RATIO = {"fp32": 1.0, "bf16": 0.5, "int8": 0.25 + 1 / 256}
"""Size of outer gradients relative to float32; int8 has a 4-byte scale for 256 elements."""

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

    @property
    def compute_s(self) -> float:
        """Duration of a step without communication, in seconds."""
        return self.backward_end_s + self.rest_s

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(num_bytes for num_bytes, _ in self.ready)

    @classmethod
    def from_recordings(cls, recordings: Sequence[Recording]) -> StepProfile:
        """Return the median step of the recordings of some ranks of one run.

        A collective begins once the slowest rank has called it, so the latest time of all ranks counts. Steps
        with other buckets than the last one, and steps that some ranks lack, are left out.

        Raises:
            ConfigurationError: the ranks have recorded no two consecutive steps in common.
        """
        by_rank = [_moments_of(recording) for recording in recordings]
        common = set(by_rank[0]).intersection(*by_rank[1:])
        if not common:
            raise ConfigurationError(
                "the ranks have recorded no two consecutive steps in common. Record more steps"
                " (CommunicationMonitor)"
            )
        steps = ([moments[number] for moments in by_rank] for number in common)
        slowest = [[max(column) for column in zip(*ranks, strict=True)] for ranks in steps]
        start, end, rest, *ready = (statistics.median(column) for column in zip(*slowest, strict=True))
        sizes = [bucket.num_bytes for bucket in recordings[0].steps[-1].buckets]
        return cls(
            backward_start_s=start,
            ready=tuple(zip(sizes, accumulate(ready, max), strict=True)),
            backward_end_s=max(end, *ready),
            rest_s=max(0.0, rest),
        )

    def scaled(self, factor: float) -> StepProfile:
        """Return this step on ranks that compute `factor` times as long."""
        start, end, rest = (factor * s for s in (self.backward_start_s, self.backward_end_s, self.rest_s))
        ready = tuple((num_bytes, factor * s) for num_bytes, s in self.ready)
        return replace(self, backward_start_s=start, ready=ready, backward_end_s=end, rest_s=rest)

    def rebucketed(self, caps_bytes: Sequence[int]) -> StepProfile:
        """Return this step with buckets of the given sizes in bytes; the last holds for all that follow.

        Gradients are assumed to arrive evenly between the known moments.
        """
        sizes: list[int] = []
        while (rest := self.num_bytes - sum(sizes)) > 0:
            sizes.append(min(rest, caps_bytes[min(len(sizes), len(caps_bytes) - 1)]))
        known = [(0, self.backward_start_s)]
        known += zip(accumulate(n for n, _ in self.ready), (s for _, s in self.ready), strict=True)
        moments = (_interpolate(known, reached) for reached in accumulate(sizes))
        return replace(self, ready=tuple(zip(sizes, moments, strict=True)))


def _moments_of(recording: Recording) -> dict[int, list[float]]:
    """Return the times in each complete step that another one follows, by step number, in seconds.

    Since its forward: begin and end of backward; then from the last bucket to the next forward; each `ready`.
    """
    sizes = [bucket.num_bytes for bucket in recording.steps[-1].buckets]
    found = {}
    for step, after in pairwise(recording.steps):
        ready, done = ([getattr(b, name) for b in step.buckets] for name in ("ready", "done"))
        moments = [step.forward_start, step.backward_start, step.backward_end, *ready, *done]
        is_complete = None not in (*moments, after.forward_start) and after.step == step.step + 1
        if is_complete and sizes and sizes == [bucket.num_bytes for bucket in step.buckets]:
            start, end, *of_buckets = ((m - step.forward_start) / _NS_PER_S for m in moments[1:])
            rest = (after.forward_start - max(step.backward_end, *done)) / _NS_PER_S
            found[step.step] = [start, end, rest, *of_buckets[: len(sizes)]]
    return found


def _interpolate(known: Sequence[tuple[int, float]], reached: int) -> float:
    for (low, early), (high, late) in pairwise(known):
        if low < high and reached <= high:
            return early + (reached - low) / (high - low) * (late - early)
    return known[-1][1]


# ---------------------------------------------------------------------- cost of a collective


@dataclass(frozen=True, kw_only=True)
class TransferCost:
    """Model of a message's duration: latency plus time per byte (Hockney, Parallel Computing 20, 1994)."""

    latency_s: float
    """Duration of a message without bytes, in seconds."""
    seconds_per_byte: float

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, float]]) -> TransferCost:
        """Return the model with the least sum of squared relative errors and no negative coefficients.

        Relative errors, as the bytes and seconds of the samples span several magnitudes.

        Raises:
            ConfigurationError: there is no sample, or one with a time of 0.
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
class HookCost:
    """Cost of a hook, measured with two ranks, per byte of the gradients."""

    size_ratio: float
    """Bytes that a rank sends."""
    codec_s: float
    """Seconds of encoding and decoding."""
    gathers: bool
    """True if a rank sends and decodes the data of all ranks, which does not shrink when it is summed."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Model of a full-duplex link between neighboring ranks; all links are equal."""

    hop: TransferCost
    """Cost of a message between neighbors."""
    algorithm: Literal["ring", "tree"] = "ring"
    """`ring`: 2 (N-1) hops with 1/N of the bytes each, as in gloo, and in NCCL with large tensors. `tree`:
    two binary trees that share the bytes, 2 log2(N) hops, as in NCCL with many ranks; not for gathers."""
    num_in_flight: int = 1
    """Number of collectives in progress at once, whose bytes pass the link one after the other."""
    cpu_seconds_per_byte: float = 0.0
    """CPU seconds of a rank per byte that it sends: kernel, gloo and the sum."""
    cores: float = math.inf
    """Cores of a rank, shared by backward, the hook and the CPU work of sending; infinity if they do not
    compete, as on a GPU with its own network card."""

    def costs(self, num_bytes: float, num_ranks: int, hook: HookCost | None) -> tuple[float, float, float]:
        """Return a bucket's seconds of encoding and latency, its seconds on the link, and its CPU seconds."""
        others = num_ranks - 1
        num_hops, sent, codec_s = 2.0 * others, 2 * others / num_ranks * num_bytes, 0.0
        if hook is not None and others:
            sent, codec_s = sent * hook.size_ratio, hook.codec_s * num_bytes
        if hook is not None and hook.gathers:
            num_hops, sent, codec_s = others, sent * num_ranks / 2, codec_s * num_ranks / 2
        elif self.algorithm == "tree":
            num_hops = 2.0 * math.ceil(math.log2(num_ranks))
        cpu_s = sent * self.cpu_seconds_per_byte
        link_s = max(sent * self.hop.seconds_per_byte, cpu_s)  # no faster than the CPU
        return codec_s + num_hops * self.hop.latency_s, link_s, codec_s + cpu_s


def schedule(
    ready: Sequence[tuple[float, float]], link: Link, num_ranks: int, hook: HookCost | None = None
) -> tuple[list[float], float]:
    """Simulate the collectives of equal ranks on their links, in the given order; return their ends.

    `ready` has the bytes of each collective, and the second from which it may begin. A hook has one thread,
    which handles one bucket after the other.

    Returns:
        The end of each collective, and the CPU seconds of a rank for all of them.
    """
    num_in_flight = link.num_in_flight if hook is None else 1
    done_s, total_cpu_s = [0.0] * num_in_flight, 0.0
    for num_bytes, ready_s in ready:
        before_s, link_s, cpu_s = link.costs(num_bytes, num_ranks, hook)
        begun_s = max(ready_s, done_s[-num_in_flight]) + before_s
        done_s.append(max(begun_s, done_s[-1]) + link_s)
        total_cpu_s += cpu_s
    return done_s[num_in_flight:], total_cpu_s


# ---------------------------------------------------------------------- duration of a step


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted step time and efficiency with N ranks; for averagers, the mean over a period."""

    num_ranks: int
    step_s: float
    efficiency: float
    """Speed of N ranks relative to N times that of one."""


def predict(profile: StepProfile, link: Link, num_ranks: int, hook: HookCost | None = None) -> Prediction:
    """Return the predicted step time if the reducer, or a hook, averages the gradients."""
    done_s, cpu_s = schedule(profile.ready, link, num_ranks, hook)
    end_s = max(profile.backward_end_s, done_s[-1], (profile.backward_end_s + cpu_s) / link.cores)
    step_s = end_s + profile.rest_s
    return Prediction(num_ranks=num_ranks, step_s=step_s, efficiency=profile.compute_s / step_s)


def predict_averager(profile: StepProfile, plan: AveragerPlan, link: Link, num_ranks: int) -> Prediction:
    """Return the predicted mean step time in the local phase of an averager.

    Parameters are assumed to have as many bytes as gradients. The averager's own arithmetic, buffers and
    averaged optimizer state are not included.

    Raises:
        ConfigurationError: the averager has groups of ranks.
    """
    options = plan.options
    if isinstance(options, HierarchicalSGDOptions):
        raise ConfigurationError("hierarchical_sgd: links between groups are not modeled")
    num_fragments = getattr(options, "num_fragments", 1)
    size_ratio = _SIZE_RATIO[getattr(options, "encoding", "fp32")]
    num_bytes = int(size_ratio * profile.num_bytes / num_fragments)
    chunks = [(min(_CHUNK_BYTES, num_bytes - at), 0.0) for at in range(0, num_bytes, _CHUNK_BYTES)]
    done_s, _ = schedule(chunks, link, num_ranks)
    hidden_s = getattr(options, "delay", 0) * profile.compute_s
    step_s = profile.compute_s + max(0.0, done_s[-1] - hidden_s) * num_fragments / options.period
    return Prediction(num_ranks=num_ranks, step_s=step_s, efficiency=profile.compute_s / step_s)

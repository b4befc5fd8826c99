"""Step profile: takes from recorded steps what the ranks compute, without communication."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from lightning_ddp.errors import ConfigurationError
from lightning_ddp.telemetry.recording import Recording
from lightning_ddp.telemetry.step_record import StepRecord

Shapes = tuple[tuple[int, ...], ...]
"""Sizes of parameters."""

_NS_PER_S = 1e9
_ITEM_BYTES = 4
_LARGEST_SIDE = 1024


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """One step of the slowest rank at each moment; seconds since its forward began."""

    backward_start_s: float
    """The first gradient is there."""
    ready: tuple[tuple[int, float], ...]
    """Bytes of each bucket, and when its last gradient is there; in launch order."""
    backward_end_s: float
    """All gradients are there."""
    rest_s: float
    """From the end of the collectives to the next forward: gradients handed over, optimizer, next batch."""

    def __post_init__(self) -> None:
        if not self.ready:
            raise ConfigurationError("a step without buckets: it has nothing to communicate")

    @property
    def compute_s(self) -> float:
        """Seconds of a step in which nothing is communicated."""
        return max(self.backward_end_s, *(seconds for _, seconds in self.ready)) + self.rest_s

    @property
    def num_bytes(self) -> int:
        """Size of all gradients."""
        return sum(num_bytes for num_bytes, _ in self.ready)

    @classmethod
    def from_recordings(cls, recordings: Sequence[Recording]) -> StepProfile:
        """The median step of what some ranks of one run have recorded.

        A collective begins once the slowest rank is there, so of each moment the latest of the ranks counts.
        Steps with another number of buckets than the last one do not count, nor what only some ranks have.

        Raises:
            ConfigurationError: no complete step is common to the ranks, or there is no time between steps.
        """
        common = _common_steps(recordings)
        if not common:
            raise ConfigurationError(
                "the recordings have no complete step in common: record more steps (CommunicationMonitor)"
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
        """The same step with other buckets: gradients are taken to come evenly between the known moments.

        Args:
            sizes: bytes of the new buckets, in launch order; as many together as before.

        Raises:
            ConfigurationError: the sizes do not add up.
        """
        if sum(sizes) != self.num_bytes:
            raise ConfigurationError(f"buckets of {sum(sizes)} bytes for {self.num_bytes} bytes of gradients")
        known = [(0, self.backward_start_s)]
        known += zip(accumulate(n for n, _ in self.ready), (s for _, s in self.ready), strict=True)
        moments = (_interpolate(known, reached) for reached in accumulate(sizes))
        return replace(self, ready=tuple(zip(sizes, moments, strict=True)))


def cut_sizes(sizes: Sequence[int], caps_bytes: Sequence[int]) -> list[int]:
    """The positions at which buckets end, as the reducer cuts them.

    Args:
        sizes: of the gradients in bytes, in the order in which they come.
        caps_bytes: of the first bucket, the second ...; the last one holds for all that follow.

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
    """Matrices of at most 1024 x 1024 and a rest that have `num_bytes` together, at 4 bytes an element.

    For recordings, which do not tell the shapes of parameters.

    >>> square_shapes(4 * (2 * 1024 * 1024 + 3 * 1024 + 5))
    ((1024, 1024), (1024, 1024), (3, 1024), (5,))
    """
    rows, rest = divmod(num_bytes // _ITEM_BYTES, _LARGEST_SIDE)
    heights = [_LARGEST_SIDE] * (rows // _LARGEST_SIDE) + [rows % _LARGEST_SIDE]
    shapes: list[tuple[int, ...]] = [(height, _LARGEST_SIDE) for height in heights if height]
    return (*shapes, *([(rest,)] if rest else []))


def num_bytes_of(shapes: Shapes) -> int:
    """Bytes of parameters of 4 bytes an element."""
    return _ITEM_BYTES * sum(map(math.prod, shapes))


def _common_steps(recordings: Sequence[Recording]) -> list[list[StepRecord]]:
    """The complete steps that all ranks have, with the buckets of the last: lists of the ranks' records."""
    by_rank = [
        {step.step: step for step in recording.steps if _is_complete(step)} for recording in recordings
    ]
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
    """Start and end of backward, what came after the collectives, and each bucket's ready; in seconds."""
    end = max(step.backward_end, *(bucket.done for bucket in step.buckets))
    moments = [step.backward_start, step.backward_end, *(bucket.ready for bucket in step.buckets)]
    start, backward_end, *ready = ((moment - step.forward_start) / _NS_PER_S for moment in moments)
    return [start, backward_end, max(0, step.comm_end - end) / _NS_PER_S, *ready]


def _time_between(recording: Recording) -> float:
    """Median seconds from the end of a step's collectives to the next forward."""
    gaps = [
        (after.forward_start - before.comm_end) / _NS_PER_S
        for before, after in pairwise(recording.steps)
        if _is_complete(before) and _is_complete(after) and after.step == before.step + 1
    ]
    if not gaps:
        raise ConfigurationError(
            f"rank {recording.rank} has recorded no two steps in a row, so the time between steps is not"
            " known: record more steps"
        )
    return float(statistics.median(gaps))


def _interpolate(known: Sequence[tuple[int, float]], reached: int) -> float:
    for (low, early), (high, late) in pairwise(known):
        if reached <= high:
            part = (reached - low) / (high - low) if high > low else 1.0
            return early + part * (late - early)
    return known[-1][1]

"""Bucket planning: finds the buckets that end a backward soonest, from ready times and a transfer cost.

A bucket can be launched once its last gradient is there, and buckets are reduced one after the other. So
small buckets start early and large ones waste less on what each collective costs: the plan that ends soonest
is found by dynamic programming over the gradients in the order in which they become ready. A greedy form of
the same problem is in Shi et al., "MG-WFBP", INFOCOM 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise

import torch

from lightning_ddp.comm.cost import TransferCost
from lightning_ddp.errors import ConfigurationError

__all__ = ["BackwardTimes", "best_boundaries", "safe_boundaries"]

_MOST_CHUNKS = 128
_MOST_BUCKETS = 64
_TOLERANCE = 0.01
_SLOWDOWNS = (1.0, 2.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class BackwardTimes:
    """When the gradients of a backward are there, and what it costs to reduce them.

    A plan of its parameters is given as the positions at which buckets end: `(2, 5)` is a bucket of the
    parameters at 0 and 1, and one of those at 2, 3 and 4.
    """

    ready_s: tuple[float, ...]
    """Seconds from the beginning of backward until a bucket could be launched that ended with this gradient,
    in the order in which they go into buckets."""
    num_bytes: tuple[int, ...]
    """Size of each gradient in its bucket."""
    backward_s: float
    """Seconds from the beginning of backward to its end, without the wait for buckets."""
    cost: TransferCost
    """Of the reduction of one bucket."""
    launch_s: float = 0.0
    """Seconds for which starting one reduction holds up backward."""

    def __post_init__(self) -> None:
        if len(self.ready_s) != len(self.num_bytes) or not self.ready_s:
            raise ConfigurationError(
                f"{len(self.ready_s)} ready times for {len(self.num_bytes)} sizes: expected as many, and some"
            )

    def finish_s(self, boundaries: Sequence[int]) -> float:
        """Seconds from the beginning of backward until it is over and all buckets of a plan are reduced.

        >>> cost = TransferCost(latency_s=1.0, seconds_per_byte=0.5)
        >>> times = BackwardTimes(ready_s=(1.0, 2.0, 4.0), num_bytes=(2, 2, 2), backward_s=4.0, cost=cost)
        >>> times.finish_s([3]), times.finish_s([2, 3])
        (8.0, 7.0)
        """
        sent = [0, *accumulate(self.num_bytes)]
        ready = list(accumulate(self.ready_s, max))
        finish_s = 0.0
        for num_launched, (start, end) in enumerate(pairwise([0, *boundaries])):
            start_s = max(finish_s, ready[end - 1] + num_launched * self.launch_s)
            finish_s = start_s + self.cost.seconds(sent[end] - sent[start])
        return max(finish_s, self.backward_s + len(boundaries) * self.launch_s)

    def slowed(self, factor: float) -> BackwardTimes:
        """The same, with collectives that take `factor` times as long."""
        cost = TransferCost(
            latency_s=factor * self.cost.latency_s, seconds_per_byte=factor * self.cost.seconds_per_byte
        )
        return replace(self, cost=cost)


def safe_boundaries(times: BackwardTimes) -> tuple[int, ...]:
    """A plan that is about the best one, and still is where collectives take up to four times as long.

    They compete with backward for processors, which nobody can measure beforehand. Where backward hides all
    communication, the very best plan may leave the transport idle for most of it, and is a bad one as soon as
    backward is shorter or the transport slower. Looked at are the best plans for collectives that take 1, 2
    and 4 times as long, and those that end buckets wherever some of these do. Of them it is the one whose
    loss, as a part of the time of the best plan for the case, is smallest in its worst case.

    Args:
        times: what the plan has to do with.
    """
    cases = [times.slowed(factor) for factor in _SLOWDOWNS]
    plans = [best_boundaries(case) for case in cases]
    best_s = [case.finish_s(plan) for case, plan in zip(cases, plans, strict=True)]
    if not min(best_s):
        return plans[0]

    def worst_loss(plan: tuple[int, ...]) -> float:
        return max(case.finish_s(plan) / best for case, best in zip(cases, best_s, strict=True))

    chosen = [parts for count in range(1, len(plans) + 1) for parts in combinations(plans, count)]
    candidates = [tuple(sorted(set().union(*parts))) for parts in chosen]
    return min(candidates, key=lambda plan: (round(worst_loss(plan), 3), len(plan)))


def best_boundaries(times: BackwardTimes, *, tolerance: float = _TOLERANCE) -> tuple[int, ...]:
    """The plan that is finished soonest, of those with at most 64 buckets; of equal ones that with fewest.

    Exact for up to 128 parameters; of more, neighbours are taken together until they have a 128th of all
    bytes.

    Args:
        times: what the plan has to do with.
        tolerance: by which part of the time a plan may be later if it has fewer buckets.

    >>> cost = TransferCost(latency_s=1.0, seconds_per_byte=0.5)
    >>> times = BackwardTimes(ready_s=(1.0, 2.0, 4.0), num_bytes=(2, 2, 2), backward_s=4.0, cost=cost)
    >>> best_boundaries(times)
    (2, 3)
    """
    chunks = _chunk_boundaries(times.num_bytes)
    ready = list(accumulate(times.ready_s, max))
    sent = [0, *accumulate(times.num_bytes)]
    ready_s = torch.tensor([ready[end - 1] for end in chunks], dtype=torch.float64)
    sent_bytes = torch.tensor([sent[end] for end in (0, *chunks)], dtype=torch.float64)
    # cost_s[i, j]: of a bucket of the chunks j to i, both included
    cost_s = times.cost.latency_s + times.cost.seconds_per_byte * (sent_bytes[1:, None] - sent_bytes[:-1])
    cost_s.masked_fill_(torch.ones_like(cost_s, dtype=torch.bool).triu(1), float("inf"))
    finish_s, starts = _finish_by_count(cost_s, ready_s, times.launch_s)
    totals = [
        max(total, times.backward_s + count * times.launch_s) for count, total in enumerate(finish_s, start=1)
    ]
    latest = min(totals) * (1 + tolerance)
    count = next(index for index, total in enumerate(totals) if total <= latest)
    position = len(chunks)
    ends = []
    while position:
        ends.append(chunks[position - 1])
        position = int(starts[count][position - 1])
        count -= 1
    return tuple(reversed(ends))


def _finish_by_count(
    cost_s: torch.Tensor, ready_s: torch.Tensor, launch_s: float
) -> tuple[list[float], list[torch.Tensor]]:
    """Dynamic programming over the number of buckets.

    Args:
        cost_s: [i, j]: of a bucket from chunk j to chunk i; infinite where j > i.
        ready_s: when each chunk is there.
        launch_s: by which each launch holds up what follows.

    Returns:
        For 1, 2 ... buckets: when the last one is finished at the soonest, and per atom, as the last one of
        all, the first chunk of the last bucket.
    """
    before = torch.full_like(ready_s, float("inf"))  # [j]: when the chunks before j are reduced
    before[0] = 0.0
    finish_s, starts = [], []
    for num_launched in range(min(len(ready_s), _MOST_BUCKETS)):
        start_s = torch.maximum(before[None, :], ready_s[:, None] + num_launched * launch_s)
        reduced_s, first = (start_s + cost_s).min(dim=1)
        finish_s.append(float(reduced_s[-1]))
        starts.append(first)
        before = torch.cat([torch.full_like(before[:1], float("inf")), reduced_s[:-1]])
    return finish_s, starts


def _chunk_boundaries(num_bytes: Sequence[int]) -> list[int]:
    """Where parts of similar size end that are not divided, at most 128 of them."""
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

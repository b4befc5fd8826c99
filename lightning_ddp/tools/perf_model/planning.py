"""Bucket planning: finds the buckets that end a backward soonest, from ready times and a transfer cost.

A bucket can be launched once its last gradient is there, and buckets are reduced one after the other. So
small buckets start early and large ones waste less on what each collective costs: the plan that ends soonest
is found by dynamic programming over the gradients in the order in which they become ready. A greedy form of
the same problem is in Shi et al., "MG-WFBP", INFOCOM 2019. As collectives compete with backward for
processors, plans for slower ones are tried as well, and the simulation of a step decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from lightning_ddp.comm.cost import TransferCost
from lightning_ddp.tools.perf_model.network import Network
from lightning_ddp.tools.perf_model.prediction import predict_hook
from lightning_ddp.tools.perf_model.profile import StepProfile, cut_sizes, num_bytes_of
from lightning_ddp.tools.perf_model.program import plain_model

_MIB = 2**20
_MOST_CHUNKS = 128
_MOST_BUCKETS = 64
_TOLERANCE = 0.01
_SLOWDOWNS = (1.0, 2.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """Sizes of buckets, and what a step takes with them."""

    num_ranks: int
    caps_mb: tuple[float, ...]
    """For `bucket_cap_mb_list`."""
    step_s: float
    recorded_s: float
    """With the recorded buckets."""


def recommend_buckets(
    profile: StepProfile,
    shapes: Sequence[tuple[int, ...]],
    network: Network,
    num_ranks: int,
    *,
    cores: float = math.inf,
) -> BucketPlan:
    """Find the buckets with which a step without a hook is over soonest; those recorded, if none is better.

    Gradients, whose shapes are given in the order in which they come, are taken to come evenly between the
    recorded moments. `cores` are a rank's, see `simulate`.
    """
    sizes = [num_bytes_of((shape,)) for shape in shapes]
    sizes[-1] += profile.num_bytes - sum(sizes)  # what is less than an element
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
    """Caps in MiB that lead to these buckets, without those at the end that change nothing."""
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
    """The plan that is finished soonest, of those with at most 64 buckets; of equal ones that with fewest.

    Exact for up to 128 parameters; of more, neighbours are taken together until they have a 128th of all
    bytes.

    Args:
        ready_s: seconds from the beginning of backward until a bucket could be launched that ended with this
            gradient, in the order in which they go into buckets.
        num_bytes: size of each gradient in its bucket.
        backward_s: seconds from the beginning of backward to its end, without the wait for buckets.
        cost: of the reduction of one bucket.
        tolerance: by which part of the time a plan may be later if it has fewer buckets.

    Returns:
        The positions at which buckets end: `(2, 5)` is a bucket of the parameters at 0 and 1, and one of
        those at 2, 3 and 4.

    >>> cost = TransferCost(latency_s=1.0, seconds_per_byte=0.5)
    >>> best_boundaries([1.0, 2.0, 4.0], [2, 2, 2], 4.0, cost)
    (2, 3)
    """
    chunks = _chunk_boundaries(num_bytes)
    latest, sent = list(accumulate(ready_s, max)), [0, *accumulate(num_bytes)]
    ready = torch.tensor([latest[end - 1] for end in chunks], dtype=torch.float64)
    sent_bytes = torch.tensor([sent[end] for end in (0, *chunks)], dtype=torch.float64)
    # cost_s[i, j]: of a bucket of the chunks j to i, both included
    cost_s = cost.latency_s + cost.seconds_per_byte * (sent_bytes[1:, None] - sent_bytes[:-1])
    cost_s.masked_fill_(torch.ones_like(cost_s, dtype=torch.bool).triu(1), math.inf)
    before = torch.full_like(ready, math.inf)  # [j]: when the chunks before j are reduced by `count` buckets
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

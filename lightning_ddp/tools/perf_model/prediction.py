"""Predictions of step times with a given number of ranks, and the buckets that make them short."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_ddp.averaging import AveragerPlan
from lightning_ddp.averaging.local_sgd import HierarchicalSGDOptions
from lightning_ddp.averaging.outer import DiLoCoOptions
from lightning_ddp.averaging.streaming import StreamingDiLoCoOptions
from lightning_ddp.comm.cost import TransferCost
from lightning_ddp.encoding.chunks import CHUNK_NUMEL
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.tools.perf_model.network import Network
from lightning_ddp.tools.perf_model.planning import BackwardTimes, best_boundaries, safe_boundaries
from lightning_ddp.tools.perf_model.profile import StepProfile, cut_sizes, num_bytes_of
from lightning_ddp.tools.perf_model.program import HookModel, plain_model
from lightning_ddp.tools.perf_model.simulation import simulate

__all__ = ["BucketPlan", "Prediction", "predict_averager", "predict_hook", "recommend_buckets"]

_MIB = 2**20
_CHUNK_BYTES = 4 * CHUNK_NUMEL
_PART = {"fp32": 1.0, "bf16": 0.5, "int8": 0.25 + 1 / 256}
"""Bytes of outer gradients, of those of float32; int8 has 4 bytes of scale for 256 elements."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step with a given number of ranks; for averagers, the mean over a period."""

    num_ranks: int
    step_s: float
    compute_s: float
    """What the step would take without communication."""
    exposed_s: float
    """Communication that nothing hides."""

    @property
    def efficiency(self) -> float:
        """Part of the step that is not lost to communication, 0 to 1: speed of N ranks / N times one's."""
        return self.compute_s / self.step_s


def predict_hook(
    profile: StepProfile, hook: HookModel, network: Network, num_ranks: int, *, cores: float = math.inf
) -> Prediction:
    """The step in which a hook, or the reducer without one, averages the gradients.

    Args:
        profile: what the ranks compute.
        hook: what happens to the buckets of this profile.
        network: between the ranks.
        num_ranks: how many; one alone communicates nothing.
        cores: of a rank, see `simulate`.

    Raises:
        ConfigurationError: hook and profile have different buckets.
    """
    programs = hook.programs(num_ranks)
    step = simulate(profile, programs, network, num_ranks, cores=cores, is_queued=hook.is_queued)
    return Prediction(
        num_ranks=num_ranks, step_s=step.step_s, compute_s=profile.compute_s, exposed_s=step.exposed_s
    )


def predict_averager(
    profile: StepProfile, plan: AveragerPlan, network: Network, num_ranks: int
) -> Prediction:
    """The mean step of the local phase of an averager.

    Parameters are taken to have as many bytes as gradients. The averager's own arithmetic, buffers and
    averaged optimizer state do not count.

    Raises:
        ConfigurationError: the groups of `hierarchical_sgd` do not divide the ranks.
    """
    options = plan.options
    exposed_s = _rounds_s(profile, plan, network, num_ranks)
    if getattr(options, "gradients", "none") == "node":
        plain = plain_model([size for size, _ in profile.ready])
        in_node = min(network.ranks_per_node, num_ranks)
        exposed_s += predict_hook(profile, plain, network, in_node).exposed_s
    return Prediction(
        num_ranks=num_ranks,
        step_s=profile.compute_s + exposed_s,
        compute_s=profile.compute_s,
        exposed_s=exposed_s,
    )


def _rounds_s(profile: StepProfile, plan: AveragerPlan, network: Network, num_ranks: int) -> float:
    """Seconds of waiting for averaged parameters, a step."""
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
    total = 0.0
    whole = max(sizes)
    for step in range(1, whole + 1):
        due = [period for period in sizes if step % period == 0]
        if due:
            size = sizes[max(due)]
            if num_ranks > 1 and (size > num_ranks or num_ranks % size):
                raise ConfigurationError(
                    f"hierarchical_sgd: periods={dict(options.periods)} with {num_ranks} ranks: each group"
                    " size has to divide their number"
                )
            total += _exchange_s(num_bytes, network, min(size, num_ranks))
    return total / whole


def _exchange_s(num_bytes: float, network: Network, num_ranks: int) -> float:
    """Seconds of an average of parameters: chunk after chunk, of which several may be under way."""

    def fixed_and_link_s(size: float) -> tuple[float, float]:
        transfer = network.transfer("all_reduce", size, num_ranks)
        return transfer.fixed_s, network.seconds(transfer) - transfer.fixed_s

    def next_s(size: float) -> float:
        """From the end of one chunk to that of the next."""
        fixed_s, link_s = fixed_and_link_s(size)
        return max(link_s, (fixed_s + link_s) / network.num_in_flight)

    num_whole, rest = divmod(num_bytes, _CHUNK_BYTES)
    first_s = sum(fixed_and_link_s(min(num_bytes, _CHUNK_BYTES)))
    if not num_whole:
        return first_s
    return first_s + (num_whole - 1) * next_s(_CHUNK_BYTES) + (next_s(rest) if rest else 0.0)


# ---------------------------------------------------------------------- buckets


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

    Gradients are taken to come evenly between the recorded moments, and the transport to be up to four times
    slower than given, as the best plan for an idle one may be a bad one for a busy one.

    Args:
        profile: what the ranks compute.
        shapes: of the parameters, in the order in which gradients come.
        network: between the ranks.
        num_ranks: how many.
        cores: of a rank, see `simulate`.
    """
    sizes = [num_bytes_of((shape,)) for shape in shapes]
    sizes[-1] += profile.num_bytes - sum(sizes)  # what is less than an element
    fixed_s, whole_s = (
        network.seconds(network.transfer("all_reduce", size, num_ranks)) for size in (0, _MIB)
    )
    times = BackwardTimes(
        ready_s=tuple(max(0.0, s - profile.backward_start_s) for _, s in profile.rebucketed(sizes).ready),
        num_bytes=tuple(sizes),
        backward_s=max(0.0, profile.backward_end_s - profile.backward_start_s),
        cost=TransferCost(latency_s=fixed_s, seconds_per_byte=(whole_s - fixed_s) / _MIB),
    )

    def step_s(buckets: Sequence[int]) -> float:
        model = plain_model(buckets)
        return predict_hook(profile.rebucketed(buckets), model, network, num_ranks, cores=cores).step_s

    recorded = [size for size, _ in profile.ready]
    plans = [_sums(sizes, ends) for ends in (safe_boundaries(times), best_boundaries(times))]
    found = []
    for plan in (recorded, *plans):
        caps_mb = _caps_mb(sizes, plan)
        ends = cut_sizes(sizes, [int(cap * _MIB) for cap in caps_mb])
        found.append((step_s(_sums(sizes, ends)), len(caps_mb), caps_mb))
    best_s, _, caps_mb = min(found)
    return BucketPlan(num_ranks=num_ranks, caps_mb=caps_mb, step_s=best_s, recorded_s=step_s(recorded))


def _sums(sizes: Sequence[int], ends: Sequence[int]) -> list[int]:
    return [sum(sizes[start:end]) for start, end in pairwise([0, *ends])]


def _caps_mb(sizes: Sequence[int], buckets: Sequence[int]) -> tuple[float, ...]:
    """Caps in MiB that lead to these buckets, without those at the end that change nothing."""

    def ends(caps_mb: Sequence[float]) -> list[int]:
        return cut_sizes(sizes, [int(cap * _MIB) for cap in caps_mb])

    exact = [size / _MIB for size in buckets if size]
    rounded = [math.ceil(1e3 * cap) / 1e3 for cap in exact]
    caps = rounded if ends(rounded) == ends(exact) else exact
    while len(caps) > 1 and ends(caps[:-1]) == ends(caps):
        caps.pop()
    return tuple(caps)

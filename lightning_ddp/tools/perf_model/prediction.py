"""Predictions of step times with a given number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_ddp.averaging import AveragerPlan
from lightning_ddp.averaging.local_sgd import HierarchicalSGDOptions
from lightning_ddp.averaging.outer import DiLoCoOptions
from lightning_ddp.averaging.streaming import StreamingDiLoCoOptions
from lightning_ddp.encoding.chunks import CHUNK_NUMEL
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.tools.perf_model.network import Network
from lightning_ddp.tools.perf_model.profile import StepProfile
from lightning_ddp.tools.perf_model.program import HookModel, plain_model
from lightning_ddp.tools.perf_model.simulation import simulate

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
    compute_s = profile.compute_s
    exposed_s = _rounds_s(profile, plan, network, num_ranks)
    if getattr(plan.options, "gradients", "none") == "node":
        plain = plain_model([size for size, _ in profile.ready])
        in_node = min(network.ranks_per_node, num_ranks)
        exposed_s += predict_hook(profile, plain, network, in_node).exposed_s
    return Prediction(
        num_ranks=num_ranks, step_s=compute_s + exposed_s, compute_s=compute_s, exposed_s=exposed_s
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

    def whole_and_next_s(size: float) -> tuple[float, float]:
        """Of a chunk alone, and from the end of the one before to its own."""
        transfer = network.transfer("all_reduce", size, num_ranks)
        whole_s = network.seconds(transfer)
        return whole_s, max(whole_s - transfer.fixed_s, whole_s / network.num_in_flight)

    num_whole, rest = divmod(num_bytes, _CHUNK_BYTES)
    first_s, next_s = whole_and_next_s(min(num_bytes, _CHUNK_BYTES))
    if not num_whole:
        return first_s
    return first_s + (num_whole - 1) * next_s + (whole_and_next_s(rest)[1] if rest else 0.0)

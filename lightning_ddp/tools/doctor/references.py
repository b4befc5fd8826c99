"""Closed formulas of the results of communication hooks and averagers, for tensors on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

_EPS: Final = 2.0**-23  # of float32


class Claim(NamedTuple):
    """A result with its expected value and the allowed error per element; 0 for equal bits."""

    what: str
    found: Tensor
    expected: Tensor
    bound: Tensor | float


def mean_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of the ranks' rows in float64, and a bound of float32's rounding in any order."""
    wide = rows.double()
    size = wide.abs().mean(0)
    return wide.mean(0), (len(rows) + 1) * _EPS * size + 1e-6 * _EPS


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Gradients of all parameters in one finite step, before and after a hook."""

    rank: int
    rows: Tensor
    """Gradient plus residual of each rank: (ranks, elements)."""
    found: Tensor
    """Resulting gradient of this rank, 1-D."""
    residuals: Tensor
    """Residual of each rank for the next step: (ranks, elements); zeros if none."""


Formula = Callable[[Outcome], Iterator[Claim]]


def _own(outcome: Outcome) -> Iterator[Claim]:
    yield Claim("own gradient", outcome.found, outcome.rows[outcome.rank], 0.0)


def _mean(relative: float = 0.0, of_largest: float = 0.0, smallest: float = 0.0) -> Formula:
    """Make the formula of a mean of numbers that are rounded before the sum, and once more after it.

    A number's error is relative to itself and to the largest number of its block (here of all), plus
    `smallest`.
    """

    def check(outcome: Outcome) -> Iterator[Claim]:
        mean, bound = mean_of(outcome.rows)
        shares = outcome.rows.double().abs() / len(outcome.rows)
        largest = shares.amax(1, keepdim=True)
        once = bound + (relative * shares + of_largest * largest + smallest).sum(0)
        sent = mean.abs() + once
        yield Claim("mean", outcome.found, mean, once + relative * sent + of_largest * sent.max() + smallest)

    return check


def _with_feedback(outcome: Outcome) -> Iterator[Claim]:
    """Claim that something is sent, and that all that is not sent is in the residuals."""
    mean, bound = mean_of(outcome.rows)
    kept, kept_bound = mean_of(outcome.residuals)
    slack = bound + kept_bound + 4 * _EPS * outcome.found.abs()
    yield Claim("gradient plus mean residual", outcome.found + kept, mean, slack)
    yield Claim("a gradient that is not zero", outcome.found.any().view(1), torch.ones(1), 0.0)


HOOKS: Final[Mapping[str, tuple[Mapping[str, Any], Formula]]] = {
    "allreduce": ({}, _mean()),
    "noop": ({}, _own),
    "fp16": ({}, _mean(relative=2**-11, smallest=2**-25)),
    "bf16": ({}, _mean(relative=2**-8)),
    "int8": ({}, _mean(of_largest=1 / 254)),
    "fp8": ({}, _mean(relative=1 / 16, of_largest=1 / 28672)),
    "topk": ({"ratio": 0.25}, _with_feedback),
    "randomk": ({"ratio": 0.25}, _with_feedback),
    "sign": ({"block_size": 256}, _with_feedback),
    "powersgd": ({"rank": 2, "start_step": 2, "min_compression": 2.0}, _with_feedback),
}
"""Options and formulas for the check of hooks, by name."""


_PLAIN_OUTER: Final = {"period": 2, "outer_lr": 1.0, "outer_momentum": 0.0}

AVERAGERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "post_local_sgd": {"period": 2},
    "hierarchical_sgd": {"periods": {2: 0}},
    "slowmo": {"period": 2, "slow_lr": 1.0, "slow_momentum": 0.0},
    "diloco": _PLAIN_OUTER,
    "streaming_diloco": {**_PLAIN_OUTER, "num_fragments": 1, "delay": 1, "local_weight": 0.0},
}
"""Options by name with which an averager sets the parameters to their mean of each second local step, after
`delay` steps."""

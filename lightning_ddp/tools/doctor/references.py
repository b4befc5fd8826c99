"""Independent formulas of communication hooks and averagers for the expected results of an exchange.

Nothing here uses the engine: each function gets the inputs of all ranks, gathered by other means, and yields
claims about the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

_EPS: Final = 2.0**-23  # of float32
_LOOSE: Final = 1e-5  # relative; for products of matrices


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


# ---------------------------------------------------------------------- communication hooks


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One bucket in one finite step: the inputs of all ranks, and the results on this rank."""

    options: Mapping[str, Any]
    """Options of the hook."""
    step: int
    """Number of finite steps before."""
    rank: int
    rows: Tensor
    """Gradient of each rank plus its residual: (ranks, elements)."""
    shapes: Sequence[torch.Size]
    """Shapes of the parameters, in the order of a row."""
    found: Tensor
    """Resulting gradient of this rank, 1-D."""
    residual: Tensor
    """Residual of this rank for the next step, 1-D; zeros if none."""

    def pieces(self) -> Iterator[tuple[torch.Size, slice]]:
        """Iterate over shape and slice of each parameter."""
        start = 0
        for shape in self.shapes:
            yield shape, slice(start, start + shape.numel())
            start += shape.numel()


def _check_mean(bucket: Bucket) -> Iterator[Claim]:
    mean, bound = mean_of(bucket.rows)
    yield Claim("mean", bucket.found, mean, bound)


def _check_finite(bucket: Bucket) -> Iterator[Claim]:
    found = bucket.found.isfinite().float()
    yield Claim("finite elements", found, torch.ones_like(found), 0.0)


def _check_own(bucket: Bucket) -> Iterator[Claim]:
    yield Claim("own gradient", bucket.found, bucket.rows[bucket.rank], 0.0)


def _check_rounded(
    relative: float, of_largest: float, smallest: float
) -> Callable[[Bucket], Iterator[Claim]]:
    """Make the check of a mean of numbers that are rounded before the sum, and once more after it.

    A number's error is relative to itself and to the largest number of its block (here its bucket), plus
    `smallest`.
    """

    def check(bucket: Bucket) -> Iterator[Claim]:
        mean, bound = mean_of(bucket.rows)
        shares = bucket.rows.double().abs() / len(bucket.rows)
        largest = shares.amax(1, keepdim=True)
        once = bound + (relative * shares + of_largest * largest + smallest).sum(0)
        sent = mean.abs() + once
        bound = once + relative * sent + of_largest * sent.max() + smallest
        yield Claim("mean of rounded gradients", bucket.found, mean, bound)

    return check


def _kept(bucket: Bucket, sent: Tensor) -> Claim:
    """Claim that the residual is the part that was not sent (error feedback)."""
    own = bucket.rows[bucket.rank]
    bound = 4 * _EPS * (own.abs() + sent.abs()).double()
    return Claim("residual", bucket.residual, own - sent, bound)


def _check_topk(bucket: Bucket) -> Iterator[Claim]:
    sent = torch.zeros_like(bucket.rows)
    for shape, where in bucket.pieces():
        values = bucket.rows[:, where]
        count = max(1, math.ceil(bucket.options["ratio"] * shape.numel()))
        largest = values.abs().topk(count, dim=1).indices
        sent[:, where] = torch.zeros_like(values).scatter(1, largest, values.gather(1, largest))
    mean, bound = mean_of(sent)
    yield Claim("mean of the largest elements", bucket.found, mean, bound)
    yield _kept(bucket, sent[bucket.rank])


def _check_randomk(bucket: Bucket) -> Iterator[Claim]:
    is_sent = bucket.found != 0
    mean, bound = mean_of(bucket.rows)
    expected = torch.where(is_sent, mean, 0.0)
    yield Claim("mean of random elements", bucket.found, expected, bound)
    for shape, where in bucket.pieces():
        count = max(1, math.ceil(bucket.options["ratio"] * shape.numel()))
        found = is_sent[where].sum()
        # A mean may be zero itself, if all units of a layer are inactive.
        num_zeros = (mean[where] == 0).sum()
        least = torch.clamp(count - num_zeros, min=0)
        allowed = torch.clamp(found, min=least, max=torch.tensor(count, device=found.device))
        yield Claim("number of elements sent", found, allowed, 0.0)
    yield _kept(bucket, torch.where(is_sent, bucket.rows[bucket.rank], 0.0))


def _check_sign(bucket: Bucket) -> Iterator[Claim]:
    sent = torch.zeros_like(bucket.rows)
    for _, where in bucket.pieces():
        for row, values in zip(sent, bucket.rows[:, where], strict=True):
            blocks = values.split(bucket.options["block_size"])
            row[where] = torch.cat([torch.where(b >= 0, b.abs().mean(), -b.abs().mean()) for b in blocks])
    mean, bound = mean_of(sent)
    # The scale is a mean of many numbers, summed in a different order.
    loose = bound + _LOOSE * sent.double().abs().mean(0)
    yield Claim("mean of signs and scales", bucket.found, mean, loose)
    own = bucket.rows[bucket.rank]
    slack = _LOOSE * (own.abs() + sent[bucket.rank].abs()).double()
    yield Claim("residual", bucket.residual, own - sent[bucket.rank], slack)


def _check_powersgd(bucket: Bucket) -> Iterator[Claim]:
    mean, bound = mean_of(bucket.rows)
    if bucket.step < bucket.options["start_step"]:
        yield Claim("mean before start_step", bucket.found, mean, bound)
        return
    own = bucket.rows[bucket.rank]
    kept = torch.zeros_like(own)
    for shape, where in bucket.pieces():
        found, whole = bucket.found[where], mean[where]
        n = shape[0] if shape else 1
        m = shape.numel() // max(n, 1)
        rank = min(bucket.options["rank"], n, m)
        if len(shape) < 2 or (n + m) * rank * bucket.options["min_compression"] >= n * m:
            yield Claim("mean of what is not compressed", found, whole, bound[where])
            continue
        kept[where] = own[where] - found
        matrix, size = found.double().view(n, m), whole.norm()
        beyond = torch.linalg.svdvals(matrix)[rank:]
        zeros = torch.zeros_like(beyond)
        yield Claim(f"rank above {rank}", beyond, zeros, float(_LOOSE * size))
        # P P^T M is a projection of M, so the rest of M is orthogonal to it.
        overlap = (found.double() * (whole - found)).sum()
        yield Claim("projection", overlap, torch.zeros_like(overlap), float(_LOOSE * size.square()))
    slack = 4 * _EPS * (own.abs() + bucket.found.abs()).double()
    yield Claim("residual", bucket.residual, kept, slack)


HOOKS: Final[Mapping[str, tuple[Mapping[str, Any], Callable[[Bucket], Iterator[Claim]]]]] = {
    "allreduce": ({}, _check_mean),
    "noop": ({}, _check_own),
    "fp16": ({}, _check_rounded(2**-11, 0.0, 2**-25)),
    "bf16": ({}, _check_rounded(2**-8, 0.0, 0.0)),
    "int8": ({}, _check_rounded(0.0, 1 / 254, 0.0)),
    "fp8": ({}, _check_rounded(1 / 16, 1 / 28672, 0.0)),
    "topk": ({"ratio": 0.25}, _check_topk),
    "randomk": ({"ratio": 0.25}, _check_randomk),
    "sign": ({"block_size": 256}, _check_sign),
    "powersgd": ({"rank": 2, "start_step": 2, "min_compression": 2.0}, _check_powersgd),
}
"""Options and formulas for the check of hooks, by name."""


def hook_formula(name: str) -> tuple[Mapping[str, Any], Callable[[Bucket], Iterator[Claim]]]:
    """Return options and formula of a hook; without a formula, a check for finite results."""
    return HOOKS.get(name, ({}, _check_finite))


# ---------------------------------------------------------------------- averagers


@dataclass(kw_only=True)
class Rounds:
    """State of an averager's formula over the steps of local training."""

    options: Mapping[str, Any]
    """Options of the averager, and `lr` of the optimizer."""
    sizes: Sequence[int]
    """Number of elements of each parameter, in the optimizer's order."""
    anchor: Tensor
    """Parameters at the start of local training, the same on all ranks; then the outer ones; float64."""

    def __post_init__(self) -> None:
        self.momentum = torch.zeros_like(self.anchor)
        self.under_way: tuple[int, Tensor, Tensor] | None = None
        """Pending fragment: step of its application, change of the parameters, mask; or None."""


def _post_local_sgd(rounds: Rounds, step: int, rows: Tensor) -> Tensor:
    return rows.mean(0).expand_as(rows) if step % rounds.options["period"] == 0 else rows


def _hierarchical_sgd(rounds: Rounds, step: int, rows: Tensor) -> Tensor:
    due = [size or len(rows) for period, size in rounds.options["periods"].items() if step % period == 0]
    if not due:
        return rows
    size = max(due)
    return rows.view(-1, size, rows.shape[1]).mean(1).repeat_interleave(size, 0)


def _slowmo(rounds: Rounds, step: int, rows: Tensor) -> Tensor:
    options = rounds.options
    if step % options["period"]:
        return rows
    moved = rounds.anchor - rows.mean(0)
    rounds.momentum = options["slow_momentum"] * rounds.momentum + moved / options["lr"]
    rounds.anchor = rounds.anchor - options["slow_lr"] * options["lr"] * rounds.momentum
    return rounds.anchor.expand_as(rows)


def _outer_step(rounds: Rounds, moved: Tensor, where: Tensor) -> None:
    """Take an outer step of SGD with Nesterov momentum at the elements `where`."""
    options = rounds.options
    momentum = options["outer_momentum"] * rounds.momentum + moved
    anchor = rounds.anchor - options["outer_lr"] * (moved + options["outer_momentum"] * momentum)
    rounds.momentum = torch.where(where, momentum, rounds.momentum)
    rounds.anchor = torch.where(where, anchor, rounds.anchor)


def _diloco(rounds: Rounds, step: int, rows: Tensor) -> Tensor:
    if step % rounds.options["period"]:
        return rows
    _outer_step(rounds, rounds.anchor - rows.mean(0), torch.ones_like(rounds.anchor, dtype=torch.bool))
    return rounds.anchor.expand_as(rows)


def _streaming_diloco(rounds: Rounds, step: int, rows: Tensor) -> Tensor:
    options = rounds.options
    if rounds.under_way is not None and step == rounds.under_way[0]:
        _, moved, where = rounds.under_way
        _outer_step(rounds, moved, where)
        own = options["local_weight"]
        rows = torch.where(where, own * rows + (1 - own) * rounds.anchor, rows)
    every = options["period"] // options["num_fragments"]
    if step % every == 0:
        fragment = (step // every - 1) % options["num_fragments"]
        dealt = [i % options["num_fragments"] == fragment for i in range(len(rounds.sizes))]
        where = torch.tensor(dealt, device=rows.device).repeat_interleave(
            torch.tensor(rounds.sizes, device=rows.device)
        )
        rounds.under_way = (step + options["delay"], rounds.anchor - rows.mean(0), where)
    return rows


_OUTER = {"outer_lr": 0.7, "outer_momentum": 0.5}

AVERAGERS: Final[Mapping[str, tuple[Mapping[str, Any], Callable[[Rounds, int, Tensor], Tensor]]]] = {
    "post_local_sgd": ({"period": 2}, _post_local_sgd),
    "hierarchical_sgd": ({"periods": {2: 2, 4: 0}}, _hierarchical_sgd),
    "slowmo": ({"period": 2, "slow_lr": 1.0, "slow_momentum": 0.5}, _slowmo),
    "diloco": ({"period": 2, **_OUTER}, _diloco),
    "streaming_diloco": (
        {"period": 4, "num_fragments": 2, "delay": 1, "local_weight": 0.5, **_OUTER},
        _streaming_diloco,
    ),
}
"""Options and formulas for the check of averagers, by name. A formula maps the parameters of all ranks after
a local step, one row per rank, to those after the averager's part of the step. For other averagers only the
agreement of the ranks at the end is checked."""

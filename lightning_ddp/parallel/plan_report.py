"""What `bucket_cap_mb="auto"` has chosen, as data and as a line in the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_ddp.parallel.buckets import MIB, BucketSpec
from lightning_ddp.parallel.probing import TransportCost

__all__ = ["BucketPlanReport", "sizes_of"]

_logger = logging.getLogger("lightning_ddp")
_MOST_SIZES = 12


@dataclass(frozen=True, kw_only=True)
class BucketPlanReport:
    """What `bucket_cap_mb="auto"` has chosen, and from what; the same on all ranks.

    Times are in seconds, from the beginning of a synchronised backward to the end of its communication.
    """

    choice: Literal["default", "measured"]
    """The plan of `bucket_cap_mb=None`, or one that was computed from what was measured."""
    reason: str
    """Why."""
    bucket_bytes: tuple[int, ...]
    """Sizes of the buckets in force, in launch order."""
    transport: TransportCost | None = None
    """What it costs to reduce a bucket; None where nothing was measured."""
    backward_s: float | None = None
    """Until all gradients were there, on the slowest rank."""
    predicted_default_s: float | None = None
    """With the default plan, as computed."""
    predicted_s: float | None = None
    """With the computed plan, as computed; None where it is the default one."""
    measured_default_s: float | None = None
    """With the default plan: the median of the steps in which the two took turns, None if they did not."""
    measured_s: float | None = None
    """With the computed plan, as measured then."""

    def log(self, *, is_warning: bool = False) -> None:
        """Writes one line to the log `lightning_ddp`: information, or a warning."""
        plan = f"{_counted(self.bucket_bytes)} of {_in_mib(self.bucket_bytes)} MiB"
        kept = "keeps the default plan" if self.choice == "default" else "chose a plan"
        level = logging.WARNING if is_warning else logging.INFO
        transport = ""
        if self.transport is not None:
            transfer = self.transport.transfer
            rate = f"{1e-6 / transfer.seconds_per_byte:.0f} MB/s" if transfer.seconds_per_byte else "any rate"
            transport = f" (a bucket takes {1e3 * transfer.latency_s:.2g} ms and {rate})"
        _logger.log(level, "bucket_cap_mb='auto' %s, %s: %s%s", kept, plan, self.reason, transport)


def sizes_of(plan: Sequence[BucketSpec]) -> tuple[int, ...]:
    """Bytes of each bucket."""
    return tuple(spec.numel * spec.dtype.itemsize for spec in plan)


def _counted(sizes: Sequence[int]) -> str:
    return "1 bucket" if len(sizes) == 1 else f"{len(sizes)} buckets"


def _in_mib(sizes: Sequence[int]) -> str:
    """The sizes, with what is left out of a long list as dots.

    >>> _in_mib([MIB // 2, 3 * MIB])
    '0.5, 3'
    """
    shown = [f"{size / MIB:.3g}" for size in sizes]
    if len(shown) > _MOST_SIZES:
        shown = [*shown[: _MOST_SIZES - 1], "...", shown[-1]]
    return ", ".join(shown)

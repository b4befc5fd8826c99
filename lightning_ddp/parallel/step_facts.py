"""What the synchronised backwards of a reducer have shown so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["StepFacts"]


@dataclass
class StepFacts:
    """What is known of the synchronised backwards so far, on this rank."""

    has_rebuilt: bool = False
    """Whether the buckets were planned anew after the first one."""
    order: list[int] = field(default_factory=list)
    """Parameters in the order in which their gradients became ready on rank 0, as of that."""
    absent: frozenset[int] | None = None
    """Parameters without a gradient in the last one."""
    is_absent_static: bool = True
    """Whether it were always the same."""
    num_reduced: int = 0
    """Buckets reduced in the last one."""

    def note(self, absent: Iterable[int], num_reduced: int) -> None:
        """One ends."""
        missing = frozenset(absent)
        self.is_absent_static = self.is_absent_static and self.absent in (None, missing)
        self.absent = missing
        self.num_reduced = num_reduced

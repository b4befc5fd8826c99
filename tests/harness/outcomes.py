"""What became of one rank, and the error that lists every rank that failed."""

from __future__ import annotations

import traceback as traceback_module
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """What became of one rank; every rank of a run has exactly one."""

    rank: int
    status: Literal["returned", "raised", "died", "hung"]
    """`died`: the process ended without an answer; `hung`: it was stopped after a deadline."""
    value: Any = None
    """What the rank's function returned."""
    exception_type: str | None = None
    """Class name of what it raised."""
    message: str | None = None
    """Text of what it raised, or how it died."""
    traceback: str | None = None
    """Formatted traceback, or for a rank that hung the stacks of its threads."""
    exit_code: int | None = None
    """Exit code of its process; negative is the number of the signal that killed it; None for a thread."""

    @classmethod
    def from_error(cls, rank: int, error: BaseException) -> RankOutcome:
        """The outcome of a rank whose function raised."""
        return cls(
            rank=rank,
            status="raised",
            exception_type=type(error).__name__,
            message=str(error),
            traceback="".join(traceback_module.format_exception(error)),
        )

    @property
    def failed(self) -> bool:
        """Whether the rank did anything but return."""
        return self.status != "returned"

    def describe(self) -> str:
        """One paragraph for people."""
        if self.status == "returned":
            return f"rank {self.rank} returned"
        if self.status == "raised":
            head = f"rank {self.rank} raised {self.exception_type}: {self.message}"
        else:
            head = f"rank {self.rank} {self.status}: {self.message}"
        return f"{head}\n{self.traceback}" if self.traceback else head


class RankFailed(Exception):
    """At least one rank gave no result.

    Attributes:
        outcomes: the outcome of every rank, in rank order.
        failures: rank -> outcome of those that gave no result.
    """

    def __init__(self, outcomes: Sequence[RankOutcome]) -> None:
        self.outcomes = list(outcomes)
        self.failures = {outcome.rank: outcome for outcome in outcomes if outcome.failed}
        names = ", ".join(str(rank) for rank in self.failures)
        paragraphs = "\n".join(outcome.describe() for outcome in self.failures.values())
        super().__init__(f"{len(self.failures)} of {len(outcomes)} ranks failed ({names}):\n{paragraphs}")


def values_or_raise(outcomes: Sequence[RankOutcome]) -> list[Any]:
    """The values in rank order.

    Raises:
        RankFailed: at least one rank has none.
    """
    if any(outcome.failed for outcome in outcomes):
        raise RankFailed(outcomes)
    return [outcome.value for outcome in outcomes]

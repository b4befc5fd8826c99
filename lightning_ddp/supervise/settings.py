"""The times of reconciliation."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ddp.errors import ConfigurationError

__all__ = ["ReconcileSettings"]

_LEAST_HEARTBEAT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class ReconcileSettings:
    """How long a failure may stay unnoticed, and how long its consequences may take.

    Raises:
        ConfigurationError: a time is out of range.
    """

    heartbeat_timeout_s: float = 15.0
    """A node that is not heard of for so long is gone; at least 2."""
    failure_grace_s: float = 30.0
    """A process that does not end so long after a failure is ended, with the stacks of its threads printed.
    Also how long ranks may take to reach the step boundary at which a SIGTERM stops them."""
    stall_timeout_s: float | None = None
    """A rank that makes no progress for so long, and does not wait for others, has failed; None: never."""

    def __post_init__(self) -> None:
        if not self.heartbeat_timeout_s >= _LEAST_HEARTBEAT_S:
            raise ConfigurationError(
                f"heartbeat_timeout_s={self.heartbeat_timeout_s}: expected seconds, at least"
                f" {_LEAST_HEARTBEAT_S:g}"
            )
        if self.stall_timeout_s is not None and not self.stall_timeout_s > 0:
            raise ConfigurationError(f"stall_timeout={self.stall_timeout_s} s: expected a time above 0")
        if not self.failure_grace_s > 0:
            raise ConfigurationError(f"failure_grace_s={self.failure_grace_s}: expected seconds above 0")

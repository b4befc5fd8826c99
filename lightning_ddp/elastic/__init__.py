"""Training that continues without a lost rank: here what callbacks and modules are told of it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ddp.errors import PeerFailure

__all__ = ["WorldChange"]


@dataclass(frozen=True, kw_only=True)
class WorldChange:
    """Description of a change of the world, as callbacks and modules get it in `on_world_changed`."""

    old_world_size: int
    """Number of ranks before the change."""
    new_world_size: int
    """Number of ranks after the change."""
    old_rank: int | None
    """Rank of this process before the change; None if it has just joined."""
    new_rank: int
    """Rank of this process after the change."""
    lost_ranks: tuple[int, ...]
    """Ranks that were lost or have left, by their numbers before the change."""
    joined_ranks: tuple[int, ...] = ()
    """Ranks that have joined, by their numbers after the change."""
    step: int
    """Number of committed optimizer steps."""
    seconds: float
    """Seconds from the failure's report, or from the pause at a step boundary, until training continued."""
    cause: PeerFailure | None
    """Failure behind the change; None if ranks have joined, or left on request."""
    retried: bool
    """True if the interrupted step is repeated."""

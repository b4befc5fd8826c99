"""Training that goes on without a rank that is lost: here what callbacks and modules are told of it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ddp.errors import PeerFailure

__all__ = ["WorldChange"]


@dataclass(frozen=True, kw_only=True)
class WorldChange:
    """What `on_world_changed` of callbacks and modules is told when other ranks go on than before."""

    old_world_size: int
    new_world_size: int
    old_rank: int | None
    """This process's rank before."""
    new_rank: int
    lost_ranks: tuple[int, ...]
    """Those that are lost or have left, as they were numbered before."""
    joined_ranks: tuple[int, ...] = ()
    """As they are numbered now."""
    step: int
    """Optimizer steps that are committed."""
    seconds: float
    """From when this process heard of the failure, or stood at the boundary, until it went on."""
    cause: PeerFailure | None
    """The failure; None where nobody failed: others have joined, or left as they were asked to."""
    retried: bool
    """Whether the step that had begun is done again."""

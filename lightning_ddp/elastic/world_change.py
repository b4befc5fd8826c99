"""What callbacks and modules are told when other ranks go on: their method `on_world_changed`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_ddp.errors import PeerFailure

__all__ = ["WorldChange", "tell_of_change"]


@dataclass(frozen=True, kw_only=True)
class WorldChange:
    """From one generation of ranks to the next."""

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


def tell_of_change(trainer: Any, module: Any, change: WorldChange) -> None:
    """Calls `on_world_changed` of the callbacks that have one, and of the module."""
    for callback in trainer.callbacks:
        hear = getattr(callback, "on_world_changed", None)
        if hear is not None:
            hear(trainer, module, change)
    hear = getattr(module, "on_world_changed", None)
    if hear is not None:
        hear(change)

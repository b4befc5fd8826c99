"""Training that continues without a lost rank: here what the rest of the package knows of it.

That is the interface by which the strategy tells of the steps of a fit, and the change that callbacks get.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lightning_ddp.errors import PeerFailure

if TYPE_CHECKING:  # each run imports this module, which imports no other of the room
    from lightning_ddp.elastic.step_ledger import StepLedger

__all__ = ["StepObserver", "WorldChange"]

T = TypeVar("T")


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


class StepObserver:
    """Observer of a fit that does nothing about lost ranks: the first failure ends the run."""

    ledger: StepLedger | None = None  # record of what is committed; None if nobody asks for it
    dealer: Any = None  # object that deals the rest of an epoch over other ranks, or None
    repeats_steps = False  # True if steps and parts of the loops may be repeated among other ranks

    @property
    def is_alone(self) -> bool:
        """True while this rank completes, without collectives, work that the other ranks have completed."""
        return self.ledger is not None and self.ledger.is_alone

    # ------------------------------------------------------------------ steps

    def begin_fit(self) -> None:
        """Reset the ledger's stage and saved state for a new fit, if there is a ledger; keep its counts."""
        if self.ledger is not None:
            self.ledger.begin_fit()

    def end_forward(self, batch: Any, output: Any) -> None:
        """Receive a batch and the output of `training_step`; does nothing here, subclasses may keep them."""

    def begin_backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Record a start of backward; return the loss, which a subclass may multiply by a rank's weight."""
        if self.ledger is not None:
            self.ledger.begin_backward()
        return loss

    def end_backward(self) -> None:
        """Do nothing at the end of a backward pass; subclasses may defer interrupts."""

    def end_step(self) -> None:
        """Record, if a record is kept, that an optimizer step and any averaging after it are done."""
        if self.ledger is not None:
            self.ledger.take_step()

    def agree(self) -> None:
        """Do nothing after all ranks averaged parameters outside of a step; subclasses may commit a round."""

    # ------------------------------------------------------------------ collectives of hooks

    def repeat(self, phase: Callable[[], None]) -> bool:
        """Run `phase`, such as a validation; return True, or False in a subclass that undid steps."""
        phase()
        return True

    def together(self, call: Callable[[], T], alone: Callable[[], T]) -> T:
        """Run the collective `call` and return its result; a subclass may return `alone()` after a loss."""
        return call()

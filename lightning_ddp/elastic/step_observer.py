"""Interface by which the strategy tells of the steps of a fit; its base class does nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:  # the base class is imported by each run, and imports nothing
    from lightning_ddp.elastic.step_ledger import StepLedger

T = TypeVar("T")


class StepObserver:
    """Observer of a fit that does nothing about lost ranks: the first failure ends the run."""

    ledger: StepLedger | None = None  # record of what is committed; None if nobody asks for it
    dealer: Any = None  # object that deals the rest of an epoch over other ranks, or None
    repeats_steps = False  # True if steps and parts of the loops may be repeated among other ranks

    @property
    def is_alone(self) -> bool:
        """True while this rank finishes what the others have finished already, without them."""
        return self.ledger is not None and self.ledger.is_alone

    # ------------------------------------------------------------------ steps

    def begin_fit(self) -> None:
        """Forget where an earlier fit has ended."""
        if self.ledger is not None:
            self.ledger.begin_fit()

    def begin_batch(self, batch: Any) -> None:
        """Take note of the batch that is used now; does nothing here, subclasses may keep it."""

    def end_forward(self, output: Any) -> None:
        """Note the output of `training_step`."""

    def begin_backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Note that a backward begins; return the loss times this rank's weight in the mean."""
        if self.ledger is not None:
            self.ledger.begin_backward()
        return loss

    def end_backward(self) -> None:
        """Note that a backward is over."""

    def end_step(self) -> None:
        """Note that an optimizer step is finished, with the average of parameters that may follow it."""
        if self.ledger is not None:
            self.ledger.take_step()

    def agree(self) -> None:
        """Note that all ranks have averaged their parameters outside of a step."""

    # ------------------------------------------------------------------ collectives of hooks

    def repeat(self, phase: Callable[[], None]) -> bool:
        """Run a part of the loops without steps, such as a validation; return False if steps were undone."""
        phase()
        return True

    def keep(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of tensors that a collective overwrites, as far as they may be needed after it."""
        return []

    def together(self, call: Callable[[], T], alone: Callable[[], T]) -> T:
        """Run a collective; `alone` returns this rank's own value in its place."""
        return call()

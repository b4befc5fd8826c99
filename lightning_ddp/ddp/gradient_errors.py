"""Errors of a backward: missing, surplus, freed or twice differentiated gradients, with their names."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp.comm.group import Group
from lightning_ddp.ddp import torch_messages as torch_words
from lightning_ddp.ddp.missing_gradients import MissingGradients
from lightning_ddp.errors import (
    BackwardOrderError,
    CommHookError,
    MissingGradientError,
    MissingGradientWarning,
)

__all__ = ["BackwardFailures", "refuse_double_backward"]


class BackwardFailures:
    """Makes the errors of one reducer and keeps those after which its ranks cannot go on.

    Args:
        group: the ranks.
        board: where they tell each other what they miss.
        names: qualified names of all parameters.
        raises_at_once: whether what all ranks miss in the first backward is an error there.
    """

    def __init__(
        self, group: Group, board: MissingGradients, names: Sequence[str], *, raises_at_once: bool
    ) -> None:
        self.board = board
        self.last_error: str | None = None
        """Text of the last error."""
        self._rank = group.rank
        self._names = names
        self._raises_at_once = raises_at_once
        self._broken: Exception | None = None

    def check_usable(self) -> None:
        """Raises if an earlier backward has left the ranks in a state from which none can go on.

        Raises:
            BackwardOrderError: a static graph has changed in an earlier step.
            MissingGradientError: a gradient was missing in an earlier step: on some of the ranks only, so
                that their collectives no longer match; or in the first step, where it was a warning.
        """
        if self._broken is None:
            return
        self.last_error = str(self._broken)
        if isinstance(self._broken, MissingGradientError):
            raise self._broken.copy()
        raise BackwardOrderError(str(self._broken))

    @contextmanager
    def noted(self) -> Generator[None, None, None]:
        """Keeps what is raised in here, if it concerns later steps too."""
        try:
            yield
        except MissingGradientError as error:
            self._broken = error.copy()
            self.last_error = str(error)
            raise
        except CommHookError as error:
            self.last_error = str(error)
            raise

    # ------------------------------------------------------------------ too few gradients

    def missing(
        self, step: int, late: Sequence[int], num_launched: int, *, is_first: bool
    ) -> MissingGradientError | None:
        """Parameters got no gradient. All ranks that miss one call it; communicates through the store only.

        torch's DDP says in the next backward what was missing in this one. Where all ranks miss the same in
        their first backward, the means of all others can still be right, so code that does one backward
        alone goes on with a warning, and the next step raises.

        Args:
            step: number of the backward.
            late: positions of the parameters.
            num_launched: buckets whose reduction this rank has started.
            is_first: whether a warning may do.

        Returns:
            The error to raise, or None if a warning was given.
        """
        names = [self._names[i] for i in late]
        error = self.board.report(step, names, num_launched).with_hint(self._positions(late))
        if is_first and not self._raises_at_once and error.is_same_everywhere:
            try:
                warnings.warn(MissingGradientWarning.of(error), stacklevel=2)
            except MissingGradientWarning:  # warnings are errors
                self.last_error = str(error)
                return error
            self._broken = error.with_hint(self._unfinished(late))
            self.last_error = str(self._broken)
            return None
        self.last_error = str(error)
        if error.num_launched is None:
            self._broken = error.copy()
        return error

    def _unfinished(self, late: Sequence[int]) -> str:
        """The words by which torch's tests know the error."""
        hint = (
            f"{torch_words.UNFINISHED} Ways out: {torch_words.FIND_UNUSED}, or making sure that all"
            f" {torch_words.OUTPUTS_IN_LOSS}. {self._positions(late)}\n"
        )
        if dist.get_debug_level() == dist.DebugLevel.OFF:
            return hint + f"For sizes and times of each rank in the log, {torch_words.SET_DEBUG}."
        names = ", ".join(self._names[i] for i in late)
        return hint + f"Parameters which did not receive grad for rank {self._rank}: {names}"

    def _positions(self, late: Sequence[int]) -> str:
        """Where they are in torch's numbering, as people search for it."""
        return (
            f"The first of them here: {self._at(late[0])}. Parameter indices which did not receive grad for"
            f" rank {self._rank}: {' '.join(map(str, late))}"
        )

    def _at(self, index: int) -> str:
        return f"{torch_words.PARAMETER_AT} {index} with name {self._names[index]}"

    # ------------------------------------------------------------------ too many, or gone

    def ready_twice(
        self, step: int, excess: Sequence[int], ready: Sequence[int], *, is_static: bool
    ) -> BackwardOrderError:
        """Parameters got more gradients in one backward than expected.

        Args:
            step: number of the backward.
            excess: positions of the parameters.
            ready: positions of all that got one, as often as they did.
            is_static: whether the graph was to be the same in every step.
        """
        names = ", ".join(self._names[i] for i in excess)
        if not is_static:
            return self._note(
                f"{torch_words.READY_TWICE} {self._at(excess[0])} has been marked as ready twice. On rank"
                f" {self._rank} in step {step} it was more than one gradient in one backward for {names}."
                " Re-entrant activation checkpointing does that: use torch.utils.checkpoint(...,"
                " use_reentrant=False), or static_graph=True. So does a parameter that is used outside of"
                " forward while find_unused_parameters=True takes it for unused."
            )
        error = self._note(
            f"rank {self._rank}, step {step}: {torch_words.CHANGED_GRAPH}: more gradients than in the first"
            f" one for {names}. static_graph=True needs the same graph in every step."
        )
        done = set(ready)
        unfinished = [i for i in range(len(self._names)) if i not in done]
        self._broken = BackwardOrderError(
            f"{torch_words.UNFINISHED_STATIC} rank {self._rank}: {' '.join(map(str, unfinished))}"
            f" ({', '.join(self._names[i] for i in unfinished)}). It was backward {step}: {error}"
        )
        return error

    def freed_gradient(self, step: int, names: Sequence[str]) -> BackwardOrderError:
        """Gradients were gone before they could be averaged."""
        return self._note(
            f"rank {self._rank}, step {step}: something set .grad to None before it was averaged, for"
            f" {', '.join(names)}. Free gradients after backward, not in a hook during it."
        )

    def interrupted(self, step: int) -> BackwardOrderError:
        """A backward ended before all buckets were reduced."""
        return self._note(f"rank {self._rank}, step {step}: backward ended before all buckets were reduced")

    def _note(self, text: str) -> BackwardOrderError:
        self.last_error = text
        return BackwardOrderError(text)


# ---------------------------------------------------------------------- backward through an averaged gradient


class _Averaged(torch.autograd.Function):
    """The identity, with a backward that says why there is none."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise BackwardOrderError(
            "backward through an averaged gradient (create_graph=True, then backward of something computed"
            " from .grad): the other ranks' parts of it are not in this process's graph. Compute the penalty"
            " from torch.autograd.grad(...) of the loss inside forward, and call backward once on the sum."
        )


def refuse_double_backward(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Makes a second backward through the averaged gradients of `parameters` an error that says so."""
    with torch.enable_grad():
        for parameter in parameters:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad = _Averaged.apply(  # type: ignore[no-untyped-call]
                    parameter.grad.detach(), parameter
                )

"""Errors of a backward: missing, surplus, freed or twice differentiated gradients, with their names.

A rank that lacks a gradient cannot take part in an all-reduce for which the others wait. It posts its names
on a `Board`, at which these look meanwhile, so that all raise the same error. Messages contain the text of
torch's DDP for the same error, which filters of logs search for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch

from lightning_ddp.comm.group import Group, InThread
from lightning_ddp.errors import BackwardOrderError, MissingGradientError

_FIRST_LOOK_S = 0.2
_LONGEST_PAUSE_S = 2.0
_REPORT_DEADLINE_S = 10.0
_POLL_S = 0.01
_ANSWER_WAIT_S = 0.2


class Board:
    """Exchange of reports of missing gradients through the group's store, by step and rank.

    The token is the same on all ranks, different for every wrapped module. Threads query the store, as its
    process may be stopped (SIGSTOP) and not reply.
    """

    def __init__(self, group: Group, token: str) -> None:
        self.group = group
        self._prefix = f"lightning_ddp/missing/{token}"

    def report(self, step: int, names: Sequence[str], num_launched: int) -> MissingGradientError:
        """Post this rank's parameters without a gradient, collect the posts of all ranks; return the error.

        Return the error to raise, the same on all ranks up to the rank in its first line. `num_launched` is
        the number of buckets whose reduction this rank has started in this step.
        """
        group, store = self.group, cast(Any, self.group.store)
        posts: dict[int, dict[str, Any]] = {group.rank: {"names": list(names), "num_launched": num_launched}}

        def have_all_come() -> bool:
            for rank in set(range(group.size)).difference(posts):
                if store.check([self._key(step, rank)]):
                    posts[rank] = json.loads(store.get(self._key(step, rank)))
            return len(posts) == group.size

        def exchange(thread: InThread[None]) -> None:
            store.set(self._key(step, group.rank), json.dumps(posts[group.rank]))
            store.set(self._key(step, "any"), "1")
            thread.until(have_all_come, _POLL_S, "not all ranks have reported")

        if store is not None:
            InThread(exchange, _REPORT_DEADLINE_S).wait(lambda _: group.check())
        found = dict(posts)  # the thread may still add to it
        launched = {post["num_launched"] for post in found.values()}
        return MissingGradientError(
            {rank: post["names"] for rank, post in found.items()},
            rank=group.rank,
            world_size=group.size,
            step=step,
            can_continue=len(found) == group.size and len(launched) == 1,
        )

    def watch(self, step: int, num_launched: int) -> Callable[[float], None]:
        """Return a callback for the waits of a step that raises if another rank reports missing gradients."""
        next_look_s = _FIRST_LOOK_S
        asked: InThread[bool] | None = None

        def look(waited_s: float) -> None:
            nonlocal next_look_s, asked
            store = self.group.store
            if waited_s < next_look_s or store is None:
                return
            found = asked = asked or InThread(lambda _: store.check([self._key(step, "any")]))
            if not found.is_over.wait(_ANSWER_WAIT_S):
                return  # the next call looks for the reply again
            next_look_s, asked = waited_s + min(waited_s, _LONGEST_PAUSE_S), None
            if found.error is None and found.result:
                raise self.report(step, [], num_launched)

        return look

    def _key(self, step: int, who: int | str) -> str:
        return f"{self._prefix}/{step}/{who}"


class BackwardFailures:
    """Factory of a reducer's errors in backward; it keeps an error after which ranks cannot continue."""

    def __init__(self, board: Board, names: Sequence[str]) -> None:
        self.board = board
        self._rank = board.group.rank
        self._names = names
        self._broken: Exception | None = None

    def check_usable(self) -> None:
        """Raise again the error, if any, of an earlier backward after which the ranks cannot continue."""
        if self._broken is None:
            return
        if isinstance(self._broken, MissingGradientError):
            raise self._broken.copy()
        raise BackwardOrderError(str(self._broken))

    def note(self, error: MissingGradientError) -> None:
        """Store an error after which the ranks' collectives no longer match, for `check_usable` to raise."""
        self._broken = error.copy()

    def missing(self, step: int, late: Sequence[int], num_launched: int) -> MissingGradientError:
        """Report parameters without a gradient to the other ranks; return the error to raise."""
        error = self.board.report(step, [self._names[i] for i in late], num_launched)
        error.add_hint(
            f"The first of them here: {self._at(late[0])}. Parameter indices which did not receive grad for"
            f" rank {self._rank}: {' '.join(map(str, late))}"
        )
        if not error.can_continue:
            self.note(error)
        return error

    def _at(self, index: int) -> str:
        return f"Parameter at index {index} with name {self._names[index]}"

    def ready_twice(
        self, step: int, excess: Sequence[int], ready: Sequence[int], *, is_static: bool
    ) -> BackwardOrderError:
        """Return the error for parameters (`excess`) with more gradients in a backward than expected."""
        names = ", ".join(self._names[i] for i in excess)
        if not is_static:
            return BackwardOrderError(
                f"Expected to mark a variable ready only once. {self._at(excess[0])} has been marked as ready"
                f" twice. On rank {self._rank} in step {step} it was more than one gradient in one backward"
                f" for {names}. Re-entrant activation checkpointing does that: use"
                " torch.utils.checkpoint(..., use_reentrant=False), or static_graph=True. So does a parameter"
                " that is used outside of forward while find_unused_parameters=True takes it for unused."
            )
        error = BackwardOrderError(
            f"rank {self._rank}, step {step}: Your training graph has changed in this iteration: more"
            f" gradients than in the first one for {names}. static_graph=True needs the same graph in every"
            " step."
        )
        done = set(ready)
        unfinished = [i for i in range(len(self._names)) if i not in done]
        self._broken = BackwardOrderError(
            "Expected to have finished reduction in the prior iteration before starting a new one. This error"
            " indicates that your training graph has changed in this iteration, e.g., one parameter is used"
            " in first iteration, but then got unused in the second iteration. this is not compatible with"
            " static_graph set to True.\nParameter indices which did not receive grad for rank"
            f" {self._rank}: {' '.join(map(str, unfinished))}"
            f" ({', '.join(self._names[i] for i in unfinished)}). It was backward {step}: {error}"
        )
        return error

    def freed_gradient(self, step: int, names: Sequence[str]) -> BackwardOrderError:
        """Return the error for gradients that were freed before they could be averaged."""
        return BackwardOrderError(
            f"rank {self._rank}, step {step}: .grad was set to None before it was averaged, for"
            f" {', '.join(names)}. Free gradients after backward, not in a hook during backward."
        )


class _Averaged(torch.autograd.Function):
    """Identity function whose backward raises an error: averaged gradients cannot be differentiated."""

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
    """Make a second backward through the averaged gradients of `parameters` raise an error."""
    with torch.enable_grad():
        for parameter in parameters:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad = _Averaged.apply(  # type: ignore[no-untyped-call]
                    parameter.grad.detach(), parameter
                )

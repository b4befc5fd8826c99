"""Errors of a backward: missing, surplus, freed or twice differentiated gradients, with their names.

A rank that lacks a gradient cannot take part in the all-reduce of that bucket, and the others would wait
for it without end. So it says so through the group's store; the others look there while they wait, and all
of them raise the same error, with the names from every rank. Where no rank has any gradient, as in a step
whose loss uses no parameter, there is nothing to average and no error.

The store may be in a process that is stopped (SIGSTOP), and then answers nobody. So threads ask it, and the
deadline of the collective holds.

Where torch's DDP has a message for the same thing, its words are a part of ours: filters of logs know them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from lightning_ddp.comm.group import Group, InThread
from lightning_ddp.errors import (
    BackwardOrderError,
    CommHookError,
    MissingGradientError,
    MissingGradientWarning,
)

_FIRST_LOOK_S = 0.2
_LONGEST_PAUSE_S = 2.0
_REPORT_DEADLINE_S = 10.0
_POLL_S = 0.01
_POLLS_PER_S_OF_ALL = 10_000
"""How often all ranks together look whether all have come: one store answers them."""
_ANSWER_WAIT_S = 0.2
_UNFINISHED = "Expected to have finished reduction in the prior iteration before starting a new one."


class _Post(TypedDict):
    names: list[str]
    num_launched: int


class MissingGradients:
    """The board on which ranks post the parameters that got no gradient.

    The token is the same on all ranks and different for every wrapped module. The time limit of the group's
    backend for the device holds here too.
    """

    def __init__(self, group: Group, token: str, device: torch.device) -> None:
        self.group = group
        self._device = device
        self._prefix = f"lightning_ddp/missing/{token}"

    def is_skipped(self, step: int) -> bool:
        """Whether no gradient has come on any rank. Each rank without one calls it, and waits for the others.

        True on all ranks, or False on all that call it: another rank has gradients, or does not come.
        """
        group, store = self.group, self.group.store
        if store is None:
            return group.size == 1
        skipped, busy = [self._key(step, "skipped")], [self._key(step, "busy")]
        pause_s = max(_POLL_S, group.size / _POLLS_PER_S_OF_ALL)

        def ask(thread: InThread[bool]) -> bool:
            if store.add(self._key(step, "idle"), 1) == group.size:
                store.set(skipped[0], "1")
                return True
            store.set(self._key(step, "any"), "1")
            thread.until(
                lambda: store.check(skipped) or store.check(busy), pause_s, "not all gradients have arrived"
            )
            return bool(store.check(skipped))

        thread = InThread(ask, self._longest_wait_s())
        group.wait_call(thread, "backward without any gradient")
        return thread.error is None and thread.result  # else the store is gone, or not all have come

    def _longest_wait_s(self) -> float:
        """A rank may be late, as in a collective. One that compares it before does not look at the board."""
        interrupt = self.group.interrupt
        if interrupt is not None and interrupt.compare is not None:
            return _REPORT_DEADLINE_S
        return self.group.timeout_s(self._device)

    def report(self, step: int, names: Sequence[str], num_launched: int) -> MissingGradientError:
        """Posts this rank's names and collects those of the others. Communicates through the store only.

        Args:
            step: number of the synchronized backward.
            names: parameters without a gradient here; empty on a rank that waits for the others.
            num_launched: buckets whose reduction this rank has started in this step.

        Returns:
            The error to raise, the same on all ranks up to the rank in its first line.
        """
        group = self.group
        own = _Post(names=list(names), num_launched=num_launched)
        posts = {group.rank: own} if group.store is None else self._exchange(group.store, step, own)
        launched = {post["num_launched"] for post in posts.values()}
        return MissingGradientError(
            {rank: post["names"] for rank, post in posts.items()},
            rank=group.rank,
            world_size=group.size,
            step=step,
            num_launched=num_launched if len(posts) == group.size and len(launched) == 1 else None,
        )

    def _exchange(self, store: Any, step: int, own: _Post) -> dict[int, _Post]:
        """Posts what this rank misses; returns that of all ranks that post theirs in time."""
        rank = self.group.rank
        posts = {rank: own}

        def have_all_come() -> bool:
            for other in [r for r in range(self.group.size) if r not in posts]:
                if store.check([self._key(step, other)]):
                    posts[other] = json.loads(store.get(self._key(step, other)))
            return len(posts) == self.group.size

        def exchange(thread: InThread[None]) -> None:
            store.set(self._key(step, rank), json.dumps(own))
            store.set(self._key(step, "busy"), "1")
            store.set(self._key(step, "any"), "1")
            thread.until(have_all_come, _POLL_S, "not all ranks have reported")

        InThread(exchange, _REPORT_DEADLINE_S).wait(lambda _: self.group.check())
        return dict(posts)

    def watch(self, step: int, num_launched: int) -> Callable[[float], None]:
        """A callback for waits of this step: looks at the board now and then, and raises what is there."""
        next_look = _FIRST_LOOK_S
        asked: InThread[bool] | None = None

        def look(waited_s: float) -> None:
            nonlocal next_look, asked
            store = self.group.store
            if waited_s < next_look or store is None:
                return
            found = asked = asked or InThread(lambda _: store.check([self._key(step, "any")]))
            if not found.is_over.wait(_ANSWER_WAIT_S):
                return  # it is asked for the answer again soon
            next_look, asked = waited_s + min(waited_s, _LONGEST_PAUSE_S), None
            if found.error is None and found.result:
                raise self.report(step, [], num_launched)

        return look

    def _key(self, step: int, who: int | str) -> str:
        return f"{self._prefix}/{step}/{who}"


class BackwardFailures:
    """Makes the errors of one reducer and keeps those after which its ranks cannot go on.

    Unless it `raises_at_once`, what all ranks miss in the first backward is a warning there.
    """

    def __init__(self, board: MissingGradients, names: Sequence[str], *, raises_at_once: bool) -> None:
        self.board = board
        self.last_error: str | None = None
        """Text of the last error."""
        self._rank = board.group.rank
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

    def note(self, error: CommHookError | MissingGradientError) -> None:
        """Keeps an error that is raised, if it concerns later steps too."""
        self.last_error = str(error)
        if isinstance(error, MissingGradientError):
            self._broken = error.copy()

    # ------------------------------------------------------------------ too few gradients

    def missing(
        self, step: int, late: Sequence[int], num_launched: int, *, is_first: bool
    ) -> MissingGradientError | None:
        """Parameters got no gradient. All ranks that miss one call it; communicates through the store only.

        torch's DDP says in the next backward what was missing in this one. Where all ranks miss the same in
        their first backward, the means of all others can still be right, so code that does one backward
        alone goes on with a warning, and the next step raises.

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
            f"{_UNFINISHED} Ways out: passing the keyword argument `find_unused_parameters=True`, or making"
            " sure that all `forward` function outputs participate in calculating loss."
            f" {self._positions(late)}\n"
        )
        if dist.get_debug_level() == dist.DebugLevel.OFF:
            return (
                f"{hint}For sizes and times of each rank in the log, set the environment variable"
                " TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL."
            )
        names = ", ".join(self._names[i] for i in late)
        return hint + f"Parameters which did not receive grad for rank {self._rank}: {names}"

    def _positions(self, late: Sequence[int]) -> str:
        """Where they are in torch's numbering, as people search for it."""
        return (
            f"The first of them here: {self._at(late[0])}. Parameter indices which did not receive grad for"
            f" rank {self._rank}: {' '.join(map(str, late))}"
        )

    def _at(self, index: int) -> str:
        return f"Parameter at index {index} with name {self._names[index]}"

    # ------------------------------------------------------------------ too many, or gone

    def ready_twice(
        self, step: int, excess: Sequence[int], ready: Sequence[int], *, is_static: bool
    ) -> BackwardOrderError:
        """Parameters (`excess`) got more gradients in one backward than expected."""
        names = ", ".join(self._names[i] for i in excess)
        if not is_static:
            return self._order_error(
                f"Expected to mark a variable ready only once. {self._at(excess[0])} has been marked as ready"
                f" twice. On rank {self._rank} in step {step} it was more than one gradient in one backward"
                f" for {names}. Re-entrant activation checkpointing does that: use"
                " torch.utils.checkpoint(..., use_reentrant=False), or static_graph=True. So does a parameter"
                " that is used outside of forward while find_unused_parameters=True takes it for unused."
            )
        error = self._order_error(
            f"rank {self._rank}, step {step}: Your training graph has changed in this iteration: more"
            f" gradients than in the first one for {names}. static_graph=True needs the same graph in every"
            " step."
        )
        done = set(ready)
        unfinished = [i for i in range(len(self._names)) if i not in done]
        self._broken = BackwardOrderError(
            f"{_UNFINISHED} This error indicates that your training graph has changed in this iteration,"
            " e.g., one parameter is used in first iteration, but then got unused in the second iteration."
            " this is not compatible with static_graph set to True.\nParameter indices which did not receive"
            f" grad for rank {self._rank}: {' '.join(map(str, unfinished))}"
            f" ({', '.join(self._names[i] for i in unfinished)}). It was backward {step}: {error}"
        )
        return error

    def freed_gradient(self, step: int, names: Sequence[str]) -> BackwardOrderError:
        """Gradients were gone before they could be averaged."""
        return self._order_error(
            f"rank {self._rank}, step {step}: .grad was set to None before it was averaged, for"
            f" {', '.join(names)}. Free gradients after backward, not in a hook during backward."
        )

    def _order_error(self, text: str) -> BackwardOrderError:
        self.last_error = text
        return BackwardOrderError(text)


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

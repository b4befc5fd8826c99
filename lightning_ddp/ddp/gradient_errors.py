"""Errors of a backward: missing, surplus, freed or twice differentiated gradients, with their names.

A rank that lacks a gradient cannot take part in the all-reduce of that bucket, and the others would wait
for it forever. So that rank reports it through the group's store, which the others poll while they wait.
All ranks raise the same error, with the names from every rank. Where no rank has any gradient, as in a step
whose loss uses no parameter, there is nothing to average and no error.

The store may be in a stopped process (SIGSTOP), which does not reply. So threads query it, and the deadline
of the collective holds.

Messages contain the text of torch's DDP for the same error, which filters of logs search for.
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
"""Polls of the store per second, of all ranks together, as one store serves all of them."""
_ANSWER_WAIT_S = 0.2
_UNFINISHED = "Expected to have finished reduction in the prior iteration before starting a new one."


class _Post(TypedDict):
    names: list[str]
    num_launched: int


class MissingGradients:
    """Exchange, through the store, of the parameters that got no gradient.

    The token is the same on all ranks and different for every wrapped module. The timeout is that of the
    group's backend for the device.
    """

    def __init__(self, group: Group, token: str, device: torch.device) -> None:
        self.group = group
        self._device = device
        self._prefix = f"lightning_ddp/missing/{token}"

    def is_skipped(self, step: int) -> bool:
        """Return True if no rank got a gradient; all ranks without gradients must call it.

        The result is the same on all ranks that call it. False: another rank has gradients, or did not call.
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
        return thread.error is None and thread.result  # an error: the store is gone, or a rank is late

    def _longest_wait_s(self) -> float:
        """Return the timeout of `is_skipped` in seconds: that of a collective, as a rank may be late.

        Shorter where collectives are compared before they start: a rank in that comparison does not poll.
        """
        interrupt = self.group.interrupt
        if interrupt is not None and interrupt.is_comparing:
            return _REPORT_DEADLINE_S
        return self.group.timeout_s(self._device)

    def report(self, step: int, names: Sequence[str], num_launched: int) -> MissingGradientError:
        """Publish this rank's names in the store and collect those of the other ranks.

        Args:
            step: number of the synchronized backward.
            names: parameters without a gradient on this rank; empty on a rank that waits for the others.
            num_launched: number of buckets whose reduction this rank has started in this step.

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
        """Publish this rank's report; return the reports of all ranks that publish in time, by rank."""
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
        """Return a callback for waits of this step, which polls the store and raises a reported error."""
        next_look = _FIRST_LOOK_S
        asked: InThread[bool] | None = None

        def look(waited_s: float) -> None:
            nonlocal next_look, asked
            store = self.group.store
            if waited_s < next_look or store is None:
                return
            found = asked = asked or InThread(lambda _: store.check([self._key(step, "any")]))
            if not found.is_over.wait(_ANSWER_WAIT_S):
                return  # the next call looks for the reply again
            next_look, asked = waited_s + min(waited_s, _LONGEST_PAUSE_S), None
            if found.error is None and found.result:
                raise self.report(step, [], num_launched)

        return look

    def _key(self, step: int, who: int | str) -> str:
        return f"{self._prefix}/{step}/{who}"


class BackwardFailures:
    """Factory of the errors of one reducer, which keeps those after which its ranks cannot continue.

    Unless `raises_at_once`, gradients that all ranks miss in the first backward are a warning there.
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
        """Raise if an earlier backward left the ranks in a state from which they cannot continue.

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
        """Keep an error that is being raised, if later steps have to raise it too."""
        self.last_error = str(error)
        if isinstance(error, MissingGradientError):
            self._broken = error.copy()

    # ------------------------------------------------------------------ too few gradients

    def missing(
        self, step: int, late: Sequence[int], num_launched: int, *, is_first: bool
    ) -> MissingGradientError | None:
        """Exchange missing gradients through the store; return the error, or give a warning.

        All ranks that miss a gradient must call it. torch's DDP reports in the next backward what was missing
        in this one. Where all ranks miss the same gradients in their first backward, the means of all others
        can still be right. So code with a single backward continues with a warning; the next step raises.

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
        """Return torch's message for this error, which its tests and filters of logs match."""
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
        """Return a sentence with the parameters' indices, in torch's words, which people search for."""
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
        """Return the error for parameters (`excess`) with more gradients in a backward than expected."""
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
        """Return the error for gradients that were freed before they could be averaged."""
        return self._order_error(
            f"rank {self._rank}, step {step}: .grad was set to None before it was averaged, for"
            f" {', '.join(names)}. Free gradients after backward, not in a hook during backward."
        )

    def _order_error(self, text: str) -> BackwardOrderError:
        self.last_error = text
        return BackwardOrderError(text)


class _Averaged(torch.autograd.Function):
    """Identity whose backward raises an error that explains why it is not supported."""

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

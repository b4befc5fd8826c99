"""Parameters that got no gradient: who misses which, told to all ranks.

A rank that lacks a gradient cannot take part in the all-reduce of that bucket, and the others would wait
for it without end. So it says so through the group's store; the others look there while they wait, and all
of them raise the same error, with the names from every rank. Where no rank has any gradient, as in a step
whose loss uses no parameter, there is nothing to average and no error.

The store may be in a process that is stopped (SIGSTOP), and then answers nobody. So threads ask it, and the
deadline of the collective holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch

from lightning_ddp.comm.group import Group
from lightning_ddp.comm.waits import InThread
from lightning_ddp.errors import MissingGradientError

__all__ = ["MissingGradients"]

_FIRST_LOOK_S = 0.2
_LONGEST_PAUSE_S = 2.0
_REPORT_DEADLINE_S = 10.0
_POLL_S = 0.01
_POLLS_PER_S_OF_ALL = 10_000
"""How often all ranks together look whether all have come: one store answers them."""
_ANSWER_WAIT_S = 0.2


class _Post(TypedDict):
    names: list[str]
    num_launched: int


class MissingGradients:
    """The board on which ranks post the parameters that got no gradient.

    Args:
        group: the group whose ranks share the board.
        token: the same on all ranks and different for every wrapped module.
        device: one that the group's backend serves; its time limit holds here too.
    """

    def __init__(self, group: Group, token: str, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._prefix = f"lightning_ddp/missing/{token}"

    def is_skipped(self, step: int) -> bool:
        """Whether no gradient has come on any rank. Each rank without one calls it, and waits for the others.

        Args:
            step: number of the synchronised backward.

        Returns:
            True on all ranks, or False on all that call it: another rank has gradients, or does not come.
        """
        group, store = self._group, self._group.store
        if store is None:
            return group.size == 1
        skipped, busy = [self._key(step, "skipped")], [self._key(step, "busy")]
        pause_s = max(_POLL_S, group.size / _POLLS_PER_S_OF_ALL)

        def ask(thread: InThread[bool]) -> bool:
            if store.add(self._key(step, "idle"), 1) == group.size:
                store.set(skipped[0], "1")
                return True
            store.set(self._key(step, "any"), "1")
            thread.until(lambda: store.check(skipped) or store.check(busy), pause_s, "not all have come")
            return bool(store.check(skipped))

        thread = InThread(ask, self._longest_wait_s())
        group.wait_call(thread, "backward without any gradient")
        return thread.error is None and thread.result  # else the store is gone, or not all have come

    def _longest_wait_s(self) -> float:
        """A rank may be late, as in a collective. One that compares it before does not look at the board."""
        interrupt = self._group.interrupt
        if interrupt is not None and interrupt.compare is not None:
            return _REPORT_DEADLINE_S
        return self._group.timeout_s(self._device)

    def report(self, step: int, names: Sequence[str], num_launched: int) -> MissingGradientError:
        """Posts this rank's names and collects those of the others. Communicates through the store only.

        Args:
            step: number of the synchronised backward.
            names: parameters without a gradient here; empty on a rank that waits for the others.
            num_launched: buckets whose reduction this rank has started in this step.

        Returns:
            The error to raise, the same on all ranks up to the rank in its first line.
        """
        group = self._group
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
        rank = self._group.rank
        posts = {rank: own}

        def have_all_come() -> bool:
            for other in [r for r in range(self._group.size) if r not in posts]:
                if store.check([self._key(step, other)]):
                    posts[other] = json.loads(store.get(self._key(step, other)))
            return len(posts) == self._group.size

        def exchange(thread: InThread[None]) -> None:
            store.set(self._key(step, rank), json.dumps(own))
            store.set(self._key(step, "busy"), "1")
            store.set(self._key(step, "any"), "1")
            thread.until(have_all_come, _POLL_S, "not all have reported")

        InThread(exchange, _REPORT_DEADLINE_S).wait(lambda _: self._group.check())
        return dict(posts)

    def watch(self, step: int, num_launched: int) -> Callable[[float], None]:
        """A callback for waits of this step: looks at the board now and then, and raises what is there."""
        next_look = _FIRST_LOOK_S
        asked: InThread[bool] | None = None

        def look(waited_s: float) -> None:
            nonlocal next_look, asked
            store = self._group.store
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

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
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypedDict

import torch

from lightning_ddp.comm.group import Group
from lightning_ddp.comm.waits import SLICE_S
from lightning_ddp.errors import MissingGradientError

__all__ = ["MissingGradients"]

_FIRST_LOOK_S = 0.2
_LONGEST_PAUSE_S = 2.0
_REPORT_DEADLINE_S = 10.0
_POLL_S = 0.01
_POLLS_PER_S_OF_ALL = 10_000
"""How often all ranks together look whether all have come: one store answers them."""
_ANSWER_WAIT_S = 0.2
"""How often all ranks together look whether all have come: one store answers them."""


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
        deadline = time.monotonic() + self._longest_wait_s()
        pause_s = max(_POLL_S, group.size / _POLLS_PER_S_OF_ALL)
        is_skipped = False

        def ask() -> None:
            nonlocal is_skipped
            if store.add(self._key(step, "idle"), 1) == group.size:
                store.set(self._key(step, "skipped"), "1")
                is_skipped = True
                return
            store.set(self._key(step, "any"), "1")
            while time.monotonic() < deadline:
                is_skipped = store.check([self._key(step, "skipped")])
                if is_skipped or store.check([self._key(step, "busy")]):
                    return
                time.sleep(pause_s)

        is_over = _in_thread(ask)
        group.wait_until(
            lambda: is_over.is_set() or time.monotonic() > deadline,
            "backward without any gradient",
            every_s=_POLL_S,
        )
        return is_skipped

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
        rank, deadline = self._group.rank, time.monotonic() + _REPORT_DEADLINE_S
        posts = {rank: own}

        def exchange() -> None:
            store.set(self._key(step, rank), json.dumps(own))
            store.set(self._key(step, "busy"), "1")
            store.set(self._key(step, "any"), "1")
            waiting = [r for r in range(self._group.size) if r != rank]
            while waiting and time.monotonic() < deadline:
                for other in [r for r in waiting if store.check([self._key(step, r)])]:
                    posts[other] = json.loads(store.get(self._key(step, other)))
                    waiting.remove(other)
                if waiting:
                    time.sleep(_POLL_S)

        is_over = _in_thread(exchange)
        while not is_over.wait(SLICE_S) and time.monotonic() < deadline:
            self._group.check()
        return dict(posts)

    def watch(self, step: int, num_launched: int) -> Callable[[float], None]:
        """A callback for waits of this step: looks at the board now and then, and raises what is there."""
        next_look = _FIRST_LOOK_S
        is_posted = False
        has_looked: threading.Event | None = None

        def look(waited_s: float) -> None:
            nonlocal next_look, has_looked
            store = self._group.store
            if waited_s < next_look or store is None:
                return

            def ask() -> None:
                nonlocal is_posted
                is_posted = store.check([self._key(step, "any")])

            has_looked = has_looked or _in_thread(ask)
            if has_looked.wait(_ANSWER_WAIT_S):  # else it is asked for the answer again soon
                next_look, has_looked = waited_s + min(waited_s, _LONGEST_PAUSE_S), None
            if is_posted:
                raise self.report(step, [], num_launched)

        return look

    def _key(self, step: int, who: int | str) -> str:
        return f"{self._prefix}/{step}/{who}"


def _in_thread(ask: Callable[[], None]) -> threading.Event:
    """Calls a function that asks a store; the event is set when it has returned, or the store is gone."""
    is_over = threading.Event()

    def call() -> None:
        try:
            with suppress(RuntimeError):
                ask()
        finally:
            is_over.set()

    threading.Thread(target=call, daemon=True, name="missing-gradients").start()
    return is_over

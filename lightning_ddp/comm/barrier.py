"""Barriers: one that is a collective, and one that knows who is missing."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch

from lightning_ddp.comm.group import Group
from lightning_ddp.comm.handle import Call, Collective, Handle, OnSlice, check_timeout
from lightning_ddp.comm.waits import InThread
from lightning_ddp.errors import CollectiveTimeoutError, ConfigurationError

__all__ = ["barrier", "monitored_barrier"]

_POLL_S = 0.005
_ALL_CAME = "all came"


@Collective
def barrier(
    group: Group,
    device: torch.device,
    name: str | None = None,
    *,
    timeout: timedelta | None = None,
    label: str | None = None,
) -> Handle[None]:
    """Returns once all ranks have called it. All ranks call it; it communicates.

    Args:
        group: the ranks.
        device: one that the group's backend serves.
        name: part of the label, if that is not given.
        timeout: deadline of this call; None for the group's own limit.
        label: what it is called in errors, in the profiler and where somebody asks what a rank waits for.

    Raises:
        CollectiveTimeoutError: the deadline has passed.
        CollectiveError: the backend failed.
    """
    call = Call(group=group, device=device, label=label or _label("barrier", name), timeout=timeout)
    token = torch.zeros(1, dtype=torch.int32, device=device)
    work = call.start(lambda: group.all_reduce(token, **call.limit))
    return call.handle(call.wait_for(work), lambda: group.wait_device(device))


def _label(what: str, name: str | None) -> str:
    return what if name is None else f"{what} {name!r}"


@Collective
def monitored_barrier(
    group: Group,
    name: str | None = None,
    *,
    timeout: timedelta,
    label: str | None = None,
) -> Handle[None]:
    """A barrier that names the ranks that have not called it in time. All ranks call it.

    It goes through the group's key-value store and not through the backend, so that it is the same with
    every backend and does not harm the group when it fails. The first rank whose deadline passes decides who
    is missing, for all: also a rank that comes later gets that error; where the store does not answer, each
    rank gets its own. It does not wait for CUDA devices.
    Costs a few round trips to the store, so it is for set-up and tests, not for every step.

    Args:
        group: the ranks.
        name: part of the label, if that is not given.
        timeout: deadline of this call.
        label: as in `barrier`.

    Raises:
        CollectiveTimeoutError: the deadline of a rank has passed; `missing` holds the ranks, on all ranks.
        ConfigurationError: torch knows no store for this group; pass one with `Group(..., store=store)`.
    """
    given = label or _label("monitored_barrier", name)
    check_timeout(timeout, given)
    # no deadline of the call's own: when time is up, the ranks decide together who is missing
    call = Call(group=group, device=torch.device("cpu"), label=given)
    if group.store is None:
        raise ConfigurationError(
            f"{given}: torch knows no store for this group. Make it with init_process_group or sub_group, or"
            " pass its store: Group(process_group, store=store)"
        )
    roll = _RollCall(call, group.store, timeout.total_seconds())
    return call.handle(roll.wait, lambda: None)


class _RollCall:
    """One monitored barrier: each rank's entry in the store, and the verdict that all ranks share."""

    def __init__(self, call: Call, store: Any, limit_s: float) -> None:
        self._call = call
        self._store = store
        self._limit_s = limit_s
        self._number = call.group.next_number("monitored_barrier")
        thread = InThread(self._come, limit_s)
        self._wait = call.wait_for_thread(lambda: thread)

    def _key(self, what: str | int) -> str:
        return f"lightning_ddp/monitored_barrier/{self._number}/{what}"

    def _come(self, thread: InThread[str]) -> str:
        """The verdict, the first that a rank has given."""
        call, store, size = self._call, self._store, self._call.group.size
        store.set(self._key(call.group.rank), "came")
        if store.add(self._key("count"), 1) == size:
            self._decide(_ALL_CAME)
        is_over = partial(store.check, [self._key("verdict")])
        thread.until(lambda: call.waited_s >= self._limit_s or is_over(), _POLL_S, "nobody says why")
        if not is_over():
            missing = [rank for rank in range(size) if not store.check([self._key(rank)])]
            numbers = " ".join(map(str, missing))
            self._decide(f"{call.group.rank} {self._limit_s:g} {numbers}" if missing else _ALL_CAME)
        verdict: str = store.get(self._key("verdict")).decode()
        if verdict == _ALL_CAME and store.add(self._key("left"), 1) == size:
            for what in ("verdict", "count", "left", *range(size)):
                store.delete_key(self._key(what))
        return verdict

    def _decide(self, verdict: str) -> None:
        self._store.compare_set(self._key("verdict"), "", verdict)

    def wait(self, on_slice: OnSlice) -> None:
        """Waits for the verdict; raises CollectiveTimeoutError where it is that somebody is missing."""
        verdict = self._wait(on_slice)
        if verdict != _ALL_CAME:
            raise self._error(verdict)

    def _error(self, verdict: str) -> CollectiveTimeoutError:
        call = self._call
        by, limit_s, *missing = verdict.split(" ")
        ranks = [int(rank) for rank in missing]
        late = call.group.rank in ranks
        return CollectiveTimeoutError(
            f"rank {call.group.rank} of {call.group.size}: {call.label}: rank {by} has waited {limit_s} s,"
            f" its deadline, and {_names(ranks)} did not come"
            + ("; this rank came when it was over" if late else "")
            + f". Look at what {_names(ranks)} did meanwhile, or give it more time.",
            label=call.label,
            rank=call.group.rank,
            waited_s=call.waited_s,
            missing=ranks,
        )


def _names(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

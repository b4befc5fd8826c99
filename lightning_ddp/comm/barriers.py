"""Barriers: one that is a collective, and one that knows who is missing."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from lightning_ddp.comm.calls import Call, CallOptions, Handle, OnSlice, check_timeout
from lightning_ddp.comm.group import Group
from lightning_ddp.errors import CollectiveTimeoutError, ConfigurationError

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["barrier", "monitored_barrier"]

_POLL_S = 0.005
_ALL_CAME = "all came"
_num_monitored: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@overload
def barrier(
    group: Group,
    device: torch.device,
    name: str | None = ...,
    *,
    async_op: Literal[False] = ...,
    **options: Unpack[CallOptions],
) -> None: ...
@overload
def barrier(
    group: Group,
    device: torch.device,
    name: str | None = ...,
    *,
    async_op: Literal[True],
    **options: Unpack[CallOptions],
) -> Handle[None]: ...
def barrier(
    group: Group,
    device: torch.device,
    name: str | None = None,
    *,
    async_op: bool = False,
    timeout: timedelta | None = None,
    label: str | None = None,
) -> Handle[None] | None:
    """Returns once all ranks have called it. All ranks call it; it communicates.

    Args:
        group: the ranks.
        device: one that the group's backend serves.
        name: part of the label, if that is not given.
        async_op: returns a `Handle` at once, whose `wait` returns once all ranks have called it.
        timeout: deadline of this call; None for the group's own limit.
        label: what it is called in errors, in the profiler and where somebody asks what a rank waits for.

    Raises:
        CollectiveTimeoutError: the deadline has passed.
        CollectiveError: the backend failed.
    """
    call = Call(group=group, device=device, label=label or _label("barrier", name), timeout=timeout)
    token = torch.zeros(1, dtype=torch.int32, device=device)
    work = call.start(lambda: group.all_reduce(token, **call.limit))
    handle = call.handle(call.wait_for(work), lambda: group.wait_device(device))
    return handle if async_op else handle.wait()


def _label(what: str, name: str | None) -> str:
    return what if name is None else f"{what} {name!r}"


@overload
def monitored_barrier(
    group: Group,
    name: str | None = ...,
    *,
    timeout: timedelta,
    async_op: Literal[False] = ...,
    label: str | None = ...,
) -> None: ...
@overload
def monitored_barrier(
    group: Group,
    name: str | None = ...,
    *,
    timeout: timedelta,
    async_op: Literal[True],
    label: str | None = ...,
) -> Handle[None]: ...
def monitored_barrier(
    group: Group,
    name: str | None = None,
    *,
    timeout: timedelta,
    async_op: bool = False,
    label: str | None = None,
) -> Handle[None] | None:
    """A barrier that names the ranks that have not called it in time. All ranks call it.

    It goes through the group's key-value store and not through the backend, so that it is the same with
    every backend and does not harm the group when it fails. The first rank whose deadline passes decides who
    is missing, for all: also a rank that comes later gets that error. It does not wait for CUDA devices.
    Costs a few round trips to the store, so it is for set-up and tests, not for every step.

    Args:
        group: the ranks.
        name: part of the label, if that is not given.
        timeout: deadline of this call.
        async_op: returns a `Handle` at once: this rank has come, and its `wait` waits for the others.
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
    handle = call.handle(roll.wait, lambda: None)
    return handle if async_op else handle.wait()


class _RollCall:
    """One monitored barrier: each rank's entry in the store, and the verdict that all ranks share."""

    def __init__(self, call: Call, store: Any, limit_s: float) -> None:
        self._call = call
        self._store = store
        self._limit_s = limit_s
        group = call.group
        self._number = _num_monitored.get(group.process_group, 0)
        _num_monitored[group.process_group] = self._number + 1
        store.set(self._key(group.rank), "came")
        if store.add(self._key("count"), 1) == group.size:
            self._decide(_ALL_CAME)

    def _key(self, what: str | int, number: int | None = None) -> str:
        return f"lightning_ddp/monitored_barrier/{self._number if number is None else number}/{what}"

    def _decide(self, verdict: str) -> str:
        """The first verdict of all ranks."""
        decided: bytes = self._store.compare_set(self._key("verdict"), "", verdict)
        return decided.decode()

    def wait(self, on_slice: OnSlice) -> None:
        """Waits for the verdict; raises CollectiveTimeoutError where it is that somebody is missing."""
        call = self._call

        def is_over() -> bool:
            return call.waited_s >= self._limit_s or bool(self._store.check([self._key("verdict")]))

        call.group.wait_until(is_over, call.label, on_slice, _POLL_S)
        missing = [rank for rank in range(call.group.size) if not self._store.check([self._key(rank)])]
        numbers = " ".join(map(str, missing))
        verdict = self._decide(f"{call.group.rank} {self._limit_s:g} {numbers}" if missing else _ALL_CAME)
        if verdict != _ALL_CAME:
            raise self._error(verdict)
        self._forget_previous()

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

    def _forget_previous(self) -> None:
        """Deletes what the barrier before left: all ranks have left that one."""
        if self._call.group.rank == 0 and self._number > 0:
            for what in ("verdict", "count", *range(self._call.group.size)):
                self._store.delete_key(self._key(what, self._number - 1))


def _names(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

"""Barriers: a collective, one that names missing ranks, and the rendezvous of a torchrun attempt.

torchrun restarts all processes when one fails, and the new processes get the store of the old ones, with its
contents. The restart count that torchrun passes to them differs between nodes. So rank 0 names each attempt,
and the other ranks use the name once rank 0 has replied to them.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp.comm.call import Call, Timeout, limit_of
from lightning_ddp.comm.group import Group, InThread
from lightning_ddp.errors import CollectiveTimeoutError, ConfigurationError, RendezvousError

_POLL_S = 0.005
_ALL_CAME = "all came"
_ATTEMPT = "lightning_ddp/attempt"
_ASK_AGAIN_S = 0.05


def barrier(group: Group, device: torch.device, name: str | None = None, *, timeout: Timeout = None) -> None:
    """Wait until all ranks have called this function.

    Collective: all ranks must call it.

    Args:
        device: a device that the group's backend serves.
        name: part of the label of the call.
        timeout: as for `all_reduce`, also its errors.
    """
    call = Call(group, device, "barrier" if name is None else f"barrier {name!r}", timeout)
    call.run(group.all_reduce, torch.zeros(1, dtype=torch.int32, device=device))
    group.wait_device(device)


def monitored_barrier(group: Group, name: str | None = None, *, timeout: timedelta | float) -> None:
    """Wait until all ranks have called this function; at the deadline raise, naming the ranks that have not.

    It uses the group's key-value store and not the backend, so the group is usable after a failure. The first
    rank whose deadline passes decides for all which ranks are missing; a rank that calls later gets the same
    error. It costs a few round trips to the store, and does not wait for CUDA devices.

    Collective: all ranks must call it.

    Args:
        name: part of the label of the call.
        timeout: deadline of this call.

    Raises:
        CollectiveTimeoutError: the deadline of a rank has passed; `missing` holds the ranks, on all ranks.
        ConfigurationError: torch knows no store for this group; pass one with `Group(..., store=store)`.
    """
    # The call has no deadline of its own: at the deadline the ranks decide together which are missing.
    label = "monitored_barrier" if name is None else f"monitored_barrier {name!r}"
    call = Call(group, torch.device("cpu"), label)
    limit_s = limit_of(timeout, call.label)
    if group.store is None:
        raise ConfigurationError(
            f"{call.label}: torch knows no store for this group. Make it with init_process_group or"
            " sub_group, or pass its store: Group(process_group, store=store)"
        )
    store, rank, size = group.store, group.rank, group.size
    number = group.next_number("monitored_barrier")

    def key(what: str | int) -> str:
        return f"lightning_ddp/monitored_barrier/{number}/{what}"

    def decide(verdict: str) -> None:
        store.compare_set(key("verdict"), "", verdict)

    def come(thread: InThread[str]) -> str:
        """Post this rank's arrival; wait for the others; return the verdict that a rank stored first."""
        store.set(key(rank), "came")
        if store.add(key("count"), 1) == size:
            decide(_ALL_CAME)
        is_over = partial(store.check, [key("verdict")])
        thread.until(
            lambda: call.waited_s >= limit_s or is_over(), _POLL_S, "no rank has reported the result"
        )
        if not is_over():
            missing = [other for other in range(size) if not store.check([key(other)])]
            decide(f"{rank} {limit_s:g} {' '.join(map(str, missing))}" if missing else _ALL_CAME)
        verdict: str = store.get(key("verdict")).decode()
        if verdict == _ALL_CAME and store.add(key("left"), 1) == size:
            for what in ("verdict", "count", "left", *range(size)):
                store.delete_key(key(what))
        return verdict

    verdict = call.wait_for_thread(InThread(come, limit_s))
    if verdict != _ALL_CAME:
        by, limit, *ranks = verdict.split(" ")
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
        late = "; this rank came when it was over" if str(rank) in ranks else ""
        raise call.error(
            CollectiveTimeoutError,
            f": rank {by} has waited {limit} s, its deadline, and {names} did not come{late}."
            f" Look at what {names} did meanwhile, or give it more time.",
            missing=list(map(int, ranks)),
        )


# ---------------------------------------------------------------------- attempts of torchrun


def store_of_attempt(store: Any, *, rank: int, world_size: int) -> Any:
    """Agree with the other ranks on a key prefix for this restart attempt; return torchrun's store under it.

    Collective: all ranks must call it.

    Raises:
        RendezvousError: not all ranks called within the store's timeout.
    """
    timeout = store.timeout
    try:
        name = _welcome(store, world_size) if rank == 0 else _ask(store, rank, timeout)
    except dist.DistStoreError as error:
        raise RendezvousError(
            f"rank {rank}: not all {world_size} ranks that torchrun has started have come within"
            f" {timeout.total_seconds():g} s: {error}. Check that all of them train with the same devices"
            " and num_nodes as torchrun's --nproc-per-node and --nnodes."
        ) from error
    return dist.PrefixStore(f"{_ATTEMPT}/{name}", store)


@cache
def _token(rank: int) -> str:
    """Return a random token for `rank`, made once per process, so that a repeated request finds its reply."""
    return secrets.token_hex(8)


def _welcome(store: Any, world_size: int) -> str:
    name = _token(0)
    store.set(_ATTEMPT, name)
    for rank in range(1, world_size):
        token = store.get(f"{_ATTEMPT}/{name}/hello/{rank}").decode()
        store.set(f"{_ATTEMPT}/{name}/welcome/{token}", "")
    return name


def _ask(store: Any, rank: int, timeout: timedelta) -> str:
    token, name = _token(rank), ""
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        latest = store.get(_ATTEMPT).decode()  # may be the name of the previous attempt
        if latest != name:
            name = latest
            store.set(f"{_ATTEMPT}/{name}/hello/{rank}", token)
        if store.check([f"{_ATTEMPT}/{name}/welcome/{token}"]):
            return str(name)
        time.sleep(_ASK_AGAIN_S)
    raise dist.DistStoreError("no answer of rank 0")

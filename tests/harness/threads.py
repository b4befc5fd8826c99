"""Ranks as threads of the test: one gloo group each over a shared store, ready in milliseconds."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from harness.outcomes import RankOutcome, values_or_raise

LONGEST_COLLECTIVE_S = 10.0
"""Time limit of the groups: a freed one with a pending collective may hold up the whole process so long."""
FAILURE_GRACE_S = 5.0
"""How long `run_threads` waits for the other ranks once one of them has failed."""


def run_threads(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 30.0,
    collective_s: float = LONGEST_COLLECTIVE_S,
) -> list[Any]:
    """Runs `fn(rank, world_size, process_group, *args)` in one thread per rank; results in rank order.

    The random number generator is one for all threads: use a `torch.Generator` per rank. `collective_s` is
    the time limit of the groups: what a rank that leaves a collective pending costs its test.

    Raises:
        RankFailed: a rank raised or hung; lists all of them.
    """
    limit_s = min(timeout_s, collective_s)
    return values_or_raise(_run(fn, world_size, args, timeout_s, limit_s, stop_on_failure=True))


def run_threads_outcomes(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 30.0
) -> list[RankOutcome]:
    """As `run_threads`, for ranks that are expected to fail: one outcome per rank, in rank order.

    The group of a rank that failed stays connected, so a peer that waits for it hangs and is reported.
    """
    limit_s = min(timeout_s, LONGEST_COLLECTIVE_S)
    return _run(fn, world_size, args, timeout_s, limit_s, stop_on_failure=False)


def on_ranks(num_ranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a function that each of so many threads runs, as by `run_threads`.

    The threads give it `rank`, `world_size`, `group` or `process_group`, and `event`, which is one for all of
    them, where it has such arguments.
    """

    def decorate(fn: Callable[..., None]) -> Callable[..., None]:
        names = inspect.signature(fn).parameters
        of_ranks = ("rank", "world_size", "group", "process_group", "event")

        def test(**arguments: Any) -> None:
            event = threading.Event()

            def rank_main(rank: int, world_size: int, group: Any) -> None:
                given = {"rank": rank, "world_size": world_size, "group": group, "process_group": group}
                given |= {"event": event}
                fn(**arguments, **{name: value for name, value in given.items() if name in names})

            run_threads(rank_main, num_ranks)

        functools.update_wrapper(test, fn)
        own = [parameter for name, parameter in names.items() if name not in of_ranks]
        test.__signature__ = inspect.Signature(own)  # which pytest reads
        return test

    return decorate


def _run(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    timeout_s: float,
    collective_s: float,
    *,
    stop_on_failure: bool,
) -> list[RankOutcome]:
    store = dist.HashStore()
    groups: list[dist.ProcessGroup | None] = [None] * world_size
    outcomes: dict[int, RankOutcome] = {}
    changed = threading.Condition()

    def rank_main(rank: int) -> None:
        try:
            groups[rank] = _make_group(store, rank, world_size, collective_s)
            outcome = RankOutcome(
                rank=rank, status="returned", value=fn(rank, world_size, groups[rank], *args)
            )
        except BaseException as error:  # noqa: BLE001 (a rank reports whatever ended it, SystemExit too)
            outcome = RankOutcome.from_error(rank, error)
        with changed:
            outcomes[rank] = outcome
            changed.notify()

    # daemon: a rank that hangs is reported, and must not keep the interpreter from ending
    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    with changed:
        deadline = time.monotonic() + timeout_s
        while len(outcomes) < world_size and time.monotonic() < deadline:
            if stop_on_failure and any(outcome.failed for outcome in outcomes.values()):
                deadline = min(deadline, time.monotonic() + FAILURE_GRACE_S)
                stop_on_failure = False
            changed.wait(max(0.0, deadline - time.monotonic()))
        found = dict(outcomes)
    for rank in range(world_size):
        if rank not in found:
            found[rank] = RankOutcome(
                rank=rank,
                status="hung",
                message=f"no result within its deadline (timeout_s={timeout_s}); stack:",
                traceback=_stack_of(threads[rank]),
            )
    _end(threads, groups)
    return [found[rank] for rank in range(world_size)]


def _make_group(store: dist.Store, rank: int, world_size: int, collective_s: float) -> dist.ProcessGroup:
    """A `ProcessGroup` with a gloo backend, as `init_process_group` builds it, but not the default one."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface=loopback)]
    options._timeout = timedelta(seconds=collective_s)
    backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world_size, options)
    backend._set_sequence_number_for_group()
    prefixed = dist.PrefixStore("group", store)
    group = dist.ProcessGroup(prefixed, rank, world_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_group_name(f"thread-{rank}")
    return group


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "(ended meanwhile)"


def _end(threads: list[threading.Thread], groups: list[dist.ProcessGroup | None]) -> None:
    """Ends the groups, so that what waits in a collective ends too.

    A gloo group that is freed waits for its pending collectives up to their time limit, unless its peers
    break the connections. The peers are in this process: so all are freed at once, each in a thread.
    """
    for group in groups:
        if group is not None and any(thread.is_alive() for thread in threads):
            with contextlib.suppress(RuntimeError):
                group.abort()

    def free(rank: int) -> None:
        groups[rank] = None

    alive = [weakref.ref(group) for group in groups if group is not None]
    group = None
    freeing = [threading.Thread(target=free, args=(rank,), daemon=True) for rank in range(len(groups))]
    for thread in freeing:
        thread.start()
    for thread in [*threads, *freeing]:
        thread.join(timeout=1)
    if any(reference() is not None for reference in alive):
        gc.collect()  # a traceback keeps it; better freed here than in the middle of another test

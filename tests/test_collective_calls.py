"""What all collectives share: `run`, deadlines, labels, spans, sub-groups, refusals of what cannot work."""

from __future__ import annotations

import inspect
import re
import threading
import time
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FunctionType

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks, run_ranks, run_threads, store_elsewhere, toy_backend
from harness.toy_backend import ToyGroup
from test_collectives import CPU, KINDS, group_of, on_threads

import lightning_ddp
from lightning_ddp import comm
from lightning_ddp._torch import with_timeout
from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.comm.group import Group
from lightning_ddp.errors import CollectiveError, CollectiveTimeoutError, ConfigurationError

SOON = timedelta(seconds=0.15)
PAGE = Path(lightning_ddp.__file__).parent / "docs" / "guides" / "collectives.md"
LATE_S = 10.0
"""No error may take so long; the deadline is 0.15 s."""

# ---------------------------------------------------------------------- any collective of torch


def own(rank: int) -> torch.Tensor:
    return torch.tensor([rank + 1.0])


def parts(rank: int) -> list[torch.Tensor]:
    return [torch.tensor([10.0 * rank + part]) for part in range(2)]


COLLECTIVES = {
    "all_reduce": (lambda out, rank, **o: dist.all_reduce(out.fill_(rank), **o), [[1, 1], [1, 1]]),
    "broadcast": (lambda out, rank, **o: dist.broadcast(out.fill_(rank), 1, **o), [[1, 1], [1, 1]]),
    "reduce": (lambda out, rank, **o: dist.reduce(out.fill_(rank), 0, **o), [[1, 1], None]),
    "all_gather": (
        lambda out, rank, **o: dist.all_gather(list(out.split(1)), own(rank), **o),
        [[1, 2], [1, 2]],
    ),
    "all_gather_into_tensor": (
        lambda out, rank, **o: dist.all_gather_into_tensor(out, own(rank), **o),
        [[1, 2], [1, 2]],
    ),
    "all_gather_single": (
        lambda out, rank, **o: dist.all_gather_single(out, own(rank), **o),
        [[1, 2], [1, 2]],
    ),
    "gather": (
        lambda out, rank, **o: dist.gather(own(rank), None if rank else list(out.split(1)), 0, **o),
        [[1, 2], [0, 0]],
    ),
    "gather_single": (
        lambda out, rank, **o: dist.gather_single(own(rank), None if rank else out, 0, **o),
        [[1, 2], [0, 0]],
    ),
    "gather_into_tensor": (
        lambda out, rank, **o: dist.gather_into_tensor(own(rank), None if rank else out, 0, **o),
        [[1, 2], [0, 0]],
    ),
    "scatter": (
        lambda out, rank, **o: dist.scatter(out[:1], parts(1) if rank else None, 1, **o),
        [[10, 0], [11, 0]],
    ),
    "reduce_scatter": (
        lambda out, rank, **o: dist.reduce_scatter(out[:1], parts(rank), **o),
        [[10, 0], [12, 0]],
    ),
    "reduce_scatter_tensor": (
        lambda out, rank, **o: dist.reduce_scatter_tensor(out[:1], torch.cat(parts(rank)), **o),
        [[10, 0], [12, 0]],
    ),
    "reduce_scatter_single": (
        lambda out, rank, **o: dist.reduce_scatter_single(out[:1], torch.cat(parts(rank)), **o),
        [[10, 0], [12, 0]],
    ),
    "all_to_all": (
        lambda out, rank, **o: dist.all_to_all(list(out.split(1)), parts(rank), **o),
        [[0, 10], [1, 11]],
    ),
    "all_to_all_single": (
        lambda out, rank, **o: dist.all_to_all_single(out, torch.cat(parts(rank)), **o),
        [[0, 10], [1, 11]],
    ),
    "barrier": (lambda out, rank, **o: dist.barrier(**o), [[0, 0], [0, 0]]),
    "isend": (
        lambda out, rank, **o: dist.irecv(out, 0) if rank else dist.isend(out.fill_(7), 1),
        [[7, 7], [7, 7]],
    ),
    "irecv": (
        lambda out, rank, **o: dist.isend(out.fill_(7), 0) if rank else dist.irecv(out, 1),
        [[7, 7], [7, 7]],
    ),
}
"""Name -> a function that starts the collective, and what it leaves on each of two ranks."""
MISSING: set[str] = {"2.10": {"all_to_all"}, "2.15": {"gather_single", "gather_into_tensor"}}.get(
    torch.__version__.rpartition(".")[0], set()
)
"""Collectives that gloo does not have in this torch."""


def wrong_results(rank: int, _: int) -> list[str]:
    warnings.simplefilter("ignore", FutureWarning)  # torch's, of old names
    group, wrong = comm.Group(dist.group.WORLD), []
    for wait in (True, False):
        running = {}
        for name, (begin, expected) in COLLECTIVES.items():
            if not hasattr(dist, name) or name in MISSING:
                continue
            out = torch.zeros(2)
            call = partial(begin, out, rank, async_op=True)
            running[name] = comm.run(group, call, label=name, timeout=60, wait=wait), out, expected[rank]
        for name, (collective, out, expected) in reversed(running.items()):
            if not wait:
                collective.wait()
            if expected is not None and out.tolist() != expected:
                wrong.append(f"{name}: {out.tolist()} instead of {expected}")
    return wrong


def test_any_collective_of_torch_runs_with_a_label_and_a_deadline() -> None:
    assert run_ranks(wrong_results, 2) == [[], []]
    listed = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert listed == list(COLLECTIVES), "the page has this table"
    functions = {name: f for name, f in vars(dist).items() if type(f) is FunctionType and name not in listed}
    asynchronous = [f for f in functions.values() if "async_op" in inspect.signature(f).parameters]
    assert [f for f in asynchronous if not hasattr(f, "__deprecated__")] == [], "every collective of torch"


# ---------------------------------------------------------------------- deadlines and failures

CALLS = {
    "broadcast": lambda group, **k: comm.broadcast(group, torch.ones(2), 1, **k),
    "broadcast_nested": lambda group, **k: comm.broadcast_nested(group, [torch.ones(2)], 1, CPU, **k),
    "all_reduce": lambda group, **k: comm.all_reduce(group, torch.ones(2), **k),
    "reduce": lambda group, **k: comm.reduce(group, torch.ones(2), 0, **k),
    "all_gather": lambda group, **k: comm.all_gather(group, torch.ones(2), **k),
    "all_gather_objects": lambda group, **k: comm.all_gather_objects(group, "x", CPU, **k),
    "run": lambda group, **k: comm.run(group, lambda: group.process_group.barrier(), **k),
    "run of a message": lambda group, **k: comm.run(
        group, lambda: group.process_group.recv([torch.ones(2)], 1, 0), **k
    ),
}


def ended_by_its_deadline(call, group) -> CollectiveTimeoutError:
    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0 of 2: my call has not ended after \d") as info:
        call(group, timeout=SOON, label="my call")
    assert time.monotonic() - start < LATE_S
    assert (info.value.label, info.value.rank) == ("my call", 0)
    assert info.value.waited_s >= SOON.total_seconds()
    return info.value


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_a_rank_that_never_comes_is_an_error_within_the_deadline(rank, process_group, event, name) -> None:
    if rank == 1:
        assert event.wait(20)
        return
    try:
        error = ended_by_its_deadline(CALLS[name], Group(process_group))
    finally:
        event.set()
    assert isinstance(error, RuntimeError)
    assert isinstance(error, TimeoutError)


@on_ranks(2)
def test_the_backward_of_a_gather_has_its_deadline_and_name(rank, process_group, event) -> None:
    tensor = torch.ones(2, requires_grad=True)
    gathered = comm.all_gather(Group(process_group), tensor, sync_grads=True, timeout=20, label="my call")
    if rank == 1:
        assert event.wait(20)
        return
    gathered.grad_fn.call.timeout = SOON  # of the backward alone
    try:
        with pytest.raises(CollectiveTimeoutError, match="backward of my call has not ended after"):
            gathered.sum().backward()
    finally:
        event.set()


@on_ranks(2)
def test_deadlines_hold_where_the_backend_is_somebody_elses(rank, process_group, event) -> None:
    group = group_of("toy", process_group)
    if rank == 1:
        assert event.wait(20)
        for _ in range(2):  # lets the threads of the toy end
            comm.all_reduce(group, torch.ones(2))
        return
    try:
        ended_by_its_deadline(CALLS["all_reduce"], group)
        begin = partial(group.process_group.allreduce, [torch.ones(2)])
        ended_by_its_deadline(lambda group, **k: comm.run(group, begin, **k), group)
    finally:
        event.set()


@on_ranks(2)
def test_a_failure_elsewhere_interrupts_every_wait_with_its_own_error(rank, process_group, event) -> None:
    interrupt = Interrupt()
    group = Group(process_group, interrupt)
    if rank == 1:
        assert event.wait(20)
        comm.all_reduce(Group(process_group), torch.ones(1))
        comm.run(group, lambda: process_group.send([torch.ones(1)], 0, 0), label="message")
        return
    barrier, message = (
        comm.run(group, begin, label=label, wait=False)
        for label, begin in {
            "sum": lambda: process_group.allreduce([torch.ones(1)]),
            "message": lambda: process_group.recv([torch.ones(1)], 1, 0),
        }.items()
    )
    waits = [barrier.wait, message.wait, partial(comm.monitored_barrier, group, timeout=20)]
    labels = []

    def fail() -> None:
        wait_until_waiting(interrupt)
        labels.append(interrupt.activity.label)
        interrupt.set(RuntimeError("rank 7 failed"))

    threading.Thread(target=fail).start()
    for wait in waits:
        with pytest.raises(RuntimeError, match=r"^rank 7 failed$"):
            wait()
        assert not interrupt.set(RuntimeError("a later failure"))
    event.set()
    interrupt.clear()  # so that nothing is left under way
    barrier.wait()
    assert labels == ["sum"], "what somebody is told who asks what the rank waits for"


def wait_until_waiting(interrupt) -> None:
    deadline = time.monotonic() + 20
    while interrupt.activity.label is None and time.monotonic() < deadline:
        time.sleep(0.005)


@on_ranks(2)
def test_a_peer_that_is_gone_is_an_error_with_the_name_of_the_collective(rank, process_group, event) -> None:
    group = Group(process_group)
    if rank == 1:  # gloo breaks the connections of a collective that timed out
        with with_timeout(process_group, timedelta(milliseconds=200)):
            work = group.all_reduce(torch.ones(1))
        with pytest.raises(RuntimeError, match="Timed out"):
            work.wait()
        event.set()
        return
    assert event.wait(20)
    with pytest.raises(CollectiveError, match="rank 0 of 2: broadcast failed after"):
        comm.broadcast(group, torch.ones(1), 1)


# ---------------------------------------------------------------------- barriers


@pytest.mark.parametrize("kind", KINDS)
def test_monitored_barrier_names_the_missing_ranks_on_all_ranks(kind) -> None:
    about_to, over = threading.Event(), threading.Event()

    def check(rank, size, group):
        comm.monitored_barrier(group, timeout=20)
        comm.monitored_barrier(group, timeout=20)
        if rank == 0:
            assert about_to.wait(20)
        elif rank == 1:
            about_to.set()
        else:
            assert over.wait(20)
        with pytest.raises(
            CollectiveTimeoutError, match=r"monitored_barrier 'epoch end': rank 0 has"
        ) as info:
            comm.monitored_barrier(group, "epoch end", timeout=1.0 if rank == 0 else 20)
        over.set()
        assert info.value.missing == (2,)
        assert ("this rank came when it was over" in str(info.value)) == (rank == 2)
        comm.monitored_barrier(group, timeout=20)  # the group is as good as before
        return comm.all_reduce(group, torch.ones(1)).item()

    assert on_threads(check, 3, kind) == [3.0] * 3


BARRIERS = {
    "barrier": lambda group: comm.barrier(group, CPU),
    "monitored_barrier": lambda group: comm.monitored_barrier(group, timeout=20),
}


@pytest.mark.parametrize("name", BARRIERS)
def test_a_barrier_waits_for_the_last_rank(name) -> None:
    arrived = threading.Event()
    order: list[str] = []

    def rank_main(rank, world_size, process_group):
        group = Group(process_group)
        if rank == 1:
            assert arrived.wait(10)
            order.append("last rank arrives")
        else:
            arrived.set()
        BARRIERS[name](group)
        order.append("passed")

    run_threads(rank_main, 2)
    assert order == ["last rank arrives", "passed", "passed"]


@pytest.mark.parametrize("is_under_way", [False, True])
def test_a_store_whose_process_is_stopped_holds_nobody_up(is_under_way) -> None:
    def rank_main(rank, world_size, process_group, store, stop):
        interrupt = Interrupt()
        group = Group(ToyGroup(dist.HashStore(), 0, 2), interrupt, store)
        if is_under_way:
            threading.Thread(target=lambda: (wait_until_waiting(interrupt), stop())).start()
        else:
            stop()
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="the group's store does not answer") as info:
            comm.monitored_barrier(group, timeout=1)
        assert (info.value.label, info.value.missing) == ("monitored_barrier", ())
        assert time.monotonic() - start < LATE_S

    with store_elsewhere() as (store, stop):
        run_threads(rank_main, 1, store, stop)


# ---------------------------------------------------------------------- sub-groups


@on_ranks(4)
def test_groups_of_a_list_and_of_neighbors(rank, process_group) -> None:
    group = Group(process_group)
    some = comm.sub_group(group, [3, 1], CPU)
    if rank in (1, 3):
        assert some is not None
        assert (some.size, some.rank) == (2, [3, 1].index(rank))
        gathered = comm.all_gather(some, torch.tensor(rank)).tolist()
        comm.monitored_barrier(some, timeout=timedelta(seconds=20))
    else:
        assert some is None
        gathered = None
        with pytest.raises(ConfigurationError, match="this rank is not in the group"):
            comm.all_reduce(some, torch.ones(1))
    part = comm.part_group(group, 3, CPU)
    inside = comm.all_gather(part, torch.tensor(rank)).tolist()
    nested = comm.sub_group(part, [part.size - 1, 0][: part.size], CPU)
    last = None if nested is None else comm.all_gather(nested, torch.tensor(rank)).tolist()
    assert (gathered, inside, last) == [
        (None, [0, 1, 2], [2, 0]),
        ([3, 1], [0, 1, 2], None),
        (None, [0, 1, 2], [2, 0]),
        ([3, 1], [3], [3]),
    ][rank]


def groups_that_torch_makes(rank, world_size, store):
    toy_backend.register()
    dist.init_process_group("toy", store=dist.FileStore(store, 4), rank=rank, world_size=4)
    group = Group(dist.group.WORLD)
    some = comm.sub_group(group, [3, 1], CPU)
    if some is not None:
        assert (some.size, some.rank) == (2, [3, 1].index(rank))
        assert comm.all_gather(some, torch.tensor(rank)).tolist() == [3, 1]
    halves = [comm.sub_group(group, ranks, CPU) for ranks in ([0, 2], [1, 3])]
    device = torch.device("cuda", 0)
    dist.group.WORLD.bound_device_id = device  # as init_process_group(device_id=) leaves it
    nested = None
    if rank % 2:  # a split would wait for the other two
        pair = comm.sub_group(halves[1], [1, 0], CPU)
        nested = comm.all_gather(pair, torch.tensor(rank)).tolist()
    assert dist.group.WORLD.bound_device_id == device
    dist.group.WORLD.bound_device_id = None
    make = dist.new_group
    dist.new_group = lambda ranks, use_local_synchronization: make(ranks)  # as in older releases
    with pytest.raises(ConfigurationError, match=r"group of ranks \[2, 0\]: torch .* List them in rising"):
        comm.sub_group(group, [2, 0], CPU)
    return nested


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="this torch makes groups in rising order only",
)
def test_groups_that_torch_makes_keep_the_order_of_the_list_and_need_nobody_else(tmp_path) -> None:
    results = run_ranks(groups_that_torch_makes, 4, str(tmp_path / "store"), process_group=False)
    assert results == [None, [3, 1], None, [3, 1]]


# ---------------------------------------------------------------------- refusals

REFUSED = {
    "sub_group of ranks": lambda g: comm.sub_group(g, [0, 2], CPU),
    "sub_group of ranks \\[0, 0\\]": lambda g: comm.sub_group(g, [0, 0], CPU),
    "sub_group of ranks \\[\\]: expected at least one": lambda g: comm.sub_group(g, [], CPU),
    "broadcast from rank 2, but the group has ranks 0 to 1": lambda g: comm.broadcast(g, torch.ones(1), 2),
    "broadcast from rank 3, but": lambda g: comm.broadcast_nested(g, 1, 3, CPU),
    "reduce to rank -1, but": lambda g: comm.reduce(g, torch.ones(1), -1),
    "all_reduce: timeout='3': expected a .*timedelta or seconds": lambda g: comm.all_reduce(
        g, torch.ones(1), timeout="3"
    ),
    "barrier: timeout=.*0\\): expected a time above 0": lambda g: comm.barrier(g, CPU, timeout=timedelta(0)),
    "begin has returned no Work": lambda g: comm.run(g, lambda: None, label="nothing"),
    "torch knows no store for this group": lambda g: comm.monitored_barrier(
        Group(g.process_group._get_backend(CPU)), timeout=SOON
    ),
}


@on_ranks(2)
def test_what_cannot_work_is_refused_before_anything_is_sent(rank, process_group) -> None:
    group = Group(process_group)
    if rank == 0:  # alone: a call that communicated would hang, and the sum below be another one
        for message, call in REFUSED.items():
            with pytest.raises(ConfigurationError, match=message):
                call(group)
    assert comm.all_reduce(group, torch.ones(1)).item() == 2.0


# ---------------------------------------------------------------------- labels and spans


def test_labels_are_seen_in_the_profiler() -> None:
    def rank_main(rank, world_size, process_group):
        group = Group(process_group)
        begin = partial(process_group.allreduce, [torch.ones(1)])
        calls = [
            lambda: comm.all_reduce(group, torch.ones(1), label="sum of losses"),
            lambda: comm.barrier(group, CPU, "epoch end"),
            lambda: comm.run(group, begin, label="sum of mine"),
            lambda: comm.monitored_barrier(group, timeout=20),
        ]
        if rank == 1:
            return [call() for call in calls]
        # what `torch.profiler.profile` starts, which imports the compiler besides
        with torch.autograd.profiler.profile(use_kineto=True) as profiler:
            for call in calls:
                call()
        names = [event.name for event in profiler.function_events]
        return {name for name in names if name.startswith("lightning_ddp::")}

    assert run_threads(rank_main, 2)[0] == {
        "lightning_ddp::sum of losses",
        "lightning_ddp::wait sum of losses",
        "lightning_ddp::barrier 'epoch end'",
        "lightning_ddp::wait barrier 'epoch end'",
        "lightning_ddp::sum of mine",
        "lightning_ddp::wait sum of mine",
        "lightning_ddp::wait monitored_barrier",
    }

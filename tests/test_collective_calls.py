"""What all collectives share: deadlines, labels, spans, sub-groups, refusals of what cannot work."""

from __future__ import annotations

import inspect
import pickle
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks, run_threads, store_elsewhere, toy_backend
from test_collective_kinds import CPU, KINDS, group_of, on_threads

from lightning_ddp import comm
from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.comm.group import Group
from lightning_ddp.errors import CollectiveError, CollectiveTimeoutError, ConfigurationError

SOON = timedelta(seconds=0.15)
SHORT = timedelta(seconds=1)
LATE_S = 10.0
"""No error may take so long; the deadline is 0.15 s."""

CALLS = {
    "barrier": lambda group, **k: comm.barrier(group, CPU, **k),
    "broadcast": lambda group, **k: comm.broadcast(group, torch.ones(2), 1, **k),
    "broadcast_object": lambda group, **k: comm.broadcast_object(group, "x", 1, CPU, **k),
    "broadcast_nested": lambda group, **k: comm.broadcast_nested(group, [torch.ones(2)], 1, CPU, **k),
    "all_reduce": lambda group, **k: comm.all_reduce(group, torch.ones(2), **k),
    "reduce": lambda group, **k: comm.reduce(group, torch.ones(2), 0, **k),
    "all_gather": lambda group, **k: comm.all_gather(group, torch.ones(2), **k),
    "all_gather_uneven": lambda group, **k: comm.all_gather_uneven(group, torch.ones(2), **k),
    "all_gather_objects": lambda group, **k: comm.all_gather_objects(group, "x", CPU, **k),
    "gather": lambda group, **k: comm.gather(group, torch.ones(2), 0, **k),
    "scatter": lambda group, **k: comm.scatter(group, torch.ones(2), None, 1, **k),
    "reduce_scatter": lambda group, **k: comm.reduce_scatter(group, torch.ones(2), **k),
    "all_to_all": lambda group, **k: comm.all_to_all(group, torch.ones(2), **k),
    "recv": lambda group, **k: comm.recv(group, torch.ones(2), 1, **k),
    "recv_object": lambda group, **k: comm.recv_object(group, 1, CPU, **k),
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
def test_a_rank_that_never_comes_is_an_error_within_the_deadline(name) -> None:
    over = threading.Event()

    def rank_main(rank, world_size, process_group):
        if rank == 1:
            assert over.wait(20)
            return
        try:
            error = ended_by_its_deadline(CALLS[name], Group(process_group))
        finally:
            over.set()
        assert isinstance(error, RuntimeError)
        assert isinstance(error, TimeoutError)
        copy = pickle.loads(pickle.dumps(error))
        assert (str(copy), copy.label, copy.rank) == (str(error), error.label, error.rank)

    run_threads(rank_main, 2)


def test_deadlines_hold_where_the_backend_is_somebody_elses() -> None:
    over = threading.Event()

    def rank_main(rank, world_size, process_group):
        group = group_of("toy", process_group)
        if rank == 1:
            assert over.wait(20)
            # lets the threads of the toy end
            comm.all_reduce(group, torch.ones(2))
            comm.send(group, torch.ones(2), 0)
            return
        try:
            ended_by_its_deadline(CALLS["all_reduce"], group)
            ended_by_its_deadline(CALLS["recv"], group)
        finally:
            over.set()

    run_threads(rank_main, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_wait_of_a_handle_may_be_given_up_and_tried_again(kind) -> None:
    gave_up = threading.Event()

    def rank_main(rank, world_size, process_group):
        group = group_of(kind, process_group)
        if rank == 1:
            assert gave_up.wait(20)
            comm.send(group, torch.full((2,), 5.0), 0)
            return comm.all_reduce(group, torch.ones(2)).tolist()
        handles = [
            comm.recv.start(group, torch.zeros(2), 1),
            comm.all_reduce.start(group, torch.ones(2)),
        ]
        for handle in handles:
            with pytest.raises(CollectiveTimeoutError, match="may be waited for again"):
                handle.wait(SOON)
        gave_up.set()
        assert handles[0].wait().tolist() == [5.0, 5.0]
        return handles[1].wait().tolist()

    assert run_threads(rank_main, 2) == [[2.0, 2.0]] * 2


def test_a_failure_elsewhere_interrupts_every_wait_with_its_own_error() -> None:
    over = threading.Event()

    def rank_main(rank, world_size, process_group):
        interrupt = Interrupt()
        group = Group(process_group, interrupt)
        if rank == 1:
            assert over.wait(20)
            comm.send(Group(process_group), torch.ones(1), 0)
            comm.all_reduce(Group(process_group), torch.ones(1))
            return
        handles = [
            comm.recv.start(group, torch.ones(1), 1),
            comm.all_reduce.start(group, torch.ones(1)),
            comm.monitored_barrier.start(group, timeout=timedelta(seconds=20)),
        ]
        labels = []

        def fail() -> None:
            deadline = time.monotonic() + 20
            while interrupt.activity.label is None and time.monotonic() < deadline:
                time.sleep(0.005)
            labels.append(interrupt.activity.label)
            interrupt.set(RuntimeError("rank 7 failed"))

        threading.Thread(target=fail).start()
        for handle in handles:
            with pytest.raises(RuntimeError, match=r"^rank 7 failed$"):
                handle.wait()
        over.set()
        interrupt.clear()  # so that nothing is left under way
        handles[0].wait()
        handles[1].wait()
        assert labels == ["recv"], "what somebody is told who asks what the rank waits for"

    run_threads(rank_main, 2)


def test_a_peer_that_is_gone_is_an_error_with_the_name_of_the_collective() -> None:
    broken = threading.Event()

    def rank_main(rank, world_size, process_group):
        group = Group(process_group)
        if rank == 1:  # gloo breaks the connections of a collective that timed out
            work = group.all_reduce(torch.ones(1), timeout=timedelta(milliseconds=200))
            with pytest.raises(RuntimeError, match="Timed out"):
                work.wait()
            broken.set()
            return
        assert broken.wait(20)
        with pytest.raises(CollectiveError, match="rank 0 of 2: broadcast failed after"):
            comm.broadcast(group, torch.ones(1), 1)

    run_threads(rank_main, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_monitored_barrier_names_the_missing_ranks_on_all_ranks(kind) -> None:
    came, over = threading.Event(), threading.Event()

    def check(rank, size, group):
        comm.monitored_barrier(group, timeout=timedelta(seconds=20))
        comm.monitored_barrier(group, timeout=timedelta(seconds=20))
        limit = timedelta(seconds=20)
        if rank == 0:
            assert came.wait(20)
            limit = SOON
        if rank == 2:
            assert over.wait(20)
        handle = comm.monitored_barrier.start(group, "epoch end", timeout=limit)
        if rank == 1:
            came.set()
        with pytest.raises(
            CollectiveTimeoutError, match=r"monitored_barrier 'epoch end': rank 0 has"
        ) as info:
            handle.wait()
        over.set()
        assert info.value.missing == (2,)
        assert ("this rank came when it was over" in str(info.value)) == (rank == 2)
        comm.monitored_barrier(group, timeout=timedelta(seconds=20))  # the group is as good as before
        return comm.all_reduce(group, torch.ones(1)).item()

    assert on_threads(check, 3, kind) == [3.0] * 3


def test_monitored_barrier_waits_for_the_last_rank() -> None:
    arrived = threading.Event()
    order: list[str] = []

    def check(rank, size, group):
        if rank == 1:
            assert arrived.wait(10)
            order.append("last rank arrives")
            comm.monitored_barrier(group, timeout=timedelta(seconds=20))
            return
        handle = comm.monitored_barrier.start(group, timeout=timedelta(seconds=20))
        arrived.set()
        handle.wait()
        order.append("passed")

    on_threads(check, 2, "gloo")
    assert order == ["last rank arrives", "passed"]


def test_monitored_barriers_may_be_waited_for_in_another_order() -> None:
    def check(rank, size, group):
        handles = [comm.monitored_barrier.start(group, timeout=SHORT) for _ in range(3)]
        for handle in reversed(handles):
            handle.wait()

    on_threads(check, 2, "gloo")


ASKING = {
    "monitored_barrier": lambda group: comm.monitored_barrier(group, timeout=SHORT),
    "send": lambda group: comm.send(group, torch.ones(8 << 20), 1),
    "recv": lambda group: comm.recv(group, torch.ones(1), 1),
}


@pytest.mark.parametrize(
    ("name", "is_under_way"),
    [(name, False) for name in ASKING] + [("monitored_barrier", True), ("recv", True)],
)
def test_a_store_whose_process_is_stopped_holds_nobody_up(name, is_under_way) -> None:
    def rank_main(rank, world_size, process_group, store, stop):
        toy = toy_backend.ToyGroup(dist.HashStore(), 0, 2)
        toy.options = SimpleNamespace(_timeout=SHORT)
        interrupt = Interrupt()
        group = Group(toy, interrupt, store)
        if is_under_way:
            threading.Thread(target=stop_when_waiting, args=(interrupt, stop)).start()
        else:
            stop()
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="the group's store does not answer") as info:
            ASKING[name](group)
        assert (info.value.label, info.value.missing) == (name, ())
        assert time.monotonic() - start < LATE_S

    with store_elsewhere() as (store, stop):
        run_threads(rank_main, 1, store, stop)


def stop_when_waiting(interrupt, stop) -> None:
    deadline = time.monotonic() + 20
    while interrupt.activity.label is None and time.monotonic() < deadline:
        time.sleep(0.005)
    stop()


# ---------------------------------------------------------------------- sub-groups


def test_groups_of_a_list_and_of_a_node() -> None:
    def rank_main(rank, world_size, process_group):
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
        node = comm.node_group(group, CPU, node=rank % 2)
        inside = comm.all_gather(node, torch.tensor(rank)).tolist()
        host = comm.node_group(group, CPU)
        pairs = comm.sub_group(node, [1, 0], CPU)
        assert pairs is not None
        nested = comm.all_gather(pairs, torch.tensor(rank)).tolist()
        return gathered, inside, host.size, nested

    assert run_threads(rank_main, 4) == [
        (None, [0, 2], 4, [2, 0]),
        ([3, 1], [1, 3], 4, [3, 1]),
        (None, [0, 2], 4, [2, 0]),
        ([3, 1], [1, 3], 4, [3, 1]),
    ]


def groups_that_torch_makes(rank, world_size, store):
    toy_backend.register()
    dist.init_process_group("toy", store=dist.FileStore(store, 4), rank=rank, world_size=4)
    group = Group(dist.group.WORLD)
    some = comm.sub_group(group, [3, 1], CPU)
    if some is not None:
        assert (some.size, some.rank) == (2, [3, 1].index(rank))
        assert comm.all_gather(some, torch.tensor(rank)).tolist() == [3, 1]
    node = comm.node_group(group, CPU, node=rank % 2)
    device = torch.device("cuda", 0)
    dist.group.WORLD.bound_device_id = device  # as init_process_group(device_id=) leaves it
    nested = None
    if rank % 2:  # a split would wait for the other two
        pair = comm.sub_group(node, [1, 0], CPU)
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
    "reduce to rank -1, but": lambda g: comm.reduce(g, torch.ones(1), -1),
    "gather to rank 2, but": lambda g: comm.gather(g, torch.ones(1), 2),
    "scatter from rank 5, but": lambda g: comm.scatter(g, torch.ones(1), None, 5),
    "one part per rank: expected 2, found 3": lambda g: comm.scatter(
        g, torch.ones(1), [torch.ones(1)] * 3, src=g.rank
    ),
    "one part per rank: expected 2, found none": lambda g: comm.scatter(g, torch.ones(1), None, src=g.rank),
    "the part of rank 1 has shape \\[2\\], torch.float32 on cpu": lambda g: comm.scatter(
        g, torch.ones(1), [torch.ones(1), torch.ones(2)], src=g.rank
    ),
    "reduce_scatter of shape \\[3\\] over 2 ranks": lambda g: comm.reduce_scatter(g, torch.ones(3)),
    "reduce_scatter of shape \\[\\] over 2 ranks": lambda g: comm.reduce_scatter(g, torch.tensor(1.0)),
    "list of 1 tensors of 1 kinds over 2": lambda g: comm.reduce_scatter(g, [torch.ones(1)]),
    "list of 0 tensors of 0 kinds over 2": lambda g: comm.reduce_scatter(g, []),
    "list of 2 tensors of 2 kinds over 2": lambda g: comm.reduce_scatter(g, [torch.ones(1), torch.ones(2)]),
    "3 rows cannot be split evenly over 2 ranks": lambda g: comm.all_to_all(g, torch.ones(3)),
    "input_splits=\\[1, 1\\] are 2 rows; the tensor has 3": lambda g: comm.all_to_all(
        g, torch.ones(3), [1, 1]
    ),
    "input_splits=\\[3\\]: expected 2 numbers of rows": lambda g: comm.all_to_all(g, torch.ones(3), [3]),
    "output_splits=\\[4, -1\\]: expected 2": lambda g: comm.all_to_all(g, torch.ones(3), [1, 2], [4, -1]),
    "a tensor without dimensions has no rows": lambda g: comm.all_to_all(g, torch.tensor(1.0)),
    "send to rank \\d: this is the rank itself": lambda g: comm.send(g, torch.ones(1), g.rank),
    "recv from rank 2, but": lambda g: comm.recv(g, torch.ones(1), 2),
    "17 dimensions; expected at most 16": lambda g: comm.all_gather_uneven(g, torch.ones([1] * 17)),
    "all_reduce: timeout='3': expected a .*timedelta or seconds": lambda g: comm.all_reduce(
        g, torch.ones(1), timeout="3"
    ),
    "barrier: timeout=.*0\\): expected a time above 0": lambda g: comm.barrier(g, CPU, timeout=timedelta(0)),
    "torch knows no store for this group": lambda g: comm.monitored_barrier(
        Group(g.process_group._get_backend(CPU)), timeout=SOON
    ),
}


def test_what_cannot_work_is_refused_before_anything_is_sent() -> None:
    def rank_main(rank, world_size, process_group):
        group = Group(process_group)
        if rank == 0:  # alone: a call that communicated would hang, and the sum below be another one
            for message, call in REFUSED.items():
                with pytest.raises(ConfigurationError, match=message):
                    call(group)
        return comm.all_reduce(group, torch.ones(1)).item()

    assert run_threads(rank_main, 2) == [2.0, 2.0]


# ---------------------------------------------------------------------- labels and spans


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
def test_labels_are_seen_in_the_profiler() -> None:
    def rank_main(rank, world_size, process_group):
        group = Group(process_group)
        if rank == 1:
            comm.all_reduce(group, torch.ones(1))
            comm.barrier(group, CPU)
            comm.send(group, torch.ones(1), 0)
            comm.monitored_barrier(group, timeout=timedelta(seconds=20))
            return set()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            comm.all_reduce(group, torch.ones(1), label="sum of losses")
            comm.barrier.start(group, CPU, "epoch end").wait()
            comm.recv(group, torch.ones(1), 1)
            comm.monitored_barrier(group, timeout=timedelta(seconds=20))
        return {event.name for event in profiler.events() if event.name.startswith("lightning_ddp::")}

    # the profiler imports the compiler
    assert run_threads(rank_main, 2, timeout_s=120.0, collective_s=100.0)[0] == {
        "lightning_ddp::sum of losses",
        "lightning_ddp::wait sum of losses",
        "lightning_ddp::barrier 'epoch end'",
        "lightning_ddp::wait barrier 'epoch end'",
        "lightning_ddp::recv",
        "lightning_ddp::wait recv",
        "lightning_ddp::wait monitored_barrier",
    }


def test_public_names_of_the_collectives_are_the_ones_promised() -> None:
    asynchronous = {"all_gather", "all_gather_uneven", "all_reduce", "all_to_all", "barrier", "broadcast"}
    asynchronous |= {"gather", "monitored_barrier", "recv", "reduce", "reduce_scatter", "scatter", "send"}
    others = {"all_gather_objects", "all_reduce_coalesced", "broadcast_nested", "broadcast_object"}
    others |= {"recv_object", "send_object", "sub_group", "node_group", "Group", "Handle", "Interrupt"}
    others |= {"part_group", "reduce_op", "sibling_group"}
    assert set(comm.__all__) == asynchronous | others
    assert all(hasattr(comm, name) for name in comm.__all__)

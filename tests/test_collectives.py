"""Collectives and waits, with threads as ranks on groups of their own."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_threads

from lightning_ddp import comm
from lightning_ddp.comm import objects
from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.comm.gather_scatter import broadcast_coalesced, start_gather
from lightning_ddp.comm.group import Group
from lightning_ddp.ddp.buffers import Buffers
from lightning_ddp.errors import ConfigurationError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sum", [6.0, 60.0]),
        ("mean", [2.0, 20.0]),
        ("AVG", [2.0, 20.0]),
        ("min", [1.0, 10.0]),
        ("max", [3.0, 30.0]),
        ("product", [6.0, 6000.0]),
        (dist.ReduceOp.MAX, [3.0, 30.0]),
        (None, [6.0, 60.0]),
    ],
)
def test_all_reduce_by_name(op, expected) -> None:
    def rank_main(rank, world_size, process_group):
        tensor = torch.tensor([1.0, 10.0]) * (rank + 1)
        result = comm.all_reduce(Group(process_group), tensor, op)
        assert result is tensor
        return result.tolist()

    assert run_threads(rank_main, 3) == [expected] * 3


def test_mean_of_integers_is_written_back_as_integers_as_lightning_does() -> None:
    def rank_main(rank, world_size, process_group):
        tensor = torch.tensor([1, 4]) + rank
        return comm.all_reduce(Group(process_group), tensor, "mean").tolist()

    assert run_threads(rank_main, 2) == [[1, 4]] * 2  # 1.5 and 4.5, truncated


def test_all_reduce_of_a_strided_tensor_is_in_place() -> None:
    def rank_main(rank, world_size, process_group):
        base = torch.zeros(2, 3)
        base[:, 1] = rank + 1.0
        comm.all_reduce(Group(process_group), base[:, 1])
        return base.tolist()

    assert run_threads(rank_main, 2) == [[[0.0, 3.0, 0.0], [0.0, 3.0, 0.0]]] * 2


def test_unknown_reduce_op_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="reduce_op='median': expected avg, max, mean"):
        comm.reduce_op("median")


def test_coalesced_reduction_spends_one_collective_a_dtype() -> None:
    class CountingGroup(Group):
        num_collectives = 0

        def all_reduce(self, tensor, op=None, **options):
            self.num_collectives += 1
            return super().all_reduce(tensor, op, **options)

    def rank_main(rank, world_size, process_group):
        group = CountingGroup(process_group)
        tensors = [torch.full((2,), rank + 1.0), torch.full((3, 1), rank * 10.0), torch.tensor(rank)]
        comm.all_reduce_coalesced(group, tensors, "sum")
        return group.num_collectives, [t.flatten().tolist() for t in tensors]

    assert run_threads(rank_main, 2) == [(2, [[3.0, 3.0], [10.0] * 3, [1]])] * 2


@pytest.mark.parametrize("size", [10, 4088, 4089, 100_000])
@pytest.mark.parametrize("src", [0, 2])
def test_broadcast_object_of_any_size_from_any_rank(size, src) -> None:
    def rank_main(rank, world_size, process_group):
        obj = {"rank": rank, "data": bytes([rank]) * size}
        return comm.broadcast_object(Group(process_group), obj, src, CPU)

    expected = {"rank": src, "data": bytes([src]) * size}
    assert run_threads(rank_main, 3) == [expected] * 3


def test_broadcast_from_a_rank_that_does_not_exist() -> None:
    def rank_main(rank, world_size, process_group):
        with pytest.raises(ConfigurationError, match="broadcast from rank 2, but the group has ranks 0 to 1"):
            comm.broadcast_object(Group(process_group), 1, 2, CPU)

    run_threads(rank_main, 2)


def test_gather_objects_of_different_sizes() -> None:
    def rank_main(rank, world_size, process_group):
        return comm.all_gather_objects(Group(process_group), "x" * rank * 1000, CPU)

    assert run_threads(rank_main, 3) == [["", "x" * 1000, "x" * 2000]] * 3


@pytest.mark.parametrize(("size", "num_collectives"), [(900, 1), (1100, 2)])
def test_a_gather_of_small_objects_is_one_collective(size, num_collectives, monkeypatch) -> None:
    started = []

    def start(call: Any, tensor: Any) -> Any:
        started.append(call.group.rank)
        return start_gather(call, tensor)

    monkeypatch.setattr(objects, "start_gather", start)

    def rank_main(rank, world_size, process_group):
        return comm.all_gather_objects(Group(process_group), "x" * size * rank, CPU)

    assert run_threads(rank_main, 2) == [["", "x" * size]] * 2
    assert sorted(started) == [0] * num_collectives + [1] * num_collectives


def test_all_gather_sends_gradients_back_to_their_rank() -> None:
    def rank_main(rank, world_size, process_group):
        tensor = torch.full((2,), rank + 1.0, requires_grad=True)
        gathered = comm.all_gather(Group(process_group), tensor, sync_grads=True)
        weights = torch.tensor([[1.0], [10.0]]) * (rank + 1)
        (gathered * weights).sum().backward()
        assert tensor.grad is not None
        return gathered.tolist(), tensor.grad.tolist()

    stacked = [[1.0, 1.0], [2.0, 2.0]]
    assert run_threads(rank_main, 2) == [(stacked, [3.0, 3.0]), (stacked, [30.0, 30.0])]


def test_all_gather_without_gradients_is_detached() -> None:
    def rank_main(rank, world_size, process_group):
        tensor = torch.ones(2, requires_grad=True)
        return comm.all_gather(Group(process_group), tensor).requires_grad

    assert run_threads(rank_main, 2) == [False, False]


def test_barrier_waits_for_the_last_rank() -> None:
    arrived = threading.Event()
    order: list[str] = []

    def rank_main(rank, world_size, process_group):
        group = Group(process_group)
        if rank == 1:
            assert arrived.wait(10)
            order.append("last rank arrives")
        else:
            arrived.set()
        comm.barrier(group, CPU)
        order.append("passed")

    run_threads(rank_main, 2)
    assert order == ["last rank arrives", "passed", "passed"]


def test_an_interrupt_ends_a_pending_wait_within_a_fifth_of_a_second() -> None:
    seen = threading.Event()
    times: dict[str, float] = {}

    def rank_main(rank, world_size, process_group):
        interrupt = Interrupt()
        group = Group(process_group, interrupt)
        tensor = torch.ones(3)
        if rank == 1:
            assert seen.wait(20)
            group.wait(group.all_reduce(tensor), CPU)
            return None

        def fail() -> None:
            times["set"] = time.monotonic()
            assert interrupt.set(RuntimeError("rank 7 failed"))
            assert not interrupt.set(RuntimeError("a later failure"))

        work = group.all_reduce(tensor)
        threading.Timer(0.3, fail).start()
        with pytest.raises(RuntimeError, match="rank 7 failed"):
            group.wait(work, CPU)
        times["raised"] = time.monotonic()
        seen.set()
        Group(process_group).wait(work, CPU)
        return tensor.tolist()

    assert run_threads(rank_main, 2)[0] == [2.0, 2.0, 2.0]
    assert times["raised"] - times["set"] < 0.2


def test_a_wait_calls_back_in_every_slice() -> None:
    enough = threading.Event()

    def rank_main(rank, world_size, process_group):
        group = Group(process_group)
        tensor = torch.ones(1)
        if rank == 1:
            assert enough.wait(20)
            group.wait(group.all_reduce(tensor), CPU)
            return []
        waited: list[float] = []

        def on_slice(seconds: float) -> None:
            waited.append(seconds)
            if len(waited) == 4:
                enough.set()

        group.wait(group.all_reduce(tensor), CPU, on_slice)
        return waited

    waited = run_threads(rank_main, 2)[0]
    assert len(waited) >= 4
    assert waited == sorted(waited)
    assert waited[0] >= 0.05


def test_future_waits_return_values_and_raise_errors() -> None:
    def rank_main(rank, world_size, process_group):
        group = Group(process_group)
        later: torch.futures.Future = torch.futures.Future()
        threading.Timer(0.1, lambda: later.set_result(torch.ones(2))).start()
        assert group.wait_future(later).tolist() == [1.0, 1.0]
        failing: torch.futures.Future = torch.futures.Future()
        threading.Timer(0.1, lambda: failing.set_exception(ValueError("bad future"))).start()
        with pytest.raises(ValueError, match="bad future"):
            group.wait_future(failing)

    run_threads(rank_main, 1)


def test_broadcast_coalesced_in_chunks_of_mixed_kinds() -> None:
    def rank_main(rank, world_size, process_group):
        torch.manual_seed(rank)
        tensors = [
            torch.randn(100),
            torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
            torch.randn(2, 2, dtype=torch.float64),
            torch.randint(0, 9, (5,)),
            torch.empty(0),
            torch.randn(7, 3).t(),
            torch.randn(1000),
        ]
        broadcast_coalesced(Group(process_group), tensors, src=1, chunk_bytes=1600)
        return [t.clone() for t in tensors]

    results = run_threads(rank_main, 3)
    for other in (results[0], results[2]):
        assert all(torch.equal(a, b) for a, b in zip(results[1], other, strict=True))
    assert not torch.equal(results[1][0], torch.randn(100, generator=torch.Generator().manual_seed(0)))


def test_buffer_sync_finds_reassigned_buffers_and_keeps_versions() -> None:
    def rank_main(rank, world_size, process_group):
        module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(2))
        module[0].running_mean.fill_(rank + 1)
        module[1].num_batches_tracked.fill_(rank + 5)
        sync = Buffers(Group(process_group), module).copy
        version = module[0].running_mean._version
        sync()
        assert module[0].running_mean._version == version
        first = (module[0].running_mean.tolist(), int(module[1].num_batches_tracked))
        module[0].running_mean = torch.full((3,), rank + 7.0)
        sync()
        return first, module[0].running_mean.tolist()

    assert run_threads(rank_main, 2) == [(([1.0] * 3, 5), [7.0] * 3)] * 2

"""Values of the collectives against closed forms, on gloo and on somebody's backend, and waits."""

from __future__ import annotations

import threading
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks, run_threads
from harness.toy_backend import ToyGroup

from lightning_ddp import comm
from lightning_ddp.comm import collectives
from lightning_ddp.comm.collectives import broadcast_coalesced
from lightning_ddp.comm.group import Group
from lightning_ddp.ddp.buffers import Buffers
from lightning_ddp.encoding.side_stream import Channel
from lightning_ddp.errors import ConfigurationError

CPU = torch.device("cpu")
DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
KINDS = ["gloo", "toy"]


def group_of(kind: str, process_group) -> Group:
    """The group as it is, or one of the toy backend beside it."""
    if kind == "gloo":
        return Group(process_group)
    store = dist.PrefixStore("toy", process_group.get_group_store())
    toy = ToyGroup(store, process_group.rank(), process_group.size())
    return Group(toy, store=dist.PrefixStore("beside", store))


def on_threads(check, size: int, kind: str) -> list:
    def rank_main(rank, world_size, process_group):
        return check(rank, world_size, group_of(kind, process_group))

    return run_threads(rank_main, size)


def tensor_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(6).view(2, 3) + 10 * rank
    if dtype == torch.bool:
        return values % 3 == rank % 3
    return values.to(dtype) * (1 + 2j) if dtype.is_complex else values.to(dtype)


def moving(rank, size, group):
    for dtype in DTYPES:
        mine = tensor_of(rank, dtype)
        everyone = torch.stack([tensor_of(r, dtype) for r in range(size)])
        for src in range(size):
            strided = torch.empty(3, 2, dtype=dtype).t()
            strided.copy_(mine)
            assert comm.broadcast(group, strided, src) is strided
            assert torch.equal(strided, everyone[src]), (dtype, "broadcast")
        assert torch.equal(comm.all_gather(group, mine), everyone), (dtype, "all_gather")


def reducing(rank, size, group):
    for dtype in (d for d in DTYPES if d != torch.bool):
        mine = tensor_of(rank, dtype)
        stack = torch.stack([tensor_of(r, dtype) for r in range(size)])
        expected = {"sum": stack.sum(0).to(dtype), None: stack.sum(0).to(dtype)}
        if not dtype.is_complex:
            expected |= {"max": stack.amax(0), dist.ReduceOp.MIN: stack.amin(0)}
        if not dtype.is_complex and not dtype.is_floating_point:
            expected["product"] = stack.prod(0).to(dtype)
        elif dtype in (torch.float32, torch.float64, torch.complex64):
            expected |= {"mean": stack.sum(0) / size, "AVG": stack.sum(0) / size}
        for op, result in expected.items():
            total = torch.empty(3, 2, dtype=dtype).t()
            assert comm.all_reduce(group, total.copy_(mine), op) is total
            assert torch.equal(total, result), (dtype, op, "all_reduce")
            for dst in range(size if group.backend(CPU) == "gloo" else 0):
                reduced = comm.reduce(group, mine.clone(), dst, op)
                assert torch.equal(reduced, result if rank == dst else mine), (dtype, op, "reduce")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("check", [moving, reducing])
def test_tensors_of_every_dtype_are_moved_and_reduced(check, size, kind) -> None:
    on_threads(check, size, kind)


def test_a_pending_conjugation_or_sign_is_sent_as_well() -> None:
    def tensors_of(rank):
        values = (torch.arange(200) * (1 + 2j) + 3j * rank).conj()
        return [values, values.imag]

    def check(rank, size, group):
        for index, (first, second) in enumerate(zip(tensors_of(0), tensors_of(1), strict=True)):
            assert torch.equal(comm.all_gather(group, tensors_of(rank)[index])[1], second)
            assert torch.equal(comm.broadcast(group, tensors_of(rank)[index], 1), second)
            assert torch.equal(comm.broadcast_nested(group, tensors_of(rank), 1, CPU)[index], second)
            assert torch.equal(comm.all_reduce(group, tensors_of(rank)[index]), first + second)

    on_threads(check, 2, "gloo")


def truth(rank, size, group):
    flags = torch.tensor([True, rank == 0, False])
    seen = [comm.all_reduce(group, flags.clone(), op).tolist() for op in ("sum", "max", "product", "min")]
    strided = torch.zeros(3, 2, dtype=torch.bool)
    strided[:, 0] = flags
    comm.all_reduce(group, strided[:, 0], "sum")
    seen.append(strided.tolist())
    with pytest.raises(ConfigurationError, match="reduce_op 'mean' of bool: expected sum or max"):
        comm.all_reduce(group, flags, "mean")
    with pytest.raises(
        ConfigurationError, match="reduce_op 'max' of complex numbers: expected 'sum' or 'mean'"
    ):
        comm.reduce(group, torch.ones(1, dtype=torch.complex64), 0, "max")
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_truth_values_are_reduced_as_or_and_and(kind) -> None:
    any_rank, every_rank = [True, True, False], [True, False, False]
    columns = [[True, False], [True, False], [False, False]]
    assert on_threads(truth, 3, kind) == [[any_rank, any_rank, every_rank, every_rank, columns]] * 3


def test_mean_of_integers_is_written_back_as_integers_as_lightning_does() -> None:
    def check(rank, size, group):
        bytes_of_rank = torch.tensor([200 - 100 * rank, 3], dtype=torch.uint8)
        tensors = torch.tensor([1, 4]) + rank, bytes_of_rank
        return [comm.all_reduce(group, tensor, "mean").tolist() for tensor in tensors]

    assert on_threads(check, 2, "gloo") == [[[1, 4], [150, 3]]] * 2  # 1.5 and 4.5, truncated


class CountingGroup(Group):
    """Notes the bytes of each collective that it starts."""

    def __init__(self, process_group) -> None:
        super().__init__(process_group)
        self.sizes: list[int] = []

    def start(self, kind, tensors, begin, *, label=None):
        self.sizes.append(sum(tensor.nbytes for tensor in tensors))
        return super().start(kind, tensors, begin, label=label)


@on_ranks(2)
def test_coalesced_reduction_spends_one_collective_a_dtype(rank, process_group) -> None:
    group = CountingGroup(process_group)
    tensors = [torch.full((2,), rank + 1.0), torch.full((3, 1), rank * 10.0), torch.tensor(rank)]
    comm.all_reduce_coalesced(group, tensors, "sum")
    assert (group.sizes, [t.flatten().tolist() for t in tensors]) == ([20, 8], [[3.0, 3.0], [10.0] * 3, [1]])


@pytest.mark.parametrize("src", [0, 2])
def test_objects_of_any_size_are_broadcast_from_any_rank(src) -> None:
    def check(rank, size, group):
        for length in (10, *range(3990, 4089), 100_000):  # from one packet to two
            sent = {"rank": rank, "data": bytes([rank]) * length}
            assert comm.broadcast_nested(group, sent, src, CPU) == {
                "rank": src,
                "data": bytes([src]) * length,
            }

    on_threads(check, 3, "gloo")


@pytest.mark.parametrize(("size", "num_collectives"), [(900, 1), (1100, 2)])
@on_ranks(2)
def test_objects_of_different_sizes_are_gathered_and_small_ones_in_one_collective(
    rank, process_group, size, num_collectives
) -> None:
    group = CountingGroup(process_group)
    assert comm.all_gather_objects(group, "x" * size * rank, CPU) == ["", "x" * size]
    assert len(group.sizes) == num_collectives


@on_ranks(2)
def test_all_gather_sends_gradients_back_to_their_rank_if_asked_to(rank, process_group) -> None:
    group, tensor = Group(process_group), torch.full((2,), rank + 1.0, requires_grad=True)
    assert not comm.all_gather(group, tensor).requires_grad
    gathered = comm.all_gather(group, tensor, sync_grads=True)
    weights = torch.tensor([[1.0], [10.0]]) * (rank + 1)
    (gathered * weights).sum().backward()
    assert tensor.grad is not None
    stacked = [[1.0, 1.0], [2.0, 2.0]]
    assert (gathered.tolist(), tensor.grad.tolist()) == [(stacked, [3.0, 3.0]), (stacked, [30.0, 30.0])][rank]


# ---------------------------------------------------------------------- containers of tensors

Pair = namedtuple("Pair", "left right")


class Holder:
    """An object of the user's own with a tensor somewhere in it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.content = {"deep": [tensor]}


def nested(rank, size, group):
    shared = torch.arange(1000.0)
    value = {
        "pair": Pair(shared, [shared, torch.tensor(3)]),
        "large": torch.arange(5000, dtype=torch.int16).view(50, 100).t(),
        "flags": torch.arange(3000) % 2 == 0,
        "complex": torch.ones(400, dtype=torch.complex64) * 2j,
        "grad": torch.ones(500, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(700)),
        "holder": Holder(torch.full((600,), 7.0)),
        "empty": torch.empty(0, 4),
        "rest": ("text", None, 2.5),
    }
    received = comm.broadcast_nested(group, value if rank == 1 else None, 1, CPU, chunk_bytes=3000)
    if rank == 1:
        assert received is value
    assert type(received["pair"]) is Pair
    assert received["pair"].left is received["pair"].right[0], "the same tensor in two places"
    for name in ("large", "flags", "complex", "grad", "empty"):
        assert torch.equal(received[name], value[name]), name
        assert received[name].dtype == value[name].dtype
    assert torch.equal(received["pair"].left, shared)
    assert received["pair"].right[1].item() == 3
    assert received["grad"].requires_grad
    assert not received["large"].requires_grad
    assert isinstance(received["parameter"], torch.nn.Parameter)
    assert received["holder"].content["deep"][0].tolist() == [7.0] * 600
    assert received["rest"] == ("text", None, 2.5)
    return comm.broadcast_nested(group, {"only": rank}, 0, CPU)


@pytest.mark.parametrize("kind", KINDS)
def test_containers_of_tensors_keep_their_structure(kind) -> None:
    assert on_threads(nested, 3, kind) == [{"only": 0}] * 3


@on_ranks(2)
def test_nested_tensors_travel_in_chunks_and_not_in_the_pickle(process_group) -> None:
    group = CountingGroup(process_group)
    value = [torch.zeros(1000) for _ in range(5)] + [torch.zeros(1000, dtype=torch.int64)]
    comm.broadcast_nested(group, value, 0, CPU, chunk_bytes=8000)
    assert group.sizes == [4096, 8000, 8000, 4000, 8000]


def test_broadcast_coalesced_in_chunks_of_mixed_kinds(monkeypatch) -> None:
    monkeypatch.setattr(collectives, "CHUNK_BYTES", 1600)

    def rank_main(rank, world_size, process_group):
        torch.manual_seed(rank)
        tensors = [
            torch.randn(100),
            torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
            torch.randn(2, 2, dtype=torch.float64),
            torch.randint(0, 9, (5,)),
            torch.randint(0, 9, (5,), dtype=torch.int16),
            torch.randint(0, 9, (2**19,), dtype=torch.int16),
            torch.empty(0),
            torch.randn(7, 3).t(),
            torch.randn(1000),
        ]
        broadcast_coalesced(Group(process_group), tensors, src=1)
        return [t.clone() for t in tensors]

    results = run_threads(rank_main, 3)
    for other in (results[0], results[2]):
        assert all(torch.equal(a, b) for a, b in zip(results[1], other, strict=True))
    assert not torch.equal(results[1][0], torch.randn(100, generator=torch.Generator().manual_seed(0)))


@on_ranks(2)
def test_buffer_sync_finds_reassigned_buffers_and_keeps_versions(rank, process_group) -> None:
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
    assert (first, module[0].running_mean.tolist()) == (([1.0] * 3, 5), [7.0] * 3)


# ---------------------------------------------------------------------- waits


@on_ranks(2)
def test_a_channel_whose_job_has_failed_runs_no_later_one(process_group) -> None:
    channel = Channel(Group(process_group), CPU)
    run: list[int] = []

    def fail() -> None:
        raise ValueError("of the job")

    for future in (channel.submit(fail), channel.submit(lambda: run.append(1))):
        with pytest.raises(RuntimeError, match="ValueError: of the job"):
            channel.wait(future)
    assert run == []


@on_ranks(1)
def test_a_wait_for_a_future_ends_with_its_value_or_its_error(process_group) -> None:
    group = Group(process_group)
    results: list[Any] = [torch.ones(2), ValueError("bad future")]
    for result in results:
        future: torch.futures.Future = torch.futures.Future()
        is_error = isinstance(result, Exception)
        threading.Timer(0.1, future.set_exception if is_error else future.set_result, [result]).start()
        group.wait_done(future)
        assert future.done()

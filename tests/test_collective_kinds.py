"""Every collective's values against closed forms, on gloo and on a backend that lacks most of them."""

from __future__ import annotations

from collections import namedtuple
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import run_threads
from harness.toy_backend import ToyGroup

from lightning_ddp import comm
from lightning_ddp.comm.group import Group
from lightning_ddp.errors import ConfigurationError, RankMismatchError

CPU = torch.device("cpu")
MOVED = [
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
    for dtype in MOVED:
        mine = tensor_of(rank, dtype)
        everyone = torch.stack([tensor_of(r, dtype) for r in range(size)])
        for src in range(size):
            received = comm.broadcast(group, mine.clone(), src)
            assert torch.equal(received, everyone[src]), (dtype, "broadcast")
            gathered = comm.gather(group, mine, src)
            assert (gathered is None) == (rank != src)
            assert gathered is None or torch.equal(gathered, everyone), (dtype, "gather")
            part = torch.empty_like(mine)
            parts = [tensor_of(r + 1, dtype) for r in range(size)] if rank == src else None
            assert comm.scatter(group, part, parts, src) is part
            assert torch.equal(part, tensor_of(rank + 1, dtype)), (dtype, "scatter")
        assert torch.equal(comm.all_gather(group, mine), everyone), (dtype, "all_gather")
        sent = torch.stack([tensor_of(rank + 3 * r, dtype) for r in range(size)]).flatten(0, 1)
        expected = torch.stack([tensor_of(r + 3 * rank, dtype) for r in range(size)]).flatten(0, 1)
        assert torch.equal(comm.all_to_all(group, sent), expected), (dtype, "all_to_all")
        dst, src = (rank + 1) % size, (rank - 1) % size
        handle = comm.send.start(group, mine, dst, tag=3)
        arrived = comm.recv(group, torch.empty(3, 2, dtype=dtype).t(), src, tag=3)
        handle.wait()
        assert torch.equal(arrived, everyone[src]), (dtype, "send and recv")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_tensors_of_every_kind_arrive_where_they_were_sent(size, kind) -> None:
    on_threads(moving, size, kind)


def reducing(rank, size, group):
    for dtype in (d for d in MOVED if d != torch.bool):
        mine = tensor_of(rank, dtype)
        stack = torch.stack([tensor_of(r, dtype) for r in range(size)])
        is_real = not dtype.is_complex
        expected = {"sum": stack.sum(0).to(dtype)}
        if is_real:
            expected |= {"max": stack.amax(0), "min": stack.amin(0)}
        if is_real and not dtype.is_floating_point:
            expected["product"] = stack.prod(0).to(dtype)
        elif dtype in (torch.float32, torch.float64, torch.complex64):
            expected["mean"] = stack.sum(0) / size
        for op, result in expected.items():
            total = mine.clone()
            assert comm.all_reduce(group, total, op) is total
            assert torch.equal(total, result), (dtype, op, "all_reduce")
            for dst in range(size):
                reduced = comm.reduce(group, mine.clone(), dst, op)
                assert torch.equal(reduced, result if rank == dst else mine), (dtype, op, "reduce")
            parts = comm.reduce_scatter(group, [mine + r for r in range(size)], op)
            others = torch.stack([tensor_of(r, dtype) + rank for r in range(size)])
            if op == "sum":
                assert torch.equal(parts, others.sum(0).to(dtype)), (dtype, "reduce_scatter")
                rows = comm.reduce_scatter(group, torch.cat([mine + r for r in range(size)]), op)
                assert torch.equal(rows, parts)
            elif op == "max":
                assert torch.equal(parts, others.amax(0)), (dtype, "reduce_scatter")
            elif op == "mean":
                assert torch.equal(parts, others.sum(0) / size), (dtype, "reduce_scatter")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_reductions_of_every_kind(size, kind) -> None:
    on_threads(reducing, size, kind)


def truth(rank, size, group):
    flags = torch.tensor([True, rank == 0, False])
    seen = [comm.all_reduce(group, flags.clone(), op).tolist() for op in ("sum", "max", "product", "min")]
    seen.append(comm.reduce_scatter(group, [flags[1:2]] * size, "sum").tolist())
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
    expected = [any_rank, any_rank, every_rank, every_rank, [True], columns]
    assert on_threads(truth, 3, kind) == [expected] * 3


def uneven(rank, size, group):
    shapes = [(), (0, 3), (2, 2), (5,)]
    mine = torch.full(shapes[rank], rank + 0.5)
    gathered = comm.all_gather_uneven(group, mine)
    assert [tuple(t.shape) for t in gathered] == shapes[:size]
    assert all(bool((t == r + 0.5).all()) for r, t in enumerate(gathered))
    assert [t.tolist() for t in comm.all_gather_uneven(group, torch.empty(0, rank))] == [[]] * size
    with pytest.raises(
        RankMismatchError, match=r"different dtypes: rank 0 torch\.float32, rank 1 torch\.int64"
    ):
        comm.all_gather_uneven(group, torch.ones(1) if rank == 0 else torch.ones(1, dtype=torch.int64))
    # rank r has r rows for rank 0 and one row for each other, bool to be sent as bytes
    splits = [rank, *[1] * (size - 1)]
    for dtype in (torch.float32, torch.bool):
        rows = torch.full((sum(splits), 2), rank).to(dtype)
        sources = [s for r in range(size) for s in [r] * (r if rank == 0 else 1)]
        expected = torch.tensor(sources).unsqueeze(1).expand(-1, 2).to(dtype)
        assert torch.equal(comm.all_to_all(group, rows, splits), expected)
        outputs = list(range(size)) if rank == 0 else [1] * size
        handle = comm.all_to_all.start(group, rows, splits, outputs)
        assert torch.equal(handle.wait(), expected)
    assert comm.all_to_all(group, torch.empty(size, 0)).shape == (size, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_different_shapes_and_splits(size, kind) -> None:
    on_threads(uneven, size, kind)


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


def test_nested_tensors_travel_in_chunks_and_not_in_the_pickle() -> None:
    class CountingGroup(Group):
        sizes: list[int]

        def broadcast(self, tensor, src=0, timeout=None, *, label=None):
            self.sizes.append(tensor.nbytes)
            return super().broadcast(tensor, src, timeout, label=label)

    def rank_main(rank, world_size, process_group):
        group = CountingGroup(process_group)
        group.sizes = []
        value = [torch.zeros(1000) for _ in range(5)] + [torch.zeros(1000, dtype=torch.int64)]
        comm.broadcast_nested(group, value, 0, CPU, chunk_bytes=8000)
        return group.sizes

    assert run_threads(rank_main, 2) == [[4096, 8000, 8000, 4000, 8000]] * 2


def objects(rank, size, group):
    if rank == 0:
        comm.send_object(group, {"from": 0}, 1, CPU)
        comm.send_object(group, "x" * 10_000, 1, CPU, tag=5)
        return None
    return comm.recv_object(group, 0, CPU), len(comm.recv_object(group, 0, CPU, tag=5))


@pytest.mark.parametrize("kind", KINDS)
def test_objects_are_sent_to_one_rank(kind) -> None:
    assert on_threads(objects, 2, kind) == [None, ({"from": 0}, 10_000)]


def asynchronous(rank, size, group):
    tensor = torch.full((3,), rank + 1.0)
    handles = [
        comm.all_reduce.start(group, tensor.clone(), "mean", label="first"),
        comm.reduce.start(group, tensor.clone(), 0),
        comm.broadcast.start(group, tensor.clone(), 1),
        comm.all_gather.start(group, tensor[:1]),
        comm.gather.start(group, tensor[:1], 0),
        comm.scatter.start(group, torch.zeros(3), [tensor, tensor * 2] if rank == 0 else None, 0),
        comm.reduce_scatter.start(group, tensor[:2]),
        comm.all_to_all.start(group, tensor[:2]),
        comm.all_gather_uneven.start(group, tensor[: rank + 1]),
        comm.barrier.start(group, CPU),
        comm.monitored_barrier.start(group, timeout=timedelta(seconds=20)),
    ]
    assert handles[0].label == "first"
    results = {}
    for number in (5, 0, 10, 3, 1, 2, 4, 9, 8, 7, 6):  # in any order
        results[number] = handles[number].wait(timedelta(seconds=20))
        assert handles[number].wait() is results[number], "the second time the same"
    return [_plain(results[number]) for number in range(len(handles))]


def _plain(value):
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("kind", KINDS)
def test_everything_can_be_started_and_waited_for_later(kind) -> None:
    first, second = on_threads(asynchronous, 2, kind)
    both = [[1.0], [2.0, 2.0]]
    assert first == [
        [1.5] * 3,
        [3.0] * 3,
        [2.0] * 3,
        [[1.0], [2.0]],
        [[1.0], [2.0]],
        [1.0] * 3,
        [3.0],
        [1.0, 2.0],
        both,
        None,
        None,
    ]
    assert second == [
        [1.5] * 3,
        [2.0] * 3,
        [2.0] * 3,
        [[1.0], [2.0]],
        None,
        [2.0] * 3,
        [3.0],
        [1.0, 2.0],
        both,
        None,
        None,
    ]


def test_the_toy_backend_has_to_fall_back_and_gloo_has_not() -> None:
    lacking = {"reduce", "gather", "scatter", "_reduce_scatter_base", "alltoall_base", "send", "recv"}

    def check(rank, size, group):
        moving(rank, size, group)
        comm.reduce(group, torch.ones(1))
        comm.reduce_scatter(group, torch.ones(size))
        return {method for method, _ in group.lacking}

    assert on_threads(check, 2, "gloo") == [set()] * 2
    assert on_threads(check, 2, "toy") == [lacking] * 2

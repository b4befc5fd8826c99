"""The bucket plan: pure, deterministic, within its caps; small first buckets between hosts."""

from __future__ import annotations

import doctest

import pytest
import torch
from harness import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_ddp.comm.group import Group
from lightning_ddp.ddp import bucket as buckets
from lightning_ddp.ddp.bucket import (
    Bucket,
    BucketLayout,
    ParameterSpec,
    ReducerOptions,
    bucket_caps_bytes,
    plan_buckets,
)
from lightning_ddp.ddp.reducer import Reducer
from lightning_ddp.shm.hosts import Hosts
from lightning_ddp.supervise import failure_record

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
DEVICES = [torch.device("cpu"), torch.device("meta")]


@st.composite
def parameter_specs(draw: st.DrawFn) -> list[ParameterSpec]:
    sizes = draw(st.lists(st.integers(min_value=0, max_value=300), min_size=1, max_size=40))
    return [
        ParameterSpec(
            numel=size,
            dtype=draw(st.sampled_from(DTYPES)),
            device=draw(st.sampled_from(DEVICES)),
            is_sparse=draw(st.integers(0, 9)) == 0,
        )
        for size in sizes
    ]


@given(
    specs=parameter_specs(),
    seed=st.randoms(),
    caps=st.lists(st.integers(1, 2000), min_size=1, max_size=4),
)
@settings(deadline=None)
def test_plan_holds_every_parameter_once_within_caps(specs, seed, caps) -> None:
    order = list(range(len(specs)))
    seed.shuffle(order)
    plan = plan_buckets(specs, order, caps_bytes=caps)
    assert sorted(i for bucket in plan for i in bucket.indices) == list(range(len(specs)))
    assert plan == plan_buckets(specs, list(order), caps_bytes=caps)
    num_seen: dict[tuple[torch.dtype, torch.device], int] = {}
    for bucket in plan:
        members = [specs[i] for i in bucket.indices]
        kind = (bucket.dtype, bucket.device)
        assert {(m.dtype, m.device) for m in members} == {kind}
        assert bucket.numel == sum(m.numel for m in members)
        assert {m.is_sparse for m in members} == {bucket.is_sparse}
        if bucket.is_sparse:
            assert len(members) == 1
            continue
        limit = (caps + [caps[-1]] * len(plan))[num_seen.get(kind, 0)]
        num_seen[kind] = num_seen.get(kind, 0) + 1
        assert len(members) == 1 or sum(m.nbytes for m in members) <= limit
    positions = {index: position for position, index in enumerate(order)}
    last = [max(positions[i] for i in bucket.indices) for bucket in plan]
    assert last == sorted(last), "buckets come in the order in which they are full"
    for bucket in plan:
        places = [positions[i] for i in bucket.indices]
        assert places == sorted(places)


def test_views_keep_strides_and_cover_the_flat_buffer() -> None:
    dense = torch.nn.Parameter(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last))
    expanded = torch.nn.Parameter(torch.empty(6)[::2])
    specs = [ParameterSpec.of(dense), ParameterSpec.of(expanded)]
    (plan,) = plan_buckets(specs, [0, 1], caps_bytes=[10**6])
    made = Bucket(0, plan, torch.zeros(plan.numel), [dense, expanded], ["a", "b"], is_last=True)
    a, b = made.gradients()
    assert a.stride() == dense.stride()
    assert b.shape == expanded.shape
    a.fill_(1)
    b.fill_(2)
    assert made.buffer().tolist() == [1.0] * 120 + [2.0] * 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_buckets_start_at_multiples_of_512_bytes_of_one_memory_in_every_plan(dtype) -> None:
    params = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (7, 1, 129, 0, 4096, 3, 255)]
    made = BucketLayout(params, [str(i) for i in range(7)], ReducerOptions(caps_bytes=[10**6]))
    specs = [ParameterSpec.of(p) for p in params]
    (memory,) = {bucket.flat.untyped_storage().data_ptr() for bucket in made.buckets}
    for caps in ([10**6], [1], [1, 600, 2]):
        made.apply(plan_buckets(specs, [3, 0, 6, 1, 5, 4, 2], caps_bytes=caps))
        for index, bucket in enumerate(made.buckets):
            assert bucket.flat.storage_offset() * dtype.itemsize % 512 == 0
            assert bucket.flat.untyped_storage().data_ptr() == memory
            bucket.flat.fill_(index)
        for index, bucket in enumerate(made.buckets):
            assert bucket.flat.eq(index).all(), "they must not overlap"


def test_doctests() -> None:
    for module in (failure_record, buckets):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0


# ---------------------------------------------------------------- the first buckets between hosts

KIB = 1024
APART, TOGETHER = ((0,), (1,)), ((0, 1),)


DEFAULT = ReducerOptions(caps_bytes=bucket_caps_bytes(None), are_caps_default=True)


@pytest.mark.parametrize(
    ("by_host", "options", "expected"),
    [
        (APART, DEFAULT, [128, 256, 512, 1664]),
        (TOGETHER, DEFAULT, [1024, 1536]),
        (APART, ReducerOptions(caps_bytes=bucket_caps_bytes(25)), [1024, 1536]),
        (APART, ReducerOptions(caps_bytes=bucket_caps_bytes(None, [2])), [2048, 512]),
    ],
    ids=["several hosts", "one host", "a cap by the user", "caps by the user"],
)
@on_ranks(2)
def test_buckets_between_hosts_start_small_by_default(rank, group, by_host, options, expected) -> None:
    """Sizes in KiB of the buckets of 40 parameters of 64 KiB, after they were planned by a first backward."""
    hosts = Hosts(rank=rank, by_host=by_host, pids=(1, 2), processors=(frozenset({0}),) * 2)
    parameters = [nn.Parameter(torch.ones(16 * KIB)) for _ in range(40)]
    reducer = Reducer(
        parameters,
        [str(i) for i in range(40)],
        Group(group),
        device=torch.device("cpu"),
        token="first buckets",
        options=options,
        hosts=hosts if by_host == APART else None,
    )
    for step in range(2):
        losses = [number * p.mean() for number, p in reversed([*enumerate(parameters)])]
        loss = torch.stack(losses).sum()
        reducer.rebuild()
        kept = [p.grad.sum().item() for p in parameters if p.grad is not None]
        assert kept == [*range(40)] * step, "it moves the gradients that there are"
        reducer.arm(loss)
        loss.backward()
    assert [bucket.flat.nbytes // KIB for bucket in reducer.buckets] == expected


@pytest.mark.parametrize(
    ("processors", "is_spare"),
    [
        ([{0, 1}, {0, 1}], False),
        ([{0, 1, 2, 3}, {0, 1, 2, 3}], True),
        ([{0}, {1}], False),
        ([{0, 1}, {2, 3}], True),
        ([{0, 1}, {2}], False),
    ],
)
def test_a_host_has_spare_processors_from_two_a_rank_on(processors, is_spare) -> None:
    hosts = Hosts(
        rank=0,
        by_host=((0, 1), (2,)),
        pids=(1, 2, 3),
        processors=(*map(frozenset, processors), frozenset(range(99))),
    )
    assert hosts.has_spare_processor is is_spare

"""Between hosts the first buckets are small, so that the network has work early."""

from __future__ import annotations

import pytest
import torch
from harness import on_ranks
from torch import nn

from lightning_ddp.comm.group import Group
from lightning_ddp.ddp.layout import ReducerOptions, bucket_caps_bytes
from lightning_ddp.ddp.reducer import Reducer
from lightning_ddp.shm.hosts import Hosts

KIB = 1024
MIB = 1024 * KIB
CPU = torch.device("cpu")
APART, TOGETHER = ((0,), (1,)), ((0, 1),)


def sizes_kib(group, rank, by_host, options) -> list[int]:
    """Sizes of the buckets of 40 parameters of 64 KiB, after they were planned by a first backward."""
    hosts = Hosts(rank=rank, by_host=by_host, pids=(1, 2), processors=(frozenset({0}),) * 2)
    parameters = [nn.Parameter(torch.ones(16 * KIB)) for _ in range(40)]
    reducer = Reducer(
        parameters,
        [str(i) for i in range(40)],
        Group(group),
        device=CPU,
        token="first buckets",
        options=options,
        hosts=hosts if by_host == APART else None,
    )
    for _ in range(2):
        loss = torch.stack([p.sum() for p in parameters]).sum()
        reducer.rebuild()
        reducer.arm(loss)
        loss.backward()
    return [bucket.flat.nbytes // KIB for bucket in reducer.buckets]


def default_options(**changed) -> ReducerOptions:
    return ReducerOptions(caps_bytes=bucket_caps_bytes(None), are_caps_default=True, **changed)


@pytest.mark.parametrize(
    ("by_host", "options", "expected"),
    [
        (APART, default_options(), [128, 256, 512, 1664]),
        (TOGETHER, default_options(), [1024, 1536]),
        (APART, ReducerOptions(caps_bytes=bucket_caps_bytes(25)), [1024, 1536]),
        (APART, ReducerOptions(caps_bytes=bucket_caps_bytes(None, [2])), [2048, 512]),
    ],
    ids=["several hosts", "one host", "a cap by the user", "caps by the user"],
)
@on_ranks(2)
def test_buckets_between_hosts_start_small_by_default(rank, group, by_host, options, expected) -> None:
    assert sizes_kib(group, rank, by_host, options) == expected


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

"""Sums over memory that ranks share: exact, the same bits on all ranks, and gone when the ranks are.

Ranks are threads where only numbers matter; they share memory as processes do, if it is asked for.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Sequence
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import host_with, on_ranks, run_ranks, run_ranks_outcomes, run_threads
from models import filled
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_ddp import BucketedDDP
from lightning_ddp.averaging import build_averager
from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.comm.group import Group
from lightning_ddp.ddp.reduction import Reduction
from lightning_ddp.encoding.side_stream import Channel
from lightning_ddp.errors import ConfigurationError, PeerFailure
from lightning_ddp.hooks import build_hook
from lightning_ddp.shm.hosts import find_hosts
from lightning_ddp.shm.shared_memory import SharedMemory

CPU = torch.device("cpu")
SHARED, GLOO = "shared_memory", "gloo"
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SIZES = (1, 17, 70_001)
SOON_S = 10.0  # a hundredth of it is usual; more would be somebody's time limit

# ---------------------------------------------------------------- sums


def connected(
    group: Any,
    numels: Sequence[tuple[int, torch.dtype]],
    host: str | None = None,
    interrupt: Interrupt | None = None,
) -> tuple[SharedMemory, list[Tensor]]:
    shared = Group(group, interrupt, transport=SHARED)
    hosts = find_hosts(shared, CPU, host)
    assert hosts is not None
    memory = SharedMemory(shared, hosts)
    tensors = [memory.zeros(numel, dtype) for numel, dtype in numels]
    assert memory.connect()
    return memory, tensors


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * numel + rank)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-9 * (dtype != torch.uint8), 10, (numel,), generator=generator, dtype=dtype)
    return torch.randn(numel, generator=generator, dtype=dtype) * 10.0**rank


def in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum from rank 0 on; of 16-bit numbers of three ranks and more, rounded once."""
    dtype = parts[0].dtype
    is_wide = len(parts) > 2 and dtype in (torch.float16, torch.bfloat16)
    total = parts[0].float() if is_wide else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(dtype)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_sum_of_every_dtype_and_size_is_that_in_rank_order(world_size) -> None:
    kinds = [(numel, dtype) for dtype in FLOATS + INTEGERS for numel in SIZES]

    def rank_main(rank, _, group):
        memory, tensors = connected(group, kinds)
        for tensor, kind in zip(tensors, kinds, strict=True):
            tensor.copy_(values(rank, *kind))
            memory.all_reduce(tensor)
        return tensors

    for tensors in run_threads(rank_main, world_size):
        for tensor, kind in zip(tensors, kinds, strict=True):
            expected = in_rank_order([values(rank, *kind) for rank in range(world_size)])
            assert torch.equal(tensor, expected), kind


@pytest.mark.parametrize("hosts", ["aab", "aabb", "abab"])
def test_ranks_of_several_hosts_get_the_same_sum(hosts) -> None:
    kinds = [(numel, dtype) for dtype in (torch.float32, torch.complex64) for numel in SIZES]

    def whole(rank, numel, dtype):  # whole numbers, whose sum has one value in any order
        real = torch.view_as_real if dtype.is_complex else torch.as_tensor
        return real(values(rank, numel, dtype)).round()

    def rank_main(rank, _, group):
        memory, tensors = connected(group, kinds, host=hosts[rank])
        for tensor, kind in zip(tensors, kinds, strict=True):
            (torch.view_as_real(tensor) if kind[1].is_complex else tensor).copy_(whole(rank, *kind))
            memory.all_reduce(tensor)
        found = [tensor.clone() for tensor in tensors]
        tensors[0].fill_(rank)
        if rank == 0:
            memory.all_reduce(tensors[0], contributes=False)
        else:
            memory.all_reduce(tensors[0])
        return found, tensors[0].item()

    ranks = range(len(hosts))
    for rank, (found, last) in enumerate(run_threads(rank_main, len(hosts))):
        for tensor, kind in zip(found, kinds, strict=True):
            expected = sum(whole(rank, *kind) for rank in ranks)
            assert torch.equal(torch.view_as_real(tensor) if kind[1].is_complex else tensor, expected)
        assert last == (0 if rank == 0 else sum(ranks))


@on_ranks(3)
def test_parts_of_a_tensor_and_ranks_with_nothing_to_add(rank, group) -> None:
    memory, (tensor,) = connected(group, [(100, torch.float32)])
    tensor.fill_(rank + 1)
    memory.all_reduce(tensor[10:40])
    if rank == 1:
        memory.all_reduce(tensor[60:80], contributes=False)
    else:
        memory.all_reduce(tensor[60:80])
    assert [part.unique().tolist() for part in tensor.split((10, 30, 20, 20, 20))] == [
        [[1.0], [6.0], [1.0], [4.0], [1.0]],
        [[2.0], [6.0], [2.0], [2.0], [2.0]],
        [[3.0], [6.0], [3.0], [4.0], [3.0]],
    ][rank]


@on_ranks(2)
def test_a_tensor_that_lies_elsewhere_is_refused(group) -> None:
    memory, _ = connected(group, [(4, torch.float32)])
    with pytest.raises(ValueError, match="not in shared memory"):
        memory.all_reduce(torch.zeros(4))


@on_ranks(2)
def test_ranks_that_reduce_different_tensors_are_told_so(rank, group) -> None:
    memory, tensors = connected(group, [(4, torch.float32), (5, torch.float64)])
    with pytest.raises(RuntimeError, match=r"rank 0 has 4 elements of torch\.float32 and rank 1 has 5"):
        memory.all_reduce(tensors[rank])
    with pytest.raises(RuntimeError, match="the ranks reduce different tensors"):
        memory.all_reduce(tensors[0])  # the ranks no longer agree on anything


def test_what_the_interrupt_holds_ends_a_wait() -> None:
    stop = threading.Event()

    def rank_main(rank, _, group):
        interrupt = Interrupt()
        memory, (tensor,) = connected(group, [(4, torch.float32)], interrupt=interrupt)
        if rank == 1:
            assert stop.wait(SOON_S)
            return 0.0
        threading.Timer(0.2, interrupt.set, [PeerFailure(rank=1, message="it is ill")]).start()
        start = time.monotonic()
        with pytest.raises(PeerFailure, match="it is ill"):
            memory.all_reduce(tensor)
        stop.set()
        return time.monotonic() - start

    assert max(run_threads(rank_main, 2)) < SOON_S


def test_a_deadline_knows_who_has_not_come() -> None:
    end = threading.Barrier(4)

    def rank_main(rank, _, group):
        interrupt, absent = Interrupt(), ()
        memory, (tensor,) = connected(group, [(4, torch.float32)], interrupt=interrupt)
        if rank % 2 == 0:
            interrupt.supervisor = SimpleNamespace(
                explain=lambda _: TimeoutError(interrupt.activity.absent), deadline_s=0.5, is_comparing=False
            )
            with pytest.raises(TimeoutError) as raised:
                memory.all_reduce(tensor)
            absent = raised.value.args[0]
        end.wait(SOON_S)  # whose memory is gone has left
        return absent, interrupt.activity.absent

    assert run_threads(rank_main, 4) == [((1, 3), ()), ((), ()), ((1, 3), ()), ((), ())]


@on_ranks(2)
def test_a_reduction_that_is_closed_waits_no_longer_for_ranks_that_do_not_come(rank, group, event) -> None:
    memory, tensors = connected(group, [(4, torch.float32)])
    if rank == 1:
        assert event.wait(SOON_S)
        with pytest.raises(RuntimeError, match="connection closed by peer: rank 0"):
            memory.all_reduce(tensors[0])
        return
    reduction = Reduction(Group(group, transport=SHARED), memory)
    work = reduction._worker.submit(partial(memory.all_reduce, tensors[0]))
    reduction.close()
    with pytest.raises(RuntimeError, match="this rank has let go of its shared memory"):
        work.wait(timedelta(seconds=SOON_S))
    event.set()


@on_ranks(2)
def test_a_channel_s_jobs_share_memory_and_count_as_others_do(rank, group) -> None:
    answers = []
    for transport in (SHARED, GLOO):
        channel = Channel(Group(group, transport=transport), CPU)
        large = values(rank, 600_001, torch.float32)  # more than a piece
        lent = channel.empties(2, 1000, torch.float64)
        found = [channel.wait(channel.submit(partial(channel.all_reduce, large)))]
        for index, tensor in enumerate(lent):
            tensor.fill_(rank + index)
            found.append(channel.wait(channel.submit(partial(channel.all_reduce, tensor))).clone())
        answers.append((found, channel.num_bytes_sent))
    (shared, num_shared), (sent, num_sent) = answers
    assert all(map(torch.equal, shared, sent))
    assert num_shared == num_sent


# ---------------------------------------------------------------- hooks and averagers


def with_hook(rank, group, spec, process_group) -> list[Tensor]:
    module = nn.Linear(64, 48)
    model = BucketedDDP(module, process_group=process_group, transport=group.transport)
    model.register_comm_hook(None, build_hook(spec, group))
    for step in range(3):
        model.zero_grad()
        model(values(10 * step + rank, 128, torch.float32).view(2, 64)).sum().backward()
    return [p.grad for p in module.parameters()]


def with_averager(rank, group, spec, process_group) -> list[Tensor]:
    module = filled(nn.Linear(700, 900))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    averager = build_averager(spec | {"period": 2}, module, [optimizer], group)
    for step in range(4):
        for p in module.parameters():
            p.grad = values(10 * step + rank, p.numel(), torch.float32).view(p.shape)
        optimizer.step()
        averager.step(optimizer)
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize(
    ("train", "spec"),
    [
        *((with_hook, spec) for spec in ("allreduce", "bf16", "powersgd", {"name": "topk", "ratio": 0.3})),
        (with_averager, {"name": "post_local_sgd", "start_step": 0}),
        (with_averager, {"name": "diloco"}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@on_ranks(2)
def test_hooks_and_averagers_give_the_same_over_either_transport(rank, process_group, train, spec) -> None:
    groups = [Group(process_group, transport=transport) for transport in (SHARED, GLOO)]
    assert all(map(torch.equal, *(train(rank, group, spec, process_group) for group in groups)))


# ---------------------------------------------------------------- processes


class Heads(nn.Module):
    """Uses the heads that it is told to use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 40)
        self.heads = nn.ModuleList([nn.Linear(40, 3) for _ in range(2)])

    def forward(self, x: Tensor, use: Sequence[int]) -> Tensor:
        return sum(self.heads[i](self.body(x)).sum() for i in use)


def gradients(transport: str, rank: int, case: str, options: dict[str, Any]) -> list[Tensor]:
    """Gradients of a few steps, with everything that may happen between them."""
    torch.manual_seed(0)
    found: list[Tensor] = []
    model = BucketedDDP(Heads(), bucket_cap_mb=0.0005, transport=transport, **options)
    if case == "other ranks":
        model.update_process_group(dist.new_group([0, 1]))
    if case == "copied":
        model = deepcopy(model)
    if case == "own hook":
        output = model(values(rank, 16, torch.float32).view(2, 8), (0, 1))
        model.register_comm_hook(dist.group.WORLD, allreduce_hook)
        output.backward()
        found += [p.grad.clone() for p in model.parameters()]
    for step in range(4):
        x = values(10 * step + rank, 16, torch.float32).view(2, 8)
        use = (step % 2,) if options.get("find_unused_parameters") else (0, 1)
        model.zero_grad()
        model(x, use).backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if case == "uneven":
        with model.join():
            for step in range(1 + rank):
                model.zero_grad()
                model(values(step + rank, 16, torch.float32).view(2, 8), (0, 1)).backward()
        found += [p.grad.clone() for p in model.parameters()]
    return found


CASES = {
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "uneven": {},
    "other ranks": {},
    "copied": {},
    "own hook": {},
}


def differing_cases(rank: int, _: int) -> list[str]:
    wrong = []
    for case, options in CASES.items():
        theirs = gradients(GLOO, rank, case, options)
        for num_processors in (1, 99):
            with host_with(num_processors):
                ours = gradients(SHARED, rank, case, options)
            if not ours or not all(map(torch.equal, ours, theirs)):
                wrong.append(f"{case} with {num_processors} processors")
    return wrong


def test_every_way_to_train_gives_the_same_over_either_transport() -> None:
    assert run_ranks(differing_cases, 2) == [[], []]


@pytest.mark.parametrize(("num_processors", "has_thread"), [(3, False), (4, True)])
def test_a_thread_reduces_where_a_host_has_two_processors_a_rank(num_processors, has_thread) -> None:
    def rank_main(rank, _world_size, group):
        model = BucketedDDP(Heads(), bucket_cap_mb=0.0005, process_group=group, transport=SHARED)
        model(values(rank, 16, torch.float32).view(2, 8), (0, 1)).backward()
        return any(t.name == "lightning_ddp reduce" for t in {*threading.enumerate()} - before)

    before = {*threading.enumerate()}
    with host_with(num_processors):
        assert run_threads(rank_main, 2) == [has_thread] * 2


def num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:lightning_ddp")


def num_open() -> int:
    """Descriptors through which somebody could still open the memory."""
    number = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of this very listing
            number += "memfd:lightning_ddp" in os.readlink(entry)
    return number


def memory_before_during_and_after(rank: int, world_size: int) -> list[tuple[int, int]]:
    found = []
    for _ in range(2):
        found.append((num_mapped(), num_open()))
        model = BucketedDDP(nn.Linear(30, 20), transport=SHARED)
        model(torch.ones(1, 30)).sum().backward()
        found.append((num_mapped(), num_open()))
        dist.barrier()
        del model
        gc.collect()
    return [*found, (num_mapped(), num_open())]


def test_memory_goes_with_the_wrapper() -> None:
    # of each rank its buckets and what it says of itself
    assert run_ranks(memory_before_during_and_after, 2) == [[(0, 0), (4, 0)] * 2 + [(0, 0)]] * 2


def train_until_rank_1_is_killed(rank: int, _: int) -> tuple[float, str, int]:
    model = BucketedDDP(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), bucket_cap_mb=0.02)
    start = time.monotonic()
    for step in range(100):
        if step == 3 and rank == 1:  # the others wait for some of its buckets and have the means of some
            model.module[4].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        start = time.monotonic()
        try:
            model(torch.ones(2, 64)).sum().backward()
        except RuntimeError as error:
            return time.monotonic() - start, str(error), step
    raise AssertionError("nobody was killed")


def test_a_killed_rank_ends_the_others_soon() -> None:
    outcomes = run_ranks_outcomes(train_until_rank_1_is_killed, 3)
    assert outcomes[1].status == "died"
    for rank in (0, 2):
        seconds, message, step = outcomes[rank].value
        assert "connection closed by peer: rank 1" in message
        assert step == 3
        assert seconds < SOON_S


def gradient_with_too_little_memory(rank: int, _: int) -> tuple[list[float], list[str], str]:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("lightning_ddp").addHandler(handler)
    if rank == 1:  # as on a machine that has no more of it
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
    model = BucketedDDP(nn.Linear(400, 400))
    model(torch.full((1, 400), rank + 1.0)).sum().backward()
    with pytest.raises(
        ConfigurationError, match="transport='shared_memory' is not available: rank 1: no "
    ) as told:
        BucketedDDP(nn.Linear(400, 400), transport=SHARED)
    return model.module.weight.grad.unique().tolist(), logged, str(told.value)


def test_ranks_without_enough_memory_use_gloo_all_alike_and_say_so_once() -> None:
    (first, logged, told), (second, logged_by_second, _) = run_ranks(gradient_with_too_little_memory, 2)
    assert first == second == [1.5]
    assert len(logged) == 1
    assert "over gloo instead of shared memory: rank 1: no 642048 bytes" in logged[0]
    assert not logged_by_second
    assert "Use 'auto'" in told

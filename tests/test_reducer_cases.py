"""What the reducer promises beyond equal numbers: hooks, order, interruptible waits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import grads_of
from harness import on_ranks, run_ranks, run_threads
from models import MLP, batch, build, done
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy

from lightning_ddp import BucketedDDP
from lightning_ddp.comm.activity import Activity, Interrupt

ONE_BUCKET_EACH_MB = 1e-6  # one byte: every parameter has a bucket of its own


def backward_of_batch(model: nn.Module, name: str, rank: int, step: int) -> None:
    inputs, labels = batch(name, rank, step)
    cross_entropy(model(inputs), labels).backward()


def mean_over_ranks(tensors: dict[str, Tensor], world_size: int, group: Any) -> dict[str, Tensor]:
    """The reference: what each rank has on its own, gathered and averaged here."""
    means = {}
    for name, tensor in tensors.items():
        gathered = [[torch.empty_like(tensor) for _ in range(world_size)]]
        group.allgather(gathered, [tensor]).wait()
        means[name] = sum(gathered[0]) / world_size
    return means


# ---------------------------------------------------------------- communication hooks


@pytest.mark.parametrize(
    ("caps", "num_buckets"),
    [
        ({}, 1),
        ({"bucket_cap_mb": 0.01}, 2),
        ({"bucket_cap_mb": ONE_BUCKET_EACH_MB}, 6),
        ({"bucket_cap_mb_list": [ONE_BUCKET_EACH_MB, ONE_BUCKET_EACH_MB, 25], "bucket_cap_mb": 25}, 3),
    ],
    ids=["1", "2", "6", "list"],
)
@pytest.mark.parametrize("as_view", [True, False])
@on_ranks(2)
def test_the_hook_is_called_once_for_each_bucket_in_order(rank, group, caps, num_buckets, as_view):
    module = MLP()
    model = BucketedDDP(module, process_group=group, gradient_as_bucket_view=as_view, **caps)
    calls: list[tuple[int, bool]] = []
    called: list[nn.Parameter] = []
    state = object()

    def hook(given_state, bucket):
        assert given_state is state
        buffer, params, grads = bucket.buffer(), bucket.parameters(), bucket.gradients()
        assert buffer.dim() == 1
        assert buffer.numel() == sum(p.numel() for p in params)
        assert [g.shape for g in grads] == [p.shape for p in params]
        with torch.no_grad():
            buffer.fill_(step)  # the gradients are views of the buffer
        assert all(bool((g == step).all()) for g in grads)
        calls.append((bucket.index(), bucket.is_last()))
        called.extend(params)
        return done(buffer)

    model.register_comm_hook(state, hook)
    for step in range(1, 5):
        calls.clear()
        called.clear()
        backward_of_batch(model, "mlp", rank, step)
        assert all(bool((p.grad == step).all()) for p in module.parameters())
        assert calls == [(index, index == num_buckets - 1) for index in range(num_buckets)]
        assert sorted(map(id, called)) == sorted(map(id, module.parameters()))


def replaces_the_buffer(state, bucket):
    tripled = bucket.buffer() * 3
    bucket.set_buffer(tripled)
    assert bucket.buffer() is tripled
    assert torch.equal(bucket.gradients()[0].flatten(), tripled[: bucket.parameters()[0].numel()])
    return done(bucket.buffer())


def answers_from_another_thread() -> Callable[..., Any]:
    last = threading.Event()

    def hook(state, bucket):
        future: torch.futures.Future[Any] = torch.futures.Future()
        if bucket.is_last():
            last.set()
        result = bucket.buffer().clone().mul_(-1)

        def answer():
            # so that every bucket but the last is still pending when backward ends
            last.wait(timeout=10)
            future.set_result(result)

        threading.Thread(target=answer, daemon=True).start()
        return future

    return hook


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize(
    ("make_hook", "factor"),
    [
        (lambda: lambda state, bucket: done(bucket.buffer()), 1),
        (lambda: lambda state, bucket: done(torch.zeros_like(bucket.buffer())), 0),
        (lambda: replaces_the_buffer, 3),
        (answers_from_another_thread, -1),
    ],
    ids=["its input", "zeros", "another buffer", "from another thread"],
)
@on_ranks(2)
def test_gradients_are_what_the_hook_returns(rank, group, make_hook, factor, as_view):
    module = build("mlp", seed=3)
    options = {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": as_view}
    model = BucketedDDP(module, process_group=group, **options)
    model.register_comm_hook(None, make_hook())
    for step in range(3):
        module.zero_grad()
        backward_of_batch(model, "mlp", rank, step)
        alone = build("mlp", seed=3)
        backward_of_batch(alone, "mlp", rank, step)
        for found, own in zip(module.parameters(), alone.parameters(), strict=True):
            assert torch.equal(found.grad, own.grad * factor)


# ---------------------------------------------------------------- the order of the buckets


class RunsInAnotherOrder(nn.Module):
    """Registers a, b, c and runs c, a, b; with `swapped` it runs b, a, c."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.order = "bac" if swapped else "cab"

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = torch.tanh(getattr(self, name)(x))
        return x


def bucket_orders(rank, world_size, group, swapped_on):
    module = RunsInAnotherOrder(rank == swapped_on)
    model = BucketedDDP(module, process_group=group, bucket_cap_mb=ONE_BUCKET_EACH_MB)
    names = {id(p): n.removesuffix(".weight") for n, p in module.named_parameters()}
    orders: list[list[str]] = []

    def hook(state, bucket):
        orders[-1].append("".join(names[id(p)] for p in bucket.parameters()))
        work = group.allreduce([bucket.buffer().div_(world_size)])
        return work.get_future()

    model.register_comm_hook(None, hook)
    for step in range(4):
        orders.append([])
        module.zero_grad()
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * rank + step))
        model(x).sum().backward()
        alone = RunsInAnotherOrder(rank == swapped_on)
        alone.load_state_dict(module.state_dict())
        alone(x).sum().backward()
        expected = mean_over_ranks(grads_of(alone), world_size, group)
        # the hook divides before it sums, the reference after: at 3 ranks they round differently
        torch.testing.assert_close(grads_of(module), expected, rtol=1e-6, atol=1e-7)
    return orders


@pytest.mark.parametrize(("world_size", "swapped_on"), [(2, None), (3, 0), (3, 1), (3, 2)])
def test_buckets_follow_registration_at_first_then_the_order_of_readiness_of_rank_0(world_size, swapped_on):
    # c, a, b run forward, so that their gradients are ready as b, a, c
    rank_0_order = ["c", "a", "b"] if swapped_on == 0 else ["b", "a", "c"]
    for orders in run_threads(bucket_orders, world_size, swapped_on):
        assert orders == [["c", "b", "a"]] + [rank_0_order] * 3


# ---------------------------------------------------------------- interruptions


class Interruption(Exception):
    """What the signal handler of the test raises."""


def interrupted_while_peer_is_late(rank, world_size, signal_number, with_hook, fifo):
    """Rank 1 enters backward only after rank 0 was interrupted in it. Rank 0 returns what it saw."""
    module, interrupt = build("mlp", seed=5), Interrupt()
    model = BucketedDDP(module, interrupt=interrupt)
    if with_hook:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    for step in range(2):
        module.zero_grad()
        backward_of_batch(model, "mlp", rank, step)
    module.zero_grad()
    inputs, labels = batch("mlp", rank, 2)
    loss = cross_entropy(model(inputs), labels)
    if rank == 1:
        with open(fifo) as peer:
            peer.read()
        return None
    handled = []

    def handler(number, frame):
        handled.append(number)
        raise Interruption("stop now")

    signal.signal(signal_number, handler)
    sent_at: list[float] = []
    arguments = interrupt.activity, signal_number, sent_at
    sender = threading.Thread(target=signal_when_waiting, args=arguments, daemon=True)
    sender.start()
    try:
        loss.backward()
        seen = "backward ended"
    except Interruption:
        seen = "interrupted"
    seen_at = time.monotonic()
    sender.join(timeout=10)
    with open(fifo, "w") as peer:
        peer.write("go on")
    return seen, handled, seen_at - sent_at[0]


def signal_when_waiting(activity: Activity, signal_number: int, sent_at: list[float]) -> None:
    deadline = time.monotonic() + 10
    while activity.label is None and time.monotonic() < deadline:
        time.sleep(0.005)
    sent_at.append(time.monotonic())
    os.kill(os.getpid(), signal_number)


@pytest.mark.parametrize(("name", "with_hook"), [("SIGUSR1", False), ("SIGINT", True)])
def test_a_signal_handler_runs_while_a_collective_is_pending(name, with_hook, tmp_path):
    fifo = tmp_path / "release"
    os.mkfifo(fifo)
    answer, _ = run_ranks(
        interrupted_while_peer_is_late, 2, getattr(signal, name), with_hook, str(fifo), timeout_s=30
    )
    seen, handled, seconds = answer
    assert seen == "interrupted"
    assert handled == [getattr(signal, name)]
    assert seconds < 1.0  # 0.2 s is promised; the rest is for a busy machine


# ---------------------------------------------------------------- several threads of autograd


class SlowEngine:
    """Stands for autograd's engine in the thread that begins a backward, and stays there for a while."""

    def __init__(self) -> None:
        self.is_inside, self.other_has_returned = threading.Event(), threading.Event()
        self.num_calls = 0
        self.was_overtaken = False

    def queue_callback(self, callback: Callable[[], None]) -> None:
        self.num_calls += 1
        self.is_inside.set()
        self.was_overtaken = self.other_has_returned.wait(0.5)


def test_of_the_threads_of_several_devices_one_begins_the_backward_and_the_others_wait(monkeypatch):
    engine = SlowEngine()
    monkeypatch.setattr("lightning_ddp.ddp.reducer.queue_callback", engine.queue_callback)

    def rank_main(rank, world_size, group):
        reducer = BucketedDDP(nn.Linear(2, 2), process_group=group).reducer
        reducer.arm()
        first = threading.Thread(target=reducer.begin)
        first.start()
        assert engine.is_inside.wait(20)
        reducer.begin()
        engine.other_has_returned.set()
        first.join(20)
        assert (reducer.step, engine.num_calls, engine.was_overtaken) == (0, 1, False)

    run_threads(rank_main, 1)

"""Each averager against its algorithm, written out here for all ranks in one place.

The ranks take steps of SGD along given gradients, so that every position is known. fp32 against float64:
rtol 1e-5 of the largest element.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from given_gradients import Given, Grads, Shapes, mean, random_grads
from harness import on_ranks, run_threads
from torch import Tensor, nn

from lightning_ddp import BucketedDDP
from lightning_ddp.averaging import Averager, build_averager, parse_averager
from lightning_ddp.averaging.base import refuse_sharded
from lightning_ddp.comm.group import Group
from lightning_ddp.communication import Communication
from lightning_ddp.errors import ConfigurationError

SHAPES = {"first": (6, 5), "bias": (4,), "second": (3, 2, 4)}
LR = 0.1
NUM_STEPS = 9
EVERY_STEP = {"name": "post_local_sgd", "start_step": 0, "period": 1}
both_sizes = pytest.mark.parametrize("world_size", [2, 3])


def local_grads(rank: int, step: int) -> Grads:
    return random_grads(rank, step, SHAPES)


def train(
    spec: Any,
    world_size: int,
    *,
    num_steps: int = NUM_STEPS,
    schedule: Callable[[int], float] = lambda step: LR,
    finish: Callable[[nn.Module, Averager], Any] = lambda module, averager: None,
) -> list[tuple[list[Grads], Any]]:
    """Per rank: the parameters after each step, and `finish(module, averager)`."""

    def rank_main(rank: int, _: int, group: Any) -> tuple[list[Grads], Any]:
        module, optimizer, averager = built(spec, group)
        trace = []
        for step in range(num_steps):
            optimizer.param_groups[0]["lr"] = schedule(step)
            take_step(module, optimizer, averager, rank, world_size, step)
            trace.append({n: p.detach().clone() for n, p in module.named_parameters()})
        return trace, finish(module, averager)

    return run_threads(rank_main, world_size)


def built(
    spec: Any, group: Any, shapes: Shapes = SHAPES, dtype: torch.dtype = torch.float32, **options: float
) -> tuple[nn.Module, torch.optim.Optimizer, Averager]:
    module = Given(shapes, dtype)
    optimizer = torch.optim.SGD(module.parameters(), **{"lr": LR, **options})
    return module, optimizer, build_averager(spec, module, [optimizer], group)


def take_step(module, optimizer, averager, rank, world_size, step) -> None:
    """What the reducer does while gradients are averaged is done here by hand."""
    ranks = range(world_size) if averager.averages_gradients else [rank]
    for name, parameter in module.named_parameters():
        parameter.grad = mean([local_grads(r, step)[name] for r in ranks]).float()
    averager.before_step()
    optimizer.step()
    averager.step(optimizer)


def zeros(world_size: int) -> list[Grads]:
    return [{n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()} for _ in range(world_size)]


def assert_close(found: Grads, expected: Grads, rtol: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(tensor.abs().max().item(), 1e-3)
        torch.testing.assert_close(found[name].double(), tensor.double(), rtol=0, atol=rtol * scale)


def check(spec: Any, world_size: int, after_step: Callable[..., None], **options: Any) -> None:
    """Compares a run with `x[rank][name] -= lr g`, changed by `after_step(step, x)`, at every step."""
    schedule = options.get("schedule", lambda step: LR)
    answers = train(spec, world_size, **options)
    x = zeros(world_size)
    for step in range(options.get("num_steps", NUM_STEPS)):
        for rank in range(world_size):
            for name in SHAPES:
                x[rank][name] -= schedule(step) * local_grads(rank, step)[name]
        after_step(step, x)
        for rank in range(world_size):
            assert_close(answers[rank][0][step], x[rank])


def average(x: list[Grads], ranks: list[int] | None = None) -> None:
    ranks = ranks or list(range(len(x)))
    for name in SHAPES:
        value = mean([x[r][name] for r in ranks])
        for r in ranks:
            x[r][name] = value.clone()


# ---------------------------------------------------------------- local SGD


@both_sizes
@pytest.mark.parametrize(("start", "period"), [(0, 1), (0, 3), (4, 2), (2, 8), (9, 1)])
def test_post_local_sgd_averages_gradients_and_then_parameters(world_size, start, period):
    def after(step, x):
        local = step + 1 - start
        if local <= 0 or local % period == 0:
            average(x)  # of SGD without momentum, which is what averaged gradients are too

    spec = {"name": "post_local_sgd", "start_step": start, "period": period}
    check(spec, world_size, after)


def test_hierarchical_sgd_runs_the_largest_level_that_is_due():
    def after(step, x):
        if step % 4 == 0:  # the first step has averaged gradients; of the local ones each fourth
            average(x)
        elif step % 2 == 0:
            average(x, [0, 1])
            average(x, [2, 3])

    check({"name": "hierarchical_sgd", "start_step": 1, "periods": {2: 2, 4: 0}}, 4, after)


@pytest.mark.parametrize("hook", [None, "allreduce"])
def test_in_local_training_gradients_may_be_averaged_in_each_of_two_nodes(hook):
    """Four ranks, two a node: gradients of all at first, then of the node; parameters of all every third."""
    start, period, num_steps = 2, 3, 9

    def rank_main(rank, world_size, group):
        averaging = {"name": "post_local_sgd", "start_step": start, "period": period}
        communication = Communication(hook, averaging={**averaging, "intra_node_gradients": True})
        module = Given(SHAPES)
        model = BucketedDDP(module, process_group=group, bucket_cap_mb=1e-5)
        communication.register(model, Group(group), torch.device("cpu"), node_size=2, loss_scale=lambda: 1.0)
        optimizer = torch.optim.SGD(module.parameters(), lr=LR)
        communication.start(module, [optimizer], Group(group))
        trace = []
        for step in range(num_steps):
            module.zero_grad()
            model(local_grads(rank, step)).backward()
            optimizer.step()
            communication.after_step(optimizer, was_skipped=False)
            trace.append({n: p.detach().clone() for n, p in module.named_parameters()})
        return trace

    traces = run_threads(rank_main, 4)
    x = zeros(4)
    for step in range(num_steps):
        for rank in range(4):
            first = rank - rank % 2
            ranks = range(4) if step < start else range(first, first + 2)
            for name in SHAPES:
                x[rank][name] -= LR * mean([local_grads(r, step)[name] for r in ranks])
        if step >= start and (step + 1 - start) % period == 0:
            average(x)
        for rank in range(4):
            assert_close(traces[rank][step], x[rank])
    assert not traces[0][3]["first"].equal(traces[2][3]["first"]), "the nodes are apart between rounds"


# ---------------------------------------------------------------- outer optimizers


@both_sizes
def test_slowmo_follows_the_paper(world_size):
    start, period, alpha, beta = 2, 3, 0.8, 0.5
    old, slow = zeros(1)[0], zeros(1)[0]

    rates = [0.1, 0.1, 0.2, 0.2, 0.05, 0.05, 0.05, 0.1, 0.1, 0.1, 0.0]  # of the last one the mean is taken

    def after(step, x):
        if step < start:
            average(x)
            old.update({n: t.clone() for n, t in x[0].items()})
        elif (step + 1 - start) % period == 0:
            lr = rates[step]
            average(x)
            for name in SHAPES if lr else ():
                slow[name] = beta * slow[name] + (old[name] - x[0][name]) / lr
                old[name] = old[name] - alpha * lr * slow[name]
                for rank in range(world_size):
                    x[rank][name] = old[name].clone()

    spec = {"name": "slowmo", "start_step": start, "period": period, "slow_lr": alpha, "slow_momentum": beta}
    check(spec, world_size, after, num_steps=len(rates), schedule=rates.__getitem__)


@both_sizes
@pytest.mark.parametrize("nesterov", [True, False])
def test_diloco_follows_the_paper(world_size, nesterov):
    start, period, lr, factor = 1, 2, 0.7, 0.9
    old, momentum = zeros(1)[0], zeros(1)[0]

    def after(step, x):
        if step < start:
            average(x)
            old.update({n: t.clone() for n, t in x[0].items()})
        elif (step + 1 - start) % period == 0:
            for name in SHAPES:
                delta = mean([old[name] - x[r][name] for r in range(world_size)])
                momentum[name] = factor * momentum[name] + delta
                old[name] = old[name] - lr * (delta + factor * momentum[name] if nesterov else momentum[name])
                for rank in range(world_size):
                    x[rank][name] = old[name].clone()

    check({"name": "diloco", "start_step": start, "period": period, "nesterov": nesterov}, world_size, after)


@pytest.mark.parametrize(("encoding", "bound"), [("bf16", 2.0**-7), ("int8", 1 / 100)])
def test_encoded_outer_gradients_err_by_their_rounding(encoding, bound):
    """The bound is relative to the largest outer gradient, for each of four rounds."""
    spec = {"name": "diloco", "period": 2, "outer_momentum": 0.0}
    exact = train(spec, 2, num_steps=8)
    rounded = train(spec | {"encoding": encoding}, 2, num_steps=8)
    for rank in range(2):
        for name in SHAPES:
            error = (exact[rank][0][-1][name] - rounded[rank][0][-1][name]).abs().max().item()
            assert 0 < error <= 4 * bound * LR * 2 * 4
    for a, b in zip(rounded[0][0][1::2], rounded[1][0][1::2], strict=True):
        assert all(a[name].equal(b[name]) for name in SHAPES), "the ranks agree to the bit"


@both_sizes
@pytest.mark.parametrize("delay", [0, 1])
def test_streaming_diloco_follows_the_paper(world_size, delay):
    period, num_fragments, weight, lr, factor = 4, 2, 0.25, 0.7, 0.9
    fragments = [["first", "second"], ["bias"]]
    old, momentum = zeros(1)[0], zeros(1)[0]
    sent: dict[int, tuple[list[str], dict[str, Tensor]]] = {}

    def after(step, x):
        local = step + 1
        if local % (period // num_fragments) == 0:
            names = fragments[(local // 2 - 1) % num_fragments]
            deltas = {n: mean([old[n] - x[r][n] for r in range(world_size)]) for n in names}
            sent[local + delay] = (names, deltas)
        names, deltas = sent.pop(local, ([], {}))
        for name in names:
            momentum[name] = factor * momentum[name] + deltas[name]
            old[name] = old[name] - lr * (deltas[name] + factor * momentum[name])
            for rank in range(world_size):
                own = weight if delay else 0.0
                x[rank][name] = own * x[rank][name] + (1 - own) * old[name]

    spec = {
        "name": "streaming_diloco",
        "period": period,
        "num_fragments": num_fragments,
        "delay": delay,
        "local_weight": weight,
    }
    check(spec, world_size, after)


# ---------------------------------------------------------------- what is averaged, and how


@on_ranks(2)
def test_parameters_stay_where_they_are_and_those_without_a_gradient_are_averaged_too(rank, group):
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 3), nn.Linear(2, 2).to(torch.bfloat16))
    module = module.to(memory_format=torch.channels_last)
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(torch.arange(p.numel()).view(p.shape) * 0.25 + i)
    places = [(p.data_ptr(), p.stride()) for p in module.parameters()]
    before = [p.detach().clone() for p in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    averager = build_averager(EVERY_STEP, module, [optimizer], group)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(rank)  # as if stepped; no parameter has a gradient
    averager.step(optimizer)
    assert [(p.data_ptr(), p.stride()) for p in module.parameters()] == places
    for p, old in zip(module.parameters(), before, strict=True):
        assert p.equal(old + 0.5)


@on_ranks(2)
def test_buffers_that_are_views_are_averaged_in_place(rank, group):
    module, optimizer, averager = built(EVERY_STEP, group)
    table, numbers = torch.full((4, 3), float(rank)), torch.full((4,), complex(rank, rank))
    module.register_buffer("column", table[:, 0])
    module.register_buffer("conjugate", numbers.conj())
    module.register_buffer("negative", numbers.conj().imag)
    averager.step(optimizer)
    assert table.tolist() == [[0.5, rank, rank]] * 4
    assert (module.conjugate.tolist(), module.negative.tolist()) == ([0.5 - 0.5j] * 4, [-0.5] * 4)


@on_ranks(2)
def test_ignored_parameters_and_buffers_stay_each_ranks_own(rank, group):
    """Those that `BucketedDDP` ignores, whose sizes may differ between ranks."""
    module = nn.Sequential(nn.Linear(1, 1), nn.Embedding(2 + rank, 2), nn.BatchNorm1d(1))
    module.register_buffer("mine", torch.zeros(1 + rank))
    ignored = ["1.weight", "mine", "2.running_mean"]
    module._ddp_params_and_buffers_to_ignore = ignored
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    averager = build_averager(EVERY_STEP, module, [optimizer], group)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.fill_(rank)
    averager.step(optimizer)
    found = {name: tensor.float().mean().item() for name, tensor in module.state_dict().items()}
    assert found == {
        **dict.fromkeys(found, 0.5),
        **dict.fromkeys(ignored, rank),
        "2.num_batches_tracked": 1,
    }


@on_ranks(3)
def test_parameters_of_16_bits_are_averaged_in_32(rank, group):
    """In 16 bits it would be 110, in whatever order. Over a network: shared memory adds in 32 bits anyway."""
    module = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    averager = build_averager(EVERY_STEP, module, [optimizer], group)
    averager.channel._staging = lambda: None
    nn.init.constant_(module.weight, (101.0, 131.0, 97.0)[rank])
    averager.step(optimizer)
    assert module.weight.item() == 109.5


def test_a_tensor_larger_than_a_chunk_goes_in_several(monkeypatch):
    monkeypatch.setattr("lightning_ddp.encoding.mean.CHUNK_NUMEL", 7)
    check(EVERY_STEP, 3, lambda step, x: average(x), num_steps=3)


@both_sizes
def test_running_statistics_are_those_of_all_data(world_size):
    """Every rank has the statistics of its data; together they are those of the data put together."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(world_size, 50, 3, generator=generator) * 2 + torch.arange(world_size).view(-1, 1, 1)

    def rank_main(rank, _, group):
        layer = nn.BatchNorm1d(3)
        layer.register_buffer("other", torch.tensor([float(rank)]))
        module = nn.Sequential(layer)
        layer.running_mean.copy_(data[rank].mean(0))
        layer.running_var.copy_(data[rank].var(0, correction=0))
        layer.num_batches_tracked.fill_(10 + rank)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        averager = build_averager(EVERY_STEP, module, [optimizer], group)
        averager.step(optimizer)
        return layer.running_mean, layer.running_var, layer.num_batches_tracked.item(), layer.other.item()

    together = data.view(-1, 3)
    for running_mean, running_var, count, other in run_threads(rank_main, world_size):
        torch.testing.assert_close(running_mean, together.mean(0))
        torch.testing.assert_close(running_var, together.var(0, correction=0))
        assert count == 10 + world_size - 1
        assert other == pytest.approx((world_size - 1) / 2)


@pytest.mark.parametrize("policy", ["keep", "average", "reset"])
def test_optimizer_state_is_kept_averaged_or_reset(policy):
    def rank_main(rank, world_size, group):
        module = Given(SHAPES)
        optimizer = torch.optim.Adam(module.parameters(), lr=LR)
        spec = {"name": "post_local_sgd", "start_step": 0, "period": 2, "optimizer_state": policy}
        averager = build_averager(spec, module, [optimizer], group)
        for step in range(2):
            for name, parameter in module.named_parameters():
                # a parameter that rank 0 alone has used has no state on the other
                parameter.grad = None if (name, rank) == ("bias", 1) else local_grads(rank, step)[name]
            optimizer.step()
            state = {n: optimizer.state.get(p, {}) for n, p in module.named_parameters()}
            before = copy.deepcopy(state)
            averager.step(optimizer)
        after = {n: dict(optimizer.state.get(p, {})) for n, p in module.named_parameters()}
        return before, after

    answers = run_threads(rank_main, 2)
    for before, after in answers:
        for name in SHAPES:
            for key, value in before[name].items():
                if policy == "reset":
                    assert key not in after[name]
                elif policy == "keep" or key == "step" or name == "bias":
                    assert after[name][key].equal(value)
                else:
                    expected = mean([answers[r][0][name][key] for r in range(2)])
                    torch.testing.assert_close(after[name][key].double(), expected, rtol=1e-6, atol=1e-9)
                    assert not after[name][key].equal(value)


@on_ranks(2)
def test_a_fragments_round_resets_the_optimizer_state_of_the_fragment_alone(rank, group):
    module = Given(SHAPES)
    optimizer = torch.optim.Adam(module.parameters(), lr=LR)
    spec = {"name": "streaming_diloco", "period": 2, "num_fragments": 2, "delay": 0}
    averager = build_averager(
        {**spec, "start_step": 0, "optimizer_state": "reset"}, module, [optimizer], group
    )
    for name, parameter in module.named_parameters():
        parameter.grad = local_grads(rank, 0)[name]
    optimizer.step()
    averager.step(optimizer)
    assert [name for name, p in module.named_parameters() if optimizer.state.get(p)] == ["bias"]


# ---------------------------------------------------------------- steps


@on_ranks(2)
def test_an_optimizer_without_steps_does_not_hold_up_the_local_training_of_another(group):
    module = Given(SHAPES)
    used, unused = (torch.optim.SGD([parameter], lr=LR) for parameter in (module.first, module.bias))
    averager = build_averager({**EVERY_STEP, "start_step": 2}, module, [used, unused], group)
    averager.step(used)
    assert averager.averages_gradients
    averager.step(used)
    assert not averager.averages_gradients


@on_ranks(2)
def test_skipped_steps_do_not_count_in_the_warm_up_and_do_in_the_local_phase(rank, group):
    spec = {"name": "post_local_sgd", "start_step": 2, "period": 3}
    module, optimizer, averager = built(spec, group)
    phases = []
    for was_skipped in (False, True, True, False):
        phases.append(averager.averages_gradients)
        averager.step(optimizer, was_skipped=was_skipped)
    phases.append(averager.averages_gradients)
    with torch.no_grad():
        module.bias.fill_(rank)
    for step in range(3):
        assert module.bias[0] == rank
        averager.step(optimizer, was_skipped=rank == 1 and step == 1)  # the ranks skip differently
    assert (phases, module.bias[0].item()) == ([True, True, True, True, False], 0.5)


def test_agreement_averages_what_has_diverged_and_nothing_else():
    def finish(module, averager):
        before = averager.channel.num_bytes_sent
        averager.agree()
        first = {n: p.detach().clone() for n, p in module.named_parameters()}
        sent = averager.channel.num_bytes_sent - before
        averager.agree()
        return first, sent, averager.channel.num_bytes_sent - before - sent

    spec = {"name": "diloco", "period": 100}
    answers = train(spec, 2, num_steps=3, finish=finish)
    expected = {n: mean([answers[r][0][-1][n] for r in range(2)]) for n in SHAPES}
    for _, (agreed, num_sent, num_again) in answers:
        assert_close(agreed, expected, 1e-6)
        assert num_sent > 0
        assert num_again == 0
    spec = {"name": "post_local_sgd", "start_step": 5, "period": 2}
    assert train(spec, 2, num_steps=5, finish=finish)[0][1][1] == 0, "gradients were averaged so far"


def test_agreement_averages_models_that_each_rank_has_made_of_its_own_parameters():
    """A moving average differs also where parameters are the same: after a round, and after validation."""
    spec = {"name": "post_local_sgd", "start_step": 1, "period": 2}

    def rank_main(rank: int, world_size: int, group: Any) -> list[float]:
        module, optimizer, averager = built(spec, group)
        other = nn.Linear(2, 1, bias=False)
        other.register_buffer("count", torch.tensor(7))
        seen = []
        for step in range(4):
            nn.init.constant_(other.weight, rank)
            averager.agree([other])
            seen.append(other.weight[0, 0].item())
            if step < 3:
                take_step(module, optimizer, averager, rank, world_size, step)
        assert int(other.count) == 7
        nn.init.constant_(other.weight, rank)
        averager.agree([other] if rank == 0 else [])
        return [*seen, other.weight[0, 0].item()]

    assert run_threads(rank_main, 2) == [[float(rank), 0.5, 0.5, 0.5, float(rank)] for rank in range(2)]


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        ({"name": "post_local_sgd", "start_step": 0, "period": 8}, 0.14),
        ({"name": "slowmo", "period": 12}, 0.09),
        ({"name": "diloco", "period": 100}, 0.011),
        ({"name": "diloco", "period": 100, "encoding": "bf16"}, 0.0055),
        ({"name": "diloco", "period": 100, "encoding": "int8"}, 0.003),
        ({"name": "streaming_diloco", "period": 100}, 0.011),
    ],
    ids=str,
)
@on_ranks(2)
def test_bytes_sent_as_part_of_averaged_gradients(group, spec, limit):
    shapes = {"w": (200, 200), "b": (200,), "v": (200, 100), "c": (50,)}
    numel = 200 * 200 + 200 + 200 * 100 + 50

    _, optimizer, averager = built(spec, group, shapes, lr=0.0)
    for _ in range(200):
        averager.step(optimizer)
    sent = averager.channel.num_bytes_sent
    assert 0.5 * limit < sent / (200 * 4 * numel) <= limit


# ---------------------------------------------------------------- resume

ALL = [
    {"name": "post_local_sgd", "start_step": 2, "period": 3},
    {"name": "hierarchical_sgd", "start_step": 2, "periods": {3: 0}},
    {"name": "slowmo", "start_step": 2, "period": 3},
    {"name": "diloco", "start_step": 2, "period": 3},
    {"name": "diloco", "period": 3, "encoding": "int8"},
    {"name": "streaming_diloco", "start_step": 1, "period": 6, "num_fragments": 2, "delay": 2},
]


@pytest.mark.parametrize("spec", [each | {"optimizer_state": "average"} for each in ALL], ids=str)
@on_ranks(2)
def test_complex_numbers_are_averaged_as_pairs_of_real_ones(rank, group, spec):
    """Parameters, momentum and a buffer, also through an outer optimizer."""
    found = []
    for shape, dtype in (((6, 5, 2), torch.float32), ((6, 5), torch.complex64)):
        module, optimizer, averager = built(spec, group, {"w": shape}, dtype, momentum=0.9)
        module.register_buffer("sums", torch.zeros(shape, dtype=dtype))
        for step in range(7):
            grad = random_grads(rank, step, {"w": (6, 5, 2)})["w"]
            module.w.grad = torch.view_as_complex(grad) if dtype.is_complex else grad
            module.sums.add_(module.w.grad)
            optimizer.step()
            averager.step(optimizer)
        found.append([module.w.detach(), optimizer.state[module.w]["momentum_buffer"], module.sums])
    for pairs, numbers in zip(*found, strict=True):
        torch.testing.assert_close(torch.view_as_real(numbers), pairs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stop", [1, 4, 5, 6])
@pytest.mark.parametrize("spec", ALL, ids=str)
@on_ranks(2)
def test_a_resumed_run_equals_the_undisturbed_one_bit_for_bit(rank, world_size, group, spec, stop):
    def go_on(run, steps):
        for step in steps:
            take_step(*run, rank, world_size, step)

    first = built(spec, group, momentum=0.9)
    go_on(first, range(stop))
    first[2].agree()
    saved = [*copy.deepcopy([first[0].state_dict(), first[1].state_dict()]), first[2].state_dict()]
    go_on(first, range(stop, 14))
    second = built(spec, group, momentum=0.9)
    second[0].load_state_dict(saved[0])
    second[1].load_state_dict(saved[1])
    assert second[2].load_state_dict(saved[2]) == []
    go_on(second, range(stop, 14))
    assert (
        [a.equal(b) for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True)],
        any(p.any() for p in second[0].parameters()),
    ) == ([True] * 3, True)


@pytest.mark.parametrize("num_before", [0, 5])
@pytest.mark.parametrize("spec", ALL, ids=str)
@on_ranks(2)
def test_weights_loaded_after_construction_are_those_that_training_starts_from(
    rank, world_size, group, spec, num_before
):
    """Before the first step, or later with a checkpoint that has no state of an averager."""
    first, module = built(spec, group), Given(SHAPES)
    for parameter in module.parameters():
        nn.init.constant_(parameter, 3.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    second = module, optimizer, build_averager(spec, module, [optimizer], group)
    for step in range(num_before):
        take_step(*second, rank, world_size, step)
    module.load_state_dict(first[0].state_dict())
    if num_before:
        second[2].start_over()
    for step in range(14):
        take_step(*first, rank, world_size, step)
        take_step(*second, rank, world_size, step)
    assert all(a.equal(b) for a, b in zip(first[0].parameters(), module.parameters(), strict=True))


@on_ranks(1)
def test_loading_says_what_it_cannot_keep(group):
    _, _, slowmo = built("slowmo", group)
    _, _, diloco = built("diloco", group)
    state = slowmo.state_dict()
    notes = diloco.load_state_dict(state)
    del state["outer"]["bias"]
    notes += slowmo.load_state_dict(state | {"options": {"period": 5}, "steps": [(1, 1), (2, 2)]})
    with pytest.raises(ConfigurationError, match="has format 7, but this release reads 1"):
        slowmo.load_state_dict(state | {"format": 7})
    assert notes == [
        "state of averager 'slowmo' was dropped, because the run uses 'diloco'",
        "step counts of averager 'slowmo' were reset: 2 optimizers were saved, but the run has 1",
        "averager 'slowmo' was saved with other options: {'period': 5}",
        "outer state of averager 'slowmo' starts from scratch for bias",
    ]


# ---------------------------------------------------------------- parameters that come later


@pytest.mark.parametrize(
    ("way", "is_loaded"),
    [*product(("new group", "unfrozen", "unfrozen early"), (False, True)), ("pruned", False)],
)
@pytest.mark.parametrize("spec", [*ALL, {"name": "hierarchical_sgd", "periods": {3: 2, 9: 0}}], ids=str)
def test_a_parameter_that_is_trained_from_some_step_on_is_averaged_then(spec, way, is_loaded):
    """As with BaseFinetuning. A round that is undone may be repeated, and a checkpoint has all of it."""

    def rank_main(rank, _, group):
        module = Given(SHAPES)
        late = module.bias.requires_grad_(False)
        first = [p for p in module.parameters() if p is not late or way != "new group"]
        optimizer = torch.optim.SGD(first, lr=LR)
        averager = build_averager(spec, module, [optimizer], group)
        named = dict(module.named_parameters())

        def train(*steps: int) -> None:
            for step in steps:
                own, common = local_grads(rank, step), local_grads(0, step)
                for name, parameter in named.items():
                    is_reduced = averager.averages_gradients and parameter is not late
                    parameter.grad = (
                        (common if is_reduced else own)[name] if parameter.requires_grad else None
                    )
                optimizer.step()
                averager.step(optimizer)

        train(0)
        late.requires_grad_(way == "unfrozen early")  # before local training, and not reduced
        train(1, 2)
        late.requires_grad_()
        if way == "new group":
            optimizer.add_param_group({"params": [late]})
        averager.agree()
        start, mark = [p.detach().clone() for p in module.parameters()], averager.mark()
        for _ in range(2):
            for parameter, value in zip(module.parameters(), start, strict=True):
                parameter.data.copy_(value)
            averager.restore(mark)
            train(*range(3, 12))
        averager.agree()
        if way == "pruned":  # the same parameter has another name from now on
            module.register_parameter("bias_orig", late)
            del module.bias
        elif is_loaded:
            state, averager = averager.state_dict(), build_averager(spec, module, [optimizer], group)
            assert averager.load_state_dict(state) == []
        train(*range(12, 18))
        averager.agree()
        return late.detach()

    late, *others = run_threads(rank_main, 4 if "periods" in spec else 2)
    assert all(late.equal(other) for other in others)
    assert late.any()


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dilocco", r"unknown averager 'dilocco'; did you mean 'diloco'\?"),
        ({"name": "slowmo", "tau": 3}, "'slowmo' has no option 'tau'; expected start_step, period"),
        ({"name": "diloco", "outer_ls": 3}, r"no option 'outer_ls'; did you mean 'outer_lr'\?"),
        ({"name": "diloco", "period": 0}, "'diloco': period=0: expected at least 1"),
        ({"name": "diloco", "encoding": "int4"}, "encoding='int4': expected 'fp32', 'bf16' or 'int8'"),
        ({"name": "slowmo", "optimizer_state": "x"}, "expected 'keep', 'average' or 'reset'"),
        ({"name": "hierarchical_sgd"}, "periods"),
        ({"name": "hierarchical_sgd", "periods": {4: 2, 2: 4}}, "increase together"),
        ({"name": "hierarchical_sgd", "periods": {2: 2, 3: 4}}, "a multiple of the one before"),
        ({"name": "streaming_diloco", "period": 10}, "num_fragments=4: expected a divisor of period=10"),
        ({"name": "streaming_diloco", "period": 8, "delay": 2}, "delay=2: expected from 0 and below 2"),
        (7, "model averaging 7: expected a name or a mapping"),
    ],
)
def test_a_specification_that_cannot_be_used_says_why(spec, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_averager(spec)


@on_ranks(3)
def test_groups_that_do_not_fit_the_ranks_are_refused(group):
    for periods in ({2: 2}, {2: 2, 4: 3}):
        with pytest.raises(ConfigurationError, match=r"with 3 ranks: the last group must have all"):
            built({"name": "hierarchical_sgd", "periods": periods}, group)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.distributed.optim scripts functions
def test_sharded_optimizers_are_refused_with_the_reason():
    from torch.distributed.optim import PostLocalSGDOptimizer

    inner = torch.optim.SGD(Given(SHAPES).parameters(), lr=LR)
    with pytest.raises(ConfigurationError, match="PostLocalSGDOptimizer: it averages the parameters itself"):
        refuse_sharded([PostLocalSGDOptimizer(inner, averager=None)])

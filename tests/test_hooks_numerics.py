"""Each hook's output for given gradients, against the formulas of its paper written out here once more.

The references hold the state of all ranks in one place and know nothing of buckets, wires or threads. Bounds:
what is only rearranged is compared at 1e-5 of the largest element, and PowerSGD at 1e-4, as its factors lose
digits where a start factor is nearly orthogonal to the gradient; what is rounded states its step.
"""

from __future__ import annotations

import math

import pytest
import torch
from given_gradients import ONE_EACH_MB, SHAPES, Grads, inputs_of, mean, reduce_steps
from torch import Tensor

from lightning_ddp.hooks.momentum import pack_signs, unpack_signs

WORLD_SIZES = [2, 3]
pytestmark = pytest.mark.parametrize("world_size", WORLD_SIZES)


def assert_close(found: Tensor, expected: Tensor, rtol: float = 1e-5) -> None:
    largest = expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=rtol * largest)


def assert_all_close(found: list[Grads], expected: list[Grads], rtol: float = 1e-5) -> None:
    """Of all steps and parameters."""
    for output, reference in zip(found, expected, strict=True):
        for name in SHAPES:
            assert_close(output[name], reference[name], rtol)


def means_of(inputs: list[list[Grads]]) -> list[Grads]:
    """Over the ranks, by step."""
    return [
        {n: mean([g[n] for g in of_ranks]) for n in of_ranks[0]} for of_ranks in zip(*inputs, strict=True)
    ]


def zeros(world_size: int) -> list[Grads]:
    """For each rank a flat tensor of each parameter."""
    return [{n: torch.zeros(math.prod(s)).double() for n, s in SHAPES.items()} for _ in range(world_size)]


# ---------------------------------------------------------------- the mean, in fewer bits


def test_allreduce_is_the_mean(world_size):
    inputs = inputs_of(world_size)
    assert_all_close(reduce_steps("allreduce", inputs)[0][0], means_of(inputs), 1e-6)


def test_noop_leaves_each_rank_its_own(world_size):
    inputs = inputs_of(world_size)
    for rank, (outputs, _) in enumerate(reduce_steps("noop", inputs)):
        for step, output in enumerate(outputs):
            assert all(output[name].equal(inputs[rank][step][name]) for name in SHAPES)


@pytest.mark.parametrize(("spec", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_16_bits_round_before_and_after_the_sum_and_nowhere_else(world_size, spec, dtype):
    inputs = inputs_of(world_size)
    for step, output in enumerate(reduce_steps(spec, inputs)[0][0]):
        for name in SHAPES:
            sent = [(inputs[r][step][name] / world_size).to(dtype).float() for r in range(world_size)]
            # at 3 ranks the order of the float32 sum may differ here, which can move a rounding by one step
            expected = torch.stack(sent).sum(0).to(dtype).float()
            bound = 0.0 if world_size == 2 else torch.finfo(dtype).eps * expected.abs().max().item()
            torch.testing.assert_close(output[name], expected, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("spec", "half_step"),
    [({"name": "int8", "block_size": 64}, 1 / 254), ({"name": "fp8", "block_size": 64}, 1 / 28)],
)
def test_8_bits_err_by_at_most_half_a_step_of_the_blocks(world_size, spec, half_step):
    """Half a step for each rank's share and half a step for the mean; blocks only make the bound smaller."""
    inputs = inputs_of(world_size)
    for step, output in enumerate(reduce_steps(spec, inputs)[0][0]):
        largest = [max(g.abs().max().item() for g in inputs[r][step].values()) for r in range(world_size)]
        bound = half_step * 2.1 * sum(largest) / world_size
        for name, expected in means_of(inputs)[step].items():
            assert 0 < (output[name] - expected).abs().max().item() <= bound


def test_an_outlier_coarsens_its_block_alone(world_size):
    inputs = inputs_of(world_size, 1)
    for rank in range(world_size):
        inputs[rank][0]["first"][0, 0] = 1e4
    errors = {}
    for block in (16, 4096):
        output = reduce_steps({"name": "int8", "block_size": block}, inputs)[0][0][0]
        expected = means_of(inputs)[0]["first"]
        errors[block] = (output["first"] - expected)[1:].abs().max().item()
    assert errors[16] < 0.05 < errors[4096]


@pytest.mark.parametrize("spec", ["fp16", "bf16", "int8", "fp8"])
def test_zeros_stay_zeros(world_size, spec):
    inputs = [[{n: torch.zeros(s) for n, s in SHAPES.items()}] for _ in range(world_size)]
    output = reduce_steps(spec, inputs)[0][0][0]
    assert all(not g.any() for g in output.values())


@pytest.mark.parametrize("spec", ["allreduce", "fp16", "bf16", "int8", "fp8"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_on_one_rank_is_not_finite_on_all(world_size, spec, value):
    inputs = inputs_of(world_size, 1)
    inputs[-1][0]["second"][1, 2, 3] = value
    for outputs, _ in reduce_steps(spec, inputs):
        assert not outputs[0]["second"][1, 2, 3].isfinite()


# ---------------------------------------------------------------- PowerSGD


def reference_powersgd(inputs: list[list[Grads]], factors: Grads, *, min_compression: float = 1.0):
    """Algorithm 1 and 2 in float64, with Gram-Schmidt; small tensors are averaged."""
    num_ranks = len(inputs)
    errors = [{n: torch.zeros(s).double() for n, s in SHAPES.items()} for _ in range(num_ranks)]
    factors = {n: q.double() for n, q in factors.items()}
    outputs = []
    for step in range(len(inputs[0])):
        output = {}
        for name, shape in SHAPES.items():
            if name not in factors:
                output[name] = means_of(inputs)[step][name]
                continue
            matrices = [
                (inputs[r][step][name].double() + errors[r][name]).reshape(shape[0], -1)
                for r in range(num_ranks)
            ]
            p = sum(m @ factors[name] for m in matrices) / num_ranks
            columns: list[Tensor] = []
            for column in p.unbind(1):
                for other in columns:
                    column = column - (column @ other) * other
                columns.append(column / column.norm())
            p = torch.stack(columns, dim=1)
            factors[name] = sum(m.t() @ p for m in matrices) / num_ranks
            approximation = p @ factors[name].t()
            for r in range(num_ranks):
                errors[r][name] = (matrices[r] - approximation).reshape(shape)
            output[name] = approximation.reshape(shape)
        outputs.append(output)
    return outputs, errors


def compressed_shapes(rank: int) -> dict[str, tuple[int, int]]:
    flat = {n: (s[0], math.prod(s[1:])) for n, s in SHAPES.items() if len(s) > 1}
    return {n: (a, b) for n, (a, b) in flat.items() if (a + b) * min(rank, a, b) * 1.0 < a * b}


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_follows_the_paper(world_size, rank):
    inputs = inputs_of(world_size)
    shapes = compressed_shapes(rank)
    assert "first" in shapes
    assert "bias" not in shapes
    start = {
        n: torch.randn(m, rank, generator=torch.Generator().manual_seed(5)) for n, (_, m) in shapes.items()
    }
    spec = {"name": "powersgd", "rank": rank, "start_step": 0, "min_compression": 1}

    def run_from_known_factors(run):
        state = run.hook.state_dict() | {"tensors": {n: {"q": q} for n, q in start.items()}}
        assert run.hook.load_state_dict(state) == []
        return [run.step(grads) for grads in inputs[run.hook.channel.rank]], run.state()

    expected, errors = reference_powersgd(inputs, start)
    answers = reduce_steps(spec, [[] for _ in inputs], finish=run_from_known_factors)
    for r, (_, (outputs, residuals)) in enumerate(answers):
        assert_all_close(outputs, expected, 1e-4)
        assert residuals.keys() == shapes.keys()
        for name in shapes:
            assert_close(residuals[name].view(SHAPES[name]), errors[r][name], 1e-4)


def test_powersgd_finds_a_rank_that_it_had_lost(world_size):
    """Three steps of rank-1 gradients, then one of rank 2: no factor may have collapsed to zero."""
    u, v = torch.randn(2, 24, generator=torch.Generator().manual_seed(2))
    one, two = torch.outer(u, u[:20]), torch.outer(u, u[:20]) + torch.outer(v, v[:20])
    steps = [{"first": one}] * 3 + [{"first": two}] * 2
    shapes = {"first": (24, 20)}
    spec = {"name": "powersgd", "rank": 2, "start_step": 0, "min_compression": 1}
    outputs = reduce_steps(spec, [steps] * world_size, shapes=shapes)[0][0]
    assert_close(outputs[2]["first"], one)
    assert_close(outputs[4]["first"] + outputs[3]["first"], 2 * two, 1e-4)


def test_powersgd_starts_with_the_mean(world_size):
    inputs = inputs_of(world_size)
    outputs = reduce_steps({"name": "powersgd", "start_step": 3, "min_compression": 1}, inputs)[0][0]
    expected = means_of(inputs)
    assert_all_close(outputs[:3], expected[:3], 1e-6)
    for output, exact in zip(outputs[3:], expected[3:], strict=True):
        assert (output["first"] - exact["first"]).abs().max() > 0.1


def test_powersgd_without_memory_is_one_power_iteration(world_size):
    inputs = inputs_of(world_size)
    for of_rank in inputs:
        of_rank[1] = of_rank[0]
    spec = {"name": "powersgd", "start_step": 0, "min_compression": 1}
    spec |= {"warm_start": False, "error_feedback": False}
    (outputs, residuals), *_ = reduce_steps(spec, inputs, finish=lambda run: run.state())
    assert residuals == {}
    for step, output in enumerate(outputs):
        # the projection of the mean on the columns of the result
        expected = means_of(inputs)[step]["first"]
        basis = torch.linalg.svd(output["first"].double()).U[:, :2]
        assert_close(output["first"], basis @ basis.t() @ expected, 1e-4)
    change = (outputs[1]["first"] - outputs[0]["first"]).abs().max()
    assert change > 0.1, "each step begins with another random factor"


# ---------------------------------------------------------------- top-k (DGC)


def reference_dgc(inputs, *, ratios, momentum, nesterov):
    """Algorithm 1 of the paper on flat float64 tensors, per parameter and rank."""
    num_ranks = len(inputs)
    us, vs = zeros(num_ranks), zeros(num_ranks)
    outputs = []
    for step, ratio in enumerate(ratios):
        (output,) = zeros(1)
        for r in range(num_ranks):
            for name in SHAPES:
                g, u, v = inputs[r][step][name].double().view(-1), us[r][name], vs[r][name]
                u.copy_(momentum * u + g)
                v.add_(g + momentum * u if nesterov else u)
                count = math.ceil(ratio * g.numel())
                largest = sorted(range(g.numel()), key=lambda i: -abs(v[i].item()))[:count]
                output[name][largest] += v[largest] / num_ranks
                u[largest] = 0
                v[largest] = 0
        outputs.append({n: t.view(SHAPES[n]) for n, t in output.items()})
    return outputs, us, vs


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_topk_follows_the_paper(world_size, momentum, nesterov):
    inputs = inputs_of(world_size)
    spec = {"name": "topk", "ratio": 0.05, "momentum": momentum, "nesterov": nesterov}
    expected, us, vs = reference_dgc(inputs, ratios=[0.05] * 6, momentum=momentum, nesterov=nesterov)
    answers = reduce_steps(spec, inputs, finish=lambda run: (run.state(), run.state("velocity")))
    for r, (outputs, (residuals, velocities)) in enumerate(answers):
        assert_all_close(outputs, expected)
        for name in SHAPES:
            assert_close(residuals[name], vs[r][name])
            assert (name in velocities) == (momentum > 0)
            if momentum:
                assert_close(velocities[name], us[r][name])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_topk_begins_with_the_plain_mean_and_then_warms_up(world_size, momentum):
    inputs = inputs_of(world_size, 8)
    spec = {"name": "topk", "ratio": 0.01, "warmup_steps": 4, "start_step": 2, "momentum": momentum}
    outputs = reduce_steps(spec, inputs)[0][0]
    first, second = means_of(inputs)[:2]
    assert_all_close(outputs[:2], [first, {n: momentum * first[n] + second[n] for n in SHAPES}])
    if momentum:
        return  # the reference begins without a velocity
    later = [rank[2:] for rank in inputs]
    ratios = [0.25, 0.0625, 0.015625, 0.01, 0.01, 0.01]
    expected, _, _ = reference_dgc(later, ratios=ratios, momentum=0.0, nesterov=False)
    assert_all_close(outputs[2:], expected)


# ---------------------------------------------------------------- sign, random-k


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 50},
        {"block_size": 64, "momentum": 0.9},
        {"momentum": 0.5, "nesterov": True, "start_step": 2},
    ],
    ids=str,
)
def test_sign_follows_the_papers(world_size, options):
    inputs = inputs_of(world_size)
    inputs[0][0]["first"][0] = 0.0  # the sign of zero is +1 on every rank
    block, momentum = options.get("block_size", 10**6), options.get("momentum", 0.0)
    errors, velocities = zeros(world_size), zeros(world_size)
    answers = reduce_steps({"name": "sign", **options}, inputs, finish=lambda run: run.state())
    for step, output in enumerate(answers[0][0]):
        for name, shape in SHAPES.items():
            total = torch.zeros(math.prod(shape)).double()
            for r in range(world_size):
                g = inputs[r][step][name].double().view(-1)
                u = velocities[r][name] = momentum * velocities[r][name] + g
                p = g + momentum * u if "nesterov" in options else u
                sent = p
                if step >= options.get("start_step", 0):
                    p = p + errors[r][name]
                    pieces = p.split(block)
                    sent = torch.cat([b.abs().mean() * torch.where(b >= 0, 1.0, -1.0) for b in pieces])
                    errors[r][name] = p - sent
                total += sent / world_size
            assert_close(output[name].view(-1), total)
    for r, (_, residuals) in enumerate(answers):
        for name in SHAPES:
            assert_close(residuals[name], errors[r][name])


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 1000])
def test_packed_signs_are_an_eighth_of_a_byte_each(world_size, numel):
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(world_size))
    packed = pack_signs(flat)
    assert packed.numel() == -(-numel // 8)
    assert unpack_signs(packed, flat).tolist() == [1 if x >= 0 else -1 for x in flat.tolist()]


@pytest.mark.parametrize(
    ("ratio", "momentum", "start_step"), [(0.02, 0.0, 0), (0.5, 0.0, 0), (0.1, 0.9, 0), (0.1, 0.9, 2)]
)
def test_randomk_sends_the_mean_at_the_same_random_positions(world_size, ratio, momentum, start_step):
    inputs = inputs_of(world_size, 12 + start_step)
    spec = {"name": "randomk", "ratio": ratio, "momentum": momentum, "start_step": start_step}
    answers = reduce_steps(spec, inputs, finish=lambda run: run.state())
    velocities = [{n: torch.zeros(s).double() for n, s in SHAPES.items()} for _ in range(world_size)]
    waiting = [{n: torch.zeros(s).double() for n, s in SHAPES.items()} for _ in range(world_size)]
    chosen = {n: torch.zeros(s) for n, s in SHAPES.items()}
    for step, output in enumerate(answers[0][0]):
        for name, shape in SHAPES.items():
            for r in range(world_size):
                velocities[r][name] = momentum * velocities[r][name] + inputs[r][step][name]
            if step < start_step:
                assert_close(output[name], mean([velocities[r][name] for r in range(world_size)]))
                continue
            for r in range(world_size):
                waiting[r][name] += velocities[r][name]
            sent = output[name] != 0
            assert int(sent.sum()) == math.ceil(ratio * math.prod(shape))
            chosen[name] += sent
            assert_close(output[name][sent], mean([waiting[r][name] for r in range(world_size)])[sent])
            for r in range(world_size):
                waiting[r][name][sent] = 0
                velocities[r][name][sent] = 0
    for r, (_, residuals) in enumerate(answers):
        for name in SHAPES:
            assert_close(residuals[name].view(SHAPES[name]), waiting[r][name])
    assert all((count < 12).all() for count in chosen.values()), "some element is always sent"
    assert (chosen["first"] > 0).float().mean() > 0.1, "other elements in each step"


# ---------------------------------------------------------------- what holds for all that remember

REMEMBERING = [
    {"name": "powersgd", "start_step": 0, "min_compression": 1},
    {"name": "powersgd", "start_step": 0, "min_compression": 1, "batched": True},
    {"name": "topk", "ratio": 0.05},
    {"name": "randomk", "ratio": 0.05},
    "sign",
    ["bf16", {"name": "topk", "ratio": 0.05}],
    ["int8", {"name": "powersgd", "start_step": 0, "min_compression": 1}],
]


@pytest.mark.parametrize("spec", REMEMBERING, ids=str)
def test_what_was_sent_is_what_came_in_less_the_residual(world_size, spec):
    inputs = inputs_of(world_size, 10)
    answers = reduce_steps(spec, inputs, finish=lambda run: run.state(), cap_mb=0.001)
    for name in ("first", "third"):
        sent = sum(output[name].double() for output in answers[0][0])
        came_in = mean([sum(g[name].double() for g in inputs[r]) for r in range(world_size)])
        residual = mean([answers[r][1][name].view(SHAPES[name]) for r in range(world_size)])
        assert residual.abs().max() > 0.1, "everything was sent: the test shows nothing"
        assert_close(sent, came_in - residual)


@pytest.mark.parametrize(
    "spec",
    [
        *(s for s in REMEMBERING if "batched" not in str(s) and "int8" not in str(s)),
        {"name": "topk", "ratio": 0.05, "momentum": 0.9},
    ],
    ids=str,
)
def test_bucket_sizes_do_not_change_the_result(world_size, spec):
    """And neither does the rebuild after the first step, which these runs contain."""
    inputs = inputs_of(world_size)
    large = reduce_steps(spec, inputs)[0][0]
    for cap_mb in (0.001, ONE_EACH_MB):
        small = reduce_steps(spec, inputs, cap_mb=cap_mb)[0][0]
        assert_all_close(large, small, 1e-4 if "powersgd" in str(spec) else 1e-6)


@pytest.mark.parametrize("spec", ["bf16", {"name": "int8", "block_size": 16}], ids=str)
def test_pieces_do_not_change_the_result(world_size, spec, monkeypatch):
    """Several are under way at once; blocks of 8-bit codes begin anew in each, hence the bound for them."""
    inputs = inputs_of(world_size, 2)
    whole = reduce_steps(spec, inputs)[0][0]
    monkeypatch.setattr("lightning_ddp.encoding.mean.PIECE_NUMEL", 96)
    for output, expected in zip(reduce_steps(spec, inputs)[0][0], whole, strict=True):
        for name in SHAPES:
            torch.testing.assert_close(
                output[name], expected[name], rtol=0, atol=0 if spec == "bf16" else 0.1
            )

"""What hooks promise beyond one step's numbers: names, state that survives, transactions, bytes, errors."""

from __future__ import annotations

import math
import random
import time
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from given_gradients import ONE_EACH_MB, SHAPES, Grads, Run, inputs_of, mean, random_grads, reduce_steps
from harness import on_ranks, run_ranks, run_threads

from lightning_ddp import BucketedDDP, CustomDDPStrategy
from lightning_ddp.comm.group import Group
from lightning_ddp.communication import Communication
from lightning_ddp.encoding.mean import Fp8Codec, Int8Codec
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.hooks import available_hooks, build_hook, parse_hook, register_hook
from lightning_ddp.tools.models import build_workload

POWERSGD = {"name": "powersgd", "start_step": 1, "min_compression": 1}
REMEMBERING = [
    POWERSGD,
    POWERSGD | {"batched": True},
    {"name": "topk", "ratio": 0.05, "momentum": 0.5},
    {"name": "randomk", "ratio": 0.05},
    "sign",
    ["bf16", {"name": "topk", "ratio": 0.05}],
]
remembering = pytest.mark.parametrize("spec", REMEMBERING, ids=str)


def assert_same(found: Grads, expected: Grads) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def assert_same_steps(found: list[list[Grads]], reference: list[tuple[list[Grads], object]]) -> None:
    """Requires the gradients of all ranks and steps."""
    for outputs, (expected, _) in zip(found, reference, strict=True):
        for output, wanted in zip(outputs, expected, strict=True):
            assert_same(output, wanted)


# ---------------------------------------------------------------- names


def summed(state, bucket):
    """Add the gradients up."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda reduced: reduced.value()[0])


def test_a_hook_of_ones_own_is_registered_under_a_name(monkeypatch):
    monkeypatch.setattr("lightning_ddp.hooks._registered", {})
    register_hook("summed", summed, description="Gradients are added up.")
    register_hook("summed", summed, description="Gradients are added up.")  # a module that is loaded again
    assert available_hooks()["summed"] == "Gradients are added up."
    for spec in ("summed", {"name": "summed"}, ["summed"]):
        strategy = CustomDDPStrategy(ddp_comm_hook=spec, ddp_comm_state=7)
        assert strategy._communication._function is summed
    for wrong in ({"name": "summed", "rank": 3}, ["fp16", "summed"]):
        with pytest.raises(ConfigurationError, match="'summed', from register_hook, takes no options"):
            CustomDDPStrategy(ddp_comm_hook=wrong)
    for name, hook in (("summed", print), ("bf16", summed), ("", summed), ("other", 3)):
        with pytest.raises(ConfigurationError, match=r"exists already|expected a name and a function"):
            register_hook(name, hook)
    with pytest.raises(ConfigurationError, match="unknown communication hook 'summend'"):
        CustomDDPStrategy(ddp_comm_hook="summend")


def doubled(hook):
    return lambda state, bucket: hook(state, bucket).then(lambda reduced: 2 * reduced.value())


def add_up_by_name(rank, world_size):
    register_hook("summed", summed)
    model = BucketedDDP(torch.nn.Linear(3, 1, bias=False))
    Communication("summed", wrapper=doubled).register(
        model, Group(model.process_group), torch.device("cpu"), node_size=2, loss_scale=lambda: 1.0
    )
    model(torch.full((1, 3), rank + 1.0)).backward()
    return model.module.weight.grad.tolist()


def test_a_registered_hook_reduces_gradients_inside_its_wrapper():
    assert run_ranks(add_up_by_name, 2) == [[[6.0] * 3]] * 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("powersdg", r"unknown communication hook 'powersdg'; did you mean 'powersgd'\?"),
        ("zzz", "unknown communication hook 'zzz'; expected allreduce, bf16"),
        ({"name": "topk", "ration": 0.1}, r"'topk' has no option 'ration'; did you mean 'ratio'\?"),
        ({"name": "topk", "k": 3}, "'topk' has no option 'k'; expected momentum, nesterov, start_step"),
        ({"name": "bf16", "k": 3}, "'bf16' has no option 'k'; it has none"),
        ({"name": "topk", "ratio": 0.0}, "'topk': ratio=0.0: expected above 0"),
        ({"name": "topk", "nesterov": True}, "needs a momentum above 0"),
        ({"name": "powersgd", "rank": 0}, "'powersgd': rank=0: expected at least 1"),
        ({"name": "int8", "block_size": 3}, "'int8': block_size=3: expected a multiple of 8"),
        ({"rank": 3}, "expected a name or a mapping with 'name'"),
        ([], "expected a name, a mapping with 'name', or a list"),
        (["powersgd", "bf16"], "'powersgd' cannot be wrapped around 'bf16'. Only bf16, fp16, fp8, int8 can"),
        (["bf16", "int8"], "'bf16' around 'int8': both encode the same numbers"),
        (["bf16", "fp16", "topk"], "'bf16', 'fp16' around 'topk': values are encoded once"),
        (["bf16", "sign"], "'sign', which sends no floating-point tensors"),
    ],
)
def test_a_specification_that_cannot_be_used_says_why(spec, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_hook(spec)


# ---------------------------------------------------------------- state


@remembering
@pytest.mark.parametrize("cap_mb", [25, 0.001], ids=["1 bucket", "3 buckets"])
def test_a_resumed_run_equals_the_undisturbed_one_bit_for_bit(spec, cap_mb):
    """Also over the rebuild of the buckets, which the second process does once more."""
    inputs = inputs_of(2, 8)
    undisturbed = reduce_steps(spec, inputs, cap_mb=cap_mb)

    def rank_main(rank, world_size, group):
        first = Run(group, spec, cap_mb=cap_mb)
        for grads in inputs[rank][:5]:
            first.step(grads)
        saved = first.hook.state_dict()
        second = Run(group, spec, cap_mb=cap_mb)
        assert second.hook.load_state_dict(saved, SHAPES) == []
        return [second.step(grads) for grads in inputs[rank][5:]]

    answers = run_threads(rank_main, 2)
    if not ("batched" in str(spec) and cap_mb < 1):
        # whose factors belong to a layout, and the first layout is back after a start
        assert_same_steps(answers, [(outputs[5:], None) for outputs, _ in undisturbed])


@remembering
@pytest.mark.parametrize("ends", ["undone", "by another rank"])
def test_a_step_may_be_undone_or_ended_by_what_another_rank_knows_of_it(spec, ends):
    inputs = inputs_of(2, 6)
    undisturbed = reduce_steps(spec, inputs, cap_mb=ONE_EACH_MB)
    states = [{}, {}]

    def rank_main(rank, world_size, group):
        run = Run(group, spec, cap_mb=ONE_EACH_MB)
        outputs = [run.step(grads) for grads in inputs[rank][:3]]
        mark = run.hook.mark()
        if ends == "undone":
            run.step(random_grads(rank, 99))
            run.hook.restore(mark)
            outputs.append(run.step(inputs[rank][3]))
        else:
            run.hook._end_step = run.hook._end_step if rank == 0 else lambda: None
            outputs.append(run.step(inputs[rank][3]))
            vars(run.hook).pop("_end_step")
            states[rank] = run.hook.state_dict() if rank == 0 else {}
            group.barrier().wait()
            if rank == 1:
                keys = run.hook.shared_keys
                tensors = {
                    name: {key: value for key, value in values.items() if key in keys}
                    for name, values in states[0]["tensors"].items()
                }
                run.hook.finish({**states[0], "tensors": tensors})
        return outputs + [run.step(grads) for grads in inputs[rank][4:]]

    assert_same_steps(run_threads(rank_main, 2), undisturbed)


def test_batched_factors_begin_anew_in_another_layout_and_the_residual_stays():
    spec = POWERSGD | {"batched": True}
    inputs = inputs_of(2, 4)

    def rank_main(rank, world_size, group):
        first = Run(group, spec, cap_mb=25)
        sent = [first.step(grads) for grads in inputs[rank][:3]]
        second = Run(group, spec, cap_mb=0.001)
        second.hook.load_state_dict(first.hook.state_dict())
        sent.append(second.step(inputs[rank][3]))
        return sent, second.state(), [n for n in second.hook.state_dict()["tensors"] if "bucket" in n]

    answers = run_threads(rank_main, 2)
    assert len(answers[0][2]) > 1, "one factor a bucket, those of the old layout are gone"
    for name, shape in SHAPES.items():
        residual = mean([errors[name].view(shape) for _, errors, _ in answers])
        came_in = mean([sum(g[name] for g in inputs[r]) for r in range(2)])
        total = sum(g[name].double() for g in answers[0][0])
        torch.testing.assert_close(total, came_in - residual, rtol=0, atol=1e-5)


@on_ranks(2)
def test_loading_says_what_it_cannot_keep(rank, group):
    hook = Run(group, "sign").hook
    Run(group, "sign").step(random_grads(rank, 0))
    state = hook.state_dict() | {"tensors": {"gone": {"error": torch.ones(3)}}}
    notes = hook.load_state_dict(state, SHAPES)
    other = Run(group, {"name": "topk", "ratio": 0.5}).hook
    notes += other.load_state_dict(state)
    notes += other.load_state_dict(other.state_dict() | {"options": {"ratio": 0.25}})
    with pytest.raises(ConfigurationError, match="has format 99, but this release reads 1"):
        hook.load_state_dict(state | {"format": 99})
    assert notes == [
        "state of hook 'sign' was dropped for unknown parameters: gone",
        "state of hook 'sign' was dropped, because the run uses 'topk'",
        "hook 'topk' was saved with other options: {'ratio': 0.25}",
    ]


# ---------------------------------------------------------------- mixed precision


@remembering
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_step_that_overflows_on_one_rank_leaves_no_trace(spec, value):
    """Other buckets of that step were finite and on their way: their state must not change either."""
    inputs = inputs_of(2, 6)
    undisturbed = reduce_steps(spec, inputs, cap_mb=ONE_EACH_MB)
    disturbed = [list(steps) for steps in inputs]
    for rank in range(2):
        extra = random_grads(rank, 99)
        if rank == 1:
            extra["second"][1, 2, 3] = value
        disturbed[rank].insert(3, extra)
    answers = reduce_steps(spec, disturbed, cap_mb=ONE_EACH_MB, finish=lambda run: run.hook.step)
    for outputs, step in answers:
        assert step == 6
        assert outputs.pop(3)["second"].isnan().all(), "on every rank, so that all skip the step"
    assert_same_steps([outputs for outputs, _ in answers], undisturbed)


@remembering
def test_what_the_host_learns_after_a_step_comes_to_the_same(spec):
    """As on CUDA, where neither the loss scale nor what is finite is known on the host in time."""
    inputs = inputs_of(2, 7)
    inputs[1][3]["second"][1, 2, 3] = math.nan
    if "batched" not in str(spec):  # its factors belong to all parameters of a bucket
        for rank, step, name in ((0, 2, "second"), (1, 2, "second"), (1, 5, "third")):
            del inputs[rank][step][name]

    def rank_main(rank, world_size, group, is_deferred):
        run = Run(group, spec, cap_mb=0.002, find_unused_parameters=True)
        run.hook.is_deferred = is_deferred
        run.hook.loss_scale = lambda: torch.tensor(256.0) if is_deferred else 256.0
        outputs = [run.step(grads) for grads in inputs[rank]]
        state = run.hook.state_dict()
        return [*outputs, *state["tensors"].values()], state["step"]

    deferred, at_once = (run_threads(rank_main, 2, is_deferred) for is_deferred in (True, False))
    for (found, num_steps), (expected, expected_steps) in zip(deferred, at_once, strict=True):
        assert num_steps == expected_steps == 6
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@remembering
def test_the_loss_scale_may_change(spec):
    inputs = inputs_of(2, 6)
    scales = [1.0, 1.0, 256.0, 512.0, 512.0, 8.0]
    plain = reduce_steps(spec, inputs)

    def rank_main(rank, world_size, group):
        run = Run(group, spec)
        outputs = []
        for grads, scale in zip(inputs[rank], scales, strict=True):
            run.hook.loss_scale = lambda scale=scale: scale
            scaled = run.step({name: grad * scale for name, grad in grads.items()})
            outputs.append({name: grad / scale for name, grad in scaled.items()})
        return outputs

    assert_same_steps(run_threads(rank_main, 2), plain)


def test_an_overflow_on_the_wire_is_one_on_all_ranks_and_leaves_no_trace():
    """Finite in float32, infinite in float16."""
    spec = ["fp16", {"name": "topk", "ratio": 0.05}]
    inputs = inputs_of(2, 3)
    inputs[1][1]["first"][0, 0] = 1e6
    answers = reduce_steps(spec, inputs, finish=lambda run: (run.hook.step, run.state()["first"]))
    for outputs, (step, residual) in answers:
        assert outputs[1]["first"].isnan().all()
        assert not outputs[2]["first"].isnan().any()
        assert step == 2
        assert residual.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", ["sign", {"name": "topk", "ratio": 0.05}, POWERSGD], ids=str)
def test_16_bit_gradients_have_a_float32_residual(spec, dtype):
    steps = [{"first": torch.full((24, 20), 1.0, dtype=dtype)} for _ in range(3)]
    for grads in steps:
        grads["first"][0, :10] = 2.0**-9  # lost if a 16-bit residual of 1 were added to it
    shapes = {"first": (24, 20)}
    answers = reduce_steps(spec, [steps, steps], finish=lambda run: run.state(), dtype=dtype, shapes=shapes)
    for outputs, residual in answers:
        assert outputs[0]["first"].dtype == dtype
        assert residual["first"].dtype == torch.float32


def test_float64_stays_float64():
    grads = {"first": torch.full((24, 20), 1 / 3, dtype=torch.float64)}
    spec = {"name": "topk", "ratio": 1.0}
    answers = reduce_steps(spec, [[grads]] * 2, dtype=torch.float64, shapes={"first": (24, 20)})
    assert answers[0][0][0]["first"].equal(grads["first"])


@pytest.mark.parametrize("spec", ["allreduce", "fp16", "bf16", "int8", "fp8", *REMEMBERING], ids=str)
def test_complex_gradients_are_compressed_as_pairs_of_real_ones(spec):
    shapes = {"first": (24, 20, 2), "bias": (9, 2)}
    pairs = inputs_of(2, 4, shapes)
    numbers = [
        [{n: torch.view_as_complex(g) for n, g in grads.items()} for grads in steps] for steps in pairs
    ]
    expected = reduce_steps(spec, pairs, shapes=shapes)
    shapes = {name: shape[:-1] for name, shape in shapes.items()}
    answers = reduce_steps(spec, numbers, shapes=shapes, dtype=torch.complex64)
    found = [[{n: torch.view_as_real(g) for n, g in out.items()} for out in outs] for outs, _ in answers]
    assert_same_steps(found, expected)


# ---------------------------------------------------------------- accumulation, absent parameters


@remembering
def test_accumulated_gradients_are_compressed_once_a_step(spec):
    inputs = inputs_of(2, 6)
    summed = [
        [{n: a[n] + b[n] for n in SHAPES} for a, b in zip(steps[::2], steps[1::2], strict=True)]
        for steps in inputs
    ]
    expected = reduce_steps(spec, summed)

    def rank_main(rank, world_size, group):
        run = Run(group, spec)
        outputs = []
        for first, second in zip(inputs[rank][::2], inputs[rank][1::2], strict=True):
            run.module.zero_grad()
            for grads, context in ((first, run.model.no_sync()), (second, nullcontext())):
                with context:
                    run.model(grads).backward()
            outputs.append({n: p.grad.clone() for n, p in run.module.named_parameters()})
        return outputs, run.hook.step

    answers = run_threads(rank_main, 2)
    assert [step for _, step in answers] == [3, 3]
    assert_same_steps([outputs for outputs, _ in answers], expected)


# batched factors belong to all parameters of a bucket
@pytest.mark.parametrize("spec", [spec for spec in REMEMBERING if "batched" not in str(spec)], ids=str)
@pytest.mark.parametrize("cap_mb", [25, ONE_EACH_MB])
def test_a_parameter_that_no_rank_used_keeps_its_state(spec, cap_mb):
    inputs = inputs_of(2, 6)
    for rank in range(2):
        for step in (2, 4):
            del inputs[rank][step]["second"]

    def rank_main(rank, world_size, group):
        run = Run(group, spec, cap_mb=cap_mb, find_unused_parameters=True)
        states = []
        for grads in inputs[rank]:
            output = run.step(grads)
            assert output.keys() == grads.keys()
            states.append(run.hook.state_dict()["tensors"].get("second", {}))
        return states

    for states in run_threads(rank_main, 2):
        for step in (2, 4):
            assert_same(states[step], states[step - 1])
        assert any(not states[3][key].equal(states[2][key]) for key in states[3]) or "q" in states[3]


@remembering
def test_a_parameter_that_one_rank_used_counts_as_zero_on_the_other(spec):
    inputs = inputs_of(2, 6)
    filled = [list(steps) for steps in inputs]
    for step in (2, 3):
        inputs[1][step] = {n: g for n, g in inputs[1][step].items() if n != "second"}
        filled[1][step] = inputs[1][step] | {"second": torch.zeros(SHAPES["second"])}
    expected = reduce_steps(spec, filled, find_unused_parameters=True)
    answers = reduce_steps(spec, inputs, find_unused_parameters=True)
    assert_same_steps([outputs for outputs, _ in answers], expected)


@pytest.mark.parametrize("finds_unused", [False, True], ids=["frozen", "unused"])
@remembering
def test_a_gradient_of_an_earlier_step_is_not_compressed_again(spec, finds_unused):
    inputs = inputs_of(2, 6)

    def rank_main(rank, world_size, group):
        runs = [Run(group, spec, find_unused_parameters=finds_unused) for _ in range(2)]
        for step, grads in enumerate(inputs[rank]):
            is_used = step % 2 == 0
            for run, clears in zip(runs, (True, False), strict=True):
                second = run.module.second
                second.requires_grad_(is_used or finds_unused)
                run.module.zero_grad()
                if not is_used and not clears:
                    second.grad = torch.full_like(second, torch.inf if step == 5 else 7.0)
                run.model(grads if is_used else {n: g for n, g in grads.items() if n != "second"}).backward()
                if not is_used:
                    assert (second.grad is None) == clears
                    second.grad = None
            names = grads.keys() if is_used else grads.keys() - {"second"}
            assert_same(*({name: run.module.get_parameter(name).grad for name in names} for run in runs))
            for tensors in zip(*(run.hook.state_dict()["tensors"].values() for run in runs), strict=True):
                assert_same(*tensors)

    run_threads(rank_main, 2)


def test_a_mean_to_which_one_rank_alone_adds_is_kept():
    inputs = inputs_of(2, 2)
    del inputs[1][1]["second"]

    def rank_main(rank, world_size, group):
        run = Run(group, {"name": "topk", "ratio": 1.0}, find_unused_parameters=True)
        for grads in inputs[rank]:
            run.model(grads).backward()
        return run.module.second.grad

    first = mean([inputs[rank][0]["second"] for rank in range(2)])
    for found in run_threads(rank_main, 2):
        torch.testing.assert_close(found.double(), first + inputs[0][1]["second"] / 2, rtol=1e-5, atol=1e-6)


def test_a_rank_without_input_uses_no_parameter():
    inputs = inputs_of(2, 3)
    del inputs[0][2]["second"], inputs[1][2]

    def rank_main(rank, world_size, group):
        run = Run(group, {"name": "topk", "ratio": 0.05}, find_unused_parameters=True)
        for grads in inputs[rank]:
            before = run.state()
            run.step(grads)
        if rank == 1:
            before = run.state()
            run.model.reducer.shadow_backward()
        return before, run.state()

    for before, after in run_threads(rank_main, 2):
        assert before["second"].equal(after["second"])
        assert not before["first"].equal(after["first"])


def test_an_interrupted_backward_keeps_the_gradient_of_a_frozen_parameter():
    inputs = inputs_of(2, 1)

    def rank_main(rank, world_size, group):
        run = Run(group, "allreduce")
        before = run.step(inputs[rank][0])["second"]
        run.module.second.requires_grad_(False)
        handle = run.module.first.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.model(inputs[rank][0]).backward()
        handle.remove()
        run.model(inputs[rank][0])
        assert run.module.second.grad.equal(before)

    run_threads(rank_main, 2)


# ---------------------------------------------------------------- bytes

TRANSFORMER = {
    name.replace(".", "_"): tuple(parameter.shape)
    for name, parameter in build_workload("transformer6", rank=0).module.layers[0].named_parameters()
}
"""One of the six layers of the bench's transformer; they are alike, and it has no parameter besides."""


def bytes_of(run):
    return run.hook.channel.num_bytes_sent


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        ("allreduce", 1.0),
        ("fp16", 0.51),
        ("bf16", 0.51),
        ("int8", 0.27),
        ("fp8", 0.27),
        ({"name": "powersgd", "rank": 2, "start_step": 0}, 0.05),
        (["bf16", {"name": "powersgd", "rank": 2, "start_step": 0}], 0.025),
        ({"name": "topk", "ratio": 0.01}, 0.03),
        ({"name": "randomk", "ratio": 0.01}, 0.011),
        ("sign", 0.033),
    ],
    ids=str,
)
def test_bytes_sent_in_a_step_as_part_of_uncompressed_float32(spec, limit):
    full = 4 * sum(math.prod(shape) for shape in TRANSFORMER.values())  # 2 (N-1)/N x size
    sent = reduce_steps(spec, inputs_of(2, 1, TRANSFORMER), shapes=TRANSFORMER, finish=bytes_of)[0][1]
    assert 0.2 * limit < sent / full <= limit
    assert spec != "allreduce" or sent == full


@pytest.mark.parametrize("codec", [Int8Codec(64), Fp8Codec(64)])
@pytest.mark.parametrize("numel", [64, 263])
def test_one_rank_alone_decodes_what_it_has_encoded(codec, numel):
    """A single row counts as contiguous with any stride, also with one that float32 does not divide."""
    row = torch.randn(1, numel, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(codec.decode(codec.encode(row), numel), row, rtol=0, atol=0.3)


@pytest.mark.parametrize("spec", ["bf16", "int8", {"name": "powersgd", "start_step": 0}])
def test_traffic_does_not_grow_with_the_world_size(spec):
    sent = {}
    for world_size in (2, 4):
        inputs = inputs_of(world_size, 1, TRANSFORMER)
        answers = reduce_steps(spec, inputs, shapes=TRANSFORMER, finish=bytes_of)
        sent[world_size] = answers[0][1] / (2 * (world_size - 1) / world_size)
    assert sent[4] == pytest.approx(sent[2], rel=0.02)


# ---------------------------------------------------------------- failures


def test_many_buckets_of_two_collectives_each_do_not_deadlock():
    shapes = {f"p{i:02}": (12, 10) for i in range(40)}
    spec = {"name": "powersgd", "rank": 1, "start_step": 0, "min_compression": 1}
    inputs = inputs_of(3, 3, shapes)
    answers = reduce_steps(
        spec, inputs, shapes=shapes, cap_mb=ONE_EACH_MB, finish=lambda run: len(run.model.reducer.buckets)
    )
    assert [num_buckets for _, num_buckets in answers] == [40] * 3


def reduce_on_a_bare_group(rank, world_size, folder, inputs):
    """As `reduce_steps`, on a group that torch does not know; the ranks are not at the same place."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=20)
    group = dist.ProcessGroupGloo(dist.FileStore(f"{folder}/store", world_size), rank, world_size, options)
    run = Run(group, "sign", cap_mb=ONE_EACH_MB, find_unused_parameters=True)
    delays = random.Random(rank)
    outputs = []
    for grads in inputs[rank]:
        time.sleep(delays.uniform(0, 0.003))
        outputs.append(run.step(grads))
    return outputs


def test_on_a_group_without_a_store_the_engine_and_a_hook_keep_one_order(tmp_path):
    inputs = inputs_of(3, 20)
    answers = run_ranks(reduce_on_a_bare_group, 3, str(tmp_path), inputs, process_group=False)
    expected = reduce_steps("sign", inputs, cap_mb=ONE_EACH_MB)
    assert_same_steps(answers, expected)


@on_ranks(1)
def test_state_by_name_needs_names(group):
    class Bucket:
        def parameters(self):
            return [torch.zeros(3)]

        def buffer(self):
            return torch.zeros(3)

    hook = build_hook("sign", Group(group))
    with pytest.raises(ConfigurationError, match=r"keeps its state by parameter name.*has no `names`"):
        hook(None, Bucket())

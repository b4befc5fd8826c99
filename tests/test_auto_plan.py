"""`bucket_cap_mb="auto"`: what it measures, tries and keeps, and that it changes no gradient."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import host_with, run_ranks, run_threads
from torch import Tensor, nn

from lightning_ddp import BucketedDDP, CustomDDPStrategy
from lightning_ddp.comm.cost import TransferCost
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.parallel.probing import TransportCost

NUM_STEPS = 40
WIDTH = 16
NUM_LAYERS = 6
TRANSPORT = TransportCost(transfer=TransferCost(latency_s=0.1, seconds_per_byte=0.001), launch_s=0.01)
"""Where gradients come a second apart, it pays to send the first ones soon."""


@pytest.fixture(autouse=True)
def spare_processors() -> Iterator[None]:
    """Buckets are reduced beside the backward, whatever machine this is."""
    with host_with(99):
        yield


class Layers(nn.Module):
    """Six layers; their gradients fit into one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)])
        generator = torch.Generator().manual_seed(5)  # ranks are threads, and share the default one
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.25, 0.25, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers(x))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))


class Clock:
    """Advances by `tick_s` with each reading, and by `other_s` while there are more buckets than at first."""

    def __init__(self, model: BucketedDDP, tick_s: float = 1.0, other_s: float = 1.0) -> None:
        self.model, self.tick_s, self.other_s = model, tick_s, other_s
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.tick_s if len(self.model.reducer.buckets) == 1 else self.other_s
        return self.now_s


def sizes(model: BucketedDDP) -> tuple[int, ...]:
    return tuple(bucket.flat.numel() * bucket.flat.element_size() for bucket in model.reducer.buckets)


def auto(group: Any, module: nn.Module | None = None, **options: Any) -> BucketedDDP:
    return BucketedDDP(module or Layers(), process_group=group, bucket_cap_mb="auto", **options)


def be_sure_to_try(model: BucketedDDP) -> None:
    """As the times are given: a computed plan is tried, and takes as long as the default one, which stays."""
    plan = model.reducer.auto_plan
    plan.times.clock = Clock(model)
    plan.transport = TRANSPORT


def step_through(model: BucketedDDP, rank: int, num_steps: int = NUM_STEPS) -> list[tuple[int, ...]]:
    """Trains; the sizes of the buckets in each backward."""
    seen = []
    for step in range(num_steps):
        loss = model(batch(rank, step)).square().sum()
        seen.append(sizes(model))
        model.zero_grad()
        loss.backward()
    return seen


def gradients(model: BucketedDDP) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"static_graph": True, "gradient_as_bucket_view": False}, marks=pytest.mark.slow),
        pytest.param({"transport": "shared_memory"}, marks=pytest.mark.slow),
        pytest.param({"batched_grad_copy": True}, marks=pytest.mark.slow),
    ],
    ids=["gloo", "static graph, no views", "shared memory", "one copy a bucket"],
)
def test_every_step_has_the_gradients_of_the_fixed_plan(options, world_size) -> None:
    def rank_main(rank, world_size, group):
        fixed, model = BucketedDDP(Layers(), process_group=group, **options), auto(group, **options)
        be_sure_to_try(model)
        plans = set()
        for step in range(NUM_STEPS):
            is_local = step % 3 == 1  # gradients accumulate over two of three steps
            for wrapper in (fixed, model):
                with wrapper.no_sync() if is_local else nullcontext():
                    before = gradients(wrapper)
                    loss = wrapper(batch(rank, step)).square().sum()
                    assert all(map(torch.equal, gradients(wrapper), before))
                    if not is_local:
                        wrapper.zero_grad(set_to_none=step % 2 == 0)
                    loss.backward()
            plans.add(sizes(model))
            torch.testing.assert_close(gradients(model), gradients(fixed), rtol=1e-6, atol=1e-7)
        for wrapper in (fixed, model):
            wrapper.teardown()
        return plans

    first, *others = run_threads(rank_main, world_size)
    assert len(first) == 2
    assert all(plans == first for plans in others)


@pytest.mark.slow
def test_what_is_measured_leaves_gradients_alone_and_tells_bytes_from_the_transport() -> None:
    def rank_main(rank, world_size, group):
        model = auto(group, nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)]))
        for step in range(12):
            x = torch.randn(2, 256, generator=torch.Generator().manual_seed(step))
            before = gradients(model)
            loss = model(x).sum()
            assert all(map(torch.equal, gradients(model), before))
            model.zero_grad()
            loss.backward()
        return model.reducer.auto_plan or model.bucket_plan_report

    for known in run_threads(rank_main, 2):
        assert known.transport.transfer.seconds(0) >= 0
        assert 0 < known.transport.launch_s < known.transport.transfer.seconds(1 << 20) < 10


def uneven(rank: int, world_size: int) -> Any:
    """Rank 0 runs out in the middle of the contest, in a second epoch rank 1 does so sooner."""
    results = []
    for cap_mb in (25, "auto"):
        model = BucketedDDP(Layers(), bucket_cap_mb=cap_mb)
        if cap_mb == "auto":
            be_sure_to_try(model)
        seen = []
        for counts in ((12, 16), (30, 10)):
            with model.join():
                for step in range(counts[rank]):
                    model.zero_grad()
                    model(batch(rank, step)).square().sum().backward()
                    seen.append(gradients(model))
                    with torch.no_grad():  # a forward that is no step
                        model(batch(rank, step))
        results.append((seen, model))
    (fixed, _), (seen, model) = results
    torch.testing.assert_close(seen, fixed, rtol=1e-6, atol=1e-7)
    report = model.bucket_plan_report
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert other.bucket_plan_report is None
        be_sure_to_try(other)
        assert len(set(step_through(other, rank))) == 2  # looks for a plan by itself
    return report


@pytest.mark.slow
def test_ranks_that_run_out_of_inputs_take_part_and_copies_begin_anew() -> None:
    first, second = run_ranks(uneven, 2)
    assert first == second
    assert first.measured_s > 0
    assert first.measured_default_s > 0


@pytest.mark.slow
def test_a_backward_that_fails_on_all_ranks_is_no_obstacle() -> None:
    def rank_main(rank, world_size, group):
        model = auto(group)
        be_sure_to_try(model)
        for step in (0, 1, 2, 3):
            x = batch(rank, step).requires_grad_()
            loss = model(x).square().sum()
            model.zero_grad()
            if step == 2:
                x.register_hook(lambda grad: 1 / 0)  # once all gradients of parameters are there
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
            else:
                loss.backward()
        timed = model.reducer.auto_plan.times.backwards
        assert [backward.step for backward in timed] == [0, 1, 3]
        # the readings of the failed one are not among those of the next
        assert sorted(timed[-1].ready_s.values()) == list(range(1, 2 * NUM_LAYERS + 1))
        seen = step_through(model, rank)
        return len(set(seen)), model.bucket_plan_report.backward_s

    assert run_threads(rank_main, 2) == [(2, 2.0 * NUM_LAYERS + 2)] * 2


@pytest.mark.parametrize(("other_s", "choice"), [(0.5, "measured"), (2.0, "default")])
def test_the_plan_that_proves_faster_stays_on_all_ranks_whatever_each_has_measured(
    other_s, choice, caplog
) -> None:
    caplog.set_level(logging.INFO, "lightning_ddp")

    def rank_main(rank, world_size, group):
        model = auto(group)
        plan = model.reducer.auto_plan
        speed = (1.0, 3.0, 0.2)[rank]
        plan.times.clock = Clock(model, 1.0 * speed, other_s * speed)
        plan.transport = TRANSPORT
        seen = step_through(model, rank)
        assert model.reducer.auto_plan is None
        assert model.reducer._hooks.mark == model.reducer._ready.append  # nothing of it is left
        return seen, model.bucket_plan_report

    (seen, report), *others = run_threads(rank_main, 3)
    assert all(other == (seen, report) for other in others)
    assert report.choice == choice
    default, computed = seen[1], seen[6]
    assert seen == [default] * 6 + ([computed] * 4 + [default] * 4) * 3 + [report.bucket_bytes] * 10
    assert len(computed) > len(default) == 1
    assert sum(computed) == sum(default) == 4 * NUM_LAYERS * (WIDTH + 1) * WIDTH
    assert report.bucket_bytes == (computed if choice == "measured" else default)
    # gradients come a reading apart, and the launch a reading after the last one;
    # a step counts with the rank that came last, which is the fast one
    assert report.backward_s == pytest.approx(3.0 * (2 * NUM_LAYERS + 2))
    assert report.predicted_default_s == pytest.approx(
        3.0 * (2 * NUM_LAYERS + 1) + 0.1 + 0.001 * sum(default)
    )
    assert report.predicted_s < 0.97 * report.predicted_default_s
    assert report.measured_default_s == pytest.approx(2 * 0.2)
    assert report.measured_s == pytest.approx(2 * 0.2 * other_s)
    (line,) = [record.getMessage() for record in caplog.records if "auto" in record.getMessage()]
    kept = "chose a plan" if choice == "measured" else "keeps the default plan"
    assert line.startswith(f"bucket_cap_mb='auto' {kept}, {len(report.bucket_bytes)} bucket"), line
    assert "medians of 9 and 9 steps (a bucket takes 1e+02 ms and 0 MB/s)" in line


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(8, WIDTH, sparse=True), nn.Linear(WIDTH, 1))


def several_dtypes() -> nn.Module:
    module = Layers()
    module.layers[0].bias = nn.Parameter(module.layers[0].bias.double())
    return module


OBSTACLES = {
    "one rank": (1, Layers, {}, "there is one rank"),
    "unused": (2, Layers, {"find_unused_parameters": True}, "with find_unused_parameters=True"),
    "sparse": (2, sparse, {}, "there are sparse gradients"),
    "dtypes": (2, several_dtypes, {}, "gradients of several dtypes"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "module", "options", "reason"), OBSTACLES.values(), ids=OBSTACLES)
def test_where_nothing_can_be_measured_the_default_plan_stays_with_a_warning(
    world_size, module, options, reason, caplog
) -> None:
    def rank_main(rank, world_size, group):
        model = auto(group, module(), **options)
        model.reducer.rebuild()
        return model.bucket_plan_report, model.reducer.auto_plan

    for report, rest in run_threads(rank_main, world_size):
        assert rest is None
        assert report.choice == "default"
        assert reason in report.reason
    (record,) = [r for r in caplog.records if r.name == "lightning_ddp" and "auto" in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert reason in record.getMessage()


@pytest.mark.slow
def test_where_buckets_are_reduced_after_the_backward_the_default_plan_stays() -> None:
    def rank_main(rank, world_size, group):
        model = auto(group, transport="shared_memory")
        model.reducer.rebuild()
        return model.bucket_plan_report.reason

    with host_with(1):
        reasons = run_threads(rank_main, 2)
    assert all("reduced after the backward" in reason for reason in reasons)


def average(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 3, 8])
def test_a_communication_hook_brings_the_default_plan_back(step, caplog) -> None:
    def rank_main(rank, world_size, group):
        model = auto(group)
        be_sure_to_try(model)
        before = step_through(model, rank, step)
        model.register_comm_hook(None, average)
        return before, step_through(model, rank, 3), model.bucket_plan_report

    for before, after, report in run_threads(rank_main, 2):
        assert [len(plan) > 1 for plan in before] == [False] * min(step, 6) + [True] * max(0, step - 6)
        assert [len(plan) for plan in after] == [1] * 3
        assert "a communication hook" in report.reason
    (record,) = [r for r in caplog.records if r.name == "lightning_ddp" and "auto" in r.getMessage()]
    assert record.levelno == logging.WARNING


@pytest.mark.slow
def test_parameters_that_take_turns_keep_the_default_plan() -> None:
    def rank_main(rank, world_size, group):
        model = auto(group)
        be_sure_to_try(model)
        for step in range(8):
            model.module.layers[0].requires_grad_(step % 2 == 0)
            model.zero_grad()
            model(batch(rank, step)).square().sum().backward()
        return len(sizes(model)), model.bucket_plan_report.reason

    expected = (1, "the parameters that get gradients differ from step to step")
    assert run_threads(rank_main, 2) == [expected] * 2


@pytest.mark.slow
def test_a_small_gain_is_not_tried() -> None:
    def rank_main(rank, world_size, group):
        model = auto(group)
        model.reducer.auto_plan.transport = TransportCost(
            transfer=TransferCost(latency_s=0.0, seconds_per_byte=0.0), launch_s=0.0
        )
        return set(step_through(model, rank, 8)), model.bucket_plan_report

    for plans, report in run_threads(rank_main, 2):
        assert len(plans) == 1
        assert "less than 3% is not worth a change" in report.reason
        assert report.measured_s is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"bucket_cap_mb": "25"},
            "bucket_cap_mb='25': expected a size in MiB, 'auto' for .*, or None",
        ),
        ({"bucket_cap_mb": "auto", "bucket_cap_mb_list": [1.0]}, "'auto' with bucket_cap_mb_list=.*one of"),
    ],
)
def test_another_text_and_two_answers_are_refused(arguments, message) -> None:
    def rank_main(rank, world_size, group):
        with pytest.raises(ConfigurationError, match=message):
            BucketedDDP(nn.Linear(2, 2), process_group=group, **arguments)

    run_threads(rank_main, 1)
    with pytest.raises(ConfigurationError, match=message):
        CustomDDPStrategy(**arguments)

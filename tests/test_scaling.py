"""Predicted steps: closed forms of the simulation, networks by hand, traced hooks, profiles of recordings."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from typing import Any

import pytest
import torch
from harness import run_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_ddp import BucketedDDP
from lightning_ddp.averaging import parse_averager
from lightning_ddp.ddp.layout import bucket_caps_bytes
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.hooks import build_hook
from lightning_ddp.hooks.base import Part
from lightning_ddp.telemetry.step_record import BucketRecord, StepRecord
from lightning_ddp.telemetry.timeline import Recording
from lightning_ddp.tools.hook_program import HookModel, Send, Wait, Work, plain_model, trace_hook
from lightning_ddp.tools.perf_model import (
    Network,
    SimulatedStep,
    StepProfile,
    TransferCost,
    cut_sizes,
    predict_averager,
    predict_hook,
    recommend_buckets,
    simulate,
)

FREE = Network(hop=TransferCost(latency_s=0, seconds_per_byte=0))
LINK = Network(hop=TransferCost(latency_s=0.25, seconds_per_byte=0.01))
"""An all-reduce of n bytes by two ranks takes half a second and n / 100."""


def profile_of(*ready: tuple[int, float], end: float = 4.0, rest: float = 0.5) -> StepProfile:
    return StepProfile(backward_start_s=1.0, ready=ready, backward_end_s=end, rest_s=rest)


def plain_step(profile: StepProfile, network: Network = LINK, **options: Any) -> SimulatedStep:
    programs = plain_model([size for size, _ in profile.ready]).programs(2)
    return simulate(profile, programs, network, 2, is_queued=False, **options)


# ---------------------------------------------------------------------- simulation


@pytest.mark.parametrize(
    ("ready", "done", "exposed"),
    [
        pytest.param([(100, 4.0)], [5.5], 1.5, id="one bucket, nothing hidden"),
        pytest.param([(100, 2.0)], [3.5], 0.0, id="all hidden"),
        pytest.param([(100, 2.0), (100, 3.0), (50, 4.0)], [3.5, 5.0, 6.0], 2.0, id="one after the other"),
        pytest.param([(100, 1.0), (100, 3.0)], [2.5, 4.5], 0.5, id="the link waits in between"),
    ],
)
def test_buckets_pass_the_link_one_after_the_other(ready, done, exposed) -> None:
    step = plain_step(profile_of(*ready))
    assert step.done_s == pytest.approx(done)
    assert step.exposed_s == pytest.approx(exposed)
    assert step.step_s == pytest.approx(4.0 + exposed + 0.5)


def test_one_collective_passes_while_another_waits_for_a_hop() -> None:
    network = Network(hop=LINK.hop, num_in_flight=2)
    step = plain_step(profile_of((100, 2.0), (100, 2.0), (100, 2.0)), network)
    assert step.done_s == pytest.approx([3.5, 4.5, 5.5])


def test_without_cost_a_step_is_what_is_computed() -> None:
    profile = profile_of((100, 2.0), (100, 4.0))
    assert plain_step(profile, FREE).step_s == pytest.approx(profile.compute_s) == pytest.approx(4.5)
    assert predict_hook(profile, plain_model([100, 100]), LINK, 1).exposed_s == 0.0


def test_a_hook_delays_backward_only_where_they_share_a_core() -> None:
    program = (Work(seconds=1.0), Send(kind="all_reduce", num_bytes=0, ticket=0), Wait(ticket=0))
    profile = profile_of((100, 2.0))
    alone = simulate(profile, [program], FREE, 2)
    assert (alone.done_s[0], alone.backward_end_s) == pytest.approx((3.0, 4.0))
    shared = simulate(profile, [program], FREE, 2, cores=1.0)
    assert (shared.done_s[0], shared.backward_end_s) == pytest.approx((4.0, 5.0))


def test_sending_takes_its_part_of_the_core() -> None:
    network = Network(hop=LINK.hop, cpu_seconds_per_byte=0.0075)
    step = plain_step(profile_of((100, 2.0)), network, cores=1.0)
    # 1.5 s on the link with half a core: backward computes 0.75 s meanwhile
    assert (step.done_s[0], step.backward_end_s) == pytest.approx((3.5, 4.75))


def test_one_thread_takes_buckets_in_turn_and_encodes_one_piece_while_another_is_sent() -> None:
    def send(ticket: int) -> Send:
        return Send(kind="all_reduce", num_bytes=50, ticket=ticket)  # a second

    pieces = (Work(seconds=1.0), send(0), Work(seconds=1.0), send(1), Wait(ticket=0), Wait(ticket=1))
    step = simulate(profile_of((100, 2.0), (100, 2.0)), [pieces, pieces], LINK, 2)
    assert step.done_s == pytest.approx([5, 8])


def test_what_cannot_be_played_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="2 programs for 1 buckets"):
        simulate(profile_of((1, 2.0)), [(), ()], LINK, 2)
    with pytest.raises(ConfigurationError, match="waits for a collective that it has not started"):
        simulate(profile_of((1, 2.0)), [(Wait(ticket=3),)], LINK, 2)
    with pytest.raises(ConfigurationError, match="without buckets"):
        profile_of()


moments = st.floats(0, 1)


@settings(max_examples=60, deadline=None)
@given(
    gaps=st.lists(st.tuples(st.integers(0, 10**8), moments), min_size=1, max_size=6),
    work=moments,
    slow=st.floats(1e-10, 1e-7),
    factor=st.floats(0.1, 1.0),
    num_ranks=st.sampled_from([2, 3, 64]),
)
def test_a_faster_link_never_makes_a_step_longer(gaps, work, slow, factor, num_ranks) -> None:
    times = [sum(gap for _, gap in gaps[: i + 1]) for i in range(len(gaps))]
    ready = tuple((size, moment) for (size, _), moment in zip(gaps, times, strict=True))
    profile = StepProfile(backward_start_s=0.0, ready=ready, backward_end_s=times[-1], rest_s=0.1)
    programs = tuple(
        (Work(seconds=work), Send(kind="all_gather", num_bytes=size, ticket=0), Wait(ticket=0))
        for size, _ in gaps
    )
    hook = HookModel(few=programs, many=programs)

    def step(seconds_per_byte: float) -> float:
        network = Network(hop=TransferCost(latency_s=1e-4, seconds_per_byte=seconds_per_byte))
        found = predict_hook(profile, hook, network, num_ranks)
        assert 0 < found.compute_s <= found.step_s + 1e-9
        return found.step_s

    assert step(slow * factor) <= step(slow) + 1e-9


@settings(max_examples=40, deadline=None)
@given(
    buckets=st.lists(st.tuples(st.lists(st.integers(1, 10**7), min_size=1, max_size=5), moments), min_size=1),
    latency_s=st.floats(0, 0.1),
    num_ranks=st.sampled_from([2, 64]),
)
def test_recommended_buckets_take_no_longer_than_the_recorded_ones(buckets, latency_s, num_ranks) -> None:
    times = [sum(gap for _, gap in buckets[: i + 1]) for i in range(len(buckets))]
    ready = tuple((4 * sum(sizes), at) for (sizes, _), at in zip(buckets, times, strict=True))
    profile = StepProfile(backward_start_s=0.0, ready=ready, backward_end_s=times[-1], rest_s=0.1)
    network = Network(hop=TransferCost(latency_s=latency_s, seconds_per_byte=1e-9), num_in_flight=2)
    shapes = [(size,) for sizes, _ in buckets for size in sizes]
    plan = recommend_buckets(profile, shapes, network, num_ranks)
    assert plan.step_s <= plan.recorded_s + 1e-9
    assert min(plan.caps_mb) > 0
    # what the list is said to lead to is what the reducer makes of it
    ends = cut_sizes([4 * size for (size,) in shapes], bucket_caps_bytes(None, list(plan.caps_mb)))
    sums = [sum(4 * size for (size,) in shapes[a:b]) for a, b in pairwise([0, *ends])]
    found = predict_hook(profile.rebucketed(sums), plain_model(sums), network, num_ranks)
    assert found.step_s == pytest.approx(plan.step_s)


# ---------------------------------------------------------------------- networks


@pytest.mark.parametrize(
    ("options", "kind", "num_ranks", "fixed", "sent"),
    [
        ({}, "all_reduce", 2, 0.5, 100),
        ({}, "all_reduce", 4, 1.5, 150),
        ({}, "all_to_all", 4, 0.75, 75),
        ({}, "all_gather", 4, 0.75, 300),
        ({}, "all_reduce", 1, 0, 0),
        ({"algorithm": "tree"}, "all_reduce", 64, 3.0, 196.875),
        # 3 nodes of 4: a ring of 3, and 6 hops of 1 s and 150 bytes of 0.1 s within the node
        ({"algorithm": "hierarchical", "ranks_per_node": 4}, "all_reduce", 12, 1.0 + 6 + 15, 400 / 3),
        # the link of a node takes the 4 rows' parts that leave it, of 4 ranks; they come through 3 hops
        ({"algorithm": "ring", "ranks_per_node": 4}, "all_to_all", 12, 2.75, 4 * 100 * 8 / 12),
        # 8 ranks elsewhere; 3 of the node and those 8 are read within it
        ({"algorithm": "hierarchical", "ranks_per_node": 4}, "all_gather", 12, 0.5 + 6 + 110, 800),
        # rows for 2 other nodes, after each of the node's ranks has handed its own to the other 3
        ({"algorithm": "hierarchical", "ranks_per_node": 4}, "all_to_all", 12, 13.5, 4 * 100 * 8 / 12),
        # one node alone: nothing passes the link
        ({"algorithm": "ring", "ranks_per_node": 4}, "all_to_all", 4, 3 + 7.5, 0),
        ({"algorithm": "ring", "ranks_per_node": 4}, "all_reduce", 4, 6 + 15, 0),
    ],
)
def test_collectives_cost_what_is_found_by_hand(options, kind, num_ranks, fixed, sent) -> None:
    node_hop = TransferCost(latency_s=1.0, seconds_per_byte=0.1)
    found = Network(hop=LINK.hop, node_hop=node_hop, **options).transfer(kind, 100, num_ranks)
    assert (found.fixed_s, found.link_bytes) == pytest.approx((fixed, sent))


# ---------------------------------------------------------------------- averagers


def test_a_round_is_spread_over_its_period() -> None:
    profile = profile_of((3000, 2.0), (1000, 4.0))
    round_s = LINK.seconds(LINK.transfer("all_reduce", 4000, 8))
    for spec, expected in [
        ({"name": "post_local_sgd", "period": 10}, round_s / 10),
        ({"name": "diloco", "period": 20, "encoding": "bf16"}, (3.5 + 0.01 * 1.75 * 2000) / 20),
        # a quarter of the bytes every 10 steps, of which 2 steps of 4.5 s hide some
        (
            {"name": "streaming_diloco", "period": 40, "num_fragments": 4, "delay": 2},
            (3.5 + 17.5 - 9) / 10,
        ),
        # of 4 steps one among all, one among two
        (
            {"name": "hierarchical_sgd", "periods": {2: 2, 4: 0}},
            (round_s + LINK.seconds(LINK.transfer("all_reduce", 4000, 2))) / 4,
        ),
    ]:
        found = predict_averager(profile, parse_averager(spec), LINK, 8)
        assert found.exposed_s == pytest.approx(expected), spec
        assert found.step_s == pytest.approx(4.5 + expected)
        assert predict_averager(profile, parse_averager(spec), LINK, 1).exposed_s == 0.0


def test_chunks_of_parameters_wait_for_hops_together_where_they_may() -> None:
    chunk = 2**22
    profile = profile_of((2 * chunk, 2.0), (chunk // 2, 4.0))
    plan = parse_averager({"name": "post_local_sgd", "period": 1})
    for num_in_flight, expected in ((1, 3 * 2 + 2.5), (2, (2 + 1) + 1.5 + 1.25)):
        hop = TransferCost(latency_s=1.0, seconds_per_byte=1 / chunk)
        network = Network(hop=hop, num_in_flight=num_in_flight)
        found = predict_averager(profile, plan, network, 2).exposed_s
        assert found == pytest.approx(expected), num_in_flight


def test_gradients_averaged_within_the_node_cost_their_part() -> None:
    network = Network(hop=LINK.hop, ranks_per_node=2, node_hop=LINK.hop)
    spec = {"name": "post_local_sgd", "period": 10, "intra_node_gradients": True}
    found = predict_averager(profile_of((100, 4.0)), parse_averager(spec), network, 4)
    round_s = network.seconds(network.transfer("all_reduce", 100, 4))
    assert found.exposed_s == pytest.approx(round_s / 10 + 1.5)


def test_groups_that_do_not_divide_the_ranks_are_refused() -> None:
    plan = parse_averager({"name": "hierarchical_sgd", "periods": {2: 4, 4: 0}})
    with pytest.raises(ConfigurationError, match="with 6 ranks"):
        predict_averager(profile_of((1, 2.0)), plan, LINK, 6)


# ---------------------------------------------------------------------- hooks

SHAPES = (((64, 32), (64,)), ((48, 40), (3,)))
SPECS: tuple[Any, ...] = (
    "allreduce",
    "bf16",
    "int8",
    {"name": "powersgd", "rank": 2, "start_step": 0},
    {"name": "topk", "ratio": 0.1},
    "sign",
    {"name": "randomk", "ratio": 0.1},
    ["bf16", {"name": "powersgd", "rank": 2, "start_step": 0}],
)


def num_bytes_sent(model: HookModel, num_ranks: int) -> float:
    """Bytes that a rank sends in a step when the backend uses a ring, as hooks count them."""
    others = num_ranks - 1
    factors = {
        "all_reduce": 2 * others / num_ranks,
        "all_to_all": others / num_ranks,
        "all_gather": others,
    }
    sends = [op for program in model.programs(num_ranks) for op in program if isinstance(op, Send)]
    return sum(factors[op.kind] * op.num_bytes for op in sends)


@pytest.mark.slow
def test_a_traced_hook_sends_what_the_hook_sends() -> None:
    def rank_main(rank: int, world_size: int, process_group: Any) -> list[int]:
        sent = []
        for spec in SPECS:
            hook = build_hook(spec, process_group)
            for index, shapes in enumerate(SHAPES):
                numel = sum(math.prod(shape) for shape in shapes)
                part = Part(
                    buffer=torch.randn(numel),
                    names=tuple(f"{index}.{i}" for i in range(len(shapes))),
                    shapes=shapes,
                    absent=frozenset(),
                    index=index,
                    is_last=index == len(SHAPES) - 1,
                    loss_scale=1.0,
                )
                hook.channel.wait(hook.channel.submit(lambda hook=hook, part=part: hook.run(part)))
            sent.append(hook.channel.num_bytes_sent)
        return sent

    for num_ranks in (2, 3):
        (sent, *_) = run_threads(rank_main, num_ranks)
        for spec, expected in zip(SPECS, sent, strict=True):
            model = trace_hook(spec, SHAPES, num_runs=1)
            assert num_bytes_sent(model, num_ranks) == pytest.approx(expected, rel=0.02), spec


def test_a_hook_is_traced_as_it_is_after_its_warm_up() -> None:
    late, now = ({"name": "powersgd", "rank": 2, "start_step": start} for start in (1000, 0))
    found, expected = (num_bytes_sent(trace_hook(spec, SHAPES, num_runs=1), 2) for spec in (late, now))
    assert found == expected < num_bytes_sent(plain_model([4 * 2112, 4 * 1923]), 2)


def test_gathered_shares_of_all_ranks_grow_and_parts_of_a_whole_shrink() -> None:
    def sizes(spec: Any, num_ranks: int) -> list[tuple[str, float]]:
        programs = trace_hook(spec, [((4096,),)], num_runs=1).programs(num_ranks)
        return [(op.kind, op.num_bytes) for op in programs[0] if isinstance(op, Send)]

    assert sizes("bf16", 8) == [("all_to_all", 8192), ("all_gather", 1024)]
    assert sizes("bf16", 64) == [("all_to_all", 8192), ("all_gather", 128)]
    for num_ranks in (2, 64):
        assert sizes({"name": "topk", "ratio": 0.25}, num_ranks)[1:] == [("all_gather", 4096)] * 2
    few, many = (
        (Work(seconds=seconds), Send(kind="all_gather", num_bytes=10, ticket=0), Work(seconds=1.0))
        for seconds in (1.0, 4.0)
    )
    model = HookModel(few=(few,), many=(many,), num_few=2, num_many=8)
    assert model.programs(14)[0][0] == Work(seconds=7.0)
    assert model.programs(14)[0][2] == Work(seconds=1.0)


# ---------------------------------------------------------------------- profiles

MS = 1_000_000


def recording_of(rank: int, steps: list[tuple[int, int, int]], world_size: int = 2) -> Recording:
    """Steps of (number, start, when the second bucket is ready) in milliseconds; 100 and 300 bytes."""
    records = [
        StepRecord(
            number,
            *((start + moment) * MS for moment in (0, 5, 10, 20)),
            comm_end=(start + 32) * MS,
            buckets=[
                BucketRecord(0, 100, *((start + moment) * MS for moment in (12, 12, 18))),
                BucketRecord(1, 300, *((start + moment) * MS for moment in (late, late, 30))),
            ],
        )
        for number, start, late in steps
    ]
    return Recording(rank=rank, world_size=world_size, host="here", steps=records)


def test_a_profile_is_the_median_step_of_the_slowest_rank() -> None:
    first = recording_of(0, [(0, 0, 15), (1, 40, 15), (2, 80, 16), (3, 120, 15)])
    second = recording_of(1, [(1, 7, 18), (2, 47, 15), (3, 87, 19)])  # it has another clock, and no step 0
    profile = StepProfile.from_recordings([first, second])
    assert profile.ready == ((100, pytest.approx(0.012)), (300, pytest.approx(0.018)))
    assert (profile.backward_start_s, profile.backward_end_s) == pytest.approx((0.010, 0.020))
    # 8 ms from one step to the next, and 2 ms from the last bucket to the end of the step
    assert profile.rest_s == pytest.approx(0.010)
    assert profile.compute_s == pytest.approx(0.030)


def test_recordings_that_tell_too_little_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no complete step in common"):
        StepProfile.from_recordings([recording_of(0, [(0, 0, 15)]), recording_of(1, [(1, 0, 15)])])
    with pytest.raises(ConfigurationError, match="rank 0 has recorded no two consecutive steps"):
        StepProfile.from_recordings([recording_of(0, [(0, 0, 15), (2, 80, 15)])])


def test_other_buckets_become_ready_between_the_known_moments() -> None:
    profile = profile_of((100, 2.0), (300, 4.0)).rebucketed([50, 50, 150, 150])
    assert profile.ready == ((50, 1.5), (50, 2.0), (150, 3.0), (150, 4.0))
    with pytest.raises(ConfigurationError, match="buckets of 50 bytes for 400"):
        profile.rebucketed([50])


def test_a_recorded_run_predicts_itself() -> None:
    def rank_main(rank: int, world_size: int, process_group: Any) -> Recording:
        torch.manual_seed(0)
        layers = [nn.Linear(256, 256) for _ in range(6)]
        model = BucketedDDP(nn.Sequential(*layers), process_group=process_group, bucket_cap_mb=0.5)
        recorder = model.record_steps()
        for _ in range(8):
            model(torch.ones(8, 256)).sum().backward()
        return Recording(rank=rank, world_size=2, host="here", steps=list(recorder.records))

    recordings = run_threads(rank_main, 2)
    profile = StepProfile.from_recordings(recordings)
    assert profile.num_bytes == 4 * 6 * (256 * 256 + 256)
    assert len(profile.ready) == len(recordings[0].steps[-1].buckets) > 2
    # a link on which the collectives take what they took: the step is as long as it was
    steps = recordings[0].steps
    exposed_s = statistics.median(step.exposed_s for step in steps)
    network = Network(hop=TransferCost(latency_s=exposed_s / len(profile.ready) / 2, seconds_per_byte=0.0))
    found = predict_hook(profile, plain_model([size for size, _ in profile.ready]), network, 2)
    period_s = (steps[-1].forward_start - steps[-5].forward_start) / 4e9
    assert 0.1 < found.step_s / period_s < 10
    assert profile.compute_s <= found.step_s <= profile.compute_s + exposed_s + 1e-9

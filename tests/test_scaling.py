"""`bench scaling`: fitted links, schedules and averagers by hand, profiles of recordings, whole runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from harness.namespaces import can_shape_links
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddp.__main__ import main
from lightning_ddp.averaging import parse_averager
from lightning_ddp.encoding.mean import CHUNK_NUMEL
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.telemetry.step_record import BucketRecord, StepRecord
from lightning_ddp.telemetry.timeline import Recording, save
from lightning_ddp.tools.bench import scaling
from lightning_ddp.tools.bench.scaling import (
    Calibration,
    HookCost,
    Link,
    StepProfile,
    fit_line,
    fit_link,
    parse_contender,
    predict,
    predict_averager,
    schedule,
)

LINE = {"latency_s": 0.25, "seconds_per_byte": 0.01}
LINK = Link(**LINE)
"""An all-reduce of n bytes by two ranks takes half a second and n / 100."""
MS = 1_000_000


def profile_of(*ready: tuple[int, float], end: float = 4.0, rest: float = 0.5) -> StepProfile:
    return StepProfile(backward_start_s=1.0, ready=ready, backward_end_s=end, rest_s=rest)


# ---------------------------------------------------------------------- the line of a link


@settings(deadline=None)
@given(latency_s=st.floats(1e-6, 1e-1), rate=st.floats(1e6, 1e11))
def test_a_line_is_found_again(latency_s: float, rate: float) -> None:
    sizes = [0, 4096, 1 << 20, 1 << 24]
    exact = [latency_s + size / rate for size in sizes]
    fitted_s, seconds_per_byte = fit_line(list(zip(sizes, exact, strict=True)))
    assert [fitted_s + n * seconds_per_byte for n in sizes] == pytest.approx(exact, rel=1e-6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(1e-6, 1e3)), min_size=1, max_size=8))
def test_no_part_of_a_line_is_negative_whatever_was_measured(samples: list[tuple[int, float]]) -> None:
    assert min(fit_line(samples)) >= 0


@pytest.mark.parametrize("samples", [[], [(10, 0.0)]])
def test_samples_without_time_are_refused(samples: list[tuple[int, float]]) -> None:
    with pytest.raises(ConfigurationError, match="seconds above 0"):
        fit_line(samples)


def test_the_cost_of_a_link_is_found_in_its_probes() -> None:
    # 2 ms of two latencies and 1 ns a byte; CPU half of that
    probes = [(float(n), 2e-3 + n * 1e-9, n * 5e-10) for n in scaling._PROBE_BYTES]
    found = fit_link(probes * 3, is_cpu=True)
    assert (found.latency_s, found.seconds_per_byte) == pytest.approx((1e-3, 1e-9))
    assert found.cpu_seconds_per_byte == pytest.approx(5e-10)
    assert fit_link(probes, is_cpu=False).cores == math.inf


# ---------------------------------------------------------------------- schedules

ENCODES = HookCost(size_ratio=0.5, codec_s=0.01, gathers=False)
GATHERS = HookCost(size_ratio=0.5, codec_s=0.01, gathers=True)


@pytest.mark.parametrize(
    ("ready", "options", "num_ranks", "hook", "done"),
    [
        pytest.param([(100, 2.0), (100, 3.0), (50, 4.0)], {}, 2, None, [3.5, 5.0, 6.0], id="in a queue"),
        pytest.param([(100, 1.0), (100, 3.0)], {}, 2, None, [2.5, 4.5], id="the link waits in between"),
        pytest.param(
            [(100, 2.0)] * 3, {"num_in_flight": 2}, 2, None, [3.5, 4.5, 5.5], id="hops of two at once"
        ),
        pytest.param([(100, 2.0)], {}, 1, ENCODES, [2.0], id="a rank alone"),
        pytest.param([(100, 0.0)], {}, 4, None, [1.5 + 1.5], id="a ring"),
        pytest.param([(100, 0.0)], {"algorithm": "tree"}, 64, None, [3.0 + 1.96875], id="a tree"),
        pytest.param(
            [(100, 0.0)], {"cpu_seconds_per_byte": 0.02}, 2, None, [2.5], id="no faster than the CPU"
        ),
        pytest.param(
            [(100, 2.0)] * 2, {"num_in_flight": 2}, 2, ENCODES, [4.0, 6.0], id="a hook in one thread"
        ),
        # twice the data of a rank is decoded; it passes three hops
        pytest.param([(100, 0.0)], {"algorithm": "tree"}, 4, GATHERS, [0.75 + 1.5 + 2], id="gathers"),
    ],
)
def test_collectives_pass_the_link_one_after_the_other(ready, options, num_ranks, hook, done) -> None:
    assert schedule(ready, Link(**LINE, **options), num_ranks, hook)[0] == pytest.approx(done)


def test_a_step_ends_with_backward_its_last_bucket_or_the_work_of_its_cores() -> None:
    hidden, exposed = profile_of((100, 2.0)), profile_of((100, 2.0), (100, 4.0))
    assert predict(hidden, LINK, 2) == pytest.approx(4.5) == hidden.compute_s
    assert predict(exposed, LINK, 2) == pytest.approx(5.5 + 0.5)
    busy = Link(**LINE, cpu_seconds_per_byte=0.01, cores=1.0)
    assert predict(hidden, busy, 2) == pytest.approx(4 + 1 + 0.5)


@settings(max_examples=60, deadline=None)
@given(
    gaps=st.lists(st.tuples(st.integers(0, 10**8), st.floats(0, 1)), min_size=1, max_size=6),
    slow=st.floats(1e-10, 1e-7),
    factor=st.floats(0.1, 1.0),
    num_ranks=st.sampled_from([2, 3, 64]),
    hook=st.sampled_from([None, ENCODES, GATHERS]),
)
def test_a_faster_link_never_makes_a_step_longer(gaps, slow, factor, num_ranks, hook) -> None:
    times = [sum(gap for _, gap in gaps[: i + 1]) for i in range(len(gaps))]
    ready = [(size, moment) for (size, _), moment in zip(gaps, times, strict=True)]
    profile = profile_of(*ready, end=times[-1], rest=0.1)
    fast_s, slow_s = (
        predict(profile, Link(latency_s=1e-4, seconds_per_byte=s), num_ranks, hook)
        for s in (slow * factor, slow)
    )
    assert profile.compute_s <= fast_s <= slow_s + 1e-9


# ---------------------------------------------------------------------- averagers


@pytest.mark.parametrize(
    ("spec", "exposed_s"),
    [
        ({"name": "post_local_sgd", "period": 10}, (3.5 + 0.01 * 1.75 * 4000) / 10),
        ({"name": "diloco", "period": 20, "encoding": "bf16"}, (3.5 + 0.01 * 1.75 * 2000) / 20),
        # a quarter of the bytes every 10 steps, of which 2 steps of 4.5 s hide some
        ({"name": "streaming_diloco", "period": 40, "num_fragments": 4, "delay": 2}, (3.5 + 17.5 - 9) / 10),
    ],
)
def test_a_round_is_spread_over_its_period(spec: dict[str, Any], exposed_s: float) -> None:
    profile, plan = profile_of((3000, 2.0), (1000, 4.0)), parse_averager(spec)
    assert predict_averager(profile, plan, LINK, 8) == pytest.approx(4.5 + exposed_s)
    assert predict_averager(profile, plan, LINK, 1) == profile.compute_s


def test_chunks_of_parameters_wait_for_hops_together_where_they_may() -> None:
    chunk = 4 * CHUNK_NUMEL
    profile, plan = profile_of((2 * chunk, 2.0), (chunk // 2, 4.0)), {"name": "post_local_sgd", "period": 1}
    for num_in_flight, expected in ((1, 3 * 2 + 2.5), (2, (2 + 1) + 2 + 0.5)):
        link = Link(latency_s=1.0, seconds_per_byte=1 / chunk, num_in_flight=num_in_flight)
        found = predict_averager(profile, parse_averager(plan), link, 2)
        assert found - profile.compute_s == pytest.approx(expected), num_in_flight


# ---------------------------------------------------------------------- profiles


def recording_of(rank: int, steps: list[tuple[int, int, int]]) -> Recording:
    """Steps of (number, start, when the second bucket is ready) in milliseconds; 2 and 6 MB."""
    records = [
        StepRecord(
            number,
            *((start + moment) * MS for moment in (0, 5, 10, 20)),
            comm_end=(start + 32) * MS,
            buckets=[
                BucketRecord(0, 2_000_000, *((start + moment) * MS for moment in (12, 12, 18))),
                BucketRecord(1, 6_000_000, *((start + moment) * MS for moment in (late, late, 30))),
            ],
        )
        for number, start, late in steps
    ]
    return Recording(rank=rank, world_size=2, host="here", steps=records)


def test_a_profile_is_the_median_step_of_the_slowest_rank() -> None:
    first = recording_of(0, [(0, 0, 15), (1, 40, 15), (2, 80, 16), (3, 120, 15), (4, 160, 15)])
    second = recording_of(1, [(1, 7, 18), (2, 47, 15), (3, 87, 19), (4, 127, 15)])  # another clock, no step 0
    profile = StepProfile.from_recordings([first, second])
    assert profile.ready == ((2_000_000, pytest.approx(0.012)), (6_000_000, pytest.approx(0.018)))
    assert (profile.backward_start_s, profile.backward_end_s) == pytest.approx((0.010, 0.020))
    assert profile.rest_s == pytest.approx(0.010)  # from the last bucket to the next forward
    assert profile.compute_s == pytest.approx(0.030)


@pytest.mark.parametrize("second", [[(1, 0, 15), (2, 40, 15)], [(0, 0, 15), (2, 80, 15)], []])
def test_recordings_that_tell_too_little_are_refused(second: list[tuple[int, int, int]]) -> None:
    recordings = [recording_of(0, [(0, 0, 15), (1, 40, 15)]), recording_of(1, second)]
    with pytest.raises(ConfigurationError, match="no two consecutive steps in common"):
        StepProfile.from_recordings(recordings)


def test_other_buckets_become_ready_between_the_known_moments() -> None:
    profile = profile_of((100, 2.0), (300, 4.0)).rebucketed([50, 150])
    assert profile.ready == (
        (50, 1.5),
        (150, pytest.approx(2 + 2 / 3)),
        (150, pytest.approx(3 + 2 / 3)),
        (50, 4.0),
    )


# ---------------------------------------------------------------------- the command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps of 30 ms, in which 2 and 6 MB of gradients become ready; 10 ms between them."""
    for rank in range(2):
        save(tmp_path / "steps", recording_of(rank, [(0, 0, 20), (1, 40, 20)]))
    return tmp_path / "steps"


NETWORK = ["--latency-us", "100", "--gbit", "8"]


def test_a_timeline_becomes_tables_a_file_and_a_picture(
    folder: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    hooks = {"none": None, "bf16": HookCost(size_ratio=0.5, codec_s=0.0, gathers=False)}
    checks_ms = {"none": (11.0, 10.0)}
    here = Calibration(profile=profile_of((1, 2.0)), link=LINK, hooks=hooks, checks_ms=checks_ms)
    monkeypatch.setattr(scaling, "calibrate", lambda args, specs: here)
    written, picture = tmp_path / "a.json", tmp_path / "a.svg"
    options = ["--ranks", "1", "2", "4096", "--averagers", "post_local_sgd:period=4", "--bucket-caps-mb", "1"]
    command = ["bench", "scaling", "--from-timeline", str(folder), *NETWORK, *options]
    assert main([*command, "--json", str(written), "--plot", str(picture)]) == 0
    summary = json.loads(written.read_text())["summary"]
    assert summary["hop"] == {"latency_s": 1e-4, "seconds_per_byte": 1e-9}
    steps = {name: [p["step_s"] for p in of] for name, of in summary["predictions"].items()}
    assert list(steps) == ["none", "bf16", "post_local_sgd:period=4", "bucket_cap_mb=1"]
    # of two ranks: 6.2 ms after the 20 ms of backward, then 10 ms; of 4,096: 8,190 hops for each bucket
    assert steps["none"] == pytest.approx([0.030, 0.0362, 2 * 0.819 + 0.016 + 0.012 + 0.010], rel=1e-3)
    assert steps["bf16"][1] == pytest.approx(0.0332)
    assert [p["efficiency"] for p in summary["predictions"]["none"][:2]] == pytest.approx([1.0, 30 / 36.2])
    assert steps["post_local_sgd:period=4"][1] == pytest.approx(0.030 + (0.008 + 2 * 0.0002) / 4)
    printed = capsys.readouterr().out
    for text in ("efficiency, %, by ranks", "step, ms, by ranks", "1.100", "100.0 us + 1 ns per byte, ring"):
        assert text in printed
    drawing = picture.read_text()
    for title in (str(folder), "efficiency (%)", "ranks", *steps):
        assert f"<!-- {title} -->" in drawing, title


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--from-timeline needs the network. Pass --latency-us and --gbit"),
        ([*NETWORK, "--hooks", "intt8"], "unknown communication hook 'intt8'"),
        ([*NETWORK, "--hooks", "int8:block"], "expected NAME:option=value"),
        ([*NETWORK, "--averagers", "dilocco"], "unknown averager 'dilocco'"),
        ([*NETWORK, "--averagers", "hierarchical_sgd:periods={2:0}"], "links between groups are not modeled"),
    ],
)
def test_what_cannot_be_predicted_is_refused_before_anything_is_measured(
    options, message, folder, capsys, monkeypatch
) -> None:
    monkeypatch.delattr(scaling, "calibrate")
    assert main(["bench", "scaling", "--from-timeline", str(folder), *options]) == 1
    assert message in capsys.readouterr().err


def test_contenders_are_read_with_their_options() -> None:
    assert parse_contender("bf16") == {"name": "bf16"}
    assert parse_contender("a:x=1,y='z'") == {"name": "a", "x": 1, "y": "z"}
    for text in ("a:1", "a:**{'x': 1}", "a:x=y", "a:x=1)(", "a:x=f()"):
        with pytest.raises(ConfigurationError, match="expected NAME:option=value"):
            parse_contender(text)


@pytest.mark.slow
@pytest.mark.xdist_group("namespaces")
@pytest.mark.skipif(not can_shape_links(), reason="needs root and iproute2 to make network namespaces")
def test_measured_steps_on_a_link_are_predicted(tmp_path: Path) -> None:
    written = tmp_path / "a.json"
    options = ["--model", "convbn40", "--link", "40", "--steps", "6", "--hooks", "none", "bf16"]
    assert main(["bench", "scaling", *options, "--json", str(written)]) == 0
    summary = json.loads(written.read_text())["summary"]
    assert summary["hop"]["seconds_per_byte"] == pytest.approx(8 / 40e6, rel=0.15)
    assert list(summary["checks_ms"]) == ["none", "bf16"]
    predicted_ms, measured_ms = summary["checks_ms"]["none"]
    assert 0.5 < predicted_ms / measured_ms < 2  # a busy machine delays both; the command prints the ratio

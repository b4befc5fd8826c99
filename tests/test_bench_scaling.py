"""`bench scaling`: from options to tables, files, pictures and buckets; a run on a link."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.namespaces import can_shape_links

from lightning_ddp import BucketedDDP
from lightning_ddp.cli import main
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.telemetry.step_record import BucketRecord, StepRecord
from lightning_ddp.telemetry.timeline import Recording, load_folder, save
from lightning_ddp.tools.bench.scaling import LinkCost, parse_contender
from lightning_ddp.tools.hook_program import plain_model
from lightning_ddp.tools.models import build_workload, compute_loss
from lightning_ddp.tools.perf_model import Network, StepProfile, TransferCost, predict_hook
from lightning_ddp.tools.ranks import RankContext, run_ranks
from lightning_ddp.tools.recorded_run import RecordSettings, record_steps

MS = 1_000_000
SMALL = ["--hooks", "none", "bf16", "--averagers", "post_local_sgd:period=4"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two steps of 30 ms, in which 2 and 6 MB of gradients become ready; 10 ms between them."""
    steps = [
        StepRecord(
            number,
            *((start + moment) * MS for moment in (0, 5, 10, 20)),
            comm_end=(start + 30) * MS,
            buckets=[
                BucketRecord(0, 2_000_000, *((start + moment) * MS for moment in (12, 12, 18))),
                BucketRecord(1, 6_000_000, *((start + moment) * MS for moment in (20, 20, 30))),
            ],
        )
        for number, start in ((0, 0), (1, 40))
    ]
    for rank in range(2):
        save(tmp_path / "steps", Recording(rank=rank, world_size=2, host="here", steps=steps))
    return tmp_path / "steps"


@pytest.mark.slow
def test_a_timeline_becomes_tables_a_file_and_a_picture(folder: Path, tmp_path: Path, capsys) -> None:
    written, picture = tmp_path / "a.json", tmp_path / "a.svg"
    network = ["--latency-us", "100", "--gbit", "8", "--ranks", "1", "2", "4096"]
    files = ["--json", str(written), "--plot", str(picture)]
    assert main(["bench", "scaling", "--from-timeline", str(folder), *network, *SMALL, *files]) == 0
    document = json.loads(written.read_text())
    assert document["benchmark"] == "scaling"
    assert document["summary"]["network"]["hop"] == {"latency_s": 1e-4, "seconds_per_byte": 1e-9}
    curves = {curve["contender"]: curve["predictions"] for curve in document["summary"]["predictions"]}
    assert list(curves) == ["none", "bf16", "post_local_sgd:period=4"]
    assert [p["num_ranks"] for p in curves["none"]] == [1, 2, 4096]
    # of two ranks: 6.2 ms after the 20 ms of backward, then 10 ms; without communication 30 ms
    assert curves["none"][0]["step_s"] == pytest.approx(0.030)
    assert curves["none"][1]["step_s"] == pytest.approx(0.0362)
    # of 4,096: 8,190 hops, which the buckets wait for together, and nearly twice the bytes
    assert curves["none"][2]["exposed_s"] == pytest.approx(0.819 + 0.012, rel=0.01)
    assert curves["post_local_sgd:period=4"][1]["exposed_s"] == pytest.approx((0.008 + 0.0002) / 4)
    printed = capsys.readouterr().out
    assert "steps: efficiency, %, by ranks" in printed
    assert "square matrices as large as the buckets" in printed
    drawing = picture.read_text()
    assert "<svg" in drawing
    for title in ("steps", "efficiency (%)", *curves):
        assert f"<!-- {title} -->" in drawing, title


def test_bucket_plans_are_compared(folder: Path, tmp_path: Path) -> None:
    written = tmp_path / "a.json"
    network = ["--latency-us", "1", "--gbit", "8", "--ranks", "2", "--hooks", "none", "--averagers"]
    plans = ["--bucket-caps-mb", "1", "25", "--json", str(written)]
    assert main(["bench", "scaling", "--from-timeline", str(folder), *network, *plans]) == 0
    found = {
        c["subject"]: c["predictions"][0] for c in json.loads(written.read_text())["summary"]["predictions"]
    }
    assert list(found) == ["steps, 1 MiB", "steps, 25 MiB"]
    assert found["steps, 1 MiB"]["exposed_s"] < found["steps, 25 MiB"]["exposed_s"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Pass --latency-us and --gbit"),
        (["--gbit", "1"], "Pass both"),
        (["--gbit", "1", "--latency-us", "1", "--hooks", "intt8"], "unknown communication hook 'intt8'"),
        (["--gbit", "1", "--latency-us", "1", "--hooks", "int8:block"], "expected NAME:option=value"),
        (["--gbit", "1", "--latency-us", "1", "--averagers", "dilocco"], "unknown averager 'dilocco'"),
    ],
)
def test_what_cannot_be_predicted_is_said(options, message, folder: Path, capsys) -> None:
    assert main(["bench", "scaling", "--from-timeline", str(folder), *options]) == 1
    assert message in capsys.readouterr().err


def test_a_folder_without_recordings_is_named(tmp_path: Path, capsys) -> None:
    assert (
        main(["bench", "scaling", "--from-timeline", str(tmp_path), "--gbit", "1", "--latency-us", "1"]) == 1
    )
    assert f"{tmp_path} has no recording" in capsys.readouterr().err


def test_contenders_are_read_with_their_options() -> None:
    assert parse_contender("bf16") == {"name": "bf16"}
    assert parse_contender("a:x=1,y='z'") == {"name": "a", "x": 1, "y": "z"}
    for text in ("a:1", "a:**{'x': 1}", "a:x=y", "a:x=1)(", "a:x=f()"):
        with pytest.raises(ConfigurationError, match="expected NAME:option=value"):
            parse_contender(text)


@pytest.mark.slow
def test_two_ranks_record_trace_and_probe_here(tmp_path: Path, capsys) -> None:
    written = tmp_path / "a.json"
    command = ["bench", "scaling", "--models", "convbn40", "--steps", "2", "--ranks", "1", "2", *SMALL]
    assert main([*command, "--json", str(written)]) == 0
    document = json.loads(written.read_text())
    assert document["summary"]["network"]["hop"]["seconds_per_byte"] > 0
    assert document["summary"]["network"]["cpu_seconds_per_byte"] > 0
    assert {curve["subject"] for curve in document["summary"]["predictions"]} == {"convbn40"}
    for curve in document["summary"]["predictions"]:
        assert all(0 < p["compute_s"] <= p["step_s"] for p in curve["predictions"])
    assert "collectives between two processes of this machine" in capsys.readouterr().out


def test_the_cost_of_a_link_is_found_in_its_probes() -> None:
    # 2 ms of two latencies and 1 ns a byte; CPU half of that
    probes = [[n, 2e-3 + n * 1e-9, n * 5e-10] for n in (4096.0, 1e6, 8e6)]
    found = LinkCost.of([probes, probes])
    assert (found.hop.latency_s, found.hop.seconds_per_byte) == pytest.approx((1e-3, 1e-9))
    assert found.cpu_seconds_per_byte == pytest.approx(5e-10)


# ---------------------------------------------------------------------- buckets


def bucket_sizes(context: RankContext, caps_mb: list[float] | None) -> list[int]:
    """Bytes of the buckets with which `transformer6` is trained."""
    workload = build_workload("transformer6", rank=context.rank)
    model = BucketedDDP(workload.module, bucket_cap_mb_list=caps_mb)
    recorder = model.record_steps()
    gradients = []
    for _ in range(3):
        model.zero_grad()
        compute_loss(model(workload.batch)).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    mean = gradients[-1].clone()
    dist.broadcast(mean, 0)
    assert torch.equal(mean, gradients[-1]), "ranks have other gradients"
    return [bucket.num_bytes for bucket in list(recorder.records)[-1].buckets]


@pytest.mark.slow
def test_the_buckets_of_a_recorded_run_can_be_used_and_take_no_longer(tmp_path: Path, capsys) -> None:
    folder, written = tmp_path / "steps", tmp_path / "a.json"
    settings = RecordSettings(model="transformer6", folder=str(folder), num_steps=4)
    run_ranks(record_steps, settings, world_size=2, timeout_s=240)
    network = ["--latency-us", "50", "--gbit", "2"]
    options = ["--hooks", "none", "--averagers", "--json", str(written)]
    assert main(["bench", "scaling", "--from-timeline", str(folder), *network, *options]) == 0
    (plan,) = json.loads(written.read_text())["summary"]["bucket_plans"]["steps"]
    assert plan["num_ranks"] == 2
    assert f"bucket_cap_mb_list={plan['caps_mb']}" in capsys.readouterr().out
    profile = StepProfile.from_recordings(load_folder(folder))
    hop = Network(hop=TransferCost(latency_s=5e-5, seconds_per_byte=4e-9), num_in_flight=2)

    def step_s(sizes: list[int]) -> float:
        found = predict_hook(profile.rebucketed(sizes), plain_model(sizes), hop, 2)
        return found.step_s

    default, sizes = (
        run_ranks(bucket_sizes, caps_mb, world_size=2, timeout_s=240)[0]
        for caps_mb in (None, plan["caps_mb"])
    )
    assert default == [size for size, _ in profile.ready]
    assert sizes != default
    assert plan["step_s"] <= plan["recorded_s"] == pytest.approx(step_s(default))
    assert step_s(sizes) <= step_s(default)


# ---------------------------------------------------------------------- a link


@pytest.mark.slow
@pytest.mark.xdist_group("namespaces")
@pytest.mark.skipif(not can_shape_links(), reason="needs root and iproute2 to make network namespaces")
def test_a_run_on_a_link_is_predicted_from_its_recording(tmp_path: Path) -> None:
    settings = RecordSettings(model="convbn40", folder=str(tmp_path), num_steps=5)
    run_ranks(record_steps, settings, world_size=2, timeout_s=240, mbit=20.0)
    recordings = load_folder(tmp_path)
    profile = StepProfile.from_recordings(recordings)
    network = Network(hop=TransferCost(latency_s=2e-4, seconds_per_byte=8 / 20e6), num_in_flight=2)
    plain = plain_model([size for size, _ in profile.ready])
    found = predict_hook(profile, plain, network, 2)
    steps = recordings[0].steps
    starts = [step.forward_start for step in steps]
    measured_s = statistics.median(after - before for before, after in pairwise(starts))
    # nothing is faster than its bytes, which take 600 ms
    assert found.step_s >= profile.num_bytes * 8 / 20e6
    assert 0.7 < found.step_s / (measured_s / 1e9) < 1.3

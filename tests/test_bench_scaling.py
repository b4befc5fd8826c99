"""`bench scaling`: from options to tables, files and pictures; validation where namespaces are permitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_ddp.cli import main
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.hooks import parse_hook
from lightning_ddp.observe.record import BucketRecord, StepRecord
from lightning_ddp.observe.recording import Recording, save
from lightning_ddp.tools.bench.calibration import LinkRunSettings, Measured, load_figures, run_on_link
from lightning_ddp.tools.bench.links import can_shape_links, run_linked
from lightning_ddp.tools.bench.predicting import parse_contender
from lightning_ddp.tools.bench.validation import CASES, Outcome, format_outcomes
from lightning_ddp.tools.perf_model import predict_hook
from lightning_ddp.tools.perf_model.network import Network

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
    assert document["network"]["hop"] == {"latency_s": 1e-4, "seconds_per_byte": 1e-9}
    curves = {curve["contender"]: curve["predictions"] for curve in document["predictions"]}
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
    found = {c["subject"]: c["predictions"][0] for c in json.loads(written.read_text())["predictions"]}
    assert list(found) == ["steps, 1 MiB", "steps, 25 MiB"]
    assert found["steps, 1 MiB"]["exposed_s"] < found["steps, 25 MiB"]["exposed_s"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --latency-us and --gbit"),
        (["--gbit", "1"], "give both"),
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
    assert f"{tmp_path} holds no recording" in capsys.readouterr().err


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
    assert document["network"]["hop"]["seconds_per_byte"] > 0
    assert document["network"]["cpu_seconds_per_byte"] > 0
    assert {curve["subject"] for curve in document["predictions"]} == {"convbn40"}
    for curve in document["predictions"]:
        assert all(0 < p["compute_s"] <= p["step_s"] for p in curve["predictions"])
    assert "collectives between two processes of this machine" in capsys.readouterr().out


def test_the_cost_of_a_link_is_found_in_its_probes() -> None:
    # 2 ms of two latencies and 1 ns a byte; CPU half of that
    probes = [[n, 2e-3 + n * 1e-9, n * 5e-10] for n in (4096.0, 1e6, 8e6)]
    found = Measured.of([probes, probes])
    assert (found.hop.latency_s, found.hop.seconds_per_byte) == pytest.approx((1e-3, 1e-9))
    assert found.cpu_seconds_per_byte == pytest.approx(5e-10)
    # where a link saves up during a latency, large collectives take what their bytes take
    probes = [[n, max(2e-3, n * 1e-9), 0.0] for n in (4096.0, 1e6, 4e6, 8e6)]
    found = Measured.of([probes, probes], burst_bytes=2_000_000)
    assert (found.hop.latency_s, found.hop.seconds_per_byte) == pytest.approx((1e-3, 1e-9))


def test_errors_are_of_the_median_step() -> None:
    outcome = Outcome(
        model="m", hook="int8", mbit=100.0, predicted_s=0.9, compute_s=0.5, measured_s=(0.5, 1.0, 7.0),
        latency_s=1e-3, seconds_per_byte=8e-8,
    )  # fmt: skip
    assert outcome.error == pytest.approx(-0.1)
    text = format_outcomes([outcome])
    assert text.splitlines()[2].split() == [
        "m",
        "int8",
        "100",
        "500.000",
        "900.000",
        "1000.000",
        "3250.000",
        "-10.000",
    ]
    assert "1 of 1 predictions within 15%; the worst: 10.0%" in text
    assert "the link of 100 Mbit/s: a message takes 1000 us and 100.0 Mbit/s" in text


def test_at_least_six_cases_are_held_out() -> None:
    cases = [(mbit, *case) for mbit, of_link in CASES.items() for case in of_link]
    assert len(cases) >= 6
    assert min(len({case[i] for case in cases}) for i in (0, 1, 2)) >= 3
    for _, _, _, spec in cases:
        assert spec is None or parse_hook(spec)


def test_without_iproute2_validation_says_so(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["bench", "scaling", "--validate", "--links", "100"]) == 1
    assert "shaped links need iproute2" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.xdist_group("namespaces")
@pytest.mark.skipif(not can_shape_links(), reason="needs root and iproute2 to make network namespaces")
def test_a_link_is_measured_beside_what_predicts_it(tmp_path: Path) -> None:
    settings = LinkRunSettings(
        cases=(("convbn40", "bf16", "bf16"),), num_rounds=2, num_probes=1, folder=str(tmp_path)
    )
    results = run_linked(run_on_link, settings, 100.0, 240.0)
    found = load_figures(tmp_path, "convbn40", [result["rests"] for result in results])
    hop = Measured.of([result["probes"] for result in results], 50_000).hop
    assert 8 / hop.seconds_per_byte < 110e6, "the link is no faster than asked for"
    hook = found.hooks["bf16"]
    assert hook.num_bytes_sent(2) == pytest.approx(2 * 40 * (32 * 32 * 9 + 32 + 64), rel=0.01)
    # nothing is faster than its bytes, which take 60 ms; a loaded machine may be slower by any factor
    step_s = predict_hook(found.profile, hook, Network(hop=hop), 2).step_s
    assert step_s > 0.99 * max(found.profile.compute_s, hook.num_bytes_sent(2) * hop.seconds_per_byte)
    for steps in zip(*(result["seconds"][0] for result in results), strict=True):
        assert max(steps) > 0.8 * hook.num_bytes_sent(2) * 8 / 100e6

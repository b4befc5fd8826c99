"""Recordings of steps as files, on one time axis, as a Chrome trace and as a picture."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import on_ranks, run_ranks, run_threads
from torch import nn

from lightning_ddp import BucketedDDP
from lightning_ddp.__main__ import main
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.telemetry.step_record import BucketRecord, StepRecord
from lightning_ddp.telemetry.timeline import Change, Recording, chrome_trace, lanes_of, load_folder, save
from lightning_ddp.tools.recorded_run import KINDS, host_advice

MS = 1_000_000


def step_of(number: int, *buckets: tuple[int, int, int], start: int) -> StepRecord:
    """Milliseconds: forward 0 to 5, backward 10 to 20; buckets are (ready, launched, done)."""
    return StepRecord(
        number,
        *((start + moment) * MS for moment in (0, 5, 10, 20)),
        comm_end=(start + max(done for _, _, done in buckets)) * MS,
        buckets=[
            BucketRecord(i, 1000 * (i + 1), *((start + moment) * MS for moment in moments))
            for i, moments in enumerate(buckets)
        ],
    )


def recording_of(rank: int, steps: list[StepRecord]) -> Recording:
    return Recording(rank=rank, world_size=2, host=f"host{rank}", steps=steps)


def two_ranks(clock_ms: int = 0) -> list[Recording]:
    """Rank 1 becomes ready 3 ms later; its clock differs from rank 0's."""
    first = [step_of(n, (12, 12, 18), (15, 16, 30), start=100 * n) for n in range(3)]
    second = [step_of(n, (15, 15, 18), (18, 19, 30), start=100 * n + clock_ms) for n in range(1, 4)]
    return [recording_of(0, first), recording_of(1, second)]


@pytest.mark.parametrize("clock_ms", [0, 7_000_000, -31])
def test_clocks_are_shifted_until_the_ends_of_collectives_agree(clock_ms) -> None:
    lanes = lanes_of(two_ranks(clock_ms), num_steps=4)
    assert [(lane.rank, lane.host) for lane in lanes] == [(0, "host0"), (1, "host1")]
    ends = [[s.end_ns for s in lane.spans if s.name == "bucket 1"] for lane in lanes]
    assert ends[0] == ends[1] == [30 * MS, 130 * MS], "steps 1 and 2, which both ranks have"
    readies = [[s.bucket.ready for s in lane.spans if s.name == "bucket 1"] for lane in lanes]
    assert [late - early for early, late in zip(*readies, strict=True)] == [3 * MS, 3 * MS]


def test_only_the_last_steps_are_shown_when_asked() -> None:
    lanes = lanes_of(two_ranks(), num_steps=1)
    assert {span.step for lane in lanes for span in lane.spans} == {2}
    assert min(span.start_ns for lane in lanes for span in lane.spans) == 0


def test_buckets_that_are_on_their_way_together_have_rows_of_their_own() -> None:
    step = step_of(0, (11, 11, 20), (12, 12, 25), (13, 13, 14), (21, 21, 30), start=0)
    (lane,) = lanes_of([recording_of(0, [step])], num_steps=1)
    rows = {span.bucket.index: span.row for span in lane.spans if span.bucket is not None}
    assert rows == {0: 1, 1: 2, 2: 3, 3: 1}
    assert lane.num_rows == 4
    waits = {s.bucket.index: (s.start_ns // MS, s.end_ns // MS) for s in lane.spans if s.kind == "queued"}
    assert waits == {1: (12, 20)}, "until the one before it is reduced; bucket 2 overtakes, 3 comes later"


def test_a_bucket_whose_reduction_has_told_its_begin_waits_until_all_ranks_have_begun() -> None:
    first, second = two_ranks()
    for recording, begun in ((first, 21), (second, 24)):
        for step in recording.steps:
            step.buckets[1].begun = (100 * step.step + begun) * MS
            step.buckets[0].done = (100 * step.step + 28) * MS  # noticed late
    for lane in lanes_of([first, second], num_steps=1):
        (waits,) = (span for span in lane.spans if span.name == "bucket 1 waits")
        assert waits.end_ns == 24 * MS


def test_reductions_in_shared_memory_tell_when_their_turn_has_come() -> None:
    for buckets in run_ranks(moments_of_buckets, 2):
        assert all(launched <= begun for launched, begun in buckets)


def moments_of_buckets(rank: int, world_size: int) -> list[tuple[int, int]]:
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model = BucketedDDP(layers, bucket_cap_mb=0.001, transport="shared_memory")
    recorder = model.record_steps()
    for _ in range(3):
        model(torch.ones(4, 64)).sum().backward()
    return [(bucket.launched, bucket.begun) for bucket in recorder.records[-1].buckets]


def test_no_two_events_of_a_row_overlap_and_all_that_happened_is_in_the_trace() -> None:
    recordings = two_ranks()
    document = json.loads(json.dumps(chrome_trace(lanes_of(recordings, num_steps=4))))
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    names = [event["name"] for event in events if event["pid"] == 1]
    assert names == ["forward", "backward", "exposed", "bucket 0", "bucket 1"] * 2
    names = [event["name"] for event in events if event["pid"] == 0]
    queued = ["bucket 0 waits", "bucket 0", "bucket 1 waits", "bucket 1"]  # until rank 1 has started them
    assert names == ["forward", "backward", "exposed", *queued] * 2
    for pid, tid in {(event["pid"], event["tid"]) for event in events}:
        row = sorted((e["ts"], e["dur"]) for e in events if (e["pid"], e["tid"]) == (pid, tid))
        assert all(start + length <= after for (start, length), (after, _) in pairwise(row))
    first = next(event for event in events if event["name"] == "bucket 1")
    assert first["args"] == {"step": 1, "bytes": 2000, "us since ready": 4000.0}
    assert (first["ts"], first["dur"]) == (19_000.0, 11_000.0)
    processes = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["rank 0 (host0)", "rank 1 (host1)"]


def test_a_recording_survives_its_file(tmp_path: Path) -> None:
    sizes: Any = {"old_world_size": 3, "new_world_size": 2, "lost_ranks": [1], "joined_ranks": []}
    change = Change(step=1, seconds=0.5, cause="gone", **sizes)
    written = [*two_ranks(), replace(recording_of(10, []), changes=(change,))]
    for recording in reversed(written):
        save(tmp_path / "new" / "folder", recording)
    assert load_folder(tmp_path / "new" / "folder") == written


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no recording"),
        ({"rank0.json": "{"}, r"rank0\.json is not a recording: JSONDecodeError"),
        ({"rank0.json": "[]"}, r"rank0\.json is not a recording: TypeError"),
        ({"rank0.json": '{"version": 2}'}, "has format 2, but this version reads format 1"),
        ({"rank0.json": '{"version": 1, "rank": 0}'}, "is not a recording: KeyError: 'steps'"),
    ],
)
def test_what_cannot_be_read_is_named(files, message, tmp_path: Path, capsys) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        load_folder(tmp_path)
    assert main(["timeline", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err


def test_recordings_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    save(tmp_path, recording_of(0, []))
    save(tmp_path, Recording(rank=1, world_size=4, host="b", steps=[]))
    with pytest.raises(ConfigurationError, match="runs with 2 and 4 ranks"):
        load_folder(tmp_path)


def test_the_report_of_a_run_is_one_page_with_all_that_it_needs(tmp_path: Path, capsys) -> None:
    for recording in two_ranks(clock_ms=7):
        save(tmp_path / "a <run>", recording)
    target = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "a <run>"), "--page", str(target)]) == 0
    text = target.read_text()
    assert "Run a &lt;run&gt;: 2 ranks, steps 0 to 2" in text
    assert re.search(r"^1 +host1 +100\.00 +10\.00 +3\.00 +0\.00", text, re.MULTILINE)
    assert text.count("<svg") == text.count("</svg>") == 2, "the charts and the timeline"
    assert re.search(r"<script|<link|src=|href=\"[^#]", text) is None, "nothing is loaded"
    assert [kind for kind, (color, _) in KINDS.items() if color not in text] == []
    assert main(["report", str(tmp_path)]) == 1
    assert "has no recording" in capsys.readouterr().err


def step_on_gpu(*, host_share: float, num_buckets: int, num_broadcasts: int) -> StepRecord:
    """A step of 10 ms of the device."""
    buckets = [BucketRecord(index, 10**6, ready=0, launched=0, done=1) for index in range(num_buckets)]
    return StepRecord(
        0,
        forward_start=0,
        comm_end=10**7,
        host_ns=int(host_share * 10**7),
        buckets=buckets,
        num_broadcasts=num_broadcasts,
    )


def test_what_makes_a_gpu_wait_for_the_host_is_said_with_what_to_set(tmp_path: Path) -> None:
    assert host_advice([step_on_gpu(host_share=0.3, num_buckets=9, num_broadcasts=1)]) is None
    assert host_advice([step_of(0, (0, 1, 2), start=0)]) is None, "of a CPU"
    text = host_advice([step_on_gpu(host_share=0.99, num_buckets=9, num_broadcasts=1)])
    assert text.startswith("the host needs 99% of the time of a step")
    assert "broadcast_buffers=False" in text
    assert "9 buckets for 9.0 MB: bucket_cap_mb=9" in text
    text = host_advice([step_on_gpu(host_share=0.99, num_buckets=2, num_broadcasts=0)])
    assert "broadcast" not in text
    assert "bucket_cap_mb" not in text
    assert "torch.cuda.set_sync_debug_mode('warn')" in text
    steps = [step_on_gpu(host_share=1.0, num_buckets=9, num_broadcasts=1)]
    save(tmp_path, Recording(rank=0, world_size=1, host="gpu-01", steps=steps))
    assert main(["report", str(tmp_path), "--page", str(tmp_path / "page.html")]) == 0
    assert (
        "<h2>GPUs that wait for the host</h2><ul><li>rank 0: the host needs 100%"
        in (tmp_path / "page.html").read_text()
    )


@on_ranks(2)
def test_a_record_counts_the_broadcasts_of_buffers(group) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    wrapped = BucketedDDP(module, broadcast_buffers=True, process_group=group)
    recorder = wrapped.record_steps()
    for _ in range(3):
        wrapped(torch.randn(8, 4)).sum().backward()
    assert [record.num_broadcasts for record in recorder.records] == [1, 1, 1]


def test_the_command_writes_trace_and_picture_of_a_folder(tmp_path: Path, capsys) -> None:
    def rank_main(rank: int, world_size: int, process_group: Any) -> None:
        model = BucketedDDP(nn.Linear(64, 64), process_group=process_group, bucket_cap_mb=0.001)
        recorder = model.record_steps()
        for _ in range(6):
            model(torch.ones(4, 64)).sum().backward()
        recording = Recording(rank=rank, world_size=3, host="here", steps=list(recorder.records))
        save(tmp_path / "steps", recording)

    run_threads(rank_main, 2)
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.svg"
    arguments = ["--trace", str(trace), "--picture", str(picture), "--steps", "3"]
    assert main(["timeline", str(tmp_path / "steps"), *arguments]) == 0
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {(e["pid"], e["args"]["step"]) for e in events} == {(r, s) for r in (0, 1) for s in (3, 4, 5)}
    drawing = picture.read_text()
    assert "<svg" in drawing
    assert drawing.count("<path") > len(events)
    printed = capsys.readouterr().out
    assert "rank 1 (here): " in printed
    assert "1 of 3 ranks have no file" in printed

"""What a step did and how late each rank came: records, files, one time axis, pictures, the callback."""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from harness import on_ranks, run_ranks, run_threads
from pytorch_lightning.demos.boring_classes import BoringModel
from torch import nn

from lightning_ddp import BucketedDDP
from lightning_ddp.__main__ import main
from lightning_ddp.callbacks import CommunicationMonitor, WorldChange, summarize
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.supervise.protocol import LIMIT_BYTES, SendValue, pack
from lightning_ddp.telemetry.step_record import BucketRecord, StepRecord, StepRecorder
from lightning_ddp.telemetry.timeline import (
    Change,
    Recording,
    SlowRanks,
    chrome_trace,
    lanes_of,
    lateness,
    load_folder,
    median_late,
    save,
)
from lightning_ddp.tools.recorded_run import KINDS, host_advice

MS = 1_000_000


def step_of(number: int, *buckets: tuple[int, int, int], start: int = 0) -> StepRecord:
    """Milliseconds: forward 0 to 5, backward 10 to 20, end 40; buckets are (ready, launched, done)."""
    return StepRecord(
        number,
        *((start + moment) * MS for moment in (0, 5, 10, 20, 40)),
        buckets=[
            BucketRecord(i, 1_000_000, *((start + moment) * MS for moment in moments))
            for i, moments in enumerate(buckets)
        ],
    )


def test_hidden_and_exposed_communication_add_up() -> None:
    overlapping = step_of(0, (12, 12, 16), (15, 15, 26), (20, 20, 30))
    assert overlapping.communication_s == pytest.approx(0.018)
    assert overlapping.exposed_s == pytest.approx(0.010)
    assert overlapping.overlap == pytest.approx(8 / 18)
    assert overlapping.num_bytes == 3_000_000
    assert overlapping.slack_ns == 10 * MS
    hidden = step_of(0, (11, 11, 12), (14, 14, 18))
    assert (hidden.exposed_s, hidden.overlap) == (0.0, 1.0)
    assert hidden.communication_s == pytest.approx(0.005)
    nothing = step_of(0)
    assert (nothing.communication_s, nothing.exposed_s, nothing.overlap, nothing.slack_ns) == (
        0,
        0,
        None,
        None,
    )


def test_what_is_logged_are_medians_over_the_interval() -> None:
    records = [step_of(n, (12, 12, 16), (20, 20, 30), start=100 * n) for n in range(3)]
    assert summarize(records) == {
        "step_ms": 100.0,
        "exposed_ms": pytest.approx(10.0),
        "gradient_mb_per_step": 2.0,
        "overlap_percent": pytest.approx(100 * 4 / 14),
        "bandwidth_gb_per_s": pytest.approx(2 / 14),
    }
    assert summarize([step_of(0)]) == {"step_ms": 40.0, "exposed_ms": 0.0, "gradient_mb_per_step": 0.0}


def test_lateness_is_the_slack_that_a_rank_lacks() -> None:
    late = lateness({0: [50, 40, None], 1: [10, 60, 5], 2: [30, 50]})
    assert late == {0: [0, 20, None], 1: [40, 0, 0], 2: [20, 10, None]}
    assert median_late(late) == {0: 10.0, 1: 0.0, 2: 15.0}


def test_a_rank_is_slow_after_so_many_steps_in_a_row_and_again_when_they_have_doubled() -> None:
    slow = SlowRanks(4)
    late = lateness({0: [90, 90], 1: [90, 90], 2: [10, 20], 3: [95, 95]})
    assert slow.add(late, limit_us=50) == []
    assert slow.add(late, limit_us=50) == [(2, 4, 75.0)]
    assert slow.add(late, limit_us=50) == []
    assert slow.add(late, limit_us=50) == [(2, 8, 75.0)]
    assert slow.add(lateness({0: [9], 1: [9], 2: [9], 3: [9]}), limit_us=50) == []
    assert slow.add(late, limit_us=50) == [], "the streak was broken"
    assert slow.add(late, limit_us=50) == [(2, 4, 75.0)]


def test_one_early_rank_makes_no_others_late() -> None:
    slow = SlowRanks(1)
    assert slow.add(lateness({0: [900], 1: [90], 2: [90], 3: [85]}), limit_us=50) == []
    assert [found.rank for found in slow.add(lateness({0: [900], 1: [90]}), limit_us=50)] == [1]


# ---------------------------------------------------------------------- recorded by the engine


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


@on_ranks(2)
def test_a_step_is_recorded_in_the_order_in_which_it_happens(process_group) -> None:
    model = BucketedDDP(layers(), process_group=process_group, bucket_cap_mb=0.0003, transport="gloo")
    recorder = model.record_steps(3)
    for _ in range(4):
        with model.no_sync():
            model(torch.ones(2, 8)).sum().backward()
        model(torch.ones(2, 8)).sum().backward()
    assert recorder.num_new == 3
    taken = recorder.take()
    assert recorder.take() == []
    assert list(recorder.records) == taken, "only the last ones are kept"
    model.stop_recording()
    model(torch.ones(2, 8)).sum().backward()
    assert recorder.take() == []
    assert list(recorder.records) == taken
    assert len(model.reducer.buckets) > 1
    assert [record.step for record in taken] == [1, 2, 3]
    for step in taken:
        assert [bucket.index for bucket in step.buckets] == list(range(len(step.buckets)))
        assert step.num_bytes == sum(p.numel() * 4 for p in layers().parameters())
        moments = [step.forward_start, step.forward_end, step.backward_start, step.backward_end]
        assert [*moments, step.comm_end] == sorted([*moments, step.comm_end])
        for bucket in step.buckets:
            assert step.backward_start <= bucket.ready <= bucket.launched <= bucket.done <= step.comm_end
            assert bucket.begun is None, "told by shared memory alone"
        launches = [bucket.launched for bucket in step.buckets]
        assert launches == sorted(launches)


def test_a_hooks_buckets_and_those_that_nobody_needs() -> None:
    def rank_main(rank: int, world_size: int, process_group: Any) -> StepRecord:
        model = BucketedDDP(
            layers(),
            process_group=process_group,
            bucket_cap_mb=0.0003,
            find_unused_parameters=True,
            skip_all_reduce_unused_params=True,
        )

        def hook(state: Any, bucket: Any) -> Any:
            work = process_group.allreduce([bucket.buffer()])
            return work.get_future().then(lambda future: future.value()[0] / world_size)

        model.register_comm_hook(None, hook)
        recorder = model.record_steps()
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
        inner = model.module[:2]
        output = inner(torch.ones(2, 8))
        model.prepare_for_backward(output)
        output.sum().backward()
        return list(recorder.records)

    for whole, partial in [records[1:] for records in run_threads(rank_main, 2)]:
        assert partial.forward_start is None
        assert 0 < partial.num_bytes < whole.num_bytes
        assert partial.slack_ns > 0


def test_steps_that_nobody_records_cost_no_look_at_a_bucket() -> None:
    def rank_main(rank: int, world_size: int, process_group: Any) -> list[int]:
        model = BucketedDDP(layers(), process_group=process_group, bucket_cap_mb=0.0003)
        counts = []
        for is_recorded in (False, True):
            if is_recorded:
                model.record_steps(1)
            loss = model(torch.ones(2, 8)).sum()
            calls: list[str] = []

            def note(frame: Any, event: str, called: Any, calls: list[str] = calls) -> None:
                calls.append(called.__name__ if event == "c_call" else "")

            sys.setprofile(note)
            loss.backward()
            sys.setprofile(None)
            counts.append(calls.count("element_size"))
        return counts

    (counts,) = run_threads(rank_main, 1)
    assert counts[0] == 0
    assert counts[1] > 1, "one for each bucket of a step that is recorded"


@on_ranks(1)
def test_a_second_call_begins_to_record_anew(process_group) -> None:
    model = BucketedDDP(layers(), process_group=process_group)
    with pytest.raises(ConfigurationError, match="num_steps=0: expected a number of steps from 1"):
        model.record_steps(0)
    recorder = model.record_steps()
    for num_steps, kept in ((2, [1, 2]), (5, [4, 5, 6])):
        model(torch.ones(2, 8)).sum().backward()
        assert model.record_steps(num_steps) is recorder
        assert not recorder.records
        for _ in range(len(kept)):
            model(torch.ones(2, 8)).sum().backward()
        assert [record.step for record in recorder.records] == kept


@on_ranks(1)
def test_a_change_of_ranks_is_numbered_as_the_steps_of_this_fit(process_group, tmp_path: Path) -> None:
    model = BucketedDDP(layers(), process_group=process_group)
    strategy = SimpleNamespace(model=model)
    trainer: Any = SimpleNamespace(strategy=strategy, global_step=40, world_size=1, is_global_zero=False)
    trainer.global_rank = 0
    monitor, module = CommunicationMonitor(timeline=tmp_path), pl.LightningModule()
    monitor.on_fit_start(trainer, module)
    sizes: Any = {"old_world_size": 2, "old_rank": 0, "new_world_size": 1, "new_rank": 0, "lost_ranks": (1,)}
    change = WorldChange(**sizes, step=43, seconds=0.1, cause=None, retried=True)
    monitor.on_world_changed(trainer, module, change)
    model(torch.ones(2, 8)).sum().backward()
    monitor.on_fit_end(trainer, module)
    (recording,) = load_folder(tmp_path)
    assert [change.step for change in recording.changes] == [record.step for record in recording.steps] == [3]


def test_records_of_steps_that_are_repeated_are_dropped_though_the_device_has_not_finished_them() -> None:
    recorder = StepRecorder(torch.device("cpu"))
    recorder.start(9)
    recorder.records += [step_of(number) for number in (2, 3)]
    unresolved = deque([step_of(4), step_of(5)])
    recorder._events = SimpleNamespace(unresolved=unresolved)  # of a CUDA device
    recorder.begin_again(5)
    assert [[record.step for record in kept] for kept in (recorder.records, unresolved)] == [[2, 3], [4]]
    recorder.begin_again(3)
    assert [[record.step for record in kept] for kept in (recorder.records, unresolved)] == [[2], []]


# ---------------------------------------------------------------------- files and pictures


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
    assert first["args"] == {"step": 1, "bytes": 1_000_000, "us since ready": 4000.0}
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
    (tmp_path / "rank1.json").write_text((tmp_path / "rank0.json").read_text())
    with pytest.raises(ConfigurationError, match=r"rank1\.json is the recording of rank 0"):
        load_folder(tmp_path)


def test_the_report_of_a_run_is_one_page_with_all_that_it_needs(tmp_path: Path, capsys) -> None:
    sizes: Any = {"old_world_size": 2, "new_world_size": 3, "lost_ranks": [], "joined_ranks": [2]}
    change = Change(step=1, seconds=0.5, cause=None, **sizes)
    first, second = two_ranks(clock_ms=7)
    steps = [*second.steps[:2], replace(second.steps[2], step=9, forward_start=900 * MS)]  # after a gap
    for recording in (first, replace(second, changes=(change,), steps=steps)):  # rank 0 has joined later
        save(tmp_path / "a <run>", recording)
    target = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "a <run>"), "--page", str(target)]) == 0
    text = target.read_text()
    assert "Run a &lt;run&gt;: 2 ranks, steps 0 to 2" in text
    assert re.search(r"^1 +2 to 3 +- +2 +0\.50 +new processes<", text, re.MULTILINE)
    assert re.search(r"^1 +host1 +100\.00 +10\.00 +3\.00 +2\.00", text, re.MULTILINE)
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


# ---------------------------------------------------------------------- the callback


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0: expected a number of steps from 1"),
        ({"every_n_steps": 5001}, "every_n_steps=5001: expected at most 5000"),
        ({"straggler_patience": -1}, "straggler_patience=-1: expected"),
        ({"straggler_threshold": 0.0}, "straggler_threshold=0.0: expected a fraction of a step above 0"),
    ],
)
def test_numbers_out_of_range(arguments, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CommunicationMonitor(**arguments)


def test_the_numbers_of_the_longest_interval_fit_into_one_message() -> None:
    every_n_steps = CommunicationMonitor(every_n_steps=5000).every_n_steps
    value = {"first": 10**9, "us": [10**11 - 1] * every_n_steps, "host": "h" * 80}
    assert len(pack(SendValue(0, "slack", value))) < 60 * 1024 < LIMIT_BYTES


def test_another_strategy_is_refused() -> None:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    monitor = CommunicationMonitor()
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[monitor], **quiet)
    text = "'custom_ddp' or one of its variants, but the Trainer has Single"
    with pytest.raises(ConfigurationError, match=text):
        trainer.fit(BoringModel())

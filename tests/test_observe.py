"""What a step did, how late each rank came, and the callback that logs it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from harness import on_ranks, run_threads
from pytorch_lightning.demos.boring_classes import BoringModel
from torch import nn

from lightning_ddp import BucketedDDP
from lightning_ddp.callbacks import CommunicationMonitor, summarize
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.telemetry.step_record import BucketRecord, StepRecord
from lightning_ddp.telemetry.timeline import SlowRanks, lateness, median_late

MS = 1_000_000


def record(step: int, *buckets: tuple[int, int, int], start: int = 0) -> StepRecord:
    """Times in milliseconds: backward lasts from 10 to 20, buckets are (ready, launched, done)."""
    return StepRecord(
        step,
        forward_start=start * MS,
        backward_start=(start + 10) * MS,
        backward_end=(start + 20) * MS,
        comm_end=(start + 40) * MS,
        buckets=[
            BucketRecord(i, 1_000_000, *((start + moment) * MS for moment in moments))
            for i, moments in enumerate(buckets)
        ],
    )


def test_hidden_and_exposed_communication_add_up() -> None:
    overlapping = record(0, (12, 12, 16), (15, 15, 26), (20, 20, 30))
    assert overlapping.communication_s == pytest.approx(0.018)
    assert overlapping.exposed_s == pytest.approx(0.010)
    assert overlapping.overlap == pytest.approx(8 / 18)
    assert overlapping.num_bytes == 3_000_000
    assert overlapping.slack_ns == 10 * MS
    hidden = record(0, (11, 11, 12), (14, 14, 18))
    assert (hidden.exposed_s, hidden.overlap) == (0.0, 1.0)
    assert hidden.communication_s == pytest.approx(0.005)
    nothing = record(0)
    assert (nothing.communication_s, nothing.exposed_s, nothing.overlap, nothing.slack_ns) == (
        0,
        0,
        None,
        None,
    )


def test_what_is_logged_are_medians_over_the_interval() -> None:
    records = [record(n, (12, 12, 16), (20, 20, 30), start=100 * n) for n in range(3)]
    assert summarize(records) == {
        "step_ms": 100.0,
        "exposed_ms": pytest.approx(10.0),
        "gradient_mb_per_step": 2.0,
        "overlap_percent": pytest.approx(100 * 4 / 14),
        "bandwidth_gb_per_s": pytest.approx(2 / 14),
    }
    assert summarize([record(0)]) == {"step_ms": 40.0, "exposed_ms": 0.0, "gradient_mb_per_step": 0.0}


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


# ---------------------------------------------------------------------- the callback


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0: expected a number of steps from 1"),
        ({"straggler_patience": -1}, "straggler_patience=-1: expected"),
        ({"straggler_threshold": 0.0}, "straggler_threshold=0.0: expected a fraction of a step above 0"),
    ],
)
def test_numbers_out_of_range(arguments, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CommunicationMonitor(**arguments)


def test_another_strategy_is_refused() -> None:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    monitor = CommunicationMonitor()
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[monitor], **quiet)
    text = "'custom_ddp' or one of its variants, but the Trainer has Single"
    with pytest.raises(ConfigurationError, match=text):
        trainer.fit(BoringModel())

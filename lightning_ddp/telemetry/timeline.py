"""Recorded steps of all ranks on one time axis: spans of compute and of buckets, and a Chrome trace of them.

Clocks of hosts differ. A step's last collective ends on all ranks at one moment, up to the time that a
message travels, so each rank's clock is shifted until these ends agree with rank 0's (in the median).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_ddp.telemetry.recording import Recording
from lightning_ddp.telemetry.step_record import StepRecord

__all__ = ["Lane", "Span", "chrome_trace", "lanes_of"]

_NS_PER_US = 1_000
COMPUTE = 0
"""Number of the row of forward and backward; those of buckets follow."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that took time."""

    kind: str
    """'forward', 'backward', 'exposed' (the rank waits for buckets), 'bucket', or 'queued': a bucket that is
    started and waits, until the one before it is reduced and all ranks have started theirs."""
    row: int
    """0 for compute; buckets that are on their way at the same time are in different rows."""
    start_ns: int
    """From the first moment of all ranks on."""
    end_ns: int
    step: int
    bucket: int | None = None
    num_bytes: int = 0
    ready_ns: int | None = None
    """When a bucket had its last gradient."""

    @property
    def name(self) -> str:
        """What is written on it."""
        if self.bucket is None:
            return self.kind
        return f"bucket {self.bucket}" + (" waits" if self.kind == "queued" else "")


@dataclass(frozen=True, kw_only=True)
class Lane:
    """What one rank did."""

    rank: int
    host: str
    spans: Sequence[Span] = field(default_factory=tuple)

    @property
    def num_rows(self) -> int:
        """Rows that the spans need."""
        return 1 + max((span.row for span in self.spans), default=0)


def lanes_of(recordings: Sequence[Recording], *, num_steps: int | None = None) -> list[Lane]:
    """Puts the recordings on one time axis, which begins with the first thing that is shown.

    Args:
        recordings: of different ranks; steps are matched by their number.
        num_steps: show only the last ones that all ranks have; None for every step.
    """
    common = set.intersection(*({step.step for step in r.steps} for r in recordings)) if recordings else set()
    shown = common if num_steps is None else set(sorted(common)[len(common) - min(num_steps, len(common)) :])
    shifts = {r.rank: _shift(recordings[0], r, common) for r in recordings}
    chosen = {r.rank: [step for step in r.steps if step.step in shown] for r in recordings}
    begins = [_begin(step) + shifts[rank] for rank, steps in chosen.items() for step in steps]
    origin = min(begins, default=0)
    all_started: dict[tuple[int, int], int] = {}  # step and bucket -> when the last rank had started it
    for rank, steps in chosen.items():
        for step in steps:
            for bucket in step.buckets:
                started = bucket.launched if bucket.begun is None else bucket.begun
                if started is not None:
                    moment = started + shifts[rank] - origin
                    key = step.step, bucket.index
                    all_started[key] = max(moment, all_started.get(key, moment))
    return [
        Lane(rank=r.rank, host=r.host, spans=_spans(chosen[r.rank], shifts[r.rank] - origin, all_started))
        for r in recordings
    ]


def _begin(step: StepRecord) -> int:
    return int(step.backward_start if step.forward_start is None else step.forward_start)


def _shift(reference: Recording, other: Recording, common: Iterable[int]) -> int:
    """What to add to a moment of `other` for one of the reference's clock."""
    ends = [
        {step.step: step.buckets[-1].done for step in r.steps if step.buckets} for r in (reference, other)
    ]
    differences = [
        ends[0][number] - ends[1][number]
        for number in common
        if ends[0].get(number) is not None and ends[1].get(number) is not None
    ]
    return round(statistics.median(differences)) if differences else 0


def _spans(steps: Sequence[StepRecord], shift: int, all_started: Mapping[tuple[int, int], int]) -> list[Span]:
    spans = []
    free_at: list[int] = []  # of each row of buckets
    for step in steps:
        for kind, start, end in _compute(step):
            spans.append(
                Span(kind=kind, row=COMPUTE, start_ns=start + shift, end_ns=end + shift, step=step.step)
            )
        before = 0  # when the bucket before it was reduced
        for bucket in sorted(step.buckets, key=lambda b: b.launched or 0):
            if bucket.launched is None or bucket.done is None:
                continue
            start, end = bucket.launched + shift, bucket.done + shift
            row = next((i for i, moment in enumerate(free_at) if moment <= start), len(free_at))
            free_at[row : row + 1] = [end]
            if bucket.begun is not None:
                before = bucket.begun + shift
            turn = max(start, all_started[step.step, bucket.index], before if before < end else start)
            turn = min(turn, end)
            before = end
            for kind, first, last in (("queued", start, turn), ("bucket", turn, end)):
                if kind == "bucket" or last > first:
                    spans.append(
                        Span(
                            kind=kind,
                            row=COMPUTE + 1 + row,
                            start_ns=first,
                            end_ns=last,
                            step=step.step,
                            bucket=bucket.index,
                            num_bytes=bucket.num_bytes,
                            ready_ns=None if bucket.ready is None else bucket.ready + shift,
                        )
                    )
    return spans


def _compute(step: StepRecord) -> Iterable[tuple[str, int, int]]:
    moments = (
        ("forward", step.forward_start, step.forward_end),
        ("backward", step.backward_start, step.backward_end),
        ("exposed", step.backward_end, step.comm_end),
    )
    for kind, start, end in moments:
        if start is not None and end is not None and end > start:
            yield kind, int(start), int(end)


def chrome_trace(lanes: Sequence[Lane]) -> Mapping[str, Any]:
    """The document that chrome://tracing and Perfetto open: a process a rank, a thread a row."""
    events: list[dict[str, Any]] = []
    for lane in lanes:
        events.append(_metadata(lane.rank, 0, "process_name", {"name": f"rank {lane.rank} ({lane.host})"}))
        events.append(_metadata(lane.rank, 0, "process_sort_index", {"sort_index": lane.rank}))
        for row in range(lane.num_rows):
            title = "compute" if row == COMPUTE else f"buckets {row}" if lane.num_rows > 2 else "buckets"
            events.append(_metadata(lane.rank, row, "thread_name", {"name": title}))
            events.append(_metadata(lane.rank, row, "thread_sort_index", {"sort_index": row}))
        events += [_event(lane.rank, span) for span in lane.spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(rank: int, row: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": row, "args": arguments}


def _event(rank: int, span: Span) -> dict[str, Any]:
    arguments: dict[str, Any] = {"step": span.step}
    if span.bucket is not None:
        arguments["bytes"] = span.num_bytes
        if span.ready_ns is not None:
            arguments["us since ready"] = (span.start_ns - span.ready_ns) / _NS_PER_US
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": rank,
        "tid": span.row,
        "ts": span.start_ns / _NS_PER_US,
        "dur": (span.end_ns - span.start_ns) / _NS_PER_US,
        "args": arguments,
    }

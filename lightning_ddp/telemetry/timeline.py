"""Recorded steps of all ranks: late ranks, files, one time axis, a Chrome trace and a picture.

Clocks of hosts differ. A step's last collective ends on all ranks at the same moment, up to the latency of a
message. So each rank's clock is shifted until these ends agree with rank 0's (in the median). Slack is the
time from a rank's last ready bucket to that end; of two ranks the one with less slack was later.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lightning_ddp.errors import ConfigurationError
from lightning_ddp.telemetry.step_record import BucketRecord, StepRecord

_NS_PER_US = 1_000
_NS_PER_MS = 1_000_000
_COMPUTE = 0
"""Number of the row of forward and backward; those of buckets follow."""
_VERSION = 1
_STEP_FIELDS = ("step", "forward_start", "forward_end", "backward_start", "backward_end", "comm_end")
_BUCKET_FIELDS = ("index", "num_bytes", "ready", "launched", "done", "begun")
_NAME = re.compile(r"rank(\d+)\.json")
_MOST_KEPT = 1000


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of ranks, by losses or joins, after which the run continued."""

    step: int
    """First step with the new ranks, numbered as the recorded steps."""
    old_world_size: int
    new_world_size: int
    lost_ranks: Sequence[int]
    """Lost ranks, numbered as before the change."""
    joined_ranks: Sequence[int]
    """Joined ranks, numbered as after the change."""
    seconds: float
    """Seconds that this rank lost by the change."""
    cause: str
    """Cause in one line; empty if nothing failed."""

    @property
    def why(self) -> str:
        """The cause, or a phrase for a change without a failure."""
        return self.cause or ("asked to leave" if self.lost_ranks else "new processes")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Records of the last steps of one rank, in nanoseconds of its own clock."""

    rank: int
    world_size: int
    host: str
    steps: Sequence[StepRecord]
    changes: Sequence[Change] = ()


def save(folder: Path, recording: Recording) -> Path:
    """Write `folder/rank<r>.json`, and create the folder if it does not exist.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{recording.rank}.json"
    document = {
        "version": _VERSION,
        "rank": recording.rank,
        "world_size": recording.world_size,
        "host": recording.host,
        "changes": list(map(asdict, recording.changes)),
        "steps": [
            {
                **{name: getattr(step, name) for name in _STEP_FIELDS},
                "buckets": [[getattr(bucket, name) for name in _BUCKET_FIELDS] for bucket in step.buckets],
            }
            for step in recording.steps
        ],
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document))
    part.replace(path)
    return path


def load_folder(folder: Path) -> list[Recording]:
    """Load the recordings of a folder, in rank order; ranks may be missing, such as other nodes'.

    Raises:
        ConfigurationError: there is no recording, one cannot be read, or the numbers of ranks differ.
    """
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.glob("rank*.json"))
    found = sorted((int(match[1]), path) for match, path in matches if match is not None)
    if not found:
        raise ConfigurationError(
            f"{folder} has no recording (rank0.json, rank1.json ...). CommunicationMonitor(timeline=folder)"
            " writes them at the end of a fit."
        )
    recordings = [_load(path) for _, path in found]
    sizes = {recording.world_size for recording in recordings}
    if len(sizes) > 1:
        raise ConfigurationError(
            f"{folder} has recordings of runs with {' and '.join(map(str, sorted(sizes)))} ranks. Use a"
            " folder of its own for each run."
        )
    return recordings


def _load(path: Path) -> Recording:
    try:
        document = json.loads(path.read_text())
        if document["version"] != _VERSION:
            raise ConfigurationError(
                f"{path} has format {document['version']}, but this version reads format {_VERSION}"
            )
        return Recording(
            rank=int(document["rank"]),
            world_size=int(document["world_size"]),
            host=str(document["host"]),
            steps=[_step(step) for step in document["steps"]],
            changes=tuple(Change(**change) for change in document.get("changes", ())),
        )
    except ConfigurationError:
        raise
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ConfigurationError(f"{path} is not a recording: {type(error).__name__}: {error}") from error


def _step(values: dict[str, Any]) -> StepRecord:
    step = StepRecord(**{name: values[name] for name in _STEP_FIELDS})
    step.buckets = [BucketRecord(*bucket) for bucket in values["buckets"]]
    return step


# ---------------------------------------------------------------------- late ranks


@dataclass(frozen=True, kw_only=True)
class Lateness:
    """Lateness of the ranks in successive steps."""

    first_step: int
    """Number of the first synchronized backward."""
    late_us: Mapping[int, Sequence[int | None]]
    """Microseconds after the first rank in each step, by rank; None if unknown."""

    def median_us(self) -> dict[int, float]:
        """Return the median in microseconds over the steps, by rank, without unknown ranks."""
        known = {rank: [v for v in values if v is not None] for rank, values in self.late_us.items()}
        return {rank: statistics.median(values) for rank, values in known.items() if values}


def lateness(first_step: int, slacks_us: Mapping[int, Sequence[int | None]]) -> Lateness:
    """Compare the slacks of all ranks, step by step.

    >>> lateness(7, {0: [50, 40], 1: [10, None]}).late_us
    {0: [0, 0], 1: [40, None]}
    """
    late: dict[int, list[int | None]] = {rank: [] for rank in slacks_us}
    for now in zip_longest(*slacks_us.values()):
        most = max((slack for slack in now if slack is not None), default=0)
        for rank, slack in zip(slacks_us, now, strict=True):
            late[rank].append(None if slack is None else most - slack)
    return Lateness(first_step=first_step, late_us=late)


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank that was late in `num_steps` successive steps."""

    rank: int
    num_steps: int
    late_us: float
    """Median of its lateness in these steps, in microseconds after the typical rank."""


@dataclass(kw_only=True)
class _Streak:
    next_report: int
    num_steps: int = 0
    late_us: deque[int] = field(default_factory=lambda: deque(maxlen=_MOST_KEPT))


class SlowRanks:
    """Detector of ranks that are late in at least `num_steps` successive steps.

    Lateness is relative to the typical rank (the lower median), so that one early rank does not make all
    others late.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._streaks: dict[int, _Streak] = {}

    def add(self, known: Lateness, limit_us: float) -> list[SlowRank]:
        """Add the steps after the last call; a rank is late in a step if it is by more than `limit_us`.

        Returns:
            Ranks that have been late for `num_steps` now, or for twice as many steps as when last returned.
        """
        for now in zip_longest(*known.late_us.values()):
            self._add_step(dict(zip(known.late_us, now, strict=True)), limit_us)
        found = []
        for rank, streak in sorted(self._streaks.items()):
            if streak.num_steps >= streak.next_report:
                streak.next_report = 2 * streak.num_steps
                late_us = statistics.median(streak.late_us)
                found.append(SlowRank(rank=rank, num_steps=streak.num_steps, late_us=late_us))
        return found

    def _add_step(self, late_us: Mapping[int, int | None], limit_us: float) -> None:
        now = {rank: late for rank, late in late_us.items() if late is not None}
        if len(now) < 2:
            return
        typical = statistics.median_low(now.values())
        for rank in late_us:
            excess = now.get(rank, typical) - typical
            if excess > limit_us:
                streak = self._streaks.setdefault(rank, _Streak(next_report=self._num_steps))
                streak.num_steps += 1
                streak.late_us.append(excess)
            else:
                self._streaks.pop(rank, None)


# ---------------------------------------------------------------------- one time axis


@dataclass(frozen=True, kw_only=True)
class Span:
    """An interval of one rank on the time axis."""

    kind: str
    """'forward', 'backward', 'exposed' (the rank waits for buckets), 'bucket', or 'queued': a started bucket
    that waits until the bucket before it is reduced and all ranks have started theirs."""
    row: int
    """0 for compute; buckets that are reduced at the same time are in different rows."""
    start_ns: int
    """Nanoseconds from the first moment of all ranks on."""
    end_ns: int
    step: int
    bucket: int | None = None
    num_bytes: int = 0
    ready_ns: int | None = None
    """Time at which a bucket had its last gradient; None for other spans or if unknown."""

    @property
    def name(self) -> str:
        if self.bucket is None:
            return self.kind
        return f"bucket {self.bucket}" + (" waits" if self.kind == "queued" else "")


@dataclass(frozen=True, kw_only=True)
class Lane:
    """The spans of one rank."""

    rank: int
    host: str
    spans: Sequence[Span]

    @property
    def num_rows(self) -> int:
        return 1 + max((span.row for span in self.spans), default=0)


def lanes_of(recordings: Sequence[Recording], *, num_steps: int | None = None) -> list[Lane]:
    """Put the recordings on one time axis, which begins with the first shown moment.

    Args:
        recordings: recordings of different ranks; steps are matched by their number.
        num_steps: number of the last steps of all ranks to show; None for every step.
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
    """Return the offset in ns from the clock of `other` to that of `reference`."""
    theirs = {step.step: step.buckets[-1].done for step in reference.steps if step.buckets}
    own = {step.step: step.buckets[-1].done for step in other.steps if step.buckets}
    known = [n for n in common if theirs.get(n) is not None and own.get(n) is not None]
    differences = [theirs[number] - own[number] for number in known]
    return round(statistics.median(differences)) if differences else 0


def _spans(steps: Sequence[StepRecord], shift: int, all_started: Mapping[tuple[int, int], int]) -> list[Span]:
    spans = []
    free_at: list[int] = []  # of each row of buckets
    for step in steps:
        for kind, start, end in _compute(step):
            spans.append(
                Span(kind=kind, row=_COMPUTE, start_ns=start + shift, end_ns=end + shift, step=step.step)
            )
        before = 0  # time at which the previous bucket was reduced
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
                    ready = None if bucket.ready is None else bucket.ready + shift
                    where = {"row": _COMPUTE + 1 + row, "start_ns": first, "end_ns": last, "ready_ns": ready}
                    what = {"step": step.step, "bucket": bucket.index, "num_bytes": bucket.num_bytes}
                    spans.append(Span(kind=kind, **where, **what))
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
    """Return a document for chrome://tracing and Perfetto: a process per rank, a thread per row."""
    events: list[dict[str, Any]] = []

    def describe(kind: str, pid: int, tid: int, title: str, index: int) -> None:
        for name, arguments in (("name", {"name": title}), ("sort_index", {"sort_index": index})):
            events.append({"ph": "M", "name": f"{kind}_{name}", "pid": pid, "tid": tid, "args": arguments})

    for lane in lanes:
        describe("process", lane.rank, 0, f"rank {lane.rank} ({lane.host})", lane.rank)
        for row in range(lane.num_rows):
            title = "compute" if row == _COMPUTE else f"buckets {row}" if lane.num_rows > 2 else "buckets"
            describe("thread", lane.rank, row, title, row)
        events += [_event(lane.rank, span) for span in lane.spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


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


# ---------------------------------------------------------------------- the picture

COLOURS = {
    "forward": "#7fb3d5",
    "backward": "#2874a6",
    "exposed": "#e74c3c",
    "queued": "#fdebd0",
    "bucket": "#f0b27a",
}
LABELS = {
    "forward": "forward",
    "backward": "backward",
    "exposed": "rank waits for buckets",
    "queued": "bucket waits for its turn, or for another rank",
    "bucket": "bucket is reduced",
}
_ROW_HEIGHT = 0.8
_NARROWEST_TEXT = 0.045  # fraction of the width that a name needs


def draw(lanes: Sequence[Lane], path: Path) -> None:
    """Draw all lanes, from the top down, to a file whose suffix is the format, such as .png.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]  # an optional dependency
    from matplotlib.patches import Patch  # type: ignore[import-not-found,unused-ignore]

    num_rows = sum(lane.num_rows + 1 for lane in lanes)
    figure = Figure(figsize=(14, 1.5 + 0.28 * num_rows), layout="constrained")
    axes = figure.subplots()
    whole_ms = max((span.end_ns for lane in lanes for span in lane.spans), default=0) / _NS_PER_MS or 1.0
    ticks: list[tuple[float, str]] = []
    top = 0
    for lane in lanes:
        for span in lane.spans:
            _draw_span(axes, span, top + span.row, whole_ms)
        ticks.append((top + lane.num_rows / 2 - 0.5, f"rank {lane.rank}\n{lane.host}"))
        top += lane.num_rows
        axes.axhline(top, color="0.8", linewidth=0.8)
        top += 1
    axes.set_xlim(0, whole_ms)
    axes.set_ylim(top - 0.5, -0.7)
    axes.set_yticks([y for y, _ in ticks], [text for _, text in ticks])
    axes.set_xlabel("milliseconds since the first forward that is shown")
    steps = sorted({span.step for lane in lanes for span in lane.spans})
    figure.suptitle(f"Steps {steps[0]} to {steps[-1]}: computation and bucket communication of each rank")
    keys = [Patch(color=COLOURS[kind], label=label) for kind, label in LABELS.items()]
    axes.legend(handles=keys, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5)
    figure.savefig(path, dpi=150)


def _draw_span(axes: Any, span: Span, y: float, whole_ms: float) -> None:
    start, width = span.start_ns / _NS_PER_MS, (span.end_ns - span.start_ns) / _NS_PER_MS
    colour = COLOURS[span.kind]
    axes.barh(y, width, left=start, height=_ROW_HEIGHT, color=colour, edgecolor="white", linewidth=0.3)
    if width > _NARROWEST_TEXT * whole_ms:
        text = span.kind if span.bucket is None else f"{span.bucket}: {_size(span.num_bytes)}"
        shade = "white" if span.kind in ("backward", "exposed") else "black"
        axes.text(start + width / 2, y, text, color=shade, ha="center", va="center", fontsize=7)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 100_000 else f"{num_bytes / 1e3:.1f} kB"

"""Recorded steps of all ranks: files, late ranks, one time axis, and a Chrome trace.

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
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from lightning_ddp.errors import ConfigurationError
from lightning_ddp.telemetry.step_record import BucketRecord, StepRecord

_NS_PER_US = 1_000
_VERSION = 1
_NAME = re.compile(r"rank(\d+)\.json")
_MOST_KEPT = 1000


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of ranks after which the run continued; the fields are those of `WorldChange`."""

    step: int  # first one with the new ranks, numbered as the recorded steps
    old_world_size: int
    new_world_size: int
    lost_ranks: Sequence[int]
    joined_ranks: Sequence[int]
    seconds: float
    cause: str  # in one line; empty if nothing failed


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Records of the last steps of one rank, in nanoseconds of its own clock."""

    rank: int
    world_size: int
    host: str
    steps: Sequence[StepRecord]
    changes: Sequence[Change] = ()


def save(folder: Path, recording: Recording) -> Path:
    """Write a recording to `folder/rank<r>.json`, creating the folder if needed; return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{recording.rank}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"version": _VERSION, **asdict(recording)}))
    part.replace(path)
    return path


def load_folder(folder: Path) -> list[Recording]:
    """Load the recordings of a folder, in rank order; ranks may be missing, such as other nodes'.

    Raises:
        ConfigurationError: there is no recording, one cannot be read or is another rank's, or the numbers of
            ranks differ.
    """
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.glob("rank*.json"))
    found = sorted((int(match[1]), path) for match, path in matches if match is not None)
    if not found:
        raise ConfigurationError(
            f"{folder} has no recording (rank0.json, rank1.json ...). CommunicationMonitor(timeline=folder)"
            " writes them at the end of a fit."
        )
    recordings = [_load(path) for _, path in found]
    for (rank, path), recording in zip(found, recordings, strict=True):
        if recording.rank != rank:
            raise ConfigurationError(f"{path} is the recording of rank {recording.rank}: rename or remove it")
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
        version = document.pop("version")
        if version == _VERSION:
            document["steps"] = [_step(**step) for step in document["steps"]]
            document["changes"] = tuple(Change(**change) for change in document["changes"])
            return Recording(**document)
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        raise ConfigurationError(f"{path} is not a recording: {type(error).__name__}: {error}") from error
    raise ConfigurationError(f"{path} has format {version}, but this version reads format {_VERSION}")


def _step(*, buckets: Sequence[Mapping[str, Any]], **values: Any) -> StepRecord:
    return StepRecord(**values, buckets=[BucketRecord(**bucket) for bucket in buckets])


# ---------------------------------------------------------------------- late ranks


Lateness = Mapping[int, Sequence[int | None]]
"""Time after the first rank in successive steps, by rank; None if unknown."""


def lateness(slacks: Mapping[int, Sequence[int | None]]) -> Lateness:
    """Return how much later than the first rank each rank was in each step; in the unit of the slacks.

    >>> lateness({0: [50, 40], 1: [10, None]})
    {0: [0, 0], 1: [40, None]}
    """
    late: dict[int, list[int | None]] = {rank: [] for rank in slacks}
    for now in zip_longest(*slacks.values()):
        most = max((slack for slack in now if slack is not None), default=0)
        for rank, slack in zip(slacks, now, strict=True):
            late[rank].append(None if slack is None else most - slack)
    return late


def median_late(late: Lateness) -> dict[int, float]:
    """Return the median lateness of each rank over the steps, without ranks of unknown lateness."""
    known = {rank: [v for v in values if v is not None] for rank, values in late.items()}
    return {rank: statistics.median(values) for rank, values in known.items() if values}


class SlowRank(NamedTuple):
    """A rank that was late in `num_steps` successive steps, by a median of `late_us` microseconds."""

    rank: int
    num_steps: int
    late_us: float


class _Streak:
    """Successive late steps of one rank."""

    def __init__(self, next_report: int) -> None:
        self.next_report, self.num_steps = next_report, 0
        self.late_us: deque[int] = deque(maxlen=_MOST_KEPT)


class SlowRanks:
    """Detector of ranks that are late in at least `num_steps` successive steps.

    Lateness is relative to the typical rank (the lower median), so that one early rank does not make all
    others late.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._streaks: dict[int, _Streak] = {}

    def add(self, late: Lateness, limit_us: float) -> list[SlowRank]:
        """Add steps' lateness; return ranks over `limit_us` later than the median for `num_steps` in a row.

        A rank is returned again once its number of late steps has doubled.
        """
        for now in zip_longest(*late.values()):
            self._add_step(dict(zip(late, now, strict=True)), limit_us)
        found = []
        for rank, streak in sorted(self._streaks.items()):
            if streak.num_steps >= streak.next_report:
                streak.next_report = 2 * streak.num_steps
                found.append(SlowRank(rank, streak.num_steps, statistics.median(streak.late_us)))
        return found

    def _add_step(self, late_us: Mapping[int, int | None], limit_us: float) -> None:
        now = {rank: late for rank, late in late_us.items() if late is not None}
        if len(now) < 2:
            return
        typical = statistics.median_low(now.values())
        for rank in late_us:
            excess = now.get(rank, typical) - typical
            if excess > limit_us:
                streak = self._streaks.setdefault(rank, _Streak(self._num_steps))
                streak.num_steps += 1
                streak.late_us.append(excess)
            else:
                self._streaks.pop(rank, None)


# ---------------------------------------------------------------------- one time axis


@dataclass(frozen=True, kw_only=True)
class Span:
    """Interval in a rank's timeline: a forward, a backward, exposed communication or a bucket."""

    kind: str
    """'forward', 'backward', 'exposed' (the rank waits for buckets), 'bucket', or 'queued': a started bucket
    that waits until the bucket before it is reduced and all ranks have started theirs."""
    row: int = 0
    """0 for compute; buckets that are reduced at the same time are in different rows."""
    start_ns: int
    """Nanoseconds from the first moment of all ranks on."""
    end_ns: int
    step: int
    bucket: BucketRecord | None = None

    @property
    def name(self) -> str:
        if self.bucket is None:
            return self.kind
        return f"bucket {self.bucket.index}" + (" waits" if self.kind == "queued" else "")


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Timeline of one rank: its intervals on the time axis of all ranks."""

    rank: int
    host: str
    spans: Sequence[Span]

    @property
    def num_rows(self) -> int:
        return 1 + max((span.row for span in self.spans), default=0)


def lanes_of(recordings: Sequence[Recording], *, num_steps: int) -> list[Lane]:
    """Return the timelines of the last `num_steps` common steps, on one time axis from the first moment."""
    common = set.intersection(*({step.step for step in recording.steps} for recording in recordings))
    shown = sorted(common)[-num_steps:]
    shifts = [_shift(recordings[0], recording, common) for recording in recordings]
    rows = [[deepcopy(s) for s in recording.steps if s.step in shown] for recording in recordings]
    for steps, shift in zip(rows, shifts, strict=True):
        _move(steps, shift)
    every = list(chain(*rows))
    _move(every, -min((getattr(*step.moments()[0]) for step in every), default=0))
    all_started: dict[tuple[int, int], int] = {}  # step and bucket -> when the last rank had started it
    for step in every:
        for bucket in step.buckets:
            key, started = (step.step, bucket.index), bucket.begun or bucket.launched or 0
            all_started[key] = max(started, all_started.get(key, 0))
    return [
        Lane(rank=recording.rank, host=recording.host, spans=_spans(steps, all_started))
        for recording, steps in zip(recordings, rows, strict=True)
    ]


def _shift(reference: Recording, other: Recording, common: Iterable[int]) -> int:
    """Return the nanoseconds to add to times of `other` to compare them with those of `reference`."""
    theirs, own = (
        {step.step: step.buckets[-1].done for step in recording.steps if step.buckets}
        for recording in (reference, other)
    )
    known = [n for n in common if theirs.get(n) is not None and own.get(n) is not None]
    return round(statistics.median(theirs[n] - own[n] for n in known)) if known else 0


def _move(steps: Iterable[StepRecord], shift: int) -> None:
    """Add `shift` nanoseconds to all recorded times of the steps, in place."""
    for step in steps:
        for owner, name in step.moments():
            setattr(owner, name, getattr(owner, name) + shift)


def _spans(steps: Sequence[StepRecord], all_started: Mapping[tuple[int, int], int]) -> list[Span]:
    spans = []
    free_at: list[int] = []  # of each row of buckets
    for step in steps:
        compute = (
            ("forward", step.forward_start, step.forward_end),
            ("backward", step.backward_start, step.backward_end),
            ("exposed", step.backward_end, step.comm_end),
        )
        spans += [
            Span(kind=kind, start_ns=start, end_ns=end, step=step.step)
            for kind, start, end in compute
            if start is not None and end is not None and end > start
        ]
        before = 0  # time at which the previous bucket was reduced
        for bucket in sorted(step.buckets, key=lambda b: b.launched or 0):
            start, end = bucket.launched, bucket.done
            if start is None or end is None:
                continue
            row = next((i for i, moment in enumerate(free_at) if moment <= start), len(free_at))
            free_at[row : row + 1] = [end]
            if bucket.begun is not None:
                before = bucket.begun
            turn = min(end, max(start, all_started[step.step, bucket.index], before if before < end else 0))
            before = end
            for kind, first, last in (("queued", start, turn), ("bucket", turn, end)):
                if kind == "bucket" or last > first:
                    where = {"row": 1 + row, "start_ns": first, "end_ns": last}
                    spans.append(Span(kind=kind, step=step.step, bucket=bucket, **where))
    return spans


def chrome_trace(lanes: Sequence[Lane]) -> Mapping[str, Any]:
    """Return a document for chrome://tracing and Perfetto: a process per rank, a thread per row."""
    events: list[dict[str, Any]] = []

    def describe(kind: str, pid: int, tid: int, title: str, index: int) -> None:
        for name, arguments in (("name", {"name": title}), ("sort_index", {"sort_index": index})):
            events.append({"ph": "M", "name": f"{kind}_{name}", "pid": pid, "tid": tid, "args": arguments})

    for lane in lanes:
        describe("process", lane.rank, 0, f"rank {lane.rank} ({lane.host})", lane.rank)
        for row in range(lane.num_rows):
            title = "compute" if row == 0 else f"buckets {row}" if lane.num_rows > 2 else "buckets"
            describe("thread", lane.rank, row, title, row)
        events += [_event(lane.rank, span) for span in lane.spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(rank: int, span: Span) -> dict[str, Any]:
    arguments: dict[str, Any] = {"step": span.step}
    if span.bucket is not None:
        arguments["bytes"] = span.bucket.num_bytes
        if span.bucket.ready is not None:
            arguments["us since ready"] = (span.start_ns - span.bucket.ready) / _NS_PER_US
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

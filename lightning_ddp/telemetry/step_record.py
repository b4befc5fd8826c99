"""Records of synchronized steps: times of forward, backward and each bucket; means as torch logs them.

The reducer and the wrapper call a `StepRecorder` at each moment. It keeps the last steps if that is enabled,
and otherwise times one step in a hundred. On the CPU a moment is a reading of the host's clock, on CUDA an
event on the stream, read once the device has passed it; nothing waits for the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_ddp._torch import Future
from lightning_ddp.errors import ConfigurationError

__all__ = ["PHASES", "BucketRecord", "StepRecord", "StepRecorder"]

PHASES = {
    "forward_compute": ("forward_start", "backward_start"),
    "backward_compute": ("backward_start", "backward_end"),
    "backward_comm": ("comm_start", "comm_end"),
    "backward_compute_comm_overlap": ("comm_start", "backward_end"),
}
"""Parts of a step whose mean durations are measured, with the moments of their begin and end."""

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_MOST_UNRESOLVED = 64
_NUM_FIRST = 10
_MOMENTS = ("forward_start", "forward_end", "backward_start", "comm_start", "backward_end", "comm_end")
_BUCKET_MOMENTS = ("ready", "launched", "done")


@dataclass(slots=True)
class BucketRecord:
    """Times of one bucket in one step, in nanoseconds of `StepRecorder`'s clock."""

    index: int
    """Position in launch order."""
    num_bytes: int
    """Bytes of its flat gradient; a hook may send less."""
    ready: Any = None
    """Time at which the last gradient was computed, before the collective."""
    launched: Any = None
    """Time at which the collective was started, after those of the buckets before it."""
    done: Any = None
    """Time at which the reduction was seen to be done: when a bucket becomes ready, or by the final wait."""
    begun: int | None = None
    """Time at which the reduction began to run, with shared memory; None with other backends."""


@dataclass(slots=True)
class StepRecord:
    """Times of one synchronized step of this rank, in nanoseconds; None for moments without a record."""

    step: int
    """Number of the synchronized backward, the same on all ranks."""
    forward_start: Any = None
    forward_end: Any = None
    backward_start: Any = None
    """Time at which the first gradient was computed."""
    backward_end: Any = None
    """Time at which all gradients were computed."""
    comm_end: Any = None
    """Time at which all buckets were reduced and written to `.grad`."""
    buckets: list[BucketRecord] = field(default_factory=list)
    """Reduced buckets, in launch order."""
    comm_start: Any = None
    """Time at which the reduction of the first bucket was about to start."""

    def phase_ns(self, phase: str) -> int:
        """Return the duration of one of `PHASES` in ns, for a step with all of its moments."""
        start, end = (int(getattr(self, name)) for name in PHASES[phase])
        return max(0, end - start)

    @property
    def num_bytes(self) -> int:
        """Bytes of all reduced gradients."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def communication_s(self) -> float:
        """Seconds in which at least one bucket was being reduced."""
        total, reached = 0, 0
        for bucket in sorted(self.buckets, key=lambda b: b.launched or 0):
            if bucket.launched is not None and bucket.done is not None:
                total += max(0, bucket.done - max(bucket.launched, reached))
                reached = max(reached, bucket.done)
        return total / _NS_PER_S

    @property
    def exposed_s(self) -> float:
        """Seconds of communication after the end of backward, which nothing hides."""
        done = [bucket.done for bucket in self.buckets if bucket.done is not None]
        if not done or self.backward_end is None:
            return 0.0
        return max(0, int(max(done)) - int(self.backward_end)) / _NS_PER_S

    @property
    def overlap(self) -> float | None:
        """Share of the communication that is hidden behind backward, 0 to 1; None if there was none."""
        total = self.communication_s
        return max(0.0, 1.0 - self.exposed_s / total) if total > 0 else None

    @property
    def slack_ns(self) -> int | None:
        """Nanoseconds from this rank's last ready bucket to the end of the last collective; None if unknown.

        Of two ranks the one with less slack was later, by the difference, independent of their clocks. The
        rank waits for the last bucket, so the end of that bucket is exact.
        """
        ready = [bucket.ready for bucket in self.buckets]
        if not ready or None in ready or self.buckets[-1].done is None:
            return None
        return int(self.buckets[-1].done - max(ready))


class StepRecorder:
    """Recorder of the times of a wrapper's steps, and of their means; never communicates or waits.

    The first ten steps are timed, and then one in `sample_rate`. While records are kept, all steps are timed,
    with each bucket.

    Args:
        device: device of the gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self.records: deque[StepRecord] = deque(maxlen=0)
        """Records of the last steps, oldest first; on CUDA of steps that the device has finished."""
        self.sample_rate = 100
        """After ten steps, one step in this number is timed."""
        self.mean_ns: dict[str, float] = {}
        """Mean duration of each phase in ns; empty before the first timed step."""
        self.last_timed: tuple[int, StepRecord] | None = None
        """Last timed step, after the number of forwards up to its own; None before."""
        self._device = device
        self._events = _Events(device) if device.type == "cuda" else None
        self._is_keeping = False
        self._open: StepRecord | None = None
        self._buckets: dict[int, BucketRecord] = {}  # of the open step, if records are kept
        self._timed: tuple[int, StepRecord] | None = None  # ended on the host, perhaps not on the device
        self._in_flight: list[tuple[BucketRecord, Any]] = []
        self._forward: tuple[Any, Any] = (None, None)
        self._num_forwards = self._num_timed = 0
        self._num_added = 0  # since the last `take`
        self._first = 0  # number of the step that the engine counts as 0

    def start(self, num_steps: int) -> None:
        """Keep the records of the last `num_steps` steps, and drop earlier records.

        Raises:
            ConfigurationError: The number is less than 1.
        """
        if num_steps < 1:
            raise ConfigurationError(f"num_steps={num_steps}: expected a number of steps from 1")
        self._is_keeping, self._open = True, None
        self.records, self._num_added, self._first = deque(maxlen=num_steps), 0, 0
        self._events = _Events(self._device) if self._events is not None else None

    def stop(self) -> None:
        """Keep no further records; the existing records stay."""
        self._is_keeping, self._open = False, None

    @property
    def _is_timed(self) -> bool:
        number = self._num_forwards
        return number <= _NUM_FIRST or number % self.sample_rate == 0

    def _now(self) -> Any:
        return time.perf_counter_ns() if self._events is None else _record_event(self._device)

    def start_forward(self) -> bool:
        """Record the begin of a forward with a synchronized backward; return True if means changed."""
        is_new = self._update_means()
        self._num_forwards += 1
        is_noted = self._is_keeping or self._is_timed
        self._forward = (self._now() if is_noted else None, None)
        return is_new

    def end_forward(self) -> None:
        """Record the end of the forward."""
        if self._is_keeping:
            self._forward = (self._forward[0], self._now())

    def start_backward(self, step: int) -> None:
        """Record the first gradient of synchronized backward `step`."""
        self._in_flight.clear()
        self._buckets.clear()
        self._open = None
        if self._is_keeping or self._is_timed:
            start, end = self._forward
            number, now = self._first + step, self._now()
            self._open = StepRecord(number, forward_start=start, forward_end=end, backward_start=now)
        self._forward = (None, None)

    def ready(self, index: int, flat: torch.Tensor) -> None:
        """Record that bucket `index`, with the flat gradient `flat`, is full."""
        if self._is_keeping and self._open is not None:
            num_bytes = flat.numel() * flat.element_size()
            self._buckets[index] = BucketRecord(index, num_bytes, ready=self._now())
            self._look_for_done()

    def launching(self) -> None:
        """Record that the reduction of a bucket is about to start."""
        if self._open is not None and self._open.comm_start is None:
            self._open.comm_start = self._now()

    def launched(self, index: int, work: Any) -> None:
        """Record the start of the reduction of bucket `index`; `work` is its work, future or None."""
        bucket = self._buckets.get(index)
        if bucket is None:
            return
        if work is None:
            del self._buckets[index]
            return
        bucket.launched = self._now()
        if self._events is not None and not isinstance(work, Future):
            bucket.done = self._events.record_after(work)
        else:
            self._in_flight.append((bucket, work))

    def end_backward(self) -> None:
        """Record that all gradients are computed."""
        if self._open is not None:
            self._open.backward_end = self._now()
            self._look_for_done()

    def done(self, index: int) -> None:
        """Record the end of the wait for bucket `index`."""
        bucket = self._buckets.get(index)
        if bucket is not None and bucket.done is None:
            bucket.done = self._now()
            work = next((work for waiting, work in self._in_flight if waiting is bucket), None)
            bucket.begun = getattr(work, "begun_ns", None)

    def finish(self) -> None:
        """Complete the record of the step, once all buckets are reduced."""
        record, self._open = self._open, None
        if record is None:
            return
        record.comm_end = self._now()
        record.buckets = [bucket for _, bucket in sorted(self._buckets.items())]
        self._in_flight.clear()
        if self._is_timed and record.forward_start is not None and record.comm_start is not None:
            self._timed = (self._num_forwards, record)
        if self._events is None:
            self._add([record])
        else:
            self._events.unresolved.append(record)
            self._add(self._events.resolve())

    def _add(self, finished: Iterable[StepRecord]) -> None:
        for record in finished if self._is_keeping else ():
            self.records.append(record)
            self._num_added += 1

    def _update_means(self) -> bool:
        """Add the last timed step to the means, once the device has finished it; return True if so."""
        if self._events is not None:
            self._add(self._events.resolve())
        if self._timed is None or not isinstance(self._timed[1].comm_end, int):
            return False
        self.last_timed, self._timed = self._timed, None
        self._num_timed += 1
        for phase in PHASES:
            mean = self.mean_ns.get(phase, 0.0)
            self.mean_ns[phase] = mean + (self.last_timed[1].phase_ns(phase) - mean) / self._num_timed
        return True

    def _look_for_done(self) -> None:
        """Record works that have ended meanwhile; on CUDA events are used, which are more exact."""
        still = []
        for bucket, work in self._in_flight:
            if bucket.done is not None:
                continue
            if self._events is None and (work.done() if hasattr(work, "done") else work.is_completed()):
                bucket.done, bucket.begun = self._now(), getattr(work, "begun_ns", None)
            else:
                still.append((bucket, work))
        self._in_flight = still

    def begin_again(self, first: int) -> None:
        """Map the engine's next step 0 to number `first`; drop the records of steps from `first` on."""
        self._first, self._open = first, None
        while self.records and self.records[-1].step >= first:
            self.records.pop()

    @property
    def num_new(self) -> int:
        """Number of records that `take` would return."""
        return min(self._num_added, len(self.records))

    def take(self) -> list[StepRecord]:
        """Return the records added since the last call that are still kept."""
        first, self._num_added = len(self.records) - self.num_new, 0
        return list(self.records)[first:]


class _Events:
    """Moments of a CUDA device: events, converted to approximate nanoseconds of the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self.unresolved: deque[StepRecord] = deque(maxlen=_MOST_UNRESOLVED)
        self._anchor = _record_event(device)
        self._anchor_ns = time.perf_counter_ns()

    def record_after(self, work: Any) -> torch.cuda.Event:
        """Record an event at the end of a work, on a stream that nothing else waits for."""
        with torch.cuda.stream(self._side):
            work.wait()
            return _record_event(self._device)

    def resolve(self) -> list[StepRecord]:
        """Return steps that the device has finished meanwhile, with times instead of events."""
        finished = []
        while self.unresolved:
            record = self.unresolved[0]
            places: list[tuple[Any, str]] = [
                (record, name) for name in _MOMENTS if getattr(record, name) is not None
            ]
            places += [(b, n) for b in record.buckets for n in _BUCKET_MOMENTS if getattr(b, n) is not None]
            events = [getattr(owner, name) for owner, name in places]
            if not all(event.query() for event in events):
                break
            finished.append(self.unresolved.popleft())
            # elapsed_time is a 32-bit float, exact for short times such as those within a step.
            first_ns = self._anchor_ns + _ns_between(self._anchor, events[0])
            for (owner, name), event in zip(places, events, strict=True):
                setattr(owner, name, first_ns + _ns_between(events[0], event))
            self._anchor, self._anchor_ns = events[0], first_ns
        return finished


def _ns_between(first: torch.cuda.Event, second: torch.cuda.Event) -> int:
    return int(first.elapsed_time(second) * _NS_PER_MS)


def _record_event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))  # the process may be on another device
    return event

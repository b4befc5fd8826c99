"""Records of synchronized steps: times of forward, backward and each bucket.

The reducer and the wrapper call a `StepRecorder` at each moment. On the CPU a moment is a reading of the
host's clock, on CUDA an event on the stream, read once the device has passed it, for which nothing waits.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_ddp._torch import Future
from lightning_ddp.errors import ConfigurationError

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_MOST_UNRESOLVED = 64
_MOMENTS = ("forward_start", "forward_end", "backward_start", "backward_end", "comm_end")
_BUCKET_MOMENTS = ("ready", "launched", "done", "begun")


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
    host_ns: int | None = None
    """Time in which the host has queued all that; None on the CPU."""
    num_broadcasts: int = 0
    """Number of times that forward broadcast buffers."""
    buckets: list[BucketRecord] = field(default_factory=list)
    """Reduced buckets, in launch order."""

    def moments(self) -> list[tuple[StepRecord | BucketRecord, str]]:
        """Return (object, attribute name) for each recorded time of the step and of its buckets."""
        places: list[tuple[StepRecord | BucketRecord, str]] = [(self, name) for name in _MOMENTS]
        places += [(bucket, name) for bucket in self.buckets for name in _BUCKET_MOMENTS]
        return [(owner, name) for owner, name in places if getattr(owner, name) is not None]

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradient buckets, before a hook compresses them."""
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
    """Recorder of the times of a wrapper's steps, between `start` and `stop`; never communicates or waits."""

    def __init__(self, device: torch.device) -> None:
        self.records: deque[StepRecord] = deque(maxlen=0)
        """Records of the last steps, oldest first; on CUDA of steps that the device has finished."""
        self._device = device
        self._events: _Events | None = None
        self._is_on = False
        self._open: StepRecord | None = None
        self._buckets: dict[int, BucketRecord] = {}  # of the open step
        self._in_flight: dict[int, Any] = {}  # works and futures by bucket
        self._forward: tuple[Any, Any] = (None, None)
        self._host_start_ns, self._num_broadcasts = 0, 0  # of the last forward
        self._num_added = 0  # since the last `take`
        self._first = 0  # number of the step that the engine counts as 0

    def start(self, num_steps: int) -> None:
        """Start recording; keep the last `num_steps` steps, and drop earlier records."""
        if num_steps < 1:
            raise ConfigurationError(f"num_steps={num_steps}: expected a number of steps from 1")
        self._is_on, self._open = True, None
        self.records, self._num_added, self._first = deque(maxlen=num_steps), 0, 0
        self._events = _Events(self._device) if self._device.type == "cuda" else None

    def stop(self) -> None:
        """Stop recording steps; the existing records stay."""
        self._is_on, self._open = False, None

    def _now(self) -> Any:
        return time.perf_counter_ns() if self._events is None else _record_event(self._device)

    def start_forward(self) -> None:
        """Record the start time of a forward whose backward is synchronized."""
        if self._is_on:
            self._forward = (self._now(), None)
            self._host_start_ns, self._num_broadcasts = time.perf_counter_ns(), 0

    def sent_buffers(self) -> None:
        """Count a broadcast of buffers in the current forward."""
        self._num_broadcasts += 1

    def end_forward(self) -> None:
        """Record the end time of the forward."""
        if self._is_on:
            self._forward = (self._forward[0], self._now())

    def start_backward(self, step: int) -> None:
        """Begin the record of synchronized backward `step`, at the time of its first gradient."""
        self._in_flight.clear()
        self._buckets.clear()
        self._open = None
        if self._is_on:
            start, end = self._forward
            number, now = self._first + step, self._now()
            self._open = StepRecord(number, forward_start=start, forward_end=end, backward_start=now)
        self._forward = (None, None)

    def ready(self, index: int, flat: torch.Tensor) -> None:
        """Record the time at which bucket `index`, with the flat gradient `flat`, is full."""
        if self._open is not None:
            num_bytes = flat.numel() * flat.element_size()
            self._buckets[index] = BucketRecord(index, num_bytes, ready=self._now())
            self._look_for_done()

    def launched(self, index: int, work: Any) -> None:
        """Record when `work` starts to reduce bucket `index`; drop the bucket's record if `work` is None."""
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
            self._in_flight[index] = work

    def end_backward(self) -> None:
        """Record the time at which all gradients are computed."""
        if self._open is not None:
            self._open.backward_end = self._now()
            self._look_for_done()

    def done(self, index: int) -> None:
        """Record the time at which bucket `index` is seen to be reduced, unless that is recorded already."""
        bucket, work = self._buckets.get(index), self._in_flight.pop(index, None)
        if bucket is not None and bucket.done is None:
            bucket.done, bucket.begun = self._now(), getattr(work, "begun_ns", None)

    def finish(self) -> None:
        """Complete the record of the step, once all buckets are reduced."""
        record, self._open = self._open, None
        if record is None:
            return
        record.comm_end = self._now()
        record.buckets = [bucket for _, bucket in sorted(self._buckets.items())]
        record.num_broadcasts = self._num_broadcasts
        self._in_flight.clear()
        if self._events is None:
            finished = [record]
        else:
            record.host_ns = time.perf_counter_ns() - self._host_start_ns
            self._events.unresolved.append(record)
            finished = self._events.resolve()
        self.records += finished
        self._num_added += len(finished)

    def _look_for_done(self) -> None:
        """Record the end of reductions that are done by now; not on CUDA, whose events are more exact."""
        for index, work in list(self._in_flight.items()) if self._events is None else ():
            if work.done() if hasattr(work, "done") else work.is_completed():
                self.done(index)

    def begin_again(self, first: int) -> None:
        """Give the engine's next step 0 the number `first`; drop the records of steps from `first` on."""
        self._first, self._open = first, None
        for records in (self.records, self._events.unresolved if self._events is not None else deque()):
            while records and records[-1].step >= first:
                records.pop()

    @property
    def num_new(self) -> int:
        """Number of records that `take` would return."""
        return min(self._num_added, len(self.records))

    def take(self) -> list[StepRecord]:
        """Return the records added since the last call that are still kept."""
        first, self._num_added = len(self.records) - self.num_new, 0
        return list(self.records)[first:]


class _Events:
    """Times on a CUDA device: events, converted to approximate nanoseconds of the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self.unresolved: deque[StepRecord] = deque(maxlen=_MOST_UNRESOLVED)
        self._anchor = _record_event(device)
        self._anchor_ns = time.perf_counter_ns()

    def record_after(self, work: Any) -> torch.cuda.Event:
        """Return a CUDA event recorded at the end of a work, on a stream that nothing else waits for."""
        with torch.cuda.stream(self._side):
            work.wait()
            return _record_event(self._device)

    def resolve(self) -> list[StepRecord]:
        """Return records of steps that the device has finished meanwhile, with times instead of events."""
        finished = []
        while self.unresolved:
            record = self.unresolved[0]
            moments = record.moments()
            events = [getattr(owner, name) for owner, name in moments]
            if not all(event.query() for event in events):
                break
            finished.append(self.unresolved.popleft())
            # elapsed_time is a 32-bit float, exact for short times such as those within a step.
            first_ns = self._anchor_ns + _ns_between(self._anchor, events[0])
            for (owner, name), event in zip(moments, events, strict=True):
                setattr(owner, name, first_ns + _ns_between(events[0], event))
            self._anchor, self._anchor_ns = events[0], first_ns
        return finished


def _ns_between(first: torch.cuda.Event, second: torch.cuda.Event) -> int:
    return int(first.elapsed_time(second) * _NS_PER_MS)


def _record_event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))  # the process may be on another device
    return event

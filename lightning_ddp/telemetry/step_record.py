"""Records of synchronised steps: forward, backward, and each bucket's way through the reducer.

The reducer and the wrapper tell a `StepRecorder` of each moment. It keeps the last steps in a ring buffer.
On the CPU a moment is a reading of the host's monotonic clock, which all processes of a Linux host share. On
CUDA it is an event on the stream, turned into nanoseconds once the device has passed it; nothing waits for
the device. Without a recorder the engine does nothing of this.
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

__all__ = ["BucketRecord", "StepRecord", "StepRecorder"]

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_MOST_UNRESOLVED = 64
_MOMENTS = ("forward_start", "forward_end", "backward_start", "backward_end", "comm_end")
_BUCKET_MOMENTS = ("ready", "launched", "done")


@dataclass(slots=True)
class BucketRecord:
    """One bucket in one step; moments in nanoseconds of `StepRecorder`'s clock."""

    index: int
    """Position in launch order."""
    num_bytes: int
    """Size of its flat gradient; what a hook sends may be less."""
    ready: Any = None
    """Its last gradient is there, before the collective."""
    launched: Any = None
    """Its collective is started, after those of the buckets before it."""
    done: Any = None
    """It is reduced. Noticed when the next bucket becomes ready, or by the wait at the end of backward."""
    begun: int | None = None
    """In memory that ranks share: its turn has come. None where the backend does not tell."""


@dataclass(slots=True)
class StepRecord:
    """One synchronised step of this rank; moments in nanoseconds, None where they did not happen."""

    step: int
    """Number of the synchronised backward, the same on all ranks."""
    forward_start: Any = None
    forward_end: Any = None
    backward_start: Any = None
    """The first gradient is there."""
    backward_end: Any = None
    """All gradients are there."""
    comm_end: Any = None
    """All buckets are reduced and written to `.grad`."""
    buckets: list[BucketRecord] = field(default_factory=list)
    """In launch order, without those that were not reduced."""

    @property
    def num_bytes(self) -> int:
        """Size of all gradients that were reduced."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def communication_s(self) -> float:
        """Seconds in which at least one bucket was on its way."""
        total = 0
        reached = 0
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
        """From this rank's last contribution to the end of the last collective: one moment on all ranks.

        So of two ranks the one with less slack came later, by the difference; their clocks do not matter.
        The rank waits for the last bucket, and so notices its end at once.
        """
        ready = [bucket.ready for bucket in self.buckets]
        if not ready or None in ready or self.buckets[-1].done is None:
            return None
        return int(self.buckets[-1].done - max(ready))


class StepRecorder:
    """Keeps what the last steps of one wrapper did. Never communicates, never waits for a device.

    Args:
        device: where the gradients are.
        num_steps: how many steps are kept.

    Raises:
        ConfigurationError: there is no step to be kept.
    """

    def __init__(self, device: torch.device, num_steps: int = 256) -> None:
        if num_steps < 1:
            raise ConfigurationError(f"num_steps={num_steps}: expected a number of steps from 1")
        self.records: deque[StepRecord] = deque(maxlen=num_steps)
        """The last steps, oldest first. On CUDA those that the device has finished."""
        self.epoch_ns = time.time_ns() - time.perf_counter_ns()
        """What to add to a moment of a CPU record for nanoseconds since 1970."""
        self._events = _Events(device) if device.type == "cuda" else None
        self._open: StepRecord | None = None
        self._in_flight: list[tuple[BucketRecord, Any]] = []
        self._forward: tuple[Any, Any] = (None, None)
        self._num_taken = 0
        self._first = 0  # number of the step that the engine counts as 0
        self.num_steps = 0
        """Steps that have been recorded since the beginning."""

    def _now(self) -> Any:
        return time.perf_counter_ns() if self._events is None else self._events.record()

    # ------------------------------------------------------------------ told by the engine

    def start_forward(self) -> None:
        """A forward whose backward is to be synchronised begins."""
        self._forward = (self._now(), None)

    def end_forward(self) -> None:
        """It ends."""
        self._forward = (self._forward[0], self._now())

    def start_backward(self, step: int) -> None:
        """The first gradient of synchronised backward `step` is there."""
        start, end = self._forward
        self._forward = (None, None)
        self._open = StepRecord(
            self._first + step, forward_start=start, forward_end=end, backward_start=self._now()
        )
        self._in_flight.clear()

    def ready(self, index: int, num_bytes: int) -> None:
        """All that bucket `index` gets is there."""
        if self._open is not None:
            self._open.buckets.append(BucketRecord(index, num_bytes, ready=self._now()))
            self._look_for_done()

    def launched(self, index: int, work: Any) -> None:
        """The reduction of bucket `index` has been started; `work` is its work or future, None for none."""
        bucket = self._find(index)
        if bucket is not None and self._open is not None:
            if work is None:
                self._open.buckets.remove(bucket)
                return
            bucket.launched = self._now()
            if self._events is not None and not isinstance(work, Future):
                bucket.done = self._events.record_after(work)
            else:
                self._in_flight.append((bucket, work))

    def end_backward(self) -> None:
        """All gradients are there."""
        if self._open is not None:
            self._open.backward_end = self._now()
            self._look_for_done()

    def done(self, index: int) -> None:
        """Bucket `index` has been waited for."""
        bucket = self._find(index)
        if bucket is not None and bucket.done is None:
            bucket.done = self._now()
            work = next((work for waiting, work in self._in_flight if waiting is bucket), None)
            bucket.begun = getattr(work, "begun_ns", None)

    def finish(self) -> None:
        """All buckets are reduced: the record of the step is complete."""
        record, self._open = self._open, None
        if record is None:
            return
        record.comm_end = self._now()
        record.buckets.sort(key=lambda bucket: bucket.index)
        self._in_flight.clear()
        for kept in [record] if self._events is None else self._events.resolve(record):
            self.records.append(kept)
            self.num_steps += 1

    def _find(self, index: int) -> BucketRecord | None:
        buckets = self._open.buckets if self._open is not None else []
        return next((bucket for bucket in reversed(buckets) if bucket.index == index), None)

    def _look_for_done(self) -> None:
        """Notes which works have ended meanwhile; on CUDA events say so more exactly."""
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
        """The engine counts its steps anew, from number `first` here, which may be done again."""
        self._first, self._open = first, None
        while self.records and self.records[-1].step >= first:
            self.records.pop()

    # ------------------------------------------------------------------ asked

    @property
    def num_new(self) -> int:
        """How many records `take` would return."""
        return min(self.num_steps - self._num_taken, len(self.records))

    def take(self) -> list[StepRecord]:
        """The records that have been added since the last call, as far as they are still kept."""
        num_new = self.num_new
        self._num_taken = self.num_steps
        return list(self.records)[len(self.records) - num_new :]


class _Events:
    """Moments of a CUDA device: events, and what they are in nanoseconds since the recorder was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._unresolved: deque[StepRecord] = deque(maxlen=_MOST_UNRESOLVED)
        self._anchor = self.record()
        self._anchor_ns = 0

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def record_after(self, work: Any) -> torch.cuda.Event:
        """An event at the end of a work, on a stream that nothing else waits for."""
        with torch.cuda.stream(self._side):
            work.wait()
            return self.record()

    def resolve(self, record: StepRecord) -> Iterable[StepRecord]:
        """Takes in a step; returns those that the device has finished, with times for events."""
        self._unresolved.append(record)
        finished = []
        while self._unresolved and all(event.query() for event in _events_of(self._unresolved[0])):
            step = self._unresolved.popleft()
            self._to_ns(step)
            finished.append(step)
        return finished

    def _to_ns(self, record: StepRecord) -> None:
        anchor, anchor_ns = self._anchor, self._anchor_ns
        for owner, names in [(record, _MOMENTS), *((bucket, _BUCKET_MOMENTS) for bucket in record.buckets)]:
            for name in names:
                event = getattr(owner, name)
                if event is not None:
                    ns = anchor_ns + int(anchor.elapsed_time(event) * _NS_PER_MS)
                    setattr(owner, name, ns)
                    if name == "comm_end":  # elapsed_time is a 32-bit number: exact for short times only
                        self._anchor, self._anchor_ns = event, ns


def _events_of(record: StepRecord) -> list[Any]:
    moments = [getattr(record, name) for name in _MOMENTS]
    moments += [getattr(bucket, name) for bucket in record.buckets for name in _BUCKET_MOMENTS]
    return [moment for moment in moments if moment is not None]

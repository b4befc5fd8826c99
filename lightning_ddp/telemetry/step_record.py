"""Records of synchronized steps: forward, backward, and each bucket's way; averages as torch logs them.

The reducer and the wrapper tell a `StepRecorder` of each moment. It keeps the last steps if somebody wants
them, and else times one in a hundred. On the CPU a moment is a reading of the host's clock, on CUDA an event
on the stream, read once the device has passed it; nothing waits for the device.
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
"""Parts of a step whose mean durations are known, and the moments at which they begin and end."""

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_MOST_UNRESOLVED = 64
_NUM_FIRST = 10
_MOMENTS = ("forward_start", "forward_end", "backward_start", "comm_start", "backward_end", "comm_end")
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
    """One synchronized step of this rank; moments in nanoseconds, None where they did not happen."""

    step: int
    """Number of the synchronized backward, the same on all ranks."""
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
    comm_start: Any = None
    """The first bucket is complete, and its reduction about to be started."""

    def phase_ns(self, phase: str) -> int:
        """How long one of `PHASES` took, in a step that had them all."""
        start, end = (int(getattr(self, name)) for name in PHASES[phase])
        return max(0, end - start)

    @property
    def num_bytes(self) -> int:
        """Size of all gradients that were reduced."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def communication_s(self) -> float:
        """Seconds in which at least one bucket was on its way."""
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

        So of two ranks the one with less slack came later, by the difference; their clocks do not matter.
        The rank waits for the last bucket, and so notices its end at once.
        """
        ready = [bucket.ready for bucket in self.buckets]
        if not ready or None in ready or self.buckets[-1].done is None:
            return None
        return int(self.buckets[-1].done - max(ready))


class StepRecorder:
    """Keeps what the last steps of one wrapper did, and means over some. Never communicates, never waits.

    The first ten steps are timed, and one in `sample_rate` after; all of them, with the way of each bucket,
    while records are kept. Of others nothing is noted.

    Args:
        device: where the gradients are.
    """

    def __init__(self, device: torch.device) -> None:
        self.records: deque[StepRecord] = deque(maxlen=0)
        """The last steps, oldest first. On CUDA those that the device has finished."""
        self.sample_rate = 100
        """After ten steps, one in so many is timed."""
        self.mean_ns: dict[str, float] = {}
        """Mean duration of each phase; empty before the first step is timed."""
        self.last_timed: tuple[int, StepRecord] | None = None
        """The last of these steps, and how many forwards there had been with its own."""
        self._device = device
        self._events = _Events(device) if device.type == "cuda" else None
        self._is_keeping = False
        self._open: StepRecord | None = None
        self._buckets: dict[int, BucketRecord] = {}  # of that step, if its record is kept
        self._timed: tuple[int, StepRecord] | None = None  # is over, as far as the host knows
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
        """A forward whose backward is to be synchronized begins. Returns whether the means have changed."""
        is_new = self._update_means()
        self._num_forwards += 1
        is_noted = self._is_keeping or self._is_timed
        self._forward = (self._now() if is_noted else None, None)
        return is_new

    def end_forward(self) -> None:
        """It ends."""
        if self._is_keeping:
            self._forward = (self._forward[0], self._now())

    def start_backward(self, step: int) -> None:
        """The first gradient of synchronized backward `step` is there."""
        self._in_flight.clear()
        self._buckets.clear()
        self._open = None
        if self._is_keeping or self._is_timed:
            start, end = self._forward
            number, now = self._first + step, self._now()
            self._open = StepRecord(number, forward_start=start, forward_end=end, backward_start=now)
        self._forward = (None, None)

    def ready(self, index: int, flat: torch.Tensor) -> None:
        """All that bucket `index` gets is there; `flat` is as large as that."""
        if self._is_keeping and self._open is not None:
            num_bytes = flat.numel() * flat.element_size()
            self._buckets[index] = BucketRecord(index, num_bytes, ready=self._now())
            self._look_for_done()

    def launching(self) -> None:
        """The reduction of a bucket is about to be started."""
        if self._open is not None and self._open.comm_start is None:
            self._open.comm_start = self._now()

    def launched(self, index: int, work: Any) -> None:
        """The reduction of bucket `index` has been started; `work` is its work or future, None for none."""
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
        """All gradients are there."""
        if self._open is not None:
            self._open.backward_end = self._now()
            self._look_for_done()

    def done(self, index: int) -> None:
        """Bucket `index` has been waited for."""
        bucket = self._buckets.get(index)
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
        """Takes in the last timed step, once the device has finished it. Returns whether there was one."""
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

    @property
    def num_new(self) -> int:
        """How many records `take` would return."""
        return min(self._num_added, len(self.records))

    def take(self) -> list[StepRecord]:
        """The records that have been added since the last call, as far as they are still kept."""
        first, self._num_added = len(self.records) - self.num_new, 0
        return list(self.records)[first:]


class _Events:
    """Moments of a CUDA device: events, and what they are in nanoseconds of the host's clock, about."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self.unresolved: deque[StepRecord] = deque(maxlen=_MOST_UNRESOLVED)
        self._anchor = _record_event(device)
        self._anchor_ns = time.perf_counter_ns()

    def record_after(self, work: Any) -> torch.cuda.Event:
        """An event at the end of a work, on a stream that nothing else waits for."""
        with torch.cuda.stream(self._side):
            work.wait()
            return _record_event(self._device)

    def resolve(self) -> list[StepRecord]:
        """Steps that the device has finished meanwhile, now with times for events."""
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
            # elapsed_time is a 32-bit number: exact for short times, such as those within a step
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

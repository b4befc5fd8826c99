"""Run times of sampled steps: when their parts began and ended, and averages of how long they took."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_ddp.errors import ConfigurationError

__all__ = ["PHASES", "RunTimes"]

PHASES = ("forward_compute", "backward_compute", "backward_comm", "backward_compute_comm_overlap")
"""Parts of a step whose durations are known; the last one is communication hidden behind computation."""

_FORWARD, _BACKWARD, _COMM, _BACKWARD_END, _COMM_END = range(5)
_FIRST_ITERATIONS = 10
_NS_PER_MS = 1_000_000


@dataclass
class _Marks:
    """The five moments of one step: host time in ns, and on CUDA an event on the device's current stream."""

    host_ns: list[int | None] = field(default_factory=lambda: [None] * 5)
    events: list[Any] = field(default_factory=lambda: [None] * 5)

    def is_whole(self) -> bool:
        """Whether all five happened, on the device too; does not wait for it."""
        if None in self.host_ns:
            return False
        return all(event is None or event.query() for event in self.events)

    def between_ns(self, start: int, end: int) -> int:
        first, last = self.events[start], self.events[end]
        if first is not None:
            return int(first.elapsed_time(last) * _NS_PER_MS)
        return (self.host_ns[end] or 0) - (self.host_ns[start] or 0)


class RunTimes:
    """Times the steps before the first ten published iterations, and before every `sample_rate`-th after.

    Marks nothing in the other steps. Never waits for a device: on CUDA a step is published only if its
    events are over by then.

    Args:
        device: where the gradients live.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: _Marks | None = None
        self.sample_rate = 100
        self.num_forwards = 0
        self.iteration = 0
        """Forwards before the one at which the figures were published."""
        self.last_ns: dict[str, int] = {}
        """Duration of each phase in the last published step, in nanoseconds."""
        self.mean_ns: dict[str, float] = {}
        """Mean duration of each phase over the published steps, in nanoseconds."""
        self.host_ns: dict[str, int] = {}
        """Start and end of the phases in the last published step, by the host's clock, in nanoseconds."""
        self.num_published = 0

    def set_sample_rate(self, rate: int) -> None:
        """After ten steps, one in `rate` is timed.

        Raises:
            ConfigurationError: the rate is below 1.
        """
        if rate < 1:
            raise ConfigurationError(
                f"DDP runtime logging sample rate {rate}: it should be equal or greater than 1"
            )
        self.sample_rate = rate

    def _is_published(self, iteration: int) -> bool:
        return iteration > 0 and (iteration <= _FIRST_ITERATIONS or iteration % self.sample_rate == 0)

    @property
    def is_on(self) -> bool:
        """Whether the present step is timed."""
        return self._marks is not None

    def start_forward(self) -> bool:
        """A forward whose backward is to be synchronised begins. Returns whether figures were published."""
        is_new = False
        if self._marks is not None and self._is_published(self.num_forwards) and self._marks.is_whole():
            self._publish(self._marks)
            is_new = True
        self.num_forwards += 1
        self._marks = _Marks() if self._is_published(self.num_forwards) else None
        self._mark(_FORWARD)
        return is_new

    def start_backward(self) -> None:
        """The first gradient is there."""
        self._mark(_BACKWARD)

    def start_comm(self) -> None:
        """A bucket is launched; the first one of the step counts."""
        if self._marks is not None and self._marks.host_ns[_COMM] is None:
            self._mark(_COMM)

    def end_backward(self) -> None:
        """All gradients are there."""
        self._mark(_BACKWARD_END)

    def end_comm(self) -> None:
        """All buckets are reduced."""
        self._mark(_COMM_END)

    def _mark(self, moment: int) -> None:
        if self._marks is None:
            return
        self._marks.host_ns[moment] = time.time_ns()
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))  # the process may be on another device
            self._marks.events[moment] = event

    def _publish(self, marks: _Marks) -> None:
        ends = {
            "forward_compute": (_FORWARD, _BACKWARD),
            "backward_compute": (_BACKWARD, _BACKWARD_END),
            "backward_comm": (_COMM, _COMM_END),
            "backward_compute_comm_overlap": (_COMM, _BACKWARD_END),
        }
        self.iteration = self.num_forwards
        self.num_published += 1
        for phase, (start, end) in ends.items():
            duration = max(marks.between_ns(start, end), 0)
            self.last_ns[phase] = duration
            mean = self.mean_ns.get(phase, 0.0)
            self.mean_ns[phase] = mean + (duration - mean) / self.num_published
        names = ("forward_compute", "backward_compute", "backward_comm")
        for phase, moment in zip(names, (_FORWARD, _BACKWARD, _COMM), strict=True):
            self.host_ns[f"{phase}_time_start"] = marks.host_ns[moment] or 0
        self.host_ns["backward_compute_time_end"] = marks.host_ns[_BACKWARD_END] or 0
        self.host_ns["backward_comm_time_end"] = marks.host_ns[_COMM_END] or 0

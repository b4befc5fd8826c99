"""One step as a sequence of events: backward, the thread of a hook, the link, and the cores they share."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ddp.errors import ConfigurationError
from lightning_ddp.scaling.network import Network, Transfer
from lightning_ddp.scaling.profile import StepProfile
from lightning_ddp.scaling.program import Program, Send, Wait, Work

__all__ = ["SimulatedBucket", "SimulatedStep", "simulate"]

_LEAST_SHARE = 0.05
"""Part of a core that is left for computing, however much communication takes."""


@dataclass(frozen=True, kw_only=True)
class SimulatedBucket:
    """A bucket's way; seconds since the forward began."""

    num_bytes: int
    ready_s: float
    launched_s: float
    """Its turn in the hook's thread, or on the link."""
    done_s: float


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """What a step would be like."""

    step_s: float
    """From one forward to the next."""
    backward_end_s: float
    """Later than recorded where communication takes the cores."""
    exposed_s: float
    """From the end of backward to the end of the last bucket."""
    buckets: tuple[SimulatedBucket, ...]


def simulate(
    profile: StepProfile,
    programs: Sequence[Program],
    network: Network,
    num_ranks: int,
    *,
    cores: float = math.inf,
    is_queued: bool = True,
) -> SimulatedStep:
    """Plays one step of ranks that are all alike.

    Args:
        profile: what they compute.
        programs: what happens to each of its buckets.
        network: what collectives cost; they pass it in the order in which they are started.
        num_ranks: how many take part.
        cores: of a rank. Backward, the hook's arithmetic and the CPU work of sending share them evenly;
            infinitely many where they do not disturb each other, as on a GPU with its own network card.
        is_queued: whether one thread takes the buckets one after the other.

    Raises:
        ConfigurationError: there are more or fewer programs than buckets, or a program waits for what it has
            not started.
    """
    if len(programs) != len(profile.ready):
        raise ConfigurationError(f"{len(programs)} programs for {len(profile.ready)} buckets")
    run = _Run(profile, programs, _Link(network, num_ranks), cores, is_queued)
    while run.advance():
        pass
    last = max(run.done_s)
    end = run.backward_end_s
    buckets = tuple(
        SimulatedBucket(num_bytes=size, ready_s=ready, launched_s=launched, done_s=done)
        for (size, _), ready, launched, done in zip(
            profile.ready, run.ready_s, run.launched_s, run.done_s, strict=True
        )
    )
    return SimulatedStep(
        step_s=max(end, last) + profile.rest_s,
        backward_end_s=end,
        exposed_s=max(0.0, last - end),
        buckets=buckets,
    )


class _Link:
    """Passes collectives one after the other."""

    def __init__(self, network: Network, num_ranks: int) -> None:
        self._network = network
        self._num_ranks = num_ranks
        self._queue: deque[tuple[object, Transfer]] = deque()
        self._saved = 0.0  # bytes that would pass at once
        self._idle_since = 0.0
        self.remaining_s = math.inf
        """Of the collective that is on its way."""
        self.cpu_share = 0.0
        """Cores that it takes."""
        self._current: object = None
        self.ended: set[object] = set()

    def send(self, key: object, op: Send) -> None:
        self._queue.append((key, self._network.transfer(op.kind, op.num_bytes, self._num_ranks)))

    def start_next(self, now: float) -> None:
        if self._current is not None or not self._queue:
            return
        self._current, transfer = self._queue.popleft()
        network, slope = self._network, self._network.hop.seconds_per_byte
        if network.burst_bytes and slope:
            idle_s = now - self._idle_since + transfer.fixed_s  # nothing passes during a latency either
            self._saved = min(network.burst_bytes, self._saved + idle_s / slope)
        free = min(self._saved, transfer.link_bytes)
        self._saved -= free
        self.remaining_s = transfer.fixed_s + (transfer.link_bytes - free) * slope
        cpu_s = transfer.link_bytes * network.cpu_seconds_per_byte
        self.remaining_s = max(self.remaining_s, cpu_s)  # no faster than the CPU
        self.cpu_share = cpu_s / self.remaining_s if self.remaining_s else 0.0

    def pass_time(self, seconds: float, now: float) -> None:
        if self._current is None:
            return
        self.remaining_s -= seconds
        if self.remaining_s <= 1e-12:
            self.ended.add(self._current)
            self._current, self.remaining_s, self.cpu_share = None, math.inf, 0.0
            self._idle_since = now


class _Thread:
    """Does the programs of its buckets, each once the bucket is ready."""

    def __init__(self, jobs: Sequence[tuple[int, Program]]) -> None:
        self._jobs = deque(jobs)
        self._ops: deque[tuple[int, object]] = deque()
        self._bucket = -1
        self.remaining_s = math.inf
        """Of its arithmetic; infinite while it waits."""

    def go_on(self, run: _Run) -> bool:
        """Does what takes no time; whether there was anything."""
        if self.remaining_s <= 1e-12:
            self.remaining_s = math.inf
            self._ops.popleft()
        elif self.remaining_s < math.inf:
            return False
        if self._bucket < 0:
            if not self._jobs or math.isnan(run.ready_s[self._jobs[0][0]]):
                return False
            self._bucket, program = self._jobs.popleft()
            self._ops = deque((self._bucket, op) for op in program)
            run.launched_s[self._bucket] = run.now
            return True
        if not self._ops:
            run.done_s[self._bucket] = run.now
            self._bucket = -1
            return True
        op = self._ops[0][1]
        if isinstance(op, Work):
            self.remaining_s = op.seconds
            return op.seconds <= 1e-12
        if isinstance(op, Send):
            run.link.send((self._bucket, op.ticket), op)
        elif isinstance(op, Wait) and (self._bucket, op.ticket) not in run.link.ended:
            return False
        self._ops.popleft()
        return True


class _Run:
    """The state of a step between two events."""

    def __init__(
        self, profile: StepProfile, programs: Sequence[Program], link: _Link, cores: float, is_queued: bool
    ) -> None:
        self.now = 0.0
        self.link = link
        self._cores = cores
        jobs = list(enumerate(programs))
        self._threads = [_Thread(jobs)] if is_queued else [_Thread([job]) for job in jobs]
        count = len(jobs)
        self.ready_s, self.launched_s, self.done_s = ([math.nan] * count for _ in range(3))
        self.backward_end_s = math.nan
        self._computed = 0.0
        self._targets = deque((seconds, index) for index, (_, seconds) in enumerate(profile.ready))
        self._targets.append((max(profile.backward_end_s, *(s for _, s in profile.ready)), -1))

    def advance(self) -> bool:
        """On to the next event; False where all has ended."""
        self._do_what_takes_no_time()
        compute_s = self._targets[0][0] - self._computed if self._targets else math.inf
        busy = [t for t in self._threads if t.remaining_s < math.inf]
        num_tasks = len(busy) + (compute_s < math.inf)
        left = max(self._cores - self.link.cpu_share, _LEAST_SHARE)
        rate = min(1.0, left / num_tasks) if num_tasks else 1.0
        work_s = min([compute_s, *(thread.remaining_s for thread in busy)])
        seconds = min(work_s / rate, self.link.remaining_s)
        if seconds == math.inf:
            if any(math.isnan(moment) for moment in self.done_s):
                raise ConfigurationError("a program waits for a collective that it has not started")
            return False
        self.now += seconds
        self.link.pass_time(seconds, self.now)
        for thread in busy:
            thread.remaining_s -= seconds * rate
        if compute_s < math.inf:
            self._computed += seconds * rate
        return True

    def _do_what_takes_no_time(self) -> None:
        while self._targets and self._targets[0][0] - self._computed <= 1e-12:
            _, index = self._targets.popleft()
            if index < 0:
                self.backward_end_s = self.now
            else:
                self.ready_s[index] = self.now
        has_changed = True
        while has_changed:
            has_changed = any(thread.go_on(self) for thread in self._threads)
        self.link.start_next(self.now)

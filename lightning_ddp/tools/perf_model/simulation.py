"""Simulation of a step: plays backward, the thread of a hook, the link, and the cores they share."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ddp.errors import ConfigurationError
from lightning_ddp.tools.perf_model.network import Network
from lightning_ddp.tools.perf_model.profile import StepProfile
from lightning_ddp.tools.perf_model.program import Program, Send, Wait, Work

__all__ = ["SimulatedBucket", "SimulatedStep", "simulate"]

_LEAST_SHARE = 0.05
"""Part of a core that is left for computing, however much communication takes."""
_INSTANT_S = 1e-12
"""What is shorter is over."""


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


@dataclass(kw_only=True)
class _UnderWay:
    """A collective that is on its way."""

    key: object
    fixed_s: float
    """Left of what needs no link."""
    link_s: float
    """Left of its time on the link."""
    cpu_share: float
    """Cores that it takes while it is on the link."""


class _Link:
    """Passes the bytes of collectives one after the other; while some wait for a hop, others may pass."""

    def __init__(self, network: Network, num_ranks: int) -> None:
        self._network = network
        self._num_ranks = num_ranks
        self._queue: deque[_UnderWay] = deque()
        self._under_way: list[_UnderWay] = []
        self.ended: set[object] = set()

    def send(self, key: object, op: Send) -> None:
        network = self._network
        transfer = network.transfer(op.kind, op.num_bytes, self._num_ranks)
        cpu_s = transfer.link_bytes * network.cpu_seconds_per_byte
        link_s = max(transfer.link_bytes * network.hop.seconds_per_byte, cpu_s)  # no faster than the CPU
        share = cpu_s / link_s if link_s else 0.0
        self._queue.append(_UnderWay(key=key, fixed_s=transfer.fixed_s, link_s=link_s, cpu_share=share))

    def start_next(self) -> None:
        while self._queue and len(self._under_way) < self._network.num_in_flight:
            self._under_way.append(self._queue.popleft())

    @property
    def _passing(self) -> _UnderWay | None:
        """The one whose bytes are on the link."""
        return next((t for t in self._under_way if t.fixed_s <= _INSTANT_S), None)

    @property
    def cpu_share(self) -> float:
        passing = self._passing
        return passing.cpu_share if passing is not None else 0.0

    @property
    def remaining_s(self) -> float:
        """Until anything changes; infinite if nothing is on its way."""
        passing = self._passing
        left = [t.fixed_s for t in self._under_way if t.fixed_s > _INSTANT_S]
        return min([*left, passing.link_s if passing is not None else math.inf])

    def pass_time(self, seconds: float) -> None:
        passing = self._passing
        for transfer in self._under_way:
            if transfer.fixed_s > _INSTANT_S:
                transfer.fixed_s -= seconds
        if passing is not None:
            passing.link_s -= seconds
            if passing.link_s <= _INSTANT_S:
                self.ended.add(passing.key)
                self._under_way.remove(passing)


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
        if self.remaining_s <= _INSTANT_S:
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
            return op.seconds <= _INSTANT_S
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
        self.link.pass_time(seconds)
        for thread in busy:
            thread.remaining_s -= seconds * rate
        if compute_s < math.inf:
            self._computed += seconds * rate
        return True

    def _do_what_takes_no_time(self) -> None:
        while self._targets and self._targets[0][0] - self._computed <= _INSTANT_S:
            _, index = self._targets.popleft()
            if index < 0:
                self.backward_end_s = self.now
            else:
                self.ready_s[index] = self.now
        has_changed = True
        while has_changed:
            has_changed = any(thread.go_on(self) for thread in self._threads)
        self.link.start_next()

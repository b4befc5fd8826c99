"""Simulation of a step: plays backward, the thread of a hook, the link, and the cores they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from lightning_ddp.errors import ConfigurationError
from lightning_ddp.tools.perf_model.network import Network
from lightning_ddp.tools.perf_model.profile import StepProfile
from lightning_ddp.tools.perf_model.program import Program, Send, Work

_LEAST_SHARE = 0.05
"""Part of a core that is left for computing, however much communication takes."""
_INSTANT_S = 1e-12
"""What is shorter is over."""

_Task = Generator[float | Callable[[], bool], None, None]
"""Yields seconds of arithmetic, or what it waits for."""


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """What a step would be like; moments are seconds since the forward began."""

    step_s: float
    """From one forward to the next."""
    backward_end_s: float
    """Later than recorded where communication takes the cores."""
    exposed_s: float
    """From the end of backward to the end of the last bucket."""
    done_s: list[float]
    """The end of each bucket."""


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
    run = _Run(profile, programs, _Link(network, num_ranks), is_queued)
    run.play(cores)
    last = max(run.done_s)
    return SimulatedStep(
        step_s=max(run.backward_end_s, last) + profile.rest_s,
        backward_end_s=run.backward_end_s,
        exposed_s=max(0.0, last - run.backward_end_s),
        done_s=run.done_s,
    )


@dataclass(kw_only=True)
class _Collective:
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
        self._queue: list[_Collective] = []
        self.ended: set[object] = set()

    def send(self, key: object, op: Send) -> None:
        network = self._network
        transfer = network.transfer(op.kind, op.num_bytes, self._num_ranks)
        cpu_s = transfer.link_bytes * network.cpu_seconds_per_byte
        link_s = max(transfer.link_bytes * network.hop.seconds_per_byte, cpu_s)  # no faster than the CPU
        share = cpu_s / link_s if link_s else 0.0
        self._queue.append(_Collective(key=key, fixed_s=transfer.fixed_s, link_s=link_s, cpu_share=share))

    @property
    def _under_way(self) -> list[_Collective]:
        return self._queue[: self._network.num_in_flight]

    @property
    def _passing(self) -> _Collective | None:
        """The one whose bytes are on the link."""
        return next((c for c in self._under_way if c.fixed_s <= _INSTANT_S), None)

    @property
    def cpu_share(self) -> float:
        passing = self._passing
        return passing.cpu_share if passing is not None else 0.0

    @property
    def remaining_s(self) -> float:
        """Until anything changes; infinite if nothing is on its way."""
        passing = self._passing
        left = [c.fixed_s for c in self._under_way if c.fixed_s > _INSTANT_S]
        return min([*left, passing.link_s if passing is not None else math.inf])

    def pass_time(self, seconds: float) -> None:
        passing = self._passing
        for collective in self._under_way:
            collective.fixed_s -= seconds if collective.fixed_s > _INSTANT_S else 0.0
        if passing is not None:
            passing.link_s -= seconds
            if passing.link_s <= _INSTANT_S:
                self.ended.add(passing.key)
                self._queue.remove(passing)


class _Thread:
    """A task, and what is left of what it has yielded last."""

    def __init__(self, task: _Task) -> None:
        self._task = task
        self._until: Callable[[], bool] = lambda: True
        self.remaining_s = math.inf
        """Of its arithmetic; infinite while it waits or is over."""

    def go_on(self) -> bool:
        """Does what takes no time; whether there was anything."""
        if self.remaining_s > _INSTANT_S and not (self.remaining_s == math.inf and self._until()):
            return False
        self.remaining_s, self._until = math.inf, lambda: False
        for what in self._task:
            if callable(what):
                self._until = what
            else:
                self.remaining_s = what
            break
        return True


class _Run:
    """The state of a step between two events."""

    def __init__(
        self, profile: StepProfile, programs: Sequence[Program], link: _Link, is_queued: bool
    ) -> None:
        self._now = 0.0
        self._link = link
        count = len(programs)
        self.ready_s, self.done_s = [math.nan] * count, [math.nan] * count
        self.backward_end_s = math.nan
        jobs = list(enumerate(programs))
        tasks = [self._do(jobs)] if is_queued else [self._do([job]) for job in jobs]
        self._threads = [_Thread(task) for task in (self._backward(profile), *tasks)]

    def _backward(self, profile: StepProfile) -> _Task:
        computed = 0.0
        for index, (_, seconds) in enumerate(profile.ready):
            yield max(0.0, seconds - computed)
            computed = max(computed, seconds)
            self.ready_s[index] = self._now
        yield max(0.0, profile.backward_end_s - computed)
        self.backward_end_s = self._now

    def _do(self, jobs: Sequence[tuple[int, Program]]) -> _Task:
        """The programs of some buckets, each once the bucket is ready."""
        for index, program in jobs:
            yield lambda index=index: not math.isnan(self.ready_s[index])  # type: ignore[misc]  # its default
            for op in program:
                if isinstance(op, Work):
                    yield op.seconds
                elif isinstance(op, Send):
                    self._link.send((index, op.ticket), op)
                else:
                    yield lambda key=(index, op.ticket): key in self._link.ended  # type: ignore[misc]
            self.done_s[index] = self._now

    def play(self, cores: float) -> None:
        """On from event to event until all has ended."""
        while True:
            while any(thread.go_on() for thread in self._threads):
                pass
            busy = [thread for thread in self._threads if thread.remaining_s < math.inf]
            left = max(cores - self._link.cpu_share, _LEAST_SHARE)
            rate = min(1.0, left / len(busy)) if busy else 1.0
            work_s = min([thread.remaining_s for thread in busy], default=math.inf)
            seconds = min(work_s / rate, self._link.remaining_s)
            if seconds == math.inf:
                break
            self._now += seconds
            self._link.pass_time(seconds)
            for thread in busy:
                thread.remaining_s -= seconds * rate
        if any(map(math.isnan, self.done_s)):
            raise ConfigurationError("a program waits for a collective that it has not started")

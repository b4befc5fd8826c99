"""The history of a run that went on after failures: its generations, who left and why. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_ddp.supervise.failure_record import FailureRecord

__all__ = ["Generation", "History"]

_MOST_SHOWN = 20


@dataclass
class Generation:
    """One that followed another."""

    number: int
    step: int
    """Optimizer steps that were committed when it began."""
    old_world_size: int
    new_world_size: int
    left: Sequence[FailureRecord]
    """Those that were lost, with the ranks that they had."""
    joined: Sequence[int] = ()
    """Its ranks that were not in the one before."""
    seconds: float | None = None
    """From the first loss until all went on; None while they have not."""


@dataclass
class History:
    """Of one run, as the control server sees it."""

    generations: list[Generation] = field(default_factory=list)
    _left: dict[int, FailureRecord] = field(default_factory=dict)
    _since: float | None = None

    def lost(self, place: int, record: FailureRecord, now: float) -> None:
        """A process is lost, and the others are called together.

        Args:
            place: the rank that it had in the beginning.
            record: how; with the rank that it had last.
            now: when, in seconds.
        """
        self._left.setdefault(place, record)
        self._since = now if self._since is None else self._since

    def released(self, place: int, record: FailureRecord) -> None:
        """A process leaves, as it was asked to; arguments as of `lost`. The next generation is without it."""
        self._left[place] = record

    def formed(self, number: int, step: int, before: Sequence[int], after: Sequence[int], now: float) -> None:
        """The next generation is known.

        Args:
            number: its own.
            step: from which it goes on.
            before: places of the last one, by rank.
            after: places of this one.
            now: when.
        """
        self._since = now if self._since is None else self._since
        left = [self._left.pop(place) for place in before if place not in after and place in self._left]
        joined = [rank for rank, place in enumerate(after) if place not in before]
        self.generations.append(Generation(number, step, len(before), len(after), left, joined))

    def went_on(self, now: float) -> None:
        """All of the last generation go on."""
        if self._since is not None and self.generations:
            self.generations[-1].seconds = now - self._since
            self._since = None

    def render(self) -> str:
        """What people read; empty where nothing has happened.

        >>> history = History()
        >>> gone = FailureRecord(rank=1, host="gpu-07", pid=6091, message="was killed by SIGKILL")
        >>> history.lost(1, gone, 10.0)
        >>> history.formed(1, 3, [0, 1], [0], 10.1)
        >>> history.went_on(10.25)
        >>> print(history.render(), end="")
        lightning_ddp: this run went on 1 time with other ranks, 0.25 s lost:
          step 3: 2 -> 1 ranks after 0.25 s; left: rank 1 (host gpu-07, pid 6091) was killed by SIGKILL
        """
        if not self.generations:
            return ""
        number = len(self.generations)
        seconds = sum(generation.seconds or 0.0 for generation in self.generations)
        times = "time" if number == 1 else "times"
        head = f"lightning_ddp: this run went on {number} {times} with other ranks, {seconds:.2f} s lost:\n"
        lines = [f"  {_line(generation)}\n" for generation in self.generations[-_MOST_SHOWN:]]
        if number > _MOST_SHOWN:
            lines.insert(0, f"  ... {number - _MOST_SHOWN} more before\n")
        return head + "".join(lines)


def _line(generation: Generation) -> str:
    after = "" if generation.seconds is None else f" after {generation.seconds:.2f} s"
    parts = [
        f"step {generation.step}: {generation.old_world_size} -> {generation.new_world_size} ranks{after}"
    ]
    if generation.left:
        parts.append(f"left: {', '.join(map(_who, generation.left))}")
    if generation.joined:
        parts.append(f"joined: rank {', '.join(map(str, generation.joined))}")
    return "; ".join(parts)


def _who(record: FailureRecord) -> str:
    facts = {"host": record.host, "pid": record.pid}
    where = ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None)
    why = f"{record.exception_type}: {record.message}" if record.exception_type else record.message
    line = why.strip().partition("\n")[0].partition("; what it printed")[0]
    return f"rank {record.rank} ({where}) {line.removeprefix('the process ')}"

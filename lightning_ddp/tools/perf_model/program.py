"""Hook programs: describe what a hook does with a bucket, so that it can be simulated with more ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ddp.tools.perf_model.network import Kind

__all__ = ["HookModel", "Op", "Program", "Send", "Wait", "Work", "plain_model"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Arithmetic of the hook."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Send:
    """The start of a collective."""

    kind: Kind
    num_bytes: float
    """As `Network.transfer` takes it."""
    ticket: int
    """By which `Wait` names it."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """The wait for a collective."""

    ticket: int


Op = Work | Send | Wait
Program = tuple[Op, ...]
"""What happens to one bucket, one after the other."""


@dataclass(frozen=True, kw_only=True)
class HookModel:
    """What a hook does with the buckets of one model."""

    name: str
    few: tuple[Program, ...]
    """A program a bucket, with `num_few` ranks."""
    many: tuple[Program, ...]
    """The same with `num_many`: what differs depends on the number of ranks."""
    num_few: int = 2
    num_many: int = 2
    is_queued: bool = True
    """Whether one thread takes the buckets one after the other; else each waits for nothing but the link."""

    def programs(self, num_ranks: int) -> list[Program]:
        """What happens to each bucket with `num_ranks` ranks.

        Where each rank gives the others as much however many they are, both that and the arithmetic on what
        comes from all of them grow with the ranks; parts of a whole shrink with them; else all stays.
        """
        return [self._at(few, many, num_ranks) for few, many in zip(self.few, self.many, strict=True)]

    def _at(self, few: Program, many: Program, num_ranks: int) -> Program:
        if self.num_many == self.num_few:
            return few
        grows = any(
            isinstance(a, Send) and a.kind == "all_gather" and not _shrinks(a, b)
            for a, b in zip(few, many, strict=True)
        )
        factor = (num_ranks - self.num_few) / (self.num_many - self.num_few) if grows else 0.0
        ops: list[Op] = []
        for op, other in zip(few, many, strict=True):
            if isinstance(op, Work) and isinstance(other, Work):
                seconds = op.seconds + factor * max(0.0, other.seconds - op.seconds)
                ops.append(Work(seconds=max(0.0, seconds)))
            elif isinstance(op, Send) and _shrinks(op, other):
                size = op.num_bytes * self.num_few / num_ranks
                ops.append(Send(kind=op.kind, num_bytes=size, ticket=op.ticket))
            else:
                ops.append(op)
        return tuple(ops)

    def num_bytes_sent(self, num_ranks: int) -> float:
        """Bytes that a rank sends in a step when the backend uses a ring, as hooks count them."""
        others = num_ranks - 1
        factors = {
            "all_reduce": 2 * others / num_ranks,
            "all_to_all": others / num_ranks,
            "all_gather": others,
        }
        sends = [op for program in self.programs(num_ranks) for op in program if isinstance(op, Send)]
        return sum(factors[op.kind] * op.num_bytes for op in sends)


def _shrinks(few: Op, many: Op) -> bool:
    """Whether a gathered tensor is a share of a whole: with more ranks it is smaller."""
    is_gather = isinstance(few, Send) and isinstance(many, Send) and few.kind == "all_gather"
    return is_gather and many.num_bytes < 0.75 * few.num_bytes  # type: ignore[union-attr]  # both are Send


def plain_model(sizes: Sequence[int]) -> HookModel:
    """The reducer without a hook: an all-reduce a bucket.

    Args:
        sizes: bytes of the buckets.
    """
    programs = tuple((Send(kind="all_reduce", num_bytes=size, ticket=0), Wait(ticket=0)) for size in sizes)
    return HookModel(name="none", few=programs, many=programs, is_queued=False)

"""Hook programs: the operations of a hook on a bucket, recorded without communication."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from lightning_ddp.encoding.side_stream import Channel
from lightning_ddp.hooks.base import Part, StatefulHook
from lightning_ddp.hooks.catalogue import HookPlan, make_hook, parse_hook

Kind = Literal["all_reduce", "all_to_all", "all_gather"]
Shapes = tuple[tuple[int, ...], ...]
"""Shapes of parameters."""

_SETTLED_STEP = 10**9
"""Number of a step that is after every warm-up."""
_NUM_FEW, _NUM_MANY = 2, 8
_NUM_WARMUP = 2


@dataclass(frozen=True, kw_only=True)
class Work:
    """Arithmetic of the hook, of some duration."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Send:
    """The start of a collective, of as many bytes as `Network.transfer` takes."""

    kind: Kind
    num_bytes: float
    ticket: int
    """Identifier for its `Wait`."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """The wait for a collective."""

    ticket: int


Op = Work | Send | Wait
Program = tuple[Op, ...]
"""Operations on one bucket, in order."""


@dataclass(frozen=True, kw_only=True)
class HookModel:
    """Programs of a hook, one per bucket of a model, recorded with few and with many ranks."""

    few: tuple[Program, ...]
    many: tuple[Program, ...]
    num_few: int = _NUM_FEW
    num_many: int = _NUM_MANY
    is_queued: bool = True
    """True if one thread handles the buckets one after the other; False if each waits for the link only."""

    def programs(self, num_ranks: int) -> list[Program]:
        """Return the program of each bucket with `num_ranks` ranks.

        Gathered tensors of constant size make the traffic, and the arithmetic on them, grow with the number
        of ranks. Gathered shares of a whole shrink with it. Everything else is constant.
        """
        return [self._at(few, many, num_ranks) for few, many in zip(self.few, self.many, strict=True)]

    def _at(self, few: Program, many: Program, num_ranks: int) -> Program:
        pairs = list(zip(few, many, strict=True))
        grows = any(isinstance(a, Send) and a.kind == "all_gather" and not _shrinks(a, b) for a, b in pairs)
        factor = (num_ranks - self.num_few) / (self.num_many - self.num_few) if grows else 0.0
        ops: list[Op] = []
        for op, other in pairs:
            if isinstance(op, Work) and isinstance(other, Work):
                seconds = op.seconds + factor * max(0.0, other.seconds - op.seconds)
                ops.append(Work(seconds=max(0.0, seconds)))
            elif isinstance(op, Send) and _shrinks(op, other):
                ops.append(replace(op, num_bytes=op.num_bytes * self.num_few / num_ranks))
            else:
                ops.append(op)
        return tuple(ops)


def _shrinks(few: Send, many: Op) -> bool:
    """Return True if a gathered tensor is a share of a whole, which is smaller with more ranks."""
    return few.kind == "all_gather" and isinstance(many, Send) and many.num_bytes < 0.75 * few.num_bytes


def plain_model(sizes: Sequence[int]) -> HookModel:
    """Return the model of the reducer without a hook: an all-reduce of each bucket of `sizes` bytes."""
    programs = tuple((Send(kind="all_reduce", num_bytes=size, ticket=0), Wait(ticket=0)) for size in sizes)
    return HookModel(few=programs, many=programs, is_queued=False)


class _Notebook(Channel):
    """A channel of `size` equal ranks that sends nothing and records all operations."""

    def __init__(self, size: int, device: torch.device) -> None:
        # Channel's constructor would make a group and a thread.
        self.device = device
        self.rank = 0
        self.size = size
        self.num_bytes_sent = 0
        self._ops: list[Op] = []
        self._since = 0.0

    def note(self, job: Callable[[], object]) -> Program:
        """Run a job and return its recorded operations."""
        self._ops = []
        self._since = self._now()
        job()
        self._note()
        return tuple(self._ops)

    def _note(self, *ops: Op) -> None:
        """Record the arithmetic since the last record, and the operations after it."""
        self._ops += [Work(seconds=self._now() - self._since), *ops]

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def empties(self, count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return `count` 1-D tensors of `numel` elements."""
        return [torch.empty(numel, dtype=dtype, device=self.device) for _ in range(count)]

    def start_all_reduce(self, tensor: torch.Tensor, op: Any = None) -> Callable[[], torch.Tensor]:
        """Record an all-reduce, with the sum of equal ranks as its result."""
        return self._start("all_reduce", tensor, lambda: tensor.mul_(self.size) if op is None else tensor)

    def start_all_to_all(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Record an all-to-all."""
        return self._start("all_to_all", rows, rows.clone)

    def start_all_gather(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Record an all-gather."""
        shape = (self.size, *tensor.shape)
        return self._start("all_gather", tensor, lambda: tensor.expand(shape).contiguous())

    def read(self, tensor: torch.Tensor) -> Any:
        """Return the value of a one-element tensor."""
        return tensor.item()

    def _start(
        self, kind: Kind, tensor: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> Callable[[], torch.Tensor]:
        ticket = len(self._ops)
        num_bytes = tensor.numel() * tensor.element_size()
        self._note(Send(kind=kind, num_bytes=num_bytes, ticket=ticket))
        result = run()
        self._since = self._now()

        def wait() -> torch.Tensor:
            self._note(Wait(ticket=ticket))
            self._since = self._now()
            return result

        return wait


def trace_hook(
    spec: Any, buckets: Sequence[Shapes], *, device: torch.device | None = None, num_runs: int = 5
) -> HookModel:
    """Record the operations of a hook on the buckets of a model, without communication.

    Records its collectives with their sizes, and the durations of its arithmetic between them, in a step
    after any warm-up: the median of `num_runs` runs with random gradients.
    """
    plan = spec if isinstance(spec, HookPlan) else parse_hook(spec)
    where = device or torch.device("cpu")
    parts = [_part(shapes, i, i == len(buckets) - 1) for i, shapes in enumerate(buckets)]
    gradients = [torch.randn(sum(part.sizes), device=where) for part in parts]
    programs = []
    for num_ranks in (_NUM_FEW, _NUM_MANY):
        channel = _Notebook(num_ranks, where)
        hook = make_hook(plan, channel)
        if isinstance(hook, StatefulHook):
            hook.step = _SETTLED_STEP
        runs: list[list[Program]] = []
        with torch.no_grad():
            for _ in range(_NUM_WARMUP + num_runs):
                fresh = [replace(part, buffer=g.clone()) for part, g in zip(parts, gradients, strict=True)]
                runs.append([channel.note(partial(hook.run, part)) for part in fresh])
        programs.append(tuple(_median(same) for same in zip(*runs[_NUM_WARMUP:], strict=True)))
    return HookModel(few=programs[0], many=programs[1])


def _part(shapes: Shapes, index: int, is_last: bool) -> Part:
    return Part(
        buffer=torch.empty(0),
        names=tuple(f"bucket {index} parameter {position}" for position in range(len(shapes))),
        shapes=shapes,
        absent=frozenset(),
        index=index,
        is_last=is_last,
        loss_scale=1.0,
    )


def _median(programs: Sequence[Program]) -> Program:
    """Return the program with the median durations of several programs."""
    ops: list[Op] = []
    for column in zip(*programs, strict=True):
        seconds = [op.seconds for op in column if isinstance(op, Work)]
        ops.append(Work(seconds=statistics.median(seconds)) if seconds else column[0])
    return tuple(ops)

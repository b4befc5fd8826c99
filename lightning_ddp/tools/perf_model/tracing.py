"""Trace of a hook: what it does with a bucket, noted where it runs alone and its collectives go nowhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_ddp.encoding.side_stream import Channel
from lightning_ddp.hooks.base import Part, StatefulHook
from lightning_ddp.hooks.catalogue import HookPlan, make_hook, parse_hook
from lightning_ddp.tools.perf_model.network import Kind
from lightning_ddp.tools.perf_model.profile import Shapes
from lightning_ddp.tools.perf_model.program import HookModel, Op, Program, Send, Wait, Work

__all__ = ["trace_hook"]

_SETTLED_STEP = 10**9
"""A step after every warm-up."""
_NUM_FEW, _NUM_MANY = 2, 8
_NUM_WARMUP = 2


class _Notebook(Channel):
    """A channel whose other ranks are as this one: nothing is sent, and all is noted.

    Args:
        size: number of ranks that it pretends.
        device: of the gradients.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        # no group and no thread, which Channel's own constructor makes
        self.device = device
        self.rank = 0
        self.size = size
        self.num_bytes_sent = 0
        self._ops: list[Op] = []
        self._num_sent = 0
        self._since = 0.0

    def note(self, job: Callable[[], object]) -> Program:
        """What a job does."""
        self._ops, self._num_sent = [], 0
        self._begin()
        job()
        self._end()
        return tuple(self._ops)

    def _begin(self) -> None:
        self._since = self._now()

    def _end(self) -> None:
        self._ops.append(Work(seconds=self._now() - self._since))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def empties(self, count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """1-D tensors."""
        return [torch.empty(numel, dtype=dtype, device=self.device) for _ in range(count)]

    def start_all_reduce(self, tensor: torch.Tensor, op: Any = None) -> Callable[[], torch.Tensor]:
        """Notes an all-reduce; the sum is that of equal ranks."""
        return self._start("all_reduce", tensor, lambda: tensor.mul_(self.size) if op is None else tensor)

    def start_all_to_all(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Notes an all-to-all."""
        return self._start("all_to_all", rows, rows.clone)

    def start_all_gather(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Notes an all-gather."""
        shape = (self.size, *tensor.shape)
        return self._start("all_gather", tensor, lambda: tensor.expand(shape).contiguous())

    def read(self, tensor: torch.Tensor) -> Any:
        """The value of a tensor of one element."""
        return tensor.item()

    def _start(
        self, kind: Kind, tensor: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> Callable[[], torch.Tensor]:
        self._end()
        ticket = self._num_sent
        self._num_sent += 1
        num_bytes = tensor.numel() * tensor.element_size()
        self._ops.append(Send(kind=kind, num_bytes=num_bytes, ticket=ticket))
        result = run()
        self._begin()

        def wait() -> torch.Tensor:
            self._end()
            self._ops.append(Wait(ticket=ticket))
            self._begin()
            return result

        return wait


def trace_hook(
    spec: Any, buckets: Sequence[Shapes], *, device: torch.device | None = None, num_runs: int = 5
) -> HookModel:
    """Note what a hook does with the buckets of a model, with any number of ranks. Does not communicate.

    Its collectives and their sizes are noted, and the time of its arithmetic between them, after the warm-up
    steps that it may have.

    Args:
        spec: of the hook, as for `parse_hook`.
        buckets: shapes of the parameters of each bucket.
        device: of the gradients, which are random; None for the CPU.
        num_runs: of whose times the medians are taken.

    Raises:
        ConfigurationError: the specification cannot be used.
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
    few, many = programs
    return HookModel(name=plan.name, few=few, many=many, num_few=_NUM_FEW, num_many=_NUM_MANY)


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
    """One program of several that differ in their times."""
    ops: list[Op] = []
    for column in zip(*programs, strict=True):
        seconds = [op.seconds for op in column if isinstance(op, Work)]
        ops.append(Work(seconds=statistics.median(seconds)) if seconds else column[0])
    return tuple(ops)

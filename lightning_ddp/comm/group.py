"""Process group wrapper: starts collectives that return works, and waits for them with deadlines."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from lightning_ddp._torch import known_groups, without_engine_context
from lightning_ddp.comm.interpreter_exit import note_sent
from lightning_ddp.comm.interrupt import Interrupt
from lightning_ddp.comm.waits import Waits

__all__ = ["Group"]


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A view without complex numbers, which most backends do not know."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def options_of(kind: Any, timeout: timedelta | None) -> Any:
    """Options of a collective, such as `dist.ReduceOptions`, that the backend gives up after `timeout`."""
    options = kind()
    if timeout is not None:
        options.timeout = timeout
    return options


class Group(Waits):
    """What the engine needs of a process group: rank, size, store, collectives that return works, waits.

    Never uses the default group by itself, so ranks may be threads of one process. Methods that start a
    collective must be called by all ranks of the group in one order.

    Args:
        process_group: a `torch.distributed.ProcessGroup`, or a single backend such as `ProcessGroupGloo`.
        interrupt: looked at in every slice of a wait; None for none.
        store: a key-value store that these ranks alone use; None for the one that torch knows of.
        transport: how CPU ranks of one host send gradients and parameters; see `comm.hosts`.
    """

    _counts: ClassVar[weakref.WeakKeyDictionary[Any, Counter[Hashable]]] = weakref.WeakKeyDictionary()
    """Of each process group, which several objects of this class may be of."""

    def __init__(
        self,
        process_group: Any,
        interrupt: Interrupt | None = None,
        store: Any | None = None,
        *,
        transport: str = "auto",
    ) -> None:
        super().__init__(process_group, interrupt)
        self.transport = transport
        self._store = store
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self.lacking: set[tuple[str, str]] = set()
        """Methods of the process group, with the type of device, that it turned out not to have."""
        self._sum = dist.AllreduceOptions()
        self._sum.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        self._gather = options_of(dist.distributed_c10d.AllgatherOptions, None)
        self._broadcasts: dict[int, Any] = {}

    @property
    def store(self) -> Any | None:
        """The key-value store that the group was made with, or None where torch does not tell."""
        if self._store is not None:
            return self._store
        get = getattr(self.process_group, "get_group_store", None)
        if get is not None and type(self.process_group) is dist.ProcessGroup:
            return get()
        known = known_groups().get(self.process_group)
        return known[1] if known else None

    def next_number(self, of: Hashable) -> int:
        """Counts from 0 what is made or sent over this process group; the same on all ranks that do alike."""
        counts = self._counts.setdefault(self.process_group, Counter())
        counts[of] += 1
        return counts[of] - 1

    # ------------------------------------------------------------------ collectives, not waited for

    def announce(self, kind: str, tensors: Sequence[torch.Tensor], label: str | None = None) -> None:
        """Notes a collective that is about to start; every method that starts one calls it first.

        With debug="detail" it returns once all ranks are about to start the same one.

        Args:
            kind: its name and what else has to be the same on all ranks, such as the source.
            tensors: what this rank sends; of the same shapes and dtypes on all ranks.
            label: what it is for; the same on all ranks.

        Raises:
            CollectiveMismatchError: the ranks are about to start different ones.
        """
        lane, interrupt = self._lane, self.interrupt
        if lane is None or interrupt is None:
            return
        entry = lane.next(kind, tensors, label)
        if interrupt.compare is not None and self.size > 1:
            interrupt.compare(entry)

    def _started(self, work: Any) -> Any:
        if self._lane is not None:
            self._lane.started(work)
        return work

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        label: str | None = None,
    ) -> Any:
        """Starts an in-place all-reduce; `op` defaults to the sum, `label` says what it is for.

        The tensor is contiguous, or sparse where the backend knows that. Complex numbers travel as pairs.
        The backend gives it up after `timeout`; None for the group's own.
        """
        if self._lane is not None:
            self.announce("all_reduce" if op is None else f"all_reduce {_name_of(op)}", (tensor,), label)
        options = self._sum
        if op is not None or timeout is not None:
            options = options_of(dist.AllreduceOptions, timeout)
            options.reduceOp = dist.ReduceOp.SUM if op is None else op
        note_sent((tensor,))
        with without_engine_context():
            return self._started(self.process_group.allreduce([_as_real(tensor)], options))

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int = 0,
        timeout: timedelta | None = None,
        *,
        label: str | None = None,
    ) -> Any:
        """Starts an in-place broadcast from group rank `src`."""
        if self._lane is not None:
            self.announce(f"broadcast from {src}", (tensor,), label)
        options = self._broadcasts.get(src) if timeout is None else None
        if options is None:
            options = options_of(dist.BroadcastOptions, timeout)
            options.rootRank = src
            if timeout is None:
                self._broadcasts[src] = options
        note_sent((tensor,))
        with without_engine_context():
            return self._started(self.process_group.broadcast([_as_real(tensor)], options))

    def all_gather(
        self,
        outputs: list[torch.Tensor],
        tensor: torch.Tensor,
        timeout: timedelta | None = None,
        *,
        label: str | None = None,
    ) -> Any:
        """Starts an all-gather into `outputs`, one tensor of the input's shape a rank."""
        if self._lane is not None:
            self.announce("all_gather", (tensor,), label)
        options = self._gather
        if timeout is not None:
            options = options_of(dist.distributed_c10d.AllgatherOptions, timeout)
        note_sent((tensor, *outputs))
        with without_engine_context():
            work = self.process_group.allgather(
                [[_as_real(output) for output in outputs]], [_as_real(tensor)], options
            )
        return self._started(work)

    def start(
        self,
        kind: str,
        tensors: Sequence[torch.Tensor],
        begin: Callable[[], Any],
        *,
        label: str | None = None,
    ) -> Any:
        """Starts another collective of the process group, which sends `tensors`; returns its work."""
        self.announce(kind, tensors, label)
        note_sent(tensors)
        return self._started(begin())


def _name_of(op: Any) -> str:
    return str(getattr(getattr(op, "op", op), "name", op))

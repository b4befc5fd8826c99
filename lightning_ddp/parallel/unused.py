"""Parameters that the graph does not reach, and what becomes of their gradients.

Which they are, the graph of the outputs tells before backward. Whether some other rank used them, a bitmap
tells that all ranks sum up at the end of backward; of a static graph, once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from lightning_ddp.comm.group import Group
from lightning_ddp.comm.uploads import uploaded
from lightning_ddp.parallel.storage import Bucket

__all__ = ["UsageExchange", "find_tensors", "reached_parameters", "settle_absent"]


def find_tensors(obj: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples, dicts, dataclasses, local RRefs and registered pytrees.

    >>> [int(t) for t in find_tensors({"a": torch.tensor(1), "b": (torch.tensor(2), "text", [None])})]
    [1, 2]
    """
    if isinstance(obj, torch.Tensor):
        yield obj
    elif _is_local_rref(obj):
        yield from find_tensors(obj.local_value())
    elif isinstance(obj, (list, tuple)):
        for item in obj:
            yield from find_tensors(item)
    elif isinstance(obj, dict):
        for item in obj.values():
            yield from find_tensors(item)
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        for field in dataclasses.fields(obj):
            yield from find_tensors(getattr(obj, field.name))
    else:
        for leaf in torch.utils._pytree.tree_leaves(obj):
            if isinstance(leaf, torch.Tensor):
                yield leaf


def reached_parameters(outputs: Iterable[torch.Tensor]) -> set[int]:
    """The `id`s of the leaf tensors whose gradient a backward from `outputs` may compute."""
    reached = {id(t) for t in outputs if t.requires_grad and t.grad_fn is None}
    waiting = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)  # an AccumulateGrad node has the leaf that it serves
        if leaf is not None:
            reached.add(id(leaf))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return reached


def _is_local_rref(obj: Any) -> bool:
    rref = getattr(torch.distributed.rpc, "RRef", None)
    return rref is not None and isinstance(obj, rref) and bool(obj.is_owner())


class UsageExchange:
    """Tells all ranks which parameters somebody used since the last synchronised backward.

    Args:
        group: the ranks.
        num_parameters: how many parameters the reducer has.
        device: where the bitmap lives.
    """

    def __init__(self, group: Group, num_parameters: int, device: torch.device) -> None:
        self._group = group
        self._num = num_parameters
        self._device = device
        self.unsynced: set[int] = set()
        """Parameters that got a gradient in a backward without synchronisation."""
        self.settled: list[int] | None = None
        """Ranks that use each parameter of a static graph, when all have told; there is no exchange after."""
        # the last number counts the ranks that have a backward of their own
        self._sums = torch.zeros(num_parameters + 1, dtype=torch.int32)

    @property
    def counts(self) -> torch.Tensor:
        """Ranks that used each parameter, as of the last exchange; int32."""
        return self._sums[:-1]

    def start(self, absent: Iterable[int], never: set[int] | frozenset[int] = frozenset()) -> Any:
        """Starts the sum over the ranks. All call it, in each synchronised backward until it is settled.

        Args:
            absent: parameters without a gradient in this backward.
            never: those of them that count as unused whatever happened before.
        """
        used = [1] * (self._num + 1)
        for index in absent:
            used[index] = int(index in self.unsynced and index not in never)
        return self._start(used)

    def start_idle(self) -> Any:
        """Starts the sum for a rank that takes part in the backward of the others and has none of its own."""
        return self._start([0] * (self._num + 1))

    def _start(self, used: Sequence[int]) -> Any:
        self._sums = uploaded(torch.tensor(used, dtype=torch.int32), self._device)
        return self._group.all_reduce(self._sums)

    def finish(self, work: Any, *, is_needed: bool, is_static: bool) -> list[int] | None:
        """Waits for the sum; where it is needed the host waits for the device, too.

        Args:
            work: what has been started.
            is_needed: whether the caller wants the sum.
            is_static: whether the graph is the same in all steps; then the sum of all ranks settles it.

        Returns:
            Ranks that used each parameter, if that is needed or settles it.
        """
        self._group.wait(work, self._device)
        self.unsynced.clear()
        if not (is_needed or is_static):
            return None
        *counts, num_ranks = self._sums.tolist()
        if is_static and num_ranks == self._group.size:
            self.settled = counts
        return counts


def settle_absent(
    absent: Sequence[tuple[int, Bucket, int]], counts: list[int] | None, unused: set[int]
) -> None:
    """Gives parameters that were absent here the mean if a rank used them, else leaves their `.grad` alone.

    Args:
        absent: index, bucket and position of each.
        counts: ranks that used each parameter, by index; None if nobody has counted.
        unused: indices that no rank used, counted or not.
    """
    with torch.no_grad():
        for index, bucket, position in absent:
            is_used = index not in unused and (counts is None or counts[index] > 0)
            bucket.take_absent(position, is_used)

"""Parameters that the graph does not reach, and what becomes of their gradients.

Which they are, the graph of the outputs tells before backward. Whether some other rank used them, a bitmap
tells that all ranks sum up at the end of backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from lightning_ddp.comm.group import Group
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
        self.counts = torch.zeros(num_parameters, dtype=torch.int32)
        """Ranks that used each parameter, as of the last exchange."""

    def start(self, absent: Iterable[int], never: set[int] | frozenset[int] = frozenset()) -> Any:
        """Starts the sum over the ranks. All ranks call it, in each synchronised backward.

        Args:
            absent: parameters without a gradient in this backward.
            never: those of them that count as unused whatever happened before.
        """
        used = [1] * self._num
        for index in absent:
            used[index] = int(index in self.unsynced and index not in never)
        return self.start_with(used)

    def start_with(self, used: Sequence[int]) -> Any:
        """Starts the sum of what the caller says of each parameter: 1 for used, 0 for not."""
        self.counts = torch.tensor(used, dtype=torch.int32, device=self._device)
        return self._group.all_reduce(self.counts)

    def finish(self, work: Any) -> torch.Tensor:
        """Waits for the sum and returns it: int32, one number a parameter."""
        self._group.wait(work, self._device)
        self.unsynced.clear()
        return self.counts


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

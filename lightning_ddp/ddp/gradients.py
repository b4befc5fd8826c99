"""Expected, arrived and absent gradients of a backward, and those that only other ranks have.

A bitmap, summed over the ranks at the end of backward, shows which parameters other ranks have used. With a
static graph it is summed once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import Any

import torch

from lightning_ddp._torch import gradient_hooks_of, tree_leaves
from lightning_ddp.comm.group import Group, uploaded
from lightning_ddp.ddp.bucket import Bucket
from lightning_ddp.ddp.gradient_errors import BackwardFailures
from lightning_ddp.ddp.layout import BucketLayout, ReducerOptions
from lightning_ddp.ddp.reduction import BackwardState, Reduction
from lightning_ddp.errors import BackwardOrderError

_RREF: Any = getattr(torch.distributed.rpc, "RRef", ())
_UNKNOWN = 2**62
"""Number of gradients that no bucket gets: it is full when the backward is over."""


def find_tensors(obj: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples, dicts, dataclasses, local RRefs and pytrees.

    >>> [int(t) for t in find_tensors({"a": torch.tensor(1), "b": (torch.tensor(2), "text", [None])})]
    [1, 2]
    """
    if isinstance(obj, torch.Tensor):
        yield obj
    elif isinstance(obj, _RREF) and obj.is_owner():
        yield from find_tensors(obj.local_value())
    elif isinstance(obj, (list, tuple, dict)):
        for item in obj.values() if isinstance(obj, dict) else obj:
            yield from find_tensors(item)
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        for field in dataclasses.fields(obj):
            yield from find_tensors(getattr(obj, field.name))
    else:
        yield from (leaf for leaf in tree_leaves(obj) if isinstance(leaf, torch.Tensor))


def reached_parameters(outputs: Iterable[torch.Tensor]) -> set[int]:
    """Return the `id`s of the leaf tensors whose gradient a backward from `outputs` may compute."""
    reached = {id(t) for t in outputs if t.requires_grad and t.grad_fn is None}
    waiting = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)  # set on AccumulateGrad nodes
        if leaf is not None:
            reached.add(id(leaf))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return reached


class Expected(Enum):
    """Expectation of a parameter's gradient in a backward: it comes or, if not, the reason."""

    YES = auto()
    NOWHERE = auto()
    """On no rank: `requires_grad` is off, or another tensor is in its place."""
    UNREACHED = auto()
    """Not on this rank: the graph of the outputs does not lead to it."""
    NEVER = auto()
    """Not on this rank: the first step of a static graph did not use it."""


class Gradients:
    """Record of which gradients a reducer's backward is expected to give and which have arrived."""

    def __init__(
        self,
        layout: BucketLayout,
        options: ReducerOptions,
        reduction: Reduction,
        failures: BackwardFailures,
        group: Group,
        device: torch.device,
    ) -> None:
        self._layout = layout
        self._params = layout.params
        self._reduction = reduction
        self._failures = failures
        self._group = group
        self._device = device
        self._skips_unused = options.skip_all_reduce_unused_params
        self.finds_unused = options.find_unused_parameters
        """True if the graph of the outputs is searched."""
        self.is_static = options.static_graph
        """True if every backward has the gradients of the first one."""
        self.is_learning = options.static_graph
        """True until the first backward of a static graph has ended."""
        self.counts = [1] * len(self._params)
        """Number of gradients that each parameter gets in one backward, if it gets any."""
        self._usual = [Expected.YES] * len(self._params)
        self.expected = self._usual
        """For each parameter, what the next or running backward gives it."""
        self.unsynced: set[int] = set()
        """Parameters that got a gradient in a backward without synchronization."""
        self._settled: list[int] | None = None  # final sums of a static graph, once all ranks contributed
        # Of the last exchange: how many ranks used each parameter; last, how many ranks had a backward.
        self._sums = torch.zeros(len(self._params) + 1, dtype=torch.int32)

    @property
    def may_lack(self) -> bool:
        """True if a backward may leave a parameter without a gradient."""
        return self.finds_unused and not self.is_static

    @property
    def are_counted(self) -> bool:
        """True if the ranks exchange which parameters they used."""
        return self.finds_unused or self.is_static

    # ------------------------------------------------------------------ before and while they come

    def prepare(self, outputs: Sequence[torch.Tensor], absent: Iterable[int]) -> None:
        """Determine which parameters get a gradient in a backward from `outputs`; none of `absent` do."""
        expected = self.expected = self._usual.copy()
        switched_off = [i for i, p in enumerate(self._params) if not p.requires_grad]
        for index in (*switched_off, *absent):
            expected[index] = Expected.NOWHERE
        if self.may_lack:
            with torch.profiler.record_function("search_unused_parameters"):
                reached = reached_parameters(outputs)
            for index, parameter in enumerate(self._params):
                if id(parameter) not in reached and expected[index] is Expected.YES:
                    expected[index] = Expected.UNREACHED

    @property
    def _are_all_expected(self) -> bool:
        return self.expected.count(Expected.YES) == len(self.expected)

    def arm(self, ready: list[int]) -> None:
        """Reset all buckets for the next backward; arriving gradients append their indices to `ready`."""
        is_usual = self._are_all_expected and not self.is_static
        for bucket in self._layout.buckets:
            if is_usual or self.is_learning:
                number = bucket.size if is_usual else _UNKNOWN
            else:
                number = sum(self.counts[i] for i in bucket.spec.indices if self.expected[i] is Expected.YES)
            bucket.arm(number, ready)

    def start(self) -> list[Bucket]:
        """Fill the bucket slices of parameters that get no gradient; return the buckets full by that."""
        if self._are_all_expected:
            return []
        for index, expected in enumerate(self.expected):
            if expected is not Expected.YES:
                self._fill_absent(index)
        full = [bucket for bucket in self._layout.buckets if bucket.num_expected == 0]
        for bucket in full:
            bucket.is_skipped = self._is_unused(bucket)
        return full

    def _is_unused(self, bucket: Bucket) -> bool:
        """Return True if a bucket without a gradient is skipped: no rank reduces it."""
        return (self._skips_unused and self.may_lack and len(bucket.absent) == bucket.size) or all(
            self.expected[index] is Expected.NOWHERE for index in bucket.spec.indices
        )

    def mark_absent(self, indices: Iterable[int]) -> list[Bucket]:
        """Count parameters without a gradient as arrived; return the buckets that this makes full."""
        full = []
        for index in indices:
            bucket = self._fill_absent(index)
            bucket.num_pending -= 1
            if not bucket.num_pending:
                bucket.is_skipped = self._is_unused(bucket)
                full.append(bucket)
        return full

    def _fill_absent(self, index: int) -> Bucket:
        bucket, position = self._layout.where[index]
        bucket.fill_absent(position, self._reduction.scale)
        if bucket.streams is not None:
            bucket.streams.note()
        return bucket

    def take_undefined(
        self, bucket: Bucket, positions: Iterable[int], error: TypeError, state: BackwardState
    ) -> None:
        """Fill in zeros for gradients that autograd left undefined; raise if one was freed or came twice."""
        gone = [p for p in positions if bucket.params[p].grad is None and p not in bucket.absent]
        # With another hook on the parameter, that hook may have freed the gradient.
        others = [p for p in gone if len(gradient_hooks_of(bucket.params[p]) or ()) != 1]
        if len(set(state.ready)) != len(state.ready):
            raise self.ready_twice(state) from error
        if others or not gone:
            raise self._failures.freed_gradient(state.step, [bucket.names[p] for p in others]) from error
        for position in gone:
            bucket.fill_absent(position, self._reduction.scale)

    def ready_twice(self, state: BackwardState) -> BackwardOrderError:
        """Return the error of a backward in which gradients arrived more often than expected."""
        found = Counter(state.ready)
        excess = [i for i, n in found.items() if n > self.counts[i] or self.expected[i] is Expected.UNREACHED]
        return self._failures.ready_twice(state.step, excess, state.ready, is_static=self.is_static)

    # ------------------------------------------------------------------ when the backward is over

    def late(self, state: BackwardState) -> list[int]:
        """Return the indices of parameters whose expected gradients are missing at the end of backward."""
        found = Counter(state.ready)
        return [i for i, e in enumerate(self.expected) if e is Expected.YES and found[i] < self.counts[i]]

    def learn(self, ready: Sequence[int]) -> None:
        """Record how many gradients each parameter got in a static graph's first step; copy large ones."""
        found, scale = Counter(ready), self._reduction.scale
        self.counts = [found[i] for i in range(len(self._params))]
        self._usual = [Expected.YES if count else Expected.NEVER for count in self.counts]
        self.is_learning = False
        for bucket in self._layout.buckets:
            with torch.no_grad():
                for position, index in enumerate(bucket.spec.indices):
                    if not self.counts[index]:
                        bucket.fill_absent(position, scale)
                    elif position in bucket.early:
                        bucket.copy_early(position, scale)
            bucket.num_pending = 0

    def absent(self) -> list[int]:
        """Return indices of the parameters without a gradient in this backward, bucket by bucket."""
        return [b.spec.indices[p] for b in self._layout.buckets for p in sorted(b.absent)]

    def start_exchange(self, absent: Sequence[int] | None) -> Any | None:
        """Start an all-reduce of how many ranks used each parameter since the last; return its work, or None.

        `absent` is None on a rank without input, which takes part in the backward of the others.
        """
        if not self.are_counted or self._settled is not None:
            return None
        used = [int(absent is not None)] * len(self._sums)
        for index in absent or ():
            used[index] = int(index in self.unsynced and self.expected[index] is not Expected.NOWHERE)
        self._sums = uploaded(torch.tensor(used, dtype=torch.int32), self._device)
        return self._group.all_reduce(self._sums)

    def settle(self, absent: Sequence[int], exchange: Any | None) -> None:
        """Wait for the counts of use; set `.grad` of parameters unused here to the mean if used elsewhere."""
        counts = self._settled
        if exchange is not None:
            self._group.wait(exchange, self._device)
            self.unsynced.clear()
            if absent or self.is_static:  # else the host need not wait for the device
                *counts, num_ranks = self._sums.tolist()
                if self.is_static and num_ranks == self._group.size:
                    self._settled = counts
        with torch.no_grad():
            for index in absent:
                bucket, position = self._layout.where[index]
                is_nowhere = self.expected[index] is Expected.NOWHERE
                bucket.take_absent(position, not is_nowhere and (counts is None or counts[index] > 0))

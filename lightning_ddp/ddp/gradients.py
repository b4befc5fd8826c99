"""Expected, arrived and absent gradients of a backward, and those that came on other ranks alone.

Which parameters get one, `requires_grad`, the graph of the outputs or the first backward tells. Whether
another rank has used what this one has not, a bitmap tells that all ranks sum up at the end of backward; of a
static graph, once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from lightning_ddp._torch import gradient_hooks_of, tree_leaves
from lightning_ddp.comm.group import Group
from lightning_ddp.comm.uploads import uploaded
from lightning_ddp.ddp.backward_state import BackwardState
from lightning_ddp.ddp.bucket import Bucket
from lightning_ddp.ddp.gradient_errors import BackwardFailures
from lightning_ddp.ddp.layout import BucketLayout
from lightning_ddp.ddp.reduction import Reduction
from lightning_ddp.errors import BackwardOrderError, MissingGradientError

__all__ = ["Arrivals", "ExpectedGradients", "UsageExchange", "find_tensors", "reached_parameters"]


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
        for leaf in tree_leaves(obj):
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


class ExpectedGradients:
    """What is known of the coming backward: from `requires_grad`, from its graph, or from the first one.

    Args:
        parameters: those of the reducer.
        finds_unused: whether the graph of the outputs is searched.
        is_static: whether the first backward tells what all others give.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], *, finds_unused: bool, is_static: bool
    ) -> None:
        self._params = tuple(parameters)
        self.finds_unused = finds_unused
        self.is_static = is_static
        self.is_learning = is_static
        """Whether the first backward of a static graph is still to come, or running."""
        self.counts = [1] * len(self._params)
        """Gradients that each parameter gets in one backward."""
        self.declared: set[int] = set()
        """Parameters that get no gradient, on all ranks alike."""
        self.unreached: set[int] = set()
        """Parameters that the graph does not reach."""
        self.never: set[int] = set()
        """Parameters that a static graph does not use."""

    @property
    def may_lack(self) -> bool:
        """Whether a parameter without a gradient is no error."""
        return self.finds_unused and not self.is_static

    @property
    def are_counted(self) -> bool:
        """Whether ranks tell each other which parameters they used."""
        return self.finds_unused or self.is_static

    def prepare(self, outputs: Sequence[torch.Tensor], absent: Iterable[int]) -> None:
        """Looks at the coming backward.

        Args:
            outputs: what it starts from.
            absent: parameters that get no gradient on any rank, besides those with `requires_grad` off.
        """
        self.declared = {i for i, p in enumerate(self._params) if not p.requires_grad}.union(absent)
        if self.may_lack:
            with torch.profiler.record_function("search_unused_parameters"):
                reached = reached_parameters(outputs)
            unreached = {i for i, p in enumerate(self._params) if id(p) not in reached}
            self.unreached = unreached - self.declared

    def num_in(self, bucket: Bucket) -> int:
        """Gradients that come into `bucket`."""
        if self.declared or self.is_static:
            return sum(self.counts[i] for i in bucket.spec.indices if i not in self.declared)
        return bucket.size

    def late(self, ready: Sequence[int]) -> list[int]:
        """Parameters that are less often among `ready` than expected."""
        found = Counter(ready)
        known = self.declared | self.unreached
        return [i for i, count in enumerate(self.counts) if i not in known and found[i] < count]

    def excess(self, ready: Sequence[int]) -> list[int]:
        """Parameters that are among `ready` more often than expected."""
        found = Counter(ready)
        unexpected = self.unreached if self.may_lack else ()
        return [i for i, count in found.items() if count > self.counts[i] or i in unexpected]

    def learn(self, ready: Sequence[int]) -> None:
        """Takes the gradients of the first backward of a static graph for those of all."""
        self.counts = [0] * len(self._params)
        for index in ready:
            self.counts[index] += 1
        self.never = {i for i, count in enumerate(self.counts) if not count}
        self.is_learning = False


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


def _settle_absent(
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


class Arrivals:
    """Compares the gradients of a reducer's backward with those that were expected.

    Args:
        layout: the buckets.
        expected: which gradients the backward is expected to give.
        reduction: by what gradients are scaled on their way into the buckets.
        usage: tells whether another rank has used what this one has not.
        failures: makes the errors.
        skips_unused: whether a bucket of which nothing was used is not reduced.
    """

    def __init__(
        self,
        layout: BucketLayout,
        expected: ExpectedGradients,
        reduction: Reduction,
        usage: UsageExchange,
        failures: BackwardFailures,
        *,
        skips_unused: bool,
    ) -> None:
        self._layout = layout
        self._expected = expected
        self._reduction = reduction
        self._usage = usage
        self._failures = failures
        self._skips_unused = skips_unused

    def start(self) -> list[Bucket]:
        """Fills in for parameters of which it is known that no gradient comes. Returns the full buckets."""
        expected, full = self._expected, []
        for index in expected.declared | expected.never:
            self._fill_absent(index)
        for bucket in self._layout.buckets:
            if bucket.all_but_one < 0:  # nobody expects anything of it: no rank launches it
                bucket.is_skipped = expected.declared.issuperset(bucket.spec.indices)
                full.append(bucket)
        return full + self.mark_absent(expected.unreached)

    def mark_absent(self, indices: Iterable[int]) -> list[Bucket]:
        """Parameters that will get no gradient in this backward count as ready, with what they have.

        Returns:
            The buckets that are full by that, in the order in which they became so.
        """
        full = []
        for index in indices:
            bucket = self._fill_absent(index)
            bucket.num_pending -= max(self._expected.counts[index], 1)
            if not bucket.num_pending:
                bucket.is_skipped = self._skips_unused and len(bucket.absent) == bucket.size
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
        """Autograd gave no tensor for some parameters, which means zeros; unless something freed them.

        Args:
            bucket: into which the gradients were to go.
            positions: where in it.
            error: what that has raised.
            state: the backward.

        Raises:
            BackwardOrderError: a gradient was freed, or came twice.
        """
        gone = [p for p in positions if bucket.params[p].grad is None and p not in bucket.absent]
        # autograd calls the hooks of a parameter also where its gradient is undefined
        others = [p for p in gone if len(gradient_hooks_of(bucket.params[p]) or ()) != 1]
        if len(set(state.ready)) != len(state.ready):
            raise self.ready_twice(state) from error
        if others or not gone:
            raise self._failures.freed_gradient(state.step, [bucket.names[p] for p in others]) from error
        for position in gone:
            bucket.fill_absent(position, self._reduction.scale)

    def ready_twice(self, state: BackwardState) -> BackwardOrderError:
        """The error of a backward in which gradients came more often than expected."""
        expected = self._expected
        excess = expected.excess(state.ready)
        return self._failures.ready_twice(state.step, excess, state.ready, is_static=expected.is_static)

    def complete(self, state: BackwardState) -> tuple[list[Bucket], MissingGradientError | None]:
        """Backward is over and buckets are not full: parameters were not used, or it is an error.

        Returns:
            The buckets that are full now, and the error if it is one. May wait for the other ranks then.
        """
        expected = self._expected
        late = expected.late(state.ready)
        if not expected.may_lack:
            if not state.ready and self._failures.board.is_skipped(state.step):
                state.is_skipped = True
                return self._skip(late), None
            is_first = state.step == 0 and not expected.is_static
            error = self._failures.missing(state.step, late, state.num_taken, is_first=is_first)
            if error is not None:
                return [], error
            expected.declared.update(late)
        return self.mark_absent(late), None

    def _skip(self, indices: Sequence[int]) -> list[Bucket]:
        """No rank has used any parameter: only what ranks have accumulated before is averaged. Communicates.

        torch's DDP does nothing then, so that ranks would go on with different accumulated gradients.

        Returns:
            All buckets; those in which no rank has accumulated anything are not reduced.
        """
        full, declared = self.mark_absent(indices), self._expected.declared
        self._usage.unsynced.update(i for i in indices if self._layout.params[i].grad is not None)
        exchange = self._usage.start(indices)
        counts = self._usage.finish(exchange, is_needed=True, is_static=False) or []
        declared.update(i for i in indices if not counts[i])
        for bucket in full:
            bucket.is_skipped = declared.issuperset(bucket.spec.indices)
        return full

    def learn(self, ready: Sequence[int]) -> None:
        """First step of a static graph: what has arrived is what will arrive. Large gradients move in."""
        expected, scale = self._expected, self._reduction.scale
        expected.learn(ready)
        for bucket in self._layout.buckets:
            with torch.no_grad():
                for position, index in enumerate(bucket.spec.indices):
                    if index in expected.never:
                        bucket.fill_absent(position, scale)
                    elif position in bucket.early:
                        bucket.copy_early(position, scale)
            bucket.num_pending = 0

    def absent(self) -> list[int]:
        """Indices of the parameters without a gradient in this backward, bucket by bucket."""
        return [b.spec.indices[p] for b in self._layout.buckets for p in sorted(b.absent)]

    def start_exchange(self, absent: Sequence[int]) -> Any | None:
        """Starts to find out whether other ranks have used them, where ranks tell each other; its work."""
        if not self._expected.are_counted or self._usage.settled is not None:
            return None
        return self._usage.start(absent, self._expected.declared)

    def settle(self, absent: Sequence[int], exchange: Any | None) -> None:
        """Gives absent parameters the mean where another rank has used them.

        Args:
            absent: their indices.
            exchange: what `start_exchange` returned; this waits for it.
        """
        counts = self._usage.settled
        if exchange is not None:
            static = self._expected.is_static
            counts = self._usage.finish(exchange, is_needed=bool(absent), is_static=static)
        _settle_absent([(i, *self._layout.where[i]) for i in absent], counts, self._expected.declared)

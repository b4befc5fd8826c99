"""Which gradients have come in a backward, and what stands in the buckets for those that have not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lightning_ddp.errors import BackwardOrderError, MissingGradientError
from lightning_ddp.parallel.expected import ExpectedGradients
from lightning_ddp.parallel.failures import BackwardFailures
from lightning_ddp.parallel.layout import BucketLayout
from lightning_ddp.parallel.reduction import Reduction
from lightning_ddp.parallel.storage import Bucket
from lightning_ddp.parallel.unused import UsageExchange, settle_absent

__all__ = ["Arrivals"]


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
        self.ready: list[int] = []
        """Indices of the parameters whose gradients have come, in their order."""
        self.is_skipped = False
        """Whether no gradient has come on any rank, although the backward is over."""
        self._layout = layout
        self._expected = expected
        self._reduction = reduction
        self._usage = usage
        self._failures = failures
        self._skips_unused = skips_unused

    def start(self) -> list[Bucket]:
        """Fills in for parameters of which it is known that no gradient comes. Returns the full buckets."""
        expected, full = self._expected, []
        self.is_skipped = False
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
        self, bucket: Bucket, positions: Iterable[int], error: TypeError, *, step: int
    ) -> None:
        """Autograd gave no tensor for some parameters, which means zeros; unless something freed them.

        Args:
            bucket: into which the gradients were to go.
            positions: where in it.
            error: what that has raised.
            step: number of the backward.

        Raises:
            BackwardOrderError: a gradient was freed, or came twice.
        """
        gone = [p for p in positions if bucket.params[p].grad is None and p not in bucket.absent]
        # autograd calls the hooks of a parameter also where its gradient is undefined
        others = [p for p in gone if len(bucket.params[p]._post_accumulate_grad_hooks or ()) != 1]
        if len(set(self.ready)) != len(self.ready):
            raise self.ready_twice(step) from error
        if others or not gone:
            raise self._failures.freed_gradient(step, [bucket.names[p] for p in others]) from error
        for position in gone:
            bucket.fill_absent(position, self._reduction.scale)

    def ready_twice(self, step: int) -> BackwardOrderError:
        """The error of a backward in which gradients came more often than expected."""
        expected = self._expected
        excess = expected.excess(self.ready)
        return self._failures.ready_twice(step, excess, self.ready, is_static=expected.is_static)

    def complete(self, step: int, num_launched: int) -> tuple[list[Bucket], MissingGradientError | None]:
        """Backward is over and buckets are not full: parameters were not used, or it is an error.

        Args:
            step: number of the backward.
            num_launched: buckets whose reduction has started.

        Returns:
            The buckets that are full now, and the error if it is one. May wait for the other ranks then.
        """
        expected = self._expected
        late = expected.late(self.ready)
        if not expected.may_lack:
            if not self.ready and self._failures.board.is_skipped(step):
                return self._skip(late), None
            is_first = step == 0 and not expected.is_static
            error = self._failures.missing(step, late, num_launched, is_first=is_first)
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
        self.is_skipped = True
        full, declared = self.mark_absent(indices), self._expected.declared
        self._usage.unsynced.update(i for i in indices if self._layout.params[i].grad is not None)
        exchange = self._usage.start(indices)
        counts = self._usage.finish(exchange, is_needed=True, is_static=False) or []
        declared.update(i for i in indices if not counts[i])
        for bucket in full:
            bucket.is_skipped = declared.issuperset(bucket.spec.indices)
        return full

    def learn(self) -> None:
        """First step of a static graph: what has arrived is what will arrive. Large gradients move in."""
        expected, scale = self._expected, self._reduction.scale
        expected.learn(self.ready)
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
        settle_absent([(i, *self._layout.where[i]) for i in absent], counts, self._expected.declared)

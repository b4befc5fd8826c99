"""Which parameters a backward is expected to give gradients, and how many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from lightning_ddp.parallel.storage import Bucket
from lightning_ddp.parallel.unused import reached_parameters

__all__ = ["ExpectedGradients"]


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

"""Samplers that deal the rest of an epoch anew over the remaining ranks: no sample twice, none lost.

A sampler that deals a permutation over the ranks in turn has, after c batches of B samples on W ranks, used
exactly the first c * B * W of it. What is left is dealt over the new ranks in the same way.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from lightning_ddp._lightning import Trainer, loaders_mode, loaders_of
from lightning_ddp.elastic.step_ledger import RandomStates
from lightning_ddp.errors import ConfigurationError

_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
"""They cannot be trained on a single sample."""


def share_of(
    rest: Sequence[Any], rank: int, world_size: int, *, drops_last: bool, fills: bool = True
) -> list[Any]:
    """Return one rank's samples, every `world_size`-th of `rest`; all ranks get equally many.

    The rest is dropped, or the first ones fill it up; without `fills` the last ranks have one less.

    >>> [share_of(range(7), rank, 3, drops_last=False) for rank in range(3)]
    [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    """
    return _even(rest, world_size, drops_last=drops_last, fills=fills)[rank::world_size]


def _even(rest: Sequence[Any], world_size: int, *, drops_last: bool, fills: bool = True) -> list[Any]:
    dealt = list(rest)
    over = len(dealt) % world_size
    if over and drops_last:
        del dealt[-over:]
    elif over and fills:
        more = world_size - over
        dealt += (dealt * math.ceil(more / len(dealt)))[:more]
    return dealt


class DealtSampler(Sampler[Any]):
    """Distributed sampler that acts as `inner` until it redistributes an epoch's rest over other ranks.

    With `avoids_one` a last batch of a single sample gets another one, which is repeated; with `fills` ranks
    are dealt equally many samples, some of them repeated.
    """

    def __init__(self, inner: Any, batch_size: int, *, avoids_one: bool = False, fills: bool = True) -> None:
        self.inner = inner
        self._fills, self._inner_fills = fills, True
        self._batch_size = batch_size
        self._avoids_one = avoids_one and batch_size > 1
        self._rest: list[Any] | None = None  # its part of the rest of the epoch, until that is read
        self._num_left: int | None = None  # samples of all ranks in that rest; None if all is dealt
        self._num_used = self.num_batches = self._epoch = 0
        self._is_through = False  # True once it has begun again, as the shorter of several loaders do
        self._order: list[Any] | None = None  # order of this epoch, if it is known: it may be drawn only once
        self.has_changed = False  # True once it deals to other ranks than at first

    def __iter__(self) -> Iterator[Any]:
        if self._rest is not None:
            rest, self._rest = self._rest, None
            return iter(rest)
        if self._is_plain and not self.has_changed:
            return iter(self.inner)
        self._order = None
        return iter(self._share(self.order(), self.inner.rank))

    def _share(self, dealt: Sequence[Any], rank: int) -> list[Any]:
        fills = self._fills if self.has_changed else self._inner_fills
        share = share_of(dealt, rank, self.inner.num_replicas, drops_last=self.drops_last, fills=fills)
        repeats = self._avoids_one and self.has_changed and len(share) % self._batch_size == 1
        return share + share[:1] if repeats else share

    def __len__(self) -> int:
        """Return the number of samples that this rank gets until all of the epoch is used; then 0."""
        if self._is_through:
            return 0
        return self._length(self.inner.rank) if self.has_changed else len(self.inner)

    @property
    def most(self) -> int:
        """Number of samples that rank 0 gets of the epoch, or of its rest; no rank gets more."""
        return self._length(0)

    def _length(self, rank: int) -> int:
        total = len(self.inner.dataset) if self._num_left is None else self._num_left
        num_ranks = int(self.inner.num_replicas)
        rounds = max(0, total // num_ranks // self._batch_size - 1)  # not dealt to count
        skipped = rounds * self._batch_size
        return skipped + len(self._share(range(total - skipped * num_ranks), rank))

    @property
    def _is_plain(self) -> bool:
        return type(self.inner) is DistributedSampler

    @property
    def drops_last(self) -> bool:
        """True if samples beyond a multiple of the world size are dropped, False if some are repeated."""
        return bool(getattr(self.inner, "drop_last", False))

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # before there is one, as where it is unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    def set_epoch(self, epoch: int) -> None:
        self._rest = self._num_left = None
        self._num_used = self.num_batches = 0
        self._is_through = False
        if epoch != self._epoch:  # else a loader with workers may have begun to read it
            self._epoch, self._order = epoch, None
        self.inner.set_epoch(epoch)

    def order(self) -> list[Any]:
        """Return the samples of the whole epoch, of all ranks, in their order."""
        if self._is_plain:
            return _order_of(self.inner)
        self._order = _order_of(self.inner) if self._order is None else self._order
        return self._order

    def check(self) -> None:
        """Raise ConfigurationError unless `inner` deals one order to the ranks in turn; keep RNG states."""
        if self._is_plain:
            return
        inner, random = self.inner, RandomStates()
        mine = list(inner)
        random.restore()
        order = _order_of(inner)
        random.restore()
        shares = {
            fills: share_of(order, inner.rank, inner.num_replicas, drops_last=self.drops_last, fills=fills)
            for fills in (True, self._fills)
        }
        self._inner_fills = mine == shares[True]
        if mine not in shares.values():
            raise ConfigurationError(
                f"on_failure: the rest of an epoch of {type(inner).__name__} cannot be redistributed over"
                " the ranks: it does not give one order of samples to the ranks in turn, or has another"
                " order each time. Use torch's DistributedSampler, a sampler that draws from torch's global"
                " generator, or on_failure='stop'."
            )

    def state(self) -> Any:
        """Return how much of the epoch is used, and its sample order, for `load` in a process that joins."""
        order = None if self._is_plain else self.order()
        used = self._num_used, self.num_batches, self._num_left, self._is_through, self.has_changed
        return used, self.inner.num_replicas, order

    def load(self, state: Any) -> None:
        """Set how much of the epoch is used from another rank's `state()`; call it before `deal`."""
        used, num_replicas, self._order = state
        self._num_used, self.num_batches, self._num_left, self._is_through, self.has_changed = used
        set_ranks(self.inner, 0, num_replicas)

    def begin_again(self, num_batches: int) -> None:
        """Record that all is used after `num_batches` more per rank, and dealt to the ranks once more."""
        self.num_batches += num_batches
        self._num_used, self._num_left, self._is_through = 0, None, True

    def deal(self, num_batches: int, rank: int, world_size: int) -> None:
        """Redistribute what is left of the epoch, after `num_batches` per rank, over `world_size` ranks."""
        self._num_used += (num_batches - self.num_batches) * self._batch_size * self.inner.num_replicas
        self.num_batches = num_batches
        rest = self.order()[self._num_used :]
        set_ranks(self.inner, rank, world_size)
        self.has_changed = True
        self._rest, self._num_left = self._share(rest, rank), len(rest)


class SplitBatches:
    """Batch sampler that can split each global batch over fewer ranks; until then the same as `inner`.

    The batches of the `num_ranks` that there were at first are the global batch.
    """

    def __init__(self, inner: Any, num_ranks: int) -> None:
        self.sampler = DealtSampler(inner.sampler, int(inner.batch_size))
        self.batch_size, self.drop_last = inner.batch_size, inner.drop_last
        inner.sampler = self.sampler
        self.inner = inner
        self._num_ranks = num_ranks
        self._global_size = num_ranks * int(inner.batch_size)
        self._part: tuple[int, int] | None = None

    @property
    def _num_samples(self) -> int:
        """Number of samples in an epoch, over all ranks, after dropping or repeating the last ones."""
        parts = len(self.sampler.dataset) / self._num_ranks
        return self._num_ranks * (math.floor(parts) if self.sampler.drops_last else math.ceil(parts))

    def _all(self) -> list[list[Any]]:
        """Return the samples of each global batch of the epoch, as with the original number of ranks."""
        dealt = _even(self.sampler.order(), self._num_ranks, drops_last=self.sampler.drops_last)
        size = self._global_size
        batches = [dealt[start : start + size] for start in range(0, len(dealt), size)]
        return batches[:-1] if batches and self.drop_last and len(batches[-1]) < size else batches

    def __iter__(self) -> Iterator[list[Any]]:
        if self._part is None:
            return iter(self.inner)
        rank, world_size = self._part
        return iter([batch[rank::world_size] for batch in self._all()[self.sampler.num_batches :]])

    def __len__(self) -> int:
        if self._part is None:
            return len(self.inner)
        batches = self._num_samples / self._global_size
        return (math.floor(batches) if self.drop_last else math.ceil(batches)) - self.sampler.num_batches

    def deal(self, num_batches: int, rank: int, world_size: int) -> None:
        """Set this rank's part of each global batch: of those after `num_batches`, and in later epochs."""
        self.sampler.num_batches, self._part = num_batches, (rank, world_size)

    def weight(self, number: int) -> float:
        """Return the factor for this rank's loss in global batch `number`: share of samples times ranks."""
        if self._part is None:
            return 1.0
        rank, world_size = self._part
        size = min(self._global_size, self._num_samples - number * self._global_size)
        return len(range(rank, size, world_size)) * world_size / size


def _check_batches(batches: Any) -> None:
    """Raise ConfigurationError unless a batch sampler's batches are successive samples; keep RNG states."""
    if type(batches) is BatchSampler:
        return
    size, random = getattr(batches, "batch_size", None), RandomStates()
    if isinstance(size, int):
        found = [list(batch) for batch in batches]
        random.restore()
        order = list(batches.sampler)
        random.restore()
        if found == list(map(list, BatchSampler(order, size, getattr(batches, "drop_last", False)))):
            return
    raise ConfigurationError(
        f"on_failure: the rest of an epoch of {type(batches).__name__} cannot be redistributed over the"
        " ranks: its batches are not successive samples of its sampler, batch_size at a time, or are others"
        " each time. Use a sampler that gives that order to a plain DataLoader, or on_failure='stop'."
    )


def _order_of(sampler: Any) -> list[Any]:
    """Return the samples of the whole epoch in order, from a copy of a distributed sampler for one rank."""
    alone = copy.copy(sampler)
    set_ranks(alone, 0, 1)
    return list(alone)


def set_ranks(sampler: Any, rank: int, world_size: int) -> None:
    """Set rank, number of replicas and, if it has one, number of samples of a distributed sampler."""
    sampler.num_replicas, sampler.rank = world_size, rank
    if hasattr(sampler, "num_samples"):
        size = len(sampler.dataset)
        drops_last = bool(getattr(sampler, "drop_last", False))
        sampler.num_samples = size // world_size if drops_last else math.ceil(size / world_size)
        sampler.total_size = sampler.num_samples * world_size


class Dealer:
    """Redistributor of the training dataloaders' samples over the ranks that a run has after a change.

    With `keeps_global` the global batch keeps its size, else that of each rank does.
    """

    def __init__(self, trainer: Trainer, *, keeps_global: bool, fills: bool) -> None:
        self._trainer, self._num_ranks = trainer, trainer.world_size
        self._keeps_global, self._fills = keeps_global, fills
        self._avoids_one = any(isinstance(part, _BATCH_NORMS) for part in trainer.lightning_module.modules())
        self._part: tuple[int, int] | None = None

    @property
    def _loaders(self) -> list[Any]:
        return loaders_of(self._trainer.fit_loop)

    def adopt(self, loader: Any) -> Any:
        """Replace a dataloader's sampler by one that can redistribute an epoch; return the dataloader."""
        batches: Any = getattr(loader, "batch_sampler", None)
        inner = getattr(batches, "sampler", None)
        if not isinstance(loader, DataLoader) or not hasattr(inner, "num_replicas"):
            raise ConfigurationError(
                f"on_failure: the rest of an epoch of a {type(loader).__name__} cannot be redistributed"
                " over the ranks. It needs a DataLoader with a distributed sampler, as Lightning sets for"
                " a dataset with a length; the remaining samples of an iterable dataset are lost with its"
                " rank. Use a dataset with a length, or on_failure='stop'."
            )
        if isinstance(inner, DealtSampler):
            return loader
        _check_batches(batches)
        if self._keeps_global:
            batches = SplitBatches(batches, self._num_ranks)
            vars(loader)["batch_sampler"] = batches  # which a DataLoader does not let be set
            if self._part is not None:  # a new loader, of fewer ranks
                batches.deal(0, *self._part)
        else:
            size = int(batches.batch_size)
            batches.sampler = DealtSampler(inner, size, avoids_one=self._avoids_one, fills=self._fills)
        batches.sampler.check()
        return loader

    def most(self, loader: Any) -> int:
        """Return the largest number of batches that any rank gets from an adopted dataloader."""
        batches: float = loader.batch_sampler.sampler.most / loader.batch_sampler.batch_size
        return math.floor(batches) if loader.batch_sampler.drop_last else math.ceil(batches)

    def spare(self, loader: Any) -> Any:
        """Return the first batch of an adopted dataloader, for a rank that has no batch of its own."""
        batches = loader.batch_sampler
        some = batches.sampler.order()[: batches.batch_size]
        return loader.collate_fn([loader.dataset[index] for index in some])

    def check(self) -> None:
        """Raise ConfigurationError for several dataloaders if the global batch keeps its size."""
        if self._keeps_global and len(self._loaders) > 1:
            raise ConfigurationError(
                "on_failure with batch='global' supports one training dataloader, because samples of"
                " several may have different weights. Use one dataloader, or batch='rank'."
            )

    def weight(self, number: int) -> float:
        """Return the factor for this rank's loss in global batch `number`: share of samples times ranks."""
        (loader,) = self._loaders
        return float(loader.batch_sampler.weight(number))

    def deal(self, num_batches: int, rank: int, world_size: int) -> None:
        self._part = (rank, world_size)
        for loader in self._loaders:
            dealt = loader.batch_sampler if self._keeps_global else loader.batch_sampler.sampler
            cycles = not self._keeps_global and loaders_mode(self._trainer) == "max_size_cycle"
            while cycles and num_batches - dealt.num_batches > self.most(loader):
                dealt.begin_again(self.most(loader))
            dealt.deal(num_batches, rank, world_size)

    def state(self) -> list[Any]:
        """Return how much of the epoch is used, and its sample order, for each training dataloader."""
        return [loader.batch_sampler.sampler.state() for loader in self._loaders]

    def load(self, states: list[Any]) -> None:
        """Set how much of the epoch each dataloader has used from another rank's `state()`, before `deal`."""
        for loader, state in zip(self._loaders, states, strict=True):
            loader.batch_sampler.sampler.load(state)

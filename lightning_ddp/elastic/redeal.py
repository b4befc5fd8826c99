"""The rest of an epoch, dealt anew over the ranks that are left: no sample twice, none lost.

A sampler that deals a permutation over the ranks in turn has, after c batches of B samples on W ranks, used
exactly the first c * B * W of it. What is left is dealt over the new ranks in the same way.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Sampler

from lightning_ddp.errors import ConfigurationError

__all__ = ["Dealer", "DealtSampler", "SplitBatches", "set_ranks", "share_of"]


def share_of(rest: Sequence[Any], rank: int, world_size: int, *, drops_last: bool) -> list[Any]:
    """A rank's part of samples that are dealt in turn; all parts have one length.

    Args:
        rest: what is dealt.
        rank: whose part.
        world_size: number of ranks.
        drops_last: whether what is left over is dropped; else the first ones fill it up.

    >>> [share_of(range(7), rank, 3, drops_last=False) for rank in range(3)]
    [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    """
    dealt = list(rest)
    over = len(dealt) % world_size
    if over and drops_last:
        del dealt[-over:]
    elif over:
        more = world_size - over
        dealt += (dealt * math.ceil(more / len(dealt)))[:more]
    return dealt[rank::world_size]


class DealtSampler(Sampler[Any]):
    """In the place of a distributed sampler: the same, until the rest of an epoch is dealt anew.

    Args:
        inner: has `num_replicas`, `rank` and `set_epoch`, as torch's `DistributedSampler`.
        batch_size: samples of a batch of one rank.
    """

    def __init__(self, inner: Any, batch_size: int) -> None:
        self._inner = inner
        self._batch_size = batch_size
        self._rest: list[Any] | None = None
        self._num_used = self.num_batches = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self._inner if self._rest is None else self._rest)

    def __len__(self) -> int:
        return len(self._inner if self._rest is None else self._rest)

    @property
    def inner(self) -> Any:
        """The sampler inside."""
        return self._inner

    def __getattr__(self, name: str) -> Any:
        """An attribute of the sampler inside."""
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def set_epoch(self, epoch: int) -> None:
        """A new epoch begins, whole."""
        self._rest = None
        self._num_used = self.num_batches = 0
        self._inner.set_epoch(epoch)

    def deal(self, num_batches: int, rank: int, world_size: int) -> None:
        """Deals what is left of the epoch over other ranks.

        Args:
            num_batches: that each rank has used of this epoch.
            rank: this rank among the new ones.
            world_size: number of the new ones.
        """
        inner = self._inner
        self._num_used += (num_batches - self.num_batches) * self._batch_size * inner.num_replicas
        self.num_batches = num_batches
        whole = _order_of(inner)
        set_ranks(inner, rank, world_size)
        self._rest = share_of(
            whole[self._num_used :], rank, world_size, drops_last=bool(getattr(inner, "drop_last", False))
        )


class SplitBatches:
    """In the place of a batch sampler: the same, until the batches of all ranks are split over fewer.

    Args:
        inner: whose `sampler` is distributed.
    """

    def __init__(self, inner: Any) -> None:
        self.sampler = DealtSampler(inner.sampler, int(inner.batch_size))
        self.batch_size, self.drop_last = inner.batch_size, inner.drop_last
        self._inner = inner
        self._num_ranks = inner.sampler.num_replicas
        self._part: tuple[int, int] | None = None

    def _all(self) -> list[list[Any]]:
        """The samples of each step of the epoch, as all ranks that there were at first would use them."""
        order = _order_of(self._inner.sampler)
        drops_last = bool(getattr(self._inner.sampler, "drop_last", False))
        shares = [share_of(order, r, self._num_ranks, drops_last=drops_last) for r in range(self._num_ranks)]
        dealt = [sample for row in zip(*shares, strict=True) for sample in row]
        size = self._num_ranks * int(self.batch_size)
        batches = [dealt[start : start + size] for start in range(0, len(dealt), size)]
        return batches[:-1] if batches and self.drop_last and len(batches[-1]) < size else batches

    def __iter__(self) -> Iterator[list[Any]]:
        if self._part is None:
            return iter(self._inner)
        rank, world_size = self._part
        return iter([batch[rank::world_size] for batch in self._all()[self.sampler.num_batches :]])

    def __len__(self) -> int:
        return len(self._inner) if self._part is None else len(self._all()) - self.sampler.num_batches

    def deal(self, num_batches: int, rank: int, world_size: int) -> None:
        """Splits what is left of the epoch, and later ones, over other ranks; as of `DealtSampler`."""
        self.sampler.num_batches, self._part = num_batches, (rank, world_size)

    def weight(self, number: int) -> float:
        """What this rank's mean of a batch of the epoch counts for in the mean over the ranks."""
        if self._part is None:
            return 1.0
        rank, world_size = self._part
        most = self._num_ranks * int(self.batch_size)
        size: int = min(most, len(self._inner.sampler) * self._num_ranks - number * most)
        return len(range(rank, size, world_size)) * world_size / size


def _order_of(sampler: Any) -> list[Any]:
    """The order of the whole epoch, which a distributed sampler for one rank has."""
    alone = copy.copy(sampler)
    set_ranks(alone, 0, 1)
    return list(iter(alone))


def set_ranks(sampler: Any, rank: int, world_size: int) -> None:
    """Has a distributed sampler deal to other ranks from its next epoch on."""
    sampler.num_replicas, sampler.rank = world_size, rank
    if hasattr(sampler, "num_samples"):
        size = len(sampler.dataset)
        drops_last = bool(getattr(sampler, "drop_last", False))
        sampler.num_samples = size // world_size if drops_last else math.ceil(size / world_size)
        sampler.total_size = sampler.num_samples * world_size


class Dealer:
    """The samplers of the training dataloaders of one run.

    Args:
        keeps_global: whether the batch of all ranks together stays as large; else that of each rank does.
    """

    def __init__(self, *, keeps_global: bool) -> None:
        self._keeps_global = keeps_global
        self._dealt: list[DealtSampler | SplitBatches] = []

    def adopt(self, loader: Any) -> Any:
        """Takes a dataloader's sampler over; returns the loader.

        Raises:
            ConfigurationError: the rest of an epoch of it cannot be dealt anew.
        """
        batches: Any = getattr(loader, "batch_sampler", None)
        inner = getattr(batches, "sampler", None)
        if not isinstance(loader, DataLoader) or not hasattr(inner, "num_replicas"):
            raise ConfigurationError(
                f"on_failure='shrink' cannot deal the rest of an epoch of a {type(loader).__name__} anew: it"
                " needs a DataLoader whose batches come from a distributed sampler, as Lightning sets one by"
                " itself for a dataset with a length. Use such a dataset, or on_failure='stop'."
            )
        if isinstance(inner, DealtSampler):
            return loader
        if not self._keeps_global:
            batches.sampler = DealtSampler(inner, int(batches.batch_size))
            self._dealt.append(batches.sampler)
            return loader
        if self._dealt:
            raise ConfigurationError(
                "on_failure='shrink' with batch='global' and several training dataloaders: samples of one may"
                " not weigh as much as those of another. Use one dataloader, or batch='rank'."
            )
        split = SplitBatches(batches)
        vars(loader)["batch_sampler"] = split  # which a DataLoader does not let be set
        self._dealt.append(split)
        return loader

    def weight(self, number: int) -> float:
        """What this rank's gradients of a batch of the epoch count for."""
        (split,) = self._dealt
        return split.weight(number) if isinstance(split, SplitBatches) else 1.0

    def deal(self, num_batches: int, rank: int, world_size: int) -> None:
        """Deals the rest of the epoch over other ranks."""
        for dealt in self._dealt:
            dealt.deal(num_batches, rank, world_size)

    def deal_as_before(self, num_batches: int) -> None:
        """Goes on after some batches with what this rank had of the epoch."""
        for dealt in self._dealt:
            if isinstance(dealt, DealtSampler):
                dealt.deal(num_batches, dealt.rank, dealt.num_replicas)

    def set_ranks(self, rank: int, world_size: int) -> None:
        """Deals the next epoch over other ranks."""
        for dealt in self._dealt:
            if isinstance(dealt, DealtSampler):
                set_ranks(dealt.inner, rank, world_size)

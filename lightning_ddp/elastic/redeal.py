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

__all__ = ["Dealer", "DealtSampler", "share_of"]


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
        self._num_used = self._num_batches = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self._inner if self._rest is None else self._rest)

    def __len__(self) -> int:
        return len(self._inner if self._rest is None else self._rest)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the sampler inside."""
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def set_epoch(self, epoch: int) -> None:
        """A new epoch begins, whole."""
        self._rest = None
        self._num_used = self._num_batches = 0
        self._inner.set_epoch(epoch)

    def deal(self, num_batches: int, rank: int, world_size: int) -> None:
        """Deals what is left of the epoch over other ranks.

        Args:
            num_batches: that each rank has used of this epoch.
            rank: this rank among the new ones.
            world_size: number of the new ones.
        """
        inner = self._inner
        self._num_used += (num_batches - self._num_batches) * self._batch_size * inner.num_replicas
        self._num_batches = num_batches
        whole = _order_of(inner)
        set_ranks(inner, rank, world_size)
        self._rest = share_of(
            whole[self._num_used :], rank, world_size, drops_last=bool(getattr(inner, "drop_last", False))
        )


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
    """The samplers of the training dataloaders of one run."""

    def __init__(self) -> None:
        self._samplers: list[DealtSampler] = []

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
        sampler = DealtSampler(inner, int(batches.batch_size))
        batches.sampler = sampler
        self._samplers.append(sampler)
        return loader

    def deal(self, num_batches: int, rank: int, world_size: int) -> None:
        """Deals the rest of the epoch over other ranks."""
        for sampler in self._samplers:
            sampler.deal(num_batches, rank, world_size)

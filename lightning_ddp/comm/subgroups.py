"""Further groups of some or all ranks of a group, made beside it through its store."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp.comm.group import Group
from lightning_ddp.errors import ConfigurationError

__all__ = ["part_group", "sibling_group", "sub_group"]

_num_siblings: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def sibling_group(group: Group, device: torch.device) -> Group:
    """A second group of the same ranks, whose collectives cannot mix with those of the first.

    All ranks call it, in one order among calls on the same group. Communicates. Where torch offers no way
    to make one, the group itself is returned.

    Args:
        group: the ranks.
        device: where the tensors of its collectives will be.
    """
    return _make(group, device, group.size) or group


def part_group(group: Group, size: int, device: torch.device) -> Group:
    """The group of `size` neighbouring ranks that this rank is in; rank 0 to size - 1 are the first one.

    All ranks call it, in one order among calls on the same group. Communicates.

    Args:
        group: the ranks.
        size: divides their number.
        device: where the tensors of its collectives will be.

    Raises:
        ConfigurationError: torch offers no way to make it of this group.
    """
    made = _make(group, device, size)
    if made is None:
        raise ConfigurationError(
            f"no groups of {size} ranks can be made: this process group is not known to torch.distributed."
            " Create it with init_process_group or new_group."
        )
    return made


def sub_group(group: Group, ranks: Sequence[int], device: torch.device) -> Group | None:
    """A gloo group of the listed ranks; None on the ranks that are not listed, and where there is no store.

    All ranks of `group` call it with the same list, in one order among calls on the same group.
    Communicates among the listed ones.

    Args:
        group: the ranks to choose from; of a gloo group.
        ranks: group ranks, in the order in which they are numbered in the new group.
        device: where the tensors of its collectives will be.
    """
    number, store = _count(group), group.store
    if group.rank not in ranks or store is None:
        return None
    return _make_gloo(group, store, device, f"{number}/listed", ranks.index(group.rank), len(ranks))


def _make(group: Group, device: torch.device, size: int) -> Group | None:
    """New groups of `size` neighbouring ranks each; the one of this rank."""
    process_group = group.process_group
    first_rank = group.rank - group.rank % size
    if group.backend(device) != "gloo":
        if not (dist.is_initialized() and process_group in dist.distributed_c10d._world.pg_map):
            return None
        ranks = dist.get_process_group_ranks(process_group)
        mine = None
        for start in range(0, group.size, size):
            made = dist.new_group(ranks[start : start + size])  # all ranks make all groups
            mine = made if start == first_rank else mine
        return Group(mine, group.interrupt, transport=group.transport)
    store = group.store
    if store is None:
        return None
    name = f"{_count(group)}/{first_rank}"
    return _make_gloo(group, store, device, name, group.rank - first_rank, size)


def _count(group: Group) -> int:
    """A number that all ranks get alike, and no second time."""
    number = _num_siblings.get(group.process_group, 0)
    _num_siblings[group.process_group] = number + 1
    return number


def _make_gloo(group: Group, store: Any, device: torch.device, name: str, rank: int, size: int) -> Group:
    first: Any = group.process_group
    if isinstance(first, dist.ProcessGroup):
        first = first._get_backend(device)
    gloo: Any = dist.ProcessGroupGloo  # torch's annotations leave its options out
    options = gloo._Options()
    options._devices = first.options._devices
    options._timeout = first.options._timeout
    prefixed = dist.PrefixStore(f"lightning_ddp/sibling/{name}", store)
    made = gloo(dist.PrefixStore("gloo", prefixed), rank, size, options)
    return Group(made, group.interrupt, prefixed, transport=group.transport)

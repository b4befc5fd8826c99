"""Groups made from a group: of all its ranks, of neighbors, of a list.

All ranks of the group must call these functions, in the same order for calls on the same group. `device` is
that of the tensors in the new group's collectives. A group from which torch cannot make another is a
ConfigurationError.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp._torch import backend_of, gloo_like, known_groups, set_timeout, timeout_of
from lightning_ddp.comm.abort import remember_connections
from lightning_ddp.comm.group import Group
from lightning_ddp.comm.nccl import needs_device
from lightning_ddp.errors import ConfigurationError


def sibling_group(group: Group, device: torch.device) -> Group:
    """Create a second group of the same ranks, with a separate order of collectives.

    If torch cannot make one, the group itself is returned; then all collectives must be in one order.

    Collective: all ranks must call it.
    """
    return _make(group, device, range(group.size)) or group


def part_group(group: Group, size: int, device: torch.device) -> Group:
    """Create groups of `size` neighboring ranks, from rank 0 on; return that of this rank.

    The last group is smaller if `size` does not divide the number of ranks.

    Collective: all ranks must call it.
    """
    starts = range(0, group.size, size)
    made = [sub_group(group, range(start, min(start + size, group.size)), device) for start in starts]
    return next(part for part in made if part is not None)


def sub_group(group: Group, ranks: Sequence[int], device: torch.device) -> Group | None:
    """Create a group of the listed ranks; return None on other ranks, which cannot use it.

    All ranks pass the same list; only the listed ranks communicate.

    Collective: all ranks must call it.

    Args:
        ranks: group ranks, in the order in which they are numbered in the new group.

    Raises:
        ConfigurationError: the list is empty, has a rank twice, or has a rank that is not in the group; or
            torch cannot number the ranks in this order.
    """
    chosen = list(ranks)
    wrong = [rank for rank in chosen if not 0 <= rank < group.size]
    if not chosen or wrong or len(set(chosen)) < len(chosen):
        raise ConfigurationError(
            f"sub_group of ranks {chosen}: expected at least one, all different, from 0 to {group.size - 1}"
        )
    made = _make(group, device, chosen)
    if made is None and group.rank in chosen:
        raise ConfigurationError(
            f"no group of ranks {chosen} can be created, because torch.distributed does not know this process"
            " group. Create it with init_process_group or new_group."
        )
    return made


def _make(group: Group, device: torch.device, ranks: Sequence[int]) -> Group | None:
    """Return a new group of these ranks; None on other ranks, and where torch cannot make one."""
    number = group.next_number("group")
    made: Any = None
    store: Any = None
    if group.backend(device) != "gloo":
        made = _make_with_torch(group, ranks)
        if made is not None and group.rank in ranks:
            _keep_timeout(group.process_group, made, device)
    elif group.store is not None and group.rank in ranks:
        store = dist.PrefixStore(f"lightning_ddp/sibling/{number}/{ranks[0]}", group.store)
        first = backend_of(group.process_group, device)
        with remember_connections():
            made = gloo_like(first, dist.PrefixStore("gloo", store), ranks.index(group.rank), len(ranks))
    if made is None or group.rank not in ranks:
        return None
    if group.interrupt is not None and group.lane is not None:
        of_run = [group.lane.ranks[rank] for rank in ranks]
        part = f" from rank {of_run[0]}" * (len(ranks) < group.size)
        group.interrupt.activity.add(made, f"{group.lane.name}, channel {number + 1}{part}", of_run)
    return Group(made, group.interrupt, store, transport=group.transport)


def _keep_timeout(first: Any, made: Any, device: torch.device) -> None:
    """Copy the timeout of a group to a new group, for which torch sets the backend's default."""
    with suppress(RuntimeError):  # a third-party backend may have no device
        timeout = timeout_of(backend_of(first, device))
        if timeout is not None:
            set_timeout(backend_of(made, device), timeout)


def _make_with_torch(group: Group, ranks: Sequence[int]) -> Any | None:
    process_group = group.process_group
    if not (dist.is_initialized() and process_group in known_groups()):
        return None
    of_run = dist.get_process_group_ranks(process_group)
    chosen = [of_run[rank] for rank in ranks]
    # All ranks of the job make the group. If `group` has only some ranks, only these make it.
    is_local = len(of_run) < dist.get_world_size()
    with _without_splits() if is_local else nullcontext() as device:
        options = _order(chosen) if device is None else {**_order(chosen), "device_id": device}
        return dist.new_group(chosen, use_local_synchronization=is_local, **options)


def _order(ranks: Sequence[int]) -> dict[str, Any]:
    """Return keyword arguments of `new_group` that keep the order of ranks, which torch would sort."""
    if list(ranks) == sorted(ranks):
        return {}
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise ConfigurationError(
            f"group of ranks {list(ranks)}: torch {torch.__version__} numbers the ranks of a group in rising"
            " order only. List them in rising order, or use a torch whose new_group has `sort_ranks`."
        )
    return {"sort_ranks": False}


@contextmanager
def _without_splits() -> Generator[torch.device | None, None, None]:
    """Let some ranks make a group without the others: in this context torch splits no communicator.

    If the default group is bound to a device, a new NCCL group is split from it, and a split waits for all
    ranks of the default group. Without a device, the new group is set up separately at its first collective.
    It yields the device to pass to `new_group`, or None if none is needed.
    """
    default: Any = dist.group.WORLD
    device, default.bound_device_id = default.bound_device_id, None
    try:
        yield device if device is not None and needs_device(default, device) else None
    finally:
        default.bound_device_id = device

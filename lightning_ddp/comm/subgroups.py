"""Groups made from a group: of all its ranks, of neighbors, of a list, of the ranks of a node.

All ranks of the group must call these functions, in the same order for calls on the same group. `device` is
that of the tensors in the new group's collectives. A group from which torch cannot make another is a
ConfigurationError.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp._torch import backend_of, gloo_like, known_groups, set_timeout, timeout_of
from lightning_ddp.comm.group import Group
from lightning_ddp.comm.objects import all_gather_objects
from lightning_ddp.comm.teardown import remember_connections
from lightning_ddp.errors import ConfigurationError


def sibling_group(group: Group, device: torch.device) -> Group:
    """Create a second group of the same ranks, with a separate order of collectives.

    If torch cannot make one, the group itself is returned; then all collectives must be in one order.

    Collective: all ranks must call it.
    """
    return _make(group, device, [range(group.size)]) or group


def part_group(group: Group, size: int, device: torch.device) -> Group:
    """Create groups of `size` neighboring ranks, from rank 0 on; return that of this rank.

    The last group is smaller if `size` does not divide the number of ranks.

    Collective: all ranks must call it.

    Args:
        size: number of ranks in a group.
    """
    parts = [range(start, min(start + size, group.size)) for start in range(0, group.size, size)]
    return _require(_make(group, device, parts), f"groups of {size} ranks")


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
    made = _make(group, device, [chosen])
    return _require(made, f"group of ranks {chosen}") if group.rank in chosen else None


def node_group(group: Group, device: torch.device, node: str | int | None = None) -> Group:
    """Create the group of the ranks on this rank's node, in their order.

    Collective: all ranks must call it.

    Args:
        node: name or number of this rank's node; None for the host's name.
    """
    mine = socket.gethostname() if node is None else node
    nodes = all_gather_objects(group, mine, device, label="node_group")
    parts = [[rank for rank in range(group.size) if nodes[rank] == name] for name in dict.fromkeys(nodes)]
    return _require(_make(group, device, parts), f"group of node {mine!r}")


def _require(made: Group | None, what: str) -> Group:
    if made is None:
        raise ConfigurationError(
            f"no {what} can be created, because torch.distributed does not know this process group. Create"
            " it with init_process_group or new_group."
        )
    return made


def _make(group: Group, device: torch.device, parts: Sequence[Sequence[int]]) -> Group | None:
    """Make a group of each part; return that of this rank, or None if there is none."""
    number = group.next_number("group")
    mine = next((part for part in parts if group.rank in part), None)
    if group.backend(device) != "gloo":
        made = _make_with_torch(group, parts)
        if made is None or mine is None:
            return None
        _keep_timeout(group.process_group, made, device)
        return _beside(group, made, mine, number)
    store = group.store
    if store is None or mine is None:
        return None
    first = backend_of(group.process_group, device)
    prefixed = dist.PrefixStore(f"lightning_ddp/sibling/{number}/{mine[0]}", store)
    with remember_connections():
        made = gloo_like(first, dist.PrefixStore("gloo", prefixed), mine.index(group.rank), len(mine))
    return _beside(group, made, mine, number, prefixed)


def _beside(
    group: Group, made: Any, ranks: Sequence[int], number: int, store: dist.Store | None = None
) -> Group:
    """Wrap the new process group; its lane is named after that of `group`."""
    if group.interrupt is not None and group.lane is not None:
        of_run = [group.lane.ranks[rank] for rank in ranks]
        part = f" from rank {of_run[0]}" * (len(ranks) < group.size)
        name = f"{group.lane.name}, channel {number + 1}{part}"
        group.interrupt.activity.add(made, name, of_run)
    return Group(made, group.interrupt, store, transport=group.transport)


def _keep_timeout(first: Any, made: Any, device: torch.device) -> None:
    """Copy the timeout of a group to a new group, for which torch sets the backend's default."""
    try:
        timeout = timeout_of(backend_of(first, device))
    except RuntimeError:  # a third-party backend may have no device
        return
    if timeout is not None:
        set_timeout(backend_of(made, device), timeout)


def _make_with_torch(group: Group, parts: Sequence[Sequence[int]]) -> Any | None:
    process_group = group.process_group
    if not (dist.is_initialized() and process_group in known_groups()):
        return None
    ranks = dist.get_process_group_ranks(process_group)
    mine = None
    # All ranks of the job make all groups. If this group has only some ranks, only these make groups.
    is_local = len(ranks) < dist.get_world_size()
    for part in parts:
        chosen = [ranks[rank] for rank in part]
        with _without_splits() if is_local else nullcontext():
            made = dist.new_group(chosen, use_local_synchronization=is_local, **_order(chosen))
        mine = made if group.rank in part else mine
    return mine


def _order(ranks: Sequence[int]) -> dict[str, Any]:
    """Return arguments of `new_group` that keep the order of ranks, which torch would sort."""
    if list(ranks) == sorted(ranks):
        return {}
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise ConfigurationError(
            f"group of ranks {list(ranks)}: torch {torch.__version__} numbers the ranks of a group in rising"
            " order only. List them in rising order, or use a torch whose new_group has `sort_ranks`."
        )
    return {"sort_ranks": False}


@contextmanager
def _without_splits() -> Generator[None, None, None]:
    """Let some ranks of the job make a group in this context without the others.

    If the default group is bound to a device, a new NCCL group is split from it, and a split waits for all
    ranks of the default group. Without a device, the new group is set up separately at its first collective.
    """
    default: Any = dist.group.WORLD
    device, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = device

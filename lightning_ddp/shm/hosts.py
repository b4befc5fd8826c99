"""Hosts of a group: which ranks can share memory, agreed by all of them."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from lightning_ddp.comm.group import Group
from lightning_ddp.comm.objects import all_gather_objects
from lightning_ddp.errors import ConfigurationError, one_of
from lightning_ddp.shm.arena import are_semaphores_available

Transport = Literal["auto", "gloo", "shared_memory"]
"""How CPU ranks of one host send gradients and parameters to each other."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_logger = logging.getLogger("lightning_ddp")


def check_transport(name: str) -> None:
    """Raises `ConfigurationError` for an unknown transport."""
    if name not in get_args(Transport):
        raise ConfigurationError(f"transport={name!r}: expected {one_of(map(repr, get_args(Transport)))}")


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Where the ranks of a group are."""

    rank: int
    """This rank."""
    by_host: tuple[tuple[int, ...], ...]
    """The ranks of each host in ascending order, hosts in the order of their first ranks."""
    pids: tuple[int, ...]
    """Process of each rank, on its host."""
    processors: tuple[frozenset[int], ...]
    """Those that each rank may run on, by their numbers on its host."""

    @property
    def are_shared(self) -> bool:
        """Whether two ranks share a host, and so can share memory."""
        return len(self.by_host) < len(self.pids)

    @property
    def has_spare_processor(self) -> bool:
        """Whether every rank of this host can have a processor for another thread besides its main one."""
        ranks = self.neighbours
        return len(frozenset().union(*(self.processors[r] for r in ranks))) >= 2 * len(ranks)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks of this rank's host, itself included."""
        return next(ranks for ranks in self.by_host if self.rank in ranks)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each host."""
        return tuple(ranks[0] for ranks in self.by_host)


def find_hosts(group: Group, device: torch.device, host: str | None = None) -> Hosts | None:
    """Finds out which ranks share hosts, so that shared memory is of use. All ranks call it.

    Communicates, unless the group's `transport` is gloo or rules it out already. Ranks are on one host if
    they run under one kernel in one pair of process and network namespaces: a container of its own, or a
    network namespace that stands for a node in a test, is a host of its own. `host` names another one.

    Returns:
        None where tensors go through the process group whatever hosts there are.

    Raises:
        ConfigurationError: shared memory was asked for, but cannot be used.
    """
    if group.transport == "gloo" or group.size == 1:
        return None
    if device.type != "cpu" or group.backend(device) != "gloo":
        where = f"{group.backend(device)} on {device.type}" if device.type != "cpu" else group.backend(device)
        give_up(group, f"shared memory is for CPU ranks of gloo groups, but this is a group of {where}")
        return None
    is_able = are_semaphores_available() and hasattr(os, "memfd_create")
    mine = (host or _this_host(), os.getpid(), is_able, _processors())
    answers = all_gather_objects(group, mine, device)
    names, pids, abilities, processors = zip(*answers, strict=True)
    by_host = tuple(
        tuple(rank for rank, other in enumerate(names) if other == name) for name in dict.fromkeys(names)
    )
    hosts = Hosts(rank=group.rank, by_host=by_host, pids=pids, processors=processors)
    if not hosts.are_shared:
        give_up(group, "every rank is on another host")
        return hosts
    unable = [str(rank) for rank, is_able in enumerate(abilities) if not is_able]
    if unable:
        give_up(group, f"rank {', '.join(unable)} has no Linux with glibc 2.30 or later")
        return None
    # threads of one process as ranks are for tests, whose point is often the process group
    if group.transport == "auto" and len(set(zip(names, pids, strict=True))) < group.size:
        return None
    return hosts


def give_up(group: Group, reason: str, *, is_fault: bool = False) -> None:
    """Shared memory cannot be used, for a reason that all ranks have found alike.

    Where it was to be expected that it can (`is_fault`), the first rank says so in the log.

    Raises:
        ConfigurationError: it was asked for.
    """
    if group.transport == "shared_memory":
        raise ConfigurationError(
            f"rank {group.rank}: transport='shared_memory' is not available: {reason}. Use 'auto' to use"
            " shared memory where it is available, or 'gloo'."
        )
    if is_fault and group.rank == 0:
        _logger.warning("tensors travel over gloo instead of shared memory: %s", reason)


def _processors() -> frozenset[int]:
    """The numbers of those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _this_host() -> str:
    """A name that ranks have in common if they can share memory; else hardly ever."""
    try:
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
        return "/".join([_BOOT_ID.read_text().strip(), *spaces])
    except OSError:
        return f"unknown/{os.getpid()}"

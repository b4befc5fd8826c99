"""Hosts of a group: which ranks can share memory, as all ranks agree."""

from __future__ import annotations

import ctypes
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from lightning_ddp.comm.collectives import all_gather_objects
from lightning_ddp.comm.group import Group
from lightning_ddp.errors import ConfigurationError, one_of

Transport = Literal["auto", "gloo", "shared_memory"]
"""Transport of gradients and parameters between CPU ranks of one host."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_logger = logging.getLogger("lightning_ddp")


def check_transport(name: str) -> None:
    if name not in get_args(Transport):
        raise ConfigurationError(f"transport={name!r}: expected {one_of(map(repr, get_args(Transport)))}")


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts of the ranks of a group, with each rank's process id and usable processors."""

    rank: int
    by_host: tuple[tuple[int, ...], ...]
    """The ranks of each host in ascending order, hosts in the order of their first ranks."""
    pids: tuple[int, ...]
    """Process id of each rank, on its host."""
    processors: tuple[frozenset[int], ...]
    """Numbers of the processors that each rank may use, on its host."""

    @property
    def are_shared(self) -> bool:
        """True if some ranks share a host, and so can share memory."""
        return len(self.by_host) < len(self.pids)

    @property
    def has_spare_processor(self) -> bool:
        """True if every rank of this host can have two processors, for its main and another thread."""
        ranks = self.neighbours
        return len(frozenset().union(*(self.processors[r] for r in ranks))) >= 2 * len(ranks)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks of this rank's host, itself included."""
        return next(ranks for ranks in self.by_host if self.rank in ranks)


def find_hosts(group: Group, device: torch.device, host: str | None = None) -> Hosts | None:
    """Return which ranks share a host, and so can use shared memory; None if it is not to be used.

    Ranks are on one host if they share the kernel, and the process and network namespaces: a container, or a
    network namespace that stands for a node in a test, is a separate host. `host` overrides the name of this
    rank's host. Return None if tensors go through the process group in any case.

    Collective: all ranks must call it.

    Raises:
        ConfigurationError: transport='shared_memory' was given, but cannot be used.
    """
    if group.transport == "gloo" or group.size == 1:
        return None
    if device.type != "cpu" or group.backend(device) != "gloo":
        where = group.backend(device) + f" on {device.type}" * (device.type != "cpu")
        give_up(group, f"shared memory is for CPU ranks of gloo groups, but this is a group of {where}")
        return None
    # Memory files, and semaphores with waits by the monotonic clock.
    is_able = hasattr(os, "memfd_create") and hasattr(ctypes.CDLL(None), "sem_clockwait")
    mine = (host or _this_host(), os.getpid(), is_able, _processors())
    names, pids, abilities, processors = zip(*all_gather_objects(group, mine, device), strict=True)
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
    # Ranks that are threads of one process are tests, which usually test the process group.
    if group.transport == "auto" and len(set(zip(names, pids, strict=True))) < group.size:
        return None
    return hosts


def give_up(group: Group, reason: str, *, is_fault: bool = False) -> None:
    """Raise if the transport is 'shared_memory'; else, if `is_fault`, log on rank 0 why it is not used.

    The reason is the same on all ranks. It is an error if the transport is 'shared_memory'; if that was
    expected to work (`is_fault`), rank 0 logs a warning.
    """
    if group.transport == "shared_memory":
        raise ConfigurationError(
            f"rank {group.rank}: transport='shared_memory' is not available: {reason}. Use 'auto' to use"
            " shared memory where it is available, or 'gloo'."
        )
    if is_fault and group.rank == 0:
        _logger.warning("tensors travel over gloo instead of shared memory: %s", reason)


def _processors() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _this_host() -> str:
    """Return a name of the host that is the same on all ranks that can share memory."""
    try:
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
        return "/".join([_BOOT_ID.read_text().strip(), *spaces])
    except OSError:
        return f"unknown/{os.getpid()}"

"""torchrun's store outlives its processes: this attempt is told from those that were started again before.

torchrun starts all processes again when one fails, and the new ones get the store of the old ones, with what
those have written. The number of restarts that it tells them differs between nodes. So rank 0 names each
attempt, and the others believe the name once rank 0 has answered them.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_ddp.errors import RendezvousError

__all__ = ["store_of_attempt"]

_KEY = "lightning_ddp/attempt"
_ASK_AGAIN_S = 0.05

_known: Any = None


def store_of_attempt(store: Any, *, rank: int, world_size: int) -> Any:
    """The part of a store that is new in this attempt. All ranks call it; it returns once rank 0 knows all.

    Args:
        store: of torchrun's agent.
        rank: of this process.
        world_size: number of ranks.

    Raises:
        RendezvousError: not all ranks have come within the store's timeout.
    """
    global _known
    if _known is None:
        timeout = store.timeout
        try:
            name = _welcome(store, world_size) if rank == 0 else _ask(store, rank, timeout)
        except dist.DistStoreError as error:
            raise RendezvousError(
                f"rank {rank}: not all {world_size} ranks that torchrun has started have come within"
                f" {timeout.total_seconds():g} s: {error}. Check that all of them train with the same devices"
                " and num_nodes as torchrun's --nproc-per-node and --nnodes."
            ) from error
        _known = dist.PrefixStore(f"{_KEY}/{name}", store)
    return _known


def _welcome(store: Any, world_size: int) -> str:
    name = secrets.token_hex(8)
    store.set(_KEY, name)
    for rank in range(1, world_size):
        token = store.get(f"{_KEY}/{name}/hello/{rank}").decode()
        store.set(f"{_KEY}/{name}/welcome/{token}", "")
    return name


def _ask(store: Any, rank: int, timeout: timedelta) -> str:
    token, name = secrets.token_hex(8), ""
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        latest = store.get(_KEY).decode()  # of the attempt before, perhaps
        if latest != name:
            name = latest
            store.set(f"{_KEY}/{name}/hello/{rank}", token)
        if store.check([f"{_KEY}/{name}/welcome/{token}"]):
            return str(name)
        time.sleep(_ASK_AGAIN_S)
    raise dist.DistStoreError("no answer of rank 0")

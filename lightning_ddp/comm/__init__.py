"""Collectives between ranks: with deadlines, labels and waits that can be interrupted.

They take a `Group`, which is made of any torch process group: `Group(torch.distributed.group.WORLD)`.
"""

from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.comm.barrier import barrier, monitored_barrier
from lightning_ddp.comm.call import run
from lightning_ddp.comm.collectives import (
    all_gather,
    all_gather_objects,
    all_reduce,
    all_reduce_coalesced,
    broadcast,
    broadcast_nested,
    reduce,
    reduce_op,
)
from lightning_ddp.comm.group import Group, part_group, sibling_group, sub_group

__all__ = [
    "Group",
    "Interrupt",
    "all_gather",
    "all_gather_objects",
    "all_reduce",
    "all_reduce_coalesced",
    "barrier",
    "broadcast",
    "broadcast_nested",
    "monitored_barrier",
    "part_group",
    "reduce",
    "reduce_op",
    "run",
    "sibling_group",
    "sub_group",
]

"""Collectives between ranks: with deadlines, labels and waits that can be interrupted, sync or async.

They take a `Group`, which is made of any torch process group: `Group(torch.distributed.group.WORLD)`.
"""

from lightning_ddp.comm.collectives import (
    Handle,
    all_gather,
    all_gather_objects,
    all_gather_uneven,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    barrier,
    broadcast,
    broadcast_nested,
    broadcast_object,
    gather,
    monitored_barrier,
    node_group,
    recv,
    recv_object,
    reduce,
    reduce_scatter,
    scatter,
    send,
    send_object,
    sub_group,
)
from lightning_ddp.comm.group import Group
from lightning_ddp.comm.interrupt import Interrupt

__all__ = [
    "Group",
    "Handle",
    "Interrupt",
    "all_gather",
    "all_gather_objects",
    "all_gather_uneven",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_nested",
    "broadcast_object",
    "gather",
    "monitored_barrier",
    "node_group",
    "recv",
    "recv_object",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "send_object",
    "sub_group",
]

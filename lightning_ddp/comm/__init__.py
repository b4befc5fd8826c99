"""Collectives between ranks: with deadlines, labels and waits that can be interrupted, sync or async.

They take a `Group`, which is made of any torch process group: `Group(torch.distributed.group.WORLD)`.
"""

from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.comm.all_reduce import (
    all_reduce,
    all_reduce_coalesced,
    reduce,
    reduce_op,
    reduce_scatter,
)
from lightning_ddp.comm.barrier import barrier, monitored_barrier
from lightning_ddp.comm.gather_scatter import (
    all_gather,
    all_gather_uneven,
    all_to_all,
    broadcast,
    gather,
    scatter,
)
from lightning_ddp.comm.group import Group
from lightning_ddp.comm.handle import Handle
from lightning_ddp.comm.objects import all_gather_objects, broadcast_nested, broadcast_object
from lightning_ddp.comm.point_to_point import recv, recv_object, send, send_object
from lightning_ddp.comm.subgroups import node_group, part_group, sibling_group, sub_group

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
    "part_group",
    "recv",
    "recv_object",
    "reduce",
    "reduce_op",
    "reduce_scatter",
    "scatter",
    "send",
    "send_object",
    "sibling_group",
    "sub_group",
]

"""Collectives with one rank at one end: gather and scatter.

Called by all ranks of the group, in one order; they communicate. Any dtype travels, as in `exchanges`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_ddp.comm.broadcast_gather import numbers, start_gather
from lightning_ddp.comm.group import Group
from lightning_ddp.comm.handle import Call, Collective, Handle, check_rank
from lightning_ddp.errors import ConfigurationError

__all__ = ["gather", "scatter"]


@Collective
def gather(
    group: Group,
    tensor: torch.Tensor,
    dst: int = 0,
    *,
    timeout: timedelta | None = None,
    label: str = "gather",
) -> Handle[torch.Tensor | None]:
    """The tensors of all ranks, stacked, on group rank `dst`; None on the others.

    On a backend without a gather it is an all-gather.

    Args:
        group: the ranks.
        tensor: the same shape and dtype on all ranks.
        dst: the rank that gets them, of shape (size, *tensor.shape).
        timeout: deadline of this call; None for the group's own limit.
        label: what it is called in errors, in the profiler and where somebody asks what a rank waits for.

    Raises:
        ConfigurationError: `dst` is no rank of the group.
        CollectiveTimeoutError: the deadline has passed.
        CollectiveError: the backend failed.
    """
    call = Call(group=group, device=tensor.device, label=label, timeout=timeout)
    check_rank(group, dst, "gather to")
    is_root = group.rank == dst
    mine = numbers(tensor.detach().contiguous())
    stacked = tensor.new_empty((group.size, *tensor.shape)) if is_root else None
    outputs = [] if stacked is None else [[numbers(row) for row in stacked.unbind(0)]]
    options = call.options(dist.GatherOptions, rootRank=dst)
    work = call.start_if_known(
        "gather",
        lambda: group.process_group.gather(outputs, [mine], options),
        kind=f"gather to {dst}",
        sent=[mine],
    )
    if work is not None:
        return call.handle(call.wait_for(work), lambda: stacked)
    wait, everything = start_gather(call, tensor)
    return call.handle(wait, lambda: everything() if is_root else None)


@Collective
def scatter(
    group: Group,
    tensor: torch.Tensor,
    parts: Sequence[torch.Tensor] | None = None,
    src: int = 0,
    *,
    timeout: timedelta | None = None,
    label: str = "scatter",
) -> Handle[torch.Tensor]:
    """Overwrites `tensor` on rank r with part r of those that group rank `src` passed, and returns it.

    On a backend without a scatter it is a broadcast of all parts.

    Args:
        group: the ranks.
        tensor: any shape and strides; the same shape and dtype on all ranks.
        parts: on `src` one tensor a rank, of the shape and dtype of `tensor`; ignored on the others.
        src: the rank whose parts are sent.
        timeout: deadline of this call; None for the group's own limit.
        label: as in `gather`.

    Raises:
        ConfigurationError: `src` is no rank of the group, or its parts do not fit.
        CollectiveTimeoutError: the deadline has passed.
        CollectiveError: the backend failed.
    """
    call = Call(group=group, device=tensor.device, label=label, timeout=timeout)
    check_rank(group, src, "scatter from")
    is_root = group.rank == src
    if is_root:
        _check_parts(call, tensor, parts)
    sent = [numbers(part.detach().contiguous()) for part in parts or ()] if is_root else []
    received = torch.empty_like(tensor, memory_format=torch.contiguous_format).detach()
    options = call.options(dist.ScatterOptions, rootRank=src)
    inputs = [sent] if is_root else []
    work = call.start_if_known(
        "scatter",
        lambda: group.process_group.scatter([numbers(received)], inputs, options),
        kind=f"scatter from {src}",
        sent=[numbers(received)],
    )
    if work is None:
        everything = tensor.new_empty((group.size, *tensor.shape)).detach()
        if is_root:
            torch.stack([part.detach() for part in parts or ()], out=everything)
        received = everything[group.rank]
        work = call.start(lambda: group.broadcast(numbers(everything), src, **call.limit))

    def finish() -> torch.Tensor:
        with torch.no_grad():
            tensor.detach().copy_(received)
        return tensor

    return call.handle(call.wait_for(work), finish)


def _check_parts(call: Call, tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None) -> None:
    if parts is None or len(parts) != call.group.size:
        found = "none" if parts is None else str(len(parts))
        raise ConfigurationError(
            f"rank {call.group.rank}: {call.label}: the source passes one part a rank: expected"
            f" {call.group.size}, found {found}"
        )
    for rank, part in enumerate(parts):
        if part.shape != tensor.shape or part.dtype != tensor.dtype or part.device != tensor.device:
            raise ConfigurationError(
                f"rank {call.group.rank}: {call.label}: the part of rank {rank} has shape {list(part.shape)},"
                f" {part.dtype} on {part.device}; expected that of the tensor to fill: {list(tensor.shape)},"
                f" {tensor.dtype} on {tensor.device}"
            )

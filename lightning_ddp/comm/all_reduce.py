"""Reducing collectives: all_reduce, reduce, reduce_scatter.

All ranks of the group must call these functions in the same order; `all_reduce` documents the common
arguments. bool is reduced by logical or (sum, max) or logical and (product, min). Integers of 16 bits are
reduced as 32 bits. Complex numbers support sum and mean only. The mean of integers is computed in floating
point and written back as integers, as in Lightning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp._torch import REDUCE_SCATTER_FLAT, reduce_scatter_flat
from lightning_ddp.comm.gather_scatter import chunks, filled, unpack
from lightning_ddp.comm.group import Group
from lightning_ddp.comm.handle import Call, Collective, Handle, check_rank
from lightning_ddp.errors import ConfigurationError, one_of

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_LOGICAL = {
    "SUM": dist.ReduceOp.MAX,
    "MAX": dist.ReduceOp.MAX,
    "BOR": dist.ReduceOp.MAX,
    "PRODUCT": dist.ReduceOp.MIN,
    "MIN": dist.ReduceOp.MIN,
    "BAND": dist.ReduceOp.MIN,
}
_WIDENED = {torch.int16: torch.int32, torch.uint16: torch.int32}


def reduce_op(op: Any) -> Any:
    """Return the `ReduceOp` of a name, or the given operation itself.

    Raises:
        ConfigurationError: the name is unknown.
    """
    if op is None:
        return dist.ReduceOp.SUM
    if not isinstance(op, str):
        return op
    known = _REDUCE_OPS.get(op.lower())
    if known is None:
        raise ConfigurationError(f"reduce_op={op!r}: expected {one_of(sorted(_REDUCE_OPS))}")
    return known


@dataclass(frozen=True, kw_only=True)
class _Reduction:
    """The tensor that is sent for a tensor, and its conversion back."""

    sent: torch.Tensor
    """Contiguous tensor of a dtype that backends support; may be a view of the caller's tensor."""
    op: Any
    """`ReduceOp` for the backend."""
    is_mean: bool
    """True if the sum is divided by the number of ranks at the end."""

    @classmethod
    def of(cls, tensor: torch.Tensor, op: Any, *, in_place: bool = True) -> _Reduction:
        """Convert a tensor and its operation.

        Raises:
            ConfigurationError: the operation is not defined for the dtype.
        """
        resolved = reduce_op(op)
        # gloo has an average only since torch 2.12, and no backend promotes integers for it.
        is_mean = bool(resolved == dist.ReduceOp.AVG)
        sent = tensor.detach().contiguous()
        if tensor.dtype == torch.bool:
            logical = _LOGICAL.get(getattr(resolved, "name", ""))
            if logical is None:
                raise ConfigurationError(
                    f"reduce_op {op!r} of bool: expected sum or max (any rank), product or min (every"
                    " rank). Convert the tensor to numbers first."
                )
            sent, resolved = sent.view(torch.uint8), logical
        elif tensor.is_complex() and not is_mean and resolved != dist.ReduceOp.SUM:
            raise ConfigurationError(f"reduce_op {op!r} of complex numbers: expected 'sum' or 'mean'")
        sent = sent.to(_WIDENED.get(sent.dtype, sent.dtype))
        if not in_place and sent.data_ptr() == tensor.data_ptr():
            sent = sent.clone()
        return cls(sent=sent, op=dist.ReduceOp.SUM if is_mean else resolved, is_mean=is_mean)

    def finish(self, size: int) -> torch.Tensor:
        """Return the reduced tensor, divided if the operation is a mean."""
        if self.is_mean:
            self.sent.copy_(self.sent / size)
        return self.sent

    def write_back(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        """Copy the result to `tensor` and return it."""
        result = self.finish(size)
        return tensor if result.data_ptr() == tensor.data_ptr() else filled(tensor, result)


@Collective
def all_reduce(
    group: Group,
    tensor: torch.Tensor,
    op: Any = "sum",
    *,
    timeout: timedelta | float | None = None,
    label: str = "all_reduce",
) -> Handle[torch.Tensor]:
    """Reduce `tensor` over all ranks in place, in one collective, and return it.

    Collective: all ranks must call it.

    Args:
        group: the ranks.
        tensor: any shape; the same shape and dtype on all ranks.
        op: a `ReduceOp` or 'sum', 'mean', 'avg', 'min', 'max', 'product'.
        timeout: deadline of this call; None for the group's timeout.
        label: name of the collective in errors, in the profiler and in reports of what a rank waits for.

    Raises:
        ConfigurationError: the operation is unknown, or not defined for the dtype.
        CollectiveTimeoutError: the deadline has passed.
        CollectiveError: the backend failed.
    """
    call = Call(group=group, device=tensor.device, label=label, timeout=timeout)
    reduction = _Reduction.of(tensor, op)
    work = call.start(lambda: group.all_reduce(reduction.sent, reduction.op, **call.limit))
    return call.handle(work, lambda: reduction.write_back(tensor, group.size))


def all_reduce_coalesced(
    group: Group,
    tensors: Sequence[torch.Tensor],
    op: Any = "sum",
    *,
    timeout: timedelta | float | None = None,
    label: str = "all_reduce_coalesced",
) -> None:
    """Reduce each of `tensors` in place, with one collective per dtype and device.

    Collective: all ranks must call it.

    Args:
        tensors: the same shapes and dtypes on all ranks, in the same order.
        op: as in `all_reduce`.

    Raises:
        ConfigurationError: as `all_reduce`.
    """
    for same in chunks(tensors, math.inf):
        flat = same[0] if len(same) == 1 else torch.cat([t.detach().reshape(-1) for t in same])
        all_reduce(group, flat, op, timeout=timeout, label=label)
        if len(same) > 1:
            unpack(flat, same)


@Collective
def reduce(
    group: Group,
    tensor: torch.Tensor,
    dst: int = 0,
    op: Any = "sum",
    *,
    timeout: timedelta | float | None = None,
    label: str = "reduce",
) -> Handle[torch.Tensor]:
    """Reduce `tensor` in place on group rank `dst`; other ranks keep their tensor.

    On a backend without a reduce it is an all-reduce of a copy.

    Collective: all ranks must call it.

    Args:
        tensor: any shape; the same shape and dtype on all ranks.
        dst: the rank that gets the result.
        op: as in `all_reduce`.

    Raises:
        ConfigurationError: `dst` is no rank of the group, or the operation cannot be used.
    """
    call = Call(group=group, device=tensor.device, label=label, timeout=timeout)
    check_rank(group, dst, "reduce to")
    is_root = group.rank == dst
    reduction = _Reduction.of(tensor, op, in_place=is_root)
    sent = torch.view_as_real(reduction.sent) if tensor.is_complex() else reduction.sent
    options = call.options(dist.ReduceOptions, rootRank=dst, rootTensor=0, reduceOp=reduction.op)
    work = call.start_if_known(
        "reduce",
        lambda: group.process_group.reduce([sent], options),
        kind=f"reduce to {dst}",
        sent=[sent],
    )
    if work is None:
        work = call.start(lambda: group.all_reduce(reduction.sent, reduction.op, **call.limit))
    return call.handle(work, lambda: reduction.write_back(tensor, group.size) if is_root else tensor)


@Collective
def reduce_scatter(
    group: Group,
    tensor: torch.Tensor | Sequence[torch.Tensor],
    op: Any = "sum",
    *,
    timeout: timedelta | float | None = None,
    label: str = "reduce_scatter",
) -> Handle[torch.Tensor]:
    """Reduce over all ranks; return part r of the result on rank r.

    On a backend without a reduce-scatter it is an all-reduce, from which each rank keeps its part.

    Collective: all ranks must call it.

    Args:
        tensor: of shape (size * k, ...), whose k rows r * k and following are part r; or a list of `size`
            tensors of one shape, part r at index r. The same shapes and dtype on all ranks.
        op: as in `all_reduce`.

    Returns:
        This rank's part: new memory of shape (k, ...), or of the shape of one tensor of the list.

    Raises:
        ConfigurationError: the first dimension or the length of the list does not fit the number of ranks,
            or the operation cannot be used.
    """
    first = tensor if isinstance(tensor, torch.Tensor) else (tensor[0] if tensor else torch.empty(0))
    call = Call(group=group, device=first.device, label=label, timeout=timeout)
    stacked = _parts(group, tensor)
    reduction = _Reduction.of(stacked, op, in_place=False)
    sent = reduction.sent.reshape(group.size, -1)
    flat = torch.view_as_real(sent) if sent.is_complex() else sent
    part = torch.empty_like(flat[0])
    options = call.options(dist.ReduceScatterOptions, reduceOp=reduction.op)
    work = call.start_if_known(
        REDUCE_SCATTER_FLAT,
        lambda: reduce_scatter_flat(group.process_group, part.view(-1), flat.view(-1), options),
        kind="reduce_scatter",
        sent=[flat],
    )
    if work is None:
        part = flat[group.rank]
        work = call.start(lambda: group.all_reduce(reduction.sent, reduction.op, **call.limit))
    mine = torch.view_as_complex(part) if sent.is_complex() else part
    result = _Reduction(sent=mine, op=reduction.op, is_mean=reduction.is_mean)
    return call.handle(
        work,
        lambda: result.finish(group.size).view(stacked.shape[1:]).to(stacked.dtype),
    )


def _parts(group: Group, tensor: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the parts of all ranks, in rank order: shape (size, *shape of a part)."""
    if isinstance(tensor, torch.Tensor):
        if tensor.dim() == 0 or tensor.shape[0] % group.size:
            raise ConfigurationError(
                f"reduce_scatter of shape {list(tensor.shape)} over {group.size} ranks: the first dimension"
                " is not a multiple of the number of ranks. Pad it, or use all_reduce."
            )
        return tensor.detach().reshape(group.size, tensor.shape[0] // group.size, *tensor.shape[1:])
    kinds = {(t.shape, t.dtype) for t in tensor}
    if len(tensor) != group.size or len(kinds) != 1:
        raise ConfigurationError(
            f"reduce_scatter of a list of {len(tensor)} tensors of {len(kinds)} kinds over {group.size}"
            " ranks: expected one tensor per rank, all with the same shape and dtype"
        )
    return torch.stack([t.detach() for t in tensor])

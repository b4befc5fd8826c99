"""Collectives of tensors: broadcast, all_gather, all_reduce, reduce.

All ranks of the group must call these functions in the same order. Tensors may have any dtype: complex
numbers are sent as pairs, and dtypes that a backend does not support (bool, int16 ...) as bytes.

Reductions: bool is reduced by logical or (sum, max) or logical and (product, min). Integers of 16 bits are
reduced as 32 bits. Complex numbers support sum and mean only. The mean of integers is computed in floating
point and written back as integers, as in Lightning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_ddp.comm.call import Call, Timeout, check_rank
from lightning_ddp.comm.exit import note_sent
from lightning_ddp.comm.group import Group
from lightning_ddp.errors import ConfigurationError, one_of

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_TRAVEL_AS_THEY_ARE = {*_FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8}
_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_LOGICAL_OR, _LOGICAL_AND = ("SUM", "MAX", "BOR"), ("PRODUCT", "MIN", "BAND")
"""Names of the reductions of bool."""
_WIDENED = {torch.int16: torch.int32, torch.uint16: torch.int32}
CHUNK_BYTES = 25 * 2**20
"""Largest number of bytes of small tensors that are copied together into one collective."""
_IN_PLACE_BYTES = 2**20
S = TypeVar("S", bound=torch.Tensor)


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's elements as a 1-D view, with a dtype that every backend sends."""
    flat = tensor.detach().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat if flat.dtype in _TRAVEL_AS_THEY_ARE else flat.view(torch.uint8)


def chunks(tensors: Iterable[S], most_bytes: float) -> Iterator[list[S]]:
    """Yield lists of non-empty tensors of one dtype and device, up to the given number of bytes."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[S]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_kind.values():
        chunk: list[S] = []
        num_bytes = 0
        for tensor in same:
            if chunk and num_bytes + tensor.nbytes > most_bytes:
                yield chunk
                chunk, num_bytes = [], 0
            chunk.append(tensor)
            num_bytes += tensor.nbytes
        yield chunk


def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy consecutive values of a flat tensor to `tensors`."""
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))


# ---------------------------------------------------------------------- broadcast and all_gather


def broadcast(
    group: Group, tensor: torch.Tensor, src: int = 0, *, timeout: Timeout = None, label: str = "broadcast"
) -> torch.Tensor:
    """Overwrite `tensor` with that of group rank `src` and return it.

    Collective: all ranks must call it.

    Args:
        tensor: any shape and strides; the same shape and dtype on all ranks.
        src: a rank of the group, otherwise a ConfigurationError.
        timeout, label: as for `all_reduce`, also its errors.
    """
    call = Call(group, tensor.device, label, timeout)
    check_rank(group, src, "broadcast from")
    contiguous = tensor.detach().contiguous()
    call.wait(call.start(lambda: group.broadcast(numbers(contiguous), src, label=label)))
    if contiguous.data_ptr() != tensor.data_ptr() and group.rank != src:
        tensor.detach().copy_(contiguous)
    return tensor


def broadcast_coalesced(
    group: Group, tensors: Sequence[torch.Tensor], src: int = 0, chunk_bytes: int = CHUNK_BYTES
) -> None:
    """Overwrite `tensors` with those of group rank `src`, small ones in chunks of one broadcast each.

    Shapes and dtypes must be the same on all ranks. Small tensors of one dtype and device are sent together
    in chunks of at most `chunk_bytes`; a contiguous tensor of 1 MiB or more is sent in place, without a copy.

    Collective: all ranks must call it.
    """
    with torch.no_grad():
        large = [t for t in tensors if t.is_contiguous() and t.nbytes >= _IN_PLACE_BYTES]
        alone = {id(t) for t in large}
        works = [(group.broadcast(t.detach(), src), t.device) for t in large]
        for chunk in chunks([t for t in tensors if id(t) not in alone], chunk_bytes):
            flat = torch.cat([t.detach().reshape(-1) for t in chunk])
            group.wait(group.broadcast(flat, src), flat.device)
            if group.rank != src:
                unpack(flat, chunk)
        for work, device in works:
            group.wait(work, device)


def all_gather(
    group: Group,
    tensor: torch.Tensor,
    *,
    sync_grads: bool = False,
    timeout: Timeout = None,
    label: str = "all_gather",
) -> torch.Tensor:
    """Return the tensors of all ranks, stacked: shape (size, *tensor.shape), in rank order.

    Collective: all ranks must call it.

    Args:
        tensor: the same shape and dtype on all ranks.
        sync_grads: True to let gradients flow back to the contributing rank (the backward communicates).
        timeout: deadline of this call, and of its backward.
        label: as for `all_reduce`, also its errors.
    """
    call = Call(group, tensor.device, label, timeout)
    if sync_grads and torch.is_grad_enabled() and tensor.requires_grad:
        gathered: torch.Tensor = _AllGather.apply(tensor, call)  # type: ignore[no-untyped-call]
        return gathered
    return gathered_by(call, tensor)


def gathered_by(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """Run one all-gather with the deadline and label of `call`; return the tensors of all ranks, stacked."""
    group = call.group
    stacked = tensor.new_empty((group.size, *tensor.shape))
    outputs = [numbers(row) for row in stacked.unbind(0)]
    mine = numbers(tensor.detach().contiguous())
    note_sent(outputs)
    begin = partial(group.process_group.allgather, [outputs], [mine])
    call.wait(call.start(lambda: group.start("all_gather", (mine,), begin, label=call.label)))
    return stacked


class _AllGather(torch.autograd.Function):
    """All-gather whose backward sums the gradients that all ranks have for this rank's input."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Call) -> torch.Tensor:
        ctx.call = call
        return gathered_by(call, tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        group, label = ctx.call.group, f"backward of {ctx.call.label}"
        total = grads[0].contiguous().clone()
        return all_reduce(group, total, timeout=ctx.call.timeout, label=label)[group.rank], None


# ---------------------------------------------------------------------- reductions


def reduce_op(op: Any) -> Any:
    """Return the `ReduceOp` of a name, or the given operation itself.

    Raises:
        ConfigurationError: the name is unknown.
    """
    if not isinstance(op, str):
        return dist.ReduceOp.SUM if op is None else op
    if op.lower() not in _REDUCE_OPS:
        raise ConfigurationError(f"reduce_op={op!r}: expected {one_of(sorted(_REDUCE_OPS))}")
    return _REDUCE_OPS[op.lower()]


def _sendable(tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, Any]:
    """Return a contiguous form of the tensor, perhaps a view, and a supported operation; a mean is a sum."""
    resolved = reduce_op(op)
    is_mean = bool(resolved == dist.ReduceOp.AVG)
    sent = tensor.detach().contiguous()
    if tensor.dtype == torch.bool:
        name = getattr(resolved, "name", "")
        if name not in (*_LOGICAL_OR, *_LOGICAL_AND):
            raise ConfigurationError(
                f"reduce_op {op!r} of bool: expected sum or max (any rank), product or min (every rank)."
                " Convert the tensor to numbers first."
            )
        return sent.view(torch.uint8), dist.ReduceOp.MAX if name in _LOGICAL_OR else dist.ReduceOp.MIN
    if tensor.is_complex() and not is_mean and resolved != dist.ReduceOp.SUM:
        raise ConfigurationError(f"reduce_op {op!r} of complex numbers: expected 'sum' or 'mean'")
    # gloo has an average only since torch 2.12, and no backend promotes integers for it.
    return sent.to(_WIDENED.get(sent.dtype, sent.dtype)), dist.ReduceOp.SUM if is_mean else resolved


def _write_back(tensor: torch.Tensor, reduced: torch.Tensor, op: Any, size: int) -> torch.Tensor:
    """Copy the result of `size` ranks to `tensor`, divided if `op` is a mean, and return it."""
    if reduce_op(op) == dist.ReduceOp.AVG:
        reduced.copy_(reduced / size)
    if reduced.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(reduced)
    return tensor


def all_reduce(
    group: Group,
    tensor: torch.Tensor,
    op: Any = "sum",
    *,
    timeout: Timeout = None,
    label: str = "all_reduce",
) -> torch.Tensor:
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
    call = Call(group, tensor.device, label, timeout)
    sent, sent_op = _sendable(tensor, op)
    call.wait(call.start(lambda: group.all_reduce(sent, sent_op, label=label)))
    return _write_back(tensor, sent, op, group.size)


def all_reduce_coalesced(
    group: Group,
    tensors: Sequence[torch.Tensor],
    op: Any = "sum",
    *,
    timeout: Timeout = None,
    label: str = "all_reduce_coalesced",
) -> None:
    """Reduce each of `tensors` in place, with one collective per dtype and device.

    Collective: all ranks must call it.

    Args:
        tensors: the same shapes and dtypes on all ranks, in the same order.
        op, timeout, label: as for `all_reduce`, also its errors.
    """
    for same in chunks(tensors, math.inf):
        flat = same[0] if len(same) == 1 else torch.cat([t.detach().reshape(-1) for t in same])
        all_reduce(group, flat, op, timeout=timeout, label=label)
        if len(same) > 1:
            unpack(flat, same)


def reduce(
    group: Group,
    tensor: torch.Tensor,
    dst: int = 0,
    op: Any = "sum",
    *,
    timeout: Timeout = None,
    label: str = "reduce",
) -> torch.Tensor:
    """Reduce `tensor` in place on group rank `dst` and return it; other ranks keep their tensor.

    Collective: all ranks must call it.

    Args:
        tensor: any shape; the same shape and dtype on all ranks.
        dst: the rank that gets the result; a rank of the group, otherwise a ConfigurationError.
        op, timeout, label: as for `all_reduce`, also its errors.
    """
    call = Call(group, tensor.device, label, timeout)
    check_rank(group, dst, "reduce to")
    is_root, options = group.rank == dst, dist.ReduceOptions()
    sent, options.reduceOp = _sendable(tensor if is_root else tensor.clone(), op)
    options.rootRank = dst
    real = torch.view_as_real(sent) if sent.is_complex() else sent
    begin = partial(group.process_group.reduce, [real], options)
    call.wait(call.start(lambda: group.start(f"reduce to {dst}", (real,), begin, label=label)))
    return _write_back(tensor, sent, op, group.size) if is_root else tensor

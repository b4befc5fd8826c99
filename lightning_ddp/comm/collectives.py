"""Collectives on tensors, objects and nested containers, all waited for in slices.

Every function here is called by all ranks of the group, in one order, and communicates. None of them needs
the default process group.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp.comm.group import Group
from lightning_ddp.errors import ConfigurationError

__all__ = [
    "all_gather",
    "all_gather_objects",
    "all_reduce",
    "all_reduce_coalesced",
    "barrier",
    "broadcast_object",
]

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_PACKET_BYTES = 4096
_HEADER_BYTES = 8


def barrier(group: Group, device: torch.device, name: str | None = None) -> None:
    """Returns once all ranks have called it.

    Args:
        group: the ranks.
        device: one that the group's backend serves.
        name: shown where somebody asks what a rank waits for.
    """
    token = torch.zeros(1, dtype=torch.int32, device=device)
    label = "barrier" if name is None else f"barrier {name!r}"
    group.wait(group.all_reduce(token, label=label), device)
    group.wait_device(device)


def reduce_op(op: Any) -> Any:
    """A `ReduceOp` from its name, or the operation itself.

    Raises:
        ConfigurationError: the name is unknown.
    """
    if op is None:
        return dist.ReduceOp.SUM
    if not isinstance(op, str):
        return op
    known = _REDUCE_OPS.get(op.lower())
    if known is None:
        raise ConfigurationError(f"unknown reduce_op {op!r}; there are {', '.join(sorted(_REDUCE_OPS))}")
    return known


def all_reduce(group: Group, tensor: torch.Tensor, op: Any = "sum") -> torch.Tensor:
    """Reduces `tensor` over all ranks in place, in one collective, and returns it.

    Args:
        group: the ranks.
        tensor: any shape; the same shape and dtype on all ranks.
        op: a `ReduceOp` or 'sum', 'mean', 'avg', 'min', 'max', 'product'. The mean of integers is computed
            in floating point and written back into the integer tensor, as Lightning does.

    Raises:
        ConfigurationError: the name of the operation is unknown.
    """
    resolved = reduce_op(op)
    is_mean = resolved == dist.ReduceOp.AVG
    contiguous = tensor.detach().contiguous()
    # gloo has an average only since torch 2.12, and no backend has one that promotes integers
    work = group.all_reduce(contiguous, dist.ReduceOp.SUM if is_mean else resolved)
    group.wait(work, tensor.device)
    with torch.no_grad():
        if is_mean and tensor.is_floating_point():
            contiguous.div_(group.size)
        elif is_mean:
            contiguous.copy_(contiguous / group.size)
        if contiguous.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(contiguous)
    return tensor


def all_reduce_coalesced(group: Group, tensors: Sequence[torch.Tensor], op: Any = "sum") -> None:
    """Reduces each of `tensors` in place, with one collective for all of one dtype and device."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_kind.values():
        if len(same) == 1:
            all_reduce(group, same[0], op)
            continue
        flat = torch.cat([t.detach().reshape(-1) for t in same])
        all_reduce(group, flat, op)
        with torch.no_grad():
            for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))


class _AllGather(torch.autograd.Function):
    """All-gather whose backward sums the gradients that all ranks have for this rank's input."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _gather(group, tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        all_reduce(ctx.group, total)
        return total[ctx.group.rank], None


def _gather(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    stacked = tensor.new_empty((group.size, *tensor.shape))
    group.wait(group.all_gather(list(stacked.unbind(0)), tensor.detach().contiguous()), tensor.device)
    return stacked


def all_gather(group: Group, tensor: torch.Tensor, *, sync_grads: bool = False) -> torch.Tensor:
    """The tensors of all ranks, stacked: shape (size, *tensor.shape), in rank order.

    Args:
        group: the ranks.
        tensor: the same shape and dtype on all ranks.
        sync_grads: whether gradients flow back to the rank that contributed (its backward communicates).
    """
    if sync_grads and torch.is_grad_enabled() and tensor.requires_grad:
        gathered: torch.Tensor = _AllGather.apply(tensor, group)  # type: ignore[no-untyped-call]
        return gathered
    with torch.no_grad():
        return _gather(group, tensor)


def broadcast_object(group: Group, obj: Any, src: int, device: torch.device) -> Any:
    """The object that group rank `src` passed, on all ranks.

    Pickled; up to 4 KiB it costs one collective, above that two. What the others pass is ignored.

    Args:
        group: the ranks.
        obj: anything that pickles.
        src: the rank whose object is sent.
        device: where the tensors of the exchange live, as the backend needs it.

    Raises:
        ConfigurationError: `src` is no rank of the group.
    """
    if not 0 <= src < group.size:
        raise ConfigurationError(f"broadcast from rank {src}, but the group has ranks 0 to {group.size - 1}")
    payload = pickle.dumps(obj) if group.rank == src else b""
    inline = _PACKET_BYTES - _HEADER_BYTES
    packet = len(payload).to_bytes(_HEADER_BYTES, "little") + payload[:inline].ljust(inline, b"\0")
    packet = _broadcast_bytes(group, packet, src, device)
    length = int.from_bytes(packet[:_HEADER_BYTES], "little")
    if length > inline:
        rest = payload[inline:] if group.rank == src else bytes(length - inline)
        packet += _broadcast_bytes(group, rest, src, device)
    if group.rank == src:
        return obj
    return pickle.loads(packet[_HEADER_BYTES : _HEADER_BYTES + length])


def _broadcast_bytes(group: Group, data: bytes, src: int, device: torch.device) -> bytes:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    group.wait(group.broadcast(tensor, src), device)
    return _to_bytes(group, tensor)


def all_gather_objects(group: Group, obj: Any, device: torch.device) -> list[Any]:
    """The objects of all ranks, in rank order. Pickled; two collectives."""
    payload = pickle.dumps(obj)
    sizes = _gather(group, torch.tensor([len(payload)], device=device))
    group.wait_device(device)
    lengths = [int(n) for n in sizes.view(-1).tolist()]
    mine = torch.frombuffer(bytearray(payload.ljust(max(lengths), b"\0")), dtype=torch.uint8)
    gathered = _gather(group, mine.to(device))
    return [
        pickle.loads(_to_bytes(group, row)[:n]) for row, n in zip(gathered.unbind(0), lengths, strict=True)
    ]


def _to_bytes(group: Group, tensor: torch.Tensor) -> bytes:
    group.wait_device(tensor.device)
    data: bytes = tensor.cpu().numpy().tobytes()
    return data

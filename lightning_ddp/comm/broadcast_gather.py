"""Collectives that move tensors as they are: broadcast and all_gather.

Every function here is called by all ranks of the group, in one order, and communicates. Tensors of any dtype
travel: complex numbers as pairs, and what a backend does not know (bool, int16 ...) as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from lightning_ddp.comm.group import Group
from lightning_ddp.comm.handle import Call, Collective, Handle, Wait, check_rank
from lightning_ddp.errors import ConfigurationError, RankMismatchError

__all__ = [
    "all_gather",
    "all_gather_uneven",
    "broadcast",
    "numbers",
    "start_gather",
]

_TRAVEL_AS_THEY_ARE = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
}
_DTYPES = sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str)
_MOST_DIMS = 16


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor: a 1-D view of a type that every backend sends."""
    flat = tensor.detach().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat if flat.dtype in _TRAVEL_AS_THEY_ARE else flat.view(torch.uint8)


@Collective
def broadcast(
    group: Group,
    tensor: torch.Tensor,
    src: int = 0,
    *,
    timeout: timedelta | None = None,
    label: str = "broadcast",
) -> Handle[torch.Tensor]:
    """Overwrites `tensor` with that of group rank `src` and returns it.

    Args:
        group: the ranks.
        tensor: any shape and strides; the same shape and dtype on all ranks.
        src: the rank whose values all get.
        timeout: deadline of this call; None for the group's own limit.
        label: what it is called in errors, in the profiler and where somebody asks what a rank waits for.

    Raises:
        ConfigurationError: `src` is no rank of the group.
        CollectiveTimeoutError: the deadline has passed.
        CollectiveError: the backend failed.
    """
    call = Call(group=group, device=tensor.device, label=label, timeout=timeout)
    check_rank(group, src, "broadcast from")
    contiguous = tensor.detach().contiguous()
    work = call.start(lambda: group.broadcast(numbers(contiguous), src, **call.limit))

    def finish() -> torch.Tensor:
        if contiguous.data_ptr() != tensor.data_ptr() and group.rank != src:
            with torch.no_grad():
                tensor.detach().copy_(contiguous)
        return tensor

    return call.handle(call.wait_for(work), finish)


class _AllGather(torch.autograd.Function):
    """All-gather whose backward sums the gradients that all ranks have for this rank's input."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Call) -> torch.Tensor:
        ctx.call = call
        return call.handle(*start_gather(call, tensor)).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        forward = ctx.call
        total = grads[0].contiguous().clone()
        call = Call(
            group=forward.group,
            device=total.device,
            label=f"backward of {forward.label}",
            timeout=forward.timeout,
        )
        work = call.start(lambda: call.group.all_reduce(total, **call.limit))
        call.handle(call.wait_for(work), lambda: total).wait()
        return total[call.group.rank], None


def start_gather(call: Call, tensor: torch.Tensor) -> tuple[Wait, Callable[[], torch.Tensor]]:
    """Starts an all-gather; its wait, and what then returns the stacked tensors of all ranks."""
    group = call.group
    stacked = tensor.new_empty((group.size, *tensor.shape))
    outputs = [numbers(row) for row in stacked.unbind(0)]
    mine = numbers(tensor.detach().contiguous())
    work = call.start(lambda: group.all_gather(outputs, mine, **call.limit))
    return call.wait_for(work), lambda: stacked


@Collective
def all_gather(
    group: Group,
    tensor: torch.Tensor,
    *,
    sync_grads: bool = False,
    timeout: timedelta | None = None,
    label: str = "all_gather",
) -> Handle[torch.Tensor]:
    """The tensors of all ranks, stacked: shape (size, *tensor.shape), in rank order.

    Args:
        group: the ranks.
        tensor: the same shape and dtype on all ranks; see `all_gather_uneven`.
        sync_grads: whether gradients flow back to the rank that contributed (its backward communicates);
            then `start` waits as well.
        timeout: deadline of this call, and of its backward; None for the group's own limit.
        label: as in `broadcast`.

    Raises:
        CollectiveTimeoutError: the deadline has passed.
        CollectiveError: the backend failed.
    """
    call = Call(group=group, device=tensor.device, label=label, timeout=timeout)
    if sync_grads and torch.is_grad_enabled() and tensor.requires_grad:
        gathered: torch.Tensor = _AllGather.apply(tensor, call)  # type: ignore[no-untyped-call]
        return call.handle(lambda _: None, lambda: gathered)
    with torch.no_grad():
        return call.handle(*start_gather(call, tensor))


@Collective
def all_gather_uneven(
    group: Group,
    tensor: torch.Tensor,
    *,
    timeout: timedelta | None = None,
    label: str = "all_gather_uneven",
) -> Handle[list[torch.Tensor]]:
    """The tensors of all ranks, in rank order, which may differ in every dimension and in how many they have.

    Two collectives: the shapes first, for which it waits in `start` as well, then the tensors, padded to
    the longest.

    Args:
        group: the ranks.
        tensor: of one dtype on all ranks; up to 16 dimensions.
        timeout: deadline of both together; None for the group's own limit.
        label: as in `broadcast`.

    Raises:
        ConfigurationError: more than 16 dimensions.
        RankMismatchError: the ranks have different dtypes; on all of them.
        CollectiveTimeoutError: the deadline has passed.
        CollectiveError: the backend failed.
    """
    call = Call(group=group, device=tensor.device, label=label, timeout=timeout)
    shapes = _all_shapes(call, tensor)
    padded = tensor.new_empty(max(math.prod(shape) for shape in shapes))
    with torch.no_grad():
        padded[: tensor.numel()] = tensor.detach().reshape(-1)
        wait, stacked = start_gather(call, padded)

    def finish() -> list[torch.Tensor]:
        rows = stacked().unbind(0)
        return [row[: math.prod(s)].view(s) for row, s in zip(rows, shapes, strict=True)]

    return call.handle(wait, finish)


def _all_shapes(call: Call, tensor: torch.Tensor) -> list[tuple[int, ...]]:
    if tensor.dim() > _MOST_DIMS:
        raise ConfigurationError(f"{call.label}: {tensor.dim()} dimensions; at most {_MOST_DIMS} can be sent")
    described = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    described += [0] * (2 + _MOST_DIMS - len(described))
    answers = call.handle(*start_gather(call, torch.tensor(described, device=tensor.device))).wait()
    call.group.wait_device(tensor.device)
    rows: list[list[int]] = answers.tolist()
    dtypes = [_DTYPES[row[0]] for row in rows]
    if len(set(dtypes)) > 1:
        raise RankMismatchError(
            f"rank {call.group.rank}: {call.label}: the ranks have different dtypes:"
            f" {', '.join(f'rank {rank} {dtype}' for rank, dtype in enumerate(dtypes))}. Convert them to one."
        )
    return [tuple(row[2 : 2 + row[1]]) for row in rows]

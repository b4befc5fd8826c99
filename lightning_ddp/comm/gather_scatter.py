"""Collectives that move tensors unchanged: broadcast, all_gather, gather, scatter, all_to_all.

All ranks of the group must call these functions in the same order. Tensors may have any dtype: complex
numbers are sent as pairs, and dtypes that a backend does not support (bool, int16 ...) as bytes. For
`timeout`, `label` and the errors of the backend see `all_reduce`; a `src` or `dst` that the group does not
have is a ConfigurationError.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_ddp.comm.group import Group
from lightning_ddp.comm.handle import Call, Collective, Handle, check_rank, no_wait
from lightning_ddp.errors import ConfigurationError, RankMismatchError

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
CHUNK_BYTES = 25 * 2**20
"""Largest number of bytes of small tensors that are copied together into one collective."""
_IN_PLACE_BYTES = 2**20
Splits = Sequence[int]
S = TypeVar("S", bound=torch.Tensor)


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor's elements in 1-D, with a dtype that every backend sends."""
    flat = tensor.detach().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat if flat.dtype in _TRAVEL_AS_THEY_ARE else flat.view(torch.uint8)


def filled(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Copy `values` to `tensor` and return it."""
    tensor.detach().copy_(values)
    return tensor


@Collective
def broadcast(
    group: Group,
    tensor: torch.Tensor,
    src: int = 0,
    *,
    timeout: timedelta | float | None = None,
    label: str = "broadcast",
) -> Handle[torch.Tensor]:
    """Overwrite `tensor` with that of group rank `src` and return it.

    Collective: all ranks must call it.

    Args:
        tensor: any shape and strides; the same shape and dtype on all ranks.
    """
    call = Call(group=group, device=tensor.device, label=label, timeout=timeout)
    check_rank(group, src, "broadcast from")
    contiguous = tensor.detach().contiguous()
    work = call.start(lambda: group.broadcast(numbers(contiguous), src, **call.limit))

    is_in_place = contiguous.data_ptr() == tensor.data_ptr() or group.rank == src
    return call.handle(work, lambda: tensor if is_in_place else filled(tensor, contiguous))


def chunks(tensors: Iterable[S], most_bytes: float) -> Iterator[list[S]]:
    """Group non-empty tensors by dtype and device, up to the given number of bytes."""
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
    """Fill tensors from consecutive values of a flat tensor."""
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        filled(tensor, part.view(tensor.shape))


def broadcast_coalesced(
    group: Group, tensors: Sequence[torch.Tensor], src: int = 0, chunk_bytes: int = CHUNK_BYTES
) -> None:
    """Overwrite `tensors` with those of group rank `src`.

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


class _AllGather(torch.autograd.Function):
    """All-gather whose backward sums the gradients that all ranks have for this rank's input."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Call) -> torch.Tensor:
        ctx.call = call
        return start_gather(call, tensor).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        group, label = ctx.call.group, f"backward of {ctx.call.label}"
        total = grads[0].contiguous().clone()
        call = Call(group=group, device=total.device, label=label, timeout=ctx.call.timeout)
        work = call.start(lambda: group.all_reduce(total, **call.limit))
        return call.handle(work, lambda: total).wait()[group.rank], None


def start_gather(call: Call, tensor: torch.Tensor) -> Handle[torch.Tensor]:
    """Start an all-gather of the stacked tensors of all ranks."""
    group = call.group
    stacked = tensor.new_empty((group.size, *tensor.shape))
    outputs = [numbers(row) for row in stacked.unbind(0)]
    mine = numbers(tensor.detach().contiguous())
    work = call.start(lambda: group.all_gather(outputs, mine, **call.limit))
    return call.handle(work, lambda: stacked)


def _numbers_of_all(call: Call, mine: list[int]) -> list[list[int]]:
    """Gather the numbers of all ranks, equally many per rank, in rank order."""
    gathered = start_gather(call, torch.tensor(mine, device=call.device)).wait()
    call.group.wait_device(call.device)
    rows: list[list[int]] = gathered.tolist()
    return rows


@Collective
def all_gather(
    group: Group,
    tensor: torch.Tensor,
    *,
    sync_grads: bool = False,
    timeout: timedelta | float | None = None,
    label: str = "all_gather",
) -> Handle[torch.Tensor]:
    """Return the tensors of all ranks, stacked: shape (size, *tensor.shape), in rank order.

    Collective: all ranks must call it.

    Args:
        tensor: the same shape and dtype on all ranks; see `all_gather_uneven`.
        sync_grads: True to let gradients flow back to the contributing rank (the backward communicates);
            then `start` waits as well.
        timeout: deadline of this call, and of its backward; None for the group's timeout.
    """
    call = Call(group=group, device=tensor.device, label=label, timeout=timeout)
    if sync_grads and torch.is_grad_enabled() and tensor.requires_grad:
        gathered: torch.Tensor = _AllGather.apply(tensor, call)  # type: ignore[no-untyped-call]
        return Handle(call, no_wait, lambda: gathered)
    return start_gather(call, tensor)


@Collective
def all_gather_uneven(
    group: Group,
    tensor: torch.Tensor,
    *,
    timeout: timedelta | float | None = None,
    label: str = "all_gather_uneven",
) -> Handle[list[torch.Tensor]]:
    """Return the tensors of all ranks, which may differ in shape and dimensions, in rank order.

    Two collectives: the shapes first, for which `start` waits as well, then the tensors, padded to the
    longest.

    Collective: all ranks must call it.

    Args:
        tensor: the same dtype on all ranks; up to 16 dimensions.
        timeout: deadline of both collectives together; None for the group's timeout.

    Raises:
        ConfigurationError: more than 16 dimensions.
        RankMismatchError: the ranks have different dtypes; raised on all ranks.
    """
    call = Call(group=group, device=tensor.device, label=label, timeout=timeout)
    shapes = _all_shapes(call, tensor)
    padded = tensor.new_empty(max(math.prod(shape) for shape in shapes))
    padded[: tensor.numel()] = tensor.detach().reshape(-1)
    return start_gather(call, padded).then(
        lambda rows: [row[: math.prod(shape)].view(shape) for row, shape in zip(rows, shapes, strict=True)]
    )


def _all_shapes(call: Call, tensor: torch.Tensor) -> list[tuple[int, ...]]:
    if tensor.dim() > _MOST_DIMS:
        raise ConfigurationError(
            f"{call.label}: the tensor has {tensor.dim()} dimensions; expected at most {_MOST_DIMS}"
        )
    described = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    described += [0] * (2 + _MOST_DIMS - len(described))
    rows = _numbers_of_all(call, described)
    dtypes = [_DTYPES[row[0]] for row in rows]
    if len(set(dtypes)) > 1:
        raise RankMismatchError(
            f"rank {call.group.rank}: {call.label}: the ranks have different dtypes:"
            f" {', '.join(f'rank {rank} {dtype}' for rank, dtype in enumerate(dtypes))}. Convert them to"
            " one dtype."
        )
    return [tuple(row[2 : 2 + row[1]]) for row in rows]


# ---------------------------------------------------------------------- one rank at one end


@Collective
def gather(
    group: Group,
    tensor: torch.Tensor,
    dst: int = 0,
    *,
    timeout: timedelta | float | None = None,
    label: str = "gather",
) -> Handle[torch.Tensor | None]:
    """Return the stacked tensors of all ranks on group rank `dst`, and None on the others.

    On a backend without a gather it is an all-gather.

    Collective: all ranks must call it.

    Args:
        tensor: the same shape and dtype on all ranks.
        dst: the rank that gets the result, of shape (size, *tensor.shape).
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
    if work is None:
        return start_gather(call, tensor).then(lambda everything: everything if is_root else None)
    return call.handle(work, lambda: stacked)


@Collective
def scatter(
    group: Group,
    tensor: torch.Tensor,
    parts: Sequence[torch.Tensor] | None = None,
    src: int = 0,
    *,
    timeout: timedelta | float | None = None,
    label: str = "scatter",
) -> Handle[torch.Tensor]:
    """Overwrite `tensor` on rank r with part r of group rank `src`, and return it.

    On a backend without a scatter it is a broadcast of all parts.

    Collective: all ranks must call it.

    Args:
        tensor: any shape and strides; the same shape and dtype on all ranks.
        parts: on `src` one tensor per rank, of the shape and dtype of `tensor`; ignored on the others.

    Raises:
        ConfigurationError: `src` is no rank of the group, or its parts do not fit.
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
    return call.handle(work, lambda: filled(tensor, received))


def _check_parts(call: Call, tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None) -> None:
    if parts is None or len(parts) != call.group.size:
        found = "none" if parts is None else str(len(parts))
        raise ConfigurationError(
            f"rank {call.group.rank}: {call.label}: the source passes one part per rank: expected"
            f" {call.group.size}, found {found}"
        )
    for rank, part in enumerate(parts):
        if part.shape != tensor.shape or part.dtype != tensor.dtype or part.device != tensor.device:
            raise ConfigurationError(
                f"rank {call.group.rank}: {call.label}: the part of rank {rank} has shape {list(part.shape)},"
                f" {part.dtype} on {part.device}; expected that of the tensor to fill: {list(tensor.shape)},"
                f" {tensor.dtype} on {tensor.device}"
            )


# ---------------------------------------------------------------------- all to all


@Collective
def all_to_all(
    group: Group,
    tensor: torch.Tensor,
    input_splits: Splits | None = None,
    output_splits: Splits | None = None,
    *,
    timeout: timedelta | float | None = None,
    label: str = "all_to_all",
) -> Handle[torch.Tensor]:
    """Send each rank its rows of `tensor`; return the rows from all ranks, in rank order.

    Uneven splits cost an all-gather of the splits first, for which `start` waits as well, unless
    `output_splits` are given too. On a backend without an all-to-all it is an all-gather of all rows,
    padded to the longest, from which each rank keeps its rows.

    Collective: all ranks must call it.

    Args:
        tensor: shape (rows, ...); dtype and the other dimensions are the same on all ranks.
        input_splits: rows for rank 0, 1 ... Given on all ranks or on none; None for the same number for all.
        output_splits: rows that come from rank 0, 1 ..., if they are known. Given on all ranks or on none.

    Returns:
        New memory of shape (sum of output_splits, ...).

    Raises:
        ConfigurationError: the splits do not fit the number of ranks or the rows.
    """
    call = Call(group=group, device=tensor.device, label=label, timeout=timeout)
    sends = _check_splits(call, tensor, input_splits, output_splits)
    sent = tensor.detach().contiguous()
    table: list[list[int]] | None = None
    if output_splits is not None:
        receives = list(output_splits)
    elif input_splits is None:
        receives = sends
    else:
        table = _numbers_of_all(call, sends)
        receives = [row[group.rank] for row in table]
    received = sent.new_empty((sum(receives), *sent.shape[1:]))
    if not math.prod(sent.shape[1:]):
        return Handle(call, no_wait, lambda: received)
    options = call.options(dist.AllToAllOptions)
    work = call.start_if_known(
        "alltoall_base",
        lambda: group.process_group.alltoall_base(_rows(received), _rows(sent), receives, sends, options),
        kind="all_to_all",  # rows may differ between ranks
    )
    if work is None:
        return _from_everything(call, sent, table or _numbers_of_all(call, sends))
    return call.handle(work, lambda: received)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 2-D view with the same rows, of a dtype that every backend sends."""
    if tensor.numel():
        return numbers(tensor).view(tensor.shape[0], -1)
    return numbers(tensor.new_empty((1, *tensor.shape[1:]))).view(1, -1)[:0]


def _check_splits(
    call: Call, tensor: torch.Tensor, input_splits: Splits | None, output_splits: Splits | None
) -> list[int]:
    size = call.group.size
    where = f"rank {call.group.rank}: {call.label}"
    if tensor.dim() == 0:
        raise ConfigurationError(
            f"{where}: a tensor without dimensions has no rows to send. Give it at least one dimension."
        )
    rows = tensor.shape[0]
    for name, splits in (("input_splits", input_splits), ("output_splits", output_splits)):
        if splits is not None and (len(splits) != size or min(splits) < 0):
            raise ConfigurationError(
                f"{where}: {name}={list(splits)}: expected {size} numbers of rows, one per rank"
            )
    if input_splits is None:
        if rows % size:
            raise ConfigurationError(
                f"{where}: {rows} rows cannot be split evenly over {size} ranks. Pass their numbers in"
                " input_splits."
            )
        return [rows // size] * size
    if sum(input_splits) != rows:
        raise ConfigurationError(
            f"{where}: input_splits={list(input_splits)} are {sum(input_splits)} rows; the tensor has {rows}"
        )
    return list(input_splits)


def _from_everything(call: Call, sent: torch.Tensor, table: list[list[int]]) -> Handle[torch.Tensor]:
    """Do an all-to-all by an all-gather; row r of `table` has rank r's numbers of rows to send."""
    padded = sent.new_empty((max(map(sum, table)), *sent.shape[1:]))
    padded[: sent.shape[0]] = sent
    rank = call.group.rank
    mine = [slice(sum(splits[:rank]), sum(splits[: rank + 1])) for splits in table]
    return start_gather(call, padded).then(
        lambda rows: torch.cat([row[where] for row, where in zip(rows, mine, strict=True)])
    )

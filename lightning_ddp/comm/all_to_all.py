"""all_to_all: every rank has something for every other one.

Called by all ranks of the group, in one order; communicates. Any dtype travels, as in `exchanges`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist

from lightning_ddp.comm.broadcast_gather import numbers, start_gather
from lightning_ddp.comm.group import Group
from lightning_ddp.comm.handle import Call, Collective, Handle, OnSlice, Wait
from lightning_ddp.errors import ConfigurationError

__all__ = ["all_to_all"]

Splits = Sequence[int]


@Collective
def all_to_all(
    group: Group,
    tensor: torch.Tensor,
    input_splits: Splits | None = None,
    output_splits: Splits | None = None,
    *,
    timeout: timedelta | None = None,
    label: str = "all_to_all",
) -> Handle[torch.Tensor]:
    """Sends each rank its rows of `tensor`; returns the rows that all ranks had for this one, in rank order.

    Uneven splits cost an all-gather of the splits first, for which it waits in `start` as well, unless
    `output_splits` are given too. On a backend without an all-to-all it is an all-gather of everything,
    padded to the longest, of which each rank keeps its rows.

    Args:
        group: the ranks.
        tensor: of shape (rows, ...); dtype and the other dimensions are the same on all ranks.
        input_splits: rows for rank 0, 1 ... Given on all ranks or on none; None for the same number for all.
        output_splits: rows that come from rank 0, 1 ..., if they are known. Given on all ranks or on none.
        timeout: deadline of this call; None for the group's own limit.
        label: what it is called in errors, in the profiler and where somebody asks what a rank waits for.

    Returns:
        New memory of shape (sum of output_splits, ...).

    Raises:
        ConfigurationError: the splits do not fit the number of ranks or the rows.
        CollectiveTimeoutError: the deadline has passed.
        CollectiveError: the backend failed.
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
        table = _all_splits(call, sends)
        receives = [row[group.rank] for row in table]
    wait: Wait = _no_wait
    received = sent.new_empty((sum(receives), *sent.shape[1:]))
    if math.prod(sent.shape[1:]):
        options = call.options(dist.AllToAllOptions)
        work = call.start_if_known(
            "alltoall_base",
            lambda: group.process_group.alltoall_base(_rows(received), _rows(sent), receives, sends, options),
            kind="all_to_all",  # rows may differ between ranks
        )
        if work is None:
            return _from_everything(call, sent, table or _all_splits(call, sends))
        wait = call.wait_for(work)
    return call.handle(wait, lambda: received)


def _no_wait(on_slice: OnSlice) -> None:
    """There is nothing to send."""


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """As many rows, of a type that every backend sends."""
    if tensor.numel():
        return numbers(tensor).view(tensor.shape[0], -1)
    return numbers(tensor.new_empty((1, *tensor.shape[1:]))).view(1, -1)[:0]


def _check_splits(
    call: Call, tensor: torch.Tensor, input_splits: Splits | None, output_splits: Splits | None
) -> list[int]:
    size = call.group.size
    where = f"rank {call.group.rank}: {call.label}"
    if tensor.dim() == 0:
        raise ConfigurationError(f"{where}: a tensor without dimensions has no rows to send")
    rows = tensor.shape[0]
    for name, splits in (("input_splits", input_splits), ("output_splits", output_splits)):
        if splits is not None and (len(splits) != size or min(splits) < 0):
            raise ConfigurationError(
                f"{where}: {name}={list(splits)}; expected {size} numbers of rows, one a rank"
            )
    if input_splits is None:
        if rows % size:
            raise ConfigurationError(
                f"{where}: {rows} rows cannot be split evenly among {size} ranks; say how with input_splits"
            )
        return [rows // size] * size
    if sum(input_splits) != rows:
        raise ConfigurationError(
            f"{where}: input_splits={list(input_splits)} are {sum(input_splits)} rows; the tensor has {rows}"
        )
    return list(input_splits)


def _all_splits(call: Call, sends: list[int]) -> list[list[int]]:
    """Row r: what rank r sends to rank 0, 1 ..."""
    answers = call.handle(*start_gather(call, torch.tensor(sends, device=call.device))).wait()
    call.group.wait_device(call.device)
    table: list[list[int]] = answers.tolist()
    return table


def _from_everything(call: Call, sent: torch.Tensor, table: list[list[int]]) -> Handle[torch.Tensor]:
    padded = sent.new_empty((max(map(sum, table)), *sent.shape[1:]))
    padded[: sent.shape[0]] = sent
    wait, everything = start_gather(call, padded)

    def finish() -> torch.Tensor:
        mine = []
        for rows, splits in zip(everything().unbind(0), table, strict=True):
            ends = list(accumulate(splits))
            rank = call.group.rank
            mine.append(rows[ends[rank] - splits[rank] : ends[rank]])
        return torch.cat(mine)

    return call.handle(wait, finish)

"""Point-to-point messages, send and recv, which only the two ranks involved call.

`tag` distinguishes messages between the same ranks; `timeout`, of each message, `label` and errors of the
backend are those of `all_reduce`, `device` is that of `objects`. Between two ranks, messages of one tag
arrive in the order in which they were sent. With NCCL the first message between two ranks sets up a
connection for these two, and tags are ignored.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch

from lightning_ddp.comm.gather_scatter import filled, numbers
from lightning_ddp.comm.group import Group, InThread, OnSlice
from lightning_ddp.comm.handle import Call, Collective, Handle, Wait, check_rank
from lightning_ddp.comm.objects import to_bytes, to_tensor
from lightning_ddp.errors import ConfigurationError

_POLL_S = 0.005


@Collective
def send(
    group: Group,
    tensor: torch.Tensor,
    dst: int,
    tag: int = 0,
    *,
    timeout: timedelta | float | None = None,
    label: str = "send",
) -> Handle[None]:
    """Send `tensor` to group rank `dst`, which must call `recv`.

    Uses the group's key-value store if the backend has no point-to-point messages.

    Args:
        tensor: any shape, strides and dtype; must not be changed before the wait returns.

    Raises:
        ConfigurationError: `dst` is this rank or no rank of the group, or the group has neither messages
            nor a store.
    """
    call = Call(group=group, device=tensor.device, label=label, timeout=timeout)
    _check_peer(call, dst, "send to")
    flat = numbers(tensor.detach().contiguous())
    work = call.start_if_known("send", lambda: group.process_group.send([flat], dst, tag))
    if work is not None:
        return Handle(call, _wait_for(call, work), lambda: None)
    data = to_bytes(group, flat.view(torch.uint8))
    post = partial(_store(call).set, _next_key(call, group.rank, dst, tag), data)
    thread = InThread(lambda _: post(), _limit_s(call))
    return Handle(call, call.wait_for_thread(lambda: thread), lambda: None)


@Collective
def recv(
    group: Group,
    tensor: torch.Tensor,
    src: int,
    tag: int = 0,
    *,
    timeout: timedelta | float | None = None,
    label: str = "recv",
) -> Handle[torch.Tensor]:
    """Overwrite `tensor` with the tensor that group rank `src` sends, and return it.

    Args:
        tensor: the shape and dtype of the sent tensor; any strides.

    Raises:
        ConfigurationError: `src` is this rank or no rank of the group, or the group has neither messages
            nor a store.
        CollectiveTimeoutError: the deadline has passed.
        CollectiveError: the backend failed, or the message has another size.
    """
    call = Call(group=group, device=tensor.device, label=label, timeout=timeout)
    _check_peer(call, src, "recv from")
    received = torch.empty_like(tensor, memory_format=torch.contiguous_format).detach()
    flat = numbers(received)
    work = call.start_if_known("recv", lambda: group.process_group.recv([flat], src, tag))
    wait = _wait_for(call, work) if work is not None else _wait_for_key(call, flat, src, tag)
    return Handle(call, wait, lambda: filled(tensor, received))


def _check_peer(call: Call, rank: int, what: str) -> None:
    check_rank(call.group, rank, what)
    if rank == call.group.rank:
        raise ConfigurationError(f"{what} rank {rank}: this is the rank itself. Pass another rank.")


# ---------------------------------------------------------------------- objects


def send_object(
    group: Group,
    obj: Any,
    dst: int,
    device: torch.device,
    tag: int = 0,
    *,
    timeout: timedelta | float | None = None,
    label: str = "send_object",
) -> None:
    """Send a pickled object in two messages to group rank `dst`, which calls `recv_object`."""
    payload = to_tensor(pickle.dumps(obj), device)
    size = torch.tensor([payload.numel()], device=device)
    send(group, size, dst, tag, timeout=timeout, label=label)
    send(group, payload, dst, tag, timeout=timeout, label=label)


def recv_object(
    group: Group,
    src: int,
    device: torch.device,
    tag: int = 0,
    *,
    timeout: timedelta | float | None = None,
    label: str = "recv_object",
) -> Any:
    """Return the object that group rank `src` sends to this rank."""
    size = recv(
        group, torch.zeros(1, dtype=torch.int64, device=device), src, tag, timeout=timeout, label=label
    )
    payload = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    recv(group, payload, src, tag, timeout=timeout, label=label)
    return pickle.loads(to_bytes(group, payload))


# ---------------------------------------------------------------------- waits


def _wait_for(call: Call, work: Any) -> Wait:
    """Return the wait for a message; with gloo in a thread, as its waits cannot be sliced.

    gloo cannot be polled for a message, and an expired wait breaks its connection.
    """
    if call.group.backend(call.device) != "gloo":
        return call.wait_for(work)
    limit = call.backend_timeout
    block = work.wait if limit is None else partial(work.wait, limit)
    return call.wait_for_thread(cache(lambda: InThread(lambda _: block())))


# ---------------------------------------------------------------------- messages through the store


def _store(call: Call) -> Any:
    store = call.group.store
    if store is None:
        raise ConfigurationError(
            f"rank {call.group.rank}: {call.label}: the backend has no messages, and torch knows no store for"
            " this group. Pass one: Group(process_group, store=store)"
        )
    return store


def _next_key(call: Call, src: int, dst: int, tag: int) -> str:
    message = f"message/{src}/{dst}/{tag}"
    return f"lightning_ddp/{message}/{call.group.next_number(message)}"


def _limit_s(call: Call) -> float:
    limit = call.backend_timeout
    return call.group.timeout_s(call.device) if limit is None else limit.total_seconds()


def _wait_for_key(call: Call, flat: torch.Tensor, src: int, tag: int) -> Wait:
    store, key = _store(call), _next_key(call, src, call.group.rank, tag)

    def take(thread: InThread[bytes]) -> bytes:
        thread.until(lambda: store.check([key]), _POLL_S, f"rank {src} has sent nothing")
        data: bytes = store.get(key)
        store.delete_key(key)
        if len(data) != flat.nbytes:
            raise RuntimeError(f"rank {src} has sent {len(data)} bytes, but {flat.nbytes} were expected")
        return data

    taken = call.wait_for_thread(cache(lambda: InThread(take, _limit_s(call))))

    def wait(on_slice: OnSlice) -> None:
        flat.view(torch.uint8).copy_(torch.frombuffer(bytearray(taken(on_slice)), dtype=torch.uint8))

    return wait

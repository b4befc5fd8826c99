"""Collectives of tensors: broadcast, all_gather, all_reduce, reduce; and of Python objects.

All ranks of the group must call these functions in the same order. Tensors may have any dtype: complex
numbers are sent as pairs, and dtypes that a backend does not support (bool, int16 ...) as bytes.

Reductions: bool is reduced by logical or (sum, max) or logical and (product, min). Integers of 16 bits are
reduced as 32 bits. Complex numbers support sum and mean only. The mean of integers is computed in floating
point and written back as integers, as in Lightning.

Objects must be picklable; they are unpickled by the receivers, so the ranks have to trust each other. Their
`device` is that of the tensors of the exchange, as the backend needs it; for `timeout`, `label` and errors
see `all_reduce`.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_ddp.comm.call import Call, Timeout, check_rank
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
_PACKET_BYTES, _GATHERED_PACKET_BYTES = 4096, 1024
"""Sizes of the first packet of an object that is broadcast, and of each that is gathered."""
_HEADER_BYTES = 8
_INLINE_BYTES = 1024
"""Size from which a tensor inside an object is sent as a tensor."""
S = TypeVar("S", bound=torch.Tensor)


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's elements as a 1-D view, with a dtype that every backend sends."""
    flat = tensor.detach().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat if flat.dtype in _TRAVEL_AS_THEY_ARE else flat.view(torch.uint8)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in contiguous memory, maybe its own, without a pending conjugation or sign."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is contiguous, without a pending conjugation or sign."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def chunks(tensors: Iterable[S], most_bytes: float) -> Iterator[list[S]]:
    """Group non-empty tensors by dtype and device; yield lists of up to `most_bytes`, or of one tensor."""
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
    contiguous = _values(tensor)
    call.run(group.broadcast, numbers(contiguous), src)
    if contiguous.data_ptr() != tensor.data_ptr() and group.rank != src:
        tensor.detach().copy_(contiguous)
    return tensor


def broadcast_coalesced(group: Group, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
    """Overwrite `tensors` with those of group rank `src`, small ones in chunks of one broadcast each.

    Shapes and dtypes must be the same on all ranks. Small tensors of one dtype and device are sent together
    in chunks of at most 25 MiB; a contiguous tensor of 1 MiB or more is sent in place, without a copy.

    Collective: all ranks must call it.
    """
    with torch.no_grad():
        large = [t for t in tensors if is_plain(t) and t.nbytes >= _IN_PLACE_BYTES]
        alone = {id(t) for t in large}
        works = [(group.broadcast(numbers(t), src), t.device) for t in large]
        for chunk in chunks([t for t in tensors if id(t) not in alone], CHUNK_BYTES):
            flat = torch.cat([t.detach().reshape(-1) for t in chunk])
            group.wait(group.broadcast(numbers(flat), src), flat.device)
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
    mine = numbers(_values(tensor))

    def begin() -> Any:
        group.note_sent(outputs)
        return group.process_group.allgather([outputs], [mine])

    call.run(group.start, "all_gather", (mine,), begin)
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
    """Return the tensor in a form that backends reduce, maybe a view, and the operation; a sum for a mean."""
    resolved = reduce_op(op)
    is_mean = bool(resolved == dist.ReduceOp.AVG)
    sent = _values(tensor)
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
    if is_mean:
        return widened(sent), dist.ReduceOp.SUM
    return sent.to(_WIDENED.get(sent.dtype, sent.dtype)), resolved


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of integers as one of int64, in which sums do not overflow; else the tensor itself."""
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.to(torch.int64)


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
    call.run(group.all_reduce, sent, sent_op)
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
    call.run(group.start, f"reduce to {dst}", (real,), begin)
    return _write_back(tensor, sent, op, group.size) if is_root else tensor


# ---------------------------------------------------------------------- Python objects


def all_gather_objects(
    group: Group,
    obj: Any,
    device: torch.device,
    *,
    timeout: Timeout = None,
    label: str = "all_gather_objects",
) -> list[Any]:
    """Return the objects of all ranks, in rank order.

    Pickled; one collective up to 1 KiB on all ranks, two above.

    Collective: all ranks must call it.
    """
    call = Call(group, device, label, timeout)

    def gather(data: bytes) -> list[bytes]:
        return [_to_bytes(group, row) for row in gathered_by(call, _to_tensor(data, device)).unbind(0)]

    payloads = _exchanged(pickle.dumps(obj), _GATHERED_PACKET_BYTES, gather)
    return [pickle.loads(payload) for payload in payloads]


def broadcast_nested(
    group: Group,
    value: Any,
    src: int,
    device: torch.device,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    timeout: Timeout = None,
    label: str = "broadcast_nested",
) -> Any:
    """Return the object of group rank `src`, with its tensors sent as tensors.

    Tensors may be anywhere in the object: in dicts, lists, tuples, named tuples, dataclasses, own classes.
    Structure, dtype, shape, `requires_grad` and the identity of tensors that occur several times are
    preserved. Other ranks get new, contiguous memory, on the CPU for CPU tensors and otherwise on their
    `device`. Different tensors that share memory do not share it on other ranks. Small CPU tensors and
    special tensors (parameters and other subclasses, sparse, quantized) are pickled with the rest.

    One collective for the pickle up to 4 KiB, two above; then one for each chunk of tensors of one dtype.

    Collective: all ranks must call it.

    Args:
        value: picklable object; ignored on other ranks than `src`.
        chunk_bytes: largest number of bytes copied together; a larger tensor is a chunk of its own.

    Returns:
        On `src` the object itself, on other ranks its copy.
    """
    call = Call(group, device, label, timeout)
    check_rank(group, src, "broadcast from")

    def send(data: bytes) -> list[bytes]:
        tensor = _to_tensor(data, device)
        call.run(group.broadcast, tensor, src)
        return [_to_bytes(group, tensor)]

    if group.rank == src:
        skeleton = io.BytesIO()
        pickler = _TakingApart(skeleton)
        pickler.dump(value)
        tensors = pickler.tensors
        kinds = [(t.dtype, tuple(t.shape), t.device.type == "cpu", t.requires_grad) for t in tensors]
        _exchanged(pickle.dumps((skeleton.getvalue(), kinds)), _PACKET_BYTES, send)
        contents = [_values(t).to(device) for t in tensors]
        _broadcast_tensors(call, contents, src, chunk_bytes)
        return value
    (payload,) = _exchanged(b"", _PACKET_BYTES, send)
    pickled, kinds = pickle.loads(payload)
    contents = [torch.empty(shape, dtype=dtype, device=device) for dtype, shape, _, _ in kinds]
    _broadcast_tensors(call, contents, src, chunk_bytes)
    received = [
        (tensor.cpu() if is_cpu else tensor).requires_grad_(requires_grad)
        for tensor, (_, _, is_cpu, requires_grad) in zip(contents, kinds, strict=True)
    ]
    assembler = _Assembler(io.BytesIO(pickled))
    assembler.tensors = received
    return assembler.load()


class _TakingApart(pickle.Pickler):
    """Pickler that collects large and non-CPU tensors, to send by collectives; pickles indices instead."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not torch.Tensor or obj.layout != torch.strided or obj.is_quantized:
            return None
        if obj.is_meta or (obj.is_cpu and obj.nbytes < _INLINE_BYTES):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _Assembler(pickle.Unpickler):
    tensors: Sequence[torch.Tensor] = ()

    def persistent_load(self, number: int) -> torch.Tensor:
        return self.tensors[number]


def _exchanged(payload: bytes, packet_bytes: int, exchange: Callable[[bytes], list[bytes]]) -> list[bytes]:
    """Send `payload` by `exchange`, once if all ranks' fit into a packet, else twice; return those received.

    All ranks give it equally many bytes: first the length of the payload with its beginning, then the rest.
    """
    inline = packet_bytes - _HEADER_BYTES
    header = len(payload).to_bytes(_HEADER_BYTES, "little")
    packets = exchange(header + payload[:inline].ljust(inline, b"\0"))
    lengths = [int.from_bytes(packet[:_HEADER_BYTES], "little") for packet in packets]
    rest = max(lengths) - inline
    if rest > 0:
        rests = exchange(payload[inline:].ljust(rest, b"\0"))
        packets = [packet + more for packet, more in zip(packets, rests, strict=True)]
    return [
        packet[_HEADER_BYTES : _HEADER_BYTES + length]
        for packet, length in zip(packets, lengths, strict=True)
    ]


def _broadcast_tensors(call: Call, tensors: Sequence[torch.Tensor], src: int, chunk_bytes: int) -> None:
    """Overwrite contiguous tensors with those of rank `src`; start all broadcasts before the first wait."""
    under_way = []
    for chunk in chunks([numbers(t) for t in tensors], chunk_bytes):
        flat = torch.cat(chunk) if len(chunk) > 1 else chunk[0]
        under_way.append((call.start(call.group.broadcast, flat, src), flat, chunk))
    for work, flat, chunk in under_way:
        call.wait(work)
        if len(chunk) > 1 and call.group.rank != src:
            unpack(flat, chunk)


def _to_tensor(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _to_bytes(group: Group, tensor: torch.Tensor) -> bytes:
    group.wait_device(tensor.device)
    data: bytes = tensor.cpu().numpy().tobytes()
    return data

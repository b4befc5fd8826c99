"""Collectives of Python objects, whose tensors are sent as tensors by `broadcast_nested`.

All ranks of the group must call these functions in the same order. Objects must be picklable; they are
unpickled by the receivers, so the ranks have to trust each other. `device` is that of the tensors of the
exchange, as the backend needs it; for `timeout`, `label` and errors see `all_reduce`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from lightning_ddp.comm.call import Call, Timeout, check_rank
from lightning_ddp.comm.collectives import CHUNK_BYTES, chunks, gathered_by, numbers, unpack
from lightning_ddp.comm.group import Group

_PACKET_BYTES = 4096
_GATHERED_PACKET_BYTES = 1024
"""Size of the first packet of each rank, which all ranks gather."""
_HEADER_BYTES = 8
_INLINE_BYTES = 1024


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
    payload = pickle.dumps(obj)
    inline = _GATHERED_PACKET_BYTES - _HEADER_BYTES
    packets = _gather_bytes(call, _packet(payload, inline))
    lengths = [_length_in(packet) for packet in packets]
    longest = max(lengths) - inline
    if longest > 0:
        rests = _gather_bytes(call, payload[inline:].ljust(longest, b"\0"))
        packets = [packet + rest for packet, rest in zip(packets, rests, strict=True)]
    return [
        pickle.loads(packet[_HEADER_BYTES : _HEADER_BYTES + length])
        for packet, length in zip(packets, lengths, strict=True)
    ]


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
    if group.rank == src:
        skeleton = io.BytesIO()
        pickler = _TakingApart(skeleton)
        pickler.dump(value)
        tensors = pickler.tensors
        kinds = [(t.dtype, tuple(t.shape), t.device.type == "cpu", t.requires_grad) for t in tensors]
        _broadcast_payload(call, pickle.dumps((skeleton.getvalue(), kinds)), src)
        contents = [t.detach().to(device).contiguous() for t in tensors]
        _broadcast_tensors(call, contents, src, chunk_bytes)
        return value
    pickled, kinds = pickle.loads(_broadcast_payload(call, b"", src))
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
    """Pickler that collects the tensors worth a collective, and stores their numbers instead."""

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


# ---------------------------------------------------------------------- bytes and tensors


def _packet(payload: bytes, inline: int) -> bytes:
    """Return the length of the payload followed by its first `inline` bytes, padded with zeros."""
    return len(payload).to_bytes(_HEADER_BYTES, "little") + payload[:inline].ljust(inline, b"\0")


def _length_in(packet: bytes) -> int:
    return int.from_bytes(packet[:_HEADER_BYTES], "little")


def _broadcast_payload(call: Call, payload: bytes, src: int) -> bytes:
    inline = _PACKET_BYTES - _HEADER_BYTES
    packet = _broadcast_bytes(call, _packet(payload, inline), src)
    length = _length_in(packet)
    if length > inline:
        packet += _broadcast_bytes(call, payload[inline:].ljust(length - inline, b"\0"), src)
    return packet[_HEADER_BYTES : _HEADER_BYTES + length]


def _broadcast_bytes(call: Call, data: bytes, src: int) -> bytes:
    tensor = _to_tensor(data, call.device)
    call.wait(_start_broadcast(call, tensor, src))
    return _to_bytes(call.group, tensor)


def _broadcast_tensors(call: Call, tensors: Sequence[torch.Tensor], src: int, chunk_bytes: int) -> None:
    """Broadcast contiguous tensors on the call's device; start all chunks before the first wait."""
    under_way = []
    for chunk in chunks([numbers(t) for t in tensors], chunk_bytes):
        flat = torch.cat(chunk) if len(chunk) > 1 else chunk[0]
        under_way.append((_start_broadcast(call, flat, src), flat, chunk))
    for work, flat, chunk in under_way:
        call.wait(work)
        if len(chunk) > 1 and call.group.rank != src:
            unpack(flat, chunk)


def _start_broadcast(call: Call, tensor: torch.Tensor, src: int) -> Any:
    return call.start(lambda: call.group.broadcast(tensor, src, label=call.label))


def _gather_bytes(call: Call, data: bytes) -> list[bytes]:
    """Return the bytes of all ranks, equally many per rank, in rank order."""
    gathered = gathered_by(call, _to_tensor(data, call.device))
    return [_to_bytes(call.group, row) for row in gathered.unbind(0)]


def _to_tensor(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _to_bytes(group: Group, tensor: torch.Tensor) -> bytes:
    group.wait_device(tensor.device)
    data: bytes = tensor.cpu().numpy().tobytes()
    return data

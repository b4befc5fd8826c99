"""Starting all ranks from one state: the check that they hold the same model, and the broadcast of it."""

from __future__ import annotations

import hashlib
import pickle
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_ddp.comm import all_gather_objects
from lightning_ddp.comm.group import Group
from lightning_ddp.ddp.plan import MIB, ParameterSpec
from lightning_ddp.errors import RankMismatchError

__all__ = ["broadcast_coalesced", "verify_across_ranks"]

_CHUNK_BYTES = 25 * MIB
_IN_PLACE_BYTES = MIB


def verify_across_ranks(
    group: Group,
    specs: Sequence[ParameterSpec],
    device: torch.device,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Checks that all ranks hold the same parameters and settings. All ranks call it; it communicates.

    Args:
        group: the ranks to compare.
        specs: this rank's parameters that require gradients, in registration order.
        device: where the tensors of the exchange live, as the backend needs it.
        settings: arguments that must be the same on all ranks, by name.

    Returns:
        A random token, the same on all ranks, that no other call returns.

    Raises:
        RankMismatchError: on every rank, naming the first parameter that differs, the rank and both forms.
    """
    # Devices differ by index between ranks, so only their type is compared.
    form = [(s.name, s.shape, s.stride, str(s.dtype), s.device.type) for s in specs]
    token = secrets.token_bytes(8)
    answer = (dict(settings or {}), form)
    mine = hashlib.sha256(pickle.dumps(answer)).digest() + token
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in range(group.size)]
    group.wait(group.all_gather(received, sent), device)
    answers = [t.cpu().numpy().tobytes() for t in received]
    if any(answer[:32] != answers[0][:32] for answer in answers):
        everyone = all_gather_objects(group, answer, device)
        _raise_settings_mismatch(group, [settings for settings, _ in everyone])
        _raise_mismatch(group, [form for _, form in everyone])
    return answers[0][32:].hex()


def _raise_settings_mismatch(group: Group, settings: Sequence[Mapping[str, Any]]) -> None:
    for rank, theirs in enumerate(settings):
        for name, value in settings[0].items():
            if theirs[name] != value:
                raise RankMismatchError(
                    f"rank {group.rank}: {name} is {value!r} on rank 0 and {theirs[name]!r} on rank {rank}."
                    " Wrap the model with the same arguments on every rank."
                )


def _raise_mismatch(group: Group, forms: Sequence[Sequence[tuple[Any, ...]]]) -> None:
    reference = forms[0]
    for rank, form in enumerate(forms):
        if len(form) != len(reference):
            known = {entry[0] for entry in reference}
            extra = [e[0] for e in form if e[0] not in known] or [
                e[0] for e in reference if e[0] not in {f[0] for f in form}
            ]
            raise RankMismatchError(
                f"rank {group.rank}: rank 0 has {len(reference)} parameters that require gradients,"
                f" rank {rank} has {len(form)}; only one of them has {', '.join(map(repr, extra[:5]))}."
                " Build the same model on every rank, for example from one seed and one configuration."
            )
        for ours, theirs in zip(reference, form, strict=True):
            if ours != theirs:
                raise RankMismatchError(
                    f"rank {group.rank}: the models differ. {_entry(0, ours)}, but {_entry(rank, theirs)}."
                    " Build the same model on every rank; shapes must not depend on the rank's data."
                )


def _entry(rank: int, entry: tuple[Any, ...]) -> str:
    name, shape, stride, dtype, device = entry
    return f"rank {rank} has {name!r} with shape {list(shape)}, stride {list(stride)}, {dtype} on {device}"


def broadcast_coalesced(
    group: Group, tensors: Sequence[torch.Tensor], src: int = 0, chunk_bytes: int = _CHUNK_BYTES
) -> None:
    """Overwrites `tensors` with those of group rank `src`. All ranks call it; it communicates.

    Small tensors of one dtype and device travel together in chunks of at most `chunk_bytes`; a contiguous
    tensor of 1 MiB or more travels in place, without a copy.

    Args:
        group: the ranks that agree.
        tensors: of the same shapes and dtypes on all ranks, in one order.
        src: the rank whose values win.
        chunk_bytes: size of a chunk in bytes.
    """
    with torch.no_grad():
        large = [t for t in tensors if t.is_contiguous() and t.numel() * t.element_size() >= _IN_PLACE_BYTES]
        alone = {id(t) for t in large}
        works = [(group.broadcast(t.detach(), src), t.device) for t in large]
        for chunk in _chunks([t for t in tensors if id(t) not in alone], chunk_bytes):
            _broadcast_chunk(group, chunk, src)
        for work, device in works:
            group.wait(work, device)


def _broadcast_chunk(group: Group, chunk: Sequence[torch.Tensor], src: int) -> None:
    device = chunk[0].device
    flat = torch.cat([t.detach().reshape(-1) for t in chunk])
    group.wait(group.broadcast(flat, src), device)
    if group.rank != src:
        for tensor, part in zip(chunk, flat.split([t.numel() for t in chunk]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))


def _chunks(tensors: Sequence[torch.Tensor], chunk_bytes: int) -> Iterator[list[torch.Tensor]]:
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_kind.values():
        chunk: list[torch.Tensor] = []
        nbytes = 0
        for tensor in same:
            size = tensor.numel() * tensor.element_size()
            if chunk and nbytes + size > chunk_bytes:
                yield chunk
                chunk, nbytes = [], 0
            chunk.append(tensor)
            nbytes += size
        yield chunk

"""Splits batches over devices and joins the outputs again, in nested containers."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_ddp.errors import ConfigurationError

__all__ = ["Device", "gather", "scatter", "scatter_kwargs"]

Device = int | str | torch.device
T = TypeVar("T")


def scatter(inputs: T, devices: Sequence[Device], dim: int = 0) -> list[T]:
    """Splits every tensor in nested containers into chunks along `dim`, one a device.

    Containers are tuples, namedtuples, lists, dicts and dataclasses. All else is repeated, as the same
    object. A batch of 3 on 2 devices gives chunks of 2 and 1; a batch of 1 gives one chunk. Chunks are
    copies, and gradients flow through them to the input. One device: whole tensors, moved there.

    >>> [x.tolist() for x, _ in scatter((torch.tensor([1, 2, 3]), "text"), ["cpu", "cpu"])]
    [[1, 2], [3]]

    Returns:
        As many results as the tensors have chunks; without any tensor, as many as there are devices.

    Raises:
        ConfigurationError: a tensor has no dimension `dim`, or tensors have different numbers of chunks.
    """
    return _scatter(inputs, as_devices(devices), dim, "inputs")


class _Arguments(NamedTuple):
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]


def scatter_kwargs(
    inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None, devices: Sequence[Device], dim: int = 0
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """`scatter` of positional and keyword arguments, in equally many results.

    The side without tensors is repeated, or padded with `()` or `{}`. Without any argument: one call.

    Raises:
        ConfigurationError: as `scatter`, also between positional and keyword arguments.
    """
    if not inputs and not kwargs:
        return [()], [{}]
    pieces = _scatter(_Arguments(inputs, dict(kwargs or {})), as_devices(devices), dim, "")
    return [piece.inputs for piece in pieces], [piece.kwargs for piece in pieces]


def gather(outputs: Sequence[Any], device: Device, dim: int = 0) -> Any:
    """Concatenates the replicas' outputs along `dim` on `device`, in nested containers; differentiable.

    Tensors without dimensions become a vector, with a warning. What is no tensor must be the same in all.

    Args:
        outputs: one a replica, alike but for the tensors' size along `dim`.
        device: where the results are; an int is a CUDA device.
        dim: the dimension along which `scatter` split.

    Raises:
        ConfigurationError: no outputs, or outputs that differ in structure or in something else than tensors.
    """
    if not outputs:
        raise ConfigurationError("gather got no outputs; expected one for each replica")
    return _gather(outputs, as_device(device), dim, "output")


def _open(obj: Any) -> tuple[dict[str, Any], Callable[[list[Any]], Any]] | None:
    """What a container holds, by how one writes the access, and how to build another; None for a leaf."""
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):  # a namedtuple
        return {f".{name}": getattr(obj, name) for name in obj._fields}, type(obj)._make  # type: ignore[attr-defined]
    if isinstance(obj, (list, tuple)):
        return {f"[{i}]": item for i, item in enumerate(obj)}, type(obj)
    if isinstance(obj, MutableMapping):
        return {f"[{key!r}]": value for key, value in obj.items()}, lambda values: _refilled(obj, values)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        names = [field.name for field in dataclasses.fields(obj)]
        return {f".{name}": getattr(obj, name) for name in names}, lambda v: _reset(obj, names, v)
    return None


def _refilled(mapping: MutableMapping[Any, Any], values: list[Any]) -> Any:
    copied = copy.copy(mapping)  # of its own kind, such as a defaultdict
    for key, value in zip(mapping, values, strict=True):
        copied[key] = value
    return copied


def _reset(instance: Any, names: list[str], values: list[Any]) -> Any:
    copied = copy.copy(instance)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(copied, name, value)  # a frozen one, too
    return copied


def named_tensors(obj: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(obj, Tensor):
        yield path, obj
    elif (opened := _open(obj)) is not None:
        for name, item in opened[0].items():
            yield from named_tensors(item, path + name)


def _scatter(obj: T, devices: list[torch.device], dim: int, path: str) -> list[T]:
    num_chunks: dict[int, str] = {}
    for name, tensor in named_tensors(obj, path):
        where = f"{name.lstrip('.')} of shape {tuple(tensor.shape)}"
        if len(devices) > 1 and not -tensor.dim() <= dim < tensor.dim():
            raise ConfigurationError(
                f"{where} has no dimension {dim} along which to split it over {len(devices)} devices; pass a"
                " number instead of a tensor, or expand it to the batch"
            )
        size = tensor.size(dim) if len(devices) > 1 else 0
        num_chunks.setdefault(max(1, -(-size // _chunk_size(size, len(devices)))), where)
    if len(num_chunks) > 1:
        found = "; ".join(f"{where}: {count}" for count, where in num_chunks.items())
        raise ConfigurationError(
            f"tensors fall into different numbers of chunks along dimension {dim} over {len(devices)} devices"
            f" ({found}); expected the same number, so that each replica gets its part of all of them"
        )
    used = next(iter(num_chunks), len(devices))
    return [_piece(obj, device, i, len(devices), dim) for i, device in enumerate(devices[:used])]


def _chunk_size(size: int, num_devices: int) -> int:
    return max(1, -(-size // num_devices))


def _piece(obj: Any, device: torch.device, index: int, num_devices: int, dim: int) -> Any:
    if isinstance(obj, Tensor):
        if num_devices == 1:
            return obj.to(device)
        step = _chunk_size(obj.size(dim), num_devices)
        chunk = obj.narrow(dim, index * step, min(step, obj.size(dim) - index * step))
        # a copy: an in-place change by one replica would spoil what the others saved for backward
        return chunk.to(device, copy=True)
    if (opened := _open(obj)) is None:
        return obj
    items, build = opened
    return build([_piece(item, device, index, num_devices, dim) for item in items.values()])


def _gather(outputs: Sequence[Any], device: torch.device, dim: int, path: str) -> Any:
    first = outputs[0]
    if all(isinstance(other, Tensor) for other in outputs):
        return _joined(outputs, device, dim, path)
    if any(type(other) is not type(first) for other in outputs):
        kinds = ", ".join(type(other).__name__ for other in outputs)
        raise ConfigurationError(f"{path} is of different types in the replicas: {kinds}")
    if (opened := _open(first)) is None:
        is_plain = isinstance(first, (str, bytes, int, float))
        if not all(other is first or (is_plain and other == first) for other in outputs):
            found = ", ".join(repr(other) for other in outputs)
            raise ConfigurationError(
                f"{path} is no tensor and differs between the replicas: {found}. Return a tensor."
            )
        return first
    contents = [(_open(other) or ({}, None))[0] for other in outputs]
    if any(other.keys() != contents[0].keys() for other in contents):
        found = "; ".join(", ".join(other) or "nothing" for other in contents)
        raise ConfigurationError(f"{path} holds different things in the replicas: {found}")
    values = [_gather([other[n] for other in contents], device, dim, path + n) for n in contents[0]]
    return opened[1](values)


def _joined(outputs: Sequence[Tensor], device: torch.device, dim: int, path: str) -> Tensor:
    moved = [output.to(device) for output in outputs]
    if all(output.dim() == 0 for output in outputs):
        warnings.warn(
            f"{path} has no dimensions in any replica, so there is none to gather along: the result is a"
            " vector with one element a replica",
            stacklevel=3,
        )
        return torch.stack(moved)
    return torch.cat(moved, dim) if len(moved) > 1 else moved[0]


def as_devices(devices: Sequence[Device] | None) -> list[torch.device]:
    if devices is None:
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]
    if not devices:
        raise ConfigurationError("devices is empty; expected at least one, or None for all CUDA devices")
    return [as_device(device) for device in devices]


def as_device(device: Device) -> torch.device:
    """The device with its index, so that two names of one device are equal."""
    found = torch.device("cuda", max(device, 0)) if isinstance(device, int) else torch.device(device)
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        return found
    count = torch.cuda.device_count()
    if (isinstance(device, int) and device < 0) or (found.index or 0) >= count:
        raise ConfigurationError(f"device {device!r} does not exist: there are {count} CUDA devices")
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found

"""Hashes of the state that data parallelism keeps equal on all replicas, a slice at a time.

The hash of a tensor is the sum of its bytes, taken as 64-bit integers, modulo 2^64. Flipping one bit always
changes it. It is computed where the tensor is, and needs no copy.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_ddp._torch import tree_leaves
from lightning_ddp.comm import all_gather_objects
from lightning_ddp.comm.group import Group
from lightning_ddp.supervise.replica_comparison import minority

__all__ = ["SHARDS_STATE", "Hashed", "StateHasher", "differences", "optimizer_state"]

SHARDS_STATE = ("ZeroRedundancyOptimizer", "DistributedOptimizer")
"""Optimizers with the state of a part of the parameters on each rank, which differs between ranks."""
_MOST_PIECES = 12
"""Most tensors in a slice: each costs about 5 us."""
_MOST_SCALARS = 64
"""Most tensors of one element in a slice: each costs about 0.5 us."""
_MOST_KEPT = 2048
"""Slices that are remembered, to answer what has differed: about two seconds of very short steps."""
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_VALUE_BITS = 48
"""Bits of the hash of a slice, which stays exact as a number of JSON."""


def words_of(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as the widest integers that they fill: a view, if it is dense."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: strides[dim], reverse=True)
    flat = tensor.permute(order).reshape(-1)
    size = flat.element_size()
    for dtype in _WORDS:
        if flat.numel() * size % dtype.itemsize == flat.storage_offset() * size % dtype.itemsize == 0:
            return flat.view(dtype)
    raise AssertionError("every tensor is a sequence of bytes")


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor, in words of `words_of`; all of it if `stop` is None."""

    name: str
    tensor: Tensor
    start: int = 0
    stop: int | None = None

    def sum(self) -> Tensor:
        words = words_of(self.tensor)
        return (words if self.stop is None else words[self.start : self.stop]).sum()


@dataclass(frozen=True)
class _Slice:
    """State that is hashed in one step."""

    names: tuple[str, ...]
    compute: Callable[[], list[int] | Tensor]
    """Returns a value for each name; on a device as a tensor there."""
    is_state: bool = True


@dataclass(frozen=True)
class Hashed:
    """A slice after a step."""

    number: int
    """Number of the hash since all ranks began to count, the same on all of them."""
    step: int
    names: tuple[str, ...]
    values: tuple[int, ...]
    is_state: bool
    """True for tensors, False for numbers that no rank takes over from another one."""

    @property
    def value(self) -> int:
        """Hash of names and values."""
        text = "\0".join(self.names).encode(errors="surrogatepass")
        data = text + struct.pack(f"{len(self.values)}q", *self.values)
        return int.from_bytes(hashlib.blake2b(data, digest_size=_VALUE_BITS // 8).digest(), "big")


def optimizer_state(
    optimizers: Sequence[Any], names: Mapping[int, str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and numbers of optimizers that are the same on all replicas, by name.

    Args:
        optimizers: the optimizers; the state of one that shards it is left out.
        names: id of each parameter of the model -> its name.
    """
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for position, optimizer in enumerate(optimizers):
        suffix = f" (optimizer {position})" if len(optimizers) > 1 else ""
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    _sort_in(f"{key} of parameter group {index}{suffix}", value, tensors, numbers)
        if type(optimizer).__name__ in SHARDS_STATE:
            continue
        for parameter, state in optimizer.state.items():
            name = names.get(id(parameter))
            if name is not None and isinstance(state, Mapping):
                for key, value in state.items():
                    _sort_in(f"{key} of {name}{suffix}", value, tensors, numbers)
    return tensors, numbers


def _sort_in(name: str, value: Any, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Add a value to the tensors or the numbers, or each one of a list; texts and objects are left out."""
    if isinstance(value, (list, tuple, dict)):
        for index, leaf in enumerate(tree_leaves(value)):
            _sort_in(f"{name}[{index}]", leaf, tensors, numbers)
    elif isinstance(value, Tensor):
        tensors[name] = value
    elif isinstance(value, (bool, int, float)):
        numbers[name] = value


def _slices(
    tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], *, num_slices: int, most_bytes: int | None
) -> list[_Slice]:
    """Divide the state into slices, equal on all ranks if their state has the same names and shapes."""
    found = []
    if numbers:
        values = [hash(value) for value in numbers.values()]
        found.append(_Slice(tuple(numbers), lambda: values, is_state=False))
    scalars: dict[torch.dtype, list[tuple[str, Tensor]]] = defaultdict(list)
    pieces: dict[torch.device, list[_Piece]] = defaultdict(list)
    for name, tensor in tensors.items():
        if (
            tensor.layout is not torch.strided
            or tensor.device.type not in ("cpu", "cuda")
            or not tensor.numel()
        ):
            continue
        if tensor.numel() == 1 and tensor.device.type == "cpu" and not tensor.is_complex():
            scalars[tensor.dtype].append((name, tensor))
        else:
            pieces[tensor.device] += _cut(name, tensor, most_bytes or _most_bytes(tensor.device))
    for alike in scalars.values():
        for part in _parts(alike, _MOST_SCALARS):
            found.append(_Slice(tuple(name for name, _ in part), _values_of([tensor for _, tensor in part])))
    num_pieces = sum(map(len, pieces.values()))
    size = min(_MOST_PIECES, -(-num_pieces // max(1, num_slices - len(found))))
    for device, of_device in pieces.items():
        limit = most_bytes or _most_bytes(device)
        for part in _parts(of_device, max(1, size)):
            found += [_slice_of(within) for within in _within(part, limit)]
    return found


def _most_bytes(device: torch.device) -> int:
    return (1 if device.type == "cpu" else 64) << 20


def _cut(name: str, tensor: Tensor, most_bytes: int) -> list[_Piece]:
    if tensor.numel() * tensor.element_size() <= most_bytes:
        return [_Piece(name, tensor)]
    words = words_of(tensor)
    step = max(1, most_bytes // words.element_size())
    return [_Piece(name, tensor, start, start + step) for start in range(0, words.numel(), step)]


def _parts(sequence: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [sequence[start : start + size] for start in range(0, len(sequence), size)]


def _within(pieces: Sequence[_Piece], most_bytes: int) -> list[list[_Piece]]:
    """Divide pieces so that each part has at most so many bytes."""
    parts: list[list[_Piece]] = [[]]
    num_bytes = 0
    for piece in pieces:
        size = min(most_bytes, piece.tensor.numel() * piece.tensor.element_size())
        if parts[-1] and num_bytes + size > most_bytes:
            parts.append([])
            num_bytes = 0
        parts[-1].append(piece)
        num_bytes += size
    return parts


def _slice_of(pieces: Sequence[_Piece]) -> _Slice:
    def compute() -> Tensor:
        return torch.stack([piece.sum() for piece in pieces])

    return _Slice(tuple(piece.name for piece in pieces), compute)


def _values_of(scalars: Sequence[Tensor]) -> Callable[[], list[int]]:
    def compute() -> list[int]:
        values: list[int] = words_of(torch.stack([each.detach().reshape(1) for each in scalars], 1)).tolist()
        return values

    return compute


# ---------------------------------------------------------------------- hashes of a run


@dataclass
class _Queued:
    """A slice whose values are still on a device."""

    values: Tensor
    """Copy on the host, in pinned memory, once `event` has come."""
    event: Any
    done: Callable[[tuple[int, ...]], Hashed]


@dataclass
class StateHasher:
    """Hashes of one replica, a slice after each step. `hash_next` is called in the main thread only.

    Args:
        read: returns tensors and numbers that have to be equal, by name; called once a cycle.
        num_slices: number of steps in which all of the state is hashed.
        most_bytes: most bytes in a step; None for the default of their device.
    """

    read: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Any]]]
    num_slices: int
    most_bytes: int | None
    num_hashed: int = 0
    """Number of hashes since `begin`."""
    cycle: list[_Slice] = field(default_factory=list)
    """Slices of the present cycle, of which `_position` is next."""
    _position: int = 0
    _queued: deque[_Queued] = field(default_factory=deque)
    _kept: deque[Hashed] = field(default_factory=lambda: deque(maxlen=_MOST_KEPT))
    _fresh: deque[Hashed] = field(default_factory=lambda: deque(maxlen=_MOST_KEPT // 2))

    def begin(self) -> None:
        """Count anew, with a new cycle: all ranks do so at the same step."""
        self.num_hashed, self._position, self.cycle = 0, 0, []
        for queue in (self._queued, self._kept, self._fresh):
            queue.clear()

    def hash_next(self, step: int) -> None:
        """Hash the next slice, after a step. On a device the values arrive later, and the host does not wait."""
        if self._position >= len(self.cycle):
            self._position = 0
            self.cycle = _slices(*self.read(), num_slices=self.num_slices, most_bytes=self.most_bytes)
            if not self.cycle:
                return
        part = self.cycle[self._position]
        self._position += 1
        self.num_hashed += 1
        number = self.num_hashed

        def done(values: tuple[int, ...]) -> Hashed:
            return Hashed(number, step, part.names, values, part.is_state)

        values = part.compute()
        if isinstance(values, Tensor) and values.device.type == "cuda":
            copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            copy.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(values.device))
            self._queued.append(_Queued(copy, event, done))
        elif self._queued:  # in the order of their numbers
            self._queued.append(_Queued(torch.tensor(_listed(values)), None, done))
        else:
            self._keep(done(tuple(_listed(values))))
        self._collect()

    def _collect(self) -> None:
        """Take what has arrived from a device."""
        while self._queued:
            queued = self._queued[0]
            if queued.event is not None and not queued.event.query():
                return
            self._keep(queued.done(tuple(queued.values.tolist())))
            self._queued.popleft()

    def _keep(self, hashed: Hashed) -> None:
        self._kept.append(hashed)
        self._fresh.append(hashed)

    # ------------------------------------------------------------------ also in other threads

    def take_fresh(self) -> dict[int, int]:
        """Return the hashes since the last call: number -> value."""
        found = {}
        while self._fresh:
            hashed = self._fresh.popleft()
            found[hashed.number] = hashed.value
        return found

    def find(self, number: int) -> tuple[Hashed | None, int | None]:
        """Return a hashed slice, and the step at which it was hashed before; None for what is not kept."""
        kept = list(self._kept)
        found = next((hashed for hashed in kept if hashed.number == number), None)
        if found is None:
            return None, None
        before = [h.step for h in kept if h.number < number and set(h.names) & set(found.names)]
        return found, before[-1] if before else None


def _listed(values: list[int] | Tensor) -> list[int]:
    listed: list[int] = values.tolist() if isinstance(values, Tensor) else values
    return listed


def differences(
    group: Group, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], device: torch.device
) -> dict[str, list[int]]:
    """Compare all of a state on all ranks; return the names that differ, and the ranks outside the majority.

    Without a majority these are all ranks. All ranks get the same result.

    Collective: all ranks must call it.
    """
    cycle = _slices(tensors, numbers, num_slices=1, most_bytes=None)
    mine: dict[str, list[int]] = defaultdict(list)
    for part in cycle:
        for name, value in zip(part.names, _listed(part.compute()), strict=True):
            mine[name].append(value)
    everyone = all_gather_objects(group, dict(mine), device)
    found = {}
    for name in dict.fromkeys(name for each in everyone for name in each):
        ranks = minority([str(each.get(name)) for each in everyone])
        if ranks:
            found[name] = ranks
    return found

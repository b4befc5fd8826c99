"""Hashes of the state that data parallelism keeps equal on all replicas, a slice at a time.

The hash of a tensor is the sum of its bytes, taken as 64-bit integers, modulo 2^64. Flipping one bit always
changes it. It is computed where the tensor is, and needs no copy.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp._torch import tree_leaves
from lightning_ddp.comm import all_gather_objects
from lightning_ddp.comm.group import Group

State = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors and numbers, by name."""
_SHARDED = ("ZeroRedundancyOptimizer", "DistributedOptimizer")
"""Optimizers in which each rank has the state of a part of the parameters only."""
_MOST_TENSORS, _MOST_SCALARS = 6, 64
"""Most tensors in a slice, which take some 10 us each in a run, and most with one element."""
_MOST_BYTES = {"cpu": 1 << 18, "cuda": 1 << 26}
_MOST_KEPT = 2048
"""Hashes that are kept: of a second or two, also where steps are very short."""


def words_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as a 1-D tensor of the widest integers that fit: a view, if it is dense."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    strides = tensor.stride()
    flat = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim])).reshape(-1)
    size, offset = flat.numel() * flat.element_size(), flat.storage_offset() * flat.element_size()
    words = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return flat.view(next(word for word in words if size % word.itemsize == offset % word.itemsize == 0))


def state_of_optimizers(optimizers: Sequence[Any], names: Mapping[int, str]) -> State:
    """Return by name the state tensors and the numbers of optimizers that must be equal on all replicas.

    `names` maps the id of each parameter to its name. Tensors of an optimizer that shards its state are left
    out.
    """
    tensors: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    for position, optimizer in enumerate(optimizers):
        suffix = f" (optimizer {position})" if len(optimizers) > 1 else ""
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    numbers |= _flat(f"{key} of parameter group {index}{suffix}", value)
        of_all = {} if type(optimizer).__name__ in _SHARDED else optimizer.state
        for parameter, state in of_all.items():
            if id(parameter) in names and isinstance(state, Mapping):
                for key, value in state.items():
                    tensors |= _flat(f"{key} of {names[id(parameter)]}{suffix}", value)
    return (
        {name: value for name, value in tensors.items() if isinstance(value, Tensor)},
        {name: v for name, v in (tensors | numbers).items() if isinstance(v, (bool, int, float))},
    )


def _flat(name: str, value: Any) -> dict[str, Any]:
    leaves = tree_leaves(value)
    return {name: value} if leaves == [value] else {f"{name}[{i}]": leaf for i, leaf in enumerate(leaves)}


# ---------------------------------------------------------------------- slices


@dataclass(frozen=True)
class _Slice:
    """Part of the replicas' state that is hashed in one step: its names, and the function that hashes it."""

    names: tuple[str, ...]
    compute: Callable[[], Tensor]
    """Returns an integer for each name, on the device of the state."""
    is_state: bool = True


def _slices(tensors: Mapping[str, Tensor], *, num_slices: int, most_bytes: int | None) -> list[_Slice]:
    """Divide tensors into slices to hash, in the same way on all ranks if names and shapes are the same."""
    alike: dict[Any, list[tuple[str, Tensor, slice]]] = defaultdict(list)
    for name, tensor in tensors.items():
        kind, is_plain = tensor.device.type, type(tensor) in (Tensor, torch.nn.Parameter)
        if is_plain and tensor.layout is torch.strided and kind in ("cpu", "cuda") and tensor.numel():
            is_scalar = tensor.numel() == 1 and kind == "cpu" and not tensor.is_complex()
            limit = most_bytes or _MOST_BYTES[kind]
            alike[tensor.device, tensor.dtype if is_scalar else None, limit] += _cut(name, tensor, limit)
    found: list[_Slice] = []
    for (_, scalar_type, limit), pieces in alike.items():
        most = min(_MOST_TENSORS, -(-len(pieces) // max(1, num_slices - len(found))))
        for names, part in _pack(pieces, most if scalar_type is None else _MOST_SCALARS, limit):
            found.append(_Slice(names, _Sums(part) if scalar_type is None else partial(_scalars, part)))
    return found


def _number_slices(numbers: Mapping[str, Any]) -> list[_Slice]:
    names = [*numbers]
    values = torch.tensor([*map(float, numbers.values())], dtype=torch.float64, device="cpu")
    parts = [slice(start, start + _MOST_SCALARS) for start in range(0, len(names), _MOST_SCALARS)]
    words = values.view(torch.int64)
    return [_Slice(tuple(names[part]), partial(words.__getitem__, part), is_state=False) for part in parts]


def _cut(name: str, tensor: Tensor, most_bytes: int) -> list[tuple[str, Tensor, slice]]:
    """Return (name, whole tensor, slice) for each range of its integer words of at most `most_bytes`."""
    if tensor.numel() * tensor.element_size() <= most_bytes:
        return [(name, tensor, slice(None))]
    words = words_of(tensor)
    step = max(1, most_bytes // words.element_size())
    return [(name, tensor, slice(start, start + step)) for start in range(0, words.numel(), step)]


def _pack(pieces: Sequence[Any], most: int, most_bytes: int) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Yield groups of at most `most` pieces and `most_bytes` bytes, with the names of the pieces in each."""
    part: list[Any] = []
    num_bytes = 0
    for piece in [*pieces, None]:
        size = 0 if piece is None else min(most_bytes, piece[1].numel() * piece[1].element_size())
        if part and (piece is None or len(part) == most or num_bytes + size > most_bytes):
            yield tuple(name for name, _, _ in part), part
            part, num_bytes = [], 0
        part.append(piece)
        num_bytes += size


class _Sums:
    """Callable that sums, for each slice of a tensor, its bytes taken as integers; keeps its views."""

    def __init__(self, pieces: Sequence[tuple[str, Tensor, slice]]) -> None:
        self._pieces = pieces
        self._views: list[tuple[int, Tensor]] = [(0, tensor) for _, tensor, _ in pieces]
        """Address of each tensor, and the words there."""
        self._sums = torch.empty(len(pieces), dtype=torch.int64, device=pieces[0][1].device)
        self._each = self._sums.unbind()

    def __call__(self) -> Tensor:
        for index, (_, tensor, part) in enumerate(self._pieces):
            address, words = self._views[index]
            if tensor.data_ptr() != address:
                words = words_of(tensor)[part]
                is_view = words.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                self._views[index] = (tensor.data_ptr(), words) if is_view else (0, tensor)
            torch.sum(words, 0, out=self._each[index])
        return self._sums


def _scalars(pieces: Sequence[tuple[str, Tensor, slice]]) -> Tensor:
    values = torch.stack([tensor.detach().reshape(()) for _, tensor, _ in pieces])
    return values.view((torch.uint8, torch.int16, torch.int32, torch.int64)[values.itemsize.bit_length() - 1])


# ---------------------------------------------------------------------- hashes of a run


class Hashed(NamedTuple):
    """Hash of one slice of the replicas' state after a step, with its sequence number."""

    number: int
    """Number of the hash, the same on all ranks."""
    step: int
    names: tuple[str, ...]
    is_state: bool
    """False for numbers, which no rank takes over from another one."""
    values: tuple[int, ...]

    @property
    def value(self) -> int:
        """48-bit hash of the names and values: exact as a JSON number."""
        names = "\0".join(self.names).encode(errors="surrogatepass")
        data = names + struct.pack(f"{len(self.values)}q", *self.values)
        return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big")


class StateHasher:
    """Hasher of this rank's parameters and optimizer state, a slice of them after each step.

    Args:
        read: returns the state that has to be equal; called once a cycle.
        num_slices: steps in which all of the state is hashed, unless a slice would be too large.
        most_bytes: most bytes in a slice; None for 256 KiB on the CPU and 64 MiB on a device.
    """

    def __init__(self, read: Callable[[], State], num_slices: int, most_bytes: int | None) -> None:
        self._read, self._num_slices, self._most_bytes = read, num_slices, most_bytes
        self._of: list[tuple[str, Tensor]] = []
        """Tensors of which `_parts` were made."""
        self._parts: list[_Slice] = []
        self.begin()

    def begin(self) -> None:
        """Drop all hashes, restart at number 1 and the first slice; all ranks call it after the same step."""
        self.num_hashed = 0
        self._queued: deque[tuple[Hashed, Tensor, Any]] = deque()
        """Hashes with their values, which may be on a device until an event, if there is one."""
        self._kept: deque[Hashed] = deque(maxlen=_MOST_KEPT)
        self._fresh: deque[Hashed] = deque(maxlen=_MOST_KEPT // 2)
        self.begin_cycle()

    def begin_cycle(self) -> None:
        """Start again with the first slice: the state is read anew before the next hash."""
        self.cycle: list[_Slice] = []
        self._position = 0

    def release(self) -> None:
        """Drop all references to tensors of the state, and start again with the first slice."""
        self.begin_cycle()
        self._of, self._parts = [], []

    def hash_next(self, step: int) -> None:
        """Hash the next slice, after a step; on a device the value comes later, without a host wait."""
        if self._position == len(self.cycle):
            self._read_all()
        if not self.cycle:
            return
        part = self.cycle[self._position]
        self._position, self.num_hashed = self._position + 1, self.num_hashed + 1
        hashed = Hashed(self.num_hashed, step, part.names, part.is_state, values=())
        values = part.compute()
        event: Any = None
        if values.device.type == "cuda":
            on_device, event = values, torch.cuda.Event()
            values = torch.empty(on_device.shape, dtype=on_device.dtype, device="cpu", pin_memory=True)
            values.copy_(on_device, non_blocking=True)
            event.record(torch.cuda.current_stream(on_device.device))
        self._queued.append((hashed, values, event))
        while self._queued and (self._queued[0][2] is None or self._queued[0][2].query()):
            hashed, values, _ = self._queued.popleft()
            hashed = Hashed(*hashed[:-1], tuple(values.tolist()))
            self._kept.append(hashed)
            self._fresh.append(hashed)

    def _read_all(self) -> None:
        tensors, numbers = self._read()
        known = [*tensors.items()]
        pairs = zip(known, self._of, strict=False)
        if len(known) != len(self._of) or any(a is not b or n != m for (n, a), (m, b) in pairs):
            self._of = known
            self._parts = _slices(tensors, num_slices=self._num_slices, most_bytes=self._most_bytes)
        self.cycle = [*_number_slices(numbers), *self._parts]
        self._position = 0

    # ------------------------------------------------------------------ also in other threads

    def take_fresh(self) -> dict[int, int]:
        """Return the hashes that were completed since the last call: sequence number -> value."""
        fresh = self._fresh  # which `begin` replaces
        taken = [fresh.popleft() for _ in range(len(fresh))]
        return {hashed.number: hashed.value for hashed in taken}

    def find(self, number: int) -> tuple[Hashed | None, int | None]:
        """Return the hash with this number, and the step of its slice's previous hash; None if dropped."""
        kept = list(self._kept)
        found = next((hashed for hashed in kept if hashed.number == number), None)
        names = {*found.names} if found is not None else set()
        before = [h.step for h in kept if h.number < number and not names.isdisjoint(h.names)]
        return found, before[-1] if before else None


def differing_state(group: Group, state: State, device: torch.device) -> dict[str, list[int]]:
    """Compare a state across ranks; return the names that differ, each with the ranks outside the majority.

    Without a majority these are all ranks. All ranks get the same result.

    Collective: all ranks must call it.
    """
    mine: dict[str, list[int]] = defaultdict(list)
    tensors, numbers = state
    for part in [*_slices(tensors, num_slices=1, most_bytes=None), *_number_slices(numbers)]:
        for name, value in zip(part.names, part.compute().tolist(), strict=True):
            mine[name].append(value)
    everyone = all_gather_objects(group, dict(mine), device)
    names = dict.fromkeys(name for each in everyone for name in each)
    found = {}
    for name in names:
        values = [str(each.get(name)) for each in everyone]
        most, number = Counter(values).most_common(1)[0]
        found[name] = [rank for rank, each in enumerate(values) if each != most or 2 * number <= len(values)]
    return {name: ranks for name, ranks in found.items() if ranks}

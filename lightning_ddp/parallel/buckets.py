"""The bucket plan, which is pure, and the storage that it describes.

A plan says which parameters travel together. It is computed from shapes, dtypes and devices alone, so
every rank that is given the same order computes the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["MIB", "Bucket", "BucketSpec", "ParameterSpec", "plan_buckets"]

MIB = 1024 * 1024
EARLY_COPY_BYTES = 256 * 1024
"""From this size on a gradient is copied into its bucket at once, while it is in the cache."""


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """What the plan and the check across ranks need to know of a parameter."""

    name: str
    """Qualified name in the wrapped module."""
    shape: tuple[int, ...]
    """Sizes by dimension."""
    stride: tuple[int, ...]
    """Elements between neighbours by dimension; differs from row-major for `channels_last`."""
    dtype: torch.dtype
    """Type of the parameter and of its gradient."""
    device: torch.device
    """Where it lives."""

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor) -> ParameterSpec:
        """Describes `parameter`."""
        return cls(
            name=name,
            shape=tuple(parameter.shape),
            stride=tuple(parameter.stride()),
            dtype=parameter.dtype,
            device=parameter.device,
        )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class BucketSpec:
    """One bucket of a plan."""

    indices: tuple[int, ...]
    """Positions of its parameters in the list that was planned, in the order of the flat buffer."""
    numel: int
    """Elements of the flat buffer."""
    dtype: torch.dtype
    """Type of all its parameters."""
    device: torch.device
    """Device of all its parameters."""


def plan_buckets(
    specs: Sequence[ParameterSpec], order: Iterable[int], *, first_cap_bytes: int, cap_bytes: int
) -> tuple[BucketSpec, ...]:
    """Assigns every parameter to one bucket.

    Parameters are taken in `order`, the order in which their gradients are expected. Those of one dtype and
    device fill a bucket until the next one would exceed its cap; a parameter above the cap is alone. The
    first bucket of each dtype and device has the smaller cap, so that communication starts early. Buckets
    come in the order in which they are expected to be full.

    Args:
        specs: all parameters.
        order: a permutation of `range(len(specs))`.
        first_cap_bytes: cap of the first bucket of a dtype and device, in bytes.
        cap_bytes: cap of the others, in bytes.

    Returns:
        The buckets in launch order.

    >>> cpu = torch.device("cpu")
    >>> def spec(n):
    ...     return ParameterSpec(name=str(n), shape=(n,), stride=(1,), dtype=torch.float32, device=cpu)
    >>> specs = [spec(1), spec(2), spec(8), spec(1)]
    >>> plan = plan_buckets(specs, [3, 2, 1, 0], first_cap_bytes=8, cap_bytes=16)
    >>> [bucket.indices for bucket in plan]
    [(3,), (2,), (1, 0)]
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    open_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    caps: dict[tuple[torch.dtype, torch.device], int] = {}
    closed: list[tuple[int, list[int]]] = []  # (position of the last parameter, indices)
    last: dict[tuple[torch.dtype, torch.device], int] = {}

    def close(key: tuple[torch.dtype, torch.device]) -> None:
        if open_buckets.get(key):
            closed.append((last[key], open_buckets[key]))
            caps[key] = cap_bytes
        open_buckets[key] = []
        open_bytes[key] = 0

    for position, index in enumerate(order):
        spec = specs[index]
        key = (spec.dtype, spec.device)
        if open_bytes.get(key, 0) + spec.nbytes > caps.setdefault(key, first_cap_bytes):
            close(key)
        open_buckets.setdefault(key, []).append(index)
        open_bytes[key] = open_bytes.get(key, 0) + spec.nbytes
        last[key] = position
    for key in list(open_buckets):
        close(key)
    closed.sort(key=lambda item: item[0])
    return tuple(_bucket(specs, indices) for _, indices in closed)


def _bucket(specs: Sequence[ParameterSpec], indices: Sequence[int]) -> BucketSpec:
    first = specs[indices[0]]
    numel = sum(specs[i].numel for i in indices)
    return BucketSpec(indices=tuple(indices), numel=numel, dtype=first.dtype, device=first.device)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one block of memory, in whatever order of the dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda s: s[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class Bucket:
    """The flat buffer of a bucket and the state of its reduction in this step.

    Offers the methods of torch's `GradBucket`, so that torch's communication hooks and those of users run
    on it unchanged.

    Args:
        index: position in launch order.
        spec: its part of the plan.
        flat: the memory of its gradients: 1-D, contiguous, `spec.numel` elements of `spec.dtype`.
        parameters: its parameters, in the order of `spec.indices`.
        names: their qualified names.
        is_last: whether it is launched last.
    """

    def __init__(
        self,
        index: int,
        spec: BucketSpec,
        flat: torch.Tensor,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        *,
        is_last: bool,
    ) -> None:
        self.spec = spec
        self.params = tuple(parameters)
        self.names = tuple(names)
        self.size = len(self.params)
        self.flat = flat
        self.views = _views(self.flat, self.params)
        self.early = frozenset(
            i for i, p in enumerate(self.params) if p.numel() * p.element_size() >= EARLY_COPY_BYTES
        )
        late = [i for i in range(self.size) if i not in self.early]
        self.late_params = [self.params[i] for i in late]
        self.late_views = [self.views[i] for i in late]
        self.late_runs = _runs(self.flat, self.params, self.early)
        self.armed = False
        self.num_pending = 0
        self.is_full = False
        self.work: Any = None
        self._index = index
        self._is_last = is_last
        self._buffer = self.flat

    def index(self) -> int:
        """Position in launch order, from 0."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """The flat gradient, 1-D, of the bucket's dtype; not yet divided by the world size."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of `buffer()`, one a parameter, with the parameter's shape."""
        return _views(self._buffer, self.params) if self._buffer is not self.flat else list(self.views)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters, in the order of `gradients()`."""
        return list(self.params)

    def is_last(self) -> bool:
        """Whether this bucket is launched last in a backward."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces what `buffer()` returns, for hooks that work on another tensor of the same size."""
        self._buffer = buffer

    def arm(self) -> None:
        """Forgets the last reduction and expects every gradient once."""
        self.armed = True
        self.num_pending = self.size
        self.is_full = False
        self.work = None
        self._buffer = self.flat


def _views(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    views = []
    offset = 0
    base = flat.storage_offset()
    for p in parameters:
        if _is_dense(p):  # keeps channels_last and the like, as autograd wants the strides of the parameter
            views.append(flat.as_strided(p.shape, p.stride(), base + offset))
        else:
            views.append(flat[offset : offset + p.numel()].view(p.shape))
        offset += p.numel()
    return views


def _runs(
    flat: torch.Tensor, parameters: Sequence[torch.Tensor], early: frozenset[int]
) -> list[torch.Tensor]:
    """The stretches of the flat buffer between the parameters that are copied early."""
    runs = []
    start = offset = 0
    for i, p in enumerate(parameters):
        if i in early:
            if offset > start:
                runs.append(flat[start:offset])
            start = offset + p.numel()
        offset += p.numel()
    if offset > start:
        runs.append(flat[start:offset])
    return runs

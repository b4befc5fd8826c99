"""The bucket plan, which is pure.

A plan says which parameters travel together. It is computed from shapes, dtypes and devices alone, so
every rank that is given the same order computes the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["MIB", "BucketSpec", "ParameterSpec", "plan_buckets"]

MIB = 1024 * 1024


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

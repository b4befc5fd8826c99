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

_Kind = tuple[torch.dtype, torch.device]


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
    is_sparse: bool = False
    """Whether its gradients are sparse tensors."""

    @classmethod
    def of(
        cls, name: str, parameter: torch.Tensor, *, is_sparse: bool = False, dtype: torch.dtype | None = None
    ) -> ParameterSpec:
        """Describes `parameter`; a floating-point gradient is reduced in `dtype`, if that is given."""
        is_cast = dtype is not None and parameter.is_floating_point()
        return cls(
            name=name,
            shape=tuple(parameter.shape),
            stride=tuple(parameter.stride()),
            dtype=dtype if is_cast and dtype is not None else parameter.dtype,
            device=parameter.device,
            is_sparse=is_sparse,
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
    is_sparse: bool = False
    """Whether it holds one parameter, whose gradients are sparse tensors."""


def plan_buckets(
    specs: Sequence[ParameterSpec], order: Iterable[int], *, caps_bytes: Sequence[int]
) -> tuple[BucketSpec, ...]:
    """Assigns every parameter to one bucket.

    Parameters are taken in `order`, the order in which their gradients are expected. Those of one dtype and
    device fill a bucket until the next one would exceed its cap; a parameter above the cap is alone, and so
    is one with sparse gradients. The first bucket of each dtype and device has the first cap, smaller by
    default so that communication starts early. Buckets come in the order in which they are expected to be
    full.

    Args:
        specs: all parameters.
        order: a permutation of `range(len(specs))`.
        caps_bytes: caps of the first bucket of a dtype and device, the second ..., in bytes; the last one
            holds for all that follow.

    Returns:
        The buckets in launch order.

    >>> cpu = torch.device("cpu")
    >>> def spec(n):
    ...     return ParameterSpec(name=str(n), shape=(n,), stride=(1,), dtype=torch.float32, device=cpu)
    >>> specs = [spec(1), spec(2), spec(8), spec(1)]
    >>> plan = plan_buckets(specs, [3, 2, 1, 0], caps_bytes=[8, 16])
    >>> [bucket.indices for bucket in plan]
    [(3,), (2,), (1, 0)]
    """
    open_buckets: dict[_Kind, list[int]] = {}
    open_bytes: dict[_Kind, int] = {}
    num_closed: dict[_Kind, int] = {}
    closed: list[tuple[int, list[int]]] = []  # (position of the last parameter, indices)
    last: dict[_Kind, int] = {}

    def close(kind: _Kind) -> None:
        if open_buckets.get(kind):
            closed.append((last[kind], open_buckets[kind]))
            num_closed[kind] = num_closed.get(kind, 0) + 1
        open_buckets[kind] = []
        open_bytes[kind] = 0

    for position, index in enumerate(order):
        spec = specs[index]
        if spec.is_sparse:
            closed.append((position, [index]))
            continue
        kind = (spec.dtype, spec.device)
        cap_bytes = caps_bytes[min(num_closed.get(kind, 0), len(caps_bytes) - 1)]
        if open_bytes.get(kind, 0) + spec.nbytes > cap_bytes:
            close(kind)
        open_buckets.setdefault(kind, []).append(index)
        open_bytes[kind] = open_bytes.get(kind, 0) + spec.nbytes
        last[kind] = position
    for kind in list(open_buckets):
        close(kind)
    closed.sort(key=lambda item: item[0])
    return tuple(_bucket(specs, indices) for _, indices in closed)


def _bucket(specs: Sequence[ParameterSpec], indices: Sequence[int]) -> BucketSpec:
    first = specs[indices[0]]
    numel = sum(specs[i].numel for i in indices)
    return BucketSpec(
        indices=tuple(indices),
        numel=numel,
        dtype=first.dtype,
        device=first.device,
        is_sparse=first.is_sparse,
    )

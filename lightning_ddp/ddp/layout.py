"""Bucket layout: caps of buckets, the plan of which holds what (pure), the plan in memory, and its moves.

A plan is computed from shapes, dtypes and devices alone, so every rank that is given the same order computes
the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lightning_ddp.ddp.bucket import Bucket, BucketSpec, SparseBucket
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.shm.shared_memory import SharedMemory

MIB = 1024 * 1024
_DEFAULT_CAP_MB = 25
_NETWORK_CAPS_BYTES = (MIB // 8, MIB // 4, MIB // 2)
_EARLY_COPY_BYTES = 256 * 1024
EARLY_COPY_BYTES = {True: 2**63 - 1, False: 0, None: _EARLY_COPY_BYTES}
"""`ReducerOptions.early_copy_bytes` by torch's argument `batched_grad_copy`."""
_ALIGNMENT_BYTES = 512
"""Where buckets start. NCCL moves 16 bytes at a time only from a multiple of them, and vector instructions of
the CPU read whole cache lines; what CUDA's allocator hands out starts at a multiple of 512 bytes."""
_LARGEST_BYTES = 32 * 1024 * 1024 - 128 * 1024

_Kind = tuple[torch.dtype, torch.device]


@dataclass(frozen=True, kw_only=True)
class ReducerOptions:
    """How gradients are bucketed and what is expected of a backward."""

    caps_bytes: tuple[int, ...]
    """Caps of the first bucket of a dtype and device, the second ...; the last holds for all that follow."""
    are_caps_default: bool = False
    """Whether nobody asked for these caps."""
    gradient_as_bucket_view: bool = True
    """Whether `.grad` becomes a view of the bucket."""
    find_unused_parameters: bool = False
    """Whether parameters may be without a gradient, on some ranks or on all; the graph is searched."""
    static_graph: bool = False
    """Whether every step has the graph of the first one."""
    skip_all_reduce_unused_params: bool = False
    """Whether a bucket of which this rank used nothing is not reduced; so on all ranks alike."""
    raises_at_once: bool = True
    """Whether parameters that all ranks miss in the first backward are an error there; else a warning there
    and an error in the next step, as late as torch's."""
    early_copy_bytes: int = _EARLY_COPY_BYTES
    """From this size on a gradient is copied into its bucket at once, while it is in the cache; the smaller
    ones of a bucket go in one multi-tensor copy when the last has arrived."""
    dtype: torch.dtype | None = None
    """Type in which floating-point gradients are reduced; None for that of the parameter."""

    def for_network(self) -> ReducerOptions:
        """The same where gradients travel between hosts, with smaller first buckets if nobody named sizes.

        A network is slow beside a backward on the CPU, and idle until the first bucket is full: so the first
        MiB goes in three parts, each twice as large as the one before.
        """
        if not self.are_caps_default:
            return self
        return replace(self, caps_bytes=(*_NETWORK_CAPS_BYTES, self.caps_bytes[-1]))


def bucket_caps_bytes(cap_mb: float | None, caps_mb: list[float] | None = None) -> tuple[int, ...]:
    """The caps for torch's arguments `bucket_cap_mb` and `bucket_cap_mb_list`, in bytes.

    The first bucket has at most 1 MiB, so that communication starts early, unless `caps_mb` names its size.

    Raises:
        ConfigurationError: a size is not above 0, or no number.

    >>> bucket_caps_bytes(None)
    (1048576, 26214400)
    >>> bucket_caps_bytes(0.5)
    (524288, 524288)
    >>> bucket_caps_bytes(None, [1, 2])
    (1048576, 2097152)
    """
    if isinstance(cap_mb, str):
        raise ConfigurationError(
            f"bucket_cap_mb={cap_mb!r}: expected a size in MiB, or None for {_DEFAULT_CAP_MB} MiB"
        )
    sizes_mb = list(caps_mb or []) or [_DEFAULT_CAP_MB if cap_mb is None else cap_mb]
    if min(sizes_mb) <= 0:
        name = f"bucket_cap_mb_list={caps_mb}" if caps_mb else f"bucket_cap_mb={cap_mb}"
        raise ConfigurationError(f"{name}: expected sizes in MiB above 0")
    sizes = tuple(int(size * MIB) for size in sizes_mb)
    return sizes if caps_mb else (min(MIB, sizes[0]), sizes[0])


# ---------------------------------------------------------------------- the plan


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """What the plan and the check across ranks need to know of a parameter."""

    name: str
    """Qualified name in the wrapped module."""
    shape: tuple[int, ...]
    """Sizes by dimension."""
    stride: tuple[int, ...]
    """Elements between neighbors by dimension; differs from row-major for `channels_last`."""
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
        return cls(
            name=name,
            shape=tuple(parameter.shape),
            stride=tuple(parameter.stride()),
            dtype=dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype,
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


def plan_buckets(
    specs: Sequence[ParameterSpec], order: Sequence[int], *, caps_bytes: Sequence[int]
) -> tuple[BucketSpec, ...]:
    """Assigns every parameter to one bucket; returns the buckets in the order in which they will be full.

    Parameters are taken in `order`, the order in which their gradients are expected. Those of one dtype and
    device fill a bucket until the next one would exceed its cap; a parameter above the cap is alone, and so
    is one with sparse gradients.

    Args:
        specs: all parameters.
        order: a permutation of `range(len(specs))`.
        caps_bytes: caps of the first bucket of a dtype and device, the second ..., in bytes; the last one
            holds for all that follow.

    >>> cpu = torch.device("cpu")
    >>> def spec(n):
    ...     return ParameterSpec(name=str(n), shape=(n,), stride=(1,), dtype=torch.float32, device=cpu)
    >>> specs = [spec(1), spec(2), spec(8), spec(1)]
    >>> plan = plan_buckets(specs, [3, 2, 1, 0], caps_bytes=[8, 16])
    >>> [bucket.indices for bucket in plan]
    [(3,), (2,), (1, 0)]
    """
    buckets: list[list[int]] = []
    last: dict[_Kind, tuple[list[int], int, int]] = {}  # bucket, its bytes, number of those before it
    for index in order:
        spec = specs[index]
        if spec.is_sparse:
            buckets.append([index])
            continue
        kind = (spec.dtype, spec.device)
        bucket, nbytes, number = last.get(kind, ([], 0, 0))
        if bucket and nbytes + spec.nbytes > caps_bytes[min(number, len(caps_bytes) - 1)]:
            bucket, nbytes, number = [], 0, number + 1
        if not bucket:
            buckets.append(bucket)
        bucket.append(index)
        last[kind] = (bucket, nbytes + spec.nbytes, number)
    position = {index: position for position, index in enumerate(order)}
    buckets.sort(key=lambda indices: position[indices[-1]])
    return tuple(
        BucketSpec(
            indices=tuple(indices),
            numel=sum(specs[i].numel for i in indices),
            dtype=specs[indices[0]].dtype,
            device=specs[indices[0]].device,
            is_sparse=specs[indices[0]].is_sparse,
        )
        for indices in buckets
    )


# ---------------------------------------------------------------------- in memory


class BucketLayout:
    """The buckets of a reducer.

    Args:
        parameters: in one order on all ranks.
        names: their qualified names.
        options: caps of the buckets, and how gradients get in and out of them.
        sparse: positions of the parameters whose gradients are sparse tensors.
        memory: where the buckets on the CPU go, if the ranks are to share it.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        options: ReducerOptions,
        sparse: frozenset[int] = frozenset(),
        memory: SharedMemory | None = None,
    ) -> None:
        self._memory = memory
        self.params = tuple(parameters)
        self.names = tuple(names)
        self._options = options
        self._specs = tuple(
            ParameterSpec.of(n, p, is_sparse=i in sparse, dtype=options.dtype)
            for i, (n, p) in enumerate(zip(names, parameters, strict=True))
        )
        self._storage: dict[_Kind, torch.Tensor] = {}
        self.buckets: tuple[Bucket, ...] = ()
        self.where: dict[int, tuple[Bucket, int]] = {}
        _keep_freed_memory()
        self.apply(self.plan(range(len(self.params) - 1, -1, -1)))

    def plan(self, order: Sequence[int]) -> tuple[BucketSpec, ...]:
        """The plan for gradients that become ready in `order`, a permutation of all parameters."""
        return plan_buckets(self._specs, order, caps_bytes=self._options.caps_bytes)

    def holds(self, plan: Sequence[BucketSpec]) -> bool:
        """Whether the buckets are those of `plan`."""
        return tuple(plan) == tuple(bucket.spec for bucket in self.buckets)

    def apply(self, plan: Sequence[BucketSpec], late_only: frozenset[int] = frozenset()) -> None:
        """Makes the buckets of `plan`, in the memory of the present ones; gradients in there move along.

        Parameters in `late_only` get several gradients in one backward.
        """
        self._late_only = late_only
        grads = self._release()
        flats = self._slice_storage(plan)
        self.buckets = tuple(
            self._make_bucket(index, spec, flat, is_last=index == len(plan) - 1)
            for index, (spec, flat) in enumerate(zip(plan, flats, strict=True))
        )
        for bucket in self.buckets:
            for position, index in enumerate(bucket.spec.indices):
                self.where[index] = (bucket, position)
        for index, grad in grads.items():
            bucket, position = self.where[index]
            bucket.views[position].copy_(grad)
            self.params[index].grad = bucket.views[position]

    @property
    def is_shared(self) -> bool:
        """Whether buckets are in memory that the ranks share."""
        return self._memory is not None

    def leave_shared_memory(self) -> None:
        """Moves the buckets into plain memory; gradients in there move along."""
        self._memory = None
        self._storage.clear()
        self.apply([bucket.spec for bucket in self.buckets], self._late_only)

    def _make_bucket(self, index: int, spec: BucketSpec, flat: torch.Tensor, *, is_last: bool) -> Bucket:
        params = [self.params[i] for i in spec.indices]
        names = [self.names[i] for i in spec.indices]
        if spec.is_sparse:
            return SparseBucket(index, spec, flat, params, names, is_last=is_last)
        return Bucket(
            index,
            spec,
            flat,
            params,
            names,
            is_last=is_last,
            is_view=self._options.gradient_as_bucket_view,
            early_copy_bytes=self._options.early_copy_bytes,
            late_only=frozenset(p for p, i in enumerate(spec.indices) if i in self._late_only),
        )

    def _slice_storage(self, plan: Sequence[BucketSpec]) -> list[torch.Tensor]:
        """One allocation a dtype and device for all its buckets, so that a new plan needs no new memory.

        Between two buckets there may be a gap, which nobody reads. There is room for a bucket a parameter.
        """
        offsets: dict[_Kind, int] = {}
        flats = []
        for spec in plan:
            kind = (spec.dtype, spec.device)
            if spec.is_sparse:
                flats.append(torch.empty(0, dtype=spec.dtype, device=spec.device))
                continue
            if kind not in self._storage:
                same = [s for s in self._specs if (s.dtype, s.device) == kind and not s.is_sparse]
                self._storage[kind] = self._zeros(sum(_aligned(s.numel, s.dtype) for s in same), *kind)
            start = offsets.get(kind, 0)
            offsets[kind] = start + _aligned(spec.numel, spec.dtype)
            flats.append(self._storage[kind][start : start + spec.numel])
        return flats

    def _zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._memory is not None and device.type == "cpu":
            return self._memory.zeros(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    def _release(self) -> dict[int, torch.Tensor]:
        """Lets go of the present buckets; copies of the gradients that live in them are kept."""
        grads = {}
        for index, (bucket, position) in self.where.items():
            view = bucket.views[position]
            if self.params[index].grad is view:
                grads[index] = view.clone()
                self.params[index].grad = None
        self.where = {}
        self.buckets = ()
        return grads


def _aligned(numel: int, dtype: torch.dtype) -> int:
    """`numel` elements, and those that are needed for the next bucket to start where it should.

    >>> _aligned(128, torch.float32), _aligned(129, torch.float32)
    (128, 256)
    """
    step = _ALIGNMENT_BYTES // dtype.itemsize
    return -(-numel // step) * step


def _keep_freed_memory() -> None:
    """Frees one large block that was never written to, so that glibc keeps as much as it ever does.

    What autograd allocates for each gradient is freed once it is copied. glibc returns large free memory at
    the top of its heap to the kernel, so that every gradient would be paid for with new pages, which costs
    more than the copy. How much it keeps depends on the largest block that the process has freed so far
    (`M_MMAP_THRESHOLD` in mallopt(3)): up to 32 MiB, for which it keeps 64 MiB. Costs no memory.
    """
    torch.empty(_LARGEST_BYTES, dtype=torch.uint8)

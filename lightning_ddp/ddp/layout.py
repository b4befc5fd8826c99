"""Bucket layout: caps of buckets, the plan (a pure function), and the buckets in memory.

Every rank that is given the same order of parameters computes the same plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_ddp.comm.group import Group
from lightning_ddp.comm.nccl import allocate
from lightning_ddp.ddp.bucket import Bucket, BucketSpec, SparseBucket, ViewBucket
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.shm.shared_memory import SharedMemory

MIB = 1024 * 1024
_DEFAULT_CAP_MB = 25
NETWORK_CAPS_BYTES = (MIB // 8, MIB // 4, MIB // 2)
"""Caps of the first buckets between hosts, where the network is idle until the first bucket is full."""
_ALIGNMENT_BYTES = 512
"""Alignment of buckets. NCCL moves 16 bytes at a time only from a multiple of 16, and vector instructions of
the CPU read whole cache lines; CUDA's allocator aligns to 512 bytes."""
_LARGEST_BYTES = 32 * MIB - 128 * 1024
"""Size of a block that is freed at once, never written to, so that glibc keeps more freed memory."""

_Kind = tuple[torch.dtype, torch.device]


@dataclass(frozen=True, kw_only=True)
class ReducerOptions:
    """Options of `BucketedDDP` for the buckets, and for the gradients that a backward is expected to give."""

    caps_bytes: tuple[int, ...]
    """Caps of the first bucket of a dtype and device, the second ...; the last holds for all that follow."""
    are_caps_default: bool = False
    """True if the user gave no caps."""
    gradient_as_bucket_view: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False
    skip_all_reduce_unused_params: bool = False
    dtype: torch.dtype | None = None
    """Dtype in which floating-point gradients are reduced; None for that of the parameter."""


def bucket_caps_bytes(cap_mb: float | None, caps_mb: list[float] | None = None) -> tuple[int, ...]:
    """Convert torch's arguments `bucket_cap_mb` and `bucket_cap_mb_list` to caps in bytes.

    The first bucket has at most 1 MiB, so that communication starts early, unless `caps_mb` names its size.

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
    """Properties of a parameter that decide about its bucket: size, dtype, device, sparse gradients."""

    numel: int
    dtype: torch.dtype
    """Dtype in which the gradient is reduced."""
    device: torch.device
    is_sparse: bool = False
    """True if its gradients are sparse tensors."""

    @classmethod
    def of(
        cls, parameter: torch.Tensor, *, is_sparse: bool = False, dtype: torch.dtype | None = None
    ) -> ParameterSpec:
        """Return the spec of `parameter`; a float gradient is reduced in `dtype`, unless that is None."""
        reduced = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        return cls(numel=parameter.numel(), dtype=reduced, device=parameter.device, is_sparse=is_sparse)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def plan_buckets(
    specs: Sequence[ParameterSpec], order: Sequence[int], *, caps_bytes: Sequence[int]
) -> tuple[BucketSpec, ...]:
    """Assign every parameter to one bucket; return the buckets in the order in which they fill.

    Parameters of one dtype and device, in the `order` in which their gradients are expected, fill a bucket
    until the next would exceed its cap. A parameter above the cap has a bucket of its own, and so has one
    with sparse gradients. Caps are as in `ReducerOptions`.

    >>> cpu = torch.device("cpu")
    >>> specs = [ParameterSpec(numel=n, dtype=torch.float32, device=cpu) for n in (1, 2, 8, 1)]
    >>> plan = plan_buckets(specs, [3, 2, 1, 0], caps_bytes=[8, 16])
    >>> [bucket.indices for bucket in plan]
    [(3,), (2,), (1, 0)]
    """
    buckets: list[list[int]] = []
    last: dict[_Kind, tuple[list[int], int, int]] = {}  # bucket, its bytes, number of buckets before it
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
    """The buckets of a reducer, for parameters in the same order on all ranks.

    Those at the positions `sparse` have sparse gradients. Buckets on the CPU are in `memory`, if it is given;
    others in memory of the backend of `group`, if it allocates some.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        options: ReducerOptions,
        sparse: frozenset[int] = frozenset(),
        memory: SharedMemory | None = None,
        group: Group | None = None,
    ) -> None:
        self._memory = memory
        self._group = group
        self.params = tuple(parameters)
        self.names = tuple(names)
        self._options = options
        self._specs = tuple(
            ParameterSpec.of(p, is_sparse=i in sparse, dtype=options.dtype) for i, p in enumerate(parameters)
        )
        self._storage: dict[_Kind, torch.Tensor] = {}
        self.buckets: tuple[Bucket, ...] = ()
        self.where: dict[int, tuple[Bucket, int]] = {}
        # glibc keeps twice the largest block freed so far, up to 32 MiB (M_MMAP_THRESHOLD in mallopt(3)).
        # Otherwise autograd's memory of each gradient, freed once copied, would need new pages in every step.
        torch.empty(_LARGEST_BYTES, dtype=torch.uint8)
        self.apply(self.plan(range(len(self.params) - 1, -1, -1)))

    def plan(self, order: Sequence[int]) -> tuple[BucketSpec, ...]:
        """Return a bucket plan for gradients that become ready in `order`, a permutation of parameters."""
        return plan_buckets(self._specs, order, caps_bytes=self._options.caps_bytes)

    def apply(self, plan: Sequence[BucketSpec], late_only: frozenset[int] = frozenset()) -> None:
        """Replace the buckets by those of `plan`, in the same memory; gradients in the old ones are moved.

        Parameters in `late_only` get several gradients in one backward.
        """
        self._late_only = late_only
        grads = self._release()
        flats = self._slice_storage(plan)
        self.buckets = tuple(
            self._make_bucket(index, spec, flats[index], is_last=index == len(plan) - 1)
            for index, spec in enumerate(plan)
        )
        for bucket in self.buckets:
            self.where |= {index: (bucket, position) for position, index in enumerate(bucket.spec.indices)}
        for index, grad in grads.items():
            bucket, position = self.where[index]
            bucket.views[position].copy_(grad)
            self.params[index].grad = bucket.views[position]

    @property
    def is_shared(self) -> bool:
        """True if buckets on the CPU are in memory that the ranks share."""
        return self._memory is not None

    def leave_shared_memory(self) -> None:
        """Move the buckets, with the gradients in them, to plain memory."""
        self._memory = None
        self._storage.clear()
        self.apply([bucket.spec for bucket in self.buckets], self._late_only)

    def _make_bucket(self, index: int, spec: BucketSpec, flat: torch.Tensor, *, is_last: bool) -> Bucket:
        params = [self.params[i] for i in spec.indices]
        names = [self.names[i] for i in spec.indices]
        is_view = self._options.gradient_as_bucket_view and all(p.dtype == spec.dtype for p in params)
        kind: type[Bucket] = SparseBucket if spec.is_sparse else ViewBucket if is_view else Bucket
        late_only = frozenset(p for p, i in enumerate(spec.indices) if i in self._late_only)
        return kind(index, spec, flat, params, names, is_last=is_last, late_only=late_only)

    def _slice_storage(self, plan: Sequence[BucketSpec]) -> list[torch.Tensor]:
        """Return a plan's flat buffers: slices of one allocation per dtype and device, reused by all."""
        offsets: dict[_Kind, int] = defaultdict(int)
        flats = []
        for spec in plan:
            kind = (spec.dtype, spec.device)
            if spec.is_sparse:
                flats.append(torch.empty(0, dtype=spec.dtype, device=spec.device))
                continue
            if kind not in self._storage:
                same = [s for s in self._specs if (s.dtype, s.device) == kind and not s.is_sparse]
                self._storage[kind] = self._zeros(sum(_aligned(s.numel, s.dtype) for s in same), *kind)
            flats.append(self._storage[kind][offsets[kind] : offsets[kind] + spec.numel])
            offsets[kind] += _aligned(spec.numel, spec.dtype)
        return flats

    def _zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "cpu" and self._memory is not None:
            return self._memory.zeros(numel, dtype)
        group = self._group
        if device.type == "cuda" and group is not None and group.memory_problem(device) is None:
            return allocate(group.process_group, numel, dtype, device)
        return torch.zeros(numel, dtype=dtype, device=device)

    def _release(self) -> dict[int, torch.Tensor]:
        """Drop the present buckets; return copies of the gradients in them, by parameter index."""
        grads = {}
        for index, (bucket, position) in self.where.items():
            view = bucket.views[position]
            if self.params[index].grad is view:
                grads[index] = view.clone()
                self.params[index].grad = None
        self.where, self.buckets = {}, ()
        return grads


def _aligned(numel: int, dtype: torch.dtype) -> int:
    """Return the number of elements `numel`, rounded up to the alignment of buckets."""
    step = _ALIGNMENT_BYTES // dtype.itemsize
    return -(-numel // step) * step

"""Bucket layout: the plan put into memory, which bucket holds which parameter, moves to another plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_ddp.ddp.bucket import Bucket
from lightning_ddp.ddp.plan import BucketSpec, ParameterSpec, plan_buckets
from lightning_ddp.ddp.reducer_options import ReducerOptions
from lightning_ddp.ddp.sparse import SparseBucket
from lightning_ddp.shm.shared_memory import SharedMemory

__all__ = ["BucketLayout"]

_ALIGNMENT_BYTES = 512
"""Where buckets start. NCCL moves 16 bytes at a time only from a multiple of them, and vector instructions of
the CPU read whole cache lines; what CUDA's allocator hands out starts at a multiple of 512 bytes."""
_LARGEST_BYTES = 32 * 1024 * 1024 - 128 * 1024


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
        self._storage: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
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

        Args:
            plan: holds every parameter once.
            late_only: parameters that get several gradients in one backward.
        """
        self._late_only = late_only
        grads = self._release()
        flats = self._slice_storage(plan)
        self.buckets = tuple(
            self._make_bucket(index, spec, flats[index], is_last=index == len(plan) - 1, late_only=late_only)
            for index, spec in enumerate(plan)
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

    def _make_bucket(
        self, index: int, spec: BucketSpec, flat: torch.Tensor, *, is_last: bool, late_only: frozenset[int]
    ) -> Bucket:
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
            late_only=frozenset(p for p, i in enumerate(spec.indices) if i in late_only),
        )

    def _slice_storage(self, plan: Sequence[BucketSpec]) -> list[torch.Tensor]:
        """One allocation a dtype and device for all its buckets, so that a new plan needs no new memory.

        Between two buckets there may be a gap, which nobody reads. There is room for a bucket a parameter.
        """
        offsets: dict[tuple[torch.dtype, torch.device], int] = {}
        flats = []
        for spec in plan:
            if spec.is_sparse:
                flats.append(torch.empty(0, dtype=spec.dtype, device=spec.device))
                continue
            kind = (spec.dtype, spec.device)
            if kind not in self._storage:
                same = [o for o in plan if (o.dtype, o.device) == kind and not o.is_sparse]
                numels = [self._specs[i].numel for other in same for i in other.indices]
                self._storage[kind] = self._zeros(sum(_aligned(n, spec.dtype) for n in numels), *kind)
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

    When gradients are views of buckets, what autograd allocates for each is freed as soon as it is copied.
    glibc returns large free memory at the top of its heap to the kernel, so that every gradient would be paid
    for with new pages, which costs more than the copy. How much it keeps depends on the largest block that
    the process has freed so far (`M_MMAP_THRESHOLD` in mallopt(3)): up to 32 MiB, for which it keeps 64 MiB.

    Costs no memory. Without effect where MALLOC_TRIM_THRESHOLD_ and the like are set, and elsewhere.
    """
    torch.empty(_LARGEST_BYTES, dtype=torch.uint8)

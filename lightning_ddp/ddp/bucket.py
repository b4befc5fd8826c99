"""Buckets: their options and caps, the plan (a pure function), flat buffers, copies of gradients to and from.

Every rank that is given the same order of parameters computes the same plan.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from numbers import Real
from typing import Any, cast

import torch

from lightning_ddp._torch import foreach_copy_, foreach_mul_
from lightning_ddp.comm.group import Group
from lightning_ddp.comm.nccl import allocate
from lightning_ddp.errors import BackwardOrderError, ConfigurationError
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
_EARLY_COPY_BYTES = 256 * 1024
"""Size from which a gradient is copied into the bucket when it arrives, while it is in the cache. Smaller
gradients are copied together when the last has arrived, or are added in place by autograd."""
_SPARSE_MODULES = (torch.nn.Embedding, torch.nn.EmbeddingBag)

_Kind = tuple[torch.dtype, torch.device]

# Called once per gradient, and with less overhead than torch.cuda.current_stream.
_current_stream = torch.accelerator.current_stream


@dataclass(frozen=True, kw_only=True)
class ReducerOptions:
    """Options of `BucketedDDP`: bucket caps, gradient views, unused parameters, static graph, dtype."""

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
    sizes_mb = list(caps_mb or []) or [_DEFAULT_CAP_MB if cap_mb is None else cap_mb]
    if not all(isinstance(size, Real) and size > 0 for size in sizes_mb):
        name = f"bucket_cap_mb_list={caps_mb}" if caps_mb else f"bucket_cap_mb={cap_mb!r}"
        raise ConfigurationError(f"{name}: expected sizes in MiB above 0")
    sizes = tuple(int(size * MIB) for size in sizes_mb)
    return sizes if caps_mb else (min(MIB, sizes[0]), sizes[0])


# ---------------------------------------------------------------------- the plan


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """Size, device, sparsity and reduced dtype of a parameter, which decide about its bucket."""

    numel: int
    dtype: torch.dtype
    """Dtype in which the gradient is reduced."""
    device: torch.device
    is_sparse: bool = False

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


@dataclass(frozen=True, kw_only=True)
class BucketSpec:
    """Plan of one bucket: its parameters in order, size, dtype and device."""

    indices: tuple[int, ...]
    """Positions of its parameters in the planned list, in the order of the flat buffer."""
    numel: int
    dtype: torch.dtype
    device: torch.device
    is_sparse: bool = False
    """True if the bucket holds a single parameter, whose gradients are sparse tensors."""


def plan_buckets(
    specs: Sequence[ParameterSpec], order: Sequence[int], *, caps_bytes: Sequence[int]
) -> tuple[BucketSpec, ...]:
    """Assign every parameter to one bucket; return `BucketSpec`s in the order in which buckets fill.

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


# ---------------------------------------------------------------------- one bucket


class GradientStreams:
    """The CUDA streams on which one backward writes gradients of one device into one flat buffer.

    Autograd runs the hook of a gradient on the stream of the forward that used the parameter. Operations on a
    whole bucket are ordered after all of these streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self._noted: dict[int, Any] = {}

    def clear(self) -> None:
        self._noted.clear()

    def note(self) -> None:
        """Record the current CUDA stream as one that wrote a gradient or a part of the buffer, for `join`."""
        stream = _current_stream(self._index)
        self._noted[stream.stream_id] = stream

    def join(self) -> None:
        """Make the current stream wait for all recorded streams; the host does not wait."""
        current = _current_stream(self._index)
        for number, stream in self._noted.items():
            if number != current.stream_id:
                current.wait_stream(stream)
        self._noted[current.stream_id] = current

    def keep(self, gradients: Sequence[torch.Tensor]) -> None:
        """Keep CUDA from reusing the memory of `gradients` until the current stream has read them."""
        current = _current_stream(self._index)
        if any(number != current.stream_id for number in self._noted):
            for gradient in gradients:
                gradient.record_stream(current)


class Bucket:
    """The flat buffer of a bucket and the state of its reduction in this step.

    Gradients are copied to the buffer, and the means back to them, also if they are of another dtype. Offers
    the methods of torch's `GradBucket`, so that hooks of torch and of users run on it unchanged.

    Args:
        index: position in launch order.
        flat: the memory of its gradients: 1-D, contiguous, `spec.numel` elements of `spec.dtype`.
        parameters, names: those of its parameters, in the order of `spec.indices`.
        late_only: positions that get several gradients in one backward.
    """

    contributes = True
    """False for a bucket of zeros, which a rank without input contributes."""

    def __init__(
        self,
        index: int,
        spec: BucketSpec,
        flat: torch.Tensor,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        *,
        is_last: bool,
        late_only: frozenset[int] = frozenset(),
    ) -> None:
        self.spec = spec
        self.params = tuple(parameters)
        self.names = tuple(names)
        self.size = len(self.params)
        self.flat = flat
        self.views = [flat] if spec.is_sparse else _views(flat, self.params)
        large = (i for i, p in enumerate(self.params) if p.nbytes >= _EARLY_COPY_BYTES)
        self.early: frozenset[int] = frozenset() if spec.is_sparse else frozenset(large) - late_only
        self._late = [i for i in range(self.size) if i not in self.early]
        self._late_params = [self.params[i] for i in self._late]
        self._late_views = [self.views[i] for i in self._late]
        self._late_runs = [] if spec.is_sparse else _runs(flat, self.params, self.early)
        self._has_late_only = bool(late_only)
        self._is_cast = any(p.dtype != spec.dtype for p in self.params)
        self.streams = GradientStreams(spec.device) if spec.device.type == "cuda" else None
        """Streams on which gradients arrived in this backward; None for a device without streams."""
        self._index = index
        self._is_last = is_last
        self.absent: set[int] = set()
        """Positions of the parameters without a gradient in this backward."""
        self.accumulated: set[int] = set()
        """Those in `absent` whose `.grad` was added up without synchronization since the last average."""
        self.arm(0, [])
        self.armed = False

    # ------------------------------------------------------------------ for communication hooks

    def index(self) -> int:
        """Return the position of this bucket in the order in which reductions start, from 0."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return this rank's flat gradient (1-D), neither reduced nor divided, for a hook to average."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return views of `buffer()` with the parameters' shapes."""
        return _views(self._buffer, self.params) if self._buffer is not self.flat else list(self.views)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients are in this bucket, in the order of `gradients()`."""
        return list(self.params)

    def is_last(self) -> bool:
        """Return True if the reduction of this bucket is the last one to start in a backward."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Make `buffer()` return `buffer`, a tensor of the same size that a hook works on."""
        self._buffer = buffer

    def take(self, value: torch.Tensor) -> None:
        """Copy the reduced gradient `value`, of the flat buffer's size, into the flat buffer."""
        if value.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(value.detach().view(-1))

    def zeros(self) -> Bucket:
        """Return a bucket of zeros with the same layout in separate memory, for a rank without input."""
        flat = torch.zeros_like(self.flat)
        bucket = type(self)(self._index, self.spec, flat, self.params, self.names, is_last=self._is_last)
        bucket.contributes = False
        bucket.absent.update(range(self.size))
        return bucket

    # ------------------------------------------------------------------ one backward

    def arm(self, num_expected: int, ready: list[int]) -> None:
        """Reset the bucket for a backward with `num_expected` gradients; `ready` lists those that arrive."""
        self.armed = True
        self.ready = ready
        self.num_expected = self.num_pending = num_expected
        self.all_but_one = num_expected - 1
        self.is_full = False
        self.is_skipped = False
        self.absent.clear()
        self.accumulated.clear()
        if self.streams is not None:
            self.streams.clear()
        self.work: Any = None
        self._buffer = self.flat

    def open(self) -> None:
        """Do nothing; a `ViewBucket` lets autograd add gradients directly into the buffer, without a copy."""

    def withdraw(self, ready: Collection[int]) -> None:
        """Do nothing; a `ViewBucket` unsets the `.grad` that `open` has set, except for those in `ready`."""

    def copy_early(self, position: int, scale: float | None) -> None:
        """Copy one large gradient into the buffer, scaled unless `scale` is None; TypeError if missing."""
        _copy_scaled(cast(torch.Tensor, self.params[position].grad), self.views[position], scale)

    def copy_late(self, scale: float | None) -> None:
        """Copy the small gradients into the buffer, scaled unless `scale` is None; TypeError if missing."""
        if not self.absent:
            self._copy_in(self._late_params, self._late_views)
        else:
            present = [i for i in self._late if i not in self.absent]
            self._copy_in([self.params[i] for i in present], [self.views[i] for i in present])
        if scale is not None and self._late_runs:
            foreach_mul_(self._late_runs, scale)

    def _copy_in(self, params: list[torch.nn.Parameter], views: list[torch.Tensor]) -> None:
        if params:
            foreach_copy_(views, cast(list[torch.Tensor], [p.grad for p in params]))

    def fill_absent(self, position: int, scale: float | None) -> None:
        """Fill the buffer slice of a parameter without a new gradient: with its accumulated one, or zeros.

        Its `.grad` is unchanged until `take_absent`.
        """
        self.absent.add(position)
        grad, view = self.params[position].grad, self.views[position]
        if grad is None:
            view.zero_()
        elif grad is not view:
            view.copy_(grad)
        if scale is not None and position in self.early:
            view.mul_(scale)

    def take_absent(self, position: int, is_used: bool) -> None:
        """Set `.grad` of a parameter without a local gradient to the mean if a rank used it; else keep it."""
        if is_used:
            self._give(position)

    def _give(self, position: int) -> None:
        param, view = self.params[position], self.views[position]
        if param.grad is None or self._is_cast:
            param.grad = view.to(param.dtype, copy=True)
        else:
            param.grad.copy_(view)

    def copy_out(self) -> None:
        """Copy the averaged gradients from the flat buffer to the parameters' `.grad`."""
        present = [i for i in range(self.size) if i not in self.absent]
        if self._is_cast:
            for position in present:
                self._give(position)
        elif present:
            grads = [cast(torch.Tensor, self.params[i].grad) for i in present]
            foreach_copy_(grads, [self.views[i] for i in present])
            self._keep(grads)

    def _keep(self, gradients: Sequence[Any]) -> None:
        if self.streams is not None:
            self.streams.keep(gradients)


class ViewBucket(Bucket):
    """Bucket in which each parameter's `.grad` is a view of the flat buffer."""

    def arm(self, num_expected: int, ready: list[int]) -> None:
        super().arm(num_expected, ready)
        self._is_open = False
        self._saved: dict[int, torch.Tensor] = {}

    def open(self) -> None:
        """Set zeroed views as `.grad` of small CPU parameters, if none has a gradient: autograd adds there.

        Only on the CPU: on other devices one copy of many gradients costs less than one addition each.
        """
        if self.spec.device.type != "cpu" or self._has_late_only or self.absent or self.is_full:
            return
        for param in self._late_params:
            if param.grad is not None:
                return
        for run in self._late_runs:
            run.zero_()
        for param, view in zip(self._late_params, self._late_views, strict=True):
            param.grad = view
        self._is_open = True

    def withdraw(self, ready: Collection[int]) -> None:
        for position in self._late:
            if self.spec.indices[position] not in ready and self._is_untouched(position):
                self.params[position].grad = None

    def _is_untouched(self, position: int) -> bool:
        """Return True if `.grad` is still the view that `open` has set; valid only if no gradient arrived."""
        is_view = self.params[position].grad is self.views[position]
        return self._is_open and position not in self.early and is_view

    def copy_early(self, position: int, scale: float | None) -> None:
        param, view = self.params[position], self.views[position]
        grad = cast(torch.Tensor, param.grad)
        if grad is view:
            if scale is not None:
                view.mul_(scale)
            return
        _copy_scaled(grad, view, scale)
        self._keep([grad])
        param.grad = view

    def _copy_in(self, params: list[torch.nn.Parameter], views: list[torch.Tensor]) -> None:
        grads = [p.grad for p in params]
        if all(map(operator.is_, grads, views)):
            return
        if any(map(operator.is_, grads, views)):  # some accumulated in place: copy only the others
            moved = [i for i, (grad, view) in enumerate(zip(grads, views, strict=True)) if grad is not view]
            params, views = [params[i] for i in moved], [views[i] for i in moved]
            grads = [grads[i] for i in moved]
        foreach_copy_(views, cast(list[torch.Tensor], grads))
        self._keep(grads)
        for param, view in zip(params, views, strict=True):
            param.grad = view

    def fill_absent(self, position: int, scale: float | None) -> None:
        param, view = self.params[position], self.views[position]
        if self._is_untouched(position):
            param.grad = None
        elif param.grad is view:
            self._saved[position] = view.clone()
        super().fill_absent(position, scale)

    def take_absent(self, position: int, is_used: bool) -> None:
        saved = self._saved.pop(position, None)
        if is_used:
            self.params[position].grad = self.views[position]
        elif saved is not None:
            self.views[position].copy_(saved)

    def copy_out(self) -> None:
        """Do nothing: `.grad` is a view of the flat buffer, so it has the averaged gradient already."""


def _copy_scaled(gradient: torch.Tensor, view: torch.Tensor, scale: float | None) -> None:
    if scale is None:
        view.copy_(gradient)
    else:
        torch.mul(gradient, scale, out=view)


def sparse_parameters(modules: Iterable[torch.nn.Module]) -> set[int]:
    """Return `id`s of the parameters with sparse gradients: weights of `sparse=True` embeddings."""
    return {id(m.weight) for m in modules if isinstance(m, _SPARSE_MODULES) and m.sparse}


class SparseBucket(Bucket):
    """A bucket for one parameter with sparse gradients, for backends that reduce these, such as gloo.

    `buffer()` is the sparse gradient itself, of the parameter's shape, a new tensor in each step.
    """

    def gradients(self) -> list[torch.Tensor]:
        return [self._buffer]

    def take(self, value: torch.Tensor) -> None:
        self.flat = value.detach()

    def zeros(self) -> Bucket:
        """Return a bucket for the same parameter with an empty sparse gradient, for a rank without input."""
        bucket = super().zeros()
        bucket.set_buffer(_empty_like(self.params[0]))
        bucket.flat = bucket.buffer()
        return bucket

    def copy_late(self, scale: float | None) -> None:
        if not self.absent:
            self._fill(self.params[0].grad, scale)

    def fill_absent(self, position: int, scale: float | None) -> None:
        self.absent.add(position)
        param = self.params[position]
        self._fill(_empty_like(param) if param.grad is None else param.grad, scale)

    def take_absent(self, position: int, is_used: bool) -> None:
        if is_used:
            self.params[position].grad = self.flat

    def copy_out(self) -> None:
        if not self.absent:
            self.params[0].grad = self.flat

    def _fill(self, grad: torch.Tensor | None, scale: float | None) -> None:
        if grad is None:
            raise TypeError("no gradient")
        if not grad.is_sparse:
            raise BackwardOrderError(
                f"{self.names[0]!r} has a dense gradient, but its embedding was made with sparse=True. Use"
                " the parameter in that embedding only, or make it with sparse=False."
            )
        self.flat = grad.clone() if scale is None else grad * scale
        self._keep([grad])
        self.set_buffer(self.flat)


def _empty_like(parameter: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor of the shape and dtype of an embedding's weight, in which no row is stored."""
    shape = parameter.shape
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
        torch.empty((0, *shape[1:]), dtype=parameter.dtype, device=parameter.device),
        shape,
        check_invariants=False,  # explicit, because torch warns about the default
    )


def _views(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    views = []
    offset, base = 0, flat.storage_offset()
    for p in parameters:
        # Keep channels_last and the like of dense parameters: autograd expects the parameter's strides.
        if p.numel() and torch.empty_like(p, device="meta").stride() == p.stride():
            views.append(flat.as_strided(p.shape, p.stride(), base + offset))
        else:
            views.append(flat[offset : offset + p.numel()].view(p.shape))
        offset += p.numel()
    return views


def _runs(
    flat: torch.Tensor, parameters: Sequence[torch.Tensor], early: frozenset[int]
) -> list[torch.Tensor]:
    """Return the contiguous slices of `flat` between the parameters that are copied early."""
    offsets = [0, *accumulate(p.numel() for p in parameters)]
    groups = [list(g) for is_early, g in groupby(range(len(parameters)), early.__contains__) if not is_early]
    slices = [flat[offsets[group[0]] : offsets[group[-1] + 1]] for group in groups]
    return [each for each in slices if each.numel()]


# ---------------------------------------------------------------------- all buckets of a reducer


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
        grads = {}
        for index, (bucket, position) in self.where.items():
            if self.params[index].grad is bucket.views[position]:
                grads[index] = bucket.views[position].clone()
                self.params[index].grad = None
        self.where, self.buckets = {}, ()
        self.buckets = tuple(self._make_buckets(plan))
        for bucket in self.buckets:
            self.where |= {index: (bucket, position) for position, index in enumerate(bucket.spec.indices)}
        for index, grad in grads.items():
            bucket, position = self.where[index]
            bucket.views[position].copy_(grad)
            self.params[index].grad = bucket.views[position]

    @property
    def is_shared(self) -> bool:
        """True if CPU buckets were allocated as memory for the ranks of a host to share."""
        return self._memory is not None

    def leave_shared_memory(self) -> None:
        """Move the buckets, with the gradients in them, from shared memory to memory of this process."""
        self._memory = None
        self._storage.clear()
        self.apply([bucket.spec for bucket in self.buckets], self._late_only)

    def _make_buckets(self, plan: Sequence[BucketSpec]) -> Iterator[Bucket]:
        """Yield a plan's buckets, in slices of one allocation per dtype and device that all plans reuse."""
        offsets: dict[_Kind, int] = defaultdict(int)
        for index, spec in enumerate(plan):
            key = (spec.dtype, spec.device)
            if spec.is_sparse:
                flat = torch.empty(0, dtype=spec.dtype, device=spec.device)
            else:
                if key not in self._storage:
                    same = [s for s in self._specs if (s.dtype, s.device) == key and not s.is_sparse]
                    self._storage[key] = self._zeros(sum(_aligned(s.numel, s.dtype) for s in same), *key)
                flat = self._storage[key][offsets[key] : offsets[key] + spec.numel]
                offsets[key] += _aligned(spec.numel, spec.dtype)
            params = [self.params[i] for i in spec.indices]
            names = [self.names[i] for i in spec.indices]
            is_view = self._options.gradient_as_bucket_view and all(p.dtype == spec.dtype for p in params)
            kind: type[Bucket] = SparseBucket if spec.is_sparse else ViewBucket if is_view else Bucket
            late_only = frozenset(p for p, i in enumerate(spec.indices) if i in self._late_only)
            is_last = index == len(plan) - 1
            yield kind(index, spec, flat, params, names, is_last=is_last, late_only=late_only)

    def _zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "cpu" and self._memory is not None:
            return self._memory.zeros(numel, dtype)
        group = self._group
        if device.type == "cuda" and group is not None and group.memory_problem(device) is None:
            return allocate(group.process_group, numel, dtype, device)
        return torch.zeros(numel, dtype=dtype, device=device)


def _aligned(numel: int, dtype: torch.dtype) -> int:
    """Return the number of elements `numel`, rounded up to the alignment of buckets."""
    step = _ALIGNMENT_BYTES // dtype.itemsize
    return -(-numel // step) * step

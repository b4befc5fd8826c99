"""The flat buffer of a bucket, its views, and copies of dense and sparse gradients to and from it.

On CUDA, autograd writes gradients on the streams of their forwards. Operations on a whole bucket are ordered
after all of these streams.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, cast

import torch

from lightning_ddp._torch import foreach_copy_, foreach_mul_
from lightning_ddp.errors import BackwardOrderError

_EARLY_COPY_BYTES = 256 * 1024
"""Size from which a gradient is copied into the bucket when it arrives, while it is in the cache. Smaller
gradients are copied together when the last has arrived, or are added in place by autograd."""
_SPARSE_MODULES = (torch.nn.Embedding, torch.nn.EmbeddingBag)

# Called once per gradient, so the variant with the least overhead: torch.cuda.current_stream does more.
_current_stream = torch.accelerator.current_stream


@dataclass(frozen=True, kw_only=True)
class BucketSpec:
    """Plan of one bucket: the parameters whose gradients it holds, and its size, dtype and device."""

    indices: tuple[int, ...]
    """Positions of its parameters in the planned list, in the order of the flat buffer."""
    numel: int
    dtype: torch.dtype
    device: torch.device
    is_sparse: bool = False
    """True if the bucket holds a single parameter, whose gradients are sparse tensors."""


class GradientStreams:
    """The CUDA streams on which one backward writes gradients of one device into one flat buffer.

    Autograd runs the hook of a gradient on the stream of the forward that used the parameter. A reader of the
    whole buffer has to wait for each of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self._noted: dict[int, Any] = {}

    def clear(self) -> None:
        self._noted.clear()

    def note(self) -> None:
        """Record that the current CUDA stream wrote a gradient, or holds one that has yet to be copied."""
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
        """Keep the memory of `gradients`, maybe of another stream, until this stream has used them."""
        current = _current_stream(self._index)
        if any(number != current.stream_id for number in self._noted):
            for gradient in gradients:
                gradient.record_stream(current)


class Bucket:
    """The flat buffer of a bucket and the state of its reduction in this step.

    Gradients are copied to the buffer, and the means back to them, also if they are of another dtype. Offers
    the methods of torch's `GradBucket`, so that torch's communication hooks and those of users run on it
    unchanged.

    Args:
        index: position in launch order.
        spec: its part of the plan.
        flat: the memory of its gradients: 1-D, contiguous, `spec.numel` elements of `spec.dtype`.
        parameters: its parameters, in the order of `spec.indices`; `names` are their qualified names.
        is_last: True for the bucket that is launched last.
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
        is_large = [p.numel() * p.element_size() >= _EARLY_COPY_BYTES for p in self.params]
        self.early = frozenset(i for i in range(self.size) if is_large[i] and i not in late_only)
        self._late = [i for i in range(self.size) if i not in self.early]
        self._late_params = [self.params[i] for i in self._late]
        self._late_views = [self.views[i] for i in self._late]
        self._late_runs = _runs(self.flat, self.params, self.early)
        self._has_late_only = bool(late_only)
        self._is_cast = any(p.dtype != spec.dtype for p in self.params)
        self.streams = GradientStreams(spec.device) if spec.device.type == "cuda" else None
        """Streams on which gradients arrived in this backward; None for a device without streams."""
        self._index = index
        self._is_last = is_last
        self.absent: set[int] = set()
        """Positions of the parameters without a gradient in this backward."""
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
        """Return views of `buffer()`, one per parameter, with the parameter's shape."""
        return _views(self._buffer, self.params) if self._buffer is not self.flat else list(self.views)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients are in this bucket, in the order of `gradients()`."""
        return list(self.params)

    def is_last(self) -> bool:
        """Return True if this bucket is launched last in a backward."""
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
        return bucket

    # ------------------------------------------------------------------ one backward

    def arm(self, num_expected: int, ready: list[int]) -> None:
        """Reset the bucket for a backward with `num_expected` gradients; arrivals are listed in `ready`."""
        self.armed = True
        self.ready = ready
        self.num_expected = self.num_pending = num_expected
        self.all_but_one = num_expected - 1
        self.is_full = False
        self.is_skipped = False
        self.absent.clear()
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

    def _keep(self, gradients: Any) -> None:
        if self.streams is not None:
            self.streams.keep(gradients)


class ViewBucket(Bucket):
    """Bucket in which each parameter's `.grad` is a view of the flat buffer."""

    _is_open = False

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._saved: dict[int, torch.Tensor] = {}
        super().__init__(*arguments, **keywords)

    def arm(self, num_expected: int, ready: list[int]) -> None:
        super().arm(num_expected, ready)
        self._is_open = False
        self._saved.clear()

    def open(self) -> None:
        """Set views of the zeroed buffer as `.grad` of small parameters: autograd adds there without a copy.

        `.grad` of their parameters becomes a view that holds zeros, if none of them has a gradient yet. Only
        on the CPU: on other devices one copy of many gradients costs less than one addition per gradient.
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

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.early = frozenset()

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

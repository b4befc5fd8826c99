"""The flat buffer of a bucket, its views, and how gradients get in and out of it, also sparse ones.

On CUDA, where gradients come on the streams of their forwards, what is done with all of a bucket is ordered
after each.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from lightning_ddp._torch import foreach_copy_, foreach_mul_
from lightning_ddp.errors import BackwardOrderError

_MOST_BYTES_IN_PLACE = 256 * 1024
"""From this size on a copy costs less than zeros and an addition; below, the number of operations counts."""
_SPARSE_MODULES = (torch.nn.Embedding, torch.nn.EmbeddingBag)

_current_stream = torch.accelerator.current_stream  # asked once a gradient; does less than that of torch.cuda


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


class GradientStreams:
    """The CUDA streams on which one backward writes gradients of one device into one flat buffer.

    Autograd runs the hook of a gradient on the stream of the forward that used the parameter. After a forward
    on several streams whoever reads all gradients of a buffer has to wait for each; with one stream there is
    nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self._noted: dict[int, Any] = {}

    def clear(self) -> None:
        """A backward is to come."""
        self._noted.clear()

    def note(self) -> None:
        """The current stream has written, or holds a gradient that is still to be copied."""
        stream = _current_stream(self._index)
        self._noted[stream.stream_id] = stream

    def join(self) -> None:
        """Lets the current stream go on after all that has been noted. Does not wait on the host."""
        current = _current_stream(self._index)
        for number, stream in self._noted.items():
            if number != current.stream_id:
                current.wait_stream(stream)
        self._noted[current.stream_id] = current

    def keep(self, gradients: Sequence[torch.Tensor]) -> None:
        """Keeps the memory of gradients, however soon they are dropped, until the current stream has used it.

        Without that what was made on another stream could be used again there at once.
        """
        current = _current_stream(self._index)
        if any(number != current.stream_id for number in self._noted):
            for gradient in gradients:
                gradient.record_stream(current)


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
        is_view: whether `.grad` becomes a view of the flat buffer; never where its dtype is another one.
        early_copy_bytes: from this size on a gradient is copied when it arrives; smaller ones go together.
        late_only: positions that must not be copied early, as they get several gradients in one backward.
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
        is_view: bool = True,
        early_copy_bytes: int = 0,
        late_only: frozenset[int] = frozenset(),
    ) -> None:
        self.spec = spec
        self.params = tuple(parameters)
        self.names = tuple(names)
        self.size = len(self.params)
        self.flat = flat
        self.views = [flat] if spec.is_sparse else _views(flat, self.params)
        self.early = frozenset(
            i
            for i, p in enumerate(self.params)
            if p.numel() * p.element_size() >= early_copy_bytes and i not in late_only
        )
        self._late = [i for i in range(self.size) if i not in self.early]
        self._late_params = [self.params[i] for i in self._late]
        self._late_views = [self.views[i] for i in self._late]
        self._late_runs = _runs(self.flat, self.params, self.early)
        self._is_cast = any(p.dtype != spec.dtype for p in self.params)
        self._is_view = is_view and not self._is_cast
        self._may_open = (
            self._is_view
            and spec.device.type == "cpu"
            and not late_only
            and all(v.nbytes < _MOST_BYTES_IN_PLACE for v in self._late_views)
        )
        self.streams = GradientStreams(spec.device) if spec.device.type == "cuda" else None
        """On which streams gradients have come in this backward; None for a device without streams."""
        self._index = index
        self._is_last = is_last
        self.contributes = True
        """Whether there is anything in it; else it stands for a bucket of a rank that has no input."""
        self.absent: set[int] = set()
        """Positions of the parameters that get no gradient in this backward."""
        self._saved: dict[int, torch.Tensor] = {}
        self.arm(0, [])
        self.armed = False

    # ------------------------------------------------------------------ for communication hooks

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

    def take(self, value: torch.Tensor) -> None:
        """Makes `value`, of the flat buffer's size, the reduced gradient."""
        if value.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(value.detach().view(-1))

    def zeros(self) -> Bucket:
        """A bucket of the same form in memory of its own, for a rank that contributes nothing."""
        flat = torch.zeros_like(self.flat)
        bucket = type(self)(self._index, self.spec, flat, self.params, self.names, is_last=self._is_last)
        bucket.contributes = False
        return bucket

    # ------------------------------------------------------------------ one backward

    def arm(self, num_expected: int, ready: list[int]) -> None:
        """Forgets the last reduction and expects `num_expected` gradients; their indices go to `ready`."""
        self.armed = True
        self.ready = ready
        self.num_pending = num_expected
        self.all_but_one = num_expected - 1
        self.is_full = False
        self.is_skipped = False
        self._is_open = False
        self.absent.clear()
        self._saved.clear()
        if self.streams is not None:
            self.streams.clear()
        self.work: Any = None
        self._buffer = self.flat

    def open(self) -> None:
        """Lets autograd add the small gradients of this backward into the buffer, so that none is copied.

        For that `.grad` of their parameters becomes a view that holds zeros, if all are without one yet. Only
        on the CPU: elsewhere one copy of many gradients takes less than an addition each.
        """
        if not self._may_open or self.absent or self.is_full:
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
        """After a backward that has failed: parameters not in `ready` are without a gradient again."""
        for position in self._late:
            if self.spec.indices[position] not in ready and self._is_untouched(position):
                self.params[position].grad = None

    def _is_untouched(self, position: int) -> bool:
        """Whether `.grad` is what `open` has made it, if no gradient has come."""
        is_view = self.params[position].grad is self.views[position]
        return self._is_open and position not in self.early and is_view

    def copy_early(self, position: int, scale: float | None) -> None:
        """Puts one large gradient in, scaled unless `scale` is None; raises TypeError if there is none."""
        param, view = self.params[position], self.views[position]
        grad = cast(torch.Tensor, param.grad)
        if grad is view:
            if scale is not None:
                view.mul_(scale)
            return
        if scale is None:
            view.copy_(grad)
        else:
            torch.mul(grad, scale, out=view)
        if self._is_view:
            if self.streams is not None:
                self.streams.keep([grad])
            param.grad = view

    def copy_late(self, scale: float | None) -> None:
        """Puts in, by one copy, and scales the small gradients; raises TypeError if one is missing."""
        params, views = self._late_params, self._late_views
        if self.absent:
            present = [i for i in self._late if i not in self.absent]
            params, views = [self.params[i] for i in present], [self.views[i] for i in present]
        grads = [p.grad for p in params]
        if all(map(operator.is_, grads, views)):
            grads = []
        elif any(map(operator.is_, grads, views)):  # some accumulated in place: only the others move
            moved = [i for i, (grad, view) in enumerate(zip(grads, views, strict=True)) if grad is not view]
            params, views = [params[i] for i in moved], [views[i] for i in moved]
            grads = [grads[i] for i in moved]
        if grads:
            foreach_copy_(views, cast(list[torch.Tensor], grads))
            if self._is_view:
                if self.streams is not None:
                    self.streams.keep(cast(list[torch.Tensor], grads))
                for param, view in zip(params, views, strict=True):
                    param.grad = view
        if scale is not None and self._late_runs:
            foreach_mul_(self._late_runs, scale)

    def fill_absent(self, position: int, scale: float | None) -> None:
        """Puts in what a parameter without a new gradient contributes: its accumulated one, or zeros.

        Its `.grad` stays as it is until `take_absent`.
        """
        self.absent.add(position)
        if self._is_untouched(position):
            self.params[position].grad = None
        grad, view = self.params[position].grad, self.views[position]
        if grad is None:
            view.zero_()
        elif grad is view:
            self._saved[position] = view.clone()
        else:
            view.copy_(grad)
        if scale is not None and position in self.early:
            view.mul_(scale)

    def take_absent(self, position: int, is_used: bool) -> None:
        """Gives an absent parameter the mean if some rank used it, else leaves its `.grad` as it was."""
        saved = self._saved.pop(position, None)
        if is_used:
            self._give(position)
        elif saved is not None:
            self.views[position].copy_(saved)

    def _give(self, position: int) -> None:
        param, view = self.params[position], self.views[position]
        if self._is_view:
            param.grad = view
        elif param.grad is None or self._is_cast:
            param.grad = view.to(param.dtype, copy=True)
        else:
            param.grad.copy_(view)

    def copy_out(self) -> None:
        """Where gradients are no views, writes the means into them."""
        if self._is_view:
            return
        present = [i for i in range(self.size) if i not in self.absent]
        if self._is_cast:
            for position in present:
                self._give(position)
            return
        grads = [cast(torch.Tensor, self.params[i].grad) for i in present]
        if grads:
            foreach_copy_(grads, [self.views[i] for i in present])
        if self.streams is not None:
            self.streams.keep(grads)


def sparse_parameters(modules: Iterable[torch.nn.Module]) -> set[int]:
    """The `id`s of parameters that get sparse gradients: weights of embeddings made with `sparse=True`."""
    return {id(m.weight) for m in modules if isinstance(m, _SPARSE_MODULES) and m.sparse}


class SparseBucket(Bucket):
    """A bucket for one parameter with sparse gradients, for backends that know these, as gloo does.

    `buffer()` is the sparse gradient itself, of the parameter's shape: each step brings a tensor of its own.
    What is sent grows with the rows that were used, on all ranks together.
    """

    def __init__(self, *arguments: Any, is_last: bool) -> None:
        super().__init__(*arguments, is_last=is_last)
        self.early = frozenset()

    def gradients(self) -> list[torch.Tensor]:
        """The sparse gradient."""
        return [self._buffer]

    def take(self, value: torch.Tensor) -> None:
        """Makes `value` the reduced gradient."""
        self.flat = value.detach()

    def zeros(self) -> Bucket:
        """A bucket of the same form without any row."""
        bucket = super().zeros()
        bucket.set_buffer(_empty_like(self.params[0]))
        bucket.flat = bucket.buffer()
        return bucket

    def copy_late(self, scale: float | None) -> None:
        """Takes the gradient, scaled unless `scale` is None."""
        if not self.absent:
            self._fill(self.params[0].grad, scale)

    def fill_absent(self, position: int, scale: float | None) -> None:
        """Puts in its accumulated gradient, or no row."""
        self.absent.add(position)
        param = self.params[position]
        self._fill(_empty_like(param) if param.grad is None else param.grad, scale)

    def take_absent(self, position: int, is_used: bool) -> None:
        """Gives the absent parameter the mean if some rank used it."""
        if is_used:
            self.params[position].grad = self.flat

    def copy_out(self) -> None:
        """Makes the mean the gradient."""
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
        if self.streams is not None:
            self.streams.keep([grad])
        self.set_buffer(self.flat)


def _empty_like(parameter: torch.Tensor) -> torch.Tensor:
    """A sparse gradient of an embedding's weight in which no row was used."""
    shape = parameter.shape
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
        torch.empty((0, *shape[1:]), dtype=parameter.dtype, device=parameter.device),
        shape,
        check_invariants=False,  # there is nothing to check, and torch warns unless one says so
    )


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


def _views(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    views = []
    offset = 0
    base = flat.storage_offset()
    for p in parameters:
        # keeps channels_last and the like, as autograd wants the strides of the parameter
        if p.numel() and _is_dense(p):
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

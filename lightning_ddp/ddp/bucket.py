"""The flat buffer of a bucket, its views, and how gradients get in and out of it."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any, cast

import torch

from lightning_ddp._torch import foreach_copy_, foreach_mul_
from lightning_ddp.ddp.gradient_streams import GradientStreams
from lightning_ddp.ddp.plan import BucketSpec

__all__ = ["Bucket"]

_MOST_BYTES_IN_PLACE = 256 * 1024
"""From this size on a copy costs less than zeros and an addition; below, the number of operations counts."""


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
        self.views = self._make_views()
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
        self._is_open = False
        self.streams = GradientStreams(spec.device) if spec.device.type == "cuda" else None
        """On which streams gradients have come in this backward; None for a device without streams."""
        self.armed = False
        self.ready: list[int] = []
        """Indices of the parameters whose gradients have come in this backward, of all buckets."""
        self.num_pending = 0
        self.all_but_one = -1
        self.is_full = False
        self.is_skipped = False
        self.absent: set[int] = set()
        self._saved: dict[int, torch.Tensor] = {}
        self.work: Any = None
        self._index = index
        self._is_last = is_last
        self._buffer = self.flat
        self.contributes = True
        """Whether there is anything in it; else it stands for a bucket of a rank that has no input."""

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

    def _make_views(self) -> list[torch.Tensor]:
        return _views(self.flat, self.params)

    def take(self, value: torch.Tensor) -> None:
        """Makes `value`, of the flat buffer's size, the reduced gradient."""
        if value.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(value.detach().view(-1))

    def zeros(self) -> Bucket:
        """A bucket of the same form in memory of its own, for a rank that contributes nothing."""
        bucket = type(self)(
            self._index,
            self.spec,
            torch.zeros_like(self.flat),
            self.params,
            self.names,
            is_last=self._is_last,
        )
        bucket.contributes = False
        return bucket

    # ------------------------------------------------------------------ one backward

    def arm(self, num_expected: int, ready: list[int] | None = None) -> None:
        """Forgets the last reduction and expects `num_expected` gradients; their indices go to `ready`."""
        self.armed = True
        self.ready = [] if ready is None else ready
        self.num_pending = num_expected
        self.all_but_one = num_expected - 1
        self.is_full = False
        self.is_skipped = False
        self._is_open = False
        self.absent.clear()
        self._saved.clear()
        if self.streams is not None:
            self.streams.clear()
        self.work = None
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
        """After a backward that has failed: parameters without a gradient are without one again.

        Args:
            ready: indices of those that got one.
        """
        if not self._is_open:
            return
        for position in self._late:
            if self.spec.indices[position] not in ready and self._is_untouched(position):
                self.params[position].grad = None

    def _is_untouched(self, position: int) -> bool:
        """Whether `.grad` is what `open` has made it, if no gradient has come."""
        return (
            self._is_open
            and position not in self.early
            and self.params[position].grad is self.views[position]
        )

    def copy_early(self, position: int, scale: float | None) -> None:
        """Puts one large gradient in, scaled on the way unless `scale` is None, and frees its own memory.

        Raises:
            TypeError: there is no gradient.
        """
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
        """Puts small gradients in that are not there yet, with one multi-tensor copy; scales them all.

        Raises:
            TypeError: one of them is not there.
        """
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
        view = self.views[position]
        saved = self._saved.pop(position, None)
        if is_used:
            self._give(position)
        elif saved is not None:
            view.copy_(saved)

    def _give(self, position: int) -> None:
        param, view = self.params[position], self.views[position]
        if self._is_view:
            param.grad = view
        elif param.grad is None or self._is_cast:
            param.grad = view.to(param.dtype, copy=True)
        else:
            param.grad.copy_(view)

    def copy_out(self) -> None:
        """Where gradients are no views, writes the means into them.

        Raises:
            TypeError: one of them is not there.
        """
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

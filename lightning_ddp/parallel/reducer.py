"""The reducer: autograd hooks -> bucket full -> launch in order -> finish.

One hook a parameter counts it as ready. A full bucket is averaged over the ranks asynchronously while
backward goes on; buckets are launched in index order, so that all ranks issue their collectives in one
order whatever order their gradients have. A callback of the autograd engine waits for them at the end of
backward. After the first synchronised backward the buckets are planned again, in the order in which the
gradients became ready on rank 0 (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2).
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from lightning_ddp.comm.group import Group
from lightning_ddp.errors import BackwardOrderError, CommHookError, LightningDDPError, MissingGradientError
from lightning_ddp.parallel.buckets import Bucket, BucketSpec, ParameterSpec, plan_buckets
from lightning_ddp.parallel.unused import MissingGradients

__all__ = ["CommHook", "Reducer"]

CommHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
"""`hook(state, bucket)`, called once a bucket is full; its future holds the reduced flat gradient."""


class Reducer:
    """Averages the gradients of `parameters` over the ranks of `group`, in buckets.

    Args:
        parameters: all of them require gradients; on all ranks the same, in one order.
        names: their qualified names.
        group: the ranks.
        token: the same on all ranks, different for every reducer.
        first_cap_bytes: cap of the first bucket, in bytes.
        cap_bytes: cap of the others, in bytes.
        gradient_as_bucket_view: whether `.grad` becomes a view of the bucket.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        group: Group,
        *,
        token: str,
        first_cap_bytes: int,
        cap_bytes: int,
        gradient_as_bucket_view: bool,
    ) -> None:
        self._params = tuple(parameters)
        self._names = tuple(names)
        self._specs = tuple(ParameterSpec.of(n, p) for n, p in zip(names, parameters, strict=True))
        self._group = group
        self._missing = MissingGradients(group, token)
        self._first_cap_bytes = first_cap_bytes
        self._cap_bytes = cap_bytes
        self._is_view = gradient_as_bucket_view
        self._scale = 1.0 / group.size
        self._hook: CommHook | None = None
        self._hook_state: Any = None
        self._lock = threading.Lock()
        self._handles: list[Any] = []
        self._ready: list[int] = []
        self._next = 0
        self._is_running = False
        self._storage: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._first_order: list[int] | None = None
        self.has_rebuilt = False
        self.step = -1  # number of the synchronised backward that runs or ran last
        self._broken: MissingGradientError | None = None
        self.buckets: tuple[Bucket, ...] = ()
        self._build(self._plan(range(len(self._params) - 1, -1, -1)))

    # ------------------------------------------------------------------ plan

    def _plan(self, order: Sequence[int]) -> tuple[BucketSpec, ...]:
        return plan_buckets(
            self._specs, order, first_cap_bytes=self._first_cap_bytes, cap_bytes=self._cap_bytes
        )

    def _build(self, plan: Sequence[BucketSpec]) -> None:
        grads = self._release()
        flats = self._slice_storage(plan)
        self.buckets = tuple(
            Bucket(
                index,
                spec,
                flats[index],
                [self._params[i] for i in spec.indices],
                [self._names[i] for i in spec.indices],
                is_last=index == len(plan) - 1,
            )
            for index, spec in enumerate(plan)
        )
        self._restore(grads)
        for bucket in self.buckets:
            for position, (index, param) in enumerate(zip(bucket.spec.indices, bucket.params, strict=True)):
                hook = self._make_hook(bucket, position, index)
                self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def _slice_storage(self, plan: Sequence[BucketSpec]) -> list[torch.Tensor]:
        """One allocation a dtype and device for all its buckets, so that a new plan needs no new memory."""
        offsets: dict[tuple[torch.dtype, torch.device], int] = {}
        flats = []
        for spec in plan:
            kind = (spec.dtype, spec.device)
            if kind not in self._storage:
                numel = sum(other.numel for other in plan if (other.dtype, other.device) == kind)
                self._storage[kind] = torch.zeros(numel, dtype=spec.dtype, device=spec.device)
            start = offsets.get(kind, 0)
            offsets[kind] = start + spec.numel
            flats.append(self._storage[kind][start : start + spec.numel])
        return flats

    def _release(self) -> dict[int, torch.Tensor]:
        """Lets go of the present buckets; the gradients that live in them are kept aside."""
        self.remove_hooks()
        grads = {}
        for bucket in self.buckets:
            for index, param, view in zip(bucket.spec.indices, bucket.params, bucket.views, strict=True):
                if param.grad is view:
                    grads[index] = view.clone()
                    param.grad = None
        self.buckets = ()
        return grads

    def _restore(self, grads: dict[int, torch.Tensor]) -> None:
        if not grads:
            return
        for bucket in self.buckets:
            for index, param, view in zip(bucket.spec.indices, bucket.params, bucket.views, strict=True):
                if index in grads:
                    view.copy_(grads.pop(index))
                    param.grad = view

    def remove_hooks(self) -> None:
        """Takes the reducer's hooks off the parameters; their gradients are no longer averaged."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def rebuild(self) -> bool:
        """Plans the buckets anew, once, in the order in which gradients became ready on rank 0.

        Called before each forward on all ranks. Communicates before the second synchronised step.

        Returns:
            Whether the buckets have changed.
        """
        if self._first_order is None:
            return False
        device = self._specs[0].device
        order = torch.tensor(self._first_order, dtype=torch.int64, device=device)
        self._first_order = None
        self.has_rebuilt = True
        self._group.wait(self._group.broadcast(order, 0), device)
        plan = self._plan([int(i) for i in order.tolist()])
        if plan == tuple(bucket.spec for bucket in self.buckets):
            return False
        self._build(plan)
        return True

    # ------------------------------------------------------------------ one backward

    @property
    def has_hook(self) -> bool:
        """Whether a communication hook reduces the buckets."""
        return self._hook is not None

    def set_hook(self, state: Any, hook: CommHook) -> None:
        """Lets `hook` reduce the buckets from the next backward on."""
        self._hook = hook
        self._hook_state = state

    def arm(self) -> None:
        """Expects every parameter's gradient once in the next backward.

        Does not communicate, unless the last backward was interrupted: then it waits for what that had
        launched.

        Raises:
            MissingGradientError: a gradient was missing in an earlier step on some of the ranks only, so that
                their collectives no longer match.
        """
        if self._broken is not None:
            raise self._broken.copy()
        if self._is_running:
            self._abandon()
        self._ready.clear()
        self._next = 0
        for bucket in self.buckets:
            bucket.arm()

    def disarm(self) -> None:
        """Lets gradients accumulate without synchronisation until `arm`."""
        for bucket in self.buckets:
            bucket.armed = False

    def _abandon(self) -> None:
        """The last backward was interrupted: waits for what it had launched, and forgets it."""
        self._is_running = False
        self._drain()

    def _drain(self) -> None:
        """Waits for what this backward has launched."""
        for bucket in self.buckets[: self._next]:
            if bucket.work is not None:
                self._wait(bucket)

    def _make_hook(self, bucket: Bucket, position: int, index: int) -> Callable[[torch.Tensor], None]:
        owner = weakref.ref(self)  # parameters must not keep the reducer alive
        mark = self._ready.append
        is_early = position in bucket.early
        all_but_one = bucket.size - 1

        def ready(_parameter: torch.Tensor) -> None:
            if not bucket.armed:
                return
            mark(index)
            if is_early:
                reducer = owner()
                if reducer is not None:
                    reducer._copy_in(bucket, position)
            bucket.num_pending = left = bucket.num_pending - 1
            if left == all_but_one or left <= 0:
                reducer = owner()
                if reducer is not None:
                    reducer._progress(bucket)

        return ready

    def _progress(self, bucket: Bucket) -> None:
        """A bucket got its first or its last gradient."""
        if not self._is_running:
            self._is_running = True
            self.step += 1
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if bucket.num_pending > 0:
            return
        if bucket.num_pending < 0:
            raise self._twice_error()
        self._copy_late(bucket)
        bucket.is_full = True
        with self._lock:
            while self._next < len(self.buckets) and self.buckets[self._next].is_full:
                self._launch(self.buckets[self._next])
                self._next += 1

    def _copy_in(self, bucket: Bucket, position: int) -> None:
        """Puts one large gradient into the bucket, scaled on the way, and frees its own memory."""
        param = bucket.params[position]
        grad = param.grad
        view = bucket.views[position]
        if grad is None:
            raise self._vanished_error(bucket)
        with torch.no_grad():
            if self._hook is not None:
                if grad is not view:
                    view.copy_(grad)
            elif grad is view:
                view.mul_(self._scale)
            else:
                torch.mul(grad, self._scale, out=view)
        if self._is_view and grad is not view:
            param.grad = view

    def _copy_late(self, bucket: Bucket) -> None:
        """Puts all small gradients into the bucket with one multi-tensor copy, then scales them."""
        params, views = bucket.late_params, bucket.late_views
        grads = [p.grad for p in params]
        if any(map(operator.is_, grads, views)):  # some accumulated in place: only the others move
            moved = [i for i, (grad, view) in enumerate(zip(grads, views, strict=True)) if grad is not view]
            params = [params[i] for i in moved]
            views = [views[i] for i in moved]
            grads = [grads[i] for i in moved]
        with torch.no_grad():
            if grads:
                try:
                    torch._foreach_copy_(views, cast(list[torch.Tensor], grads))
                except TypeError as error:  # one of them is None
                    raise self._vanished_error(bucket) from error
            if self._is_view:
                for param, view in zip(params, views, strict=True):
                    param.grad = view
            if self._hook is None and bucket.late_runs:
                torch._foreach_mul_(bucket.late_runs, self._scale)

    def _launch(self, bucket: Bucket) -> None:
        if self._hook is None:
            bucket.work = self._group.all_reduce(bucket.flat)
            return
        try:
            future = self._hook(self._hook_state, bucket)
        except Exception as error:
            raise self._hook_error(bucket, f"raised {type(error).__name__}: {error}") from error
        if not isinstance(future, torch._C.Future):  # what get_future() of a work returns, too
            raise self._hook_error(
                bucket,
                f"returned {type(future).__name__}; expected a torch.futures.Future of the flat gradient",
            )
        bucket.work = future

    # ------------------------------------------------------------------ end of backward

    def _finish(self) -> None:
        """Called by the autograd engine when all gradients of this backward are there."""
        self.disarm()
        if self._next < len(self.buckets):
            self._raise_missing()
        if not self.has_rebuilt:
            self._first_order = list(self._ready)
        for bucket in self.buckets:
            value = self._wait(bucket)
            if value is not None:
                self._take_result(bucket, value)
            if not self._is_view:
                self._copy_out(bucket)
        self._is_running = False

    def _raise_missing(self) -> None:
        arrived = set(self._ready)
        names = [name for i, name in enumerate(self._names) if i not in arrived]
        self._is_running = False
        error = self._missing.report(self.step, names, self._next)
        if error.num_launched is None:
            self._broken = error.copy()
        else:
            self._drain()
        raise error

    def _wait(self, bucket: Bucket) -> Any:
        work = bucket.work
        watch = self._missing.watch(self.step, self._next)
        try:
            if self._hook is None:
                self._group.wait(work, bucket.spec.device, watch)
                value = None
            else:
                value = self._group.wait_future(work, watch)
        except MissingGradientError as error:
            self._broken = error.copy()
            raise
        except LightningDDPError:
            raise
        except RuntimeError as error:
            if self._hook is None:
                raise
            raise self._hook_error(bucket, f"failed: {error}") from error
        return value

    def _take_result(self, bucket: Bucket, value: Any) -> None:
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if not isinstance(value, torch.Tensor):
            raise self._hook_error(bucket, f"gave {type(value).__name__}; expected the flat gradient")
        flat = bucket.flat
        if value.numel() != flat.numel() or value.dtype != flat.dtype:
            raise self._hook_error(
                bucket,
                f"gave shape {list(value.shape)} of {value.dtype};"
                f" expected {list(flat.shape)} of {flat.dtype}",
            )
        if value.data_ptr() != flat.data_ptr():
            flat.copy_(value.detach().view(-1))

    def _copy_out(self, bucket: Bucket) -> None:
        grads = [p.grad for p in bucket.params if p.grad is not None]
        if len(grads) != bucket.size:
            raise self._vanished_error(bucket)
        with torch.no_grad():
            torch._foreach_copy_(grads, bucket.views)

    # ------------------------------------------------------------------ errors

    def _hook_error(self, bucket: Bucket, what: str) -> CommHookError:
        name = getattr(self._hook, "__qualname__", type(self._hook).__name__)
        return CommHookError(
            f"rank {self._group.rank}, step {self.step}: communication hook {name!r} {what}"
            f" (bucket {bucket.index()} of {len(self.buckets)}, {bucket.flat.numel()} elements,"
            f" parameters {bucket.names[0]!r} to {bucket.names[-1]!r})"
        )

    def _vanished_error(self, bucket: Bucket) -> BackwardOrderError:
        if len(set(self._ready)) != len(self._ready):
            return self._twice_error()
        names = [n for n, p in zip(bucket.names, bucket.params, strict=True) if p.grad is None]
        return BackwardOrderError(
            f"rank {self._group.rank}, step {self.step}: something set .grad to None before it was"
            f" averaged, for {', '.join(names)}. Free gradients after backward, not in a hook during it."
        )

    def _twice_error(self) -> BackwardOrderError:
        counts: dict[int, int] = {}
        for index in self._ready:
            counts[index] = counts.get(index, 0) + 1
        names = [self._names[i] for i, n in counts.items() if n > 1]
        return BackwardOrderError(
            f"rank {self._group.rank}, step {self.step}: more than one gradient in one backward for"
            f" {', '.join(names)}. Re-entrant activation checkpointing does that: use"
            " torch.utils.checkpoint(..., use_reentrant=False)."
        )

"""The reducer: autograd hooks -> bucket full -> launch in order -> finish.

One hook a parameter counts it as ready. A full bucket is averaged over the ranks asynchronously while
backward goes on; buckets are launched in index order, so that all ranks issue their collectives in one
order whatever order their gradients have. A callback of the autograd engine waits for them at the end of
backward. After the first synchronised backward the buckets are planned again, in the order in which the
gradients became ready on rank 0 (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from lightning_ddp.comm.group import Group
from lightning_ddp.errors import BackwardOrderError, MissingGradientError
from lightning_ddp.parallel.layout import BucketLayout
from lightning_ddp.parallel.reduction import CommHook, Reduction
from lightning_ddp.parallel.storage import Bucket
from lightning_ddp.parallel.unused import MissingGradients, find_tensors, reached_parameters

__all__ = ["Reducer"]


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
        find_unused_parameters: whether parameters may be without a gradient, on some ranks or on all.
        static_graph: whether every step has the graph of the first one.
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
        find_unused_parameters: bool = False,
        static_graph: bool = False,
    ) -> None:
        self._layout = BucketLayout(
            parameters,
            names,
            first_cap_bytes=first_cap_bytes,
            cap_bytes=cap_bytes,
            is_view=gradient_as_bucket_view,
        )
        self._params = self._layout.params
        self._group = group
        self._reduction = Reduction(group)
        self._missing = MissingGradients(group, token)
        self._finds_unused = find_unused_parameters
        self._is_static = static_graph
        self._lock = threading.Lock()
        self._handles: list[Any] = []
        self._ready: list[int] = []
        self._next = 0
        self._is_armed = False
        self._is_running = False
        self._is_learning = static_graph
        self._counts = [1] * len(self._params)  # gradients that a parameter gets in one backward
        self._unreached: set[int] = set()
        self._declared: set[int] = set()  # requires_grad is switched off
        self._never_used: set[int] = set()  # known of a static graph
        self._used_unsynced: set[int] = set()
        self._first_order: list[int] | None = None
        self.has_rebuilt = False
        self.step = -1  # number of the synchronised backward that runs or ran last
        self._broken: MissingGradientError | None = None
        self._add_hooks()

    # ------------------------------------------------------------------ plan

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The present buckets, in launch order."""
        return self._layout.buckets

    def _add_hooks(self) -> None:
        for index, (bucket, position) in self._layout.where.items():
            hook = self._make_hook(bucket, position, index)
            self._handles.append(_register(self._params[index], hook))

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
        device = self._layout.device
        arrived = list(dict.fromkeys(self._first_order))
        present = set(arrived)
        rest = [i for i in range(len(self._params) - 1, -1, -1) if i not in present]
        order = torch.tensor(arrived + rest, dtype=torch.int64, device=device)
        self._first_order = None
        self.has_rebuilt = True
        self._group.wait(self._group.broadcast(order, 0), device)
        plan = self._layout.plan([int(i) for i in order.tolist()])
        if self._layout.holds(plan) and not self._is_static:
            return False  # a static graph's hooks must stop learning, even where the plan stays
        self.remove_hooks()
        self._layout.apply(plan, frozenset(i for i, count in enumerate(self._counts) if count > 1))
        self._add_hooks()
        return True

    # ------------------------------------------------------------------ start of a backward

    @property
    def has_hook(self) -> bool:
        """Whether a communication hook reduces the buckets."""
        return self._reduction.has_hook

    def set_hook(self, state: Any, hook: CommHook) -> None:
        """Lets `hook` reduce the buckets from the next backward on."""
        self._reduction.set_hook(state, hook)

    def arm(self, outputs: Any = None) -> None:
        """Expects every parameter's gradient in the next backward.

        Does not communicate, unless the last backward was interrupted: then it waits for what that had
        launched.

        Args:
            outputs: what the backward will start from, in nested containers. With `find_unused_parameters`
                its graph tells early which parameters get no gradient.

        Raises:
            MissingGradientError: a gradient was missing in an earlier step on some of the ranks only, so that
                their collectives no longer match.
        """
        if self._broken is not None:
            raise self._broken.copy()
        if self._is_running:
            self._is_running = False  # the last backward was interrupted
            self._drain()
        self._ready.clear()
        self._next = 0
        self._is_armed = True
        self._declared = {i for i, p in enumerate(self._params) if not p.requires_grad}
        for bucket in self.buckets:
            num_expected = bucket.size
            if self._declared or self._is_static:
                num_expected = sum(self._counts[i] for i in bucket.spec.indices if i not in self._declared)
            bucket.arm(num_expected)
        tensors = [t for t in find_tensors(outputs) if t.requires_grad]
        if self._finds_unused and not self._is_static:
            reached = reached_parameters(tensors)
            unreached = {i for i, p in enumerate(self._params) if id(p) not in reached}
            self._unreached = unreached - self._declared
        for tensor in tensors:
            tensor.register_hook(self._make_start_hook())

    def _make_start_hook(self) -> Callable[[torch.Tensor], None]:
        """A hook for an output: it runs first, and in the outermost of nested backwards."""
        owner = weakref.ref(self)

        def start(_grad: torch.Tensor) -> None:
            reducer = owner()
            if reducer is not None and reducer._is_armed:
                reducer._begin()

        return start

    def disarm(self) -> None:
        """Lets gradients accumulate without synchronisation until `arm`."""
        self._is_armed = False
        for bucket in self.buckets:
            bucket.armed = False

    def _drain(self) -> None:
        """Waits for what this backward has launched."""
        for bucket in self.buckets[: self._next]:
            if bucket.work is not None:
                self._wait(bucket)

    def _begin(self) -> None:
        """The first event of a synchronised backward."""
        if self._is_running:
            return
        self._is_running = True
        self.step += 1
        self._reduction.step = self.step
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if self._is_learning:
            return
        for index in self._declared | self._never_used:
            bucket, position = self._layout.where[index]
            bucket.fill_absent(position, self._reduction.scale)
        for bucket in self.buckets:
            if not bucket.num_pending:  # nobody expects anything of it: no rank launches it
                bucket.is_skipped = len(self._declared.intersection(bucket.spec.indices)) == bucket.size
                self._fill(bucket)
        self._mark_absent(self._unreached)

    def _mark_absent(self, indices: Iterable[int]) -> None:
        """Parameters that will get no gradient in this backward count as ready, with what they have."""
        for index in indices:
            bucket, position = self._layout.where[index]
            bucket.fill_absent(position, self._reduction.scale)
            bucket.num_pending -= max(self._counts[index], 1)
            if not bucket.num_pending:
                self._fill(bucket)

    # ------------------------------------------------------------------ gradients arrive

    def _make_hook(self, bucket: Bucket, position: int, index: int) -> Callable[[torch.Tensor], None]:
        owner = weakref.ref(self)  # parameters must not keep the reducer alive
        mark = self._ready.append
        note = self._used_unsynced.add if self._finds_unused else None
        is_early = position in bucket.early
        is_learning = self._is_learning

        def ready(_parameter: torch.Tensor) -> None:
            if not bucket.armed:
                if note is not None:
                    note(index)
                return
            mark(index)
            if is_learning:
                reducer = owner()
                if reducer is not None:
                    reducer._begin()
                return
            if is_early:
                reducer = owner()
                if reducer is not None:
                    reducer._copy_early(bucket, position)
            bucket.num_pending = left = bucket.num_pending - 1
            if left >= bucket.all_but_one or left <= 0:
                reducer = owner()
                if reducer is not None:
                    reducer._progress(bucket)

        return ready

    def _progress(self, bucket: Bucket) -> None:
        """A bucket got its first or its last gradient."""
        self._begin()
        if bucket.num_pending < 0:
            raise self._twice_error()
        if bucket.num_pending == 0:
            self._fill(bucket)

    def _fill(self, bucket: Bucket) -> None:
        """All that this bucket can get is there: it and those that waited for it are launched, in order."""
        if not bucket.is_skipped:
            try:
                with torch.no_grad():
                    bucket.copy_late(self._reduction.scale)
            except TypeError as error:
                raise self._vanished_error(bucket) from error
        bucket.is_full = True
        with self._lock:
            while self._next < len(self.buckets) and self.buckets[self._next].is_full:
                self._reduction.launch(self.buckets[self._next])
                self._next += 1

    def _copy_early(self, bucket: Bucket, position: int) -> None:
        try:
            with torch.no_grad():
                bucket.copy_early(position, self._reduction.scale)
        except TypeError as error:
            raise self._vanished_error(bucket) from error

    # ------------------------------------------------------------------ end of a backward

    def _finish(self) -> None:
        """Called by the autograd engine when all gradients of this backward are there."""
        self.disarm()
        if self._is_learning:
            self._learn()
        elif self._next < len(self.buckets):
            self._complete()
        absent = self._absent_indices()
        used = self._start_usage_exchange(absent)
        if not self.has_rebuilt and not (self._finds_unused and not self._is_static):
            self._first_order = list(self._ready)
        for bucket in self.buckets:
            if bucket.work is not None:
                self._wait(bucket)
            with torch.no_grad():
                bucket.copy_out()
        self._settle_absent(absent, used)
        self._used_unsynced.clear()
        self._is_running = False

    def _complete(self) -> None:
        """Backward is over and buckets are not full: parameters were not used, or it is an error."""
        arrived = set(self._ready)
        late = [
            i
            for i in range(len(self._params))
            if i not in arrived and i not in self._declared and i not in self._unreached and self._counts[i]
        ]
        if not self._finds_unused or self._is_static:
            self._is_running = False
            self._raise_missing([self._layout.names[i] for i in late])
        self._mark_absent(late)

    def _raise_missing(self, names: Sequence[str]) -> None:
        error = self._missing.report(self.step, names, self._next)
        if error.num_launched is None:
            self._broken = error.copy()
        else:
            self._drain()
        try:
            raise error
        finally:
            del error  # else it and this frame keep each other, and the process group, alive

    def _learn(self) -> None:
        """First step of a static graph: nothing was launched yet; what arrived is what will arrive."""
        counts = [0] * len(self._params)
        for index in self._ready:
            counts[index] += 1
        self._counts = counts
        self._never_used = {i for i, count in enumerate(counts) if not count}
        self._is_learning = False
        for bucket in self.buckets:
            with torch.no_grad():
                for position, index in enumerate(bucket.spec.indices):
                    if not counts[index]:
                        bucket.fill_absent(position, self._reduction.scale)
                    elif position in bucket.early:
                        bucket.copy_early(position, self._reduction.scale)
            bucket.num_pending = 0
            self._fill(bucket)

    def _absent_indices(self) -> list[int]:
        return [bucket.spec.indices[p] for bucket in self.buckets for p in sorted(bucket.absent)]

    def _start_usage_exchange(self, absent: Sequence[int]) -> tuple[Any, torch.Tensor] | None:
        """Tells all ranks which parameters this one used since the last synchronised backward."""
        if not (self._finds_unused or self._is_static):
            return None
        used = [1] * len(self._params)
        for index in absent:
            used[index] = int(index in self._used_unsynced and index not in self._declared)
        bitmap = torch.tensor(used, dtype=torch.int32, device=self._layout.device)
        return self._group.all_reduce(bitmap), bitmap

    def _settle_absent(self, absent: Sequence[int], used: tuple[Any, torch.Tensor] | None) -> None:
        counts: list[int] | None = None
        if used is not None:
            work, bitmap = used
            self._group.wait(work, bitmap.device)
            counts = bitmap.tolist() if absent else None
        with torch.no_grad():
            for index in absent:
                bucket, position = self._layout.where[index]
                is_used = counts is not None and counts[index] > 0 and index not in self._declared
                bucket.take_absent(position, is_used)

    def _wait(self, bucket: Bucket) -> None:
        try:
            self._reduction.wait(bucket, self._missing.watch(self.step, self._next))
        except MissingGradientError as error:
            self._broken = error.copy()
            raise

    # ------------------------------------------------------------------ errors

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
        names = [self._layout.names[i] for i, n in counts.items() if n > self._counts[i]]
        return BackwardOrderError(
            f"rank {self._group.rank}, step {self.step}: more than one gradient in one backward for"
            f" {', '.join(names)}. Re-entrant activation checkpointing does that: use"
            " torch.utils.checkpoint(..., use_reentrant=False)."
        )


def _register(parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    """Registers a hook, also on a parameter whose gradient is switched off at the moment."""
    is_on = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(is_on)
    return handle

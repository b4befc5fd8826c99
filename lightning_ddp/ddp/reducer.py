"""The reducer: autograd hooks -> bucket full -> launch in order -> finish.

Buckets are launched in index order, so that all ranks issue their collectives in the same order. After the
first synchronized backward they are planned again, in the order in which the gradients became ready on rank 0
(Li et al., "PyTorch Distributed", VLDB 2020, section 3.2).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from lightning_ddp._torch import queue_callback
from lightning_ddp.comm.group import Group
from lightning_ddp.ddp.bucket import NETWORK_CAPS_BYTES, Bucket, BucketLayout, BucketSpec, ReducerOptions
from lightning_ddp.ddp.gradients import (
    BackwardFailures,
    Gradients,
    find_tensors,
    hook_gradients,
    refuse_double_backward,
    remove_hooks,
)
from lightning_ddp.ddp.reduction import BackwardState, CommHook, Reduction
from lightning_ddp.errors import CommHookError, MissingGradientError
from lightning_ddp.shm.hosts import Hosts
from lightning_ddp.shm.shared_memory import SharedMemory
from lightning_ddp.telemetry.step_record import StepRecorder

_Hook = Callable[[torch.Tensor], None]


class Reducer:
    """Engine that averages the gradients of `parameters` over the ranks of `group`, in buckets.

    The parameters, all of which require gradients, are in the same order on all ranks. If some ranks share a
    host, construction is collective.

    Args:
        device: device of the small tensors of exchanges between ranks.
        token: the same on all ranks, different for every reducer.
        sparse: positions of the parameters whose gradients are sparse tensors.
        hosts: hosts of the ranks, to share memory within a host; None to use the group only.
        before_finish: called at the end of a synchronized backward, before gradients are written.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        group: Group,
        *,
        device: torch.device,
        token: str,
        options: ReducerOptions,
        sparse: frozenset[int] = frozenset(),
        hosts: Hosts | None = None,
        before_finish: Callable[[], None] | None = None,
    ) -> None:
        if hosts is not None and len(hosts.by_host) > 1 and options.are_caps_default:
            options = replace(options, caps_bytes=(*NETWORK_CAPS_BYTES, options.caps_bytes[-1]))
        memory = SharedMemory(group, hosts) if hosts is not None and hosts.are_shared else None
        self.layout = BucketLayout(parameters, names, options, sparse, memory, group)
        if memory is not None and not memory.connect():
            memory = None
        self._params = self.layout.params
        self._group = group
        self._device = device
        self.reduction = Reduction(group, memory)
        self.failures = BackwardFailures(group, token, self.layout.names)
        self._lock = threading.Lock()
        self._beginning = threading.RLock()  # autograd has a thread for each device
        self._gradients = Gradients(self.layout, options, self.reduction, self.failures, group, device)
        self._handles: list[Any] = []
        self._next_handle = -1  # id of torch's next handle of a hook, of any kind, after the last `arm`
        self._are_hooks_learning = options.static_graph
        # The hooks on the parameters would keep the buckets alive after the reducer.
        weakref.finalize(self, remove_hooks, self._handles).atexit = False
        self._on_leaves: list[Any] = []
        self._backward: BackwardState | None = None
        self._before_finish = before_finish
        self.after_bucket: Callable[[Bucket], None] | None = None
        """Function that takes each bucket once its means are in `.grad`; later ones may still be reduced."""
        self.futures: list[Any] = []
        """Futures of buffer hooks; awaited at the end of the next synchronized backward."""
        self.recorder = StepRecorder(device)
        self.step = -1  # number of the synchronized backward that runs or ran last
        self.has_rebuilt = False
        """True once the buckets were planned again after the first synchronized backward."""
        self._first_order: list[int] | None = None
        self._renew_hooks()

    # ------------------------------------------------------------------ plan

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The current buckets, in the order in which their reductions start."""
        return self.layout.buckets

    def close(self) -> None:
        """Remove the hooks from the parameters, and stop the thread that reduces, if there is one."""
        remove_hooks(self._handles)
        remove_hooks(self._on_leaves)
        self.reduction.close()

    def make_static(self) -> None:
        """Treat the graph as static; call it before the first step, which then records the graph."""
        self._gradients.is_static = self._gradients.is_learning = self._are_hooks_learning = True
        self._renew_hooks()

    def rebuild(self) -> None:
        """Rebuild the buckets once, in the order in which gradients became ready on rank 0.

        Collective: all ranks must call it before each forward; communicates before the second step only.
        """
        if self._first_order is None:
            if self._are_hooks_learning and not self._gradients.is_learning:
                # This rank had no input yet in the step after which all ranks planned again.
                self._apply([bucket.spec for bucket in self.buckets])
            return
        rest = range(len(self._params) - 1, -1, -1)
        order = torch.tensor(list(dict.fromkeys([*self._first_order, *rest])), device=self._device)
        self._first_order = None
        self.has_rebuilt = True
        self._group.wait(self._group.broadcast(order, 0), self._device)
        plan = self.layout.plan(order.tolist())
        present = tuple(bucket.spec for bucket in self.buckets)
        if self._gradients.is_static or plan != present:  # static: replace the learning hooks
            self._apply(plan)

    def _note_order(self, order: Sequence[int]) -> None:
        """Store the order of arrival in the first synchronized backward, by which `rebuild` plans buckets."""
        if not self.has_rebuilt and not self._gradients.may_lack:
            self._first_order = list(order)

    def _apply(self, plan: Sequence[BucketSpec]) -> None:
        self.layout.apply(plan, frozenset(i for i, count in enumerate(self._gradients.counts) if count > 1))
        self._are_hooks_learning = self._gradients.is_learning
        self._renew_hooks()

    # ------------------------------------------------------------------ hooks of autograd

    def _renew_hooks(self) -> None:
        """Replace the autograd hooks of all parameters, also if `requires_grad` is off at the moment."""
        remove_hooks(self._handles)
        for index, (bucket, position) in self.layout.where.items():
            hook, parameter = self._make_hook(bucket, position, index), self._params[index]
            if bucket.streams is not None:
                hook = _noting_stream(hook, bucket.streams.note)
            is_on = parameter.requires_grad
            parameter.requires_grad_(True)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
            parameter.requires_grad_(is_on)
        self._hooks_by_id = [handle.hooks_dict_ref() for handle in self._handles]

    def _keep_hooks_last(self) -> None:
        """Renew the hooks if a parameter has got another one, which then runs before ours, as with torch."""
        last = [*map(next, map(reversed, self._hooks_by_id))]  # shorter if a parameter has no hook any more
        if self._handles and last != [handle.id for handle in self._handles]:
            self._renew_hooks()

    def _make_hook(self, bucket: Bucket, position: int, index: int) -> _Hook:
        """Return a parameter's gradient hook, which counts arrivals and starts a full bucket's reduction."""
        owner = weakref.ref(self)  # parameters must not keep the reducer alive
        is_early = position in bucket.early and not self._are_hooks_learning
        note_unsynced = self._gradients.unsynced.add if self._gradients.finds_unused else None

        def ready(_parameter: torch.Tensor) -> None:
            if not bucket.armed:
                if note_unsynced is not None:
                    note_unsynced(index)
                return
            bucket.ready.append(index)
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

    # ------------------------------------------------------------------ start of a backward

    def set_hook(self, state: Any, hook: CommHook) -> None:
        """Reduce the buckets with the communication hook `hook` from the next backward on."""
        self.reduction.set_hook(state, hook)
        if self.layout.is_shared:  # a hook may do anything with its tensor, such as resize it
            self.layout.leave_shared_memory()
            self._renew_hooks()
            if self._backward is not None and self._backward.is_armed:
                self._gradients.arm(self._backward.ready)

    def arm(self, outputs: Any = None, absent: Iterable[int] = ()) -> None:
        """Prepare to average the gradients of the next backward, which starts from the tensors in `outputs`.

        Parameters in `absent` get no gradient on any rank, nor do those with `requires_grad` off. If the last
        backward was interrupted, wait for the reductions that it had launched.
        """
        self.failures.check_usable()
        interrupted, self._backward = self._backward, None
        if interrupted is not None and interrupted.is_running:
            self._abandon(interrupted, waits=True)
        if RemovableHandle.next_id != self._next_handle:
            self._keep_hooks_last()
        state = BackwardState()
        tensors = list(find_tensors(outputs))
        self._gradients.prepare(tensors, absent)
        self._gradients.arm(state.ready)
        self._backward = state
        owner = weakref.ref(self)

        def start(_grad: torch.Tensor) -> None:
            reducer = owner()
            if reducer is not None and reducer._backward is not None and reducer._backward.is_armed:
                reducer.begin()

        # These hooks run first, and in the outermost of nested backwards.
        hook_gradients(tensors, start, self._on_leaves)
        self._next_handle = RemovableHandle.next_id

    def _abandon(self, state: BackwardState, *, waits: bool) -> None:
        """Restore `.grad` where a failed backward gave none; with `waits`, first await its reductions."""
        for bucket in self.buckets[: state.num_taken] if waits else ():
            if bucket.work is not None:
                with suppress(CommHookError):
                    self._wait(bucket, state)
        ready = set(state.ready)
        for bucket in self.buckets:
            for position in bucket.absent:
                bucket.take_absent(position, is_used=False)
            bucket.withdraw(ready)

    def _count_step(self, state: BackwardState) -> None:
        self.step += 1
        state.step = self.step
        state.begun_at = time.monotonic()

    def begin(self) -> BackwardState:
        """Start the synchronized backward at its first gradient, unless it is running; return its state.

        Thread-safe.
        """
        with self._beginning:
            state = self._backward
            assert state is not None  # buckets are armed, so a forward has made it
            if not state.is_running:
                self._begin(state)
            return state

    def _begin(self, state: BackwardState) -> None:
        self._count_step(state)
        state.creates_graph = torch.is_grad_enabled()
        self.recorder.start_backward(self.step)
        queue_callback(self._finish)
        if self._gradients.is_learning:
            return
        for bucket in self._gradients.start():
            self._fill(bucket, state)
        if not self._gradients.are_counted:  # with a view of zeros, unused parameters could not be detected
            for bucket in self.buckets:
                bucket.open()

    # ------------------------------------------------------------------ gradients arrive

    def _progress(self, bucket: Bucket) -> None:
        """Start the backward at a bucket's first gradient, its reduction at the last; refuse further ones."""
        state = self.begin()
        if bucket.num_pending < 0:
            raise self._gradients.ready_twice(state)
        if bucket.num_pending == 0:
            self._fill(bucket, state)

    def _fill(self, bucket: Bucket, state: BackwardState) -> None:
        """Copy gradients into a full bucket that it still lacks; launch the full buckets whose turn it is."""
        self.recorder.ready(bucket.index(), bucket.flat)
        if bucket.streams is not None:
            bucket.streams.join()
        if not bucket.is_skipped:
            with torch.no_grad():
                try:
                    bucket.copy_late(self.reduction.scale)
                except TypeError as error:
                    self._gradients.take_undefined(bucket, range(bucket.size), error, state)
                    bucket.copy_late(self.reduction.scale)
        bucket.is_full = True
        buckets = self.layout.buckets
        with self._lock:
            while state.num_taken < len(buckets) and buckets[state.num_taken].is_full:
                following = buckets[state.num_taken]
                if following.streams is not None:  # it may have become full on another stream
                    following.streams.join()
                self.reduction.launch(following, state)
                self.recorder.launched(state.num_taken, following.work)
                state.num_taken += 1

    def _copy_early(self, bucket: Bucket, position: int) -> None:
        """Copy a large gradient into its bucket when it arrives, while it is in the processor's cache."""
        with torch.no_grad():
            try:
                bucket.copy_early(position, self.reduction.scale)
            except TypeError as error:
                self._gradients.take_undefined(bucket, [position], error, self.begin())

    # ------------------------------------------------------------------ end of a backward

    def _finish(self) -> None:
        """Complete the averages and write them to `.grad`; called by autograd at the end of a backward."""
        state = self._backward
        assert state is not None
        self.recorder.end_backward()
        state.is_armed = False
        for bucket in self.buckets:
            bucket.armed = False
        self._close_buckets(state)
        absent = self._gradients.absent()
        exchange = self._gradients.start_exchange(absent)
        self._note_order(state.ready)
        self._hand_out(state)
        self._gradients.settle(absent, exchange)
        if self.after_bucket is not None:
            for bucket in self.buckets:
                if bucket.absent:  # only now it has the means of parameters that other ranks have used
                    self.after_bucket(bucket)
        self._await_buffers()
        if state.creates_graph:
            refuse_double_backward(self._params)
        self.recorder.finish()
        self._backward = None

    def _await_buffers(self) -> None:
        while self.futures:
            future = self.futures.pop()
            self._group.wait_done(future)
            future.wait()

    def _close_buckets(self, state: BackwardState) -> None:
        """Start the remaining reductions at the end of a backward, or raise if gradients are missing."""
        if self._gradients.is_learning:
            self._gradients.learn(state.ready)
            for bucket in self.buckets:
                self._fill(bucket, state)
        elif state.num_taken < len(self.buckets):
            late = self._gradients.late(state)
            if not self._gradients.may_lack:
                self._raise_missing(late, state)
            for bucket in self._gradients.mark_absent(late):
                self._fill(bucket, state)

    def _raise_missing(self, late: Sequence[int], state: BackwardState) -> NoReturn:
        error = self.failures.missing(state.step, late, state.num_taken)
        self._backward = None
        self._abandon(state, waits=error.can_continue)
        try:
            raise error
        finally:
            del error  # A cycle of the error and this frame would keep the process group alive.

    def _hand_out(self, state: BackwardState) -> None:
        """Wait for the buckets in launch order, and write their means to `.grad`."""
        if self._before_finish is not None:
            self._before_finish()
        for bucket in self.buckets:
            if bucket.work is not None:
                self._wait(bucket, state)
                self.recorder.done(bucket.index())
            with torch.no_grad():
                bucket.copy_out()
            if self.after_bucket is not None and not bucket.absent:
                self.after_bucket(bucket)
        if self._device.type == "cuda":
            label = f"averaging of gradients, backward {state.step}"
            self._group.watch_device(self._device, label, state.begun_at, self._watch(state))

    def shadow_backward(self) -> None:
        """Take part with zeros in a synchronized backward of the other ranks, on a rank without input."""
        state = BackwardState(num_taken=len(self.buckets))
        self._count_step(state)
        # the other ranks skip buckets whose parameters are all switched off, but where they learn the graph
        learns = self._gradients.is_static and state.step == 0
        due = [b for b in self.buckets if learns or any(p.requires_grad for p in b.params)]
        zeros = [bucket.zeros() for bucket in due]
        for bucket in zeros:
            self.reduction.launch(bucket, state)
        exchange = self._gradients.start_exchange(None)
        for bucket in zeros:
            if bucket.work is not None:
                self._wait(bucket, state)
        self._gradients.settle((), exchange)
        self._await_buffers()
        self._note_order(())

    def _wait(self, bucket: Bucket, state: BackwardState) -> None:
        try:
            self.reduction.wait(bucket, state, self._watch(state))
        except MissingGradientError as error:
            self.failures.note(error)
            raise

    def _watch(self, state: BackwardState) -> Callable[[float], None]:
        """Return a callback for waits of this backward that raises if another rank lacks gradients."""
        return self.failures.watch(state.step, state.num_taken)

    def _run_allreduce_hook(self, bucket: Any) -> Any:
        """Start the sum of a bucket over the ranks; return its future. torch's own hooks call this method."""
        return self._group.all_reduce(bucket.buffer()).get_future()


def _noting_stream(hook: _Hook, note: Callable[[], None]) -> _Hook:
    def noting(parameter: torch.Tensor) -> None:
        note()
        hook(parameter)

    return noting

"""The reducer: autograd hooks -> bucket full -> launch in order -> finish.

One hook a parameter counts it as ready. A full bucket is averaged over the ranks asynchronously while
backward goes on; buckets are launched in index order, so that all ranks issue their collectives in one
order whatever order their gradients have. A callback of the autograd engine waits for them at the end of
backward. After the first synchronized backward the buckets are planned again, in the order in which the
gradients became ready on rank 0 (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2).

What one backward knows is its `BackwardState`, made by its forward and dropped when it is over.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from lightning_ddp._torch import queue_callback
from lightning_ddp.comm.group import Group
from lightning_ddp.ddp.bucket import Bucket, BucketSpec
from lightning_ddp.ddp.gradient_errors import BackwardFailures, MissingGradients, refuse_double_backward
from lightning_ddp.ddp.gradients import Gradients, find_tensors
from lightning_ddp.ddp.layout import BucketLayout, ReducerOptions
from lightning_ddp.ddp.reduction import BackwardState, CommHook, Reduction
from lightning_ddp.errors import CommHookError, MissingGradientError
from lightning_ddp.shm.hosts import Hosts
from lightning_ddp.shm.shared_memory import SharedMemory
from lightning_ddp.telemetry.step_record import StepRecorder

_Hook = Callable[[torch.Tensor], None]


class Reducer:
    """Averages the gradients of `parameters` over the ranks of `group`, in buckets.

    Args:
        parameters: all of them require gradients; on all ranks the same, in one order.
        names: their qualified names.
        group: the ranks.
        device: where small tensors of the exchange between ranks live.
        token: the same on all ranks, different for every reducer.
        options: how gradients are bucketed and what is expected of a backward.
        sparse: positions of the parameters whose gradients are sparse tensors.
        hosts: where the ranks are, if those of a host are to share memory; None if that is of no interest.
            Where some share a host, construction communicates.
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
    ) -> None:
        if hosts is not None and len(hosts.by_host) > 1:
            options = options.for_network()
        memory = SharedMemory(group, hosts) if hosts is not None and hosts.are_shared else None
        self.layout = BucketLayout(parameters, names, options=options, sparse=sparse, memory=memory)
        if memory is not None and not memory.connect():
            memory = None
        self._params = self.layout.params
        self._group = group
        self._device = device
        self.reduction = Reduction(group, device, token, memory)
        board = MissingGradients(group, token, device)
        self.failures = BackwardFailures(board, self.layout.names, raises_at_once=options.raises_at_once)
        self._lock = threading.Lock()
        self._beginning = threading.RLock()  # autograd has a thread for each device
        self._gradients = Gradients(self.layout, options, self.reduction, self.failures, group, device)
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles).atexit = False  # else its hooks keep the buckets
        self._backward: BackwardState | None = None
        self.before_finish: Callable[[], None] | None = None
        """Called at the end of a synchronized backward, before gradients are written."""
        self.after_bucket: Callable[[Bucket], None] | None = None
        """Called with each bucket once its means are in `.grad`, while later ones are still on their way."""
        self.futures: list[Any] = []
        """What else the end of the next synchronized backward waits for."""
        self.recorder = StepRecorder(device)
        """What is told of each moment of a step."""
        self.step = -1  # number of the synchronized backward that runs or ran last
        self.has_rebuilt = False
        """Whether the buckets were planned anew after the first synchronized backward."""
        self.order: list[int] = []
        """Parameters in the order in which their gradients became ready on rank 0, as of that."""
        self.absent: frozenset[int] | None = None
        """Parameters without a gradient in the last synchronized backward."""
        self.is_absent_static = True
        """Whether these were always the same."""
        self.num_reduced = 0
        """Buckets reduced in the last synchronized backward."""
        self._first_order: list[int] | None = None
        self._add_hooks()

    # ------------------------------------------------------------------ plan

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The present buckets, in launch order."""
        return self.layout.buckets

    def close(self) -> None:
        """Takes its hooks off the parameters, and ends the thread that reduces, if there is one."""
        _remove(self._handles)
        self.reduction.close()

    def make_static(self) -> None:
        """Takes every step to have the graph of the first one, which is still to come."""
        with self._hooks_renewed():
            self._gradients.is_static = self._gradients.is_learning = True

    def rebuild(self) -> None:
        """Plans the buckets anew, once, in the order in which gradients became ready on rank 0.

        Called before each forward on all ranks. Communicates before the second synchronized step.
        """
        if self._first_order is None:
            if self._are_hooks_learning and not self._gradients.is_learning:
                # this rank had no input yet in the step after which all of them planned anew
                self._apply([bucket.spec for bucket in self.buckets])
            return
        rest = range(len(self._params) - 1, -1, -1)
        order = torch.tensor(list(dict.fromkeys([*self._first_order, *rest])), device=self._device)
        self._first_order = None
        self.has_rebuilt = True
        self._group.wait(self._group.broadcast(order, 0), self._device)
        self.order = order.tolist()
        plan = self.layout.plan(self.order)
        if self._gradients.is_static or not self.layout.holds(plan):  # hooks of the first must stop learning
            self._apply(plan)

    def _note_order(self, order: Sequence[int]) -> None:
        """A synchronized backward ends; the first one tells the order of the gradients."""
        if not self.has_rebuilt and not self._gradients.may_lack:
            self._first_order = list(order)

    def _apply(self, plan: Sequence[BucketSpec]) -> None:
        several = frozenset(i for i, count in enumerate(self._gradients.counts) if count > 1)
        with self._hooks_renewed():
            self.layout.apply(plan, several)

    # ------------------------------------------------------------------ hooks of autograd

    @contextmanager
    def _hooks_renewed(self) -> Generator[None, None, None]:
        """For changes of the buckets or of what is expected: hooks are off meanwhile, new ones on after."""
        _remove(self._handles)
        yield
        self._add_hooks()

    def _add_hooks(self) -> None:
        """Puts a hook on each parameter, also on one whose gradient is switched off at the moment."""
        self._are_hooks_learning = self._gradients.is_learning
        make = self._make_learning_hook if self._are_hooks_learning else self._make_hook
        for index, (bucket, position) in self.layout.where.items():
            hook, parameter = make(bucket, position, index), self._params[index]
            if bucket.streams is not None:
                hook = _noting_stream(hook, bucket.streams.note)
            is_on = parameter.requires_grad
            parameter.requires_grad_(True)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
            parameter.requires_grad_(is_on)

    def _make_learning_hook(self, bucket: Bucket, _position: int, index: int) -> _Hook:
        """In the first backward of a static graph gradients are only noted."""
        owner = weakref.ref(self)

        def ready(_parameter: torch.Tensor) -> None:
            if not bucket.armed:
                return
            bucket.ready.append(index)
            reducer = owner()
            if reducer is not None:
                reducer.begin()

        return ready

    def _make_hook(self, bucket: Bucket, position: int, index: int) -> _Hook:
        """The hottest code of a step: counts down the bucket; parameters do not keep the reducer alive."""
        owner = weakref.ref(self)
        is_early = position in bucket.early
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
        """Lets `hook` reduce the buckets from the next backward on."""
        self.reduction.set_hook(state, hook)
        if self.layout.is_shared:  # a hook may do anything with its tensor, such as to resize it
            with self._hooks_renewed():
                self.layout.leave_shared_memory()
            if self._backward is not None and self._backward.is_armed:
                self._arm_buckets(self._backward)

    def arm(self, outputs: Any = None, absent: Iterable[int] = ()) -> None:
        """Expects every parameter's gradient in the next backward.

        Does not communicate, unless the last backward was interrupted: then it waits for what that had
        launched.

        Args:
            outputs: what the backward will start from, in nested containers. With `find_unused_parameters`
                its graph tells early which parameters get no gradient.
            absent: parameters that get no gradient on any rank, besides those with `requires_grad` off.

        Raises:
            BackwardOrderError, MissingGradientError: the ranks cannot go on after an earlier step.
        """
        self.failures.check_usable()
        interrupted, self._backward = self._backward, None
        if interrupted is not None and interrupted.is_running:
            self._abandon(interrupted, waits=True)
        state = BackwardState()
        tensors = [t for t in find_tensors(outputs) if t.requires_grad]
        self._gradients.prepare(tensors, absent)
        self._arm_buckets(state)
        self._backward = state
        for tensor in tensors:
            tensor.register_hook(self._make_start_hook())

    def _arm_buckets(self, state: BackwardState) -> None:
        for bucket in self.buckets:
            bucket.arm(self._gradients.num_in(bucket), state.ready)

    def _make_start_hook(self) -> Callable[[torch.Tensor], None]:
        """A hook for an output: it runs first, and in the outermost of nested backwards."""
        owner = weakref.ref(self)

        def start(_grad: torch.Tensor) -> None:
            reducer = owner()
            if reducer is not None and reducer._backward is not None and reducer._backward.is_armed:
                reducer.begin()

        return start

    def disarm(self) -> None:
        """Lets gradients accumulate without synchronization until `arm`."""
        if self._backward is not None:
            self._backward.is_armed = False
        for bucket in self.buckets:
            bucket.armed = False

    def _abandon(self, state: BackwardState, *, waits: bool) -> None:
        """After a backward that has failed; may wait for what it has launched, of which nothing is used."""
        for bucket in self.buckets[: state.num_taken] if waits else ():
            if bucket.work is not None:
                with suppress(CommHookError):
                    self._wait(bucket, state)
        ready = set(state.ready)
        for bucket in self.buckets:
            bucket.withdraw(ready)

    def _count_step(self, state: BackwardState) -> None:
        self.step += 1
        state.step = self.step
        state.begun_at = time.monotonic()

    def begin(self) -> BackwardState:
        """The first event of a synchronized backward. In every thread it returns once that is dealt with."""
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
        if not self._gradients.are_counted:  # who counts wants to know what none has used
            for bucket in self.buckets:
                bucket.open()

    # ------------------------------------------------------------------ gradients arrive

    def _progress(self, bucket: Bucket) -> None:
        """A bucket got its first or its last gradient."""
        state = self.begin()
        if bucket.num_pending < 0:
            raise self._gradients.ready_twice(state)
        if bucket.num_pending == 0:
            self._fill(bucket, state)

    def _fill(self, bucket: Bucket, state: BackwardState) -> None:
        """All that this bucket can get is there: it and those that waited for it are launched, in order."""
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
                self.recorder.launching()
                try:
                    self.reduction.launch(following, state, self._watch(state))
                except (CommHookError, MissingGradientError) as error:
                    self.failures.note(error)
                    raise
                self.recorder.launched(state.num_taken, following.work)
                state.num_taken += 1

    def _copy_early(self, bucket: Bucket, position: int) -> None:
        """A large gradient is there: into the bucket while it is in the cache."""
        with torch.no_grad():
            try:
                bucket.copy_early(position, self.reduction.scale)
            except TypeError as error:
                self._gradients.take_undefined(bucket, [position], error, self.begin())

    # ------------------------------------------------------------------ end of a backward

    def _finish(self) -> None:
        """Called by the autograd engine when all gradients of this backward are there."""
        state = self._backward
        assert state is not None
        self.recorder.end_backward()
        self.disarm()
        if self._gradients.is_learning:  # first step of a static graph: nothing was launched yet
            self._gradients.learn(state.ready)
            for bucket in self.buckets:
                self._fill(bucket, state)
        elif state.num_taken < len(self.buckets):
            self._complete(state)
        absent = self._gradients.absent()
        exchange = self._gradients.start_exchange(absent)
        missing = frozenset(absent)
        self.is_absent_static = self.is_absent_static and self.absent in (None, missing)
        self.absent, self.num_reduced = missing, state.num_launched
        if not state.is_skipped:
            self._note_order(state.ready)
        if self.before_finish is not None:
            self.before_finish()
        for bucket in self.buckets:
            if bucket.work is not None:
                self._wait(bucket, state)
                self.recorder.done(bucket.index())
            with torch.no_grad():
                bucket.copy_out()
            if self.after_bucket is not None:
                self.after_bucket(bucket)
        if self._device.type == "cuda":
            label = f"averaging of gradients, backward {state.step}"
            self._group.watch_device(self._device, label, state.begun_at, self._watch(state))
        self._gradients.settle(absent, exchange)
        while self.futures:
            self._group.wait_future(self.futures.pop())
        if state.creates_graph:
            refuse_double_backward(self._params)
        self.recorder.finish()
        self._backward = None

    def _complete(self, state: BackwardState) -> None:
        """Backward is over and buckets are not full: parameters were not used, or it is an error."""
        full, error = self._gradients.complete(state)
        for bucket in full:
            self._fill(bucket, state)
        if error is None:
            return
        self._backward = None
        self._abandon(state, waits=error.num_launched is not None)  # the same on all ranks
        try:
            raise error
        finally:
            del error  # else it and this frame keep each other, and the process group, alive

    def shadow_backward(self) -> None:
        """Takes part in the communication of one synchronized backward of the others, with zeros.

        For a rank that has no input left. Its gradients stay as they are. Communicates as their backward.
        """
        state = BackwardState()
        self._count_step(state)
        zeros = [bucket.zeros() for bucket in self.buckets]
        for bucket in zeros:
            self.reduction.launch(bucket, state, self._watch(state))
        exchange = self._gradients.start_exchange(None)
        for bucket in zeros:
            if bucket.work is not None:
                self._wait(bucket, state)
        self._gradients.settle((), exchange)
        self._note_order(())

    def _wait(self, bucket: Bucket, state: BackwardState) -> None:
        try:
            self.reduction.wait(bucket, state, self._watch(state))
        except (CommHookError, MissingGradientError) as error:
            self.failures.note(error)
            raise

    def _watch(self, state: BackwardState) -> Callable[[float], None]:
        """Looks, in the waits of this backward, at what other ranks miss."""
        return self.failures.board.watch(state.step, state.num_taken)

    def _run_allreduce_hook(self, bucket: Any) -> Any:
        """By this name hooks of torch's library have a bucket summed; returns a future."""
        return self._group.all_reduce(bucket.buffer()).get_future()


def _remove(handles: list[Any]) -> None:
    """Takes hooks off the parameters."""
    while handles:
        handles.pop().remove()


def _noting_stream(hook: _Hook, note: Callable[[], None]) -> _Hook:
    def noting(parameter: torch.Tensor) -> None:
        note()
        hook(parameter)

    return noting

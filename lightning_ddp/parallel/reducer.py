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
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from lightning_ddp.comm.group import Group
from lightning_ddp.comm.hosts import Hosts
from lightning_ddp.comm.shared_memory import SharedMemory
from lightning_ddp.errors import BackwardOrderError, CommHookError, MissingGradientError
from lightning_ddp.observe.record import StepRecorder
from lightning_ddp.parallel.buckets import BucketSpec
from lightning_ddp.parallel.expected import ExpectedGradients
from lightning_ddp.parallel.failures import BackwardFailures
from lightning_ddp.parallel.layout import BucketLayout
from lightning_ddp.parallel.missing import MissingGradients
from lightning_ddp.parallel.options import ReducerOptions
from lightning_ddp.parallel.ready import GradientHooks
from lightning_ddp.parallel.reduction import CommHook, Reduction
from lightning_ddp.parallel.run_times import RunTimes
from lightning_ddp.parallel.second_order import refuse_double_backward
from lightning_ddp.parallel.step_facts import StepFacts
from lightning_ddp.parallel.storage import Bucket
from lightning_ddp.parallel.torch_compat import ReducerTorchNames
from lightning_ddp.parallel.unused import UsageExchange, find_tensors, settle_absent

if TYPE_CHECKING:
    from lightning_ddp.parallel.auto_plan import AutoPlan
    from lightning_ddp.parallel.plan_report import BucketPlanReport

__all__ = ["Reducer"]


class Reducer(ReducerTorchNames):
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
        self.options = options
        memory = SharedMemory(group, hosts) if hosts is not None and hosts.are_shared else None
        self.layout = BucketLayout(parameters, names, options=options, sparse=sparse, memory=memory)
        if memory is not None and not memory.connect():
            memory = None
        self.times = RunTimes(device)
        self._params = self.layout.params
        self._device = device
        self._group = group
        self._reduction = Reduction(group, device, token, memory)
        board = MissingGradients(group, token)
        self.failures = BackwardFailures(
            group, board, self.layout.names, raises_at_once=options.raises_at_once
        )
        self._expected = ExpectedGradients(
            self._params, finds_unused=options.find_unused_parameters, is_static=options.static_graph
        )
        self._lock = threading.Lock()
        self._ready: list[int] = []
        self._hooks = GradientHooks(self, self._ready)
        weakref.finalize(self, self._hooks.remove).atexit = False  # else its hooks keep the buckets
        self._next = 0
        self._is_armed = False
        self._is_running = False
        self._creates_graph = False
        self._first_order: list[int] | None = None
        self.usage = UsageExchange(group, len(self._params), device)
        self.before_finish: Callable[[], None] | None = None
        """Called at the end of a synchronised backward, before gradients are written."""
        self.after_bucket: Callable[[Bucket], None] | None = None
        """Called with each bucket once its means are in `.grad`, while later ones are still on their way."""
        self.futures: list[Any] = []
        """What else the end of the next synchronised backward waits for."""
        self.recorder: StepRecorder | None = None
        """What is told of each moment of a step, if somebody wants to know."""
        self.facts = StepFacts()
        self.step = -1  # number of the synchronised backward that runs or ran last
        self.plan_report: BucketPlanReport | None = None
        """What an automatic plan was chosen by, once it is."""
        self.auto_plan: AutoPlan | None = None
        """What chooses the plan, as long as it does."""
        if options.is_auto:
            from lightning_ddp.parallel.auto_plan import AutoPlan, obstacle_to_planning

            lacks = self._expected.may_lack
            obstacle = obstacle_to_planning(self.layout, group, self._reduction, finds_unused=lacks)
            self.auto_plan = AutoPlan(self.layout, group, self._reduction, self._ready, obstacle)
        self._add_hooks()

    # ------------------------------------------------------------------ plan

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The present buckets, in launch order."""
        return self.layout.buckets

    def _add_hooks(self) -> None:
        expected = self._expected
        note = self.usage.unsynced.add if expected.finds_unused else None
        self._hooks.mark = self._ready.append
        if self.auto_plan is not None and self.auto_plan.is_timing:
            self._hooks.mark = self.auto_plan.times.make_mark()
        self._hooks.add(self.layout, is_learning=expected.is_learning, note_unsynced=note)

    def remove_hooks(self) -> None:
        """Takes the reducer's hooks off the parameters; their gradients are no longer averaged."""
        self._hooks.remove()

    def close(self) -> None:
        """Takes the hooks off, and ends the thread that reduces, if there is one."""
        self.remove_hooks()
        self._reduction.close()

    def make_static(self) -> None:
        """Takes every step to have the graph of the first one, which is still to come."""
        self._expected.is_static = self._expected.is_learning = True
        self.remove_hooks()
        self._add_hooks()

    def rebuild(self) -> bool:
        """Plans the buckets anew, once, in the order in which gradients became ready on rank 0.

        Called before each forward on all ranks. Communicates before the second synchronised step, and with
        an automatic plan in some of the first ones. That may change the buckets several times.

        Returns:
            Whether the buckets have changed.
        """
        if self._first_order is None:
            return self.auto_plan is not None and self._follow(self.auto_plan)
        device = self._device
        arrived = list(dict.fromkeys(self._first_order))
        present = set(arrived)
        rest = [i for i in range(len(self._params) - 1, -1, -1) if i not in present]
        order = torch.tensor(arrived + rest, dtype=torch.int64, device=device)
        self._first_order = None
        self.facts.has_rebuilt = True
        self._group.wait(self._group.broadcast(order, 0), device)
        self.facts.order = [int(i) for i in order.tolist()]
        plan = self.layout.plan(self.facts.order)
        if self.auto_plan is not None:
            self.auto_plan.start(self.step, self.facts.order, plan)
        elif self.layout.holds(plan) and not self._expected.is_static:
            return False  # a static graph's hooks must stop learning, even where the plan stays
        self._apply(plan)
        return True

    def _follow(self, auto_plan: AutoPlan) -> bool:
        """Does what the automatic plan says. Returns whether the buckets have changed."""
        plan = auto_plan.next_plan(self.step)
        if auto_plan.report is not None:
            self.plan_report = auto_plan.report
            self.auto_plan = None
        if plan is not None:
            self._apply(plan)
        return plan is not None

    def _apply(self, plan: Sequence[BucketSpec]) -> None:
        self.remove_hooks()
        several = frozenset(i for i, count in enumerate(self._expected.counts) if count > 1)
        self.layout.apply(plan, several)
        self._add_hooks()

    # ------------------------------------------------------------------ start of a backward

    @property
    def has_hook(self) -> bool:
        """Whether a communication hook reduces the buckets."""
        return self._reduction.has_hook

    def set_hook(self, state: Any, hook: CommHook) -> None:
        """Lets `hook` reduce the buckets from the next backward on."""
        self._reduction.set_hook(state, hook)
        if self.layout.is_shared:  # a hook may do anything with its tensor, such as to resize it
            self.remove_hooks()
            self.layout.leave_shared_memory()
            self._add_hooks()
            if self._is_armed:
                self._arm_buckets()

    @property
    def state_and_hook(self) -> tuple[Any, CommHook | None]:
        """The communication hook with its state; (None, None) where there is none."""
        return self._reduction.state_and_hook

    def set_divisor(self, divisor: int) -> None:
        """Makes the built-in mean a sum divided by `divisor`, from the next backward on."""
        self._reduction.set_divisor(divisor)

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
        if self._is_running:
            self._is_running = False  # the last backward was interrupted
            self._drain()
            self._withdraw()
        self._ready.clear()
        self._next = 0
        self._is_armed = True
        tensors = [t for t in find_tensors(outputs) if t.requires_grad]
        self._expected.prepare(tensors, absent)
        self._arm_buckets()
        for tensor in tensors:
            tensor.register_hook(self._make_start_hook())

    def _arm_buckets(self) -> None:
        for bucket in self.buckets:
            bucket.arm(self._expected.num_in(bucket))

    def _make_start_hook(self) -> Callable[[torch.Tensor], None]:
        """A hook for an output: it runs first, and in the outermost of nested backwards."""
        owner = weakref.ref(self)

        def start(_grad: torch.Tensor) -> None:
            reducer = owner()
            if reducer is not None and reducer._is_armed:
                reducer.begin()

        return start

    def disarm(self) -> None:
        """Lets gradients accumulate without synchronisation until `arm`."""
        self._is_armed = False
        for bucket in self.buckets:
            bucket.armed = False

    def _drain(self) -> None:
        """Waits for what a backward that has failed has launched; its results are not used."""
        for bucket in self.buckets[: self._next]:
            if bucket.work is not None:
                with suppress(CommHookError):
                    self._wait(bucket)

    def _withdraw(self) -> None:
        ready = set(self._ready)
        for bucket in self.buckets:
            bucket.withdraw(ready)

    def _count_step(self) -> None:
        self.step += 1
        self._reduction.step = self.step
        self._reduction.num_launched = 0

    def begin(self) -> None:
        """The first event of a synchronised backward."""
        if self._is_running:
            return
        self._is_running = True
        self._creates_graph = torch.is_grad_enabled()
        self.times.start_backward()
        self._count_step()
        if self.recorder is not None:
            self.recorder.start_backward(self.step)
        if self.auto_plan is not None:
            self.auto_plan.times.start_backward()
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        expected = self._expected
        if expected.is_learning:
            return
        for index in expected.declared | expected.never:
            bucket, position = self.layout.where[index]
            bucket.fill_absent(position, self._reduction.scale)
        for bucket in self.buckets:
            if not bucket.num_pending:  # nobody expects anything of it: no rank launches it
                bucket.is_skipped = expected.declared.issuperset(bucket.spec.indices)
                self._fill(bucket)
        self._mark_absent(expected.unreached)
        if not expected.are_counted:  # who counts wants to know what none has used
            for bucket in self.buckets:
                bucket.open()

    def _mark_absent(self, indices: Iterable[int]) -> None:
        """Parameters that will get no gradient in this backward count as ready, with what they have."""
        for index in indices:
            bucket, position = self.layout.where[index]
            bucket.fill_absent(position, self._reduction.scale)
            bucket.num_pending -= max(self._expected.counts[index], 1)
            if not bucket.num_pending:
                bucket.is_skipped = (
                    self.options.skip_all_reduce_unused_params and len(bucket.absent) == bucket.size
                )
                self._fill(bucket)

    # ------------------------------------------------------------------ gradients arrive

    def progress(self, bucket: Bucket) -> None:
        """A bucket got its first or its last gradient."""
        self.begin()
        if bucket.num_pending < 0:
            raise self._ready_twice()
        if bucket.num_pending == 0:
            self._fill(bucket)

    def _fill(self, bucket: Bucket) -> None:
        """All that this bucket can get is there: it and those that waited for it are launched, in order."""
        recorder = self.recorder
        if recorder is not None:
            recorder.ready(bucket.index(), bucket.flat.numel() * bucket.flat.element_size())
        if not bucket.is_skipped:
            with torch.no_grad():
                try:
                    bucket.copy_late(self._reduction.scale)
                except TypeError as error:
                    self._take_undefined(bucket, range(bucket.size), error)
                    bucket.copy_late(self._reduction.scale)
        bucket.is_full = True
        with self._lock:
            while self._next < len(self.buckets) and self.buckets[self._next].is_full:
                self.times.start_comm()
                with self.failures.noted():
                    self._reduction.launch(self.buckets[self._next], self._watch())
                if recorder is not None:
                    recorder.launched(self._next, self.buckets[self._next].work)
                self._next += 1
        if self.auto_plan is not None:
            self.auto_plan.times.launched(bucket.index())

    def copy_early(self, bucket: Bucket, position: int) -> None:
        """A large gradient is there: into the bucket while it is in the cache."""
        with torch.no_grad():
            try:
                bucket.copy_early(position, self._reduction.scale)
            except TypeError as error:
                self._take_undefined(bucket, [position], error)

    def _take_undefined(self, bucket: Bucket, positions: Iterable[int], error: TypeError) -> None:
        """Autograd gave no tensor for some parameters, which means zeros; unless something freed them."""
        gone = [p for p in positions if bucket.params[p].grad is None and p not in bucket.absent]
        # autograd calls the hooks of a parameter also where its gradient is undefined
        others = [p for p in gone if len(bucket.params[p]._post_accumulate_grad_hooks or ()) != 1]
        if len(set(self._ready)) != len(self._ready):
            raise self._ready_twice() from error
        if others or not gone:
            raise self._freed(bucket, others) from error
        for position in gone:
            bucket.fill_absent(position, self._reduction.scale)

    # ------------------------------------------------------------------ end of a backward

    def _finish(self) -> None:
        """Called by the autograd engine when all gradients of this backward are there."""
        self.times.end_backward()
        recorder = self.recorder
        if recorder is not None:
            recorder.end_backward()
        if self.auto_plan is not None:
            self.auto_plan.times.end_backward()
        self.disarm()
        if self._expected.is_learning:
            self._learn()
        elif self._next < len(self.buckets):
            self._complete()
        absent = self._absent_indices()
        expected = self._expected
        exchange = self.usage.start(absent, expected.declared) if expected.are_counted else None
        self._note_order(absent)
        if self.before_finish is not None:
            self.before_finish()
        for bucket in self.buckets:
            if bucket.work is not None:
                self._wait(bucket)
                if recorder is not None:
                    recorder.done(bucket.index())
            with torch.no_grad():
                bucket.copy_out()
            if self.after_bucket is not None:
                self.after_bucket(bucket)
        self._settle(absent, exchange)
        while self.futures:
            self._group.wait_future(self.futures.pop())
        if self._creates_graph:
            refuse_double_backward(self._params)
        self.times.end_comm()
        if recorder is not None:
            recorder.finish()
        if self.auto_plan is not None:
            self.auto_plan.times.finish(self.step)
        self._is_running = False

    def _note_order(self, absent: Sequence[int]) -> None:
        self.facts.note(absent, self._reduction.num_launched)
        if not self.facts.has_rebuilt and not self._expected.may_lack:
            self._first_order = list(self._ready)

    def _complete(self) -> None:
        """Backward is over and buckets are not full: parameters were not used, or it is an error."""
        late = self._expected.late(self._ready)
        if not self._expected.may_lack:
            is_first = self.step == 0 and not self._expected.is_static
            error = self.failures.missing(self.step, late, self._next, is_first=is_first)
            if error is not None:
                self._raise(error)
            self._expected.declared.update(late)
        self._mark_absent(late)

    def _raise(self, error: MissingGradientError) -> None:
        self._is_running = False
        if error.num_launched is not None:  # the same on all ranks
            self._drain()
        self._withdraw()
        try:
            raise error
        finally:
            del error  # else it and this frame keep each other, and the process group, alive

    def _learn(self) -> None:
        """First step of a static graph: nothing was launched yet; what arrived is what will arrive."""
        self._expected.learn(self._ready)
        for bucket in self.buckets:
            with torch.no_grad():
                for position, index in enumerate(bucket.spec.indices):
                    if index in self._expected.never:
                        bucket.fill_absent(position, self._reduction.scale)
                    elif position in bucket.early:
                        bucket.copy_early(position, self._reduction.scale)
            bucket.num_pending = 0
            self._fill(bucket)

    def _absent_indices(self) -> list[int]:
        return [bucket.spec.indices[p] for bucket in self.buckets for p in sorted(bucket.absent)]

    def _settle(self, absent: Sequence[int], exchange: Any | None) -> None:
        counts: list[int] | None = None
        if exchange is not None:
            summed = self.usage.finish(exchange)
            counts = summed.tolist() if absent else None  # reading it waits for the device
        settle_absent([(i, *self.layout.where[i]) for i in absent], counts, self._expected.declared)

    def check_finished(self) -> None:
        """Raises if the last synchronised backward was interrupted.

        Raises:
            BackwardOrderError: it was.
        """
        if self._is_running:
            raise self.failures.interrupted(self.step)

    def shadow_backward(self) -> None:
        """Takes part in the communication of one synchronised backward of the others, with zeros.

        For a rank that has no input left. Its gradients stay as they are. Communicates as their backward.
        """
        self._count_step()
        zeros = [bucket.zeros() for bucket in self.buckets]
        for bucket in zeros:
            self._reduction.launch(bucket, self._watch())
        is_counted = self._expected.are_counted
        used = self.usage.start_with([0] * len(self._params)) if is_counted else None
        for bucket in zeros:
            if bucket.work is not None:
                self._wait(bucket)
        if used is not None:
            self.usage.finish(used)
        if not self.facts.has_rebuilt and not self._expected.may_lack:
            self._first_order = []

    def reduce_sum(self, bucket: Bucket) -> Any:
        """Starts the sum of a bucket over the ranks, for hooks that go on from there; returns its work."""
        return self._group.all_reduce(bucket.buffer())

    def _wait(self, bucket: Bucket) -> None:
        with self.failures.noted():
            self._reduction.wait(bucket, self._watch())

    def _watch(self) -> Callable[[float], None]:
        """Looks, in the waits of this step, at what other ranks miss."""
        return self.failures.board.watch(self.step, self._next)

    # ------------------------------------------------------------------ errors

    def _ready_twice(self) -> BackwardOrderError:
        excess = self._expected.excess(self._ready)
        return self.failures.ready_twice(self.step, excess, self._ready, is_static=self._expected.is_static)

    def _freed(self, bucket: Bucket, positions: Iterable[int]) -> BackwardOrderError:
        return self.failures.freed_gradient(self.step, [bucket.names[p] for p in positions])

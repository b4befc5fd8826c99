"""Expected, arrived and absent gradients of a backward, those that only other ranks have, and the errors.

A bitmap, summed over the ranks at the end of backward, shows which parameters other ranks have used. With a
static graph it is summed once.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from lightning_ddp._torch import gradient_hooks_of, tree_leaves
from lightning_ddp.comm.group import Group, InThread, uploaded
from lightning_ddp.ddp.bucket import Bucket, BucketLayout, ReducerOptions
from lightning_ddp.ddp.reduction import BackwardState, Reduction
from lightning_ddp.errors import BackwardOrderError, MissingGradientError

_RREF: Any = getattr(torch.distributed.rpc, "RRef", ())
_UNKNOWN = 2**62
"""Number of gradients that no bucket gets: it is full when the backward is over."""
_FIRST_LOOK_S = 0.2
_LONGEST_PAUSE_S = 2.0
_REPORT_DEADLINE_S = 10.0
_POLL_S = 0.01
_ANSWER_WAIT_S = 0.2


def find_tensors(obj: Any) -> Iterator[torch.Tensor]:
    """Yield tensors that require a gradient in lists, tuples, dicts, dataclasses, local RRefs and pytrees."""
    if isinstance(obj, torch.Tensor):
        if obj.requires_grad:
            yield obj
    elif isinstance(obj, _RREF) and obj.is_owner():
        yield from find_tensors(obj.local_value())
    elif isinstance(obj, (list, tuple, dict)):
        for item in obj.values() if isinstance(obj, dict) else obj:
            yield from find_tensors(item)
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        for field in dataclasses.fields(obj):
            yield from find_tensors(getattr(obj, field.name))
    else:
        leaves = tree_leaves(obj)
        yield from (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad)


def remove_hooks(handles: list[RemovableHandle]) -> None:
    """Remove the hooks of these handles, and the handles from the list."""
    while handles:
        handles.pop().remove()


def hook_gradients(
    tensors: Iterable[torch.Tensor], hook: Callable[[torch.Tensor], None], on_leaves: list[RemovableHandle]
) -> None:
    """Register `hook` on the gradients of `tensors`, the outputs of a forward.

    `on_leaves` holds the handles on leaves, which outlive a graph: those of the last forward are removed.
    """
    remove_hooks(on_leaves)
    for tensor in tensors:
        handle = tensor.register_hook(hook)
        if tensor.is_leaf:
            on_leaves.append(handle)


def reached_parameters(outputs: Iterable[torch.Tensor]) -> set[int]:
    """Return the `id`s of the leaf tensors whose gradient a backward from `outputs` may compute."""
    reached = {id(t) for t in outputs if t.requires_grad and t.grad_fn is None}
    waiting = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)  # set on AccumulateGrad nodes
        if leaf is not None:
            reached.add(id(leaf))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return reached


class Expected(Enum):
    """Expectation of a parameter's gradient in a backward: it comes or, if not, the reason."""

    YES = auto()
    NOWHERE = auto()
    """On no rank: `requires_grad` is off, or another tensor is in its place."""
    UNREACHED = auto()
    """Not on this rank: the graph of the outputs, or of a static graph's first step, does not lead to it."""


class Gradients:
    """Tracker of expected and absent gradients of a backward; finds those that only other ranks have."""

    def __init__(
        self,
        layout: BucketLayout,
        options: ReducerOptions,
        reduction: Reduction,
        failures: BackwardFailures,
        group: Group,
        device: torch.device,
    ) -> None:
        self._layout = layout
        self._params = layout.params
        self._reduction = reduction
        self._failures = failures
        self._group = group
        self._device = device
        self._skips_unused = options.skip_all_reduce_unused_params
        self.finds_unused = options.find_unused_parameters
        """True if the graph of the outputs is searched."""
        self.is_static = options.static_graph
        """True if every backward has the gradients of the first one."""
        self.is_learning = options.static_graph
        """True until the first backward of a static graph has ended."""
        self.counts = [1] * len(self._params)
        """Number of gradients that each parameter gets in one backward, if it gets any."""
        self._usual = [Expected.YES] * len(self._params)
        self.expected = self._usual
        """Expectation of each parameter in the next or running backward."""
        self.unsynced: set[int] = set()
        """Parameters that got a gradient in a backward without synchronization."""
        self._settled: list[int] | None = None  # final sums of a static graph, once all ranks contributed
        # Of the last exchange: how many ranks used each parameter; last, how many ranks had a backward.
        self._sums = torch.zeros(len(self._params) + 1, dtype=torch.int32)

    @property
    def may_lack(self) -> bool:
        """True if unused parameters may differ per backward: `find_unused_parameters`, no static graph."""
        return self.finds_unused and not self.is_static

    @property
    def are_counted(self) -> bool:
        """True if the ranks exchange which parameters they used."""
        return self.finds_unused or self.is_static

    # ------------------------------------------------------------------ before and while they come

    def prepare(self, outputs: Sequence[torch.Tensor], absent: Iterable[int]) -> None:
        """Determine which parameters get a gradient in a backward from `outputs`; none of `absent` do."""
        expected = self.expected = self._usual.copy()
        switched_off = [i for i, p in enumerate(self._params) if not p.requires_grad]
        for index in (*switched_off, *absent):
            expected[index] = Expected.NOWHERE
        if self.may_lack:
            with torch.profiler.record_function("search_unused_parameters"):
                reached = reached_parameters(outputs)
            for index, parameter in enumerate(self._params):
                if id(parameter) not in reached and expected[index] is Expected.YES:
                    expected[index] = Expected.UNREACHED

    @property
    def _are_all_expected(self) -> bool:
        return self.expected.count(Expected.YES) == len(self.expected)

    def arm(self, ready: list[int]) -> None:
        """Reset all buckets for the next backward; arriving gradients append their indices to `ready`."""
        is_usual = self._are_all_expected and not self.is_static
        for bucket in self._layout.buckets:
            if is_usual or self.is_learning:
                number = bucket.size if is_usual else _UNKNOWN
            else:
                number = sum(self.counts[i] for i in bucket.spec.indices if self.expected[i] is Expected.YES)
            bucket.arm(number, ready)

    def start(self) -> list[Bucket]:
        """Fill in old `.grad` or zeros where parameters get no gradient; return buckets that expect none."""
        if self._are_all_expected:
            return []
        for index, expected in enumerate(self.expected):
            if expected is not Expected.YES:
                self._fill_absent(index)
        full = [bucket for bucket in self._layout.buckets if bucket.num_expected == 0]
        for bucket in full:
            bucket.is_skipped = self._is_unused(bucket)
        return full

    def _is_unused(self, bucket: Bucket) -> bool:
        """Return True if a bucket without a gradient is skipped: no rank reduces it."""
        return (self._skips_unused and self.may_lack and len(bucket.absent) == bucket.size) or all(
            self.expected[index] is Expected.NOWHERE for index in bucket.spec.indices
        )

    def mark_absent(self, indices: Iterable[int]) -> list[Bucket]:
        """Fill slices of parameters without a gradient, count them as arrived; return buckets made full."""
        full = []
        for index in indices:
            bucket = self._fill_absent(index)
            bucket.num_pending -= 1
            if not bucket.num_pending:
                bucket.is_skipped = self._is_unused(bucket)
                full.append(bucket)
        return full

    def _fill_absent(self, index: int) -> Bucket:
        bucket, position = self._layout.where[index]
        bucket.fill_absent(position, self._reduction.scale)
        if self.expected[index] is not Expected.NOWHERE:
            if index in self.unsynced:
                bucket.accumulated.add(position)
        elif self._reduction.hook is not None:
            bucket.views[position].zero_()  # else the hook would count the gradient of an earlier step
        if bucket.streams is not None:
            bucket.streams.note()
        return bucket

    def take_undefined(
        self, bucket: Bucket, positions: Iterable[int], error: TypeError, state: BackwardState
    ) -> None:
        """Fill in zeros for gradients that autograd left undefined; raise if one was freed or came twice."""
        gone = [p for p in positions if bucket.params[p].grad is None and p not in bucket.absent]
        # With another hook on the parameter, that hook may have freed the gradient.
        others = [p for p in gone if len(gradient_hooks_of(bucket.params[p]) or ()) != 1]
        if len(set(state.ready)) != len(state.ready):
            raise self.ready_twice(state) from error
        if others or not gone:
            raise self._failures.freed_gradient(state.step, [bucket.names[p] for p in others]) from error
        for position in gone:
            bucket.fill_absent(position, self._reduction.scale)

    def ready_twice(self, state: BackwardState) -> BackwardOrderError:
        """Return the error of a backward in which gradients arrived more often than expected."""
        found = Counter(state.ready)
        excess = [i for i, n in found.items() if n > self.counts[i] or self.expected[i] is Expected.UNREACHED]
        return self._failures.ready_twice(state.step, excess, state.ready, is_static=self.is_static)

    # ------------------------------------------------------------------ when the backward is over

    def late(self, state: BackwardState) -> list[int]:
        """Return the indices of parameters whose expected gradients are missing at the end of backward."""
        found = Counter(state.ready)
        return [i for i, e in enumerate(self.expected) if e is Expected.YES and found[i] < self.counts[i]]

    def learn(self, ready: Sequence[int]) -> None:
        """Count each parameter's gradients in a static graph's first step; copy large ones into buckets."""
        found, scale = Counter(ready), self._reduction.scale
        self.counts = [found[i] for i in range(len(self._params))]
        self._usual = [Expected.YES if count else Expected.UNREACHED for count in self.counts]
        self.is_learning = False
        for bucket in self._layout.buckets:
            with torch.no_grad():
                for position, index in enumerate(bucket.spec.indices):
                    if not self.counts[index]:
                        self._fill_absent(index)
                    elif position in bucket.early:
                        bucket.copy_early(position, scale)
            bucket.num_pending = 0

    def absent(self) -> list[int]:
        """Return indices of the parameters without a gradient in this backward, bucket by bucket."""
        return [b.spec.indices[p] for b in self._layout.buckets for p in sorted(b.absent)]

    def start_exchange(self, absent: Sequence[int] | None) -> Any | None:
        """Start an all-reduce of how many ranks used each parameter since the last one; None if not needed.

        `absent` is None on a rank without input, which takes part in the backward of the others.
        """
        if not self.are_counted or self._settled is not None:
            return None
        used = [int(absent is not None)] * len(self._sums)
        for index in absent or ():
            used[index] = int(index in self.unsynced and self.expected[index] is not Expected.NOWHERE)
        self._sums = uploaded(torch.tensor(used, dtype=torch.int32), self._device)
        return self._group.all_reduce(self._sums)

    def settle(self, absent: Sequence[int], exchange: Any | None) -> None:
        """Wait for the counts of use; set `.grad` of parameters unused here to the mean if used elsewhere."""
        counts = self._settled
        if exchange is not None:
            self._group.wait(exchange, self._device)
            self.unsynced.clear()
            if absent or self.is_static:  # else the host need not wait for the device
                *counts, num_ranks = self._sums.tolist()
                if self.is_static and num_ranks == self._group.size:
                    self._settled = counts
        with torch.no_grad():
            for index in absent:
                bucket, position = self._layout.where[index]
                is_nowhere = self.expected[index] is Expected.NOWHERE
                bucket.take_absent(position, not is_nowhere and (counts is None or counts[index] > 0))


# ---------------------------------------------------------------------- errors


class BackwardFailures:
    """Maker of a backward's errors: gradients missing (exchanged by ranks in a store), surplus or freed.

    A rank that lacks a gradient cannot take part in an all-reduce for which the others wait. It posts its
    names in the group's store, at which these look meanwhile, so that all raise the same error. Threads query
    the store, as its process may be stopped (SIGSTOP) and not reply. Messages contain the text of torch's DDP
    for the same error, which filters of logs search for.

    Args:
        token: the same on all ranks, different for every wrapped module.
        names: names of the parameters.
    """

    def __init__(self, group: Group, token: str, names: Sequence[str]) -> None:
        self._group = group
        self._prefix = f"lightning_ddp/missing/{token}"
        self._names = names
        self._broken: Exception | None = None

    def check_usable(self) -> None:
        """Raise again the error, if any, of an earlier backward after which the ranks cannot continue."""
        if self._broken is None:
            return
        if isinstance(self._broken, MissingGradientError):
            raise self._broken.copy()
        raise BackwardOrderError(str(self._broken))

    def note(self, error: MissingGradientError) -> None:
        """Store an error after which the ranks' collectives no longer match, for `check_usable` to raise."""
        self._broken = error.copy()

    def missing(self, step: int, late: Sequence[int], num_launched: int) -> MissingGradientError:
        """Report parameters without a gradient to the other ranks; return the error to raise."""
        error = self._report(step, [self._names[i] for i in late], num_launched)
        error.add_hint(
            f"The first of them here: {self._at(late[0])}. Parameter indices which did not receive grad for"
            f" rank {self._group.rank}: {' '.join(map(str, late))}"
        )
        if not error.can_continue:
            self.note(error)
        return error

    def _report(self, step: int, names: Sequence[str], num_launched: int) -> MissingGradientError:
        """Post this rank's parameters without a gradient, collect the posts of all ranks; return the error.

        Return the error to raise, the same on all ranks up to the rank in its first line. `num_launched` is
        the number of buckets whose reduction this rank has started in this step.
        """
        group, store = self._group, cast(Any, self._group.store)
        posts: dict[int, dict[str, Any]] = {group.rank: {"names": list(names), "num_launched": num_launched}}

        def have_all_come() -> bool:
            for rank in set(range(group.size)).difference(posts):
                if store.check([self._key(step, rank)]):
                    posts[rank] = json.loads(store.get(self._key(step, rank)))
            return len(posts) == group.size

        def exchange(thread: InThread[None]) -> None:
            store.set(self._key(step, group.rank), json.dumps(posts[group.rank]))
            store.set(self._key(step, "any"), "1")
            thread.until(have_all_come, _POLL_S, "not all ranks have reported")

        if store is not None:
            InThread(exchange, _REPORT_DEADLINE_S).wait(lambda _: group.check())
        found = dict(posts)  # the thread may still add to it
        launched = {post["num_launched"] for post in found.values()}
        return MissingGradientError(
            {rank: post["names"] for rank, post in found.items()},
            rank=group.rank,
            world_size=group.size,
            step=step,
            can_continue=len(found) == group.size and len(launched) == 1,
        )

    def watch(self, step: int, num_launched: int) -> Callable[[float], None]:
        """Return a callback for the waits of a step that raises if another rank reports missing gradients."""
        next_look_s = _FIRST_LOOK_S
        asked: InThread[bool] | None = None

        def look(waited_s: float) -> None:
            nonlocal next_look_s, asked
            store = self._group.store
            if waited_s < next_look_s or store is None:
                return
            found = asked = asked or InThread(lambda _: store.check([self._key(step, "any")]))
            if not found.is_over.wait(_ANSWER_WAIT_S):
                return  # the next call looks for the reply again
            next_look_s, asked = waited_s + min(waited_s, _LONGEST_PAUSE_S), None
            if found.error is None and found.result:
                raise self._report(step, [], num_launched)

        return look

    def _key(self, step: int, who: int | str) -> str:
        return f"{self._prefix}/{step}/{who}"

    def _at(self, index: int) -> str:
        return f"Parameter at index {index} with name {self._names[index]}"

    def ready_twice(
        self, step: int, excess: Sequence[int], ready: Sequence[int], *, is_static: bool
    ) -> BackwardOrderError:
        """Return the error for surplus gradients of `excess`; if `is_static`, make later forwards raise."""
        names = ", ".join(self._names[i] for i in excess)
        if not is_static:
            return BackwardOrderError(
                f"Expected to mark a variable ready only once. {self._at(excess[0])} has been marked as ready"
                f" twice. On rank {self._group.rank} in step {step} it was more than one gradient in one"
                f" backward for {names}. Re-entrant activation checkpointing does that: use"
                " torch.utils.checkpoint(..., use_reentrant=False), or static_graph=True. So does a parameter"
                " that is used outside of forward while find_unused_parameters=True takes it for unused."
            )
        error = BackwardOrderError(
            f"rank {self._group.rank}, step {step}: Your training graph has changed in this iteration: more"
            f" gradients than in the first one for {names}. static_graph=True needs the same graph in every"
            " step."
        )
        done = set(ready)
        unfinished = [i for i in range(len(self._names)) if i not in done]
        self._broken = BackwardOrderError(
            "Expected to have finished reduction in the prior iteration before starting a new one. This error"
            " indicates that your training graph has changed in this iteration, e.g., one parameter is used"
            " in first iteration, but then got unused in the second iteration. this is not compatible with"
            " static_graph set to True.\nParameter indices which did not receive grad for rank"
            f" {self._group.rank}: {' '.join(map(str, unfinished))}"
            f" ({', '.join(self._names[i] for i in unfinished)}). It was backward {step}: {error}"
        )
        return error

    def freed_gradient(self, step: int, names: Sequence[str]) -> BackwardOrderError:
        """Return the error for gradients that were freed before they could be averaged."""
        return BackwardOrderError(
            f"rank {self._group.rank}, step {step}: .grad was set to None before it was averaged, for"
            f" {', '.join(names)}. Free gradients after backward, not in a hook during backward."
        )


class _Averaged(torch.autograd.Function):
    """Identity function whose backward raises an error: averaged gradients cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise BackwardOrderError(
            "backward through an averaged gradient (create_graph=True, then backward of something computed"
            " from .grad): the other ranks' parts of it are not in this process's graph. Compute the penalty"
            " from torch.autograd.grad(...) of the loss inside forward, and call backward once on the sum."
        )


def refuse_double_backward(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Make a second backward through the averaged gradients of `parameters` raise an error."""
    with torch.enable_grad():
        for parameter in parameters:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad = _Averaged.apply(  # type: ignore[no-untyped-call]
                    parameter.grad.detach(), parameter
                )

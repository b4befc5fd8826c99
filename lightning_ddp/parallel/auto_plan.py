"""`bucket_cap_mb="auto"`: times the first steps, computes a plan, tries it, and keeps the better one.

In five steps with the default plan every gradient's arrival is noted, and then the transport is timed by a
few sums. Where another plan promises to be faster the two take turns for some steps, and the computed one
stays if its median is the lower one. All ranks pass from phase to phase by the number of the step, which they
share, and decide by what they have exchanged; a rank without input takes part. Afterwards nothing is left.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_ddp.comm.group import Group
from lightning_ddp.parallel.buckets import BucketSpec, cut_buckets
from lightning_ddp.parallel.layout import BucketLayout
from lightning_ddp.parallel.plan_report import BucketPlanReport, sizes_of
from lightning_ddp.parallel.probing import TransportCost, agree_on_max, measure_transport
from lightning_ddp.parallel.ready_times import ReadyTimes, TimedBackward
from lightning_ddp.parallel.reduction import Reduction

__all__ = ["AutoPlan", "obstacle_to_planning"]

_NUM_IGNORED = 1  # after a change of hooks and buckets
_NUM_MEASURED = 4
_NUM_TURNS = 6
_TURN_STEPS = 4
_LEAST_GAIN = 0.03
_LEAST_SAMPLES = 2
_CPU = torch.device("cpu")

_Plan = tuple[BucketSpec, ...]


def _planning() -> Any:
    # the performance model has it; here it goes together with this option
    return importlib.import_module("lightning_ddp.tools.perf_model.planning")


def obstacle_to_planning(
    layout: BucketLayout, group: Group, reduction: Reduction, *, finds_unused: bool
) -> str | None:
    """Why no plan can be computed for these parameters and ranks; None if it can."""
    specs = layout.specs
    if group.size == 1:
        return "there is one rank, and nothing to send"
    if any(spec.device.type != "cpu" for spec in specs):
        return "gradients are timed on the CPU only, and some are on another device"
    if finds_unused:
        return "with find_unused_parameters=True the gradients may differ from step to step"
    if any(spec.is_sparse for spec in specs):
        return "there are sparse gradients, and what they cost differs from step to step"
    if len({spec.dtype for spec in specs}) > 1:
        return "there are gradients of several dtypes, which cannot share buckets"
    if not any(spec.nbytes for spec in specs):
        return "the parameters are empty"
    if not reduction.is_beside_backward:
        return "buckets are reduced after the backward, as ranks have no processor for a thread beside it"
    return None


@dataclass(frozen=True, kw_only=True)
class _Contest:
    """Two plans that take turns, the computed one first."""

    start_step: int
    default: _Plan
    computed: _Plan
    report: BucketPlanReport

    def plan_in(self, turn: int) -> _Plan:
        return self.default if turn % 2 else self.computed


class AutoPlan:
    """The plan of a reducer's buckets, while it is being chosen.

    Args:
        layout: the buckets, with the default plan.
        group: the ranks.
        reduction: how buckets are reduced.
        ready: the parameters whose gradients have come in the running backward.
        obstacle: why the default plan is to stay; None to look for a better one.
    """

    def __init__(
        self,
        layout: BucketLayout,
        group: Group,
        reduction: Reduction,
        ready: list[int],
        obstacle: str | None = None,
    ) -> None:
        self.times = ReadyTimes(ready)
        """What the reducer tells of each synchronised backward."""
        self.transport: TransportCost | None = None
        """What the transport costs, where that is known, the same on all ranks; None to measure it."""
        self.report: BucketPlanReport | None = None
        """What was chosen, once it is."""
        self._layout = layout
        self._group = group
        self._reduction = reduction
        self._obstacle = obstacle
        self._order: Sequence[int] = ()
        self._default: _Plan = ()
        self._has_started = False
        self._change_step = 0
        self._contest: _Contest | None = None
        self._turn = 0
        self._finish_s: dict[bool, dict[int, float]] = {True: {}, False: {}}

    @property
    def is_timing(self) -> bool:
        """Whether hooks have to note when each gradient arrives."""
        return self._has_started and self._contest is None and self.report is None

    def start(self, step: int, order: Sequence[int], plan: _Plan) -> None:
        """The default plan is in force from the backward after `step` on. Does not communicate.

        Args:
            step: number of the last synchronised backward.
            order: the parameters in the order in which they go into buckets.
            plan: the default one.
        """
        self._has_started = True
        self._change_step = step
        self._order = order
        self._default = plan

    def next_plan(self, step: int) -> _Plan | None:
        """What to do before the next forward. All ranks call it, after the same steps; may communicate.

        Args:
            step: number of the last synchronised backward.

        Returns:
            The plan to apply, with new hooks; None where buckets and hooks stay. Once `report` is there, this
            was the last call.
        """
        if self._obstacle is None and self._reduction.has_hook:
            self._obstacle = "a communication hook decides what is sent, and what that costs"
        if self._obstacle is not None:
            return self._settle(self._default, _kept(self._obstacle), is_warning=True)
        if not self._has_started:
            return None
        if self._contest is not None:
            return self._take_turns(self._contest, step)
        if step - self._change_step < _NUM_IGNORED + _NUM_MEASURED:
            return None
        return self._choose(step)

    def _taken(self) -> list[TimedBackward]:
        """The backwards since the last call that count."""
        backwards = [b for b in self.times.backwards if b.step > self._change_step + _NUM_IGNORED]
        self.times.backwards.clear()
        return backwards

    def _settle(self, plan: _Plan, report: BucketPlanReport, *, is_warning: bool = False) -> _Plan | None:
        """The end: `plan` is in force from now on, and hooks note nothing any more."""
        in_force = plan or tuple(bucket.spec for bucket in self._layout.buckets)
        self.report = replace(report, bucket_bytes=sizes_of(in_force))
        if self._group.rank == 0:
            self.report.log(is_warning=is_warning)
        return plan or None

    # ------------------------------------------------------------------ compute

    def _choose(self, step: int) -> _Plan:
        """Rank 0 computes a plan from what all ranks have measured, and all ranks get it."""
        backwards = self._taken()
        kinds = {frozenset(b.ready_s) for b in backwards}
        own = [
            float(len(backwards)),
            float(len(kinds) > 1),
            _median([b.backward_s for b in backwards]),
            *self._launchable_s(backwards),
        ]
        num_backwards, has_changed, backward_s, *ready_s = agree_on_max(self._group, own)
        if has_changed or num_backwards < _LEAST_SAMPLES:
            reason = "the parameters that get gradients differ from step to step"
            if not has_changed:
                reason = "no backward could be timed"
            return self._settle(self._default, _kept(reason), is_warning=True) or self._default
        if self.transport is None:
            self.transport = measure_transport(
                self._group, self._reduction.start_sum, self._layout.flat, self.times.clock
            )
        specs = self._layout.specs
        times = _planning().BackwardTimes(
            ready_s=tuple(ready_s),
            num_bytes=tuple(specs[i].nbytes for i in self._order),
            backward_s=backward_s,
            cost=self.transport.transfer,
            launch_s=self.transport.launch_s,
        )
        return self._compare(step, times)

    def _launchable_s(self, backwards: Sequence[TimedBackward]) -> list[float]:
        """When a bucket could be launched that ended with each parameter, in their order.

        That is after its gradient, and after those of its bucket have been copied there. So the time that a
        bucket of the default plan takes for that is divided among its parameters.
        """
        launchable_s = []
        for index, spec in enumerate(self._default):
            fill_s = _median([b.fill_s.get(index, 0.0) for b in backwards])
            for position, i in enumerate(spec.indices, start=1):
                ready_s = _median([b.ready_s.get(i, 0.0) for b in backwards])
                launchable_s.append(ready_s + fill_s * position / len(spec.indices))
        return launchable_s

    def _compare(self, step: int, times: Any) -> _Plan:
        """Begins the contest of the two plans, if the computed one promises enough."""
        sizes = [len(spec.indices) for spec in self._default]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        default_s = times.finish_s(ends)
        computed = self._broadcast(_planning().safe_boundaries(times) if self._group.rank == 0 else ())
        computed_s = times.finish_s(computed)
        report = BucketPlanReport(
            choice="default",
            reason="",
            bucket_bytes=(),
            transport=self.transport,
            backward_s=times.backward_s,
            predicted_default_s=default_s,
            predicted_s=computed_s,
        )
        if computed_s > (1 - _LEAST_GAIN) * default_s:
            reason = (
                f"backward and communication should take {_ms(default_s)}, and with the best plan found"
                f" {_ms(computed_s)}; less than {_LEAST_GAIN:.0%} is not worth a change"
            )
            return self._settle(self._default, replace(report, reason=reason)) or self._default
        plan = cut_buckets(self._layout.specs, self._order, computed)
        self._contest = _Contest(start_step=step, default=self._default, computed=plan, report=report)
        self._change_step = step
        return plan

    def _broadcast(self, ends: Sequence[int]) -> tuple[int, ...]:
        """The plan of rank 0, on all ranks."""
        sent = torch.zeros(len(self._order), dtype=torch.int64)
        sent[: len(ends)] = torch.tensor(ends, dtype=torch.int64)
        self._group.wait(self._group.broadcast(sent, 0, label="bucket plan"), _CPU)
        return tuple(int(end) for end in sent.tolist() if end)

    # ------------------------------------------------------------------ try

    def _take_turns(self, contest: _Contest, step: int) -> _Plan | None:
        """At the end of a turn the other plan follows; at the end of the last one it is decided."""
        if step - self._change_step < _TURN_STEPS:
            return None
        is_default = bool(self._turn % 2)
        self._finish_s[is_default].update((b.step, b.finish_s) for b in self._taken())
        self._change_step = step
        self._turn += 1
        if self._turn < _NUM_TURNS:
            return contest.plan_in(self._turn)
        return self._decide(contest, step)

    def _decide(self, contest: _Contest, step: int) -> _Plan:
        """All ranks compare what both plans have taken.

        A step counts with the time of the rank that came last: the others' include the wait for that one.
        """
        steps = range(contest.start_step + 1, step + 1)
        own = [-self._finish_s[is_default].get(s, math.inf) for is_default in (False, True) for s in steps]
        latest = [-value for value in agree_on_max(self._group, own)]
        computed, default = (
            [s for s in part if s < math.inf] for part in (latest[: len(steps)], latest[len(steps) :])
        )
        computed_s, default_s = _median(computed), _median(default)
        is_known = min(len(computed), len(default)) >= _LEAST_SAMPLES
        is_better = is_known and computed_s < default_s
        report = replace(
            contest.report,
            choice="measured" if is_better else "default",
            reason=(
                f"backward and communication took {_ms(computed_s)} with the computed plan and"
                f" {_ms(default_s)} with the default one, medians of {len(computed)} and {len(default)} steps"
            ),
            measured_default_s=default_s,
            measured_s=computed_s,
        )
        plan = contest.computed if is_better else contest.default
        return self._settle(plan, report) or plan


def _kept(reason: str) -> BucketPlanReport:
    return BucketPlanReport(choice="default", reason=reason, bucket_bytes=())


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"

"""When the buckets of a reducer change: after its first backward, and while an automatic plan is chosen."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from lightning_ddp.comm.group import Group
from lightning_ddp.parallel.buckets import BucketSpec
from lightning_ddp.parallel.expected import ExpectedGradients
from lightning_ddp.parallel.layout import BucketLayout
from lightning_ddp.parallel.ready import GradientHooks
from lightning_ddp.parallel.step_facts import StepFacts
from lightning_ddp.parallel.unused import UsageExchange

if TYPE_CHECKING:
    from lightning_ddp.parallel.auto_plan import AutoPlan
    from lightning_ddp.parallel.plan_report import BucketPlanReport

__all__ = ["Replanning"]


class Replanning:
    """Puts new plans in force, and the hooks of the parameters on their buckets.

    Args:
        layout: the buckets.
        group: the ranks.
        device: where small tensors of the exchange between ranks live.
        expected: which gradients a backward is expected to give.
        hooks: those of the parameters; none are on them yet.
        ready: gets the index of each parameter whose gradient has come.
        usage: is told of gradients that come without synchronisation.
        facts: is told of the order of the first backward.
        auto_plan: what chooses the plan; None for the plan of `layout`.
    """

    def __init__(
        self,
        layout: BucketLayout,
        group: Group,
        device: torch.device,
        *,
        expected: ExpectedGradients,
        hooks: GradientHooks,
        ready: list[int],
        usage: UsageExchange,
        facts: StepFacts,
        auto_plan: AutoPlan | None,
    ) -> None:
        self.auto_plan = auto_plan
        """What chooses the plan, as long as it does."""
        self.report: BucketPlanReport | None = None
        """What an automatic plan was chosen by, once it is."""
        self._layout = layout
        self._group = group
        self._device = device
        self._expected = expected
        self._hooks = hooks
        self._ready = ready
        self._usage = usage
        self._facts = facts
        self._first_order: list[int] | None = None
        self._add_hooks()

    def _add_hooks(self) -> None:
        expected = self._expected
        note = self._usage.unsynced.add if expected.finds_unused else None
        self._hooks.mark = self._ready.append
        if self.auto_plan is not None and self.auto_plan.is_timing:
            self._hooks.mark = self.auto_plan.times.make_mark()
        self._are_hooks_learning = expected.is_learning
        self._hooks.add(self._layout, is_learning=expected.is_learning, note_unsynced=note)

    @contextmanager
    def hooks_renewed(self) -> Generator[None, None, None]:
        """For changes of the buckets or of what is expected: hooks are off meanwhile, new ones on after."""
        self._hooks.remove()
        yield
        self._add_hooks()

    def note_order(self, order: Sequence[int]) -> None:
        """A synchronised backward ends; the first one tells the order of the gradients.

        Args:
            order: indices of the parameters whose gradients have come; may hold some twice, and lack some.
        """
        if not self._facts.has_rebuilt and not self._expected.may_lack:
            self._first_order = list(order)

    def rebuild(self, step: int) -> bool:
        """Plans the buckets anew, as `Reducer.rebuild` says.

        Args:
            step: number of the last synchronised backward.

        Returns:
            Whether the buckets have changed.
        """
        if self._first_order is None:
            if self._are_hooks_learning and not self._expected.is_learning:
                # this rank had no input yet in the step after which all of them planned anew
                self._apply([bucket.spec for bucket in self._layout.buckets])
                return True
            return self.auto_plan is not None and self._follow(self.auto_plan, step)
        device = self._device
        arrived = list(dict.fromkeys(self._first_order))
        present = set(arrived)
        rest = [i for i in range(len(self._layout.params) - 1, -1, -1) if i not in present]
        order = torch.tensor(arrived + rest, dtype=torch.int64, device=device)
        self._first_order = None
        self._facts.has_rebuilt = True
        self._group.wait(self._group.broadcast(order, 0), device)
        self._facts.order = [int(i) for i in order.tolist()]
        plan = self._layout.plan(self._facts.order)
        if self.auto_plan is not None:
            self.auto_plan.start(step, self._facts.order, plan)
        elif self._layout.holds(plan) and not self._expected.is_static:
            return False  # a static graph's hooks must stop learning, even where the plan stays
        self._apply(plan)
        return True

    def _follow(self, auto_plan: AutoPlan, step: int) -> bool:
        """Does what the automatic plan says. Returns whether the buckets have changed."""
        plan = auto_plan.next_plan(step)
        if auto_plan.report is not None:
            self.report = auto_plan.report
            self.auto_plan = None
        if plan is not None:
            self._apply(plan)
        return plan is not None

    def _apply(self, plan: Sequence[BucketSpec]) -> None:
        several = frozenset(i for i, count in enumerate(self._expected.counts) if count > 1)
        with self.hooks_renewed():
            self._layout.apply(plan, several)

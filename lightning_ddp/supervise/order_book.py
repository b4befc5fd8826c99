"""Orders in force: to whom they are sent when, and which members have not followed them (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lightning_ddp.supervise.orders import NO_ORDER, JobPhase, Order, RankPhase, Task
from lightning_ddp.supervise.processes import Process, ProcessState, Send

_REPEAT_S = 0.5  # least time between an order and its repetition to a process that has not heard it
_UNGIVEN = frozenset({ProcessState.CONDEMNED, ProcessState.GONE})
_UNANSWERED = frozenset({JobPhase.RUNNING, JobPhase.SHORT, JobPhase.OVER})  # they ask nothing of the members
_UNLIMITED = frozenset({JobPhase.CONNECTING, JobPhase.STOPPING})
_STOPPED = frozenset({RankPhase.STOPPED, RankPhase.MEETING})


class CurrentPhase:
    """Current phase of a job, the time when it began, and the processes for which it waits.

    Args:
        grace_s: seconds within which a process has to follow an order, or report while others wait for it.
    """

    def __init__(self, grace_s: float) -> None:
        self.name = JobPhase.CONNECTING
        self.since = 0.0
        self.awaited: set[Process] = set()  # have not followed the order, or are lost and have not ended
        self._grace_s, self._look_at = grace_s, 0.0

    def begin(self, name: JobPhase, members: Iterable[Process], now: float) -> None:
        """Set the job's phase, and wait for all of `members` unless it requires nothing of them."""
        self.name, self.since, self._look_at = name, now, now + self._grace_s
        is_of_run = name in (JobPhase.HOLDING, JobPhase.STOPPING)
        asked = () if name in _UNANSWERED else members
        self.awaited = {process for process in asked if process.is_active or not is_of_run}

    def note(self, process: Process, generation: int) -> None:
        """Update whether the job still waits for a rank to follow the order; `generation` is the job's."""
        report = process.report
        if not process.is_member:
            return
        follows = process.has_heard
        match self.name:
            case JobPhase.HOLDING:
                follows |= not process.is_active
            case JobPhase.MEETING:
                follows &= report.phase is RankPhase.MEETING and report.progress is not None
            case JobPhase.RECOVERING:
                has_stopped = report.phase in _STOPPED and report.progress is not None
                follows &= has_stopped or report.phase is RankPhase.STANDING
            case JobPhase.FORMING:
                follows = report.generation == report.state_of == generation
            case JobPhase.STOPPING:
                follows = not process.is_active
            case _:
                return
        if follows:
            self.awaited.discard(process)
        else:
            self.awaited.add(process)

    def deadline(self) -> float | None:
        """Return the time at which a process may be too late in following an order; None if none can be."""
        return self._look_at if self.awaited and self.name not in _UNLIMITED else None

    def late(self, now: float) -> list[Process]:
        """Return the processes that have not followed the order in time, sorted by connection number."""
        at = self.deadline()
        if at is None or now < at:
            return []
        late = {process for process in self.awaited if self._is_late(process, now)}
        heard_at = (max(process.heard_at, self.since) for process in self.awaited - late)
        self._look_at = max(self._look_at, min(heard_at, default=now) + self._grace_s)
        return sorted(late, key=lambda process: process.number)

    def _is_late(self, process: Process, now: float) -> bool:
        is_strict = self.name is JobPhase.RECOVERING and process.state is not ProcessState.CONDEMNED
        is_strict |= process.state is ProcessState.JOINING
        heard_at = self.since if is_strict else max(process.heard_at, self.since)
        return heard_at + self._grace_s <= now


class OrderBook:
    """Issuer of orders to processes, which are numbered, and repeated until a process confirms them.

    All processes of one state get the same object, so that it is packed once.

    Args:
        answer_s: least time between two answers to the reports of a process; None to answer only those that
            do not know the order.
    """

    def __init__(self, answer_s: float | None) -> None:
        self._answer_s = answer_s
        self._template: Order | None = None
        self._orders: dict[ProcessState, Order] = {}
        self._number = 0

    def give(
        self, template: Order, touched: Iterable[Process], living: Iterable[Process], now: float
    ) -> list[Send]:
        """Return the orders to send now; `template` is that of the training ranks, without a number.

        Processes that have reported, or changed, since the last call are `touched`, all are `living`.
        """
        if template != self._template:
            self._template, self._orders, touched = template, {}, living
        found = []
        for process in touched:
            if process.state in _UNGIVEN or not process.is_connected:
                continue
            order = self._order_of(process, template)
            knows = process.report.heard >= order.number
            is_old = now - process.ordered_at >= (self._answer_s or _REPEAT_S)
            if process.order is not order or (is_old and (not knows or self._answer_s is not None)):
                process.order, process.ordered_at = order, now
                found.append(Send(process, order))
        return found

    def _order_of(self, process: Process, template: Order) -> Order:
        """Return the order to send to a process, never older than the last one that it was sent."""
        state = ProcessState.MEMBER if process.is_member else process.state
        last, order = process.order, self._orders.get(state)
        if order is None or (last is not None and last.number > order.number):
            self._number += 1
            order = template
            if state is not ProcessState.MEMBER:
                task = Task.WAIT if state is ProcessState.STANDING else Task.LEAVE
                order = replace(NO_ORDER, task=task, all_ended=template.all_ended, period_s=template.period_s)
            order = self._orders[state] = replace(order, number=self._number)
        return order

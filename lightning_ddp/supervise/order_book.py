"""Who is given which order, and when again. Pure: told the time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lightning_ddp.supervise.actions import Send
from lightning_ddp.supervise.orders import Order, Task
from lightning_ddp.supervise.processes import Process, ProcessState

__all__ = ["OrderBook"]

_REPEAT_S = 0.5
"""An order that a process has not heard is given again at its next report, after so long."""
_UNGIVEN = frozenset({ProcessState.CONDEMNED, ProcessState.GONE})


class OrderBook:
    """The orders that are in force: one object for all processes of a class, so that it is packed once.

    Args:
        answer_s: each report is answered by the order, but not sooner than so long after it was given last;
            None to answer those only that do not know it.
    """

    def __init__(self, answer_s: float | None) -> None:
        self._answer_s = answer_s
        self._template: Order | None = None
        self._orders: dict[ProcessState, Order] = {}
        self._number = 0

    def give(
        self, template: Order, touched: Iterable[Process], living: Iterable[Process], now: float
    ) -> list[Send]:
        """The orders that are to be sent now.

        Args:
            template: what members are to do, with any number; one is given to it if it has changed.
            touched: those that have reported, or changed, since the last call.
            living: all.
            now: the time.
        """
        if template != self._template:
            self._template, self._orders, touched = template, {}, living
        found = []
        for process in touched:
            if process.state in _UNGIVEN or not process.is_connected:
                continue
            order = self._order_of(process)
            knows = process.report is not None and process.report.heard >= order.number
            is_old = now - process.ordered_at >= (self._answer_s or _REPEAT_S)
            if process.order is not order or (is_old and (not knows or self._answer_s is not None)):
                process.order, process.ordered_at = order, now
                found.append(Send(process, order))
        return found

    def _order_of(self, process: Process) -> Order:
        """The order of a process; it never gets one that is older than one that it may know."""
        assert self._template is not None
        state = ProcessState.MEMBER if process.is_member else process.state
        order = self._orders.get(state)
        if order is not None and (process.order is order or order.number > _number_of(process.order)):
            return order
        self._number += 1
        order = replace(self._template, number=self._number)
        if state is not ProcessState.MEMBER:
            task = Task.WAIT if state is ProcessState.STANDING else Task.LEAVE
            nothing: dict[str, Any] = {"position": 0, "has_new": False, "wish": None, "record": None}
            order = replace(order, task=task, generation=None, **nothing)
        self._orders[state] = order
        return order


def _number_of(order: Order | None) -> int:
    return 0 if order is None else order.number

"""Orders in force, and to whom they are sent when (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lightning_ddp.supervise.actions import Send
from lightning_ddp.supervise.orders import Order, Task
from lightning_ddp.supervise.processes import Process, ProcessState

__all__ = ["OrderBook"]

_REPEAT_S = 0.5
"""Least time between an order and its repetition to a process that has not heard it."""
_UNGIVEN = frozenset({ProcessState.CONDEMNED, ProcessState.GONE})


class OrderBook:
    """Orders of one template: one object for all processes of a state, so that it is packed once.

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
        """Return what is to be sent now.

        Args:
            template: order of the members, without a number.
            touched: processes that have reported, or changed, since the last call.
            living: all processes.
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
        """Return the order of a process: never one that is older than the last that it was sent."""
        state = ProcessState.MEMBER if process.is_member else process.state
        last, order = process.order, self._orders.get(state)
        if order is None or (last is not None and last.number > order.number):
            self._number += 1
            order = replace(template, number=self._number)
            if state is not ProcessState.MEMBER:
                task = Task.WAIT if state is ProcessState.STANDING else Task.LEAVE
                order = replace(
                    order, task=task, position=0, has_new=False, wish=None, record=None, generation=None
                )
            self._orders[state] = order
        return order

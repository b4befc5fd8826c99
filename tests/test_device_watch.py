"""What a device has still to run is looked after: it ends, is forgotten, or NCCL has found an error.

The events are ones that a test ends itself; on a device they are torch's. `test_simcuda_trainer` has the
deadlines, and what other ranks say.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch

from lightning_ddp.comm import device_watch
from lightning_ddp.comm.activity import Interrupt, Waiting
from lightning_ddp.comm.device_watch import DeviceWatch
from lightning_ddp.errors import CollectiveError

DEADLINE_S = 30.0
DEVICE = torch.device("cpu")


class Event:
    """Has come once `come` is set."""

    def __init__(self) -> None:
        self.come = threading.Event()
        self.asked = threading.Event()

    def query(self) -> bool:
        self.asked.set()
        return self.come.is_set()


class Error(Enum):
    SUCCESS = 0
    COMM_ERROR = 2


class Group:
    """What a watch asks of a process group."""

    def __init__(self) -> None:
        self.error = Error.SUCCESS

    def rank(self) -> int:
        return 3

    def get_error(self) -> Error:
        return self.error


class Watched:
    """A watch, the events that it has recorded, and what it found."""

    def __init__(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(device_watch, "_record", self._record)
        monkeypatch.setattr(device_watch, "_LOOK_S", 0.005)
        self.interrupt = Interrupt()
        self.group = Group()
        self.events: list[Event] = []
        self.failures: list[BaseException] = []
        self.has_failed = threading.Event()
        self.watch = DeviceWatch(self.interrupt, self._note)

    def _note(self, error: BaseException) -> None:
        self.failures.append(error)
        self.has_failed.set()

    def _record(self, event: Event | None, device: torch.device) -> Event:
        assert device == DEVICE
        event = event or Event()
        event.come.clear()
        event.asked.clear()
        self.events.append(event)
        return event

    def expect(self, on_slice: Callable[[float], None] | None = None) -> Event:
        waiting = Waiting("backward 7", time.monotonic(), None, is_side=True)
        self.watch.expect(waiting, process_group=self.group, device=DEVICE, on_slice=on_slice)
        return self.events[-1]

    def failure(self) -> BaseException:
        assert self.has_failed.wait(DEADLINE_S), "nothing was found"
        (error,) = self.failures
        return error


@pytest.fixture
def watched(monkeypatch) -> Any:
    made = Watched(monkeypatch)
    yield made
    made.watch.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def test_steps_that_end_leave_no_trace(watched):
    told: list[float] = []
    event = watched.expect(told.append)
    wait_until(lambda: len(told) > 2)
    assert told == sorted(told)
    activity = watched.interrupt.activity
    assert activity.label == "backward 7", "who asks where this rank is hears that its device waits"
    event.come.set()
    wait_until(lambda: activity.count == 1)
    assert activity.label is None
    again = watched.expect()
    assert again is event, "the event of a step that has ended serves the next one"
    assert again.asked.wait(DEADLINE_S)
    assert watched.failures == []


def test_of_many_steps_the_oldest_is_asked_for_and_then_the_newest(watched):
    first = watched.expect()
    assert first.asked.wait(DEADLINE_S)
    second, third = watched.expect(), watched.expect()
    fourth = watched.expect()
    assert fourth is second, "what nobody asks for any more is recorded again"
    assert not fourth.asked.is_set()
    assert not third.asked.is_set()
    first.come.set()
    assert fourth.asked.wait(DEADLINE_S)
    assert not third.asked.is_set()


def test_an_error_that_nccl_has_found_is_raised_though_the_event_has_come(watched):
    watched.group.error = Error.COMM_ERROR
    watched.expect().come.set()
    error = watched.failure()
    assert isinstance(error, CollectiveError)
    assert str(error).startswith("backward 7: NCCL's watchdog reports COMM_ERROR")
    assert (error.label, error.rank) == ("backward 7", 3)


def test_what_is_forgotten_is_not_found_broken_and_the_next_step_is_looked_after(watched):
    """Its groups are aborted, as the run goes on without a rank."""
    event = watched.expect()
    assert event.asked.wait(DEADLINE_S)
    watched.watch.forget()
    assert watched.interrupt.activity.label is None
    later = watched.expect()
    assert later.asked.wait(DEADLINE_S), "though the first event has not come"
    assert watched.failures == []
    watched.group.error = Error.COMM_ERROR
    assert isinstance(watched.failure(), CollectiveError)


def test_work_of_the_group_after_a_recovery_is_looked_after_though_the_failure_before_took_longer(watched):
    has_recovered = threading.Event()

    def recover(error: BaseException) -> None:
        watched.group.error = Error.SUCCESS
        watched.watch.forget()
        watched.expect()
        has_recovered.set()

    watched.watch._on_failure = recover
    watched.group.error = Error.COMM_ERROR
    before = watched.expect()
    assert has_recovered.wait(DEADLINE_S)
    assert before is not watched.events[-1]
    assert watched.events[-1].asked.wait(DEADLINE_S)


def test_after_a_failure_and_after_the_end_nothing_is_asked_for(watched):
    has_looked = threading.Event()

    def look(waited_s: float) -> None:
        has_looked.set()
        raise ValueError("this test's")

    watched.interrupt.set(RuntimeError("another rank failed before"))
    watched.expect(look)
    assert has_looked.wait(DEADLINE_S)
    watched.watch.close()
    wait_until(lambda: "lightning_ddp device watch" not in {thread.name for thread in threading.enumerate()})
    assert watched.failures == [], "the run has failed already"
    num_events = len(watched.events)
    later = Waiting("later", time.monotonic(), None)
    watched.watch.expect(later, process_group=watched.group, device=DEVICE)
    assert len(watched.events) == num_events

"""Calls of the control server to go on without a lost rank: heard in its thread, answered in the main one."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.comm.teardown import abort_groups
from lightning_ddp.errors import PeerFailure
from lightning_ddp.supervise.client import Watch
from lightning_ddp.supervise.membership import Member
from lightning_ddp.supervise.protocol import (
    Begun,
    Declined,
    Form,
    Gather,
    Joined,
    MeetAfter,
    Message,
    Muster,
    Position,
    Prepared,
    Ready,
    Take,
)
from lightning_ddp.supervise.stop_main import Alarm, StepBoundary

__all__ = ["Calls"]

_RING_EVERY_S = 0.1
_ABORT_AFTER_S = 0.3
_LOOK_EVERY_S = 0.05
_DECLINE_AFTER_S = 30.0
"""How long a process that could not meet the others waits for the call that says why."""


class Calls:
    """What this process hears of lost ranks, and how its main thread is stopped and goes on.

    Args:
        place: the rank that this process had in the beginning.
        interrupt: what the waits of this process look at.
        alarm: what raises in its main thread.
        boundary: counts the step boundaries of a generation.
    """

    def __init__(self, place: int, interrupt: Interrupt, alarm: Alarm, boundary: StepBoundary) -> None:
        self.member = Member(place)
        self.error: PeerFailure | None = None
        """What the main thread is stopped by, from a call until the generation that it leads to."""
        self.may_leave = False
        """Whether a step boundary is still to come at which this process may leave the others."""
        self.has_left = False
        """Whether it has, as it was asked to: it ends with code 0, and nobody expects anything of it."""
        self.heard_at = 0.0
        """When the first call since then came, of `time.monotonic`."""
        self.watch: Watch | None = None
        self._interrupt, self._alarm, self._boundary = interrupt, alarm, boundary
        self._form: Form | None = None
        self._place = place
        """That this process is to have, if it is a spare that is called."""
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._has_stopped = False
        self._num_stops = 0
        self._gone_on_in = 0
        """The last generation of which this process has the state."""

    # ------------------------------------------------------------------ the thread of the channel

    def on_message(self, message: Message) -> bool:
        """A message; returns whether it was one for this object."""
        match message:
            case Muster():
                if self.member.hear_call(message):
                    self._stop_main(message)
                elif (again := self.member.repeat()) is not None and self.watch is not None:
                    self.watch.post(again)
            case Gather():
                if self.watch is not None:
                    self.watch.post(Position(self._boundary.gather()))
            case MeetAfter(position=position, has_new=has_new):
                if self.member.hear_call(message):
                    self._boundary.meet_after(position, has_new=has_new)
            case Take(place):
                self._place = place
            case Form(generation=generation):
                if self._form is None or generation > self._form.generation:
                    self._boundary.restart()  # on all ranks before the server asks for anything else
                self._form = message
                if generation == self._gone_on_in and self.watch is not None:  # it has not heard so
                    self.watch.post(Joined(generation))
            case _:
                return False
        self._changed.set()
        return True

    def _stop_main(self, muster: Muster) -> None:
        error = muster.record.to_error(self.member.rank)
        with self._lock:
            if self.error is None:
                self.heard_at = time.monotonic()
            self.error = error
            if self._has_stopped:  # it waits for a generation to enter, and hears of the call there
                return
            self._interrupt.clear()
            self._interrupt.set(error)
            stop = self._num_stops
        threading.Thread(target=self._ring, args=(error, stop), daemon=True, name="muster-alarm").start()

    def _ring(self, error: PeerFailure, stop: int) -> None:
        """Until the main thread has stopped; one that is blocked in C++ is freed.

        Again and again, as it may be about to open connections in which it is blocked then.
        """
        abort_at = time.monotonic() + _ABORT_AFTER_S
        while True:
            with self._lock:
                if self._num_stops != stop or self.error is not error:  # it may be in another generation
                    return
                if time.monotonic() >= abort_at:
                    abort_at = time.monotonic() + _ABORT_AFTER_S
                    abort_groups()
            self._alarm.ring(error)
            time.sleep(_RING_EVERY_S)

    def goes_on_without(self, place: int) -> bool:
        """Whether the last generation that was heard of has nobody in a place."""
        return self._form is not None and place not in self._form.members

    # ------------------------------------------------------------------ the main thread

    def defer(self, is_deferred: bool) -> None:
        """Whether the alarm waits, as the main thread is between the end of a backward and a boundary."""
        self._alarm.is_deferred = is_deferred

    def wait_for_call(self, within_s: float) -> bool:
        """Whether there is a call, waiting for one if a connection was lost: it says why."""
        deadline = time.monotonic() + within_s
        while self.error is None and time.monotonic() < deadline:
            if self.watch is not None and self.watch.failure is not None:
                return False
            time.sleep(_LOOK_EVERY_S)
        return self.error is not None

    def stop(self) -> None:
        """The main thread has stopped: nothing is raised in it any more, and its groups are aborted."""
        self._alarm.silence()
        with self._lock:
            self._has_stopped = True
            self._num_stops += 1
            self._interrupt.clear()
            abort_groups()

    def waiting(self) -> AbstractContextManager[None]:
        """In here the main thread waits for the other ranks, which is no stall of this one."""
        return self._interrupt.activity.waiting("the others, to go on with them")

    def wait_for_form(
        self, step: int, *, is_clean: bool, is_trying: bool, phase: int, check: Callable[[], None]
    ) -> Form:
        """Answers the call, and each one that follows; returns the generation that this process is to enter.

        Or the one that it is left out of, as it has asked for.

        Args:
            step: optimizer steps that are committed.
            is_clean: whether the state is that after this step.
            is_trying: whether the next one had begun.
            phase: parts of the loops that are finished.
            check: called now and then; raises where the run ends.
        """
        assert self.watch is not None
        posted = None
        declines_at = time.monotonic() + _DECLINE_AFTER_S
        with self.waiting():
            while True:
                self._changed.clear()
                answer = self.member.answer(step, is_clean=is_clean, is_trying=is_trying, phase=phase)
                if answer is not posted:
                    self.watch.post(answer)
                    posted = answer
                form = self._form
                if form is not None and (self.member.fits(form) or self.member.is_released(form)):
                    return form
                if time.monotonic() >= declines_at and not self.member.is_called:
                    declines_at = math.inf
                    self.decline("the ranks that are left could not connect to each other")
                self._changed.wait(_LOOK_EVERY_S)
                check()

    def wait_for_invitation(self, check: Callable[[], None]) -> Form:
        """In a new process: asks to join the others; returns the generation that it is a member of.

        A spare waits to be called to a place, and asks again. `check` is as of `wait_for_form`.
        """
        assert self.watch is not None
        self.watch.post(Ready())
        while True:
            self._changed.clear()
            if self._place != self.member.place:
                self.member.take(self._place)
                self.watch.post(Ready())
            form = self._form
            if form is not None and self.member.is_invited(form):
                self.heard_at = time.monotonic()
                return form
            self._changed.wait(_LOOK_EVERY_S)
            check()

    def prepared(self) -> None:
        """The set-up of the script is over: spares may be started."""
        assert self.watch is not None
        self.watch.post(Prepared())

    def meet(self) -> None:
        """This process stands at the boundary where others join or leave."""
        self.heard_at = time.monotonic()

    def enter(self, form: Form) -> None:
        """From now on this process belongs to a generation; what fails in it is another failure.

        Raises `PeerFailure` if another rank is lost already.
        """
        assert self.watch is not None
        with self._lock:
            self.member.enter(form)
            self._check_called()
            self._has_stopped = False
            self._interrupt.clear()
        self.watch.identity = replace(self.watch.identity, rank=self.member.rank)

    def _check_called(self) -> None:
        if self.member.is_called:
            assert self.error is not None
            raise self.error

    def go_on(self) -> None:
        """The generation that was entered has its state: the main thread may be interrupted again.

        Raises `PeerFailure` if another rank is lost already.
        """
        assert self.watch is not None
        with self._lock:
            self._check_called()
            self.error = None
            self._gone_on_in = self.member.generation
        self._alarm.arm()
        self.watch.post(Joined(self.member.generation))

    def begin_again(self) -> None:
        """What was interrupted is about to be done again: if that fails alike, it is no chance."""
        assert self.watch is not None
        self.watch.post(Begun(self.member.generation))
        self.watch.flush()  # this process may end at once, and its thread with it

    def decline(self, why: str) -> None:
        """This process cannot go on, so that the run ends on all."""
        if self.error is not None and self.watch is not None:
            self.watch.post(Declined(self.member.last_call, why[:200]))

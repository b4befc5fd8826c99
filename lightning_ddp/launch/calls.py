"""Calls of the control server to go on without a lost rank: heard in its thread, answered in the main one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.comm.teardown import abort_groups
from lightning_ddp.errors import PeerFailure
from lightning_ddp.supervise.client import Watch
from lightning_ddp.supervise.protocol import Begun, Declined, Form, Message
from lightning_ddp.supervise.rank_state import RankState
from lightning_ddp.supervise.stop_main import Alarm, StepBoundary

__all__ = ["Calls"]

_RING_EVERY_S = 0.1
_ABORT_AFTER_S = 0.3
_LOOK_EVERY_S = 0.05


class Calls:
    """What this process hears of lost ranks, and how its main thread is stopped and goes on.

    Args:
        place: the rank that this process had in the beginning.
        interrupt: what the waits of this process look at.
        alarm: what raises in its main thread.
        boundary: counts the step boundaries of a generation.
        is_new: whether this process is in the place of a lost one.
    """

    def __init__(
        self, place: int, interrupt: Interrupt, alarm: Alarm, boundary: StepBoundary, *, is_new: bool
    ) -> None:
        self.state = RankState(place, boundary, is_new=is_new)
        self.may_leave = False
        """Whether a step boundary is still to come at which this process may leave the others."""
        self.has_left = False
        """Whether it has, as it was asked to: it ends with code 0, and nobody expects anything of it."""
        self.heard_at = 0.0
        """When the first call came since this process had the state of a generation, of `time.monotonic`."""
        self._timed_in = -1
        """That generation."""
        self.watch: Watch | None = None
        self._interrupt, self._alarm = interrupt, alarm
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._num_stops = 0

    @property
    def error(self) -> PeerFailure | None:
        """What the main thread is stopped by, from a call until the generation that it leads to."""
        return self.state.error

    # ------------------------------------------------------------------ the thread of the channel

    def on_message(self, message: Message) -> bool:
        """A message; returns whether it was one for this object."""
        with self._lock:
            heard = self.state.hear(message)
            if heard is None:
                return False
            if self.error is not None and self._timed_in != self.state.state_of:
                self.heard_at, self._timed_in = time.monotonic(), self.state.state_of
            if heard.stops is not None:
                self._stop_main(heard.stops)
        for reply in heard.replies:
            self._post(reply)
        self._changed.set()
        return True

    def _post(self, *messages: Message) -> None:
        assert self.watch is not None
        for message in messages:
            self.watch.post(message)

    def _stop_main(self, error: PeerFailure) -> None:
        self._interrupt.clear()
        self._interrupt.set(error)
        ring = threading.Thread(
            target=self._ring, args=(error, self._num_stops), daemon=True, name="muster-alarm"
        )
        ring.start()

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
            self.state.stop()
            self._num_stops += 1
            self._interrupt.clear()
            abort_groups()

    def waiting(self) -> AbstractContextManager[None]:
        """In here the main thread waits for the other ranks, which is no stall of this one."""
        return self._interrupt.activity.waiting("the other ranks, to continue with them")

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
        posted = None
        with self.waiting():
            while True:
                self._changed.clear()
                with self._lock:
                    answer = self.state.answer(step, is_clean=is_clean, is_trying=is_trying, phase=phase)
                    form = self.state.next_form()
                if answer is not posted:
                    self._post(answer)
                    posted = answer
                if form is not None:
                    return form
                self._changed.wait(_LOOK_EVERY_S)
                check()

    def wait_for_invitation(self, check: Callable[[], None]) -> Form:
        """In a new process: asks to join the others; returns the generation that it is a member of.

        `check` is as of `wait_for_form`.
        """
        while True:
            self._changed.clear()
            with self._lock:
                asks, form = self.state.ask_to_join(), self.state.invitation()
            self._post(*asks)
            if form is not None:
                self.heard_at = time.monotonic()
                return form
            self._changed.wait(_LOOK_EVERY_S)
            check()

    def stop_instead_of_leaving(self) -> None:
        """No such boundary is to come in this fit: if this process was asked to leave, all stop."""
        self.may_leave = False
        self._post(*self.state.stop_instead())

    def meet(self) -> None:
        """This process stands at the boundary where others join or leave."""
        self.heard_at = time.monotonic()

    def enter(self, form: Form) -> None:
        """From now on this process belongs to a generation; what fails in it is another failure.

        Raises `PeerFailure` if another rank is lost already.
        """
        assert self.watch is not None
        with self._lock:
            self.state.enter(form)
            self._interrupt.clear()
        self.watch.identity = replace(self.watch.identity, rank=self.state.rank)

    def go_on(self) -> None:
        """The generation that was entered has its state: the main thread may be interrupted again.

        Raises `PeerFailure` if another rank is lost already.
        """
        with self._lock:
            said = self.state.go_on()
        self._alarm.arm()
        self._post(*said)

    def begin_again(self) -> None:
        """What was interrupted is about to be done again: if that fails alike, it is no chance."""
        assert self.watch is not None
        self._post(Begun(self.state.generation))
        self.watch.flush()  # this process may end at once, and its thread with it

    def decline(self, why: str) -> None:
        """This process cannot go on, so that the run ends on all."""
        if self.error is not None and self.watch is not None:
            self._post(Declined(self.state.last_call, why[:200]))

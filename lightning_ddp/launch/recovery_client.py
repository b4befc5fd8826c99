"""How the main thread of a rank is stopped by the loss of another one, and goes on in the next generation.

`RankState` knows what this process is; here are the threads: that of the control channel stops the main one,
which answers, and waits for the generation that it enters next.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.comm.teardown import abort_groups
from lightning_ddp.errors import PeerFailure
from lightning_ddp.supervise.client import ControlClient
from lightning_ddp.supervise.interrupt_guard import InterruptGuard
from lightning_ddp.supervise.orders import NewGeneration, Progress
from lightning_ddp.supervise.rank_state import RankState

__all__ = ["RecoveryClient"]

_RING_EVERY_S = 0.1
_ABORT_AFTER_S = 0.3
_LOOK_EVERY_S = 0.05
_ASK_EVERY = 10
"""After so many looks it is asked once more."""


class RecoveryClient:
    """What this process does about lost ranks.

    Args:
        interrupt: what the waits of this process look at.
        alarm: what raises in its main thread.
        watch: its end of the control channel.
    """

    def __init__(self, interrupt: Interrupt, alarm: InterruptGuard, watch: ControlClient) -> None:
        self.state = watch.state
        self.may_leave = False
        """Whether a step boundary is still to come at which this process may leave the others."""
        self.has_left = False
        """Whether it has, as it was asked to: it ends with code 0, and nobody expects anything of it."""
        self.heard_at = 0.0
        """When the first call came since this process had the state of a generation, of `time.monotonic`."""
        self._timed_in = -1
        """That generation."""
        self.error: PeerFailure | None = None
        """What the main thread was stopped by last, until it enters another generation."""
        self._watch = watch
        self._interrupt, self._alarm = interrupt, alarm
        self._changed = threading.Event()
        self._aborting = threading.Lock()
        """Held by who aborts the groups of the generation, so that none does so with those of the next."""
        self._num_stops = 0

    # ------------------------------------------------------------------ the thread of the channel

    def on_order(self, error: PeerFailure | None) -> None:
        """An order has come: `error` stops the main thread. The lock of the watch is held."""
        if error is not None:
            self.error = error
            if self._timed_in != self.state.state_of:
                self.heard_at, self._timed_in = time.monotonic(), self.state.state_of
            self._interrupt.clear()
            self._interrupt.set(error)
            arguments = (error, self._num_stops)
            threading.Thread(target=self._ring, args=arguments, daemon=True, name="recovery-alarm").start()
        self._changed.set()

    def _ring(self, error: PeerFailure, stop: int) -> None:
        """Until the main thread has stopped; one that is blocked in C++ is freed.

        Again and again, as it may be about to open connections in which it is blocked then.
        """
        abort_at = time.monotonic() + _ABORT_AFTER_S
        while True:
            with self._aborting:
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
        self._alarm.defer(is_deferred)

    @property
    def is_called(self) -> bool:
        """Whether the main thread has to stop, as a rank is lost."""
        return self.state.is_called

    def wait_for_call(self, within_s: float) -> bool:
        """Whether there is a call, waiting for one if a connection was lost: it says why.

        Time in which this process is stopped does not count, as it hears nothing then.
        """
        for number in range(math.ceil(within_s / _LOOK_EVERY_S)):
            if self.is_called or self._watch.failure is not None:
                break
            if number % _ASK_EVERY == 0:
                self._watch.update(RankState.say_again)
            time.sleep(_LOOK_EVERY_S)
        return self.is_called and self._watch.failure is None

    def stop(self, *, has_met: bool = False) -> None:
        """The main thread has stopped: nothing is raised in it any more, and its groups are aborted.

        Args:
            has_met: whether it stands at the boundary where all meet.
        """
        self._alarm.silence()
        self._watch.update(lambda state: state.stop(has_met=has_met))
        with self._aborting:
            self._num_stops += 1
            self._interrupt.clear()
            abort_groups()

    def waiting(self) -> AbstractContextManager[None]:
        """In here the main thread waits for the other ranks, which is no stall of this one."""
        return self._interrupt.activity.waiting("the other ranks, to continue with them")

    def wait_for_generation(
        self, progress: Progress | None, check: Callable[[], None]
    ) -> NewGeneration | None:
        """Says where this process has stopped; returns the generation that it has entered then.

        From then on what fails is another failure. None if it is to end with code 0: it has left, as it was
        asked to, or the others have ended without it.

        Args:
            progress: where; None for a process that has no state.
            check: called now and then; raises where the run ends.
        """
        watch = self._watch
        if progress is None:
            watch.update(RankState.stand)
        else:
            watch.update(lambda state: state.answer(progress))
        with self.waiting():
            while True:
                self._changed.clear()
                with watch.lock:
                    new = self.state.enter_next()
                    if new is not None:
                        self.error = None
                        self._interrupt.clear()
                        if progress is None:
                            self.heard_at = time.monotonic()
                if new is not None or watch.has_been_left:
                    return new
                self._changed.wait(_LOOK_EVERY_S)
                check()

    def begin_fit(self) -> None:
        """A fit begins, in which boundaries have places; all ranks have passed equally many."""
        with self._watch.lock:
            self.state.begin_fit()

    def place_boundary(self, number: int, *, may_meet: bool) -> None:
        """As of `RankState`."""
        with self._watch.lock:
            self.state.place_boundary(number, may_meet=may_meet)

    def stop_instead_of_leaving(self) -> None:
        """No such boundary is to come in this fit: if this process was asked to leave, all stop."""
        self.may_leave = False
        self._watch.update(RankState.end_boundaries)

    def meet(self) -> None:
        """This process stands at the boundary where others join or leave."""
        self.heard_at = time.monotonic()

    def settle(self) -> None:
        """The generation that was entered has its state: the main thread may be interrupted again.

        Raises `PeerFailure` if another rank is lost already.
        """
        self._watch.update(RankState.settle)
        self._alarm.arm(is_deferred=True)

"""Stops the main thread of a rank for the loss of another one, and leads it into the next generation.

`RankState` has what this process is; here is what its threads do.
"""

from __future__ import annotations

import gc
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

_LOOK_EVERY_S = 0.05
_ASK_EVERY = 10
"""Number of looks after which the state is reported once more."""


class RecoveryClient:
    """A process's part in recoveries: interrupts its main thread and leads it into the next generation."""

    def __init__(self, interrupt: Interrupt, alarm: InterruptGuard, watch: ControlClient) -> None:
        self.state = watch.state
        self.may_leave = False
        """True while a step boundary is to come at which this process may leave the others."""
        self.has_left = False
        """True if this process has left on request: it exits with code 0."""
        self.heard_at = 0.0
        """Time of the first order to recover since this process had the state of a generation."""
        self._timed_in = -1
        """The generation of `heard_at`."""
        self.error: PeerFailure | None = None
        """Error that stopped the main thread last, until it enters another generation."""
        self._watch = watch
        self._interrupt, self._alarm = interrupt, alarm
        self._changed = threading.Event()

    def on_order(self, error: PeerFailure | None) -> None:
        """Interrupt the main thread by `error` if an order has one. In the receiving thread, lock held."""
        if error is not None:
            self.error = error
            if self._timed_in != self.state.state_of:
                self.heard_at, self._timed_in = time.monotonic(), self.state.state_of
            self._interrupt.clear()
            self._interrupt.set(error)
            self._alarm.sound(error, abort_groups, is_final=False)
        self._changed.set()

    # ------------------------------------------------------------------ the main thread

    def defer(self, is_deferred: bool) -> None:
        """Defer interruptions of the main thread, from a backward's end to a step boundary, or allow them."""
        self._alarm.defer(is_deferred)

    def wait_for_call(self, within_s: float) -> bool:
        """Wait for the server's order to recover, which explains a lost connection; return True if it came.

        Time in which this process is stopped does not count, as it receives nothing then.
        """
        for number in range(math.ceil(within_s / _LOOK_EVERY_S)):
            if self.state.is_called or self._watch.failure is not None:
                break
            if number % _ASK_EVERY == 0:
                self._watch.update(RankState.say_again)
            time.sleep(_LOOK_EVERY_S)
        return self.state.is_called and self._watch.failure is None

    def stop(self, *, has_met: bool = False) -> None:
        """Report that the main thread has stopped, disable interruptions, and abort all process groups."""
        self._alarm.silence()
        self._watch.update(lambda state: state.stop(has_met=has_met))
        self._alarm.take()
        self._interrupt.clear()
        abort_groups()

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which the main thread waits for other ranks, and does not count as stalled."""
        return self._interrupt.activity.waiting("the other ranks, to continue with them")

    def wait_for_generation(
        self, progress: Progress | None, check: Callable[[], None]
    ) -> NewGeneration | None:
        """Report how far this process has trained; wait for the next generation of ranks; return it.

        Returns None if this process is to exit with code 0, as it has left or the others have ended.

        Args:
            progress: None for a process without state.
            check: called now and then; raises where the job ends.
        """
        watch = self._watch
        if progress is None:
            watch.update(RankState.stand)
        else:
            watch.update(lambda state: state.answer(progress))
            gc.collect()  # frees what is left of an earlier group, while the others report
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
        """Count step boundaries from here; called by all ranks at the beginning of a fit, in equal states."""
        with self._watch.lock:
            self.state.begin_fit()

    def place_boundary(self, number: int, *, may_meet: bool) -> None:
        """Set the number of the fit's next step boundary, and whether ranks may join or leave there."""
        with self._watch.lock:
            self.state.place_boundary(number, may_meet=may_meet)

    def stop_instead_of_leaving(self) -> None:
        """Forbid this rank to leave alone in the rest of the fit: a request to leave stops all ranks."""
        self.may_leave = False
        self._watch.update(RankState.end_boundaries)

    def meet(self) -> None:
        """Record the time at which this process reached the step boundary where ranks join or leave."""
        self.heard_at = time.monotonic()

    def settle(self) -> None:
        """Report that this process has its generation's state; enable interruptions, deferred at first.

        Raises `PeerFailure` if another rank is lost already.
        """
        self._watch.update(RankState.settle)
        self._alarm.arm(is_deferred=True)

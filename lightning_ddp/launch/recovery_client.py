"""A rank's part in recoveries: tells consequences of a lost rank, and leads into the next generation.

`RankState` has what this process is; here is what its threads do.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum, auto

import torch.distributed as dist

import lightning_ddp.comm as comm
import lightning_ddp.encoding as encoding
import lightning_ddp.shm as shm
from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.comm.nccl import LOST_CONNECTION, is_own_error
from lightning_ddp.comm.teardown import abort_groups
from lightning_ddp.encoding import side_stream
from lightning_ddp.errors import CollectiveError, LightningDDPError, PeerFailure
from lightning_ddp.supervise.client import ControlClient
from lightning_ddp.supervise.failure_detection import EXIT_WAIT_S
from lightning_ddp.supervise.failure_record import text_of
from lightning_ddp.supervise.interrupt_guard import InterruptGuard
from lightning_ddp.supervise.orders import NewGeneration, Progress, RankPhase
from lightning_ddp.supervise.rank_state import RankState

_LOOK_EVERY_S = 0.05
_ASK_EVERY = 10  # number of looks after which the state is reported once more
_STOPPED = {RankPhase.STOPPED, RankPhase.MEETING, RankPhase.STANDING, RankPhase.ENTERING}
_EXPLAINED_WITHIN_S = 2 * EXIT_WAIT_S
"""Seconds that a rank which cannot connect to others waits for the loss that explains it."""
_FROM_GLOO = re.compile(r"\[[^\]]*/gloo/[^\]]*:\d+\]")
_COMMUNICATE = tuple(os.path.dirname(str(room.__file__)) + os.sep for room in (comm, shm, encoding, dist))
_RUNS_JOBS = side_stream.__file__  # file of a room that communicates which runs the user's code as well


class Cause(Enum):
    """Cause of an exception: own code, another rank's failure, a lost connection, or the backend."""

    OWN = auto()  # code of this rank
    PEER = auto()  # the failure of another rank, which interrupted this one
    LOST_CONNECTION = auto()  # a backend, in words of a connection that broke: an echo, mostly
    BACKEND = auto()  # in other words: an echo only where groups were aborted because of a failure


def cause_of_error(error: BaseException) -> Cause:
    """Return the cause of an exception: own code, another rank, a lost connection, or the backend."""
    text = text_of(error)
    while not isinstance(error, PeerFailure) and isinstance(error, LightningDDPError):
        if not isinstance(error.__cause__, RuntimeError):
            break
        error = error.__cause__
    if isinstance(error, PeerFailure):
        return Cause.PEER
    if not _is_of_backend(error, text) or is_own_error(text):
        return Cause.OWN
    return Cause.LOST_CONNECTION if LOST_CONNECTION.search(text) else Cause.BACKEND


def _is_of_backend(error: BaseException, text: str) -> bool:
    """Return True if an exception was raised by a call that communicates, not by the user's own code."""
    if isinstance(error, LightningDDPError):
        return type(error) is CollectiveError  # those derived from it say more
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error, dist.DistError) or _FROM_GLOO.search(text):
        return True
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(file.startswith(_COMMUNICATE) and file != _RUNS_JOBS for file in files)


def interruption_behind(error: BaseException, interruption: BaseException | None) -> PeerFailure | None:
    """Return the `PeerFailure` that interrupted this rank and led to `error`; None if there is none."""
    cause: BaseException | None = error if isinstance(error, Exception) else None
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, PeerFailure) and (cause is error or cause is interruption):
            return cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return None


class RecoveryClient:
    """A process's part in recoveries: interrupts its main thread and leads it into the next generation.

    The order to recover explains a lost connection if it comes within `called_within_s` seconds.
    """

    def __init__(
        self, interrupt: Interrupt, alarm: InterruptGuard, watch: ControlClient, called_within_s: float
    ) -> None:
        self.state = watch.state
        self.may_leave = False
        """True while a step boundary is to come at which this process may leave the others."""
        self.has_left = False  # True if this process has left on request: it exits with code 0
        self.heard_at = 0.0
        """Time of the first order to recover since this process had the state of a generation."""
        self._timed_in = -1  # the generation of `heard_at`
        self.error: PeerFailure | None = None
        """Error that stopped the main thread last, until it enters another generation."""
        self._watch, self._called_within_s = watch, called_within_s
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

    @property
    def is_stopped(self) -> bool:
        """True from `stop` to `settle`, while nothing interrupts the main thread."""
        return self.state.phase in _STOPPED

    def defer(self, is_deferred: bool) -> None:
        """Defer interruptions of the main thread (from backward to step boundary), or allow them again."""
        self._alarm.defer(is_deferred)

    def is_call(self, error: BaseException) -> bool:
        """Wait for an order to recover that explains an exception; return True if a lost rank caused it."""
        if self._watch.failure is not None:
            return False
        cause = cause_of_error(error)
        # BACKEND: also connections to the store that were aborted, in many words
        if cause is not Cause.LOST_CONNECTION:
            return cause is not Cause.OWN and self.state.is_called
        if self.state.is_entering:
            self._wait_for_call(_EXPLAINED_WITHIN_S)  # then it reports that, and all meet anew
            return True
        return self._wait_for_call(self._called_within_s)

    def _wait_for_call(self, within_s: float) -> bool:
        """Wait up to `within_s` seconds for the server's order to recover; return True if it came."""
        before = self.state.state_of  # beside the main thread, this may see only what follows the recovery

        def is_explained() -> bool:
            return self.state.is_called or self.state.state_of != before

        # time in which this process is stopped does not count, as it receives nothing then
        for number in range(math.ceil(within_s / _LOOK_EVERY_S)):
            if is_explained() or self._watch.failure is not None:
                break
            if number % _ASK_EVERY == 0:
                self._watch.update(RankState.say_again)
            time.sleep(_LOOK_EVERY_S)
        return is_explained() and self._watch.failure is None

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
        `progress` is None for a process without state; `check` raises if the job has failed.
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
                check()  # after the interrupt was cleared, which may have been set for the job's last failure
                if new is not None or watch.has_been_left:
                    return new
                self._changed.wait(_LOOK_EVERY_S)

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
        """Report that this rank has its new group's model state; allow interruptions, deferred at first."""
        self._watch.update(RankState.settle)
        self._alarm.arm(is_deferred=True)

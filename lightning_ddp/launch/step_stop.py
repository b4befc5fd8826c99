"""Graceful stop for a signal, at the step boundary that all ranks have agreed on.

Lightning broadcasts the signal inside of its handler and asks for it with a collective in every step. Both
block where no Python runs, and a signal to another rank than 0 makes the first one wait for ever. Here the
loops look at the agreement of the control channel instead, which costs a lock and a counter.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from lightning_ddp._lightning import (
    at_step_boundaries,
    is_fitting,
    note_sigterm,
    replace_signal_handlers,
    sigterm_exception,
)
from lightning_ddp.launch.session import Session
from lightning_ddp.supervise.protocol import Stop

if TYPE_CHECKING:
    from lightning_ddp._lightning import Trainer

__all__ = ["StepStop"]


class StepStop:
    """Stops the loops of one Trainer.

    Args:
        session: of this process.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._trainer: Trainer | None = None
        self._requeue: Any = None

    def attach(self, trainer: Trainer) -> None:
        """Takes over from Lightning, where there is a control channel, before it registers its handlers.

        Raises:
            UnsupportedVersionError: this Lightning could not be taken over from.
        """
        self._session.control.follow(trainer)  # another launcher may have begun its run
        if self._session.control.watch is None or self._trainer is trainer:
            return
        self._trainer = trainer
        self._requeue = replace_signal_handlers(
            trainer, on_sigterm=_leave_to_stop_signals, on_requeue=self._ask_to_stop
        )
        at_step_boundaries(trainer, self.check)

    def check(self) -> None:
        """A step boundary. All ranks pass the same ones; does not communicate.

        Raises:
            SIGTERMException: all ranks stop here.
            PeerFailure: a rank has failed.
        """
        ours = self._session.control
        if self._trainer is None or not ours.reached_step_boundary():
            return
        note_sigterm(self._trainer)
        if ours.boundary.is_requeue:
            # all ranks save a checkpoint together, and rank 0 asks SLURM to start the job again
            self._requeue(ours.boundary.signal, None)
        raise sigterm_exception(self._trainer)

    def check_evaluation(self) -> None:
        """A step of an evaluation: a boundary unless it belongs to a fit, which stops between its own."""
        self._session.control.interrupt.activity.advance()
        if self._trainer is not None and not is_fitting(self._trainer):
            self.check()

    def _ask_to_stop(self, number: int, frame: types.FrameType | None) -> None:
        """Handler of the signal by which SLURM announces the end of a job."""
        watch = self._session.control.watch
        if watch is not None:
            watch.post(Stop(int(number), is_requeue=True))


def _leave_to_stop_signals(number: int, frame: types.FrameType | None) -> None:
    """In the place of Lightning's handler: `StopSignals` has its own, which Lightning calls next."""

"""Stops the loops of a Trainer for a signal, at the step boundary on which all ranks agree."""

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
from lightning_ddp.launch.job_context import JobContext
from lightning_ddp.supervise.orders import Wish, WishKind
from lightning_ddp.supervise.rank_state import Passage

if TYPE_CHECKING:
    from lightning_ddp._lightning import Trainer


PREEMPTED = 143
"""Exit code of a script that a signal stopped at a step boundary, as schedulers know it: 128 + SIGTERM."""


class StepStop:
    """Handler that stops a Trainer's loops for a signal, at the same step boundary on all ranks.

    Lightning calls a collective for that in every step. Here the loops read an order of the control channel.
    """

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._trainer: Trainer | None = None
        self._requeue: Any = None

    def attach(self, trainer: Trainer) -> None:
        """Replace a Trainer's signal handlers and signal check per step, if there is a control channel."""
        self._context.control.follow(trainer)  # another launcher may have begun its run
        if self._context.control.watch is None or self._trainer is trainer:
            return
        self._trainer = trainer
        # `FailureHandler` has a handler of its own for SIGTERM, which Lightning calls next
        self._requeue = replace_signal_handlers(
            trainer, on_sigterm=lambda number, frame: None, on_requeue=self._ask_to_stop
        )
        # where the run continues without ranks, the loop is wrapped, and calls it also on a rank alone
        at_step_boundaries(trainer, self.check if self._context.control.calls is None else lambda: None)

    def check(self) -> bool:
        """Pass a step boundary; return True if ranks join or leave there, raise if a signal stops all."""
        ours = self._context.control
        if self._trainer is None or (passage := ours.reached_step_boundary()) is Passage.GO:
            return False
        if passage is Passage.MEET:
            return True
        note_sigterm(self._trainer)
        wish = ours.watch.state.stops_for if ours.watch is not None else None
        is_requeue = wish is not None and wish.is_requeue
        if wish is not None and is_requeue:
            # all ranks save a checkpoint together, and rank 0 asks SLURM to start the job again
            self._requeue(wish.signal, None)
        # what others have started is judged by them
        is_judged = self._context.children.are_of_this_process and not is_requeue
        raise sigterm_exception(self._trainer)(PREEMPTED if is_judged else 0)

    def check_evaluation(self) -> None:
        """Tell stall detection of an evaluation step; outside of a fit, `check` it as a step boundary."""
        self._context.control.interrupt.activity.advance()
        if self._trainer is not None and not is_fitting(self._trainer):
            self.check()

    def _ask_to_stop(self, number: int, frame: types.FrameType | None) -> None:
        """Ask the server to stop all ranks and requeue the job, on SLURM's signal before the job's end."""
        watch = self._context.control.watch
        if watch is not None:
            watch.ask(Wish(WishKind.STOP, int(number), is_requeue=True))

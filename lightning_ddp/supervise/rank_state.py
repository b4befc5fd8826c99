"""What a process knows of the generations of its run, and what it says of that. Pure: it reads no clock.

The thread of the control channel brings messages (`hear`), the main thread says where it is; what is returned
is posted by whoever calls. `elastic/recovery.py` has the main thread's part, `launch/calls.py` the threads.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ddp.errors import PeerFailure
from lightning_ddp.supervise.protocol import (
    Form,
    Gather,
    Joined,
    Leave,
    MeetAfter,
    Message,
    Muster,
    Position,
    Present,
    Ready,
    Stop,
)
from lightning_ddp.supervise.stop_main import StepBoundary

__all__ = ["Heard", "RankState"]


@dataclass(frozen=True)
class Heard:
    """What follows from a message."""

    replies: tuple[Message, ...] = ()
    stops: PeerFailure | None = None
    """What the main thread is to be stopped with, unless it has stopped."""


class RankState:
    """A process's side of `Membership`.

    Args:
        place: the rank that this process had in the beginning.
        boundary: counts the step boundaries of a generation.
        is_new: whether this process is in the place of a lost one.
    """

    def __init__(self, place: int, boundary: StepBoundary, *, is_new: bool) -> None:
        self.place = place
        self.generation = 0
        self.rank = place
        """In this generation."""
        self.error: PeerFailure | None = None
        """What the main thread is stopped by, from a call until the generation that it leads to."""
        self._boundary = boundary
        self._has_stopped = False
        self._heard = 0
        self._answer: Present | None = None
        self._entered: Form | None = None
        self._form: Form | None = None
        """Heard of last."""
        self._asked: tuple[int, int] | None = None
        """Last call and last generation as it has asked to join, since it has stopped."""
        self.state_of = -1 if is_new else 0
        """The last generation of which this process has the state; -1 for none."""
        self._wish: Leave | None = None
        """What it has asked for, and asks for again in each generation until it is let go."""
        self._signal = 0
        """By which signal it was asked to."""

    # ------------------------------------------------------------------ the thread of the channel

    def hear(self, message: Message) -> Heard | None:
        """A message of the server; None for one of another subject."""
        match message:
            case Muster():
                if self._is_news(message):
                    self.error = message.record.to_error(self.rank)
                    return Heard(stops=None if self._has_stopped else self.error)
                return Heard(() if self._answer is None else (self._answer,))
            case Gather():
                return Heard((Position(self._boundary.gather()),))
            case MeetAfter(position=position, has_new=has_new):
                if self._is_news(message):
                    self._boundary.meet_after(position, has_new=has_new)
            case Form(generation=generation):
                if self._form is None or generation > self._form.generation:
                    self._boundary.restart()  # on all ranks before the server asks for anything else
                self._form = message
                if generation == self.state_of:  # the server has not heard so
                    return Heard((Joined(generation),))
            case _:
                return None
        return Heard()

    def _is_news(self, call: Muster | MeetAfter) -> bool:
        if call.call <= self._heard:
            return False
        self._heard, self._answer = call.call, None
        return True

    def goes_on_without(self, place: int) -> bool:
        """Whether the last generation that was heard of has nobody in a place."""
        return self._form is not None and place not in self._form.members

    # ------------------------------------------------------------------ the main thread

    @property
    def is_called(self) -> bool:
        """Whether it has to stop: there is a call that has led to no generation that it is in."""
        return self._heard > (self._entered.call if self._entered is not None else 0)

    @property
    def is_entering(self) -> bool:
        """Whether it is in a generation of which it has not the state: others may not get into it either."""
        return self._entered is not None and self.generation > self.state_of and not self._has_stopped

    @property
    def last_call(self) -> int:
        """The number of the last call."""
        return self._heard

    def ask_to_leave(self, signal: int, *, is_node: bool) -> Message:
        """This process, or its node, is to leave the others; what is to be said. Also in a signal handler."""
        self._signal, self._wish = signal, Leave(is_node)
        return self._wish

    def stop_instead(self) -> list[Message]:
        """No boundary comes any more at which this process may leave: what it says if it was asked to."""
        wish, self._wish = self._wish, None
        return [] if wish is None else [Stop(self._signal, is_requeue=False)]

    def stop(self) -> None:
        """The main thread has stopped; it commits nothing until `enter`."""
        self._has_stopped, self._asked = True, None

    def answer(self, step: int, *, is_clean: bool, is_trying: bool, phase: int = 0) -> Present:
        """The answer to the last call, which is given once: until `enter` nothing may be committed."""
        if self._answer is None:
            has_state = self.state_of >= 0
            self._answer = Present(
                self._heard, step, is_clean and has_state, is_trying, phase, self.generation, has_state
            )
        return self._answer

    def next_form(self) -> Form | None:
        """The generation that answers the last call, which this process enters, or is released from."""
        form = self._form
        if form is None or self._answer is None or form.call != self._heard:
            return None
        is_mine = self.place in form.members or self.place in form.left
        return form if is_mine and form.generation > self.generation else None

    def ask_to_join(self) -> list[Message]:
        """What a new process says until `invitation` has one; called again and again.

        If it was taken for a member meanwhile it answers the calls to those, without a state.
        """
        now = self._heard, 0 if self._form is None else self._form.generation
        if self._asked == now:
            return []
        self._asked = now
        self.rank = self.place
        said: list[Message] = [] if self._wish is None else [self._wish]
        if self.is_called or self._entered is not None:
            said.append(self.answer(0, is_clean=False, is_trying=False))
        return [*said, Ready()]

    def invitation(self) -> Form | None:
        """The generation that this process joins, as it has asked for."""
        form = self._form
        if form is None or form.generation <= self.generation or form.call < self._heard:
            return None
        return form if self.place in form.joined else None

    def enter(self, form: Form) -> None:
        """From now on this process belongs to a generation; raises `PeerFailure` if it is void already."""
        self._heard = max(self._heard, form.call)
        self.generation, self.rank = form.generation, form.members.index(self.place)
        self._entered, self._answer = form, None
        self._check_called()
        self.error, self._has_stopped = None, False

    def go_on(self) -> list[Message]:
        """This process has the state of its generation; raises `PeerFailure` if that is void already."""
        self._check_called()
        self.state_of = self.generation
        return [Joined(self.generation), *([] if self._wish is None else [self._wish])]

    def _check_called(self) -> None:
        if self.is_called:
            assert self.error is not None
            raise self.error

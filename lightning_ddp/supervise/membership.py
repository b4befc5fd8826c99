"""Membership: who goes on after a failure, and from which step. Pure: told who says what and when.

A run has generations. In each one a fixed set of processes takes its steps together. When one of them is
lost, the server calls the others; each stops, and answers how many optimizer steps it has committed. From its
answer on it commits nothing in the old generation. When all have answered, and the lost ones are known to
have ended, the server forms the next generation out of those that are left.

What is committed needs no vote, as an all-reduce needs all ranks: whoever has finished step k holds the state
after k, in which each rank had its part. So the largest step among the answers wins. Those that are one step
behind copy the state; if nobody has finished the step, all undo what they have of it and do it again.

A new process in the place of a lost one joins when it stands before its first step. For that the server has
all members stop at a boundary that they agree on, as for a signal: nothing is undone. The next generation has
the new process as well, and it takes over the state of the lowest member. If a member is lost meanwhile the
generation is formed without those that have not got their state; they may ask again.

Where fewer are left than there have to be, they may wait for new ones: they are a generation all the same,
but stop before its first step, until enough others ask to join.

A member that is asked to leave, as its machine is needed elsewhere, does so in the same way: all stop at a
boundary, and the next generation is formed without it. It is told, and ends; nothing failed.

Processes are known here by their places: the ranks that they had in the beginning, which never change.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from lightning_ddp.supervise.failure_record import FailureRecord
from lightning_ddp.supervise.protocol import Form, Gather, MeetAfter, Muster, Outgoing, Present
from lightning_ddp.supervise.settings import RecoverySettings, ReplaceSettings

__all__ = ["SETTLE_S", "STEPS_TO_FORGET", "Membership", "Phase"]

STEPS_TO_FORGET = 100
"""Committed steps after which earlier failures count no more."""
SETTLE_S = 0.1
"""How long after a failure others may join it, so that they are one change of the world and not two."""
REPEAT_S = 1.0
"""How often what has not been answered is said again."""
_MEETS_WITHIN_S = 30.0
"""How long ranks that are all there may fail to connect to each other."""
_MOST_VOIDS = 5
"""How often they may fail to at least: one that is stopped for a while makes a single attempt long."""
_OWN_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS}
)
"""What a process dies of by its own doing. Others come from outside: from people, schedulers, the kernel."""


class Phase(Enum):
    """What the server waits for."""

    RUNNING = auto()
    """Nothing: all train."""
    GATHERING = auto()
    """All members to stop at one boundary, where others join or leave."""
    CALLING = auto()
    """The answers to a call, and the ends of those that are lost."""
    FORMING = auto()
    """The word of each member that it is in the new generation."""
    OVER = auto()
    """The run ends."""


@dataclass
class _Repetition:
    """Failures of one kind that met the same samples."""

    step: int
    count: int = 1


def _kind_of(record: FailureRecord) -> tuple[str, bool]:
    """How a process has failed, and whether it may be by chance: from outside, and not of its code or data.

    >>> _kind_of(FailureRecord(rank=1, message="", exit_code=3))
    ('exit code 3', False)
    """
    error = record.exception_class or record.exception_type
    if error is not None:
        return error, False
    if record.exit_code is None:  # it was stopped, or its node is gone
        return "no word", True
    return f"exit code {record.exit_code}", record.exit_code < 0 and -record.exit_code not in _OWN_SIGNALS


class Membership:
    """The server's side.

    Args:
        places: all processes of the run.
        settings: limits.
        answer_s: how long a process may take to answer a call; then it is lost as well.
    """

    def __init__(self, places: Iterable[int], settings: RecoverySettings, answer_s: float) -> None:
        self._settings, self._answer_s = settings, answer_s
        self._wait_s = settings.wait_s if isinstance(settings, ReplaceSettings) else 0.0
        self._waits_until: float | None = None
        """Until when enough others have to come; None while there are enough."""
        self.phase = Phase.RUNNING
        self.generation = 0
        self.members: tuple[int, ...] = tuple(sorted(places))
        """Places of the present generation, or of the last one while there is none; by rank."""
        self.condemned: set[int] = set()
        """Lost, and not yet known to have ended: to be killed, and waited for, by their launchers."""
        self.reason: str | None = None
        """Why the run cannot go on."""
        self.cause: FailureRecord | None = None
        """The first failure since all were running."""
        self.num_recoveries = 0
        """Those that count."""
        self._call = 0
        self._answers: dict[int, Present] = {}
        self._lost: dict[int, tuple[str, bool]] = {}
        """Place -> how it has failed, as `_kind_of` says."""
        self._joined: set[int] = set()
        self._begun: set[int] = set()
        self._repetitions: dict[str, _Repetition] = {}
        self._ready: set[int] = set()
        """Those that ask to join."""
        self._newcomers: set[int] = set()
        """Members that have not got their state yet."""
        self._leaving: set[int] = set()
        """Members that ask to leave."""
        self._left: set[int] = set()
        """Those that have, since a generation was whole."""
        self._leaves_at = 0.0
        self._is_stopping = False
        """Whether all are to stop at a boundary."""
        self._has_new = False
        """Whether those that gather expect others to join."""
        self._positions: dict[int, int] = {}
        self._has_met = False
        """Whether those that gather have been told where."""
        self._form: Form | None = None
        self._settles_at = self._answer_by = self._repeat_at = 0.0
        self._recovered_at: int | None = None
        self._voids: list[float] = []
        """When generations did not become whole, though nobody was lost, since one was."""

    @property
    def remaining(self) -> tuple[int, ...]:
        """The members that are not lost."""
        return tuple(place for place in self.members if place not in self._lost)

    # ------------------------------------------------------------------ what is heard

    def lost(self, place: int, cause: FailureRecord, now: float, *, has_ended: bool) -> Outgoing:
        """A process is lost; it is `condemned` unless it is certain that it does nothing any more."""
        if self.phase is Phase.OVER or place not in self.members or place in self._lost:
            return []
        called = self._call_all(cause, now)
        if place in self._newcomers:  # it has not got as far as the others, to whom it is no loss
            self.members = tuple(p for p in self.members if p != place)
            self._newcomers.discard(place)
        else:
            self._lost[place] = _kind_of(cause)
        self._leaving.discard(place)
        self._answers.pop(place, None)
        self._settles_at, self._repeat_at = now + SETTLE_S, now + REPEAT_S
        if not has_ended:
            self.condemned.add(place)
        if self._is_short(self.remaining):
            if not self._wait_s or not self.remaining:
                return self._give_up(f"{len(self.remaining)} ranks remain, fewer than min_world_size")
            self._waits_until = self._waits_until or now + self._wait_s
        return [(p, muster) for p, muster in called if p != place]

    def _call_all(self, cause: FailureRecord, now: float) -> Outgoing:
        """Calls all that are there, unless they are called already."""
        if self.phase is Phase.CALLING:
            return []
        self._answers, self._call = {}, self._call + 1
        self._answer_by, self._repeat_at = now + self._answer_s, now + REPEAT_S
        if self.cause is None or self.phase is Phase.RUNNING:
            self.cause = cause
        self.phase = Phase.CALLING
        return [(place, Muster(self._call, self.cause.cut())) for place in self.remaining]

    def stopped(self, place: int) -> None:
        """A member that is called has ended its part, and does not answer: the others go on without it."""
        self.members = tuple(p for p in self.members if p != place)
        self._left.add(place)
        self._leaving.discard(place)
        self._answers.pop(place, None)
        if not self.remaining:  # so have all that are not lost
            self.phase, self.cause = Phase.OVER, None

    def ended(self, place: int) -> None:
        """A condemned process has ended."""
        self.condemned.discard(place)

    def present(self, place: int, answer: Present, cause: FailureRecord, now: float) -> Outgoing:
        """A process has stopped, and says where; `cause` is why, if it was in the generation to be formed."""
        if answer.call != self._call or place not in self.remaining:
            return []
        if self.phase in (Phase.CALLING, Phase.GATHERING):
            self._answers.setdefault(place, answer)
            if answer.has_state:
                self._newcomers.discard(place)
        elif self.phase is Phase.FORMING and answer.generation == self.generation:
            return self.void(cause, now)
        return []

    def void(self, cause: FailureRecord, now: float) -> Outgoing:
        """A member of the generation that is formed has stopped again, and nobody is lost: all meet anew."""
        if self.phase is not Phase.FORMING:
            return []
        self._voids.append(now)
        if len(self._voids) >= _MOST_VOIDS and now - self._voids[0] >= _MEETS_WITHIN_S:
            self.cause = self.cause or cause
            return self._give_up("the remaining ranks could not connect to each other")
        self._settles_at = now + SETTLE_S
        return self._call_all(cause, now)

    def joined(self, place: int, generation: int) -> None:
        """A process is in a generation, and has its state."""
        if self.phase is Phase.FORMING and generation == self.generation and place in self.members:
            self._joined.add(place)
            self._newcomers.discard(place)
            if self._joined == set(self.members):
                self._form, self._left, self._voids = None, set(), []
                if self._waits_until is None:
                    self.phase, self.cause = Phase.RUNNING, None
                else:
                    self.phase, self._call, self._answers = Phase.GATHERING, self._call + 1, {}

    def begun(self, place: int, generation: int) -> None:
        """A process begins again what the failure before this generation has interrupted."""
        if generation == self.generation:
            self._begun.add(place)

    def declined(self, place: int, call: int, why: str) -> Outgoing:
        """A process cannot go on with others than those it had."""
        return self.gave_up(place, why) if call == self._call else []

    def gave_up(self, place: int, why: str) -> Outgoing:
        """A process that was called, or is in a generation that is formed, ends in place of an answer."""
        is_needed = self.phase in (Phase.CALLING, Phase.FORMING) and place in self.remaining
        return self._give_up(why) if is_needed else []

    # ------------------------------------------------------------------ those that join

    def ready(self, place: int) -> None:
        """A new process asks to join."""
        if place not in self.members:
            self._ready.add(place)

    def withdrew(self, place: int) -> None:
        """One that had asked to join does not any more."""
        self._ready.discard(place)

    # ------------------------------------------------------------------ those that leave

    def is_unjoined(self, place: int) -> bool:
        """Tell whether a process is a member of the generation to be formed, and not known to be in it."""
        return self.phase is Phase.FORMING and place in self.members and place not in self._joined

    def is_called(self, place: int) -> bool:
        """Tell whether the others wait for the answer of a process."""
        return self.phase is Phase.CALLING and place in self.members and place not in self._lost

    @property
    def leaving(self) -> frozenset[int]:
        """Members that are asked to leave."""
        return frozenset(self._leaving)

    def leave(self, places: Iterable[int], now: float) -> None:
        """Members are asked to leave; others may be a moment later, and then leave with them."""
        asked = set(places) & set(self.remaining) - self._leaving
        if asked and not self._is_stopping:
            self._leaving |= asked
            self._leaves_at = now + SETTLE_S

    def stay(self) -> None:
        """All are to stop: nobody has to leave before, or may join."""
        self._leaving, self._is_stopping = set(), True

    def why_to_stop(self, now: float) -> str | None:
        """Why all have to stop, if those that ask to leave would leave too few; None if that is not so."""
        if self.phase is not Phase.RUNNING or not self._leaves(now) or self._may_go():
            return None
        number, least = len(self._leaving), self._settings.min_world_size
        return (
            f"{number} of {len(self.members)} ranks were asked to leave, but fewer than"
            f" min_world_size={least} would remain, so all ranks stop at the next step boundary"
        )

    def _leaves(self, now: float) -> bool:
        return bool(self._leaving) and now >= self._leaves_at

    def _may_go(self) -> bool:
        return not self._is_short(set(self.remaining) - self._leaving)

    # ------------------------------------------------------------------ where they meet

    def gather(self, now: float) -> Outgoing:
        """Has all members stop at a boundary if others ask to join, or some to leave, and all is well."""
        if self._waits_until is not None and not self._is_short((*self.members, *self._ready)):
            return self._meet()
        is_asked = bool(self._ready) or (self._leaves(now) and self._may_go())
        if self.phase is not Phase.RUNNING or not is_asked or self._is_stopping:
            return []
        self.phase, self._call = Phase.GATHERING, self._call + 1
        self._answers, self._positions, self._has_met = {}, {}, False
        return [(place, Gather()) for place in self.members]

    def stands(self, place: int, position: int) -> Outgoing:
        """A member says which boundary it has passed last; unasked that changes nothing."""
        waits = self.phase is Phase.FORMING and self._waits_until is not None
        if not (waits or self.phase is Phase.GATHERING) or place not in self.members:
            return []
        self._positions[place] = position
        return self._meet()

    def _meet(self) -> Outgoing:
        """Has all members stop at one boundary, once it is known where they are, and enough are to come."""
        if (
            self._is_stopping
            or self.phase is not Phase.GATHERING
            or self._has_met
            or len(self._positions) < len(self.members)
        ):
            return []
        if self._is_short((*self.members, *self._ready)):
            return []
        self._has_met, self._has_new = True, bool(self._ready)
        last = max(self._positions.values())
        return [(member, MeetAfter(self._call, last, self._has_new)) for member in self.members]

    # ------------------------------------------------------------------ what is to be done

    def _is_short(self, places: Collection[int]) -> bool:
        return len(places) < self._settings.min_world_size

    def deadline(self) -> float | None:
        """When to ask `due` at the latest; None if nothing is pending."""
        if self.phase is Phase.RUNNING:
            return self._leaves_at if self._leaving else None
        if self.phase is Phase.FORMING:
            return self._repeat_at
        if self.phase is Phase.GATHERING:
            return 0.0 if self._answers.keys() == set(self.members) else self._waits_until
        if self.phase is Phase.CALLING:
            if self._answers.keys() != set(self.remaining):
                return min(self._repeat_at, self._answer_by)
            return None if self.condemned else self._settles_at
        return None

    def late(self, now: float) -> tuple[int, ...]:
        """Those that have not answered in time: to be reported as lost."""
        if now < self._answer_by:
            return ()
        if self.phase is Phase.FORMING:
            return tuple(self._newcomers)
        if self.phase is not Phase.CALLING:
            return ()
        return tuple(place for place in self.remaining if place not in self._answers)

    def due(self, now: float) -> Outgoing:
        """What is to be said now, because all is known or because time has passed."""
        if self.phase is Phase.GATHERING and self._waits_until is not None and now >= self._waits_until:
            return self._give_up(
                f"{len(self.members)} ranks remain, fewer than min_world_size, and no new ranks have joined"
                f" within wait_s={self._wait_s:g} s"
            )
        if self.phase is Phase.FORMING and now >= self._repeat_at and self._form is not None:
            self._repeat_at = now + REPEAT_S
            return [(place, self._form) for place in self.members if place not in self._joined]
        if self.phase is Phase.GATHERING and self._answers.keys() == set(self.members):
            return self._form_next(now)
        if self.phase is not Phase.CALLING:
            return []
        unheard = [place for place in self.remaining if place not in self._answers]
        if not unheard and not self.condemned and now >= self._settles_at:
            return self._form_next(now)
        if now >= self._repeat_at and self.cause is not None:
            self._repeat_at = now + REPEAT_S
            return [(place, Muster(self._call, self.cause.cut())) for place in unheard]
        return []

    def _form_next(self, now: float) -> Outgoing:
        is_meeting = self.phase is Phase.GATHERING
        joined = tuple(sorted(self._ready)) if is_meeting and self._has_new else ()
        leaving = frozenset(self._leaving if is_meeting and self._may_go() else ())
        answers = {place: self._answers[place] for place in self.remaining if place not in leaving}
        stand = {place for place, answer in answers.items() if not answer.has_state}
        self.members = tuple(place for place in self.members if place not in stand)
        answers = {place: answer for place, answer in answers.items() if place not in stand}
        places = tuple(sorted((*answers, *joined)))
        if self._is_short(places) and self._waits_until is None:
            if not self._wait_s or not places:
                return self._give_up(f"{len(places)} ranks remain, fewer than min_world_size")
            self._waits_until = now + self._wait_s
        clean = [answer.step for answer in answers.values() if answer.is_clean]
        step = max(clean, default=-1)
        obstacle = self._obstacle(step, answers)
        if obstacle is not None:
            return self._give_up(obstacle)
        sources = [place for place, answer in answers.items() if answer.is_clean and answer.step == step]
        behind = [place for place in answers if place not in sources]
        self.generation += 1
        self._left |= leaving | (stand & self._leaving)  # those that stand are no loss to the others
        self._leaving -= self._left
        self._form = Form(
            call=self._call,
            generation=self.generation,
            members=places,
            lost=tuple(place for place in self.members if place in self._lost),
            before=self.members,
            step=step,
            source=sources[0],
            behind=tuple(behind),
            is_retried=any(answer.is_trying and answer.step == step for answer in answers.values()),
            phase=max(answer.phase for answer in answers.values()),
            joined=joined,
            is_met=is_meeting,
            left=tuple(sorted(self._left)),
        )
        self.phase, self.members = Phase.FORMING, places
        self._lost, self._joined, self._begun = {}, set(), set()
        self._newcomers = set(joined)
        self._answer_by = now + self._answer_s
        self._ready -= self._newcomers
        self._repeat_at = now + REPEAT_S
        forms: Outgoing = [(place, self._form) for place in (*places, *sorted(leaving | stand))]
        if not self._is_short(places):
            self._waits_until = None
            return forms
        self._positions, self._has_met = {}, False
        return forms + [(place, Gather()) for place in places]  # before its first step

    def _obstacle(self, step: int, answers: dict[int, Present]) -> str | None:
        """Why the run cannot go on from `step`, and counts this recovery; None if it can."""
        steps = [answer.step for answer in answers.values()]
        if step < 0:
            return "no remaining rank holds a whole state: all were interrupted while they changed it"
        if max(steps) > step or min(steps) < step - 1:
            return (
                f"the remaining ranks have committed different steps, {sorted(set(steps))}, and no state"
                " fits all of them"
            )
        if not self._lost:  # others join, or have died while they did
            return None
        times = self._count_repetitions(step)
        if times is not None:
            return f"step {step} failed {times}, so the data or the code is the cause, not the machine"
        if self._form is not None and not self._lost.keys() & self._begun:
            return None  # one more was lost while the generation was formed: the same recovery
        before, self._recovered_at = self._recovered_at, step
        if before is not None and step - before >= STEPS_TO_FORGET:
            self.num_recoveries = 0
        self.num_recoveries += 1
        most = self._settings.max_recoveries
        if self.num_recoveries > most:
            return (
                f"more than {most} recoveries (max_recoveries) without {STEPS_TO_FORGET} optimizer steps"
                " between them"
            )
        return None

    def _count_repetitions(self, step: int) -> str | None:
        """Counts failures that are alike and met the same samples; how often, if that is no chance.

        Only that of a process counts which had begun to do again what was interrupted. With fewer ranks a
        part of a step's samples comes one step later. What comes from outside may be chance once more; or the
        kernel kills whoever asks for too much memory.
        """
        seen = dict.fromkeys(self._lost.values(), False)
        seen |= {kind: True for place, kind in self._lost.items() if place in self._begun}
        worst = None
        for (kind, is_by_chance), has_begun in seen.items():
            known = self._repetitions.get(kind)
            if known is None or step - known.step > (0 if is_by_chance else 1):
                self._repetitions[kind] = _Repetition(step)
            elif has_begun:
                known.step, known.count = step, known.count + 1
                if known.count > 1 + is_by_chance:
                    worst = "three times in the same way" if is_by_chance else "twice in the same way"
        return worst

    def _give_up(self, reason: str) -> Outgoing:
        self.phase, self.reason = Phase.OVER, reason
        return []

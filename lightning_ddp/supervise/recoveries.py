"""Recoveries: who goes on from which step, and when it is no use to. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping

from lightning_ddp.supervise.failure_record import FailureRecord
from lightning_ddp.supervise.orders import NewGeneration, Progress
from lightning_ddp.supervise.slots import STEPS_TO_FORGET

__all__ = ["Recoveries", "new_generation", "own_failure"]

_OWN_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS}
)
"""What a process dies of by its own doing. Others come from outside: from people, schedulers, the kernel."""


class Recoveries:
    """The recoveries of a job.

    Args:
        most: how many there may be without `STEPS_TO_FORGET` optimizer steps between them.
    """

    def __init__(self, most: int) -> None:
        self.num = 0
        """Those that count."""
        self._most = most
        self._recovered_at: int | None = None
        self._failed_at: dict[str, int] = {}
        """How processes have failed by their own doing -> at which step last."""

    def obstacle(
        self, members: Iterable[Progress], lost: Iterable[FailureRecord], *, is_new: bool
    ) -> str | None:
        """Why the job cannot go on; None if it can, which counts this recovery.

        Args:
            members: where those have stopped that go on.
            lost: how those have failed that are lost.
            is_new: whether the generation before was whole: else this is the same recovery.
        """
        known, failures = list(members), list(map(own_failure, lost))
        committed, step = {progress.step for progress in known}, _step_of(known)
        if step < 0:
            return "no remaining rank holds a whole state: all were interrupted while they changed it"
        if max(committed) > step or min(committed) < step - 1:
            return (
                f"the remaining ranks have committed different steps, {sorted(committed)}, and no state"
                " fits all of them"
            )
        if not failures:  # others join, or have died while they did
            return None
        own = {failure for failure in failures if failure is not None}
        is_repeated = any(step - self._failed_at.get(failure, -2) <= 1 for failure in own)
        self._failed_at |= dict.fromkeys(own, step)
        if not is_new:
            return None
        if is_repeated:
            return (
                f"step {step} failed twice in the same way, so the data or the code is the cause, not the"
                " machine"
            )
        before, self._recovered_at = self._recovered_at, step
        if before is not None and step - before >= STEPS_TO_FORGET:
            self.num = 0
        self.num += 1
        if self.num > self._most:
            return (
                f"more than {self._most} recoveries (max_recoveries) without {STEPS_TO_FORGET} optimizer"
                " steps between them"
            )
        return None


def _step_of(members: Iterable[Progress]) -> int:
    """The last step that a whole state is there of; -1 for none."""
    return max((progress.step for progress in members if progress.is_clean), default=-1)


def new_generation(
    number: int,
    staying: Mapping[int, Progress],
    *,
    joined: tuple[int, ...],
    before: tuple[int, ...],
    left: tuple[int, ...],
    is_met: bool,
) -> NewGeneration:
    """The generation of those that stay and those that join: the largest committed step wins.

    Args:
        number: its number.
        staying: place -> where that member has stopped; one has a whole state.
        joined, before, left, is_met: as of `NewGeneration`.
    """
    known, step = staying.values(), _step_of(staying.values())
    sources = [place for place, progress in staying.items() if progress.is_clean and progress.step == step]
    return NewGeneration(
        number=number,
        members=tuple(sorted([*staying, *joined])),
        before=before,
        step=step,
        source=sources[0],
        behind=tuple(place for place in staying if place not in sources),
        joined=joined,
        left=left,
        is_retried=any(progress.is_trying and progress.step == step for progress in known),
        is_met=is_met,
        phase=max(progress.phase for progress in known),
    )


def own_failure(record: FailureRecord) -> str | None:
    """How a process has failed by its own doing; None where it may be by chance, from outside.

    >>> own_failure(FailureRecord(rank=1, message="", exit_code=3))
    'exit code 3'
    >>> own_failure(FailureRecord(rank=1, message="", exit_code=-9))
    """
    error = record.exception_class or record.exception_type
    if error is not None:
        return error
    code = record.exit_code  # None if it was stopped, or its node is gone
    is_own = code is not None and (code >= 0 or -code in _OWN_SIGNALS)
    return f"exit code {code}" if is_own else None

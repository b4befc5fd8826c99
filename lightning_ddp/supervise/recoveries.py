"""Recoveries: who continues from which step, and when that is of no use (pure)."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from lightning_ddp.supervise.failure_record import FailureRecord
from lightning_ddp.supervise.orders import NewGeneration, Progress
from lightning_ddp.supervise.processes import STEPS_TO_FORGET

_OWN_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS}
)
"""Signals by which a process dies of its own doing; others come from people, schedulers or the kernel."""


class Recoveries:
    """Counter of recoveries: allows `most` with fewer than 100 optimizer steps from one to the next."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num = 0
        self._recovered_at: int | None = None
        self._failed_at: dict[str, int] = {}  # kind of failure by its own doing -> the last step of one

    def count(
        self, members: Iterable[Progress], lost: Iterable[FailureRecord], *, is_new: bool
    ) -> str | None:
        """Count a recovery; return why it is ruled out (no common step, same failure, limit), or None.

        If not `is_new`, as the generation before was not whole, this is the same recovery as the last one.
        """
        known, failures = list(members), list(map(_own_failure, lost))
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
        is_long_ago = before is not None and step - before >= STEPS_TO_FORGET
        self._num = 1 if is_long_ago else self._num + 1
        if self._num > self._most:
            return (
                f"more than {self._most} recoveries (max_recoveries) without {STEPS_TO_FORGET} optimizer"
                " steps between them"
            )
        return None


def _step_of(members: Iterable[Progress]) -> int:
    """Return the last step of which some rank has a consistent state; -1 for none."""
    return max((progress.step for progress in members if progress.is_clean), default=-1)


def new_generation(
    number: int,
    staying: Mapping[int, Progress],
    *,
    joined: tuple[int, ...],
    parted: Collection[int] = (),
    **more: Any,
) -> NewGeneration:
    """Build the next set of ranks, which stay or join, and the committed step from which it continues.

    Members whose state is not that of the majority have `parted`: unless others join they are behind.
    """
    known, step = staying.values(), _step_of(staying.values())
    sources = [place for place, progress in staying.items() if progress.is_clean and progress.step == step]
    alike = [place for place in sources if place not in parted] or sources[:1]
    up_to_date = sources if joined else alike  # those that join copy in another way than those behind
    return NewGeneration(
        number=number,
        members=tuple(sorted([*staying, *joined])),
        step=step,
        source=alike[0],
        behind=tuple(place for place in staying if place not in up_to_date),
        joined=joined,
        is_retried=any(progress.is_trying and progress.step == step for progress in known),
        phase=max(progress.phase for progress in known),
        **more,
    )


def _own_failure(record: FailureRecord) -> str | None:
    """Return a failed process's exception class or exit code; None if it was ended from outside."""
    error = record.exception_class or record.exception_type
    if error is not None:
        return error
    code = record.exit_code  # None if it was stopped, or its node is gone
    is_own = code is not None and (code >= 0 or -code in _OWN_SIGNALS)
    return f"exit code {code}" if is_own else None

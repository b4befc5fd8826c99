"""Ranks that make no progress, found from the reports of all (pure)."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_ddp.supervise.failure_record import FailureRecord, Identity
from lightning_ddp.supervise.processes import Process

REPORTS_A_TIMEOUT = 4  # least number of reports of a rank within the time after which it counts as stalled
_REPORT_EVERY_S = 0.25
_REPORTS_A_S = 64  # reports per second of all ranks together: each costs the server some 50 us


def silent(identity: Identity, timeout_s: float) -> FailureRecord:
    """Return the failure record of a process that has sent nothing for `timeout_s` seconds."""
    why = "it is stopped (SIGSTOP), swapped out, or holds its interpreter"
    return FailureRecord.of_identity(identity, f"the process has not answered for {timeout_s:g} s: {why}")


class StallWatch:
    """Detector of ranks that send no reports, or make no progress though they wait for no other rank.

    A rank has stalled after `timeout_s` seconds without progress; None for no limit.
    """

    def __init__(self, timeout_s: float | None, num_ranks: int) -> None:
        self._timeout_s = 0.0 if timeout_s is None else timeout_s
        self.interval_s: float | None = None  # period of reports: a stopped rank is found by so much later
        if timeout_s is not None:
            often = max(_REPORT_EVERY_S, num_ranks / _REPORTS_A_S)
            self.interval_s = min(timeout_s / REPORTS_A_TIMEOUT, often)
        self._since: float | None = None
        self._looked_at = 0.0

    def begin(self, now: float) -> None:
        """Start the detector, or restart it: silence and lack of progress before `now` do not count."""
        self._since = self._looked_at = now

    def next_look(self) -> float | None:
        """Return the time at which `find` is to be called again; None for never."""
        is_on = self.interval_s is not None and self._since is not None
        return self._looked_at + (self.interval_s or 0.0) if is_on else None

    def find(self, members: Iterable[Process], now: float) -> tuple[Process, FailureRecord] | None:
        """Return the process of a rank that has stalled with its failure record, or None."""
        next_look = self.next_look()
        if next_look is None or self.interval_s is None or self._since is None or now < next_look:
            return None
        if now > self._looked_at + self._timeout_s / 2:  # this very process slept, and could not hear others
            self.begin(now)
            return None
        self._looked_at = now
        times = {
            process: (max(process.heard_at, self._since), max(process.moved_at, self._since))
            for process in members
            if process.is_member and process.is_active and process.is_connected
        }
        quietest = min(times, key=lambda process: times[process][0], default=None)
        if quietest is not None and (silent_s := now - times[quietest][0]) > self._timeout_s / 2:
            # the others may wait for it; it was well until then
            is_mute = silent_s > self._timeout_s + self.interval_s
            return (quietest, silent(quietest.who, self._timeout_s)) if is_mute else None
        for process, (heard_at, moved_at) in times.items():
            where = process.report.where
            if heard_at - moved_at > self._timeout_s and where.waits_for is None:
                text = f"no progress within stall_timeout={self._timeout_s:g} s"
                return process, process.failure(text, step=where.step, phase=where.phase)
        return None

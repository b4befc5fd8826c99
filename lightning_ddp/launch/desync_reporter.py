"""Questions between ranks, on the side of a rank: reports what it does, and asks what the others do.

In the thread of the control channel, in which a rank answers while its main thread waits or hangs.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
import types
import zlib
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist

import lightning_ddp.supervise.protocol as protocol
from lightning_ddp.comm.activity import Entry, Interrupt, Waiting
from lightning_ddp.comm.group import SLICE_S
from lightning_ddp.errors import CollectiveMismatchError, CollectiveTimeoutError, ConfigurationError
from lightning_ddp.supervise.client import ControlClient
from lightning_ddp.supervise.desync import ANSWER_WAIT_S, join_ranks, name_ranks
from lightning_ddp.supervise.failure_record import Where
from lightning_ddp.supervise.rank_state import RankState

_LONGEST_TEXT = 200
_MOST_LANES = 6
_ASK_WAIT_S = ANSWER_WAIT_S + 2.0
_OF_OTHERS = ("/torch/", "/lightning_ddp/", "/pytorch_lightning/", "/lightning/", "/lib/python")
_MOST_FRAMES = 200
_CALLED_OTHERS = (
    "the ranks have called different collectives.\n{found}\nAll ranks have to call the same ones in the same"
    " order: look for self.log(..., sync_dist=True), a barrier or an all_gather that only some of them reach."
    ' CustomDDPStrategy(debug="detail") names the first difference before any data moves.'
)
_WOULD_CALL_OTHERS = (
    "the ranks are about to call different collectives; none of them was started.\n{found}\nAll ranks have to"
    " call the same collectives, in the same order, on tensors of the same shapes and dtypes."
)


class _Answer(threading.Event):
    """Event for which a thread waits until the server has answered, with what the server found."""

    findings: protocol.Findings | None = None


class DesyncReporter:
    """A rank's part in desync detection: reports its state, and asks the server where ranks differ.

    `where` returns step and phase. Made in the main thread.
    """

    def __init__(self, interrupt: Interrupt, where: Callable[[], Where]) -> None:
        self._interrupt = interrupt
        self._where = where
        self._main = threading.get_ident()
        self._watch: ControlClient | None = None
        self._answers: dict[tuple[str | None, int], _Answer] = {}
        self._listeners: dict[str, Callable[[int, Any], None]] = {}
        self.deadline_s = float("inf")  # age in seconds at which an awaited collective counts as failed
        self.is_comparing = False  # True if each collective is compared between the ranks before it starts
        self.state_values: Callable[[int], protocol.StateValues] | None = None
        """Function that answers what of this rank's state was hashed at a number."""
        self.num_runs = 0  # number of runs (fits, tests ...) that have begun
        self._is_active = False
        self._run_name = "its run"
        self._left_at = time.monotonic()

    @property
    def _rank(self) -> int:
        return self._watch.identity.rank if self._watch is not None else 0

    def attach(self, watch: ControlClient) -> None:
        """Use this connection to the control server from now on, to explain a wait that takes too long."""
        self._watch = watch
        if self._is_active:  # since before there was a channel
            watch.update(lambda state: state.begin_run(self._run_name))
        self._interrupt.supervisor = self

    def set_deadline(self, timeout: timedelta | None) -> None:
        """Make waits for collectives fail shortly before the backend's `timeout`, saying why; None: never."""
        limit_s = float("inf") if timeout is None else timeout.total_seconds()
        # before the backend's own, which breaks connections
        self.deadline_s = max(limit_s - 1.0, limit_s / 2)

    def compare_before_each(self, is_on: bool) -> None:
        """Switch the comparison of each collective between the ranks, before it starts, on or off."""
        if is_on and self._watch is None and dist.get_world_size() > 1:
            raise ConfigurationError(
                'debug="detail" needs the control channel, which LIGHTNING_DDP_SUPERVISION=0 has switched off'
            )
        self.is_comparing = is_on and self._watch is not None

    def enter(self, name: str) -> None:
        self.num_runs += 1
        self._is_active, self._run_name = True, name[:_LONGEST_TEXT]
        if self._watch is not None:
            self._watch.update(lambda state: state.begin_run(self._run_name))

    def leave(self) -> None:
        """Tell the server that this rank's run has ended, unless it has been told."""
        if self._is_active:
            self._is_active, self._left_at = False, time.monotonic()
            if self._watch is not None:
                self._watch.update(RankState.end_run)

    # ------------------------------------------------------------------ in the thread of the channel

    def on_message(self, message: protocol.Message) -> None:
        """Process a server's message: a question about this rank, an answer, or a value from another rank."""
        match message:
            case protocol.StatusRequest(number) if self._watch is not None:
                self._watch.post(protocol.StatusReply(number, self.status()))
            case protocol.CollectiveApproved(group, number) | protocol.Diagnosis(group, number):
                answer = self._answers.get((group, number))
                if answer is not None:
                    answer.findings = message.findings if isinstance(message, protocol.Diagnosis) else None
                    answer.set()
            case protocol.StateRequest(number) if self._watch is not None and self.state_values is not None:
                self._watch.post(self.state_values(number))
            case protocol.PeerValue(sender, topic, value):
                listener = self._listeners.get(topic)
                if listener is not None:
                    listener(sender, value)

    def status(self) -> protocol.RankStatus:
        """Return what this rank is doing: its state, awaited collective, step and groups. Thread-safe."""
        activity, where = self._interrupt.activity, self._where()
        wait, now = activity.wait(), time.monotonic()
        state: protocol.State
        label: str | None
        if self._interrupt.error is not None:
            state, label, since = "ending", None, activity.since
        elif wait is not None and not wait.is_side:
            state, label, since = "starts" if wait.is_start else "waits", wait.label, wait.since
        elif not self._is_active and self.num_runs:
            state, label, since = "finished", self._run_name, self._left_at
        elif activity.on_device is not None:
            state, label, since = "waits", activity.on_device.label, activity.on_device.since
        else:
            state, label, since = "runs", wait.label if wait is not None else None, activity.since
        entry = activity.entry()
        return protocol.RankStatus(
            rank=self._rank,
            state=state,
            label=None if label is None else _cut(label),
            group=entry.lane.name if entry is not None else None,
            number=entry.number if entry is not None else 0,
            for_s=now - since,
            step=where.step,
            phase=where.phase,
            at=self._line() if state == "runs" else None,
            groups=tuple(
                protocol.GroupStatus(
                    name=lane.name,
                    ranks=_cut(join_ranks(lane.ranks)),
                    number=lane.number,
                    calls={entry.number: _cut(entry.text()) for entry in list(lane.recent)},
                )
                for lane in activity.lanes[-_MOST_LANES:]
            ),
            blocked_on=tuple(activity.blocked_on()[:_MOST_LANES]),
        )

    def _line(self) -> str | None:
        """Return file, line, function of the main thread's innermost user frame, else any frame; or None."""
        innermost: types.FrameType | None = sys._current_frames().get(self._main)
        if innermost is None:
            return None
        frames = [frame for frame, _ in islice(traceback.walk_stack(innermost), _MOST_FRAMES)]
        own = (frame for frame in frames if not any(part in frame.f_code.co_filename for part in _OF_OTHERS))
        frame = next(own, innermost)
        name = Path(frame.f_code.co_filename).name
        return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"[:_LONGEST_TEXT]

    # ------------------------------------------------------------------ in a thread that waits

    def explain(self, waiting: Waiting) -> BaseException:
        """Return the timeout error of an overdue collective, after asking all ranks for a few seconds."""
        found = self._ask(waiting.entry or self._interrupt.activity.entry())
        waited_s = time.monotonic() - waiting.begun_at
        missing = list(found.missing)
        absent = f"; missing: {name_ranks(missing)}" if missing else ""
        return CollectiveTimeoutError(
            f"rank {self._rank}: {waiting.label} has not ended {waited_s:.1f} s after it began, past its"
            f" deadline of {self.deadline_s:g} s{absent}\n{_in_words(found)}\nCheck what the missing ranks do"
            " at this point. If they only need more time, give the strategy a longer timeout.",
            label=waiting.label,
            rank=self._rank,
            waited_s=waited_s,
            missing=missing,
        )

    def look(self, entry: Entry) -> CollectiveMismatchError | None:
        """Return an error if ranks wait for different collectives; None on all but the group's first rank."""
        if self._watch is None or self._watch.identity.rank != entry.lane.ranks[0]:
            return None
        found = self._ask(entry)
        return self._mismatch(entry, found, _CALLED_OTHERS) if found.is_contradiction else None

    def mismatch(self) -> CollectiveMismatchError:
        """Ask the server why gloo found a mismatch of collectives; return the error. Thread-safe."""
        entry = self._interrupt.activity.entry() or self._interrupt.activity.last_started()
        return self._mismatch(entry, self._ask(entry), _CALLED_OTHERS)

    def compare(self, entry: Entry) -> None:
        """Announce a collective, and wait until all ranks of its group have; raise if theirs differ."""
        watch, lane = self._watch, entry.lane
        if watch is None:
            return
        answer = self._answers[lane.name, entry.number] = _Answer()
        try:
            with self._interrupt.activity.waiting(entry.name(), entry, is_start=True):
                ranks = _cut(join_ranks(lane.ranks))
                watch.post(protocol.CollectiveFingerprint(lane.name, ranks, entry.number, _cut(entry.text())))
                while not answer.wait(SLICE_S):
                    self._interrupt.check()
                    self._interrupt.check_deadline()
        finally:
            self._answers.pop((lane.name, entry.number), None)
        if answer.findings is not None:
            raise self._mismatch(entry, answer.findings, _WOULD_CALL_OTHERS)

    def _ask(self, entry: Entry | None) -> protocol.Findings:
        """Ask the server where ranks disagree on a collective; return its findings, or own ones if late."""
        key = (entry.lane.name, entry.number) if entry is not None else (None, 0)
        answer = self._answers.setdefault(key, _Answer())
        if self._watch is not None:
            self._watch.post(protocol.DiagnoseRequest(*key))
        deadline = time.monotonic() + _ASK_WAIT_S
        while not answer.wait(SLICE_S) and time.monotonic() < deadline:
            self._interrupt.check()
        self._answers.pop(key, None)
        return answer.findings or self._unanswered(entry)

    def _unanswered(self, entry: Entry | None) -> protocol.Findings:
        """Return what this rank alone knows of missing ranks, as the server has not answered in time."""
        missing, where = set(self._interrupt.activity.absent), ""
        if self._watch is not None:
            server = self._watch.server
            name = f"rank {server.rank}" if server.rank >= 0 else "the process"
            process = f"{name} (host {server.host}, pid {server.pid})"
            where = f": {process}, which runs it, does not execute Python code"
            if server.rank not in (-1, self._rank) and (entry is None or server.rank in entry.lane.ranks):
                missing.add(server.rank)
        sentence = f"the control channel has not answered within {_ASK_WAIT_S:g} s{where}"
        return protocol.Findings(sentence=sentence, table="", missing=tuple(sorted(missing)))

    def _mismatch(self, entry: Entry | None, found: protocol.Findings, text: str) -> CollectiveMismatchError:
        return CollectiveMismatchError(
            f"rank {self._rank}: {text.format(found=_in_words(found))}",
            label=entry.name() if entry is not None else "collective",
            rank=self._rank,
            waited_s=time.monotonic() - entry.since if entry is not None else 0.0,
            missing=list(found.missing),
        )

    # ------------------------------------------------------------------ messages between ranks

    def tell(self, rank: int, topic: str, value: Any) -> bool:
        """Send a JSON value below 60 KiB to a rank, in order; return False if there is no control channel."""
        if self._watch is not None:
            self._watch.post(protocol.SendValue(rank, topic, value))
        return self._watch is not None

    def listen(self, topic: str, listener: Callable[[int, Any], None] | None) -> None:
        """Call `listener(rank, value)` in the channel's thread for values with `topic`; None removes it."""
        if listener is None:
            self._listeners.pop(topic, None)
        else:
            self._listeners[topic] = listener


def _in_words(found: protocol.Findings) -> str:
    return f"  {found.sentence}\n{found.table}".rstrip()


def _cut(text: str) -> str:
    """Return a text; if longer than 200 characters, its beginning with a checksum of the whole text."""
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[: _LONGEST_TEXT - 12]}... {zlib.crc32(text.encode()):08x}"[:_LONGEST_TEXT]

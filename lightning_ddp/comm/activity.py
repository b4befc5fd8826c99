"""Record of this rank's collectives, and the failure that interrupts its waits for them.

Threads that communicate write the record, at about a microsecond per collective; the control channel's thread
reads it to report where this rank is.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_ddp._torch import known_groups, name_of_group

_NUM_RECENT = 4
_MOST_PENDING = 64
_MOST_DIMENSIONS = 8
_LOOK_AFTER_S = 5.0
"""Age in seconds at which a wait first checks whether ranks wait for different collectives; then doubled."""


class Entry(NamedTuple):
    """Record of a collective that this rank has started, or is about to start."""

    lane: Lane
    number: int
    """Sequence number within the group, from 1."""
    kind: str
    """Operation, such as 'all_reduce' or 'broadcast from 0'."""
    label: str | None
    """Purpose, such as 'reduce of bucket 4'; None if not given."""
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]
    since: float
    """Start time, in seconds of `time.monotonic`."""

    def name(self) -> str:
        """Return the collective's name for messages: the label, or else the operation."""
        return self.label or self.kind

    def text(self) -> str:
        """Return the collective as text: its label, operation, shapes, dtypes, the same on all ranks."""
        shapes = ", ".join(f"{_shape(shape)} {str(d).removeprefix('torch.')}" for shape, d in self.tensors)
        label, kind = self.label or "", self.kind
        is_function = label.isidentifier() and label.startswith(kind.split()[0])  # the label repeats the kind
        purpose = "" if is_function or kind.startswith(label) else f"{label}: "
        return f"{purpose}{kind}" + f" of {shapes}" * bool(shapes)


def _shape(shape: torch.Size) -> str:
    shown = "x".join(map(str, shape[:_MOST_DIMENSIONS]))
    return f"[{shown}{'x...' * (len(shape) > _MOST_DIMENSIONS)}]"


class Lane:
    """Log of the collectives of one process group, numbered in the order in which this rank starts them.

    The name is the same on all ranks of the group, and `ranks` are their global ranks, in group order.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.number = 0
        self.recent: deque[Entry] = deque(maxlen=_NUM_RECENT)
        self.next_check = 0, _LOOK_AFTER_S
        """Number of a collective, and its age in seconds at which a wait for it asks all ranks again."""
        self._pending: dict[int, Entry] = {}

    def next(self, kind: str, tensors: Sequence[torch.Tensor], label: str | None) -> Entry:
        """Log a collective of this group that is about to start; return its record."""
        self.number += 1
        shown = tuple([(t.shape, t.dtype) for t in tensors])
        entry = Entry(self, self.number, kind, label, shown, time.monotonic())
        self.recent.append(entry)
        return entry

    def started(self, work: object) -> None:
        """Associate `work` with the collective that was logged last, for `entry_of`."""
        if len(self._pending) >= _MOST_PENDING:  # works without a wait stay here
            self._pending.clear()
        self._pending[id(work)] = self.recent[-1]

    def entry_of(self, work: object) -> Entry | None:
        """Return and forget which collective returned `work`; None if unknown, or at a second call."""
        return self._pending.pop(id(work), None)


class Waiting(NamedTuple):
    label: str
    since: float
    """Start of the wait, in seconds of `time.monotonic`."""
    entry: Entry | None
    """The awaited collective; None if unknown."""
    is_start: bool = False
    """True while the thread waits for the other ranks before it starts the collective."""
    is_side: bool = False
    """True if the thread is not the main thread."""
    is_for_job: bool = False
    """True if the thread waits for a job of another thread."""

    @property
    def begun_at(self) -> float:
        """Start of the collective in seconds of `time.monotonic`, or that of the wait if unknown."""
        return self.since if self.entry is None else self.entry.since


class Activity:
    """Record of the waits of this rank's threads and of its progress, for other threads to read."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        """Time at which the last wait ended or a step began, in seconds of `time.monotonic`."""
        self.count = 0
        """Number of ended waits and begun steps; the rank makes progress while it increases."""
        self.lanes: list[Lane] = []
        self.busy: set[int] = set()
        """Identifiers of the other threads that have a job at the moment."""
        self.on_device: Waiting | None = None
        """Wait of a device for queued work that has not run yet; None if there is none."""
        self.absent: tuple[int, ...] = ()
        """Global ranks missing in the awaited collective, if known from shared memory."""
        self._waits: dict[int, Waiting] = {}
        self._known: weakref.WeakKeyDictionary[Any, Lane] = weakref.WeakKeyDictionary()

    @property
    def label(self) -> str | None:
        """Label of the wait of the main thread, else of the device; None if neither waits."""
        wait, on_device = self.wait(), self.on_device
        if wait is not None and not wait.is_side:
            return wait.label
        return on_device.label if on_device is not None else None

    def wait(self) -> Waiting | None:
        """Return the record of the main thread's wait, else that of another thread's, else None."""
        return min(self._waits.copy().values(), key=lambda wait: wait.is_side, default=None)

    def last_started(self) -> Entry | None:
        """Return the record of this rank's last collective in any group, started or about to be, or None."""
        last = (lane.recent[-1] for lane in self.lanes if lane.recent)
        return max(last, key=lambda entry: entry.since, default=None)

    def entry(self) -> Entry | None:
        """Return group, number and label of the collective that this process waits for, or None."""
        waits = sorted(self._waits.copy().values(), key=lambda wait: wait.is_side)
        on_device = self.on_device
        return next((wait.entry for wait in (*waits, on_device) if wait is not None and wait.entry), None)

    def blocked_on(self) -> list[tuple[str, int, bool]]:
        """Return the collectives that block this rank: group name, number, and True if it has yet to start.

        Empty if some thread may continue without a collective.
        """
        waits = self._waits.copy()
        main = next((wait for wait in waits.values() if not wait.is_side), None)
        if main is None or not (main.entry or main.is_for_job) or not self.busy.copy() <= waits.keys():
            return []
        return [(w.entry.lane.name, w.entry.number, w.is_start) for w in waits.values() if w.entry]

    def of_this_thread(self) -> Waiting | None:
        """Return the record of the calling thread's wait; None if it does not wait."""
        return self._waits.get(threading.get_ident())

    @contextmanager
    def waiting(
        self, label: str, entry: Entry | None = None, *, is_start: bool = False, is_for_job: bool = False
    ) -> Generator[None, None, None]:
        """Record that the calling thread waits in this context."""
        thread = threading.get_ident()
        self._waits[thread] = Waiting(
            label, time.monotonic(), entry, is_start, thread in self.busy, is_for_job
        )
        try:
            yield
        finally:
            self.advance()

    def advance(self) -> None:
        """Count progress, store its time, and clear this thread's wait, as it has ended or a step begins."""
        self._waits.pop(threading.get_ident(), None)
        self.since = time.monotonic()
        self.count += 1

    def lane(self, process_group: Any) -> Lane:
        """Return the log of a process group's collectives; create one for a new group."""
        known = self._known.get(process_group)
        return known or self.add(process_group, *_describe(process_group, len(self.lanes)))

    def groups(self) -> list[Any]:
        """Return the process groups whose collectives are logged."""
        return list(self._known)

    def forget_groups(self) -> list[Any]:
        """Drop the logs of all process groups, before these are destroyed; return the groups that had one."""
        groups = self.groups()
        self.lanes, self._known = [], weakref.WeakKeyDictionary()
        self._waits.clear()
        return groups

    def add(self, process_group: Any, name: str, ranks: Sequence[int]) -> Lane:
        """Create and return the log of a process group's collectives, with the given name."""
        lane = self._known[process_group] = Lane(name, ranks)
        self.lanes = [known for known in self.lanes if known in self._known.values()] + [lane]
        return lane


def _describe(process_group: Any, number: int) -> tuple[str, Sequence[int]]:
    if process_group in known_groups():
        is_world = dist.is_initialized() and process_group is dist.group.WORLD
        name = "world" if is_world else f"group {name_of_group(process_group)}"
        return name, dist.get_process_group_ranks(process_group)
    return f"group {number}" if number else "world", range(process_group.size())


class Interrupt:
    """A failure reported by another thread, which interrupts waits for collectives.

    The first call of `set` wins. `check` raises in the thread that calls it.

    Thread-safe.
    """

    def __init__(self) -> None:
        self.activity = Activity()
        self.supervisor: Any = None
        """`DesyncReporter`, which asks all ranks what they wait for; None if waits have no deadline."""
        self.device_watch: Any = None
        """`DeviceWatch` of queued device work, for which no host thread waits; None if there is none."""
        self.may_abort = False
        """True if this process continues after an abort of its groups."""
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def set(self, error: BaseException) -> bool:
        """Set the failure that waits raise, and return True; keep an earlier failure, and return False."""
        with self._lock:
            if self.error is not None:
                return False
            self.error = error
            return True

    def clear(self) -> None:
        """Clear the failure, so that the remaining ranks can continue."""
        self.error = None

    def check(self) -> None:
        """Raise the failure that was set, if any."""
        if self.error is not None:
            raise self.error

    def check_deadline(self, *, is_over: bool = False) -> None:
        """Raise if this thread's wait is overdue or ranks, when asked, prove to wait for other collectives.

        `is_over` means that the backend's own timeout has passed already.
        """
        supervisor, waiting = self.supervisor, self.activity.of_this_thread()
        if supervisor is None or waiting is None:
            return
        waited_s = time.monotonic() - waiting.begun_at
        if is_over or waited_s >= supervisor.deadline_s:
            raise supervisor.explain(waiting)
        entry = waiting.entry
        if entry is None:
            return
        number, age_s = entry.lane.next_check
        age_s = age_s if number >= entry.number else _LOOK_AFTER_S
        if waited_s < age_s:
            return
        entry.lane.next_check = entry.number, 2 * age_s
        if (error := supervisor.look(entry)) is not None:
            raise error

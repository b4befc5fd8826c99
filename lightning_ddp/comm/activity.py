"""Record of this rank's collectives, and the failure that ends its waits for them.

`Activity`, which collectives the threads have started and wait for, is written by the threads that
communicate, at about a microsecond a collective, and read by the control channel's thread when somebody asks
where this rank is. `Interrupt` holds it, and the failure of which that thread has learned.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_ddp._torch import known_groups, name_of_group

_NUM_RECENT = 4
_MOST_PENDING = 64
_MOST_TENSORS = 8
_MOST_DIMENSIONS = 8
_LOOK_AFTER_S = 5.0
"""How old a collective is when somebody looks whether the ranks wait for different ones."""


class Entry(NamedTuple):
    """A collective that this rank has started, or is about to."""

    lane: Lane
    """Of which process group."""
    number: int
    """From 1, in the order in which this rank starts those of the group."""
    kind: str
    """'all_reduce', 'broadcast from 0' ..."""
    label: str | None
    """Such as 'reduce of bucket 4'."""
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]
    """Shapes and dtypes of the first few tensors."""
    num_tensors: int
    since: float
    """When it was started, of `time.monotonic`."""

    def name(self) -> str:
        """What people call it."""
        return self.label or self.kind

    def text(self) -> str:
        """All that has to be the same on all ranks; at most some hundred characters."""
        shapes = ", ".join(f"{_shape(shape)} {str(d).removeprefix('torch.')}" for shape, d in self.tensors)
        more = f" and {self.num_tensors - len(self.tensors)} more" * (self.num_tensors > len(self.tensors))
        label, kind = self.label or "", self.kind
        is_function = label.isidentifier() and label.startswith(kind.split()[0])  # its name says no more
        purpose = "" if is_function or kind.startswith(label) else f"{label}: "
        return f"{purpose}{kind} of {shapes}{more}"


def _shape(shape: torch.Size) -> str:
    shown = "x".join(map(str, shape[:_MOST_DIMENSIONS]))
    return f"[{shown}{'x...' * (len(shape) > _MOST_DIMENSIONS)}]"


class Lane:
    """The collectives of one process group, in the order in which this rank starts them.

    Args:
        name: the same on all ranks of the group, and no other group's.
        ranks: global ranks of the group, in group order.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.number = 0
        self.recent: deque[Entry] = deque(maxlen=_NUM_RECENT)
        self._pending: dict[int, Entry] = {}

    def next(self, kind: str, tensors: Sequence[torch.Tensor], label: str | None) -> Entry:
        """The entry of a collective that is about to start."""
        self.number += 1
        shown = tuple([(t.shape, t.dtype) for t in tensors[:_MOST_TENSORS]])
        entry = Entry(self, self.number, kind, label, shown, len(tensors), time.monotonic())
        self.recent.append(entry)
        return entry

    def started(self, work: object) -> None:
        """The last entry is this work."""
        if len(self._pending) >= _MOST_PENDING:  # of works that nobody waits for
            self._pending.clear()
        self._pending[id(work)] = self.recent[-1]

    def entry_of(self, work: object) -> Entry | None:
        """The entry of a work that is waited for, the first time."""
        return self._pending.pop(id(work), None)


class Waiting(NamedTuple):
    """A thread's wait."""

    label: str
    since: float
    """When it began, of `time.monotonic`."""
    entry: Entry | None
    """The collective that is waited for, where that is known."""
    is_start: bool = False
    """Whether it waits for the others before it starts that."""
    is_side: bool = False
    """Whether the thread is one beside the main one."""
    is_for_job: bool = False
    """Whether it waits for such a thread."""

    @property
    def begun_at(self) -> float:
        """When the collective was started, of `time.monotonic`; where that is not known, the wait."""
        return self.since if self.entry is None else self.entry.since


class Activity:
    """What the threads of this rank wait for, and whether it gets on. Read by other threads."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        """When the last wait ended, or a step began."""
        self.count = 0
        """Waits that have ended, steps that have begun: while it grows, the rank makes progress."""
        self.lanes: list[Lane] = []
        self.busy: set[int] = set()
        """Threads beside the main one, while they have something to do."""
        self.on_device: Waiting | None = None
        """What a device of this rank has had to run for a while, though no thread may wait for it."""
        self.absent: tuple[int, ...] = ()
        """Global ranks that have not come to what a thread waits for, where shared memory tells."""
        self._waits: dict[int, Waiting] = {}
        self._known: weakref.WeakKeyDictionary[Any, Lane] = weakref.WeakKeyDictionary()

    @property
    def label(self) -> str | None:
        """What the main thread waits for, else the device; None while neither does."""
        wait, on_device = self.wait(), self.on_device
        if wait is not None and not wait.is_side:
            return wait.label
        return on_device.label if on_device is not None else None

    def wait(self) -> Waiting | None:
        """What the main thread waits for; otherwise what one beside it does."""
        waits = list(self._waits.copy().values())
        return next((w for w in waits if not w.is_side), waits[0] if waits else None)

    def last_started(self) -> Entry | None:
        """The last collective that this rank has started, of whatever group."""
        last = [lane.recent[-1] for lane in self.lanes if lane.recent]
        return max(last, key=lambda entry: entry.since, default=None)

    def entry(self) -> Entry | None:
        """The collective that a thread of this rank waits for, the main one's before others', or a device."""
        waits = sorted(self._waits.copy().values(), key=lambda wait: wait.is_side)
        on_device = self.on_device
        entries = [wait.entry for wait in (*waits, on_device) if wait is not None and wait.entry is not None]
        return entries[0] if entries else None

    def blocked_on(self) -> list[tuple[str, int, bool]]:
        """Group, number and `is_start` of the collectives without which this rank does not get on.

        Empty if a thread may get on by itself.
        """
        waits = self._waits.copy()
        main = next((wait for wait in waits.values() if not wait.is_side), None)
        if main is None or not (main.entry or main.is_for_job) or not self.busy.copy() <= waits.keys():
            return []
        return [(w.entry.lane.name, w.entry.number, w.is_start) for w in waits.values() if w.entry]

    def of_this_thread(self) -> Waiting | None:
        """What the calling thread waits for."""
        return self._waits.get(threading.get_ident())

    @contextmanager
    def waiting(
        self, label: str, entry: Entry | None = None, *, is_start: bool = False, is_for_job: bool = False
    ) -> Generator[None, None, None]:
        """The calling thread waits in here."""
        thread = threading.get_ident()
        self._waits[thread] = Waiting(
            label, time.monotonic(), entry, is_start, thread in self.busy, is_for_job
        )
        try:
            yield
        finally:
            self.advance()

    def advance(self) -> None:
        """The calling thread's wait has ended, or a step has begun."""
        self._waits.pop(threading.get_ident(), None)
        self.since = time.monotonic()
        self.count += 1

    def lane(self, process_group: Any) -> Lane:
        """The lane of a process group; a new one for a group that is seen for the first time."""
        lane = self._known.get(process_group)
        if lane is None:
            lane = self.add(process_group, *_describe(process_group, len(self.lanes)))
        return lane

    def groups(self) -> list[Any]:
        """The process groups that have a lane."""
        return list(self._known)

    def forget_groups(self) -> list[Any]:
        """The process groups, which are about to be destroyed, and others made in their place."""
        groups = self.groups()
        self.lanes, self._known = [], weakref.WeakKeyDictionary()
        self._waits.clear()
        return groups

    def add(self, process_group: Any, name: str, ranks: Sequence[int]) -> Lane:
        """Makes the lane of a process group, with a name of the caller's."""
        lane = self._known[process_group] = Lane(name, ranks)
        self.lanes = [known for known in self.lanes if known in self._known.values()] + [lane]
        return lane


def _describe(process_group: Any, number: int) -> tuple[str, Sequence[int]]:
    """Name and global ranks of a group."""
    if process_group in known_groups():
        ranks = dist.get_process_group_ranks(process_group)
        if dist.is_initialized() and process_group is dist.group.WORLD:
            return "world", ranks
        return f"group {name_of_group(process_group)}", ranks
    return f"group {number}" if number else "world", range(process_group.size())


class Interrupt:
    """A failure that some other thread has learned of, for the thread that waits.

    `set` may be called from any thread; the first call wins. `check` raises in the thread that calls it.
    """

    def __init__(self) -> None:
        self.activity = Activity()
        self.deadline_s = float("inf")
        """A collective that is older while somebody waits for it has failed."""
        self.explain: Callable[[Waiting], BaseException] | None = None
        """Makes the error for a wait whose deadline has passed. May take a second."""
        self.look: Callable[[Entry], BaseException | None] | None = None
        """Makes the error of a collective where other ranks wait for another one. May take a second."""
        self.compare: Callable[[Entry], None] | None = None
        """Called before each collective; returns once all ranks are about to start the same one."""
        self.expect: Callable[..., None] | None = None
        """Has what a device has still to run looked after, as no thread waits for it: `DeviceWatch`."""
        self._looked_at: Entry | None = None
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        """The failure, if there is one."""

    def set(self, error: BaseException) -> bool:
        """Keeps `error` for the waiting threads. Returns whether it was the first."""
        with self._lock:
            if self.error is not None:
                return False
            self.error = error
            return True

    def clear(self) -> None:
        """Forgets the failure: the ranks that are left go on."""
        self.error = None

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if self.error is not None:
            raise self.error

    def check_deadline(self, *, is_over: bool = False) -> None:
        """Raises if the calling thread has waited too long, and the control channel can tell for whom.

        Args:
            is_over: whether the backend has given up, so that it was too long in any case.
        """
        if self.explain is None:
            return
        waiting = self.activity.of_this_thread()
        if waiting is None:
            return
        waited_s = time.monotonic() - waiting.begun_at
        if is_over or waited_s >= self.deadline_s:
            raise self.explain(waiting)
        entry = waiting.entry
        if waited_s < _LOOK_AFTER_S or entry is None or entry is self._looked_at or self.look is None:
            return
        self._looked_at = entry
        error = self.look(entry)
        if error is not None:
            raise error

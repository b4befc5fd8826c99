"""All-reduce of CPU ranks through shared memory within a host, and through gloo between hosts.

Each rank's tensors lie in arenas that all ranks of the host map. Once all tensors are ready, each rank adds
its share of the elements over the ranks, in rank order, and writes the sum into the tensors of all ranks:
every element is read once and written once on each rank, and all ranks get the same bits. Between hosts the
first rank of each host all-reduces the host's sum by gloo, and the other ranks of the host copy the result.
`Staging` reduces tensors that lie elsewhere; a `Worker` reduces while its caller continues.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import ClassVar, NamedTuple

import torch

from lightning_ddp.comm.collectives import all_gather_objects
from lightning_ddp.comm.group import SLICE_S, Group, sub_group
from lightning_ddp.shm.arena import Arena, OwnArena, Semaphore, birth_of, open_arena
from lightning_ddp.shm.hosts import Hosts, find_hosts, give_up

_CPU = torch.device("cpu")
_CHUNK_NUMEL = 32 * 1024
"""Elements added at a time: few enough to stay in the cache, and for torch to start no threads."""
_SHARE_ALIGNMENT = 16
_MAX_PLANS = 512
_NARROW = (torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_DTYPES = (torch.float32, torch.float64, *_NARROW, *_INTEGERS)
_NOTHING = -1
_PIECE_BYTES = 2**20
_LENT_BYTES = 2**23
_IDLE_S = 5.0
_END_S = 1.0
# Offsets in a rank's control arena; each has a separate cache line.
_REQUEST, _IS_CLOSED, _SEMAPHORES = 0, 64, 128

_Ticket = tuple[int, int, bytes]

_Chunks = Sequence[tuple[torch.Tensor, ...]]
"""Elements that one rank adds, by chunk: the same slice of each contributing rank, in rank order."""


class Request(NamedTuple):
    """Location and size of the tensor that a rank adds in an all-reduce, which the others read."""

    arena: int
    """Number of the arena of the tensor; `_NOTHING` if the rank adds none."""
    offset: int
    """Offset in the arena in bytes."""
    numel: int
    dtype_code: int

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype_code]


class SharedMemory:
    """All-reduce through memory that the ranks of a host share, and between hosts by the process group.

    Make tensors with `zeros`, then `connect`, then `all_reduce` them. All ranks must make the same calls in
    the same order, each from one thread at a time.
    """

    def __init__(self, group: Group, hosts: Hosts) -> None:
        self._group = group
        self._hosts = hosts
        self._ranks = hosts.neighbours
        self._me = self._ranks.index(group.rank)
        self._arenas: list[list[Arena]] = []
        self._own: list[OwnArena] = []
        self._obstacle: str | None = None
        self.is_one_host = len(hosts.by_host) == 1
        """True if all ranks are on this host, so that an all-reduce needs memory alone."""
        self.has_spare_processor = hosts.has_spare_processor
        """True if there is a free processor for a thread that reduces."""
        self._leaders: Group | None = None
        self._timeout_s = group.timeout_s(_CPU)
        self._plans: dict[tuple[Request, ...], _Chunks] = {}
        self._number = 0
        self._failure: BaseException | None = None
        self._on_slice: Callable[[float], None] | None = None

    # ------------------------------------------------------------------ set-up

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor in memory that `connect` will share, or in plain memory if that fails."""
        try:
            arena = OwnArena(numel * dtype.itemsize)
        except OSError as error:
            self._obstacle = f"no {numel * dtype.itemsize} bytes of shared memory: {error}"
            return torch.zeros(numel, dtype=dtype)
        self._own.append(arena)
        return arena.view(dtype, 0, numel)

    def connect(self) -> bool:
        """Map the memory of the other ranks of this host, once, after `zeros`.

        Return True if all ranks succeeded; the same on all ranks. Otherwise rank 0 logs the reason, or all
        raise ConfigurationError if the transport is 'shared_memory'.

        Collective: all ranks must call it.
        """
        if not self.is_one_host and self._group.store is None:
            self._obstacle = "the group has no store to create a group with one rank per host"
        try:
            self._own.insert(0, self._make_control())
        except OSError as error:
            self._obstacle = f"no shared memory: {error}"
        offers = self._tell([arena.ticket for arena in self._own])
        if offers is not None:
            try:
                self._open(offers)
            except OSError as error:
                self._obstacle = f"memory of another process cannot be mapped: {error}"
            offers = self._tell([])
        for arena in self._own:
            arena.close_descriptor()
        if offers is not None and not self.is_one_host:
            self._leaders = sub_group(self._group, self._hosts.leaders, _CPU)
        return offers is not None

    def _tell(self, tickets: list[_Ticket]) -> list[list[_Ticket]] | None:
        """Exchange and return the tickets of all ranks' memory; warn and return None if a rank fails."""
        answers = all_gather_objects(self._group, (self._obstacle, tickets), _CPU)
        for rank, (obstacle, _) in enumerate(answers):
            if obstacle is not None:
                give_up(self._group, f"rank {rank}: {obstacle}", is_fault=True)
                return None
        return [offered for _, offered in answers]

    def _make_control(self) -> OwnArena:
        control = OwnArena(_SEMAPHORES + len(self._ranks) * Semaphore.NBYTES)
        for index in range(len(self._ranks)):
            _semaphore(control, index).create()
        self._finalizer = weakref.finalize(self, _close, control.integers(_IS_CLOSED, 1), os.getpid())
        return control

    def _open(self, tickets: Sequence[Sequence[_Ticket]]) -> None:
        pids = [self._hosts.pids[rank] for rank in self._ranks]
        self._arenas = [
            [*self._own] if rank == self._group.rank else [open_arena(pid, each) for each in tickets[rank]]
            for rank, pid in zip(self._ranks, pids, strict=True)
        ]
        self._births = [birth_of(pid) for pid in pids]
        controls = [arenas[0] for arenas in self._arenas]
        self._requests = [control.integers(_REQUEST, 1 + len(Request._fields)) for control in controls]
        """The number of the last all-reduce of each rank, and its `Request`."""
        self._are_closed = [control.integers(_IS_CLOSED, 1) for control in controls]
        others = [i for i in range(len(self._ranks)) if i != self._me]
        self._posts = [_semaphore(controls[i], self._me) for i in others]
        self._waits = [(_semaphore(controls[self._me], i), i) for i in others]

    def close(self) -> None:
        """Make waits in this shared memory raise: of this rank's threads, and of other ranks for this one.

        For use once connected. Thread-safe; does not communicate. In a fork it has no effect.
        """
        self._finalizer()

    # ------------------------------------------------------------------ all-reduce

    def place_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return the index of the shared memory block with a tensor, and the offset there, or None."""
        for number, arena in enumerate(self._own):
            offset = arena.offset_of(tensor)
            if number and offset is not None:
                return number, offset
        return None

    def all_reduce(
        self,
        tensor: torch.Tensor,
        on_slice: Callable[[float], None] | None = None,
        *,
        contributes: bool = True,
    ) -> None:
        """Replace a contiguous tensor from `zeros`, or a slice of one, by the sum over the ranks.

        Waits for the other ranks; `on_slice` is called repeatedly with the seconds waited, and may raise.
        16-bit floats are added in float32 from three ranks on. The tensor of a rank that does not contribute
        may be anywhere, and stays as it is.

        Collective: all ranks must call it.

        Raises:
            ValueError: the tensor is not in shared memory.
            RuntimeError: another rank is lost, too late, or reduces another tensor.
            BaseException: the failure of the group's interrupt, or the error of `on_slice`.
        """
        place = self.place_of(tensor) if contributes else (_NOTHING, 0)
        if place is None:
            raise ValueError("this tensor is not in shared memory")
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        request = Request(*place, real.numel(), _DTYPES.index(real.dtype))
        if self._failure is not None:
            raise self._failure
        self._number += 1
        self._on_slice = on_slice
        mine = self._requests[self._me]
        try:
            for position, value in enumerate((self._number, *request)):
                mine[position] = value
            self._meet()
            requests = tuple(Request(*other[1:]) for other in self._requests)
            self._check_same(requests)
            self._add_share(requests)
            self._meet()
            if not self.is_one_host:
                self._sum_over_hosts(requests)
        except BaseException as error:
            self._failure = error  # the ranks no longer agree on the next all-reduce
            raise
        finally:
            self._on_slice = None

    def _sum_over_hosts(self, requests: Sequence[Request]) -> None:
        """Sum the hosts' sums, in the first contributing rank's tensor, and copy the total to this rank's."""
        views = self._views(requests)
        contributions = [view for view in views if view is not None]
        if self._leaders is not None:
            mine = requests[self._me]
            host_sum = contributions[0] if contributions else torch.zeros(mine.numel, dtype=mine.dtype)
            self._leaders.wait(self._leaders.all_reduce(host_sum), _CPU, lambda _: _check_not_ending())
        self._meet()
        own = views[self._me]
        if own is not None and own is not contributions[0]:
            own.copy_(contributions[0])
        self._meet()

    def _views(self, requests: Sequence[Request]) -> list[torch.Tensor | None]:
        """Return views of the tensors of this host's ranks; None for a rank that adds nothing."""
        return [
            None if r.arena == _NOTHING else arenas[r.arena].view(r.dtype, r.offset, r.numel)
            for arenas, r in zip(self._arenas, requests, strict=True)
        ]

    def _add_share(self, requests: tuple[Request, ...]) -> None:
        plan = self._plans.get(requests)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[requests] = self._plan(requests)
        is_wide = len(requests) > 2 and bool(plan) and requests[0].dtype in _NARROW
        add = _add_in_float32 if is_wide else _add_in_place
        add(plan, self.is_one_host)

    def _plan(self, requests: Sequence[Request]) -> _Chunks:
        """Return this rank's share of the elements to add: chunks, each a view of every rank's tensor."""
        numel = requests[0].numel
        share = -(-numel // (len(requests) * _SHARE_ALIGNMENT)) * _SHARE_ALIGNMENT
        mine = slice(min(self._me * share, numel), min((self._me + 1) * share, numel))
        parts = [view[mine].split(_CHUNK_NUMEL) for view in self._views(requests) if view is not None]
        return [chunk for chunk in zip(*parts, strict=True) if chunk[0].numel()]

    def _check_same(self, requests: Sequence[Request]) -> None:
        first = requests[0]
        for index, other in enumerate(requests):
            is_same = other.numel == first.numel and other.dtype_code == first.dtype_code
            if not is_same or self._requests[index][0] != self._number:
                found, theirs = (f"{r.numel} elements of {r.dtype}" for r in (first, other))
                raise RuntimeError(
                    f"rank {self._group.rank}: in all-reduce {self._number} rank {self._ranks[0]} has"
                    f" {found} and rank {self._ranks[index]} has {theirs}: the ranks reduce different"
                    " tensors"
                )

    # ------------------------------------------------------------------ waits

    def _meet(self) -> None:
        """Wait until all ranks of the host have called this barrier; their earlier writes are visible."""
        for semaphore in self._posts:
            semaphore.post()
        for semaphore, index in self._waits:
            if not semaphore.try_wait():
                self._wait(semaphore, index)

    def _wait(self, semaphore: Semaphore, index: int) -> None:
        rank, group = self._ranks[index], self._group
        activity = group.interrupt.activity if group.interrupt is not None else None
        is_new = activity is not None and activity.of_this_thread() is None  # no wait is recorded yet
        noted = activity.waiting(f"rank {rank} in shared memory") if activity and is_new else nullcontext()

        def ends_in_slice() -> bool:
            if semaphore.wait(SLICE_S):
                return True
            group.check()
            _check_not_ending()
            if self._are_closed[self._me][0]:
                raise RuntimeError(f"rank {group.rank}: this rank has let go of its shared memory")
            if self._is_gone(index):
                if semaphore.try_wait():  # it took part before it exited
                    return True
                raise RuntimeError(
                    f"rank {group.rank}: connection closed by peer: rank {rank} (pid"
                    f" {self._hosts.pids[rank]}) left before all-reduce {self._number} over shared memory was"
                    " done"
                )
            if time.monotonic() - start > self._timeout_s:
                raise RuntimeError(
                    f"rank {group.rank}: rank {rank} did not start all-reduce {self._number} over shared"
                    f" memory within {self._timeout_s:g} s"
                )
            if activity is not None:
                activity.absent = self._absent(index)
            return False

        start = time.monotonic()
        with noted:
            try:
                group.in_slices(ends_in_slice, self._on_slice)
            finally:
                if activity is not None:
                    activity.absent = ()

    def _is_gone(self, index: int) -> bool:
        """Return True if a neighbor's process has ended, or it has closed its shared memory."""
        birth = self._births[index]
        has_ended = birth is None or birth_of(self._hosts.pids[self._ranks[index]]) != birth
        return has_ended or bool(self._are_closed[index][0])

    def _absent(self, index: int) -> tuple[int, ...]:
        """Return the global ranks that have not begun this all-reduce; that of `index` if all have."""
        behind = [other for _, other in self._waits if self._requests[other][0] < self._number] or [index]
        ranks = self._group.lane.ranks if self._group.lane is not None else range(self._group.size)
        return tuple(ranks[self._ranks[other]] for other in behind)


def _semaphore(control: Arena, index: int) -> Semaphore:
    """Return the semaphore, in a rank's shared memory for control, that its neighbor `index` posts."""
    return Semaphore(control.address + _SEMAPHORES + index * Semaphore.NBYTES)


def _close(is_closed: memoryview, pid: int) -> None:
    if os.getpid() == pid:  # in a fork, the rank is still there
        is_closed[0] = 1


def _add_in_place(chunks: _Chunks, gives_all: bool) -> None:
    """Add into the tensors of the first rank; with `gives_all` copy the sum to the others."""
    for first, *others in chunks:
        for other in others:
            first.add_(other)
        if gives_all:
            for other in others:
                other.copy_(first)


def _add_in_float32(chunks: _Chunks, gives_all: bool) -> None:
    """Sum the ranks' 16-bit floats in float32, with one rounding at the end."""
    total = torch.empty(chunks[0][0].numel())
    for first, *others in chunks:
        part = total[: first.numel()]
        part.copy_(first)
        for other in others:
            part.add_(other)
        for out in (first, *others) if gives_all else (first,):
            out.copy_(part)


class Staging:
    """Staging buffer of a few MiB in shared memory, through which any tensors are reduced in pieces.

    Callers may also borrow a part of it for their own tensors.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._piece = memory.zeros(_PIECE_BYTES, torch.uint8)
        self._lent = memory.zeros(_LENT_BYTES, torch.uint8)

    def lend(self, count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor] | None:
        """Return `count` 1-D tensors that are reduced without a copy; None if too large.

        All calls return the same memory, so there may be one borrower at a time.
        """
        nbytes = numel * dtype.itemsize
        if count * nbytes > _LENT_BYTES:
            return None
        return [self._lent[i * nbytes : (i + 1) * nbytes].view(dtype) for i in range(count)]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor by the sum over the ranks.

        Collective: all ranks must call it.
        """
        if self._memory.place_of(tensor) is not None:
            self._memory.all_reduce(tensor)
            return
        flat = tensor.view(-1)
        for part in flat.split(_PIECE_BYTES // flat.element_size()):
            piece = self._piece[: part.numel() * part.element_size()].view(part.dtype)
            piece.copy_(part)
            self._memory.all_reduce(piece)
            part.copy_(piece)


def open_staging(group: Group, device: torch.device) -> Staging | None:
    """Open shared memory of the ranks of a group; return None if it is not available.

    Collective: all ranks must call it.
    """
    hosts = find_hosts(group, device)
    if hosts is None or not hosts.are_shared:
        return None
    memory = SharedMemory(group, hosts)
    staging = Staging(memory)
    return staging if memory.connect() else None


def _check_not_ending() -> None:
    """Raise if the interpreter is exiting, to end waits of jobs whose result nobody needs then."""
    if Worker.is_ending.is_set():
        raise RuntimeError("the interpreter is exiting")


class Work:
    """A job of a `Worker`, with the methods of torch's `Work` that waits use."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job: Callable[[], None] | None = job
        self._is_done = False
        self.begun_ns: int | None = None
        """Start time, in ns of `time.perf_counter_ns`; None before."""
        self._error: BaseException | None = None
        self._latch = threading.Lock()
        self._latch.acquire()

    def is_completed(self) -> bool:
        return self._is_done

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the job has ended; raise its error, or RuntimeError after the timeout."""
        if not self._is_done:
            if not self._latch.acquire(timeout=-1 if timeout is None else timeout.total_seconds()):
                raise RuntimeError(f"an all-reduce over shared memory has not ended within {timeout}")
            self._latch.release()  # for other waiting threads
        if self._error is not None:
            raise self._error
        return True

    def run(self) -> None:
        """Run the job and store its error, if any; called once."""
        self.begun_ns = time.perf_counter_ns()
        job, self._job = self._job, None  # a kept work must not keep its tensors alive
        try:
            if job is not None:
                job()
        except BaseException as error:  # noqa: BLE001 (any error is passed to the waiting thread)
            self._error = error
        self._is_done = True
        self._latch.release()


class Deferred(Work):
    """Work whose job runs in the thread that waits for it."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Run the job in the calling thread, without a timeout; raise its error."""
        if not self.is_completed():
            self.run()
        return super().wait(timeout)


class Worker:
    """Thread that runs jobs in the order of their submission, and stops when it is idle.

    While it has jobs, the thread's identifier is in `busy`.
    """

    is_ending: ClassVar = threading.Event()
    """Event that is set when the interpreter is about to exit."""
    workers: ClassVar[weakref.WeakSet[Worker]] = weakref.WeakSet()

    def __init__(self, busy: set[int] | None = None) -> None:
        self._busy = busy if busy is not None else set()
        self._jobs: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.workers.add(self)

    def submit(self, job: Callable[[], None]) -> Work:
        """Queue a job for the thread; return a `Work` to wait for it."""
        work = Work(job)
        with self._lock:
            self._jobs.put(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="lightning_ddp reduce", daemon=True)
                self._thread.start()
        return work

    def _main(self) -> None:
        while True:
            work: Work | None = None  # an idle thread must not keep gradients alive
            with suppress(queue.Empty):
                work = self._jobs.get(timeout=_IDLE_S)
            if work is not None:
                self._busy.add(threading.get_ident())
                work.run()
                self._busy.discard(threading.get_ident())
                continue
            with self._lock:
                if self._jobs.empty():  # otherwise a job was queued after the timeout
                    self._thread = None
                    return

    def end(self) -> None:
        """Stop the thread after its queued jobs; wait for that for at most a second."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            self._jobs.put(None)
            thread.join(_END_S)


# A fork has none of the threads, and their locks may be held forever.
os.register_at_fork(after_in_child=Worker.workers.clear)


@atexit.register
def _end_all() -> None:
    """Stop all workers at exit: a thread in a torch operation would abort the process."""
    Worker.is_ending.set()
    for worker in list(Worker.workers):
        worker.end()

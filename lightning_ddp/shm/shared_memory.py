"""All-reduce of CPU ranks through shared memory within a host, and through gloo between hosts.

Each rank's tensors lie in arenas that all ranks of the host map. Once all tensors are ready, each rank adds
its share of the elements over the ranks, in rank order, and writes the sum into the tensors of all ranks:
every element is read once and written once on each rank, and all ranks get the same bits. Between hosts the
first rank of each host all-reduces the host's sum by gloo, and the other ranks of the host copy the result.
`Staging` reduces tensors that lie elsewhere.

An arena is an anonymous file (`memfd_create`): its size does not depend on /dev/shm, and the kernel frees it
with the last process that maps it, however that process ends. Peers open it through /proc to connect.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_ddp.comm.collectives import all_gather_objects
from lightning_ddp.comm.group import SLICE_S, Group, sub_group
from lightning_ddp.shm.hosts import Hosts, find_hosts, give_up
from lightning_ddp.shm.worker import check_not_ending

_CPU = torch.device("cpu")
_NAME = "lightning_ddp"
_TOKEN_BYTES = 16
_ALIGNMENT = 64
_MAP_FAILED = ctypes.c_void_p(-1).value
_START_TIME = 18
"""Index of the start time in /proc/<pid>/stat after the state."""
_NS_PER_S = 1_000_000_000
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
# Offsets in a rank's control arena; each has a separate cache line.
_REQUEST, _IS_CLOSED, _SEMAPHORES = 0, 64, 128

_Ticket = tuple[int, int, bytes]
"""Descriptor, size and token by which a peer maps an arena, with the id of its process."""
_Chunks = Sequence[tuple[torch.Tensor, ...]]
"""Elements that one rank adds, by chunk: the same slice of each contributing rank, in rank order."""


# ---------------------------------------------------------------------- memory


class Arena:
    """Shared memory mapped from a memory file, zero at first; unmapped with the last tensor in it."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._buffer = _map(descriptor, nbytes)
        self.bytes = torch.frombuffer(self._buffer, dtype=torch.uint8)
        """The whole memory as a 1-D uint8 tensor."""
        self.address = self.bytes.data_ptr()

    def view(self, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        """Return `numel` elements from byte `offset` on as a 1-D tensor."""
        return self.bytes[offset : offset + numel * dtype.itemsize].view(dtype)

    def integers(self, offset: int, count: int) -> memoryview:
        """Return a writable view of `count` 64-bit integers from byte `offset` on, a multiple of 8."""
        return memoryview(self._buffer).cast("B")[offset : offset + 8 * count].cast("q")


class OwnArena(Arena):
    """Shared memory that this rank has created, which peers can map until `close_descriptor`.

    Raises:
        OSError: shared memory is not available, or not enough of it.
    """

    def __init__(self, nbytes: int) -> None:
        nbytes = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._descriptor = os.memfd_create(_NAME)
        try:
            size = nbytes + _TOKEN_BYTES
            os.posix_fallocate(self._descriptor, 0, size)  # without it, a lack of memory is a later SIGBUS
            os.pwrite(self._descriptor, self._token, nbytes)
            super().__init__(self._descriptor, nbytes)
        except BaseException:
            self.close_descriptor()
            raise

    @property
    def ticket(self) -> _Ticket:
        return self._descriptor, self.nbytes, self._token

    def close_descriptor(self) -> None:
        """Prevent peers from mapping this memory from now on; existing mappings stay."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def open_arena(pid: int, ticket: _Ticket) -> Arena:
    """Map shared memory that a process of this host has created, by its id and `OwnArena.ticket`.

    Raises:
        OSError: the arena cannot be opened, because of permissions or because the process is in another
            container.
    """
    number, nbytes, token = ticket
    path = f"/proc/{pid}/fd/{number}"
    found = os.readlink(path)
    if not found.startswith(f"/memfd:{_NAME}"):  # in another container, the id is of another process
        raise OSError(f"{path} is {found}, not shared memory of this package")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(descriptor, _TOKEN_BYTES, nbytes) != token:
            raise OSError(f"{path} is the memory of another process")
        return Arena(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _map(descriptor: int, nbytes: int) -> Any:
    """Map a descriptor's memory and return it as a byte array; `mmap` would keep a descriptor open, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    address = libc.mmap(None, nbytes, rights, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, _MAP_FAILED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(buffer, libc.munmap, address, nbytes).atexit = False
    return buffer


def birth_of(pid: int) -> str | None:
    """Return a living process's start time, to tell it from a later one with its id; None if it has ended."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[_START_TIME] if state not in "ZX" else None
    return None


# ---------------------------------------------------------------------- semaphores


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc, _libc_without_gil = ctypes.PyDLL(None), ctypes.CDLL(None)


class Semaphore:
    """A semaphore at an address of shared memory, for all processes that map it."""

    NBYTES = 64
    """Bytes of a semaphore: more than a `sem_t`, and a separate cache line."""

    def __init__(self, address: int) -> None:
        self._address = ctypes.c_void_p(address)

    def create(self) -> None:
        if _libc.sem_init(self._address, 1, 0):
            raise OSError("sem_init failed")

    def post(self) -> None:
        """Increment the count and wake a waiting process, which sees all earlier writes; never block."""
        _libc.sem_post(self._address)

    def try_wait(self) -> bool:
        """Decrement the count if it is above zero; return True if it was."""
        return bool(_libc.sem_trywait(self._address) == 0)

    def wait(self, timeout_s: float) -> bool:
        """Wait without the GIL until the count is above zero, and decrement it.

        Return False after `timeout_s` seconds, or at a signal.
        """
        deadline_ns = time.monotonic_ns() + int(timeout_s * _NS_PER_S)
        until = _Timespec(deadline_ns // _NS_PER_S, deadline_ns % _NS_PER_S)
        found = _libc_without_gil.sem_clockwait(self._address, time.CLOCK_MONOTONIC, ctypes.byref(until))
        return bool(found == 0)


# ---------------------------------------------------------------------- the all-reduce


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
            leaders = tuple(ranks[0] for ranks in self._hosts.by_host)
            self._leaders = sub_group(self._group, leaders, _CPU)
        return offers is not None

    def _tell(self, tickets: list[_Ticket]) -> list[list[_Ticket]] | None:
        """Return all ranks' tickets for mapping memory; if a rank failed, warn or raise, and return None."""
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
        """Return arena number and byte offset of a contiguous tensor; None if not in this rank's arenas."""
        for number, arena in enumerate(self._own):
            offset = tensor.data_ptr() - arena.address
            if number and 0 <= offset <= arena.nbytes - tensor.nbytes:
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
            self._leaders.wait(self._leaders.all_reduce(host_sum), _CPU, lambda _: check_not_ending())
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
            check_not_ending()
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
    """Sum 16-bit floats in float32, round once, write to the first rank or, with `gives_all`, to all."""
    total = torch.empty(chunks[0][0].numel())
    for first, *others in chunks:
        part = total[: first.numel()]
        part.copy_(first)
        for other in others:
            part.add_(other)
        for out in (first, *others) if gives_all else (first,):
            out.copy_(part)


# ---------------------------------------------------------------------- tensors that lie anywhere


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
    """Return a new staging buffer in memory that ranks of a host share; None if that is not available.

    Collective: all ranks must call it.
    """
    hosts = find_hosts(group, device)
    if hosts is None or not hosts.are_shared:
        return None
    memory = SharedMemory(group, hosts)
    staging = Staging(memory)
    return staging if memory.connect() else None

"""Process group wrapper that starts collectives and waits for their works in slices.

A wait that blocks in C++ until a peer replies hides signals and the failure of other ranks. Between two
slices Python runs signal handlers and checks the group's `Interrupt`. A call that cannot be sliced blocks a
separate thread, for which the caller waits in slices.

All ranks of a group must call the functions that make groups of it, in the same order for calls on the same
group. `device` is that of the tensors in the new group's collectives. A group from which torch cannot make
another is a ConfigurationError.
"""

from __future__ import annotations

import inspect
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist

from lightning_ddp._torch import (
    backend_of,
    gloo_like,
    is_profiling,
    known_groups,
    set_timeout,
    timeout_of,
    without_engine_context,
)
from lightning_ddp.comm.activity import Entry, Interrupt, Lane, Waiting
from lightning_ddp.comm.nccl import error_of, is_nccl, memory_problem, needs_device
from lightning_ddp.comm.teardown import note_sent, remember_connections
from lightning_ddp.errors import CollectiveError, ConfigurationError

T = TypeVar("T")
OnSlice = Callable[[float], None] | None
"""Function called after each expired slice of a wait with the seconds waited so far; may raise."""

SLICE_S = 0.05
"""Longest time in seconds between two checks of signals and of the interrupt."""
JOB_MARK = "is_lightning_ddp_job"
"""Attribute that marks futures made by threads of this package."""

_SLICE = timedelta(seconds=SLICE_S)
_POLL_S = 0.0005
_NO_TIMEOUT = timedelta(0)
_ANSWER_WAIT_S = 1.0
"""Seconds that the thread of a call has, after its time limit, to report its timeout."""


def span(label: str) -> AbstractContextManager[Any]:
    """Return a span of torch.profiler if this thread is profiled, else a null context."""
    return torch.profiler.record_function(f"lightning_ddp::{label}") if is_profiling() else nullcontext()


def uploaded(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a CPU tensor on `device`, made in the current stream without a wait of the host.

    A copy from pageable memory makes the host wait until the stream has reached it. A copy from pinned
    memory is asynchronous; torch keeps the memory until then.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class InThread(Generic[T]):
    """A call in a separate thread, as it may block in C++ until another process replies.

    A store does not reply while its process is stopped (SIGSTOP), and no timeout of torch applies then.

    The called function gets this object, for `until`.
    """

    def __init__(self, call: Callable[[InThread[T]], T], limit_s: float = float("inf")) -> None:
        self.is_over = threading.Event()
        self.error: Exception | None = None
        """Error that the call raised, or a TimeoutError after the time limit; None otherwise."""
        self._call = call
        self._limit_s = limit_s
        self._ends_at = time.monotonic() + limit_s
        self._is_wanted = True
        self._result: T
        threading.Thread(target=self._run, daemon=True, name="lightning_ddp call").start()

    def _run(self) -> None:
        try:
            self._result = self._call(self)
        except Exception as error:  # noqa: BLE001 (any error is passed to the waiting thread)
            self.error = self.error or error
        finally:
            self.is_over.set()

    @property
    def result(self) -> T:
        """Value that the call returned, to be read after a wait; raises `error`, if any."""
        if self.error is not None:
            raise self.error
        return self._result

    def until(self, done: Callable[[], bool], every_s: float, otherwise: str) -> None:
        """Poll, inside the called function, until `done()`: often at first, then every `every_s` seconds.

        Raises:
            TimeoutError: the time is over, or no thread waits any more. Its text ends with `otherwise`.
        """
        pause_s = _POLL_S
        while not done():
            if not self._is_wanted or time.monotonic() > self._ends_at:
                raise self._timeout(otherwise)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, every_s)

    def _timeout(self, why: str) -> TimeoutError:
        return TimeoutError(f"Timed out after {self._limit_s:g} s: {why}")

    def wait(self, on_slice: Callable[[float], None]) -> None:
        """Wait until the call has ended, or its time limit has passed.

        `on_slice` is called after each slice with the seconds waited so far; may raise, which ends `until`.
        """
        start = time.monotonic()
        try:
            while not self.is_over.wait(SLICE_S):
                on_slice(time.monotonic() - start)
                if time.monotonic() > self._ends_at + _ANSWER_WAIT_S:
                    self.error = self._timeout(
                        "the group's store does not answer. The process that holds it, usually that of"
                        " rank 0, is stopped or cannot be reached"
                    )
                    return
        except BaseException:
            self._is_wanted = False
            raise


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as a view of real pairs, as most backends support these alone."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Group:
    """A process group with the operations that the engine needs: collectives, waits, ranks and a store.

    Never uses the default group by itself, so ranks may be threads of one process. Methods that start a
    collective must be called by all ranks of the group in the same order. Each wait raises the failure of the
    interrupt, an error of a signal handler, and CollectiveTimeoutError once the deadline of the interrupt
    has passed.

    Args:
        process_group: a `torch.distributed.ProcessGroup`, or a single backend such as `ProcessGroupGloo`.
        interrupt: checked in every slice of a wait; None for none.
        store: a key-value store that only these ranks use; None for the group's store in torch.
        transport: how CPU ranks of one host send gradients and parameters; see `shm.hosts`.
    """

    _counts: ClassVar[weakref.WeakKeyDictionary[Any, Counter[Hashable]]] = weakref.WeakKeyDictionary()
    """Counters of `next_number`, shared by all `Group` objects of a process group."""

    def __init__(
        self,
        process_group: Any,
        interrupt: Interrupt | None = None,
        store: Any | None = None,
        *,
        transport: str = "auto",
    ) -> None:
        self.process_group: Any = process_group
        self.interrupt = interrupt
        self.lane: Lane | None = interrupt.activity.lane(process_group) if interrupt is not None else None
        """Record of this group's collectives; None without an interrupt."""
        self.transport = transport
        self._store = store
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self._names: dict[str, str] = {}

    @property
    def store(self) -> Any | None:
        """Key-value store of the group, or None if torch does not know it."""
        if self._store is not None:
            return self._store
        get = getattr(self.process_group, "get_group_store", None)
        if get is not None and type(self.process_group) is dist.ProcessGroup:
            return get()
        known = known_groups().get(self.process_group)
        return known[1] if known else None

    def next_number(self, of: Hashable) -> int:
        """Return the number of earlier calls with the key `of` for this group in this process; 0 at first.

        Ranks that make the same calls get the same numbers.
        """
        counts = self._counts.setdefault(self.process_group, Counter())
        counts[of] += 1
        return counts[of] - 1

    def backend(self, device: torch.device) -> str:
        """Return the backend's name for `device`: 'gloo', 'nccl' for any NCCL, 'python' for one in Python."""
        name = self._names.get(device.type)
        if name is None:
            found = self._backend(device)
            name = "python" if isinstance(found, dist.ProcessGroup) else str(found.name()).lower()
            self._names[device.type] = name = "nccl" if is_nccl(name) else name
        return name

    def memory_problem(self, device: torch.device) -> str | None:
        """Return why torch, not the backend, allocates buckets on `device`; None if the backend does."""
        may_abort = self.interrupt is not None and self.interrupt.may_abort
        return memory_problem(self.process_group, device, may_abort=may_abort)

    def timeout_s(self, device: torch.device) -> float:
        """Return the timeout in seconds of the backend that serves `device`; infinity if unknown."""
        timeout = timeout_of(self._backend(device))
        return float("inf") if timeout is None else timeout.total_seconds()

    def _backend(self, device: torch.device) -> Any:
        """Return torch's backend object for `device`; a single backend, or a group in Python, is its own."""
        process_group = self.process_group
        is_of_torch = type(process_group) is dist.ProcessGroup
        return backend_of(process_group, device) if is_of_torch else process_group

    # ------------------------------------------------------------------ collectives, not waited for

    def all_reduce(self, tensor: torch.Tensor, op: Any = None, *, label: str | None = None) -> Any:
        """Start an in-place all-reduce (default: sum) and return its work; `label` names its purpose.

        The tensor is contiguous, or sparse where the backend supports that; complex numbers go as pairs.
        """
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if op is None else op
        kind = "all_reduce"
        if op is not None:  # maybe one with a factor, which has the named one as `op`
            kind += f" {getattr(getattr(op, 'op', op), 'name', op)}"
        start = self.process_group.allreduce
        return self.start(kind, (tensor,), lambda: start([_as_real(tensor)], options), label=label)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, *, label: str | None = None) -> Any:
        """Start an in-place broadcast from group rank `src` and return its work."""
        options = dist.BroadcastOptions()
        options.rootRank = src
        start, kind = self.process_group.broadcast, f"broadcast from {src}"
        return self.start(kind, (tensor,), lambda: start([_as_real(tensor)], options), label=label)

    def start(
        self,
        kind: str,
        tensors: Sequence[torch.Tensor],
        begin: Callable[[], Any],
        *,
        label: str | None = None,
    ) -> Any:
        """Call `begin`, which starts a collective, and return torch's `Work` for it.

        With debug="detail" it waits first until all ranks are about to start the same collective.

        Args:
            kind: operation with all that must be the same on all ranks, such as the source.
            tensors: tensors that this rank sends; the same shapes and dtypes on all ranks.
            begin: returns the work.
            label: purpose of the collective; the same on all ranks.

        Raises:
            CollectiveMismatchError: the ranks are about to start different collectives.
        """
        lane, interrupt = self.lane, self.interrupt
        if lane is not None and interrupt is not None:
            entry = lane.next(kind, tensors, label)
            supervisor = interrupt.supervisor
            if supervisor is not None and supervisor.is_comparing and self.size > 1:
                supervisor.compare(entry)
        self.note_sent(tensors)
        with without_engine_context():
            work = begin()
        if lane is not None:
            lane.started(work)
        return work

    def note_sent(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record tensors of a collective that is about to start, to await gloo's threads at exit."""
        if tensors and self.backend(tensors[0].device) != "nccl":
            note_sent(tensors)

    # ------------------------------------------------------------------ waits

    def wait(
        self, work: Any, device: torch.device, on_slice: OnSlice = None, label: str | None = None
    ) -> None:
        """Wait for a collective's work: on the CPU until done, with NCCL until queued on the current stream.

        Args:
            work: work that a collective of this group returned.
            device: device of its tensors.
            on_slice: called after each expired slice with the seconds waited so far; may raise. Not called
                with NCCL; see `wait_device` and `watch_device`.
            label: name of the wait; None for the name of the collective.

        Raises:
            RuntimeError: the collective failed, for example as a peer closed its connection.
        """
        entry = self.lane.entry_of(work) if self.lane is not None else None
        with self._waiting(label or (entry.name() if entry is not None else "collective"), entry):
            backend = self.backend(device)
            if backend == "gloo":
                self.in_slices(lambda: self._ends_in_slice(work), on_slice)
                return
            if backend == "python":
                self._wait_done(work.get_future(), on_slice)
            elif device.type == "cpu":
                self._poll(work.is_completed, on_slice)
            else:
                self.check()
            work.wait(_NO_TIMEOUT)  # NCCL queues a stream wait; with a timeout it would block, and then abort

    def _ends_in_slice(self, work: Any) -> bool:
        self.check()
        try:
            work.wait(_SLICE)
        except RuntimeError:
            # gloo raises at the end of the slice and for a failure; only a failure completes the work.
            if not work.is_completed():
                return False
            try:
                work.wait()
            except RuntimeError as error:
                if "timed out" in str(error).lower() and self.interrupt is not None:
                    self.interrupt.check_deadline(is_over=True)  # the backend's timeout came first
                raise
        return True

    def wait_done(self, future: Any, on_slice: OnSlice = None, label: str = "communication hook") -> None:
        """Wait until a `torch.futures.Future` has a value or an error, without raising the error."""
        if not future.done():
            with self._waiting(label, is_for_job=getattr(future, JOB_MARK, False)):
                self._wait_done(future, on_slice)

    def _wait_done(self, future: Any, on_slice: OnSlice) -> None:
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        self.in_slices(lambda: done.wait(SLICE_S), on_slice)

    def wait_until(
        self, is_over: Callable[[], bool], label: str, on_slice: OnSlice = None, *, work: Any = None
    ) -> None:
        """Poll until `is_over()` is True; log it as a wait `label`, for the collective `work` if any."""
        entry = self.lane.entry_of(work) if self.lane is not None else None
        with self._waiting(label, entry):
            self._poll(is_over, on_slice)

    def wait_call(self, call: InThread[Any], label: str, on_slice: OnSlice = None) -> None:
        """Wait until a call in a thread has ended or timed out; raise earlier if the interrupt is set."""
        with self._waiting(label):
            call.wait(lambda waited_s: self._look(waited_s, on_slice))

    # ------------------------------------------------------------------ devices

    def wait_device(self, device: torch.device, on_slice: OnSlice = None) -> None:
        """Wait until all work queued on the current stream has run; returns at once on the CPU.

        Raises:
            CollectiveError: NCCL has found an error, so results may be incomplete.
        """
        if device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        last = self.lane.recent[-1] if self.lane is not None and self.lane.recent else None
        with self._waiting("the device" if last is None else last.name(), last):
            start = time.monotonic()
            self._poll(event.query, on_slice)
            self.check()
            found = error_of(self.process_group, device)
            if found is not None:
                label, waited_s = "work queued on the device", time.monotonic() - start
                message = f"{label} ended without its results: NCCL's watchdog reports {found}"
                raise CollectiveError(message, label=label, rank=self.rank, waited_s=waited_s)

    def watch_device(self, device: torch.device, label: str, since: float, on_slice: OnSlice = None) -> None:
        """Let a thread watch the work queued on the current stream, and report if it never ends; do not wait.

        Without effect if waits of this group block the host, or if there is no watch. `since` is a time
        before the first collective, in seconds of `time.monotonic`; `on_slice` is called in that thread.
        """
        watch = self.interrupt.device_watch if self.interrupt is not None else None
        if self.interrupt is None or watch is None or device.type != "cuda":
            return
        if self.backend(device) in ("gloo", "python") or torch.cuda.is_current_stream_capturing():
            return
        waiting = Waiting(label, since, self.interrupt.activity.last_started(), is_side=True)
        watch.expect(waiting, process_group=self.process_group, device=device, on_slice=on_slice)

    # ------------------------------------------------------------------ slices

    def check(self) -> None:
        """Raise the failure that another thread has set in the interrupt, if any."""
        if self.interrupt is not None:
            self.interrupt.check()

    @contextmanager
    def _waiting(
        self, label: str, entry: Entry | None = None, *, is_for_job: bool = False
    ) -> Generator[None, None, None]:
        activity = self.interrupt.activity if self.interrupt is not None else None
        noted = activity.waiting(label, entry, is_for_job=is_for_job) if activity else nullcontext()
        with noted, span(f"wait {label}"):
            yield

    def in_slices(self, ends_in_slice: Callable[[], bool], on_slice: OnSlice = None) -> None:
        """Call `ends_in_slice`, which waits for at most `SLICE_S`, until it returns True.

        Every wait of the package ends up here: it raises a failure of the interrupt, checks the deadline, and
        calls `on_slice` as described for `wait`.
        """
        start = time.monotonic()
        while not ends_in_slice():
            self._look(time.monotonic() - start, on_slice)

    def _look(self, waited_s: float, on_slice: OnSlice) -> None:
        if self.interrupt is not None:
            self.interrupt.check()
            self.interrupt.check_deadline()
        if on_slice is not None:
            on_slice(waited_s)

    def _poll(self, done: Callable[[], bool], on_slice: OnSlice) -> None:
        def ends_in_slice() -> bool:
            ends_at = time.monotonic() + SLICE_S
            while not done():
                if time.monotonic() >= ends_at:
                    return False
                time.sleep(_POLL_S)
            return True

        self.in_slices(ends_in_slice, on_slice)


# ---------------------------------------------------------------------- groups made from a group


def sibling_group(group: Group, device: torch.device) -> Group:
    """Create a second group of the same ranks, with a separate order of collectives.

    If torch cannot make one, the group itself is returned; then all collectives must be in one order.

    Collective: all ranks must call it.
    """
    return _make(group, device, range(group.size)) or group


def part_group(group: Group, size: int, device: torch.device) -> Group:
    """Create groups of `size` neighboring ranks, from rank 0 on; return that of this rank.

    The last group is smaller if `size` does not divide the number of ranks.

    Collective: all ranks must call it.
    """
    starts = range(0, group.size, size)
    made = [sub_group(group, range(start, min(start + size, group.size)), device) for start in starts]
    return next(part for part in made if part is not None)


def sub_group(group: Group, ranks: Sequence[int], device: torch.device) -> Group | None:
    """Create a group of the listed ranks; return None on other ranks, which cannot use it.

    All ranks pass the same list; only the listed ranks communicate.

    Collective: all ranks must call it.

    Args:
        ranks: group ranks, in the order in which they are numbered in the new group.

    Raises:
        ConfigurationError: the list is empty, has a rank twice, or has a rank that is not in the group; or
            torch cannot number the ranks in this order.
    """
    chosen = list(ranks)
    wrong = [rank for rank in chosen if not 0 <= rank < group.size]
    if not chosen or wrong or len(set(chosen)) < len(chosen):
        raise ConfigurationError(
            f"sub_group of ranks {chosen}: expected at least one, all different, from 0 to {group.size - 1}"
        )
    made = _make(group, device, chosen)
    if made is None and group.rank in chosen:
        raise ConfigurationError(
            f"no group of ranks {chosen} can be created, because torch.distributed does not know this process"
            " group. Create it with init_process_group or new_group."
        )
    return made


def _make(group: Group, device: torch.device, ranks: Sequence[int]) -> Group | None:
    """Return a new group of these ranks; None on other ranks, and where torch cannot make one."""
    number = group.next_number("group")
    made: Any = None
    store: Any = None
    if group.backend(device) != "gloo":
        made = _make_with_torch(group, ranks)
        if made is not None and group.rank in ranks:
            _keep_timeout(group.process_group, made, device)
    elif group.store is not None and group.rank in ranks:
        store = dist.PrefixStore(f"lightning_ddp/sibling/{number}/{ranks[0]}", group.store)
        first = backend_of(group.process_group, device)
        with remember_connections():
            made = gloo_like(first, dist.PrefixStore("gloo", store), ranks.index(group.rank), len(ranks))
    if made is None or group.rank not in ranks:
        return None
    if group.interrupt is not None and group.lane is not None:
        of_run = [group.lane.ranks[rank] for rank in ranks]
        part = f" from rank {of_run[0]}" * (len(ranks) < group.size)
        group.interrupt.activity.add(made, f"{group.lane.name}, channel {number + 1}{part}", of_run)
    return Group(made, group.interrupt, store, transport=group.transport)


def _keep_timeout(first: Any, made: Any, device: torch.device) -> None:
    """Copy the timeout of a group to a new group, for which torch sets the backend's default."""
    with suppress(RuntimeError):  # a third-party backend may have no device
        timeout = timeout_of(backend_of(first, device))
        if timeout is not None:
            set_timeout(backend_of(made, device), timeout)


def _make_with_torch(group: Group, ranks: Sequence[int]) -> Any | None:
    process_group = group.process_group
    if not (dist.is_initialized() and process_group in known_groups()):
        return None
    of_run = dist.get_process_group_ranks(process_group)
    chosen = [of_run[rank] for rank in ranks]
    # All ranks of the job make the group. If `group` has only some ranks, only these make it.
    is_local = len(of_run) < dist.get_world_size()
    with _without_splits() if is_local else nullcontext() as device:
        options = _order(chosen) if device is None else {**_order(chosen), "device_id": device}
        return dist.new_group(chosen, use_local_synchronization=is_local, **options)


def _order(ranks: Sequence[int]) -> dict[str, Any]:
    """Return keyword arguments of `new_group` that keep the order of ranks, which torch would sort."""
    if list(ranks) == sorted(ranks):
        return {}
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise ConfigurationError(
            f"group of ranks {list(ranks)}: torch {torch.__version__} numbers the ranks of a group in rising"
            " order only. List them in rising order, or use a torch whose new_group has `sort_ranks`."
        )
    return {"sort_ranks": False}


@contextmanager
def _without_splits() -> Generator[torch.device | None, None, None]:
    """Let some ranks make a group without the others: in this context torch splits no communicator.

    If the default group is bound to a device, a new NCCL group is split from it, and a split waits for all
    ranks of the default group. Without a device, the new group is set up separately at its first collective.
    It yields the device to pass to `new_group`, or None if none is needed.
    """
    default: Any = dist.group.WORLD
    device, default.bound_device_id = default.bound_device_id, None
    try:
        yield device if device is not None and needs_device(default, device) else None
    finally:
        default.bound_device_id = device

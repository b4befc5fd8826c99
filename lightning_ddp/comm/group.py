"""A process group with waits that can be interrupted.

Blocking in C++ until a peer answers hides signals and the failure of other ranks. Everything in this
package therefore waits in slices: between two slices Python runs signal handlers, and the group's
`Interrupt` is looked at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp.comm.activity import Activity, Entry, Lane, Waiting
from lightning_ddp.comm.spans import span

__all__ = ["SLICE_S", "Activity", "Group", "Interrupt", "without_engine_context"]

SLICE_S = 0.05
"""Longest time in seconds between two looks at signals and at the interrupt."""

_SLICE = timedelta(seconds=SLICE_S)
_POLL_S = 0.0005
_ENGINE_KEY = "context"
JOB_MARK = "is_lightning_ddp_job"
"""Attribute of the futures that a thread of this package makes."""


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
        self.compare: Callable[[Entry], None] | None = None
        """Called before each collective; returns once all ranks are about to start the same one."""
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def set(self, error: BaseException) -> bool:
        """Keeps `error` for the waiting threads. Returns whether it was the first."""
        with self._lock:
            if self._error is not None:
                return False
            self._error = error
            return True

    @property
    def error(self) -> BaseException | None:
        """The failure, if there is one."""
        return self._error

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if self._error is not None:
            raise self._error

    def check_deadline(self, *, is_over: bool = False) -> None:
        """Raises if the calling thread has waited too long, and the control channel can tell for whom.

        Args:
            is_over: whether the backend has given up, so that it was too long in any case.
        """
        if self.explain is None:
            return
        waiting = self.activity.of_this_thread()
        if waiting is not None and (is_over or time.monotonic() - waiting.begun_at >= self.deadline_s):
            raise self.explain(waiting)


@contextmanager
def without_engine_context() -> Generator[None, None, None]:
    """Hides from a collective that starts in here what the autograd engine keeps for its threads.

    A work copies the thread's state, and since torch 2.13 that holds a Python object during backward. When
    gloo's own thread drops the last copy it takes the GIL, and if the interpreter is ending just then, that
    kills the process (`terminate called without an active exception`, SIGABRT).
    """
    remove = getattr(torch._C, "_remove_obj_from_tls", None)
    if remove is None or not torch._C._is_key_in_tls(_ENGINE_KEY):
        yield
        return
    context = torch._C._get_obj_in_tls(_ENGINE_KEY)
    remove(_ENGINE_KEY)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_ENGINE_KEY, context)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A view without complex numbers, which most backends do not know."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def options_of(kind: Any, timeout: timedelta | None) -> Any:
    """Options of a collective, such as `dist.ReduceOptions`, that the backend gives up after `timeout`."""
    options = kind()
    if timeout is not None:
        options.timeout = timeout
    return options


class Group:
    """What the engine needs of a process group: rank, size, store, collectives that return works, waits.

    Never uses the default group by itself, so ranks may be threads of one process. Methods that start a
    collective must be called by all ranks of the group in one order.

    Args:
        process_group: a `torch.distributed.ProcessGroup`, or a single backend such as `ProcessGroupGloo`.
        interrupt: looked at in every slice of a wait; None for none.
        store: a key-value store that these ranks alone use; None for the one that torch knows of.
        transport: how CPU ranks of one host send gradients and parameters; see `comm.hosts`.
    """

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
        self.transport = transport
        self._store = store
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self.lacking: set[tuple[str, str]] = set()
        """Methods of the process group, with the type of device, that it turned out not to have."""
        self._sum = dist.AllreduceOptions()
        self._sum.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        self._gather = options_of(dist.distributed_c10d.AllgatherOptions, None)
        self._broadcasts: dict[int, Any] = {}
        self._names: dict[str, str] = {}
        self._lane: Lane | None = None
        if interrupt is not None:
            self._lane = interrupt.activity.lane(process_group)

    @property
    def lane(self) -> Lane | None:
        """What is noted of this group's collectives; None without an interrupt."""
        return self._lane

    @property
    def store(self) -> Any | None:
        """The key-value store that the group was made with, or None where torch does not tell."""
        if self._store is not None:
            return self._store
        get = getattr(self.process_group, "get_group_store", None)
        if get is not None and type(self.process_group) is dist.ProcessGroup:
            return get()
        known = dist.distributed_c10d._world.pg_map.get(self.process_group)
        return known[1] if known else None

    def backend(self, device: torch.device) -> str:
        """Name of the backend that serves `device`: 'gloo', 'nccl' ...; 'python' for one in Python."""
        name = self._names.get(device.type)
        if name is None:
            pg = self.process_group
            if type(pg) is dist.ProcessGroup:
                name = str(pg._get_backend(device).name()).lower()
            else:
                name = "python" if isinstance(pg, dist.ProcessGroup) else str(pg.name()).lower()
            self._names[device.type] = name
        return name

    # ------------------------------------------------------------------ collectives, not waited for

    def announce(self, kind: str, tensors: Sequence[torch.Tensor], label: str | None = None) -> None:
        """Notes a collective that is about to start; every method that starts one calls it first.

        With debug="detail" it returns once all ranks are about to start the same one.

        Args:
            kind: its name and what else has to be the same on all ranks, such as the source.
            tensors: what this rank sends; of the same shapes and dtypes on all ranks.
            label: what it is for; the same on all ranks.

        Raises:
            CollectiveMismatchError: the ranks are about to start different ones.
        """
        lane, interrupt = self._lane, self.interrupt
        if lane is None or interrupt is None:
            return
        entry = lane.next(kind, tensors, label)
        if interrupt.compare is not None and self.size > 1:
            interrupt.compare(entry)

    def _started(self, work: Any) -> Any:
        if self._lane is not None:
            self._lane.started(work)
        return work

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        label: str | None = None,
    ) -> Any:
        """Starts an in-place all-reduce; `op` defaults to the sum, `label` says what it is for.

        The tensor is contiguous, or sparse where the backend knows that. Complex numbers travel as pairs.
        The backend gives it up after `timeout`; None for the group's own.
        """
        if self._lane is not None:
            self.announce("all_reduce" if op is None else f"all_reduce {_name_of(op)}", (tensor,), label)
        options = self._sum
        if op is not None or timeout is not None:
            options = options_of(dist.AllreduceOptions, timeout)
            options.reduceOp = dist.ReduceOp.SUM if op is None else op
        with without_engine_context():
            return self._started(self.process_group.allreduce([_as_real(tensor)], options))

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int = 0,
        timeout: timedelta | None = None,
        *,
        label: str | None = None,
    ) -> Any:
        """Starts an in-place broadcast from group rank `src`."""
        if self._lane is not None:
            self.announce(f"broadcast from {src}", (tensor,), label)
        options = self._broadcasts.get(src) if timeout is None else None
        if options is None:
            options = options_of(dist.BroadcastOptions, timeout)
            options.rootRank = src
            if timeout is None:
                self._broadcasts[src] = options
        with without_engine_context():
            return self._started(self.process_group.broadcast([_as_real(tensor)], options))

    def all_gather(
        self,
        outputs: list[torch.Tensor],
        tensor: torch.Tensor,
        timeout: timedelta | None = None,
        *,
        label: str | None = None,
    ) -> Any:
        """Starts an all-gather into `outputs`, one tensor of the input's shape a rank."""
        if self._lane is not None:
            self.announce("all_gather", (tensor,), label)
        options = self._gather
        if timeout is not None:
            options = options_of(dist.distributed_c10d.AllgatherOptions, timeout)
        with without_engine_context():
            work = self.process_group.allgather(
                [[_as_real(output) for output in outputs]], [_as_real(tensor)], options
            )
        return self._started(work)

    def start(
        self,
        kind: str,
        tensors: Sequence[torch.Tensor],
        begin: Callable[[], Any],
        *,
        label: str | None = None,
    ) -> Any:
        """Starts another collective of the process group, which sends `tensors`; returns its work."""
        self.announce(kind, tensors, label)
        return self._started(begin())

    # ------------------------------------------------------------------ waits

    def wait(
        self,
        work: Any,
        device: torch.device,
        on_slice: Callable[[float], None] | None = None,
        label: str | None = None,
        *,
        on_host: bool = False,
    ) -> None:
        """Waits for a work: on the CPU until done, with NCCL until it is queued on the current stream.

        Args:
            work: what a collective of this group returned.
            device: device of its tensors.
            on_slice: called after each expired slice with the seconds waited so far; may raise.
            label: what is waited for, for people who ask where a rank is stuck; None for what it was called
                when it was started. Also names the span of the wait in torch.profiler.
            on_host: with NCCL too, wait here until it has run; else `on_slice` is not called.

        Raises:
            CollectiveTimeoutError: the deadline of the interrupt has passed.
            RuntimeError: the collective failed, for example as a peer closed its connection.
            BaseException: what the interrupt holds, or what a signal handler raised.
        """
        entry = self._lane.entry_of(work) if self._lane is not None else None
        with self._waiting(label or (entry.name() if entry is not None else "collective"), entry):
            self._wait(work, device, on_slice, on_host)

    @contextmanager
    def _waiting(
        self, label: str, entry: Entry | None = None, *, is_for_job: bool = False
    ) -> Generator[None, None, None]:
        activity = self.interrupt.activity if self.interrupt is not None else None
        if activity is not None:
            activity.begin(label, entry, is_for_job=is_for_job)
        try:
            with span(label, "wait"):
                yield
        finally:
            if activity is not None:
                activity.advance()

    def _wait(
        self, work: Any, device: torch.device, on_slice: Callable[[float], None] | None, on_host: bool
    ) -> None:
        backend = self.backend(device)
        if backend == "gloo":
            self._wait_in_slices(work, on_slice)
        elif backend == "python":
            self._wait_done(work.get_future(), on_slice)
            work.wait()
        elif device.type == "cpu" or on_host:
            self._poll(work.is_completed, on_slice)
            work.wait()
        else:
            self.check()
            work.wait()  # queues a stream wait; passing NCCL a time limit would block and then abort it

    def _wait_in_slices(self, work: Any, on_slice: Callable[[float], None] | None) -> None:
        start: float | None = None
        while True:
            self.check()
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:
                # gloo raises both for the end of the slice and for a failure; only a failure completes it
                if work.is_completed():
                    self._finish(work)
                    return
            self._check_deadline()
            if on_slice is not None:
                start = start or time.monotonic() - SLICE_S
                on_slice(time.monotonic() - start)

    def _finish(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            if "timed out" in str(error).lower() and self.interrupt is not None:
                self.interrupt.check_deadline(is_over=True)  # the backend's own was sooner
            raise

    def wait_future(self, future: Any, on_slice: Callable[[float], None] | None = None) -> Any:
        """Waits for a `torch.futures.Future` and returns its value. Raises as `wait` does."""
        self.wait_done(future, on_slice)
        return future.wait()

    def wait_done(
        self,
        future: Any,
        on_slice: Callable[[float], None] | None = None,
        label: str = "communication hook",
    ) -> None:
        """Waits until a future has a value or an error, which it does not raise."""
        if not future.done():
            with self._waiting(label, is_for_job=getattr(future, JOB_MARK, False)):
                self._wait_done(future, on_slice)

    def _wait_done(self, future: Any, on_slice: Callable[[float], None] | None) -> None:
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        self._wait_event(done, on_slice)

    def wait_event(
        self, done: threading.Event, label: str, on_slice: Callable[[float], None] | None = None
    ) -> None:
        """Waits for an event as `wait` does for a work."""
        with self._waiting(label):
            self._wait_event(done, on_slice)

    def wait_until(
        self,
        done: Callable[[], bool],
        label: str,
        on_slice: Callable[[float], None] | None = None,
        every_s: float = _POLL_S,
    ) -> None:
        """Waits until `done`, asked every `every_s` seconds, says so. For what cannot be waited for."""
        with self._waiting(label):
            self._poll(done, on_slice, every_s)

    def _wait_event(self, done: threading.Event, on_slice: Callable[[float], None] | None) -> None:
        start = time.monotonic()
        while not done.wait(SLICE_S):
            self.check()
            self._check_deadline()
            if on_slice is not None:
                on_slice(time.monotonic() - start)

    def wait_device(self, device: torch.device) -> None:
        """Waits until what is queued on the current stream has run; at once on the CPU."""
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            last = self._lane.recent[-1] if self._lane is not None and self._lane.recent else None
            with self._waiting("the device" if last is None else last.name(), last):
                self._poll(event.query, None)

    def _poll(
        self, done: Callable[[], bool], on_slice: Callable[[float], None] | None, every_s: float = _POLL_S
    ) -> None:
        start = last = time.monotonic()
        while not done():
            time.sleep(every_s)
            now = time.monotonic()
            if now - last >= SLICE_S:
                last = now
                self.check()
                self._check_deadline()
                if on_slice is not None:
                    on_slice(now - start)

    def check(self) -> None:
        """Raises the failure that the interrupt holds, if any."""
        if self.interrupt is not None:
            self.interrupt.check()

    def _check_deadline(self) -> None:
        if self.interrupt is not None:
            self.interrupt.check_deadline()


def _name_of(op: Any) -> str:
    return str(getattr(getattr(op, "op", op), "name", op))

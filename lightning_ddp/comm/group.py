"""A process group with waits that can be interrupted.

Blocking in C++ until a peer answers hides signals and the failure of other ranks. Everything in this
package therefore waits in slices: between two slices Python runs signal handlers, and the group's
`Interrupt` is looked at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["SLICE_S", "Activity", "Group", "Interrupt", "without_engine_context"]

SLICE_S = 0.05
"""Longest time in seconds between two looks at signals and at the interrupt."""

_SLICE = timedelta(seconds=SLICE_S)
_POLL_S = 0.0005
_ENGINE_KEY = "context"


class Activity:
    """What the main thread of this rank is waiting for, and whether it gets on. Read by other threads."""

    def __init__(self) -> None:
        self.label: str | None = None
        """The collective that it waits for, or None while it does not wait."""
        self.since = time.monotonic()
        """When that wait began or ended."""
        self.count = 0
        """Waits that have ended, steps that have begun: while it grows, the rank makes progress."""

    def begin(self, label: str) -> None:
        """A wait begins."""
        self.since = time.monotonic()
        self.label = label

    def advance(self) -> None:
        """A wait has ended, or a step has begun."""
        self.label = None
        self.since = time.monotonic()
        self.count += 1


class Interrupt:
    """A failure that some other thread has learned of, for the thread that waits.

    `set` may be called from any thread; the first call wins. `check` raises in the thread that calls it.
    """

    def __init__(self) -> None:
        self.activity = Activity()
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
        self._sum = dist.AllreduceOptions()
        self._sum.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        self._gather = dist.distributed_c10d.AllgatherOptions()
        self._broadcasts: dict[int, Any] = {}
        self._names: dict[str, str] = {}

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

    def all_reduce(self, tensor: torch.Tensor, op: Any = None) -> Any:
        """Starts an in-place all-reduce; `op` defaults to the sum.

        The tensor is contiguous, or sparse where the backend knows that. Complex numbers travel as pairs.
        """
        options = self._sum
        if op is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = op
        with without_engine_context():
            return self.process_group.allreduce([_as_real(tensor)], options)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Any:
        """Starts an in-place broadcast from group rank `src`."""
        options = self._broadcasts.get(src)
        if options is None:
            options = self._broadcasts[src] = dist.BroadcastOptions()
            options.rootRank = src
        with without_engine_context():
            return self.process_group.broadcast([_as_real(tensor)], options)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Any:
        """Starts an all-gather into `outputs`, one tensor of the input's shape a rank."""
        with without_engine_context():
            return self.process_group.allgather(
                [[_as_real(output) for output in outputs]], [_as_real(tensor)], self._gather
            )

    # ------------------------------------------------------------------ waits

    def wait(
        self,
        work: Any,
        device: torch.device,
        on_slice: Callable[[float], None] | None = None,
        label: str = "collective",
    ) -> None:
        """Waits for a work: on the CPU until done, with NCCL until it is queued on the current stream.

        Args:
            work: what a collective of this group returned.
            device: device of its tensors.
            on_slice: called after each expired slice with the seconds waited so far; may raise.
            label: what is waited for, for people who ask where a rank is stuck.

        Raises:
            RuntimeError: the collective failed, for example as a peer closed its connection.
            BaseException: what the interrupt holds, or what a signal handler raised.
        """
        with self._waiting(label):
            self._wait(work, device, on_slice)

    @contextmanager
    def _waiting(self, label: str) -> Generator[None, None, None]:
        activity = self.interrupt.activity if self.interrupt is not None else None
        if activity is not None:
            activity.begin(label)
        try:
            yield
        finally:
            if activity is not None:
                activity.advance()

    def _wait(self, work: Any, device: torch.device, on_slice: Callable[[float], None] | None) -> None:
        backend = self.backend(device)
        if backend == "gloo":
            self._wait_in_slices(work, on_slice)
        elif backend == "python":
            self.wait_future(work.get_future(), on_slice)
            work.wait()
        elif device.type == "cpu":
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
                    work.wait()
                    return
            if on_slice is not None:
                start = start or time.monotonic() - SLICE_S
                on_slice(time.monotonic() - start)

    def wait_future(self, future: Any, on_slice: Callable[[float], None] | None = None) -> Any:
        """Waits for a `torch.futures.Future` and returns its value. Raises as `wait` does."""
        self.wait_done(future, on_slice)
        return future.wait()

    def wait_done(self, future: Any, on_slice: Callable[[float], None] | None = None) -> None:
        """Waits until a future has a value or an error, which it does not raise."""
        if not future.done():
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            with self._waiting("communication hook"):
                self._wait_event(done, on_slice)

    def _wait_event(self, done: threading.Event, on_slice: Callable[[float], None] | None) -> None:
        start = time.monotonic()
        while not done.wait(SLICE_S):
            self.check()
            if on_slice is not None:
                on_slice(time.monotonic() - start)

    def wait_device(self, device: torch.device) -> None:
        """Waits until what is queued on the current stream has run; at once on the CPU."""
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._poll(event.query, None)

    def _poll(self, done: Callable[[], bool], on_slice: Callable[[float], None] | None) -> None:
        start = last = time.monotonic()
        while not done():
            time.sleep(_POLL_S)
            now = time.monotonic()
            if now - last >= SLICE_S:
                last = now
                self.check()
                if on_slice is not None:
                    on_slice(now - start)

    def check(self) -> None:
        """Raises the failure that the interrupt holds, if any."""
        if self.interrupt is not None:
            self.interrupt.check()

"""Waits of a process group, and of its store, that can be interrupted.

Blocking in C++ until a peer answers hides signals and the failure of other ranks. Everything in this
package therefore waits in slices: between two slices Python runs signal handlers, and the group's
`Interrupt` is looked at. What cannot be cut into slices blocks a thread of its own, and that is waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from lightning_ddp._torch import backend_of, error_of, timeout_of
from lightning_ddp.comm.activity import Entry, Lane
from lightning_ddp.comm.interrupt import Interrupt
from lightning_ddp.comm.spans import span
from lightning_ddp.errors import CollectiveError, CollectiveTimeoutError

__all__ = ["JOB_MARK", "SLICE_S", "InThread", "Waits"]

T = TypeVar("T")

SLICE_S = 0.05
"""Longest time in seconds between two looks at signals and at the interrupt."""

_SLICE = timedelta(seconds=SLICE_S)
_POLL_S = 0.0005
_NO_TIMEOUT = timedelta(0)
_ANSWER_WAIT_S = 1.0
"""How long after its time limit the thread of a call may take to say so."""
JOB_MARK = "is_lightning_ddp_job"
"""Attribute of the futures that a thread of this package makes."""


class InThread(Generic[T]):
    """A call that may block in C++ until another process answers, made in a thread of its own.

    A store answers nobody while its process is stopped (SIGSTOP), and no time limit of torch ends that.

    Args:
        call: what to call; gets this object, for `until`.
        limit_s: how many seconds there are for it.
    """

    def __init__(self, call: Callable[[InThread[T]], T], limit_s: float = float("inf")) -> None:
        self.is_over = threading.Event()
        """Set once it has returned or raised."""
        self._call = call
        self._limit_s = limit_s
        self._ends_at = time.monotonic() + limit_s
        self._is_wanted = True
        self._result: T
        self._raised: Exception | None = None
        self._unanswered: Exception | None = None
        threading.Thread(target=self._run, daemon=True, name="lightning_ddp call").start()

    def _run(self) -> None:
        try:
            self._result = self._call(self)
        except Exception as error:  # noqa: BLE001 (whatever it is, who waits gets it)
            self._raised = error
        finally:
            self.is_over.set()

    @property
    def error(self) -> Exception | None:
        """What it raised, or a TimeoutError where there was no answer in time."""
        return self._unanswered or self._raised

    @property
    def result(self) -> T:
        """What it returned; raises the error where there is one. To be asked for after a wait."""
        if self.error is not None:
            raise self.error
        return self._result

    def until(self, done: Callable[[], bool], every_s: float, otherwise: str) -> None:
        """For the call: polls, often at first and then every `every_s` seconds, until `done` says so.

        Raises:
            TimeoutError: the time is over, or nobody waits any more. Its text ends with `otherwise`.
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
        """Returns once it is over, or its time is.

        Args:
            on_slice: called after each slice with the seconds waited so far; may raise. Unless that is a
                `CollectiveTimeoutError`, after which a handle may be waited for again, it ends `until`.
        """
        start = time.monotonic()
        try:
            while not self.is_over.wait(SLICE_S):
                on_slice(time.monotonic() - start)
                if time.monotonic() > self._ends_at + _ANSWER_WAIT_S:
                    self._unanswered = self._timeout(
                        "the group's store does not answer; the process that has it, as a rule that of rank"
                        " 0, is stopped or cannot be reached"
                    )
                    return
        except CollectiveTimeoutError:
            raise
        except BaseException:
            self._is_wanted = False
            raise


class Waits:
    """How the ranks of a group wait, for works, futures, events and devices.

    Args:
        process_group: a `torch.distributed.ProcessGroup`, or a single backend such as `ProcessGroupGloo`.
        interrupt: looked at in every slice of a wait; None for none.
    """

    def __init__(self, process_group: Any, interrupt: Interrupt | None) -> None:
        self.process_group: Any = process_group
        self.interrupt = interrupt
        self._names: dict[str, str] = {}
        self._lane: Lane | None = None
        if interrupt is not None:
            self._lane = interrupt.activity.lane(process_group)

    @property
    def lane(self) -> Lane | None:
        """What is noted of this group's collectives; None without an interrupt."""
        return self._lane

    def backend(self, device: torch.device) -> str:
        """Name of the backend that serves `device`: 'gloo', 'nccl' ...; 'python' for one in Python."""
        name = self._names.get(device.type)
        if name is None:
            pg = self.process_group
            if type(pg) is dist.ProcessGroup:
                name = str(backend_of(pg, device).name()).lower()
            else:
                name = "python" if isinstance(pg, dist.ProcessGroup) else str(pg.name()).lower()
            self._names[device.type] = name
        return name

    def timeout_s(self, device: torch.device) -> float:
        """After how many seconds the backend that serves `device` gives a collective up."""
        backend = self.process_group
        if type(backend) is dist.ProcessGroup:
            backend = backend_of(backend, device)
        timeout = timeout_of(backend)
        return timeout.total_seconds() if isinstance(timeout, timedelta) else float("inf")

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
            work.wait(_NO_TIMEOUT)  # as torch's C++ code calls it; some works take it without a default
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

    def wait_call(
        self, call: InThread[Any], label: str, on_slice: Callable[[float], None] | None = None
    ) -> None:
        """Waits for a call in a thread as `wait` does for a work; raises nothing that the call does."""

        def look(waited_s: float) -> None:
            self.check()
            self._check_deadline()
            if on_slice is not None:
                on_slice(waited_s)

        with self._waiting(label):
            call.wait(look)

    def _wait_event(self, done: threading.Event, on_slice: Callable[[float], None] | None) -> None:
        start = time.monotonic()
        while not done.wait(SLICE_S):
            self.check()
            self._check_deadline()
            if on_slice is not None:
                on_slice(time.monotonic() - start)

    def wait_device(self, device: torch.device) -> None:
        """Waits until what is queued on the current stream has run, as a whole; at once on the CPU.

        Raises:
            CollectiveError: NCCL has found an error, so that it may have ended half-way.
            BaseException: as `wait`; also where groups may have been aborted meanwhile.
        """
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            last = self._lane.recent[-1] if self._lane is not None and self._lane.recent else None
            with self._waiting("the device" if last is None else last.name(), last):
                start = time.monotonic()
                self._poll(event.query, None)
                self.check()
                found = error_of(self.process_group, device)
                if found is not None:
                    label = "what was queued on the device"
                    raise CollectiveError(
                        f"{label} ended without its results: NCCL's watchdog reports {found}",
                        label=label,
                        rank=self.process_group.rank(),
                        waited_s=time.monotonic() - start,
                    )

    def watch_device(
        self,
        device: torch.device,
        label: str,
        since: float,
        on_slice: Callable[[float], None] | None = None,
    ) -> None:
        """Has somebody look after what waits have only queued on the current stream. Returns at once.

        Where waits of this group wait here, or nobody would hear of what is found, it does nothing.

        Args:
            device: of the stream.
            label: what is queued there, for people.
            since: before the first of its collectives was started, of `time.monotonic`.
            on_slice: as for `wait`, but called in another thread.
        """
        interrupt = self.interrupt
        if interrupt is None or interrupt.expect is None or device.type != "cuda":
            return
        if self.backend(device) in ("gloo", "python") or torch.cuda.is_current_stream_capturing():
            return
        interrupt.expect(
            label,
            process_group=self.process_group,
            device=device,
            since=since,
            entry=interrupt.activity.last_started(),
            on_slice=on_slice,
        )

    def _poll(self, done: Callable[[], bool], on_slice: Callable[[float], None] | None) -> None:
        start = last = time.monotonic()
        while not done():
            time.sleep(_POLL_S)
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

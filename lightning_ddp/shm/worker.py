"""A thread that runs jobs in order, and jobs that the waiting thread runs itself."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import ClassVar

from lightning_ddp.comm.group import Group

_IDLE_S = 1.0
_END_S = 1.0


class Work:
    """Handle of a function that a `Worker` runs, with the methods of torch's `Work` that waits use."""

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
    """Thread that runs functions in the order of their submission; ends when idle, restarts when needed.

    While it runs a job, the activity of the group's interrupt has the thread in `busy`.
    """

    is_ending: ClassVar = threading.Event()
    """Event that is set when the interpreter is about to exit."""
    workers: ClassVar[weakref.WeakSet[Worker]] = weakref.WeakSet()

    def __init__(self, name: str, group: Group) -> None:
        self._name = name
        self._busy: set[int] = group.interrupt.activity.busy if group.interrupt is not None else set()
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
                self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
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
                if self._jobs.empty():  # else it has not stopped between two jobs
                    self._busy.discard(threading.get_ident())
                continue
            self._busy.discard(threading.get_ident())  # `end` may have queued its end behind a job
            with self._lock:
                if self._jobs.empty():  # otherwise a job was queued after the timeout
                    self._thread = None
                    return

    def end(self, limit_s: float = _END_S) -> bool:
        """Stop the thread after its queued jobs; return False if it still runs after `limit_s` seconds."""
        with self._lock:
            thread = self._thread
        if thread is None:
            return True
        self._jobs.put(None)
        thread.join(limit_s)
        return not thread.is_alive()


def check_not_ending() -> None:
    """Raise if the interpreter is exiting, to end waits of jobs whose result nobody needs then."""
    if Worker.is_ending.is_set():
        raise RuntimeError("the interpreter is exiting")


# A fork has none of the threads, and their locks may be held forever.
os.register_at_fork(after_in_child=Worker.workers.clear)


@atexit.register
def _end_all() -> None:
    """Stop all workers at exit: a thread in a torch operation would abort the process."""
    Worker.is_ending.set()
    for worker in list(Worker.workers):
        worker.end()

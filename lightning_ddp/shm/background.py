"""All-reduces over shared memory that run in a thread while the caller goes on, one after the other."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import ClassVar

__all__ = ["Deferred", "Work", "Worker", "check_not_ending", "end_idle_workers"]

_IDLE_S = 5.0
_END_S = 1.0


def check_not_ending() -> None:
    """For the waits of jobs, between two slices.

    Raises:
        RuntimeError: the interpreter ends, so that nobody needs the result.
    """
    if Worker.is_ending.is_set():
        raise RuntimeError("the interpreter ends")


class Work:
    """A job of a `Worker`, with the methods of torch's works by which groups wait for them."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job: Callable[[], None] | None = job
        self._is_done = False
        self.begun_ns: int | None = None
        """When it was its turn, by `time.perf_counter_ns`."""
        self._error: BaseException | None = None
        self._latch = threading.Lock()
        self._latch.acquire()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._is_done

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until it has ended.

        Raises:
            RuntimeError: it has not by then.
            BaseException: what it raised.
        """
        if not self._is_done:
            if not self._latch.acquire(timeout=-1 if timeout is None else timeout.total_seconds()):
                raise RuntimeError(f"an all-reduce over shared memory has not ended within {timeout}")
            self._latch.release()  # for others that wait
        if self._error is not None:
            raise self._error
        return True

    def run(self) -> None:
        """Does it. Called once, by the worker."""
        self.begun_ns = time.perf_counter_ns()
        job, self._job = self._job, None  # who keeps the work must not keep what it worked on
        try:
            if job is not None:
                job()
        except BaseException as error:  # noqa: BLE001 (whatever it is, the thread that waits gets it)
            self._error = error
        self._is_done = True
        self._latch.release()


class Deferred(Work):
    """A job that the thread which waits for it does then."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Does it, however long it takes. Raises what it raised."""
        if not self.is_completed():
            self.run()
        return super().wait(timeout)


class Worker:
    """Runs jobs in the order in which they were submitted, in a thread that ends when there are none.

    Args:
        busy: where the thread's identifier is while it has jobs; None for nowhere.
    """

    is_ending: ClassVar = threading.Event()
    """The interpreter is about to end."""
    workers: ClassVar[weakref.WeakSet[Worker]] = weakref.WeakSet()

    def __init__(self, busy: set[int] | None = None) -> None:
        self._busy = busy if busy is not None else set()
        self._jobs: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.workers.add(self)

    def submit(self, job: Callable[[], None]) -> Work:
        """Queues a job. Does not wait."""
        work = Work(job)
        with self._lock:
            self._jobs.put(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="lightning_ddp reduce", daemon=True)
                self._thread.start()
        return work

    def _main(self) -> None:
        while True:
            work: Work | None = None  # a thread that waits must not keep gradients
            with suppress(queue.Empty):
                work = self._jobs.get(timeout=_IDLE_S)
            if work is not None:
                self._busy.add(threading.get_ident())
                work.run()
                self._busy.discard(threading.get_ident())
                continue
            with self._lock:
                if self._jobs.empty():  # otherwise a job came while this thread was to end
                    self._thread = None
                    return

    def end(self) -> None:
        """Lets the thread end after the jobs that it has, and waits for that a moment."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            self._jobs.put(None)
            thread.join(_END_S)


def end_idle_workers() -> None:
    """Has the threads end once their jobs are done; the next job starts one again."""
    for worker in list(Worker.workers):
        worker.end()


@atexit.register
def _end_all() -> None:
    """A thread that is inside of a torch operation when the interpreter is finalised ends the process."""
    Worker.is_ending.set()
    end_idle_workers()

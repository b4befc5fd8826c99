"""Call of a collective: its label, its deadline, and the errors that name it.

The waiting rank checks the deadline, so that its error names the collective. The backend gets the same
timeout plus a margin, because an abandoned collective that still runs would keep the process from exiting.
After a missed deadline the group cannot be used any more, as the ranks disagree on the next collective: gloo
breaks its connections, and the communicator of NCCL is aborted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch

from lightning_ddp._torch import with_timeout
from lightning_ddp.comm.group import Group, InThread, span
from lightning_ddp.comm.nccl import is_timeout
from lightning_ddp.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ConfigurationError,
    LightningDDPError,
    in_seconds,
    require,
)

T = TypeVar("T")
Timeout = timedelta | float | None
"""Time limit of a call, as a `timedelta` or in seconds; None for the group's timeout."""

_MARGIN = timedelta(seconds=2)
_NO_TIMEOUT = timedelta(0)


def check_rank(group: Group, rank: int, what: str) -> None:
    """Raise if `rank` is not in the group; `what` begins the message, such as 'broadcast from'."""
    if not 0 <= rank < group.size:
        raise ConfigurationError(f"{what} rank {rank}, but the group has ranks 0 to {group.size - 1}")


def limit_of(timeout: timedelta | float, label: str) -> float:
    """Convert the timeout of a collective to seconds; ConfigurationError if it is not above 0."""
    seconds = in_seconds(f"{label}: timeout", timeout)
    require(seconds > 0, f"{label}: timeout={timeout!r}: expected a time above 0")
    return seconds


class Call:
    """Runner of a collective on a device: starts works, waits until a deadline, names it in errors.

    The label is its name in errors, in the profiler and in reports of what a rank waits for.

    Raises:
        ConfigurationError: this rank is not in the group, or the timeout is invalid.
    """

    def __init__(self, group: Group, device: torch.device, label: str, timeout: Timeout = None) -> None:
        if not isinstance(group, Group):
            raise ConfigurationError(
                f"this rank is not in the group ({group!r}). sub_group returns None on the ranks that"
                " are not in its list; those ranks must not take part in its collectives."
            )
        self.group, self.device, self.label, self.timeout = group, device, label, timeout
        self._started_at = time.monotonic()
        self._limit_s = float("inf") if timeout is None else limit_of(timeout, label)

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._started_at

    def run(self, begin: Callable[..., Any], *args: Any) -> None:
        """Start a collective, as `start` does, and wait for it."""
        self.wait(self.start(begin, *args))

    def start(self, begin: Callable[..., Any], *args: Any) -> Any:
        """Call `begin(*args, label=...)`, which starts a collective, in a profiler span; return its work."""
        limit = None if self.timeout is None else timedelta(seconds=self._limit_s) + _MARGIN
        with self.explained(), span(self.label), with_timeout(self.group.process_group, limit):
            return begin(*args, label=self.label)

    def wait(self, work: Any) -> None:
        """Wait for a collective's work, or raise at the deadline; on CUDA with a deadline, until it ran."""
        with self.explained(work):
            self.group.wait(work, self.device, self.check_deadline, self.label)
            self.wait_device()

    def wait_device(self) -> None:
        """Wait until all work queued on the current stream has run, if the call has a deadline."""
        if self.timeout is not None:
            self.group.wait_device(self.device, self.check_deadline)

    def wait_for_thread(self, thread: InThread[T]) -> T:
        """Wait for a function in a thread, and return its result; raise once the deadline has passed."""
        self.group.wait_call(thread, self.label, self.check_deadline)
        if isinstance(thread.error, (RuntimeError, TimeoutError)):
            raise self.explain(thread.error) from thread.error
        return thread.result

    def check_deadline(self, _waited_s: float) -> None:
        """Raise `CollectiveTimeoutError` once the deadline has passed; on a GPU, start to abort the group."""
        waited_s = self.waited_s
        if waited_s < self._limit_s:
            return
        if self.device.type != "cpu":  # its kernel would never end by itself
            threading.Thread(target=self._abort, daemon=True, name="lightning_ddp abort").start()
        raise self.error(
            CollectiveTimeoutError,
            f" has not ended after {waited_s:.1f} s, past its deadline of {self._limit_s:g} s: not all ranks"
            " have called it, or a rank is slow or lost. The group cannot be used any further. Check what the"
            " other ranks do, or allow more time.",
        )

    def _abort(self) -> None:
        with suppress(RuntimeError, AttributeError):  # a backend without abort
            self.group.process_group.abort()

    @contextmanager
    def explained(self, work: Any = None) -> Generator[None, None, None]:
        """Convert errors of the backend in this context to errors that name the collective.

        An error while `work` is not completed is that of a signal handler, and stays as it is.
        """
        try:
            yield
        except LightningDDPError:
            raise
        except RuntimeError as error:
            if work is not None and not work.is_completed():
                raise
            raise self.explain(error) from error

    def explain(self, error: Exception) -> CollectiveError:
        """Return a `CollectiveError` that names the collective, for an error of the backend."""
        kind = CollectiveTimeoutError if is_timeout(str(error)) else CollectiveError
        return self.error(kind, f" failed after {self.waited_s:.1f} s: {error}")

    def error(self, kind: type[CollectiveError], text: str, missing: Sequence[int] = ()) -> CollectiveError:
        """Return an error of class `kind` whose message begins with rank and label."""
        rank, message = self.group.rank, f"rank {self.group.rank} of {self.group.size}: {self.label}{text}"
        return kind(message, label=self.label, rank=rank, waited_s=self.waited_s, missing=missing)


def run(
    group: Group, begin: Callable[[], Any], *, label: str, timeout: Timeout = None, wait: bool = True
) -> Running:
    """Run any collective of `torch.distributed` that returns a `Work`, with a label and a deadline.

    The wait runs signal handlers, and ends when another rank fails. On CUDA it ends once the collective is
    queued on the current stream, as torch's does; with a deadline once it has run.

    Collective: all ranks must call it.

    Args:
        group: the ranks; for `isend` and `irecv` a group of the two.
        begin: calls a function of `torch.distributed` with `async_op=True` for `group.process_group`, and
            returns its `Work`.
        label: name of the collective in errors, in the profiler and in reports of what a rank waits for; the
            same on all ranks.
        timeout: deadline of this call; None for the group's timeout.
        wait: False to return at once. The tensors must not be changed before `wait` of the result.

    Returns:
        The collective, to wait for later.

    Raises:
        ConfigurationError: `begin` has returned no work.
        CollectiveTimeoutError: the deadline has passed; the group cannot be used any further.
        CollectiveError: the backend failed, for example because a peer was lost.
        BaseException: the failure of the group's interrupt, such as `PeerFailure`.
    """
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    call = Call(group, device, label, timeout)
    work = call.start(group.start, label, (), begin)
    if work is None:
        raise ConfigurationError(
            f"{label}: begin has returned no Work. Pass async_op=True to the collective."
        )
    running = Running(call, work)
    if wait:
        running.wait()
    return running


class Running:
    """Handle of a collective that `run` has started, to wait for it."""

    def __init__(self, call: Call, work: Any) -> None:
        self._call, self._work = call, work

    def wait(self) -> None:
        """Wait for the collective, as described for `run`; raise its error. Call it once."""
        call, work = self._call, self._work
        try:
            future = work.get_future()
        except RuntimeError:  # a message of gloo, whose wait can neither be sliced nor polled
            call.wait_for_thread(InThread(lambda _: work.wait()))
            return
        with call.explained(work):  # of a backend that is unknown here
            call.group.wait_until(future.done, call.label, call.check_deadline, work=work)
            work.wait(_NO_TIMEOUT)  # raises its error; with NCCL queues a wait of the stream
            call.wait_device()

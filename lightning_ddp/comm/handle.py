"""Handle of a collective in progress: its label, deadline and result.

The waiting rank checks the deadline, so that its error names the collective. The backend gets the same
timeout plus a margin, because an abandoned collective that still runs would keep the process from exiting.
After a missed deadline the group cannot be used any more, as the ranks disagree on the next collective: gloo
breaks its connections, and the communicator of NCCL is aborted.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from lightning_ddp._torch import without_engine_context
from lightning_ddp.comm.group import Group, InThread, OnSlice, options_of, span
from lightning_ddp.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ConfigurationError,
    LightningDDPError,
    in_seconds,
    require,
)

E = TypeVar("E", bound=CollectiveError)
P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
Wait = Callable[[OnSlice], None]
"""Function that waits for an end; calls its argument, which may raise, after each slice."""

_MARGIN = timedelta(seconds=2)
_LACKING = ("not support", "not implemented", "unsupported")
_WORDS_OF_A_TIMEOUT = ("timed out", "timeout")


def no_wait(on_slice: OnSlice) -> None:
    """Return at once: the wait for a collective that has ended, or needs no communication."""


def check_rank(group: Group, rank: int, what: str) -> None:
    """Reject a rank that is not in the group; `what` is a phrase such as 'broadcast from'."""
    if not 0 <= rank < group.size:
        raise ConfigurationError(f"{what} rank {rank}, but the group has ranks 0 to {group.size - 1}")


def limit_of(timeout: timedelta | float, label: str) -> float:
    """Convert the timeout of a collective to seconds.

    Raises:
        ConfigurationError: It is not a time above 0.
    """
    seconds = in_seconds(f"{label}: timeout", timeout)
    require(seconds > 0, f"{label}: timeout={timeout!r}: expected a time above 0")
    return seconds


@dataclass(kw_only=True)
class Call:
    """A collective that this rank has called.

    Raises:
        ConfigurationError: this rank is not in the group, or the timeout is invalid.
    """

    group: Group
    """Group whose ranks all call the collective."""
    device: torch.device
    """Device of the tensors."""
    label: str
    """Name in errors, in the profiler and in reports of what a rank waits for."""
    timeout: timedelta | float | None = None
    """Time limit from the call on; None for the backend's timeout."""
    started_at: float = field(default_factory=time.monotonic)
    """Time of the call, in seconds of `time.monotonic`."""

    def __post_init__(self) -> None:
        if not isinstance(self.group, Group):
            raise ConfigurationError(
                f"this rank is not in the group ({self.group!r}). sub_group returns None on the ranks that"
                " are not in its list; those ranks must not take part in its collectives."
            )
        self._limit_s = None if self.timeout is None else limit_of(self.timeout, self.label)

    @property
    def waited_s(self) -> float:
        """Seconds since the call."""
        return time.monotonic() - self.started_at

    @property
    def backend_timeout(self) -> timedelta | None:
        """Timeout passed to the backend: `timeout` and a margin; None for the backend's own."""
        return None if self._limit_s is None else timedelta(seconds=self._limit_s) + _MARGIN

    @property
    def limit(self) -> dict[str, Any]:
        """Label and `backend_timeout` as keywords of the methods of `Group`."""
        return {"label": self.label, "timeout": self.backend_timeout}

    def options(self, kind: Any, **fields: Any) -> Any:
        """Make options of the backend's collective, such as `dist.ReduceOptions`."""
        return options_of(kind, self.backend_timeout, **fields)

    # ------------------------------------------------------------------ start

    def start(self, begin: Callable[[], Any]) -> Any:
        """Call `begin` in a profiler span; return its result, with errors explained."""
        try:
            with span(self.label), without_engine_context():
                return begin()
        except LightningDDPError:
            raise
        except RuntimeError as error:
            raise self.explain(error) from error

    def start_if_known(
        self,
        method: str,
        begin: Callable[[], Any],
        *,
        kind: str | None = None,
        sent: Sequence[torch.Tensor] = (),
    ) -> Any | None:
        """Call `begin`, or return None, on all ranks alike, if the process group lacks the method.

        Backends refuse unsupported methods before they communicate.

        Args:
            method: name of the method of the process group that `begin` calls.
            begin: starts the collective.
            kind: operation with all that must be the same on all ranks, such as the source; None for a
                point-to-point message.
            sent: tensors whose shapes and dtypes must be the same on all ranks.
        """
        group = self.group
        key = (method, self.device.type)
        if key in group.lacking:
            return None
        own = type(group.process_group)
        inherited = getattr(torch.distributed.ProcessGroup, method, None)
        # A process group in Python has no backend that the inherited method could call.
        if group.backend(self.device) == "python" and getattr(own, method, None) is inherited:
            group.lacking.add(key)
            return None
        try:
            if kind is None:
                return self.start(begin)
            return self.start(lambda: group.start(kind, sent, begin, label=self.label))
        except CollectiveError as error:
            if not any(words in str(error.__cause__).lower() for words in _LACKING):
                raise
            group.lacking.add(key)
            return None

    # ------------------------------------------------------------------ wait

    def wait_for(self, work: Any) -> Wait:
        """Return the wait for a work of the group's backend."""

        def wait(on_slice: OnSlice) -> None:
            try:
                self.group.wait(work, self.device, on_slice, self.label, on_host=on_slice is not None)
            except LightningDDPError:
                raise
            except RuntimeError as error:
                if not work.is_completed():  # raised by a signal handler, such as a data loader's
                    raise
                raise self.explain(error) from error

        return wait

    def wait_for_thread(self, start: Callable[[], InThread[T]]) -> Callable[[OnSlice], T]:
        """Return the wait for a call in a thread, which the wait obtains from `start`."""

        def wait(on_slice: OnSlice) -> T:
            thread = start()
            self.group.wait_call(thread, self.label, on_slice)
            if isinstance(thread.error, (RuntimeError, TimeoutError)):
                raise self.explain(thread.error) from thread.error
            return thread.result

        return wait

    def await_(self, wait: Wait, within_s: float | None = None) -> None:
        """Wait within the deadline of the call, and within `within_s` from this moment."""
        start = time.monotonic()

        def look_at_deadlines(_: float) -> None:
            if self._limit_s is not None and self.waited_s >= self._limit_s:
                if self.device.type != "cpu":  # the device's kernel would never end by itself
                    threading.Thread(target=self._abort, daemon=True, name="lightning_ddp abort").start()
                raise self._timeout_error(
                    f"its deadline of {self._limit_s:g} s",
                    "The group cannot be used any further. Check what the other ranks do, or allow more"
                    " time.",
                )
            if within_s is not None and time.monotonic() - start >= within_s:
                raise self._timeout_error(
                    "the time of this wait", "It is still in progress and may be waited for again."
                )

        wait(None if self._limit_s is None and within_s is None else look_at_deadlines)

    def _abort(self) -> None:
        with contextlib.suppress(RuntimeError, AttributeError):  # a backend without abort
            self.group.process_group.abort()

    def _timeout_error(self, limit: str, then: str) -> CollectiveTimeoutError:
        waited_s = self.waited_s
        return self._error(
            CollectiveTimeoutError,
            f"has not ended after {waited_s:.1f} s, past {limit}: not all ranks have called it, or a rank"
            f" is slow or lost. {then}",
            waited_s,
        )

    def explain(self, error: Exception) -> CollectiveError:
        """Convert an error of the backend to one that names the collective."""
        waited_s = self.waited_s
        is_timeout = any(words in str(error).lower() for words in _WORDS_OF_A_TIMEOUT)
        kind = CollectiveTimeoutError if is_timeout else CollectiveError
        return self._error(kind, f"failed after {waited_s:.1f} s: {error}", waited_s)

    def _error(self, kind: type[E], what: str, waited_s: float) -> E:
        return kind(
            f"rank {self.group.rank} of {self.group.size}: {self.label} {what}",
            label=self.label,
            rank=self.group.rank,
            waited_s=waited_s,
        )

    def handle(self, work: Any, finish: Callable[[], T]) -> Handle[T]:
        """Return the handle of a work of the backend; `finish` makes the result once it has ended."""
        return Handle(self, self.wait_for(work), finish)


class Handle(Generic[T]):
    """A collective in progress, as returned by `start` of a collective (`all_reduce.start`).

    Tensors that it sends or fills must not be changed until `wait` has returned. Collectives of a group may
    be waited for in any order, but must be started in the same order on all ranks.
    """

    def __init__(self, call: Call, wait: Wait, finish: Callable[[], T]) -> None:
        self._call, self._wait, self._finish = call, wait, finish

    @property
    def label(self) -> str:
        """Name of the collective."""
        return self._call.label

    def wait(self, timeout: timedelta | float | None = None) -> T:
        """Wait for the collective and return its result; may be called again.

        Signal handlers run during the wait. On CUDA it waits until the collective is queued on the current
        stream, as torch does; with a deadline until it has run.

        Args:
            timeout: time limit of this wait; None for the deadline of the call.

        Raises:
            CollectiveTimeoutError: the deadline of the call has passed; or `timeout`, after which the
                collective continues and `wait` may be called again.
            CollectiveError: the backend failed, for example because a peer was lost.
            BaseException: the failure of the group's interrupt, such as `PeerFailure`.
        """
        self._call.await_(self._wait, None if timeout is None else limit_of(timeout, self.label))
        result = self._finish()
        self._wait, self._finish = no_wait, lambda: result
        return result

    def then(self, change: Callable[[T], S]) -> Handle[S]:
        """Return a handle of the same collective whose result is `change(result)`."""
        finish = self._finish
        return Handle(self._call, self._wait, lambda: change(finish()))


class Collective(Generic[P, T]):
    """A collective: a call waits for the result, `start` returns a `Handle` at once.

    Args:
        start: function that starts the collective. Its docstring documents the call, which returns the
            result of the handle.
    """

    def __init__(self, start: Callable[P, Handle[T]]) -> None:
        self.start = start
        functools.update_wrapper(self, start)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.start(*args, **kwargs).wait()

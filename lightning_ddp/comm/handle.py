"""Handle of a collective under way: its label, its deadline, its result.

A deadline is looked at by the rank that waits, so that it raises an error which names the collective. The
backend gets the same time and a margin, as what it still does for a call that was given up would keep the
process from ending. After a missed deadline the group is of no more use, as the ranks do not agree on what
comes next: gloo breaks its connections, and the communicator of NCCL is aborted.
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
"""Waits until something has ended; calls its argument, which may raise, now and then."""

_MARGIN = timedelta(seconds=2)
_LACKING = ("not support", "not implemented", "unsupported")
_WORDS_OF_A_TIMEOUT = ("timed out", "timeout")


def no_wait(on_slice: OnSlice) -> None:
    """The wait for what has ended, or never began."""


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
        ConfigurationError: this rank is not in the group, or the deadline is none.
    """

    group: Group
    """Whose ranks all call it."""
    device: torch.device
    """Where its tensors are."""
    label: str
    """Seen where somebody asks what a rank waits for, in errors and in the profiler."""
    timeout: timedelta | float | None = None
    """How long it may take from now on; None for as long as the backend's own limit is."""
    started_at: float = field(default_factory=time.monotonic)
    """Of `time.monotonic`."""

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
        """After this the backend gives up what is still under way."""
        return None if self._limit_s is None else timedelta(seconds=self._limit_s) + _MARGIN

    @property
    def limit(self) -> dict[str, Any]:
        """Label and `backend_timeout` as keywords of the methods of `Group`."""
        return {"label": self.label, "timeout": self.backend_timeout}

    def options(self, kind: Any, **fields: Any) -> Any:
        """Options of the backend's collective, such as `dist.ReduceOptions`."""
        return options_of(kind, self.backend_timeout, **fields)

    # ------------------------------------------------------------------ start

    def start(self, begin: Callable[[], Any]) -> Any:
        """Starts what `begin` starts, in a span; returns what it returns."""
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
        """As `start`, for a method that a process group may lack: then None, on all ranks alike.

        Backends refuse what they do not have before they communicate.

        Args:
            method: name of the method of the process group, which `begin` calls.
            begin: starts it.
            kind: what all ranks of the group have to call alike, source included; None for a message.
            sent: tensors whose shapes and dtypes have to be the same on all ranks.
        """
        group = self.group
        key = (method, self.device.type)
        if key in group.lacking:
            return None
        own = type(group.process_group)
        inherited = getattr(torch.distributed.ProcessGroup, method, None)
        # a process group in Python has no backend to which the inherited method could turn
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
        """The wait for a work of the group's backend."""

        def wait(on_slice: OnSlice) -> None:
            try:
                self.group.wait(work, self.device, on_slice, self.label, on_host=on_slice is not None)
            except LightningDDPError:
                raise
            except RuntimeError as error:
                if not work.is_completed():  # a signal handler raised it, such as a data loader's
                    raise
                raise self.explain(error) from error

        return wait

    def wait_for_thread(self, start: Callable[[], InThread[T]]) -> Callable[[OnSlice], T]:
        """The wait for what a thread does; `start` is called by who waits, and returns it."""

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
                if self.device.type != "cpu":  # what the device still does would never end by itself
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
        """The same error of the backend with the name of the collective."""
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
        """The handle of a work of the backend; `finish` makes the result once it has ended."""
        return Handle(self, self.wait_for(work), finish)


class Handle(Generic[T]):
    """A collective in progress, as returned by `start`.

    Tensors that it sends or fills must stay as they are until `wait` has returned. Collectives of a group
    may be waited for in any order, but are started in the same order on all ranks.
    """

    def __init__(self, call: Call, wait: Wait, finish: Callable[[], T]) -> None:
        self._call, self._wait, self._finish = call, wait, finish

    @property
    def label(self) -> str:
        """Name of the collective."""
        return self._call.label

    def wait(self, timeout: timedelta | float | None = None) -> T:
        """Wait and return the result, every time the same. Runs signal handlers while waiting.

        On CUDA it waits until the collective is queued on the current stream, as torch does; with a
        deadline until it has run.

        Args:
            timeout: how long to wait now; None for as long as the deadline of the call allows.

        Raises:
            CollectiveTimeoutError: the deadline of the call has passed, or `timeout`, after which the
                collective goes on and `wait` may be called again.
            CollectiveError: the backend failed, for example as a peer is gone.
            BaseException: what the group's interrupt holds, such as `PeerFailure`.
        """
        self._call.await_(self._wait, None if timeout is None else limit_of(timeout, self.label))
        result = self._finish()
        self._wait, self._finish = no_wait, lambda: result
        return result

    def then(self, change: Callable[[T], S]) -> Handle[S]:
        """Return a handle of the same collective whose result is computed from this one's."""
        finish = self._finish
        return Handle(self._call, self._wait, lambda: change(finish()))


class Collective(Generic[P, T]):
    """A collective: a call waits for the result, `start` returns a `Handle` at once.

    Args:
        start: starts it. Its documentation is that of the call: what it returns is the result of the handle.
    """

    def __init__(self, start: Callable[P, Handle[T]]) -> None:
        self.start = start
        functools.update_wrapper(self, start)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.start(*args, **kwargs).wait()

"""Watch of queued device work, which detects a step that never ends though no host thread waits.

With NCCL a wait returns as soon as it is queued on the stream: if a rank is late, lost or lacks a gradient,
no host thread of the others waits. So the engine records one event at the end of each backward, and a
separate thread polls it. The control channel's thread cannot do that, as it must receive failures meanwhile.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_ddp.comm.activity import Interrupt, Waiting
from lightning_ddp.comm.nccl import error_of
from lightning_ddp.errors import CollectiveError

_LOOK_S = 0.2
"""Seconds between two polls of the device."""
_CAPTURE_OF_THIS_THREAD = 1  # cudaStreamCaptureModeThreadLocal


@dataclass
class _Queued:
    """Work queued on a CUDA stream before an event, with the wait for it and a callback."""

    event: Any
    waiting: Waiting
    process_group: Any
    device: torch.device
    on_slice: Callable[[float], None] | None


def _record(event: Any | None, device: torch.device) -> Any:
    """Record a CUDA event on the current stream and return it; None makes a new event."""
    event = torch.cuda.Event() if event is None else event
    event.record(torch.cuda.current_stream(device))
    return event


class DeviceWatch:
    """Thread that polls queued device work and reports errors of NCCL and work past its deadline.

    The first step starts it, and `close` ends it. The supervisor of the interrupt makes the error of a step
    that passes its deadline. `on_failure` is called once, in the watching thread, with the error.
    """

    def __init__(self, interrupt: Interrupt, on_failure: Callable[[BaseException], None]) -> None:
        self._interrupt = interrupt
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._latest: _Queued | None = None
        self._watched: _Queued | None = None
        self._spare: list[Any] = []  # reused, because destroying an event may wait for a lock of CUDA
        self._has_begun = False
        self._is_closed = threading.Event()

    def expect(
        self,
        waiting: Waiting,
        *,
        process_group: Any,
        device: torch.device,
        on_slice: Callable[[float], None] | None = None,
    ) -> None:
        """Let a thread watch the work queued on the current stream until it has run; `waiting` describes it.

        It takes a few microseconds. `on_slice` is called repeatedly in the watching thread until the work has
        run, with the seconds since the start; may raise the failure to report.
        """
        if self._is_closed.is_set():
            return
        with self._lock:
            spare = self._spare.pop() if self._spare else None
        queued = _Queued(_record(spare, device), waiting, process_group, device, on_slice)
        with self._lock:
            if self._latest is not None:  # of an earlier step: the new event completes after it
                self._spare.append(self._latest.event)
            self._latest = queued
            had_begun, self._has_begun = self._has_begun, True
        if not had_begun:
            threading.Thread(target=self._run, daemon=True, name="lightning_ddp device watch").start()

    def forget(self) -> None:
        """Stop watching all queued work, before its groups are aborted."""
        with self._lock:
            self._latest = self._watched = None
        self._interrupt.activity.on_device = None

    def close(self) -> None:
        self._is_closed.set()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        _let_others_capture()
        while not self._is_closed.wait(_LOOK_S):
            queued = self._next()
            if queued is None:
                continue
            try:
                if self._has_run(queued):
                    self._release(queued)
                else:
                    self._interrupt.activity.on_device = queued.waiting
            except Exception as error:  # noqa: BLE001 (any error is passed to the main thread)
                if self._interrupt.error is None and self._watched is queued:
                    self._on_failure(error)
                if self._watched is queued:  # else a recovery has begun, and later work is of its group
                    self.forget()

    def _next(self) -> _Queued | None:
        with self._lock:
            if self._watched is None:
                self._watched, self._latest = self._latest, None
            return self._watched

    def _release(self, queued: _Queued) -> None:
        with self._lock:
            if self._watched is queued:
                self._watched = None
            self._spare.append(queued.event)
        activity = self._interrupt.activity
        if activity.on_device is not None:
            activity.on_device = None
            activity.advance()

    def _has_run(self, queued: _Queued) -> bool:
        """Return True if the queued work has run; raise errors of NCCL, the deadline and `on_slice`."""
        label, waited_s = queued.waiting.label, time.monotonic() - queued.waiting.since
        found = error_of(queued.process_group, queued.device)
        if found is not None:
            raise CollectiveError(
                f"{label}: NCCL's watchdog reports {found}, so that averaged values cannot be trusted. The"
                " log above has the watchdog's message, usually a broken connection or a lost rank.",
                label=label,
                rank=queued.process_group.rank(),
                waited_s=waited_s,
            )
        if queued.event.query():
            return True
        if queued.on_slice is not None:
            queued.on_slice(waited_s)
        supervisor = self._interrupt.supervisor
        if supervisor is not None and waited_s >= supervisor.deadline_s:
            raise supervisor.explain(queued.waiting)
        return False


def _let_others_capture() -> None:
    """Keep this thread's CUDA queries from invalidating a graph capture, as torch's watchdog does."""
    exchange = getattr(ctypes.CDLL(None), "cudaThreadExchangeStreamCaptureMode", None)
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(_CAPTURE_OF_THIS_THREAD)))

"""Reduction of one bucket over the ranks: by an all-reduce, or by a communication hook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lightning_ddp._torch import Future, without_engine_context
from lightning_ddp.catalogue import hook_name
from lightning_ddp.comm.group import Group
from lightning_ddp.ddp.bucket import Bucket
from lightning_ddp.errors import CommHookError
from lightning_ddp.shm.shared_memory import SharedMemory
from lightning_ddp.shm.worker import Deferred, Worker

_INLINE_BYTES = 2 * 1024 * 1024
"""Largest last bucket that the waiting thread reduces itself: waking another thread would take as long as the
sum. Where ranks have no processor for another thread, the waiting thread reduces all buckets, because another
thread would only slow down the backward."""

CommHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
"""`hook(state, bucket)`, called once a bucket is full; its future holds the reduced flat gradient."""


@dataclass(slots=True)
class BackwardState:
    """State of the next or running backward, made by its forward and dropped when it is over."""

    step: int = -1
    """Number of the backward, the same on all ranks; -1 until its first gradient arrives."""
    begun_at: float = 0.0
    """Time of the first gradient, in seconds of `time.monotonic`."""
    is_armed: bool = True
    """True while gradients are averaged; False after the backward, or after a forward without sync."""
    creates_graph: bool = False
    """True if the backward itself may be differentiated (`create_graph=True`)."""
    ready: list[int] = field(default_factory=list)
    """Indices of the parameters whose gradients have arrived, in order of arrival."""
    num_taken: int = 0
    """Number of buckets, in launch order, that have been passed to the reduction."""

    @property
    def is_running(self) -> bool:
        """True once the first gradient has arrived."""
        return self.step >= 0


class Reduction:
    """Transport of a reducer: starts the reductions of full buckets over the ranks, and waits for them.

    All ranks must call its methods in the same order. The flat buffers lie in `memory`, if the ranks share
    memory; else they are reduced by the group.
    """

    def __init__(self, group: Group, memory: SharedMemory | None = None) -> None:
        self._group = group
        self._memory = memory
        self._worker = Worker("lightning_ddp reduce", group)
        self.hook: CommHook | None = None
        """The communication hook that reduces the buckets; None for the built-in mean."""
        self.state: Any = None
        self.scale: float | None = 1.0 / group.size  # factor of gradients when they are copied to the bucket
        self._on_slice: Callable[[float], None] | None = None

    def set_hook(self, state: Any, hook: CommHook) -> None:
        """Reduce buckets with `hook` from the next backward on; it has to divide by the number of ranks."""
        self.hook = hook
        self._memory = None
        self.state = state
        self.scale = None

    def set_divisor(self, divisor: int) -> None:
        """Set the divisor of the built-in mean; without effect with a hook, which divides by itself."""
        if self.hook is None:
            self.scale = 1.0 / divisor

    def close(self) -> None:
        """Close the shared memory, if any, which makes waits in it raise; stop the thread that reduces."""
        if self._memory is not None:
            self._memory.close()
        self._worker.end()

    def launch(self, bucket: Bucket, state: BackwardState) -> None:
        """Start the reduction of a full bucket over the ranks; all ranks do so in the same order."""
        if bucket.is_skipped or not bucket.flat.numel():
            return
        if self.hook is None:
            bucket.work = self._start_mean(bucket)
            return
        try:
            with without_engine_context():
                future = self.hook(self.state, bucket)
        except Exception as error:
            raise self._error(bucket, state, f"raised {type(error).__name__}: {error}") from error
        if not isinstance(future, Future):  # also the type that get_future() of a work returns
            kind = type(future).__name__
            wanted = f"callback must return a torch.futures.Future object, but got {kind}"
            raise self._error(bucket, state, f"returned {kind}: {wanted}; make one of the flat gradient")
        bucket.work = future

    def _start_mean(self, bucket: Bucket) -> Any:
        memory, flat = self._memory, bucket.flat
        label = f"reduce of bucket {bucket.index()}"
        if memory is None or bucket.spec.is_sparse:
            return self._group.all_reduce(flat, label=label)
        job = partial(memory.all_reduce, flat, contributes=bucket.contributes)
        begin: Callable[[], Any] = partial(self._worker.submit, job)
        is_short = bucket.is_last() and flat.nbytes <= _INLINE_BYTES
        if memory.is_one_host and (is_short or not memory.has_spare_processor):
            begin = partial(Deferred, lambda: job(on_slice=self._on_slice))
        return self._group.start("all_reduce", (flat,), begin, label=label)

    def wait(self, bucket: Bucket, state: BackwardState, on_slice: Callable[[float], None]) -> None:
        """Wait until a launched bucket's flat buffer holds the result; call `on_slice` meanwhile."""
        work = bucket.work
        if self.hook is None:
            self._on_slice = on_slice  # for a deferred job, which this thread runs now
            self._group.wait(work, bucket.spec.device, on_slice)
            return
        bucket.work = None  # frees its result, which may hold another copy of the gradients
        self._group.wait_done(work, on_slice, f"communication hook, bucket {bucket.index()}")
        try:
            value = work.wait()
        except Exception as error:  # whatever the hook put there
            raise self._error(bucket, state, f"failed: {error}") from error
        self._take(bucket, state, value)

    def _take(self, bucket: Bucket, state: BackwardState, value: Any) -> None:
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if not isinstance(value, torch.Tensor):
            raise self._error(bucket, state, f"gave {type(value).__name__}; expected the flat gradient")
        flat = bucket.flat
        if flat.is_complex() and value.dtype == flat.dtype.to_real() and value.numel() == 2 * flat.numel():
            value = torch.view_as_complex(value.reshape(-1, 2))  # torch's collectives return pairs
        # A hook that set a compressed tensor as the buffer may return its dtype; copy_ converts it.
        is_known_type = value.dtype in (flat.dtype, bucket.buffer().dtype)
        if value.numel() != flat.numel() or not is_known_type:
            found = f"gave shape {list(value.shape)} of {value.dtype}"
            raise self._error(bucket, state, f"{found}; expected {list(flat.shape)} of {flat.dtype}")
        bucket.take(value)

    def _error(self, bucket: Bucket, state: BackwardState, what: str) -> CommHookError:
        return CommHookError(
            f"rank {self._group.rank}, step {state.step}: communication hook {hook_name(self.hook)!r} {what}"
            f" (bucket {bucket.index()}, {bucket.flat.numel()} elements,"
            f" parameters {bucket.names[0]!r} to {bucket.names[-1]!r})"
        )

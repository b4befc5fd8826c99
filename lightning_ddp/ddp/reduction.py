"""Reduction of one bucket over the ranks: by an all-reduce, or by a communication hook."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lightning_ddp._torch import Future, without_engine_context
from lightning_ddp.comm.group import Group
from lightning_ddp.comm.hook_identity import hook_name
from lightning_ddp.ddp import torch_messages as torch_words
from lightning_ddp.ddp.backward_state import BackwardState
from lightning_ddp.ddp.bucket import Bucket
from lightning_ddp.ddp.hook_agreement import Disagreement, HookAgreement
from lightning_ddp.errors import CommHookError, MissingGradientError
from lightning_ddp.shm.background import Deferred, Worker
from lightning_ddp.shm.shared_memory import SharedMemory

__all__ = ["CommHook", "Reduction"]

_INLINE_BYTES = 2 * 1024 * 1024
"""Up to this size the last bucket is reduced by the thread that waits for it, as a rule at once: waking
another thread would take as long as the sum. Where ranks have no processor for that other thread, so are all
buckets: it would only slow down the backward that it is to run beside."""

CommHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
"""`hook(state, bucket)`, called once a bucket is full; its future holds the reduced flat gradient."""


class Reduction:
    """Starts the reduction of full buckets and waits for it. All ranks call it in one order.

    Args:
        group: the ranks.
        device: one that the group's backend serves.
        token: the same on all ranks, different for every reducer.
        memory: what the flat buffers lie in, if the ranks share it; None to send them through the group.
    """

    def __init__(
        self, group: Group, device: torch.device, token: str, memory: SharedMemory | None = None
    ) -> None:
        self._group = group
        self._memory = memory
        self._worker = Worker(group.interrupt.activity.busy if group.interrupt is not None else None)
        self._device = device
        self._token = token
        self._num_hooks = 0
        self._agreement: HookAgreement | None = None
        self._hook: CommHook | None = None
        self._state: Any = None
        self.scale: float | None = 1.0 / group.size  # gradients are scaled so on their way into the bucket

    @property
    def has_hook(self) -> bool:
        """Whether a communication hook reduces the buckets."""
        return self._hook is not None

    def set_hook(self, state: Any, hook: CommHook) -> None:
        """Lets `hook` reduce the buckets from the next backward on; it scales by itself."""
        self._hook = hook
        self._memory = None
        self._state = state
        self._num_hooks += 1
        prefix = f"{self._token}/{self._num_hooks}"
        self._agreement = HookAgreement(self._group, prefix, self._device, state, hook)
        self.scale = None

    @property
    def state_and_hook(self) -> tuple[Any, CommHook | None]:
        """The communication hook with its state; (None, None) where there is none."""
        return self._state, self._hook

    def set_divisor(self, divisor: int) -> None:
        """Makes the built-in mean a sum divided by `divisor`; a hook divides by itself."""
        if self._hook is None:
            self.scale = 1.0 / divisor

    def close(self) -> None:
        """Ends the thread of the transport. A later launch would start another one."""
        self._worker.end()

    def launch(self, bucket: Bucket, state: BackwardState, on_slice: Callable[[float], None]) -> None:
        """Starts the reduction of a full bucket.

        Args:
            bucket: the next one, in the order that all ranks have.
            state: the backward that it belongs to.
            on_slice: called with the seconds for which a new hook has waited for the other ranks, now and
                then; may raise.

        Raises:
            CommHookError: the hook raised, returned no future, or differs between the ranks.
        """
        if bucket.is_skipped or not bucket.flat.numel():
            return
        state.num_launched += 1
        if self._hook is None:
            bucket.work = self._start_mean(bucket, state)
            return
        try:
            with without_engine_context():
                bucket.work = self._start(bucket, state, on_slice)
        except (CommHookError, MissingGradientError):
            raise
        except Disagreement as error:
            raise self._error(bucket, state, str(error)) from error
        except Exception as error:
            raise self._error(bucket, state, f"raised {type(error).__name__}: {error}") from error

    def _start(self, bucket: Bucket, state: BackwardState, on_slice: Callable[[float], None]) -> Any:
        assert self._hook is not None
        assert self._agreement is not None
        if self._agreement.is_over(state.step):
            return self._checked(bucket, state, self._hook(self._state, bucket))
        with self._agreement.launching(on_slice):
            return self._checked(bucket, state, self._hook(self._state, bucket))

    def _checked(self, bucket: Bucket, state: BackwardState, future: Any) -> Any:
        if not isinstance(future, Future):  # what get_future() of a work returns, too
            raise self._error(
                bucket,
                state,
                f"returned {type(future).__name__}: {torch_words.NO_FUTURE} {type(future).__name__};"
                " make one of the flat gradient",
            )
        return future

    def _start_mean(self, bucket: Bucket, state: BackwardState) -> Any:
        memory, flat = self._memory, bucket.flat
        label = f"reduce of bucket {bucket.index()}"
        if memory is None or bucket.spec.is_sparse:
            return self._group.all_reduce(flat, label=label)
        job: Callable[..., None] = partial(memory.all_reduce, flat)
        if not bucket.contributes:
            job = partial(memory.all_reduce_nothing, flat.numel(), flat.dtype)
        begin: Callable[[], Any] = partial(self._worker.submit, job)
        is_short = bucket.is_last() and flat.nbytes <= _INLINE_BYTES
        if memory.is_one_host and (is_short or not memory.has_spare_processor):
            begin = partial(Deferred, partial(job, on_slice=state.note_slice))
        return self._group.start("all_reduce", (flat,), begin, label=label)

    def wait(self, bucket: Bucket, state: BackwardState, on_slice: Callable[[float], None]) -> None:
        """Waits until the flat buffer holds the result.

        Args:
            bucket: launched before.
            state: the backward that it belongs to.
            on_slice: called with the seconds waited, now and then; may raise.

        Raises:
            CommHookError: the hook's future failed, or holds no flat gradient.
            RuntimeError: the all-reduce failed.
        """
        work = bucket.work
        if self._hook is None:
            state.on_slice = on_slice  # for a job that this thread does now
            self._group.wait(work, bucket.spec.device, on_slice)
            return
        bucket.work = None  # its result may hold another copy of the gradients
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
        # a hook that put a compressed tensor in the bucket's place may return that type; copy_ converts it
        is_known_type = value.dtype in (flat.dtype, bucket.buffer().dtype)
        if value.numel() != flat.numel() or not is_known_type:
            raise self._error(
                bucket,
                state,
                f"gave shape {list(value.shape)} of {value.dtype};"
                f" expected {list(flat.shape)} of {flat.dtype}",
            )
        bucket.take(value)

    def _error(self, bucket: Bucket, state: BackwardState, what: str) -> CommHookError:
        return CommHookError(
            f"rank {self._group.rank}, step {state.step}: communication hook {hook_name(self._hook)!r} {what}"
            f" (bucket {bucket.index()}, {bucket.flat.numel()} elements,"
            f" parameters {bucket.names[0]!r} to {bucket.names[-1]!r})"
        )

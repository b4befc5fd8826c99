"""The hooks by which autograd tells that a parameter's gradient is there: the hottest code of a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lightning_ddp.ddp.bucket import Bucket
from lightning_ddp.ddp.layout import BucketLayout

__all__ = ["GradientHooks"]

_Hook = Callable[[torch.Tensor], None]


class _Listener(Protocol):
    """The reducer, as the hooks see it."""

    def begin(self) -> object:
        """A synchronised backward runs."""

    def copy_early(self, bucket: Bucket, position: int) -> None:
        """A large gradient is there."""

    def progress(self, bucket: Bucket) -> None:
        """A bucket got its first gradient, its last one, or one too many."""


class GradientHooks:
    """One hook a parameter. It counts down its bucket, and calls the reducer where there is more to do.

    Args:
        listener: the reducer; parameters do not keep it alive.
    """

    def __init__(self, listener: _Listener) -> None:
        self._listener = weakref.ref(listener)
        self._handles: list[Any] = []

    def add(
        self, layout: BucketLayout, *, is_learning: bool, note_unsynced: Callable[[int], None] | None
    ) -> None:
        """Puts a hook on each parameter of `layout`.

        Args:
            layout: which bucket holds which parameter.
            is_learning: whether the first backward of a static graph is still to come: then gradients are
                only noted.
            note_unsynced: called with the index of a parameter that got a gradient without synchronisation.
        """
        for index, (bucket, position) in layout.where.items():
            if is_learning:
                hook = self._make_learning_hook(bucket, index)
            else:
                hook = self._make_hook(bucket, position, index, note_unsynced)
            if bucket.streams is not None:
                hook = _noting_stream(hook, bucket.streams.note)
            self._handles.append(_register(layout.params[index], hook))

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _make_learning_hook(self, bucket: Bucket, index: int) -> _Hook:
        owner = self._listener

        def ready(_parameter: torch.Tensor) -> None:
            if not bucket.armed:
                return
            bucket.ready.append(index)
            listener = owner()
            if listener is not None:
                listener.begin()

        return ready

    def _make_hook(
        self, bucket: Bucket, position: int, index: int, note: Callable[[int], None] | None
    ) -> _Hook:
        owner = self._listener
        is_early = position in bucket.early

        def ready(_parameter: torch.Tensor) -> None:
            if not bucket.armed:
                if note is not None:
                    note(index)
                return
            bucket.ready.append(index)
            if is_early:
                listener = owner()
                if listener is not None:
                    listener.copy_early(bucket, position)
            bucket.num_pending = left = bucket.num_pending - 1
            if left >= bucket.all_but_one or left <= 0:
                listener = owner()
                if listener is not None:
                    listener.progress(bucket)

        return ready


def _noting_stream(hook: _Hook, note: Callable[[], None]) -> _Hook:
    def noting(parameter: torch.Tensor) -> None:
        note()
        hook(parameter)

    return noting


def _register(parameter: torch.nn.Parameter, hook: _Hook) -> Any:
    """Registers a hook, also on a parameter whose gradient is switched off at the moment."""
    is_on = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(is_on)
    return handle

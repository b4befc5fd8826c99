"""A bucket for one parameter whose gradients are sparse tensors, such as that of a sparse embedding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lightning_ddp.ddp.bucket import Bucket
from lightning_ddp.errors import BackwardOrderError

__all__ = ["SparseBucket", "sparse_parameters"]

_SPARSE_MODULES = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def sparse_parameters(modules: Iterable[torch.nn.Module]) -> set[int]:
    """The `id`s of parameters that get sparse gradients: weights of embeddings made with `sparse=True`."""
    return {id(m.weight) for m in modules if isinstance(m, _SPARSE_MODULES) and m.sparse}


class SparseBucket(Bucket):
    """Reduces the sparse gradient of one parameter; the backend has to know sparse tensors, as gloo does.

    `buffer()` is the sparse gradient itself, of the parameter's shape. What is sent grows with the rows that
    were used, on all ranks together.
    """

    def __init__(self, *arguments: Any, is_last: bool) -> None:
        super().__init__(*arguments, is_last=is_last)
        self.early = frozenset()

    def _make_views(self) -> list[torch.Tensor]:
        return [self.flat]  # there is no flat memory: each step brings a tensor of its own

    def gradients(self) -> list[torch.Tensor]:
        """The sparse gradient."""
        return [self._buffer]

    def take(self, value: torch.Tensor) -> None:
        """Makes `value` the reduced gradient."""
        self.flat = value.detach()

    def zeros(self) -> Bucket:
        """A bucket of the same form without any row."""
        bucket = super().zeros()
        bucket.set_buffer(_empty_like(self.params[0]))
        bucket.flat = bucket.buffer()
        return bucket

    def copy_late(self, scale: float | None) -> None:
        """Takes the gradient, scaled unless `scale` is None.

        Raises:
            TypeError: there is none.
            BackwardOrderError: it is dense.
        """
        if not self.absent:
            self._fill(self.params[0].grad, scale)

    def fill_absent(self, position: int, scale: float | None) -> None:
        """Puts in what a parameter without a new gradient contributes: its accumulated one, or no row."""
        self.absent.add(position)
        param = self.params[position]
        self._fill(_empty_like(param) if param.grad is None else param.grad, scale)

    def take_absent(self, position: int, is_used: bool) -> None:
        """Gives an absent parameter the mean if some rank used it, else leaves its `.grad` as it was."""
        if is_used:
            self.params[position].grad = self.flat

    def copy_out(self) -> None:
        """Makes the mean the gradient."""
        if not self.absent:
            self.params[0].grad = self.flat

    def _fill(self, grad: torch.Tensor | None, scale: float | None) -> None:
        if grad is None:
            raise TypeError("no gradient")
        if not grad.is_sparse:
            raise BackwardOrderError(
                f"{self.names[0]!r} has a dense gradient, but its embedding was made with sparse=True. Use"
                " the parameter in that embedding only, or make it with sparse=False."
            )
        self.flat = grad.clone() if scale is None else grad * scale
        if self.streams is not None:
            self.streams.keep([grad])
        self.set_buffer(self.flat)


def _empty_like(parameter: torch.Tensor) -> torch.Tensor:
    """A sparse gradient of an embedding's weight in which no row was used."""
    shape = parameter.shape
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
        torch.empty((0, *shape[1:]), dtype=parameter.dtype, device=parameter.device),
        shape,
        check_invariants=False,  # there is nothing to check, and torch warns unless one says so
    )

"""How one rank adds up its share of an all-reduce over shared memory, in the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Chunks", "add_in_float32", "add_in_place"]

Chunks = Sequence[tuple[torch.Tensor, ...]]
"""Elements that one rank adds up, chunk by chunk: the same ones of each contributing rank, in rank order."""


def add_in_place(chunks: Chunks, *, gives_all: bool) -> None:
    """Adds up in the tensors of the first rank.

    Args:
        chunks: what is added.
        gives_all: whether the others get the sum, too.
    """
    for first, *others in chunks:
        for other in others:
            first.add_(other)
        if gives_all:
            for other in others:
                other.copy_(first)


def add_in_float32(chunks: Chunks, *, gives_all: bool) -> None:
    """The same for numbers of 16 bits, with one rounding at the end.

    Args:
        chunks: what is added; some.
        gives_all: whether the others get the sum, too.
    """
    total = torch.empty(chunks[0][0].numel())
    for first, *others in chunks:
        part = total[: first.numel()]
        part.copy_(first)
        for other in others:
            part.add_(other)
        for out in (first, *others) if gives_all else (first,):
            out.copy_(part)

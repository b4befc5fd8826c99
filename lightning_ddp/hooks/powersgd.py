"""`powersgd`: low-rank gradients with error feedback.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019, algorithms 1 and 2.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_ddp.comm.group import uploaded
from lightning_ddp.errors import require
from lightning_ddp.hooks.base import HookOptions, Part, StatefulHook

_LAYOUT_PREFIX = "bucket:"


@dataclass(frozen=True, kw_only=True)
class PowerSGDOptions(HookOptions):
    rank: int = 2
    """Rank r of the approximation: an n x m matrix is sent as (n + m) r numbers."""
    start_step: int = 10
    """Number of synchronized backward passes with the plain mean before compression starts."""
    min_compression: float = 2.0
    """Compress a matrix only if it becomes smaller by more than this factor."""
    warm_start: bool = True
    """If True, start each step from the factor of the last step; if False, from a new random factor."""
    error_feedback: bool = True
    """If True, add the values that were not sent to the next gradient."""
    batched: bool = False
    """If True, compress each bucket as one square matrix, which is faster and less accurate."""
    seed: int = 0
    """Seed of the first factors, the same on all ranks."""

    def __post_init__(self) -> None:
        require(self.rank >= 1, f"rank={self.rank}: expected at least 1")
        require(self.start_step >= 0, f"start_step={self.start_step}: expected 0 or more")
        require(self.min_compression >= 1, f"min_compression={self.min_compression}: expected at least 1")


@dataclass(kw_only=True)
class _Matrix:
    """A matrix to compress: `value` (n x m), whose low-rank mean goes to `out`."""

    name: str
    """Key of its factor in the hook's state."""
    value: torch.Tensor
    out: torch.Tensor
    q: torch.Tensor
    """Right factor from which the power iteration starts: m x r."""


class PowerSGD(StatefulHook):
    """Send P = M Q and Q = M^T P of each matrix M, with P orthonormalized in between; use P Q^T as M.

    Tensors of more than two dimensions are matrices with their slowest dimension as rows. Tensors that are
    too small to gain are sent uncompressed, together with the first factors. Exact if the mean of the
    gradients has at most rank r. The result is the same on all ranks if their processors round alike.
    """

    name = "powersgd"
    takes_wire = True
    Options = PowerSGDOptions
    options: PowerSGDOptions
    shared_keys = frozenset({"q"})

    def reduce(self, part: Part) -> torch.Tensor:
        """Average a bucket, and return the mean: low-rank where compression pays, exact for the rest."""
        if self.step < self.options.start_step:
            return self.check_finite(self.wire.mean(part.flat))
        if self.options.error_feedback:
            self.add_errors(part)
            self._begin_errors(part)
        # Write the mean directly to the bucket if the dtypes are equal; the residual needs the gradients.
        is_same = part.buffer.dtype == part.flat.dtype
        result = part.buffer if is_same else torch.empty_like(part.flat)
        outs = list(result.split(part.sizes))
        pieces = part.slices()
        square = self._square(part) if self.options.batched else None
        if square is not None:
            self._compress([square], [], [])
            result.copy_(square.out.view(-1)[: result.numel()])
            matrices = [square]
        else:
            found = [self._matrix(part, position, out) for position, out in enumerate(outs)]
            matrices = [matrix for matrix in found if matrix is not None]
            rest = [i for i, matrix in enumerate(found) if matrix is None and part.present[i]]
            self._compress(matrices, [pieces[i] for i in rest], [outs[i] for i in rest])
            for out, is_present in zip(outs, part.present, strict=True):
                if not is_present:
                    out.zero_()
        for matrix in matrices:
            self.remember(matrix.name, "q", matrix.q)
        if self.options.error_feedback:
            compressed = part.names if square is not None else [matrix.name for matrix in matrices]
            self._remember_residuals(part, part.flat.sub_(result), frozenset(compressed))
        return result

    def _begin_errors(self, part: Part) -> None:
        """Store empty residuals, which replace the added ones if the step ends before it stores new ones."""
        for name, _ in part.present_slices(part.flat):
            if self.recall(name, "error") is not None:
                self.remember(name, "error", part.flat.new_empty(0))

    def _remember_residuals(self, part: Part, residual: torch.Tensor, compressed: frozenset[str]) -> None:
        """Store the residuals of compressed parameters; zero for parameters sent in full."""
        for name, piece in part.present_slices(residual):
            if name in compressed:
                self.remember(name, "error", piece)
            elif self.recall(name, "error") is not None:
                self.remember(name, "error", torch.zeros_like(piece))

    # ------------------------------------------------------------------ matrices

    def _is_worth_it(self, n: int, m: int) -> bool:
        rank = min(self.options.rank, n, m)
        return (n + m) * rank * self.options.min_compression < n * m

    def _matrix(self, part: Part, position: int, out: torch.Tensor) -> _Matrix | None:
        """Return a parameter's matrix, a view of the flat gradient; None if it is not to be compressed."""
        shape, name = part.shapes[position], part.names[position]
        if len(shape) < 2 or not part.present[position]:
            return None
        n, m = shape[0], math.prod(shape[1:])
        if not self._is_worth_it(n, m):
            return None
        value = part.slices()[position].view(n, m)
        return _Matrix(name=name, value=value, out=out.view(n, m), q=self._factor(name, n, m, part))

    def _square(self, part: Part) -> _Matrix | None:
        """Return the bucket as a square matrix, padded with zeros; None to compress parameters separately."""
        side = math.isqrt(part.flat.numel() - 1) + 1
        if not self._is_worth_it(side, side) or not all(part.present):
            return None  # an unused parameter must not get a share of the others
        value = part.flat.new_zeros(side * side)
        value[: part.flat.numel()] = part.flat
        # The factor mixes the parameters of the bucket, so each layout has its own.
        name = f"{_LAYOUT_PREFIX}{zlib.crc32(' '.join(part.names).encode()):08x}"
        value = value.view(side, side)
        q = self._factor(name, side, side, part)
        return _Matrix(name=name, value=value, out=torch.empty_like(value), q=q)

    def _factor(self, name: str, n: int, m: int, part: Part) -> torch.Tensor:
        rank = min(self.options.rank, n, m)
        q = self.recall(name, "q") if self.options.warm_start else None
        if q is not None and q.shape == (m, rank):
            return q
        start = self.step if not self.options.warm_start else 0
        seed = zlib.crc32(f"{self.options.seed} {start} {name}".encode())  # the same on all ranks
        start_q = torch.randn(m, rank, generator=torch.Generator().manual_seed(seed))
        return uploaded(start_q.to(part.flat.dtype), part.flat.device)

    # ------------------------------------------------------------------ power iteration

    def _compress(
        self, matrices: Sequence[_Matrix], rest: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> None:
        """Write the low-rank means of matrices to their `out`, and the means of `rest` to `outs`."""
        ps = self._mean([*(matrix.value @ matrix.q for matrix in matrices), *rest])
        for out, mean in zip(outs, ps[len(matrices) :], strict=True):
            out.copy_(mean)
        ps = orthonormalise(ps[: len(matrices)])
        # (P^T M)^T reads the rows of M in the order of memory, unlike M^T P.
        qs = [(p.t() @ matrix.value).t() for matrix, p in zip(matrices, ps, strict=True)]
        for matrix, p, q in zip(matrices, ps, self._mean(qs), strict=True):
            torch.mm(p, q.t(), out=matrix.out)
            matrix.q = q

    def _mean(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the means of the tensors over the ranks, from one collective."""
        if not tensors:
            return []
        flat = self.check_finite(self.wire.mean(torch.cat([t.reshape(-1) for t in tensors])))
        pieces = flat.split([t.numel() for t in tensors])
        return [p.view(t.shape).to(t.dtype) for p, t in zip(pieces, tensors, strict=True)]

    def commit(self, pending: dict[str, dict[str, torch.Tensor]]) -> None:
        """Store the state of a finished step, and discard low-rank factors of a former bucket layout."""
        if any(name.startswith(_LAYOUT_PREFIX) for name in pending):
            is_kept = {name: not name.startswith(_LAYOUT_PREFIX) or name in pending for name in self._state}
            self._state = {name: values for name, values in self._state.items() if is_kept[name]}
        super().commit(pending)


def orthonormalise(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return matrices with orthonormal columns that span those of the given ones (n x r, n >= r).

    Householder reflections replace dependent columns by new directions instead of noise, so that a factor
    that lost rank regains it. Matrices of one shape are factored together.
    """
    result: list[torch.Tensor] = [torch.empty(0)] * len(matrices)
    by_shape: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(index)
    for indices in by_shape.values():
        stacked = torch.linalg.qr(torch.stack([matrices[i] for i in indices])).Q
        for index, q in zip(indices, stacked.unbind(0), strict=True):
            result[index] = q
    return result

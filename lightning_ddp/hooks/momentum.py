"""`topk`, `randomk`, `sign`: some elements, or the signs of all; what is not sent is delayed, with momentum.

Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth for
Distributed Training", ICLR 2018, section 3 and algorithm 1. Stich, Cordonnier and Jaggi, "Sparsified SGD with
Memory", NeurIPS 2018. Karimireddy, Rebjock, Stich and Jaggi, "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", ICML 2019, algorithm 1 (EF-signSGD). Zheng, Huang and Kwok, "Communication-Efficient
Distributed Blockwise Momentum SGD with Error-Feedback", NeurIPS 2019.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch

from lightning_ddp.comm.group import uploaded
from lightning_ddp.errors import require
from lightning_ddp.hooks.base import HookOptions, Part, StatefulHook

_WARMUP_FACTOR = 0.25
"""First warm-up ratio, and the factor between successive ratios."""


@dataclass(frozen=True, kw_only=True)
class MomentumOptions(HookOptions):
    """Options of hooks that can apply momentum."""

    momentum: float = 0.0
    """Factor of the velocity that this hook keeps before compression; 0 for plain residuals, with any
    optimizer. If above 0, set this to the momentum of the optimizer, and that momentum to 0."""
    nesterov: bool = False
    """If True, use Nesterov momentum for the velocity."""
    start_step: int = 0
    """Number of synchronized backward passes with the plain mean before compression starts."""

    def __post_init__(self) -> None:
        require(0 <= self.momentum < 1, f"momentum={self.momentum}: expected from 0 and below 1")
        require(not self.nesterov or self.momentum > 0, "nesterov=True needs a momentum above 0")
        require(self.start_step >= 0, f"start_step={self.start_step}: expected 0 or more")


class MomentumHook(StatefulHook):
    """A hook that replaces the gradient g by a velocity u = m u + g before it compresses.

    Lin et al., section 3.1, and Zheng et al., algorithm 2. Subclasses implement `compress`.
    """

    Options = MomentumOptions
    options: MomentumOptions

    def reduce(self, part: Part) -> torch.Tensor:
        velocity = self._add_momentum(part) if self.options.momentum else None
        if self.step < self.options.start_step:
            return self.check_finite(self.wire.mean(part.flat))
        self.add_errors(part)
        return self.compress(part, velocity)

    def compress(self, part: Part, velocity: torch.Tensor | None) -> torch.Tensor:
        """Send `part.flat`, residuals already added, compressed; return the mean, and store new residuals.

        It may change `velocity` in place.
        """
        raise NotImplementedError

    def _add_momentum(self, part: Part) -> torch.Tensor:
        """Replace the flat gradient by its velocity (or Nesterov's sum); store and return the velocity."""
        momentum, velocity = self.options.momentum, part.flat.clone()
        for name, piece in part.present_slices(velocity):
            before = self.recall(name, "velocity", piece.numel())
            if before is not None:
                piece.add_(before, alpha=momentum)
        if self.options.nesterov:
            part.flat.add_(velocity, alpha=momentum)
        else:
            part.flat.copy_(velocity)
        self.remember_slices(part, "velocity", velocity)
        return velocity


# ---------------------------------------------------------------------- some elements


@dataclass(frozen=True, kw_only=True)
class SparseOptions(MomentumOptions):
    ratio: float = 0.01
    """Fraction of each parameter's elements that is sent; at least one element."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.ratio <= 1, f"ratio={self.ratio}: expected above 0 and at most 1")

    def ratio_at(self, step: int) -> float:
        return self.ratio


class SparseHook(MomentumHook):
    """A hook that sends some elements of each parameter and keeps the rest for later steps.

    With g the gradient: u = m u + g, v = v + u. The chosen elements of v are sent, and at their positions
    both are set to 0, so that old momentum does not push them further (momentum factor masking). Without
    momentum that is error feedback: v is the residual.
    """

    takes_wire = True
    Options = SparseOptions
    options: SparseOptions

    def compress(self, part: Part, velocity: torch.Tensor | None) -> torch.Tensor:
        """Send the chosen elements of each parameter; return the mean over the ranks, zero elsewhere."""
        chosen = []
        start = 0
        ratio = self.options.ratio_at(self.step)
        for name, piece, is_present in zip(part.names, part.slices(), part.present, strict=True):
            if is_present and piece.numel():
                count = max(1, math.ceil(ratio * piece.numel()))
                chosen.append(self.choose(name, piece, count) + start)
            start += piece.numel()
        if not chosen:
            return part.flat
        indices = torch.cat(chosen)
        if indices.device != part.flat.device:
            indices = uploaded(indices, part.flat.device)
        sent = part.flat[indices]
        part.flat.index_fill_(0, indices, 0)  # `[indices] = 0` would make the host wait for the device
        self.remember_slices(part, "error", part.flat)
        if velocity is not None:
            velocity.index_fill_(0, indices, 0)
        return self.exchange(part, indices, sent)

    def choose(self, name: str, piece: torch.Tensor, count: int) -> torch.Tensor:
        """Return `count` different positions, to be sent, in one parameter's gradient (1-D)."""
        raise NotImplementedError

    def exchange(self, part: Part, indices: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        """Return the mean over ranks of gradients that are `sent` at the `indices`, 0 elsewhere."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TopKOptions(SparseOptions):
    warmup_steps: int = 0
    """Number of steps after `start_step` in which the fraction falls to `ratio`. They are divided into equal
    intervals with the fractions 1/4, 1/16 and so on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.warmup_steps >= 0, f"warmup_steps={self.warmup_steps}: expected 0 or more")

    def ratio_at(self, step: int) -> float:
        """Return the share of elements to send in step `step`; the warm-up begins at `start_step`.

        >>> [TopKOptions(ratio=0.01, warmup_steps=8).ratio_at(step) for step in (0, 2, 4, 6, 8)]
        [0.25, 0.0625, 0.015625, 0.01, 0.01]
        """
        step -= self.start_step
        if step >= self.warmup_steps or self.ratio >= _WARMUP_FACTOR:
            return self.ratio
        num_stages = math.ceil(math.log(self.ratio) / math.log(_WARMUP_FACTOR))
        stage = step * num_stages // self.warmup_steps
        return max(self.ratio, _WARMUP_FACTOR ** (stage + 1))


class TopK(SparseHook):
    """Send the elements of each parameter that are largest in magnitude; keep the rest for later steps.

    Values and positions of all ranks go to all ranks, so the traffic grows with their number.
    """

    name = "topk"
    Options = TopKOptions

    def choose(self, name: str, piece: torch.Tensor, count: int) -> torch.Tensor:
        return torch.topk(piece.abs(), count, sorted=False).indices

    def exchange(self, part: Part, indices: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        values = self.check_finite(self.wire.gather(sent))
        positions = self.channel.all_gather(indices.to(torch.int32))
        # Keep the rounding error of the wire for later steps.
        part.flat[indices] = sent - values[self.channel.rank].to(sent.dtype)
        mean = torch.zeros_like(part.flat)
        # One rank at a time: positions of a rank are distinct, so all ranks add in the same order.
        for row, where in zip(values.unbind(0), positions.unbind(0), strict=True):
            mean[where.long()] += row.to(mean.dtype)
        return mean.div_(self.channel.size)


@dataclass(frozen=True, kw_only=True)
class RandomKOptions(SparseOptions):
    seed: int = 0
    """Seed of the choice of elements, the same on all ranks."""


class RandomK(SparseHook):
    """Send random elements of each parameter, without their positions; keep the rest.

    The positions follow from seed, step and parameter name, so all ranks choose the same ones, and the
    traffic does not grow with their number. An element waits 1 / ratio steps on average, which an optimizer
    with momentum at a high learning rate does not bear: set `momentum` here instead, as with `topk`.
    """

    name = "randomk"
    Options = RandomKOptions
    options: RandomKOptions

    def choose(self, name: str, piece: torch.Tensor, count: int) -> torch.Tensor:
        size = piece.numel()
        key = f"{self.options.seed} {self.step} {name}"
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        if 4 * count >= size:
            return torch.randperm(size, generator=generator)[:count]
        # Drawing duplicates again costs far less than a permutation of a large tensor.
        found: torch.Tensor = torch.randint(size, (count,), generator=generator).unique()
        while found.numel() < count:
            more = torch.randint(size, (count - found.numel(),), generator=generator)
            found = torch.cat([found, more]).unique()
        return found

    def exchange(self, part: Part, indices: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        means = self.check_finite(self.wire.mean(sent))
        result = torch.zeros_like(part.flat)
        result[indices] = means.to(result.dtype)
        return result


# ---------------------------------------------------------------------- all signs


@dataclass(frozen=True, kw_only=True)
class SignOptions(MomentumOptions):
    block_size: int = 1024
    """Number of elements of a parameter that share one float32 scale; the last block of each parameter may be
    shorter. Use smaller blocks for parameters whose parts have gradients of different sizes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.block_size >= 1, f"block_size={self.block_size}: expected at least 1")


class Sign(MomentumHook):
    """Send signs, with the mean absolute value of each block as its scale; keep the residual.

    With p the gradient plus the residual, each rank sends mean(|p|) sign(p), where sign(0) is +1 everywhere,
    and keeps p minus that. The traffic grows with the number N of ranks: N/64 of that of float32, and
    1/block_size of it for the scales.
    """

    name = "sign"
    Options = SignOptions
    options: SignOptions

    def compress(self, part: Part, velocity: torch.Tensor | None) -> torch.Tensor:
        def decoded(scales: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
            signs = unpack_signs(bits, part.flat)
            blocks = self._blocks(part, signs)
            for block, scale in zip(blocks, scales.split([len(b) for b in blocks]), strict=True):
                block.mul_(scale.unsqueeze(1))
            return signs

        scales = torch.cat([block.abs().mean(1) for block in self._blocks(part, part.flat)])
        bits = pack_signs(part.flat)
        mine = decoded(scales, bits)
        self.remember_slices(part, "error", part.flat - mine)
        gathered_scales = self.check_finite(self.channel.all_gather(scales))
        gathered_bits = self.channel.all_gather(bits)
        mean = torch.zeros_like(part.flat)
        for rank, received in enumerate(zip(gathered_scales, gathered_bits, strict=True)):
            mean.add_(mine if rank == self.channel.rank else decoded(*received))
        return mean.div_(self.channel.size)

    def _blocks(self, part: Part, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views (blocks, elements) of a flat tensor: whole blocks and rest of each parameter."""
        size = self.options.block_size
        shapes = [shape for n in part.sizes for shape in ((n // size, size), (min(n % size, 1), n % size))]
        pieces = zip(flat.split([rows * width for rows, width in shapes]), shapes, strict=True)
        return [piece.view(shape) for piece, shape in pieces]


def pack_signs(flat: torch.Tensor) -> torch.Tensor:
    """Pack signs as one bit per element (1 if not negative), eight per byte, in uint8."""
    bytes_ = torch.nn.functional.pad(flat >= 0, (0, -flat.numel() % 8)).view(torch.uint8)
    # The product moves bit 0 of byte i, of eight bytes, to bit 56 + i; no two other bits meet.
    return (bytes_.view(torch.int64) * 0x0102040810204080 >> 56).to(torch.uint8)


def unpack_signs(packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Unpack the signs of `pack_signs` as +1 and -1, as many as a flat tensor has, and of its dtype."""
    values, places = (torch.arange(n, dtype=torch.uint8, device=packed.device) for n in (256, 8))
    signs = ((values.unsqueeze(1) >> places) & 1).to(like.dtype).mul_(2).sub_(1)
    return signs.index_select(0, packed.int()).view(-1)[: like.numel()]

"""`slowmo` and `diloco`: the change between two rounds is a gradient for an outer optimizer.

Wang, Tantia, Ballas and Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow
Momentum", ICLR 2020, algorithm 1. Douillard et al., "DiLoCo: Distributed Low-Communication Training of
Language Models", 2023, algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_ddp.averaging.base import Averager, AveragerOptions, Track
from lightning_ddp.encoding.mean import CastCodec, EncodedWire, Int8Codec, Segment, exchange, memory_view
from lightning_ddp.errors import require

_INT8_BLOCK = 256


class OuterAverager(Averager):
    """An averager with an outer optimizer whose parameters and momentum are float32, the same on all ranks.

    Subclasses implement `update` for a slice of one parameter.
    """

    def prepare(self) -> None:
        self.transport = self.wire

    def begin_local_phase(self) -> None:
        self._anchors = {name: memory_view(p).clone().float() for name, p in self.parameters.items()}
        self._momenta = {name: torch.zeros_like(a) for name, a in self._anchors.items()}

    def update(self, anchor: torch.Tensor, momentum: torch.Tensor, delta: torch.Tensor, lr: float) -> None:
        """Take an outer optimizer step on `anchor` and `momentum` (1-D, in place); `lr` is the inner rate.

        `delta` is the anchor minus the mean of the ranks' parameters, and may be changed.
        """
        raise NotImplementedError

    def round(self, track: Track) -> None:
        self.run(lambda: self._exchange(track))
        self.settle(track)

    def _exchange(self, track: Track) -> None:
        views = [memory_view(self.parameters[name]) for name in track.names]
        rates = self.learning_rates(track)

        def pack(segment: Segment, out: torch.Tensor) -> None:
            anchor = self._anchors[track.names[segment.number]][segment.where]
            out.copy_(anchor).sub_(views[segment.number][segment.where])

        def unpack(segment: Segment, delta: torch.Tensor) -> None:
            name, where = track.names[segment.number], segment.where
            anchor = self._anchors[name][where]
            self.update(anchor, self._momenta[name][where], delta, rates[name])
            views[segment.number][where].copy_(anchor)

        exchange(self.transport, views, pack, unpack)

    def learning_rates(self, track: Track) -> dict[str, float]:
        """Return the current learning rate of each parameter of an optimizer."""
        names = {id(p): name for name, p in self.parameters.items()}
        return {
            names[id(p)]: float(group["lr"])
            for group in track.optimizer.param_groups
            for p in group["params"]
            if id(p) in names
        }

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if not self.averages_gradients:
            state["outer"] = {
                name: {"anchor": anchor.cpu().clone(), "momentum": self._momenta[name].cpu().clone()}
                for name, anchor in self._anchors.items()
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        notes = super().load_state_dict(state)
        if state["name"] != self.name or self.averages_gradients:
            return notes
        self.begin_local_phase()
        missing = []
        for name, anchor in self._anchors.items():
            saved = state["outer"].get(name)
            if saved is None or saved["anchor"].numel() != anchor.numel():
                missing.append(name)
            else:
                anchor.copy_(saved["anchor"])
                self._momenta[name].copy_(saved["momentum"])
        if missing:
            notes.append(
                f"outer state of averager {self.name!r} starts from scratch for {', '.join(missing)}"
            )
        return notes

    def mark(self) -> Any:
        outer = [*self._anchors.values(), *self._momenta.values()] if self._is_local else []
        return super().mark(), [(tensor, tensor.clone()) for tensor in outer]

    def restore(self, mark: Any) -> None:
        base, outer = mark
        super().restore(base)
        for tensor, value in outer:
            tensor.copy_(value)


@dataclass(frozen=True, kw_only=True)
class SlowMoOptions(AveragerOptions):
    period: int = 12
    """Number of optimizer steps between two rounds."""
    slow_lr: float = 1.0
    """Factor of the slow step; 1 in the paper's experiments."""
    slow_momentum: float = 0.5
    """Slow momentum; more ranks allow a larger value, from 0.2 for four to 0.6 for sixteen ranks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.slow_lr > 0, f"slow_lr={self.slow_lr}: expected above 0")
        require(
            0 <= self.slow_momentum < 1, f"slow_momentum={self.slow_momentum}: expected from 0 and below 1"
        )


class SlowMo(OuterAverager):
    """Take local steps; every `period` steps apply a momentum step to the change of the mean parameters.

    With the learning rate lr of the round: u = b u + (x_old - mean(x)) / lr, x_old = x_old - a lr u. Where
    lr is 0 the mean is taken as it is, and u stays.
    """

    name = "slowmo"
    Options = SlowMoOptions
    options: SlowMoOptions

    def update(self, anchor: torch.Tensor, momentum: torch.Tensor, delta: torch.Tensor, lr: float) -> None:
        if lr == 0:
            anchor.sub_(delta)
            return
        momentum.mul_(self.options.slow_momentum).add_(delta, alpha=1 / lr)
        anchor.sub_(momentum, alpha=self.options.slow_lr * lr)


@dataclass(frozen=True, kw_only=True)
class DiLoCoOptions(AveragerOptions):
    period: int = 100
    """Number of optimizer steps between two synchronizations; the DiLoCo paper uses 500."""
    outer_lr: float = 0.7
    """Learning rate of the outer optimizer."""
    outer_momentum: float = 0.9
    """Momentum of the outer optimizer; 0.9 is for eight ranks and long runs, about 0.5 for two ranks.
    Training must tolerate a step of 1 / (1 - outer_momentum) times the mean change of the ranks'
    parameters."""
    nesterov: bool = True
    """If True, use Nesterov momentum in the outer optimizer."""
    encoding: Literal["fp32", "bf16", "int8"] = "fp32"
    """Encoding in which outer gradients are sent: 'fp32', 'bf16' or 'int8'; sums are float32."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.outer_lr > 0, f"outer_lr={self.outer_lr}: expected above 0")
        require(
            0 <= self.outer_momentum < 1, f"outer_momentum={self.outer_momentum}: expected from 0 and below 1"
        )
        require(
            self.encoding in ("fp32", "bf16", "int8"),
            f"encoding={self.encoding!r}: expected 'fp32', 'bf16' or 'int8'",
        )


class DiLoCo(OuterAverager):
    """Take local steps, and every `period` an outer SGD step with Nesterov momentum on their mean change.

    The optimizer of the training script is the inner one (AdamW in the paper); its state stays on each rank.
    With outer learning rate 1 and no momentum it is plain averaging of the parameters.
    """

    name = "diloco"
    Options = DiLoCoOptions
    options: DiLoCoOptions

    def prepare(self) -> None:
        super().prepare()
        encoding = self.options.encoding
        if encoding != "fp32":
            codec = CastCodec(torch.bfloat16) if encoding == "bf16" else Int8Codec(_INT8_BLOCK)
            self.transport = EncodedWire(self.channel, codec)

    def update(self, anchor: torch.Tensor, momentum: torch.Tensor, delta: torch.Tensor, lr: float) -> None:
        factor = self.options.outer_momentum
        momentum.mul_(factor).add_(delta)
        step = delta.add_(momentum, alpha=factor) if self.options.nesterov else momentum
        anchor.sub_(step, alpha=self.options.outer_lr)

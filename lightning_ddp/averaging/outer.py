"""`slowmo`, `diloco`, `streaming_diloco`: a change between two rounds is a gradient for an outer optimizer.

Wang, Tantia, Ballas and Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow
Momentum", ICLR 2020, algorithm 1. Douillard et al., "DiLoCo: Distributed Low-Communication Training of
Language Models", 2023, algorithm 1. Douillard et al., "Streaming DiLoCo with overlapping communication:
Towards a Distributed Free Lunch", 2025, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from lightning_ddp.averaging.base import Averager, AveragerOptions, Track
from lightning_ddp.encoding.mean import (
    CHUNK_NUMEL,
    CastCodec,
    EncodedWire,
    Int8Codec,
    Segment,
    average_,
    exchange,
    memory_view,
)
from lightning_ddp.errors import require

_INT8_BLOCK = 256


class OuterAverager(Averager):
    """An averager with an outer optimizer whose parameters and momentum are float32, the same on all ranks.

    Subclasses implement `update` for a slice of one parameter.
    """

    def prepare(self) -> None:
        self.transport = self.wire

    def begin_local_phase(self) -> None:
        self._anchors: dict[str, torch.Tensor] = {}
        self._momenta: dict[str, torch.Tensor] = {}
        self._begin_outer(self.parameters)

    def _begin_outer(self, names: Iterable[str]) -> None:
        """Create float32 copies and zero momenta, the outer state, of parameters equal on all ranks."""
        for name in names:
            self._anchors[name] = memory_view(self.parameters[name]).clone().float()
            self._momenta[name] = torch.zeros_like(self._anchors[name])

    def before_step(self) -> None:
        """Start the first local step from the present parameters, which may have been loaded until now."""
        if self._is_local and not any(track.num_local_steps for track in self.tracks):
            for name in self._anchors.keys() & self.parameters.keys():
                self._anchors[name].copy_(memory_view(self.parameters[name]))

    def average_new(self, names: Sequence[str]) -> None:
        """Average parameters in `names` without outer state, and create it; call in the channel's thread."""
        new = [name for name in names if name not in self._anchors]
        average_(self.wire, [self.parameters[name] for name in new])
        self._begin_outer(new)

    def update(self, anchor: torch.Tensor, momentum: torch.Tensor, delta: torch.Tensor, lr: float) -> None:
        """Take an outer optimizer step on `anchor` and `momentum` (1-D, in place); `lr` is the inner rate.

        `delta` is the anchor minus the mean of the ranks' parameters, and may be changed.
        """
        raise NotImplementedError

    def round(self, track: Track) -> None:
        self.run(lambda: self._exchange(track))
        self.settle(track)

    def _exchange(self, track: Track) -> None:
        self.average_new(track.names)
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
        """Return the current learning rate of each averaged parameter of an optimizer, by name."""
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
        self._anchors, self._momenta = {}, {}
        missing = []
        for name, parameter in self.parameters.items():
            saved = state["outer"].get(name)
            if saved is None or saved["anchor"].numel() != memory_view(parameter).numel():
                missing.append(name)  # the next round averages it
            else:
                self._anchors[name] = saved["anchor"].to(parameter.device, copy=True)
                self._momenta[name] = saved["momentum"].to(parameter.device, copy=True)
        if missing:
            notes.append(
                f"outer state of averager {self.name!r} starts from scratch for {', '.join(missing)}"
            )
        return notes

    def mark(self) -> Any:
        outer = [self._anchors, self._momenta] if self._is_local else [{}, {}]
        return super().mark(), [{name: (t, t.clone()) for name, t in each.items()} for each in outer]

    def restore(self, mark: Any) -> None:
        base, outer = mark
        super().restore(base)
        self._anchors, self._momenta = (
            {name: tensor.copy_(value) for name, (tensor, value) in each.items()} for each in outer
        )


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
    """Take local steps, and every `period` an outer Nesterov SGD step on the ranks' mean parameter change.

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


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCoOptions(DiLoCoOptions):
    period: int = 100
    """Number of optimizer steps between two synchronizations of a fragment; fragments take turns in it."""
    num_fragments: int = 4
    """Number of parts of the parameters, synchronized in turn, evenly over a period. Parameters are dealt out
    like cards, so that each fragment has parameters of every depth."""
    delay: int = 1
    """Number of optimizer steps between the start of a fragment's exchange and its application, during which
    training continues."""
    local_weight: float = 0.5
    """Weight of the rank's own parameters when outer parameters are mixed in (0 to below 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.num_fragments >= 1 and self.period % self.num_fragments == 0,
            f"num_fragments={self.num_fragments}: expected a divisor of period={self.period}",
        )
        every = self.period // self.num_fragments
        require(
            0 <= self.delay < every,
            f"delay={self.delay}: expected from 0 and below {every} (period / num_fragments), so that one"
            " exchange ends before the next begins",
        )
        require(0 <= self.local_weight < 1, f"local_weight={self.local_weight}: expected from 0 and below 1")


@dataclass(kw_only=True)
class _Exchange:
    """Pending average of one fragment's parameter changes, from its start until it is applied."""

    names: list[str]
    due: int
    """Number of the local step after which it is applied."""
    moved: torch.Tensor
    """Change of this rank's parameters when the exchange began, 1-D."""
    future: torch.futures.Future[torch.Tensor] | None = None
    """Future of the mean of `moved`; None if the exchange must be sent again, after a loss of ranks."""


class StreamingDiLoCo(DiLoCo):
    """DiLoCo by fragments: each fragment starts its outer step in turn and applies it `delay` steps later.

    Progress of a rank during the exchange is kept: its parameters become a mix of the outer parameters and
    its own. So parameters are the same on all ranks only after `agree`.
    """

    name = "streaming_diloco"
    mixes_rounds = True
    Options = StreamingDiLoCoOptions
    options: StreamingDiLoCoOptions

    def prepare(self) -> None:
        super().prepare()
        self._under_way: dict[int, _Exchange] = vars(self).get("_under_way", {})

    def start_over(self) -> None:
        self._under_way = {}
        super().start_over()

    def _begin_again(self, under_way: dict[int, _Exchange]) -> None:
        """Make `under_way`, without results, the pending exchanges; they are sent again before their use."""
        self._under_way = {index: replace(pending, future=None) for index, pending in under_way.items()}

    def after_local_step(self, track: Track) -> None:
        self._send_again()
        index = self.tracks.index(track)
        self._apply_if_due(index, track)
        every = self.options.period // self.options.num_fragments
        if track.num_local_steps % every == 0:
            self._start(index, track, (track.num_local_steps // every - 1) % self.options.num_fragments)
            self._apply_if_due(index, track)

    def _start(self, index: int, track: Track, fragment: int) -> None:
        self.find_parameters()
        names = track.names[fragment :: self.options.num_fragments]
        if not names:
            return
        if not self._anchors.keys() >= set(names):
            self.run(lambda: self.average_new(names))
        # Copies, as the parameters change during the exchange.
        views = [memory_view(self.parameters[name]) for name in names]
        deltas = [self._anchors[n] - view for n, view in zip(names, views, strict=True)]
        pending = _Exchange(
            names=names, due=track.num_local_steps + self.options.delay, moved=torch.cat(deltas)
        )
        pending.future = self._send(pending)
        self._under_way[index] = pending

    def _send(self, pending: _Exchange) -> torch.futures.Future[torch.Tensor]:
        flat = pending.moved.clone() if self.keeps_rounds else pending.moved

        def job() -> torch.Tensor:
            for piece in flat.split(CHUNK_NUMEL):
                piece.copy_(self.transport.mean(piece))
            return flat

        return self.channel.submit(job)

    def _apply_if_due(self, index: int, track: Track) -> None:
        pending = self._under_way.get(index)
        if pending is not None and track.num_local_steps >= pending.due:
            self.finish_round(track)

    def round(self, track: Track) -> None:
        """Wait for the pending fragment's average, take its outer step and mix it into the parameters.

        Parameters change last, when nothing is to be communicated any more.
        """
        self._send_again()
        index = self.tracks.index(track)
        pending = self._under_way[index]
        assert pending.future is not None
        deltas = self.channel.wait(pending.future).split([self._anchors[n].numel() for n in pending.names])
        self.settle(replace(track, names=pending.names))
        if self.keeps_rounds:  # the exchange says nothing of the steps that others have taken since
            channel = self.channel
            channel.wait(channel.submit(lambda: channel.all_reduce(torch.zeros(1, device=channel.device))))
        rates = self.learning_rates(track)
        weight = self.options.local_weight if self.options.delay else 0.0
        with torch.no_grad():
            for name, delta in zip(pending.names, deltas, strict=True):
                anchor, own = self._anchors[name], memory_view(self.parameters[name])
                self.update(anchor, self._momenta[name], delta, rates[name])
                own.mul_(weight).add_(anchor, alpha=1 - weight)
        del self._under_way[index]

    def agree(self, others: Sequence[torch.nn.Module] = ()) -> bool:
        self._send_again()
        return super().agree(others)

    # ------------------------------------------------------------------ other ranks

    def settle_others(self) -> None:
        super().settle_others()
        self._begin_again(self._under_way)

    def mark(self) -> Any:
        return super().mark(), dict(self._under_way)

    def restore(self, mark: Any) -> None:
        base, under_way = mark
        super().restore(base)
        self._begin_again(under_way)

    def _send_again(self) -> None:
        for pending in self._under_way.values():
            if pending.future is None:
                pending.future = self._send(pending)

    def for_others(self) -> dict[str, Any]:
        return super().state_dict()  # without the wait for pending exchanges

    def catch_up(self, state: dict[str, Any]) -> None:
        under_way = self._under_way
        super().catch_up({**state, "under_way": {}})
        steps = [track.num_local_steps for track in self.tracks]  # later ones than this rank has taken
        self._under_way = {index: each for index, each in under_way.items() if each.due > steps[index]}

    # ------------------------------------------------------------------ checkpoint

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        self._send_again()
        state["under_way"] = {
            index: {
                "names": list(pending.names),
                "due": pending.due,
                "mean": self.channel.wait(pending.future).cpu().clone(),
            }
            for index, pending in self._under_way.items()
            if pending.future is not None
        }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        notes = super().load_state_dict(state)
        self._under_way = {}
        if state["name"] != self.name:
            return notes
        for index, saved in state["under_way"].items():
            if all(name in self.parameters for name in saved["names"]):
                future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
                mean = saved["mean"].to(self.channel.device, copy=True)
                future.set_result(mean)
                pending = _Exchange(names=saved["names"], due=saved["due"], moved=mean.clone(), future=future)
                self._under_way[int(index)] = pending
        return notes

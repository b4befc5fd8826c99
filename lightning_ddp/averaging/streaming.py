"""`streaming_diloco`: DiLoCo one fragment at a time, while training continues.

Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch", 2025,
algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_ddp.averaging.base import Track
from lightning_ddp.averaging.outer import DiLoCo, DiLoCoOptions
from lightning_ddp.encoding.mean import CHUNK_NUMEL, memory_view
from lightning_ddp.errors import require


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
        self._begin_again(vars(self).get("_under_way", {}))

    def _begin_again(self, under_way: dict[int, _Exchange]) -> None:
        """Make `under_way` the pending exchanges, without results; the next local step sends them again."""
        self._under_way = {index: replace(exchange, future=None) for index, exchange in under_way.items()}

    def after_local_step(self, track: Track) -> None:
        self._send_again()
        index = self.tracks.index(track)
        self._apply_if_due(index, track)
        every = self.options.period // self.options.num_fragments
        if track.num_local_steps % every == 0:
            self._start(index, track, (track.num_local_steps // every - 1) % self.options.num_fragments)
            self._apply_if_due(index, track)

    def _start(self, index: int, track: Track, fragment: int) -> None:
        names = track.names[fragment :: self.options.num_fragments]
        if not names:
            return
        # Copies, as the parameters change during the exchange.
        views = [memory_view(self.parameters[name]) for name in names]
        deltas = [self._anchors[n] - view for n, view in zip(names, views, strict=True)]
        exchange = _Exchange(
            names=names, due=track.num_local_steps + self.options.delay, moved=torch.cat(deltas)
        )
        exchange.future = self._send(exchange)
        self._under_way[index] = exchange

    def _send(self, exchange: _Exchange) -> torch.futures.Future[torch.Tensor]:
        flat = exchange.moved.clone() if self.keeps_rounds else exchange.moved

        def job() -> torch.Tensor:
            for piece in flat.split(CHUNK_NUMEL):
                piece.copy_(self.transport.mean(piece))
            return flat

        return self.channel.submit(job)

    def _apply_if_due(self, index: int, track: Track) -> None:
        exchange = self._under_way.get(index)
        if exchange is not None and track.num_local_steps >= exchange.due:
            self.finish_round(track)

    def round(self, track: Track) -> None:
        """Wait for the pending fragment's average, take its outer step and mix it into the parameters.

        Parameters change last, when nothing is to be communicated any more.
        """
        self._send_again()
        index = self.tracks.index(track)
        exchange = self._under_way[index]
        assert exchange.future is not None
        deltas = self.channel.wait(exchange.future).split([self._anchors[n].numel() for n in exchange.names])
        self.settle(replace(track, names=exchange.names))
        rates = self.learning_rates(track)
        with torch.no_grad():
            for name, delta in zip(exchange.names, deltas, strict=True):
                self.update(self._anchors[name], self._momenta[name], delta, rates[name])
        self._mix(exchange.names)
        del self._under_way[index]

    @torch.no_grad()
    def _mix(self, names: list[str]) -> None:
        weight = self.options.local_weight if self.options.delay else 0.0
        for name in names:
            own = memory_view(self.parameters[name])
            own.mul_(weight).add_(self._anchors[name], alpha=1 - weight)

    def agree(self) -> bool:
        self._send_again()
        return super().agree()

    # ------------------------------------------------------------------ other ranks

    @property
    def _due(self) -> dict[int, _Exchange]:
        """Return the pending exchanges that are due at this rank's step count, by optimizer index."""
        steps = [track.num_local_steps for track in self.tracks]
        return {index: each for index, each in self._under_way.items() if steps[index] >= each.due}

    @property
    def keeps_parameters(self) -> bool:
        """True while a round is due: a rank that is behind then keeps its own parameters."""
        return bool(self._due)

    def mark(self) -> Any:
        return super().mark(), dict(self._under_way)

    def restore(self, mark: Any) -> None:
        base, under_way = mark
        super().restore(base)
        self._begin_again(under_way)

    def _send_again(self) -> None:
        for exchange in self._under_way.values():
            if exchange.future is None:
                exchange.future = self._send(exchange)

    def for_others(self) -> dict[str, Any]:
        return super().state_dict()  # without the wait for pending exchanges

    def catch_up(self, state: dict[str, Any]) -> None:
        due, under_way = self._due, self._under_way
        super().catch_up({**state, "under_way": {}})
        for exchange in due.values():
            self._mix(exchange.names)
        self._under_way = {index: each for index, each in under_way.items() if index not in due}

    # ------------------------------------------------------------------ checkpoint

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        self._send_again()
        state["under_way"] = {
            index: {
                "names": list(exchange.names),
                "due": exchange.due,
                "mean": self.channel.wait(exchange.future).cpu().clone(),
            }
            for index, exchange in self._under_way.items()
            if exchange.future is not None
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

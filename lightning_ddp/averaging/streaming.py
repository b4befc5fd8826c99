"""`streaming_diloco`: DiLoCo a fragment at a time, while training goes on.

Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch", 2025,
algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lightning_ddp.averaging.base import Track
from lightning_ddp.averaging.outer import DiLoCo, DiLoCoOptions
from lightning_ddp.comm.checks import require
from lightning_ddp.encoding.chunks import CHUNK_NUMEL, memory_view

__all__ = ["StreamingDiLoCo", "StreamingDiLoCoOptions"]


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCoOptions(DiLoCoOptions):
    """Options of `streaming_diloco`."""

    num_fragments: int = 4
    """Parts of the parameters, synchronised in turn, evenly over a period. Parameters are dealt out like
    cards, so each fragment has some of every depth."""
    delay: int = 1
    """Optimizer steps between the start of a fragment's exchange and its application: training goes on."""
    local_weight: float = 0.5
    """Part of the rank's own parameters in the mix with the outer ones when they are applied."""

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
    """A fragment's exchange under way, or ended and not yet applied."""

    names: list[str]
    due: int
    """Local step after which it is applied."""
    future: torch.futures.Future[torch.Tensor]
    """Of the flat mean of what the ranks moved."""


class StreamingDiLoCo(DiLoCo):
    """DiLoCo a fragment at a time: each starts its outer step at its time, and ends it `delay` steps later.

    What a rank learned meanwhile is not lost: its parameters become a mix of the outer ones and its own. So
    they agree only where `agree` makes them. The peak of traffic is that of one fragment.
    """

    name = "streaming_diloco"
    Options = StreamingDiLoCoOptions
    options: StreamingDiLoCoOptions

    def prepare(self) -> None:
        """Nothing is under way yet. Does not communicate."""
        super().prepare()
        self._under_way: dict[int, _Exchange] = {}

    def after_local_step(self, track: Track) -> None:
        """Applies what is due, starts what is due."""
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
        # a copy: the parameters change while it is sent
        views = [memory_view(self.parameters[name]) for name in names]
        deltas = [self._anchors[n] - view for n, view in zip(names, views, strict=True)]
        flat = torch.cat(deltas)

        def job() -> torch.Tensor:
            for piece in flat.split(CHUNK_NUMEL):
                piece.copy_(self.transport().mean(piece))
            return flat

        self._under_way[index] = _Exchange(
            names=names,
            due=track.num_local_steps + self.options.delay,
            future=self.channel.submit(job),
        )

    def _apply_if_due(self, index: int, track: Track) -> None:
        exchange = self._under_way.get(index)
        if exchange is None or track.num_local_steps < exchange.due:
            return
        del self._under_way[index]
        flat = self.channel.wait(exchange.future)
        rates = self.learning_rates(track)
        with torch.no_grad():
            for name, delta in zip(
                exchange.names, flat.split([self._anchors[n].numel() for n in exchange.names]), strict=True
            ):
                self.update(self._anchors[name], self._momenta[name], delta, rates[name])
                own = memory_view(self.parameters[name])
                weight = self.options.local_weight if self.options.delay else 0.0
                own.mul_(weight).add_(self._anchors[name], alpha=1 - weight)
        self.settle(Track(optimizer=track.optimizer, names=exchange.names, num_steps=track.num_steps))

    # ------------------------------------------------------------------ checkpoint

    def state_dict(self) -> dict[str, Any]:
        """As `DiLoCo`, and exchanges that are not yet applied; waits for them."""
        state = super().state_dict()
        state["under_way"] = {
            index: {
                "names": list(exchange.names),
                "due": exchange.due,
                "mean": self.channel.wait(exchange.future).cpu().clone(),
            }
            for index, exchange in self._under_way.items()
        }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Takes over a state with its exchanges."""
        notes = super().load_state_dict(state)
        self._under_way = {}
        if state["name"] != self.name:
            return notes
        for index, saved in state["under_way"].items():
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(saved["mean"].to(self.channel.device, copy=True))
            if all(name in self.parameters for name in saved["names"]):
                self._under_way[int(index)] = _Exchange(names=saved["names"], due=saved["due"], future=future)
        return notes

"""The state of one synchronised backward on this rank: made by its forward, dropped when it is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["BackwardState"]


@dataclass(slots=True)
class BackwardState:
    """What the reducer, its buckets and their reduction know of the backward that is to come, or runs."""

    step: int = -1
    """Its number, the same on all ranks; -1 until its first gradient is there."""
    begun_at: float = 0.0
    """When that was, in seconds of `time.monotonic`."""
    is_armed: bool = True
    """Whether gradients count; not once the backward is over, or after a forward that averages nothing."""
    creates_graph: bool = False
    """Whether somebody may want to differentiate it (`create_graph=True`)."""
    ready: list[int] = field(default_factory=list)
    """Indices of the parameters whose gradients have come, in their order."""
    num_taken: int = 0
    """Buckets, in launch order, that are full and have been given to the reduction."""
    num_launched: int = 0
    """Those of them that are reduced: without those that nobody needs."""
    is_skipped: bool = False
    """Whether no gradient has come on any rank, although the backward is over."""
    on_slice: Callable[[float], None] | None = None
    """What a reduction that the waiting thread does calls meanwhile, with the seconds that it has waited."""

    @property
    def is_running(self) -> bool:
        """Whether its first gradient has come."""
        return self.step >= 0

    def note_slice(self, waited_s: float) -> None:
        """Calls `on_slice` as it is then."""
        if self.on_slice is not None:
            self.on_slice(waited_s)

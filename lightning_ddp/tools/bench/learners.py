"""A hook or an averager as `bench hooks` trains with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Learner"]

_SGD = {"momentum": 0.9, "nesterov": True}


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A hook or an averager with its settings, of which some follow from the task."""

    hook: Mapping[str, Any] | None = None
    """Specification of a hook."""
    averaging: Mapping[str, Any] | None = None
    """Specification of an averager."""
    start: float = 0.0
    """Part of the steps with averaged gradients, before compression or local training."""
    text_start: float | None = None
    """The same for the characters; None for `start`."""
    warmup: float = 0.0
    """Part of the steps in which the ratio of `topk` falls."""
    takes_momentum: bool = False
    """Whether the hook applies the momentum where the task trains with SGD, and the optimizer none."""

    def arguments(self, task: str, num_steps: int) -> dict[str, Any]:
        """The arguments of `Communication` for a task.

        >>> Learner(hook={"name": "sign"}, start=0.1, takes_momentum=True).arguments("text", 300)
        {'hook': {'name': 'sign', 'start_step': 30}}
        """
        key, spec = ("hook", self.hook) if self.hook is not None else ("averaging", self.averaging)
        chosen = dict(spec or {})
        start = self.text_start if task == "text" and self.text_start is not None else self.start
        for option, part in (("start_step", start), ("warmup_steps", self.warmup)):
            if part:
                chosen[option] = round(part * num_steps)
        if self.takes_momentum and task == "digits":
            chosen |= _SGD
        return {key: chosen}

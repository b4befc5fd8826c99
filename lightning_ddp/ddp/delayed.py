"""Gradients that are averaged all at once, when that of one chosen parameter is ready.

torch's `delay_all_reduce_named_params` and `param_to_hook_all_reduce`: for gradients that several forwards
of one step add to, so that buckets cannot tell when they are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_ddp._torch import queue_callback
from lightning_ddp.comm.group import Group
from lightning_ddp.ddp.gradient_streams import GradientStreams
from lightning_ddp.ddp.module_sync import broadcast_coalesced

__all__ = ["DelayedAllReduce"]

_Kind = tuple[torch.dtype, torch.device]


class DelayedAllReduce:
    """Keeps the gradients of some parameters in flat buffers and averages these after a trigger.

    Construction communicates: rank 0's parameters go to all ranks.

    Args:
        group: the ranks.
        parameters: whose gradients are averaged so; the same on all ranks, in one order.
        trigger: the parameter whose gradient is ready after all of theirs.
        is_on: tells whether the running backward is a synchronised one.
    """

    def __init__(
        self,
        group: Group,
        parameters: Sequence[torch.nn.Parameter],
        trigger: torch.nn.Parameter,
        is_on: Callable[[], bool],
    ) -> None:
        self.group = group
        self._is_on = is_on
        self._works: list[tuple[Any, torch.device]] = []
        self._flats: list[torch.Tensor] = []
        self._places: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        kinds: dict[_Kind, list[torch.nn.Parameter]] = {}
        for p in parameters:
            kinds.setdefault((p.dtype, p.device), []).append(p)
        for (dtype, device), same in kinds.items():
            flat = torch.zeros(sum(p.numel() for p in same), dtype=dtype, device=device)
            self._flats.append(flat)
            parts = flat.split([p.numel() for p in same])
            self._places += [(p, part.view(p.shape)) for p, part in zip(same, parts, strict=True)]
        broadcast_coalesced(group, list(parameters))
        self._streams = {d: GradientStreams(d) for _, d in kinds if d.type == "cuda"}
        on_streams = [p for p in parameters if p.device in self._streams]
        self._handles = [p.register_post_accumulate_grad_hook(self._note_stream) for p in on_streams]
        # after its own gradient is in, as it may be one of the parameters
        self._handles.append(trigger.register_post_accumulate_grad_hook(self._launch))

    def prepare(self) -> None:
        """Before a backward: every gradient lives in its buffer, zero where there was none."""
        for streams in self._streams.values():
            streams.clear()
        with torch.no_grad():
            for parameter, view in self._places:
                if parameter.grad is view:
                    continue
                if parameter.grad is None:
                    view.zero_()
                else:
                    view.copy_(parameter.grad)
                parameter.grad = view

    def _note_stream(self, parameter: torch.Tensor) -> None:
        self._streams[parameter.device].note()

    def _launch(self, _trigger: torch.Tensor) -> None:
        if not self._is_on():
            return
        for streams in self._streams.values():
            streams.join()
        with torch.no_grad():
            for flat in self._flats:
                self._works.append((self.group.all_reduce(flat.div_(self.group.size)), flat.device))
        queue_callback(self._finish)

    def _finish(self) -> None:
        while self._works:
            self.group.wait(*self._works.pop(0))

    def remove_hooks(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

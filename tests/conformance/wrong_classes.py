"""Classes with DDP's interface that are wrong in one way each, to see that torch's tests find it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


class NoSync(DistributedDataParallel):
    """Never averages gradients."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self.no_sync():
            return super().forward(*inputs, **kwargs)


class SumNotMean(DistributedDataParallel):
    """Adds gradients up over the ranks without dividing by their number."""

    def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        size = self.process_group.size()
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda grad: grad * size)


class NoBuffers(DistributedDataParallel):
    """Never broadcasts buffers after construction."""

    def _sync_buffers(self) -> None:
        pass


class Nothing(torch.nn.Module):
    """Takes DDP's arguments and only calls the module: no communication at all."""

    def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

"""Classes with DDP's interface that are wrong in one way each, to see that torch's tests find it."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel


class NoSync(DistributedDataParallel):
    """Never averages gradients."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self.no_sync():
            return super().forward(*inputs, **kwargs)


class NoBuffers(DistributedDataParallel):
    """Never broadcasts buffers after construction."""

    def _sync_buffers(self) -> None:
        pass

"""Gradients averaged over all ranks first, and over the ranks of a node once local training has begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_ddp.comm.group import Group
from lightning_ddp.comm.hook_identity import hook_name
from lightning_ddp.encoding.mean import PlainWire
from lightning_ddp.encoding.side_stream import Channel, part_group
from lightning_ddp.errors import ConfigurationError

__all__ = ["NodeGradients"]


class NodeGradients:
    """A communication hook that passes on to another one until local training begins.

    All ranks construct it; communicates.

    Args:
        hook: reduces over all ranks; None for the plain mean.
        group: all ranks; those of a node are neighbours.
        node_size: ranks of a node.
        device: of the gradients.
        is_global: tells whether gradients are to be averaged over all ranks.

    Raises:
        ConfigurationError: the ranks do not divide into nodes of that size.
    """

    def __init__(
        self,
        hook: Callable[[Any, Any], torch.futures.Future[torch.Tensor]] | None,
        group: Group,
        node_size: int,
        device: torch.device,
        is_global: Callable[[], bool],
    ) -> None:
        if group.size % node_size:
            raise ConfigurationError(
                f"gradients='node': {group.size} ranks do not divide into nodes of {node_size}"
            )
        self._hook = hook
        self.name = f"{hook_name(hook)} in nodes" if hook is not None else "allreduce in nodes"
        """Of the hook, for errors."""
        self._is_global = is_global
        self._world = Channel(group, device) if hook is None else None
        self._node = Channel(part_group(group, node_size, device), device)

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Queues the reduction of a full bucket."""
        if self._is_global() and self._hook is not None:
            return self._hook(state, bucket)
        channel = self._world if self._world is not None and self._is_global() else self._node
        buffer: torch.Tensor = bucket.buffer()
        return channel.submit(lambda: PlainWire(channel).mean(buffer))

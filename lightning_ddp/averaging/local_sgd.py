"""`post_local_sgd` and `hierarchical_sgd`: local training whose parameters are averaged every few steps.

Lin, Stich, Patel and Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020: post-local SGD
(section 4) and hierarchical local SGD (section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from lightning_ddp.averaging.base import Averager, AveragerOptions, Track
from lightning_ddp.catalogue import hook_name
from lightning_ddp.comm.group import Group, part_group
from lightning_ddp.encoding.mean import Wire
from lightning_ddp.encoding.side_stream import Channel
from lightning_ddp.errors import ConfigurationError, require


@dataclass(frozen=True, kw_only=True)
class PostLocalSGDOptions(AveragerOptions):
    start_step: int = 100
    """Number of optimizer steps with averaged gradients; the paper ends them at the first decay of the
    learning rate."""
    intra_node_gradients: bool = False
    """If True, gradients are averaged among the ranks of a node in local training."""


class PostLocalSGD(Averager):
    """Average gradients until `start_step`, then take local steps and average parameters every `period`."""

    name = "post_local_sgd"
    Options = PostLocalSGDOptions
    options: PostLocalSGDOptions


class NodeGradients:
    """Communication hook that averages gradients only within each node once local training has started.

    `hook` reduces over all ranks until then, while `is_global` returns True; None for the plain mean. There
    are `node_size` ranks on a node.

    Collective: all ranks must construct it.
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
                f"intra_node_gradients=True: {group.size} ranks do not divide into nodes of {node_size}"
            )
        self._hook = hook
        self.name = f"{hook_name(hook)} in nodes" if hook is not None else "allreduce in nodes"
        self._is_global = is_global
        self._world = Channel(group, device) if hook is None else None
        self._node = Channel(part_group(group, node_size, device), device)

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if self._is_global() and self._hook is not None:
            return self._hook(state, bucket)
        channel = self._world if self._world is not None and self._is_global() else self._node
        buffer: torch.Tensor = bucket.buffer()
        return channel.submit(lambda: Wire(channel).mean(buffer))


@dataclass(frozen=True, kw_only=True)
class HierarchicalSGDOptions(AveragerOptions):
    period: int = field(default=1, init=False)  # replaced by `periods`
    periods: Mapping[int, int]
    """Mapping from a period in optimizer steps to the number of neighboring ranks that average then; longer
    periods have larger groups. The last group is all ranks: 0 stands for their number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Options from YAML or JSON have text as keys, in the order of the command line.
        in_order = dict(sorted((int(p), int(n)) for p, n in self.periods.items()))
        object.__setattr__(self, "periods", in_order)
        periods, sizes = list(self.periods), [n or 2**31 for n in self.periods.values()]
        given = f"periods={dict(self.periods)}"
        require(
            bool(periods) and periods[0] >= 1 and min(sizes) >= 2,
            f"{given}: expected {{period: group size}} with periods from 1 and sizes from 2",
        )
        require(
            all(b > a for seq in (periods, sizes) for a, b in pairwise(seq)),
            f"{given}: expected periods and group sizes that increase together",
        )
        require(
            all(b % a == 0 for a, b in pairwise(periods)),
            f"{given}: each period has to be a multiple of the one before",
        )


class HierarchicalSGD(Averager):
    """Average parameters among few ranks often and among many ranks rarely.

    At a step that several periods divide, only the largest runs, as its group contains the others. After a
    loss of ranks, the remaining ranks form new groups of neighbors, the last group perhaps with fewer ranks.
    """

    name = "hierarchical_sgd"
    Options = HierarchicalSGDOptions
    options: HierarchicalSGDOptions

    def check_ranks(self) -> None:
        """Raise ConfigurationError, with several ranks, unless each size divides them and the last is all."""
        size, sizes = self.group.size, self._sizes()
        require(
            size == 1 or (list(sizes.values())[-1] == size and not any(size % n for n in sizes.values())),
            f"hierarchical_sgd: periods={sizes} with {size} ranks: the last group must have all ranks, and"
            " each size must divide their number",
        )

    def halt(self) -> None:
        for channel in dict.fromkeys(self._levels.values()):
            channel.halt()

    def _sizes(self) -> dict[int, int]:
        """Return a dict from each period in steps to the number of ranks in its averaging groups."""
        return {period: size or self.group.size for period, size in self.options.periods.items()}

    def prepare(self) -> None:
        group, device = self.group, self.channel.device
        self._levels = {
            period: self.channel if size >= group.size else Channel(part_group(group, size, device), device)
            for period, size in self._sizes().items()
        }

    def after_local_step(self, track: Track) -> None:
        due = [period for period in self._levels if track.num_local_steps % period == 0]
        if not due:
            return
        channel = self._levels[max(due)]
        if channel is self.channel:
            self.finish_round(track)
        else:
            self.find_parameters()
            self.average_parameters(track, channel)

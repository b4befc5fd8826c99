"""Model averaging: ranks train on their own gradients, and parameters are averaged periodically.

Averagers by name: check of a specification without processes, and construction for a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_ddp.averaging.base import Averager, AveragerOptions
from lightning_ddp.catalogue import Catalogue
from lightning_ddp.comm.group import Group

__all__ = [
    "Averager",
    "AveragerOptions",
    "AveragerPlan",
    "available_averagers",
    "averager_options",
    "build_averager",
    "parse_averager",
]

_AVERAGERS: Catalogue[Averager] = Catalogue("averager", Averager, argument="model averaging")


def available_averagers() -> dict[str, str]:
    """Return the names of the averagers with their descriptions, sorted by name.

    >>> sorted(available_averagers())[:2]
    ['diloco', 'hierarchical_sgd']
    """
    return _AVERAGERS.descriptions()


def averager_options() -> dict[str, type[AveragerOptions]]:
    """Return the options of each averager, a dataclass with options as `init` fields, by name.

    >>> averager_options()["diloco"](period=50).outer_lr
    0.7
    """
    return _AVERAGERS.options()


@dataclass(frozen=True, kw_only=True)
class AveragerPlan:
    """A checked averager specification: name and options."""

    name: str
    options: AveragerOptions


def parse_averager(spec: str | Mapping[str, Any]) -> AveragerPlan:
    """Check an averager specification and return it as a plan, without communication.

    >>> parse_averager({"name": "diloco", "period": 50}).options.outer_lr
    0.7

    Args:
        spec: a name, or a mapping with `name` and options.

    Raises:
        ConfigurationError: the name or an option does not exist, or a value cannot be used.
    """
    name, options = _AVERAGERS.parse(spec)
    return AveragerPlan(name=name, options=options)


def build_averager(
    spec: str | Mapping[str, Any] | AveragerPlan,
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    process_group: Any,
) -> Averager:
    """Build an averager; the parameters must be the same on all ranks.

    Collective: all ranks must call it.

    Args:
        spec: specification as for `parse_averager`, or its result.
        module: module whose parameters and buffers are averaged; its names are those in the state.
        optimizers: optimizers whose steps are reported with `Averager.step`.
        process_group: process group of the ranks, or a `Group`.

    Raises:
        ConfigurationError: the specification does not fit the ranks, or an optimizer cannot be used.
    """
    plan = spec if isinstance(spec, AveragerPlan) else parse_averager(spec)
    group = process_group if isinstance(process_group, Group) else Group(process_group)
    return _AVERAGERS[plan.name](module, optimizers, group, plan.options)

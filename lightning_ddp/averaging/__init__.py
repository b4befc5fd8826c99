"""Model averaging: ranks train on their own gradients, and parameters are averaged periodically."""

from lightning_ddp.averaging.base import Averager, AveragerOptions
from lightning_ddp.averaging.catalogue import (
    AveragerPlan,
    available_averagers,
    averager_options,
    build_averager,
    parse_averager,
)

__all__ = [
    "Averager",
    "AveragerOptions",
    "AveragerPlan",
    "available_averagers",
    "averager_options",
    "build_averager",
    "parse_averager",
]

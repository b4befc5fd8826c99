"""Model averaging: the ranks train by themselves, and their parameters come together now and then."""

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

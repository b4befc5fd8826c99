"""Tools behind `python -m lightning_ddp`: the doctor, the benchmarks, the timeline and the performance model.

Only the command line imports this room. Its page is README.md beside this file.
"""

from lightning_ddp.errors import LightningDDPError

__all__ = ["ToolError"]


class ToolError(LightningDDPError, RuntimeError):
    """A tool could not do what it was asked for; the message is printed without a traceback."""

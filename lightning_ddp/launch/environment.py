"""Environment variables of a distributed run, for people who read logs."""

from __future__ import annotations

import os

__all__ = ["all_variables"]


def all_variables() -> dict[str, str]:
    """The environment of this process, a copy."""
    return dict(os.environ)

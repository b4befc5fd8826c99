"""Environment variables of a distributed run, for people who read logs."""

from __future__ import annotations

import os

__all__ = ["all_variables", "global_seed"]


def all_variables() -> dict[str, str]:
    """The environment of this process, a copy."""
    return dict(os.environ)


def global_seed() -> int:
    """The seed that Lightning's `seed_everything` has set for all ranks; 0 for none."""
    text = os.environ.get("PL_GLOBAL_SEED", "")
    return int(text) if text.isdecimal() else 0

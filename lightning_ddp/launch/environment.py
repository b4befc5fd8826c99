"""Environment variables of a distributed run, for people who read logs."""

from __future__ import annotations

import os

__all__ = ["all_variables", "read_variables"]


def all_variables() -> dict[str, str]:
    """The environment of this process, a copy."""
    return dict(os.environ)


def read_variables(names: dict[str, str], absent: str = "N/A") -> dict[str, str]:
    """The values of environment variables, under other names.

    Args:
        names: name in the answer -> variable.
        absent: the value for a variable that is not set.

    >>> read_variables({"where": "NO_SUCH_VARIABLE"})
    {'where': 'N/A'}
    """
    return {name: os.environ.get(variable, absent) for name, variable in names.items()}

"""What a check has found: PASS, WARN or FAIL, with what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Level", "worst"]

Level = Literal["PASS", "WARN", "FAIL"]
_LEVELS: tuple[Level, ...] = ("PASS", "WARN", "FAIL")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the verdict."""

    level: Level
    check: str
    """What was looked at, in a word or two."""
    message: str
    """What was found and, unless it passed, what to do."""


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level.

    >>> worst([Finding(level="PASS", check="a", message=""), Finding(level="WARN", check="b", message="")])
    'WARN'
    """
    return max((finding.level for finding in findings), key=_LEVELS.index, default="PASS")

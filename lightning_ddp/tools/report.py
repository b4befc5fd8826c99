"""Ratios of paired rounds, text tables and the progress bar."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from importlib import metadata

from tqdm import tqdm  # type: ignore[import-untyped]  # tqdm ships no types


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median over rounds of `numerator / denominator`.

    Pairing by round cancels what changed between rounds (clock speed, other load); the ratio of two medians
    does not.

    >>> paired_ratio([2.0, 20.0, 3.0], [4.0, 40.0, 4.0])
    0.5

    Raises:
        ValueError: the lengths differ, there is no sample, or a value is not above 0.
    """
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(
            f"expected as many samples on both sides, got {len(numerators)} and {len(denominators)}"
        )
    if min(*numerators, *denominators) <= 0:
        raise ValueError("expected samples above 0, got one that is not")
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str | int | float]]) -> str:
    """Lay out rows under headers: numbers right-aligned with three decimals, text left-aligned.

    >>> print(format_table(("model", "ms"), [("a", 1.5), ("longer", 10.0)]))
    model       ms
    ------  ------
    a        1.500
    longer  10.000
    """
    cells = [[f"{value:.3f}" if isinstance(value, float) else str(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    numeric = [bool(rows) and not isinstance(rows[0][column], str) for column in range(len(headers))]

    def line(texts: Sequence[str]) -> str:
        columns = zip(texts, widths, numeric, strict=True)
        return "  ".join(t.rjust(width) if right else t.ljust(width) for t, width, right in columns).rstrip()

    return "\n".join(map(line, [headers, ["-" * width for width in widths], *cells]))


def installed_version(name: str) -> str | None:
    """Version of an installed distribution; None where it is not installed, such as in a source tree."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def progress_bar(total: int, label: str, *, is_shown: bool = True) -> tqdm[None]:
    """Make a progress bar on standard error; it stays silent where that is no terminal."""
    return tqdm(total=total, desc=label, file=sys.stderr, disable=None if is_shown else True, leave=False)

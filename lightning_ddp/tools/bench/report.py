"""Statistics, plain-text tables, JSON and the progress bar of the benchmarks; free of torch."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped]  # tqdm ships no types


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One contender's figures beside a reference contender."""

    median: float
    """Median over the rounds."""

    iqr: float
    """Interquartile range over the rounds, in the unit of the median."""

    ratio: float
    """Reference / this contender, the median of ratios paired by round; below 1 the reference is smaller."""


def compare(samples: Mapping[str, Sequence[float]], *, reference: str) -> dict[str, Comparison]:
    """Summarize each contender and set the reference in relation to it.

    Args:
        samples: Contender -> one value per round; the values of a round were measured next to each other.
        reference: The contender that stands above the fraction line.

    Raises:
        KeyError: If the reference is no contender.
        ValueError: If contenders have different numbers of rounds, or a value is not above 0.
    """
    return {
        name: Comparison(
            median=statistics.median(values),
            iqr=interquartile_range(values),
            ratio=paired_ratio(samples[reference], values),
        )
        for name, values in samples.items()
    }


def interquartile_range(samples: Sequence[float]) -> float:
    """Return the distance between the first and the third quartile; 0 for a single sample.

    >>> interquartile_range([1.0, 2.0, 3.0, 4.0, 5.0])
    2.0

    Raises:
        ValueError: If there is no sample.
    """
    if not samples:
        raise ValueError("expected at least one sample, got none")
    if len(samples) == 1:
        return 0.0
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return third - first


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median over rounds of ``numerator / denominator``.

    Pairing by round cancels what changed between rounds (clock speed, other load); the ratio of two medians
    does not.

    >>> paired_ratio([2.0, 20.0, 3.0], [4.0, 40.0, 4.0])
    0.5

    Raises:
        ValueError: If the lengths differ, there is no sample, or a value is not above 0.
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

    Args:
        headers: One title per column.
        rows: One value per column in each row; integers are printed without decimals.

    Raises:
        ValueError: If a row has more or fewer values than there are headers.
    """
    cells = [[value if isinstance(value, str) else _format_number(value) for value in row] for row in rows]
    for row in cells:
        if len(row) != len(headers):
            raise ValueError(f"expected {len(headers)} columns, got {len(row)}: {row}")
    widths = [max(len(text) for text in column) for column in zip(headers, *cells, strict=True)]
    numeric = [bool(rows) and not isinstance(rows[0][column], str) for column in range(len(headers))]
    lines = [list(headers), ["-" * width for width in widths], *cells]
    return "\n".join(_format_line(line, widths, numeric) for line in lines)


def write_report(
    path: Path,
    *,
    benchmark: str,
    unit: str,
    settings: Mapping[str, object],
    samples: Mapping[str, Mapping[str, Sequence[float]]],
    comparisons: Mapping[str, Mapping[str, Comparison]],
    extra: Mapping[str, object] | None = None,
) -> None:
    """Write one benchmark's result as JSON.

    Args:
        path: File to write or replace.
        benchmark: Name of the benchmark.
        unit: Unit of samples, medians and spreads.
        settings: What was asked for.
        samples: Subject (a model, a quantity) -> contender -> one value per round.
        comparisons: Subject -> contender -> its figures.
        extra: Further entries of the summary.

    Raises:
        ValueError: If a value is NaN or infinite, which JSON cannot hold.
    """
    table = {
        subject: {name: asdict(comparison) for name, comparison in contenders.items()}
        for subject, contenders in comparisons.items()
    }
    document = {
        "benchmark": benchmark,
        "environment": describe_environment(),
        "settings": settings,
        "unit": unit,
        "summary": {"comparisons": table, **(extra or {})},
        "samples": samples,
    }
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def describe_environment() -> dict[str, object]:
    """Return what a reader needs to judge the figures: system, CPU count and package versions."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "num_cpus": os.cpu_count(),
        "packages": {
            name: _installed_version(name) for name in ("torch", "pytorch-lightning", "lightning_ddp")
        },
    }


def progress_bar(total: int, label: str, *, is_shown: bool = True) -> tqdm[None]:
    """Return a progress bar on standard error; it stays silent where that is no terminal.

    Args:
        total: Number of updates until it is full.
        label: Text before the bar.
        is_shown: Whether it may show at all.
    """
    return tqdm(total=total, desc=label, file=sys.stderr, disable=None if is_shown else True, leave=False)


def note(bar: tqdm[None], text: str) -> None:
    """Say on standard error how far a long run is, where no bar says it because that is no terminal."""
    if bar.disable:
        print(text, file=sys.stderr, flush=True)


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None  # run from a source tree


def _format_number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _format_line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    columns = zip(cells, widths, numeric, strict=True)
    return "  ".join(
        cell.rjust(width) if right else cell.ljust(width) for cell, width, right in columns
    ).rstrip()

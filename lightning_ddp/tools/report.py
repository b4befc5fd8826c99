"""Statistics of paired rounds, text tables, JSON reports, bar charts and the progress bar; free of torch."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm  # type: ignore[import-untyped]  # tqdm ships no types

Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""Subject (a model, a start) -> contender -> one value per round."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One contender's figures beside a reference contender."""

    median: float
    """Median over the rounds."""
    iqr: float
    """Interquartile range over the rounds, in the unit of the median."""
    ratio: float
    """Reference / this contender, the median of ratios paired by round; below 1 the reference is smaller."""


Comparisons = Mapping[str, Mapping[str, Comparison]]
"""Subject -> contender -> its figures."""


# ---------------------------------------------------------------------- statistics


def compare(samples: Mapping[str, Sequence[float]], *, reference: str) -> dict[str, Comparison]:
    """Summarize each contender and set the reference in relation to it.

    Args:
        samples: contender -> one value per round; the values of a round were measured next to each other.
        reference: the contender that stands above the fraction line.

    Raises:
        KeyError: the reference is no contender.
        ValueError: contenders have different numbers of rounds, or a value is not above 0.
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
    """Distance between the first and the third quartile; 0 for a single sample.

    >>> interquartile_range([1.0, 2.0, 3.0, 4.0, 5.0])
    2.0

    Raises:
        ValueError: there is no sample.
    """
    first, third = _quartiles(samples)
    return third - first


def _quartiles(samples: Sequence[float]) -> tuple[float, float]:
    if not samples:
        raise ValueError("expected at least one sample, got none")
    if len(samples) == 1:
        return samples[0], samples[0]
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, third


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


# ---------------------------------------------------------------------- tables and files


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str | int | float]]) -> str:
    """Lay out rows under headers: numbers right-aligned with three decimals, text left-aligned.

    >>> print(format_table(("model", "ms"), [("a", 1.5), ("longer", 10.0)]))
    model       ms
    ------  ------
    a        1.500
    longer  10.000

    Args:
        headers: one title per column.
        rows: one value per column in each row; integers are printed without decimals.

    Raises:
        ValueError: a row has more or fewer values than there are headers.
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
    samples: Samples,
    comparisons: Comparisons,
    extra: Mapping[str, object] | None = None,
) -> None:
    """Write one benchmark's result as JSON.

    Args:
        path: file to write or replace.
        benchmark: its name.
        unit: of samples, medians and spreads.
        settings: what was asked for.
        samples: what was measured.
        comparisons: figures of the same subjects and contenders.
        extra: further entries of the summary.

    Raises:
        ValueError: a value is NaN or infinite, which JSON cannot hold.
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
    """What a reader needs to judge the figures: system, CPU count and package versions."""
    packages = ("torch", "pytorch-lightning", "lightning_ddp")
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "num_cpus": os.cpu_count(),
        "packages": {name: installed_version(name) for name in packages},
    }


def installed_version(name: str) -> str | None:
    """Version of an installed distribution; None where it is not installed, such as in a source tree."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _format_number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _format_line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    columns = zip(cells, widths, numeric, strict=True)
    return "  ".join(
        cell.rjust(width) if right else cell.ljust(width) for cell, width, right in columns
    ).rstrip()


# ---------------------------------------------------------------------- progress and pictures


def progress_bar(total: int, label: str, *, is_shown: bool = True) -> tqdm[None]:
    """Make a progress bar on standard error; it stays silent where that is no terminal.

    Args:
        total: number of updates until it is full.
        label: text before the bar.
        is_shown: whether it may show at all.
    """
    return tqdm(total=total, desc=label, file=sys.stderr, disable=None if is_shown else True, leave=False)


_NUM_COLUMNS: Final = 2
_PANEL_WIDTH: Final = 6.0
_BAR_HEIGHT: Final = 0.42  # inches of a panel for each contender
_ROOM: Final = 1.55  # of the longest bar, so that the text beside it fits


def draw_bars(samples: Samples, comparisons: Comparisons, path: Path, *, unit: str, title: str) -> None:
    """Draw a panel a subject: a bar a contender, as long as its median, with quartiles, rounds and ratio.

    Args:
        samples: what was measured.
        comparisons: medians and ratios; of the same subjects and contenders.
        path: its suffix says the format.
        unit: of the samples.
        title: above all panels.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]  # an optional dependency

    num_columns = min(_NUM_COLUMNS, len(samples))
    num_rows = math.ceil(len(samples) / num_columns)
    longest = max(len(contenders) for contenders in samples.values())
    size = (_PANEL_WIDTH * num_columns, 0.8 + num_rows * (0.9 + _BAR_HEIGHT * longest))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for axes in panels[len(samples) :]:
        axes.remove()
    for axes, (subject, contenders) in zip(panels, samples.items(), strict=False):
        _draw_panel(axes, contenders, comparisons[subject])
        axes.set(title=subject, xlabel=unit)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _draw_panel(axes: Any, rounds: Mapping[str, Sequence[float]], figures: Mapping[str, Comparison]) -> None:
    ends = []
    for row, (name, values) in enumerate(rounds.items()):
        median, ratio = figures[name].median, figures[name].ratio
        first, third = _quartiles(values)
        axes.barh(row, median, height=0.6, color=f"C{row}", alpha=0.55)
        axes.errorbar(median, row, xerr=[[median - first], [third - median]], color="black", capsize=3)
        axes.plot(values, [row + 0.2] * len(values), ".", color="black", alpha=0.25, markersize=3)
        ends.append(max(median, third))
        text = f"{median:.4g} (ratio {ratio:.2f})"
        axes.annotate(text, (ends[-1], row), (6, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, _ROOM * max(ends))  # a round that took far longer lies outside
    axes.set_yticks(range(len(rounds)), list(rounds))
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)

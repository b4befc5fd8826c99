"""Pictures of medians: bars for contenders, lines where a size grows. Imports matplotlib when it draws."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightning_ddp.tools.bench.report import Comparison

__all__ = ["draw_bars", "draw_lines"]

Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""Subject -> contender -> one value per round."""

Comparisons = Mapping[str, Mapping[str, Comparison]]
"""Subject -> contender -> its figures."""

_NUM_COLUMNS: Final = 2
_PANEL_WIDTH: Final = 6.0
_BAR_HEIGHT: Final = 0.42  # inches of a panel for each contender
_ROOM: Final = 1.55  # of the longest bar, so that the text beside it fits


def draw_bars(samples: Samples, comparisons: Comparisons, path: Path, *, unit: str, title: str) -> None:
    """Draw a panel a subject: a bar a contender, as long as its median, with quartiles, rounds and ratio.

    Args:
        samples: What was measured.
        comparisons: Medians and ratios; of the same subjects and contenders.
        path: Its suffix says the format.
        unit: Of the samples.
        title: Above all panels.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
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


def draw_lines(samples: Samples, comparisons: Comparisons, path: Path, *, unit: str, title: str) -> None:
    """Draw a line a contender: the median against the size, both on logarithmic axes, with its ratio.

    Args:
        samples: What was measured; the subjects are sizes in KiB.
        comparisons: Medians and ratios; of the same subjects and contenders.
        path: Its suffix says the format.
        unit: Of the samples.
        title: Above all.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]  # an optional dependency

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    sizes = [int(size) for size in samples]
    for name in next(iter(samples.values())):
        medians = [contenders[name].median for contenders in comparisons.values()]
        quartiles = [_quartiles(contenders[name]) for contenders in samples.values()]
        errors = [
            [median - first for median, (first, _) in zip(medians, quartiles, strict=True)],
            [third - median for median, (_, third) in zip(medians, quartiles, strict=True)],
        ]
        axes.errorbar(sizes, medians, yerr=errors, marker="o", capsize=3, label=name)
        for size, median, contenders in zip(sizes, medians, comparisons.values(), strict=True):
            if contenders[name].ratio != 1.0:
                text = f"{contenders[name].ratio:.2f}"
                axes.annotate(text, (size, median), (0, 7), textcoords="offset points", ha="center")
    axes.set(xscale="log", yscale="log", xlabel="size (KiB)", ylabel=unit, title=title)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=150)


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third

"""Pictures of the tools: panels with titles and units (PNG, SVG or PDF; needs matplotlib)."""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightning_ddp.errors import one_of
from lightning_ddp.tools.command_line import output_path

SUFFIXES: Final = (".png", ".svg", ".pdf")

_NUM_COLUMNS: Final = 2
_ROOM: Final = 1.55  # of the longest bar, so that the text beside it fits


def picture_path(text: str) -> Path:
    """Return the path of a picture to write, for argparse; raise early for a bad format or no matplotlib."""
    path = output_path(text)
    if path.suffix.lower() not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"expected {one_of(SUFFIXES)}, got {text!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("drawing needs matplotlib: pip install matplotlib")
    return path


def save_panels(
    path: Path,
    panels: Mapping[str, Callable[[Any], None]],
    *,
    title: str,
    height: float = 4.5,
    width: float = 6.5,
) -> None:
    """Draw panels in two columns, each by a function of its axes, and save the picture.

    `panels` has the functions by title; `height` and `width` are those of a panel in inches.
    """
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]  # an optional dependency

    num_columns = min(_NUM_COLUMNS, len(panels))
    num_rows = math.ceil(len(panels) / num_columns)
    figure = Figure(figsize=(width * num_columns, 0.8 + num_rows * height), layout="constrained")
    for number, (name, draw) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(num_rows, num_columns, number)
        axes.grid(alpha=0.3)
        axes.set(title=name)
        draw(axes)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def draw_bars(axes: Any, rows: Mapping[str, Sequence[float]], texts: Mapping[str, str], unit: str) -> None:
    """Draw a bar per row: median, quartiles, all values, and beside it the median and a text."""
    ends = []
    for row, (name, values) in enumerate(rows.items()):
        first, median, third = quartiles(values)
        axes.barh(row, median, height=0.6, color=f"C{row}", alpha=0.55)
        axes.errorbar(median, row, xerr=[[median - first], [third - median]], color="black", capsize=3)
        axes.plot(values, [row + 0.2] * len(values), ".", color="black", alpha=0.25, markersize=3)
        text = f"{median:.4g} ({texts[name]})"
        axes.annotate(text, (third, row), (6, 0), textcoords="offset points", va="center")
        ends.append(third)
    axes.set_xlim(0, _ROOM * max(ends))  # far longer rounds are outside
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set(xlabel=unit)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile; a single value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, median, third = statistics.quantiles(values, method="inclusive")
    return first, median, third

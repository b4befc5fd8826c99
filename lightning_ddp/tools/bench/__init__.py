"""Benchmarks behind `python -m lightning_ddp bench`, and their class: name, options, measure, table.

Contenders take turns within one run, so that a slow minute of the machine affects all of them, and ratios are
medians of ratios that are paired by round. Each file is one benchmark, with the code that its ranks run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from lightning_ddp.tools import ToolError
from lightning_ddp.tools.command_line import (
    format_table,
    installed_version,
    output_path,
    paired_ratio,
    picture_path,
)

_NUM_COLUMNS: Final = 2
_ROOM: Final = 1.55  # of the longest bar, so that the text beside it fits
_PACKAGES: Final = ("torch", "pytorch-lightning", "lightning_ddp")

Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""Values of each round, measured in turns, by subject (a model, a start) and contender."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Figures of a contender, compared to a reference contender."""

    median: float
    iqr: float
    """Interquartile range over the rounds."""
    ratio: float
    """Reference / this contender: median of ratios paired by round; below 1 if the reference is smaller."""


Comparisons = Mapping[str, Mapping[str, Comparison]]
"""Figures by subject and contender."""


def compare(samples: Mapping[str, Sequence[float]], *, reference: str) -> dict[str, Comparison]:
    """Compare each contender to the reference; refuse a missing round, and values not above 0."""
    found = {}
    for name, values in samples.items():
        first, third = _quartiles(values)
        ratio = paired_ratio(samples[reference], values)
        found[name] = Comparison(median=statistics.median(values), iqr=third - first, ratio=ratio)
    return found


def _quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile; a single sample is both."""
    first, _, third = statistics.quantiles([*samples, *samples[: len(samples) == 1]], method="inclusive")
    return first, third


@dataclass(kw_only=True)
class Result:
    """Result of a benchmark."""

    samples: Samples = field(default_factory=dict)
    references: Mapping[str, str] | str = ""
    """Reference contender, of all subjects or by subject."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings of the measurement, for the report."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further entries of the report's summary, and data for the table."""

    def reference(self, subject: str) -> str:
        """Return the reference contender of a subject."""
        return self.references if isinstance(self.references, str) else self.references[subject]

    @property
    def comparisons(self) -> Comparisons:
        """Figures of each contender, compared to its reference."""
        return {s: compare(rounds, reference=self.reference(s)) for s, rounds in self.samples.items()}


def draw_bars(result: Result, path: Path, *, unit: str, title: str) -> None:
    """Draw a panel per subject with a bar per contender: median, quartiles, rounds and ratio."""

    def draw_panel(axes: Any, subject: str) -> None:
        rounds, figures = result.samples[subject], comparisons[subject]
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
        axes.set_xlim(0, _ROOM * max(ends))  # far longer rounds are outside
        axes.set_yticks(range(len(rounds)), list(rounds))
        axes.invert_yaxis()
        axes.set(xlabel=unit)

    comparisons = result.comparisons
    panels = {subject: partial(draw_panel, subject=subject) for subject in result.samples}
    longest = max(map(len, result.samples.values()))
    save_panels(path, panels, title=title, height=0.9 + 0.42 * longest)


def save_panels(
    path: Path, panels: Mapping[str, Callable[[Any], None]], *, title: str, height: float = 4.5
) -> None:
    """Draw panels in two columns, each by a function of its axes, and save the picture."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]  # an optional dependency

    num_columns = min(_NUM_COLUMNS, len(panels))
    num_rows = math.ceil(len(panels) / num_columns)
    figure = Figure(figsize=(6.5 * num_columns, 0.8 + num_rows * height), layout="constrained")
    for number, (name, draw) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(num_rows, num_columns, number)
        axes.grid(alpha=0.3)
        axes.set(title=name)
        draw(axes)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A command under `bench`."""

    name: str
    summary: str
    """Sentence for `--help`."""
    unit: str
    """Unit of samples, medians and spreads."""
    options: Callable[[argparse.ArgumentParser], None]
    """Function that declares the options, besides `--json` and `--plot`."""
    measure: Callable[[argparse.Namespace], Result]
    """Function that measures."""
    table: Callable[[Result], str]
    """Function that formats the printed table."""
    draw: Callable[..., None] = draw_bars
    """Function that draws the result to a file, with unit and title."""
    title: str = "medians with quartiles; the ratio is ours / contender"
    """Title of the picture."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        self.options(parser)
        for name, kind, text in (
            ("--json", output_path, "write all samples and the summary to this file"),
            ("--plot", picture_path, "draw the figures (PNG, SVG or PDF; needs matplotlib)"),
        ):
            parser.add_argument(name, type=kind, metavar="PATH", help=text)

    def run(self, args: argparse.Namespace) -> int:
        """Measure, print the table, and write the requested files; return the exit status 0.

        Raises:
            ToolError: the settings cannot be measured, a process fails or a deadline passes.
        """
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            raise ToolError(
                f"bench {self.name} starts its own processes, but RANK is set. Run it once, without torchrun"
            )
        result = self.measure(args)
        print(self.table(result))
        if args.json is not None:
            args.json.write_text(json.dumps(self._report(result), indent=2, allow_nan=False) + "\n")
        if args.plot is not None:
            self.draw(result, args.plot, unit=self.unit, title=f"bench {self.name}: {self.title}")
            print(f"picture: {args.plot}")
        return 0

    def _report(self, result: Result) -> dict[str, object]:
        figures = {
            subject: {name: asdict(comparison) for name, comparison in contenders.items()}
            for subject, contenders in result.comparisons.items()
        }
        return {
            "benchmark": self.name,
            "environment": {
                "platform": platform.platform(),
                "python": platform.python_version(),
                "num_cpus": os.cpu_count(),
                "packages": {name: installed_version(name) for name in _PACKAGES},
            },
            "settings": result.settings,
            "unit": self.unit,
            "summary": {"comparisons": figures, **result.extra},
            "samples": result.samples,
        }


def format_comparisons(comparisons: Comparisons, headers: tuple[str, str, str], unit: str) -> str:
    """Format a row per subject and contender; `headers` are those of subject, contender and ratio."""
    rows = [
        (subject, name, figures.median, figures.iqr, figures.ratio)
        for subject, contenders in comparisons.items()
        for name, figures in contenders.items()
    ]
    first, second, ratio = headers
    return format_table((first, second, f"median {unit}", f"IQR {unit}", ratio), rows)


def seconds_or(values: Sequence[float], summary: Callable[[Sequence[float]], float], otherwise: str) -> str:
    """Format a summary of seconds, such as their median; return `otherwise` without values."""
    return f"{summary(values):.3f}" if values else otherwise

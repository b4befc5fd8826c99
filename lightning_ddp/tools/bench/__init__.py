"""Benchmarks behind `python -m lightning_ddp bench`, and the class of all: name, options, measure, table.

Contenders take turns within one run, so that a slow minute of the machine hits all of them, and ratios are
medians of ratios that were paired round by round. Each file is one benchmark, with what its ranks do.
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
"""Subject (a model, a start) -> contender -> one value per round; those of a round were measured in turns."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One contender's figures beside a reference contender."""

    median: float
    iqr: float
    """Interquartile range over the rounds."""
    ratio: float
    """Reference / this contender, the median of ratios paired by round; below 1 the reference is smaller."""


Comparisons = Mapping[str, Mapping[str, Comparison]]
"""Subject -> contender -> its figures."""


def compare(samples: Mapping[str, Sequence[float]], *, reference: str) -> dict[str, Comparison]:
    """Each contender's figures beside those of the reference; refuses a missing round, and values below 0."""
    found = {}
    for name, values in samples.items():
        first, third = _quartiles(values)
        ratio = paired_ratio(samples[reference], values)
        found[name] = Comparison(median=statistics.median(values), iqr=third - first, ratio=ratio)
    return found


def _quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """The first and the third one; the sample itself where there is but one."""
    first, _, third = statistics.quantiles([*samples, *samples[: len(samples) == 1]], method="inclusive")
    return first, third


@dataclass(kw_only=True)
class Result:
    """What was measured."""

    samples: Samples = field(default_factory=dict)
    references: Mapping[str, str] | str = ""
    """The contender above the fraction line, of all subjects or of each."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """What was asked for."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further entries of the report's summary; what is needed for the table."""

    def reference(self, subject: str) -> str:
        """The contender that a subject's others are compared with."""
        return self.references if isinstance(self.references, str) else self.references[subject]

    @property
    def comparisons(self) -> Comparisons:
        """Each contender beside its reference."""
        return {s: compare(rounds, reference=self.reference(s)) for s, rounds in self.samples.items()}


def draw_bars(result: Result, path: Path, *, unit: str, title: str) -> None:
    """Draw a panel a subject: a bar a contender, as long as its median, with quartiles, rounds and ratio."""

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
        axes.set_xlim(0, _ROOM * max(ends))  # a round that took far longer lies outside
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
    """Draw panels of so many inches in two columns, each by a function of its axes, and save the picture."""
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
    """A sentence for `--help`."""
    unit: str
    """Of samples, medians and spreads."""
    options: Callable[[argparse.ArgumentParser], None]
    """Declares its options; `--json` and `--plot` come by themselves."""
    measure: Callable[[argparse.Namespace], Result | None]
    """Does the work; None in a process of torchrun that does not report."""
    table: Callable[[Result], str]
    """Lays out what is printed."""
    draw: Callable[..., None] = draw_bars
    """Draws the result into a file, given unit and title."""
    title: str = "medians with quartiles; the ratio is ours / contender"
    """Of the picture."""
    joins_torchrun: bool = False
    """Whether it measures torchrun's ranks where that has started it."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        self.options(parser)
        for name, kind, text in (
            ("--json", output_path, "write all samples and the summary to this file"),
            ("--plot", picture_path, "draw the figures (PNG, SVG or PDF; needs matplotlib)"),
        ):
            parser.add_argument(name, type=kind, metavar="PATH", help=text)

    def run(self, args: argparse.Namespace) -> int:
        """Measure, print the table, and write the files that were asked for; returns the exit status, 0.

        Raises:
            ToolError: what was asked for cannot be measured, a process fails or a deadline passes.
        """
        if not self.joins_torchrun and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            raise ToolError(
                f"bench {self.name} starts its own processes, but RANK is set. Run it once, without torchrun"
            )
        result = self.measure(args)
        if result is None:
            return 0
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


def format_comparisons(
    comparisons: Comparisons,
    headers: tuple[str, str, str],
    unit: str,
    columns: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
) -> str:
    """Lay out a row for each subject and contender; `headers` stand over subjects, contenders and ratios.

    `columns` are further figures: header -> subject -> contender -> value; "-" where there is none.
    """
    columns = columns or {}
    rows: list[tuple[str | int | float, ...]] = []
    for subject, contenders in comparisons.items():
        for name, figures in contenders.items():
            further = [values.get(subject, {}).get(name) for values in columns.values()]
            cells = [f"{value:.1f}" if value is not None else "-" for value in further]
            rows.append((subject, name, figures.median, figures.iqr, figures.ratio, *cells))
    first, second, ratio = headers
    return format_table((first, second, f"median {unit}", f"IQR {unit}", ratio, *columns), rows)


def seconds_or(values: Sequence[float], summary: Callable[[Sequence[float]], float], otherwise: str) -> str:
    """A summary of seconds for a table, such as their median; a word where there are none."""
    return f"{summary(values):.3f}" if values else otherwise

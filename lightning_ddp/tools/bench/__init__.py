"""Benchmarks behind `python -m lightning_ddp bench`, and their class: name, options, measure, table.

Contenders take turns within one run, so that a slow minute of the machine affects all of them, and ratios are
medians of ratios that are paired by round. Each file has benchmarks, with the code that their ranks run.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning_ddp.tools import ToolError
from lightning_ddp.tools.command_line import (
    describe_machine,
    draw_bars,
    format_table,
    output_path,
    paired_ratio,
    picture_path,
    quartiles,
    save_panels,
)

Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""Values of each round, measured in turns, by subject (a model, a start) and contender."""


class Comparison(NamedTuple):
    """Median and interquartile range of a contender's rounds, with the ratio reference / contender."""

    median: float
    iqr: float
    ratio: float
    """Reference / this contender: median of ratios paired by round; below 1 if the reference is smaller."""


Comparisons = Mapping[str, Mapping[str, Comparison]]
"""Figures by subject and contender."""


def compare(samples: Mapping[str, Sequence[float]], *, reference: str) -> dict[str, Comparison]:
    """Return each contender's median, IQR and ratio reference / contender; raise if a round is missing."""
    found = {}
    for name, values in samples.items():
        first, median, third = quartiles(values)
        ratio = paired_ratio(samples[reference], values)
        found[name] = Comparison(median=median, iqr=third - first, ratio=ratio)
    return found


@dataclass(kw_only=True)
class Result:
    samples: Samples = field(default_factory=dict)
    references: Mapping[str, str] | str = ""
    """Reference contender, of all subjects or by subject."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings of the measurement, for the report."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further entries of the report's summary, and data for the table."""

    @property
    def comparisons(self) -> Comparisons:
        references = self.references
        if isinstance(references, str):
            references = dict.fromkeys(self.samples, references)
        return {name: compare(of, reference=references[name]) for name, of in self.samples.items()}


def draw_medians(result: Result, path: Path, *, unit: str, title: str) -> None:
    """Save a picture with a panel per subject (such as a model): a bar per contender, with its ratio."""

    def draw_panel(axes: Any, subject: str) -> None:
        texts = {name: f"ratio {of.ratio:.2f}" for name, of in result.comparisons[subject].items()}
        draw_bars(axes, result.samples[subject], texts, unit)

    panels = {subject: partial(draw_panel, subject=subject) for subject in result.samples}
    longest = max(map(len, result.samples.values()))
    save_panels(path, panels, title=title, height=0.9 + 0.42 * longest)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A subcommand of `bench`: its options, measurement, table and picture."""

    name: str
    summary: str
    """Sentence for `--help`."""
    unit: str
    """Unit of samples, medians and spreads."""
    options: Callable[[argparse.ArgumentParser], None]
    """Function that declares the options, besides `--json` and `--plot`."""
    measure: Callable[[argparse.Namespace], Result]
    table: Callable[[Result], str]
    draw: Callable[..., None] = draw_medians
    title: str = "medians with quartiles; the ratio is ours / contender"
    """Title of the picture."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        self.options(parser)
        for name, kind, text in (
            ("--json", output_path, "write all samples and the summary to this file"),
            ("--plot", picture_path, "draw the figures (PNG, SVG or PDF; needs matplotlib)"),
        ):
            parser.add_argument(name, type=kind, metavar="PATH", help=text)

    def run(self, args: argparse.Namespace) -> int:
        """Measure, print the table, and write the requested files; return the exit status 0."""
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
        figures = {s: {name: of._asdict() for name, of in by.items()} for s, by in result.comparisons.items()}
        return {
            "benchmark": self.name,
            "environment": describe_machine(),
            "settings": result.settings,
            "unit": self.unit,
            "summary": {"comparisons": figures, **result.extra},
            "samples": result.samples,
        }


def format_comparisons(comparisons: Comparisons, headers: tuple[str, str, str], unit: str) -> str:
    """Return a table with a row per subject and contender; `headers` name subject, contender and ratio."""
    rows = [
        (subject, name, figures.median, figures.iqr, figures.ratio)
        for subject, contenders in comparisons.items()
        for name, figures in contenders.items()
    ]
    first, second, ratio = headers
    return format_table((first, second, f"median {unit}", f"IQR {unit}", ratio), rows)

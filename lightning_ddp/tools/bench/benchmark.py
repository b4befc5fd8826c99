"""Benchmark class: a name, options, a measurement and a table; then files on request."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_ddp.tools import ToolError
from lightning_ddp.tools.arguments import output_path, picture_path
from lightning_ddp.tools.report import Comparisons, Samples, compare, draw_bars, format_table, write_report

__all__ = ["Benchmark", "Result", "format_comparisons"]


@dataclass(kw_only=True)
class Result:
    """What was measured."""

    samples: Samples = field(default_factory=dict)
    """Subject (a model, a start) -> contender -> one value per round."""
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
        return {
            subject: compare(rounds, reference=self.reference(subject))
            for subject, rounds in self.samples.items()
        }


def _draw(result: Result, path: Any, *, unit: str, title: str) -> None:
    draw_bars(result.samples, result.comparisons, path, unit=unit, title=title)


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
    draw: Callable[..., None] = _draw
    """Draws the result into a file, given unit and title."""
    title: str = "medians with quartiles; the ratio is ours / contender"
    """Of the picture."""
    joins_torchrun: bool = False
    """Whether it measures torchrun's ranks where that has started it."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        self.options(parser)
        parser.add_argument(
            "--json", type=output_path, metavar="PATH", help="write all samples and the summary to this file"
        )
        parser.add_argument(
            "--plot",
            type=picture_path,
            metavar="PATH",
            help="draw the figures (PNG, SVG or PDF; needs matplotlib)",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Measure, print the table, and write the files that were asked for.

        Returns:
            The exit status, 0.

        Raises:
            ToolError: what was asked for cannot be measured, a process fails or a deadline passes.
        """
        if not self.joins_torchrun and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            raise ToolError(
                f"bench {self.name} starts its own processes, and RANK is set: run it once, without torchrun"
            )
        result = self.measure(args)
        if result is None:
            return 0
        print(self.table(result))
        if args.json is not None:
            write_report(
                args.json,
                benchmark=self.name,
                unit=self.unit,
                settings=result.settings,
                samples=result.samples,
                comparisons=result.comparisons,
                extra=result.extra,
            )
        if args.plot is not None:
            self.draw(result, args.plot, unit=self.unit, title=f"bench {self.name}: {self.title}")
            print(f"picture: {args.plot}")
        return 0


def format_comparisons(
    comparisons: Comparisons,
    headers: tuple[str, str, str],
    unit: str,
    columns: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
) -> str:
    """Lay out a row for each subject and contender.

    Args:
        comparisons: the figures.
        headers: over the subjects, the contenders and the ratios.
        unit: of medians and spreads.
        columns: header -> subject -> contender -> a further figure; "-" where there is none.
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

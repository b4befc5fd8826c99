"""The files that a benchmark was asked for: its report as JSON and its picture."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from lightning_ddp.tools.bench.pictures import Comparisons, Samples, draw_bars
from lightning_ddp.tools.bench.report import write_report

__all__ = ["write_outputs"]


def write_outputs(
    args: argparse.Namespace,
    *,
    benchmark: str,
    unit: str,
    settings: Mapping[str, object],
    samples: Samples,
    comparisons: Comparisons,
    extra: Mapping[str, object] | None = None,
    title: str = "",
    draw: Callable[..., Any] = draw_bars,
) -> None:
    """Write the report if `--json` was given, and draw the picture if `--plot` was.

    Args:
        args: With ``json`` and ``plot``, paths or None.
        benchmark: Name of the benchmark.
        unit: Unit of samples, medians and spreads.
        settings: What was asked for.
        samples: Subject (a model, a quantity) -> contender -> one value per round.
        comparisons: Subject -> contender -> its figures.
        extra: Further entries of the report's summary.
        title: Of the picture, after the benchmark's name.
        draw: A function of `lightning_ddp.tools.bench.pictures`.

    Raises:
        ValueError: If a value is NaN or infinite, which JSON cannot hold.
    """
    if args.json is not None:
        write_report(
            args.json,
            benchmark=benchmark,
            unit=unit,
            settings=settings,
            samples=samples,
            comparisons=comparisons,
            extra=extra,
        )
    if args.plot is not None:
        draw(samples, comparisons, args.plot, unit=unit, title=f"bench {benchmark}{title and ': '}{title}")
        print(f"picture: {args.plot}")

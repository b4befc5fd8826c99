"""Shared options of the tools, and their output: tables, statistics of rounds, the progress bar, pictures."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm  # type: ignore[import-untyped]  # tqdm ships no types

from lightning_ddp.errors import one_of
from lightning_ddp.tools.models import MODEL_NAMES, MODELS_HELP


def _number(kind: type, least: float, expected: str, most: float = 1e300) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        with suppress(ValueError):
            if least <= (value := kind(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")

    return parse


positive_int = _number(int, 1, "an integer of at least 1")
positive_float = _number(float, 5e-324, "a number above 0")
seconds = _number(float, 5e-324, "seconds above 0 and at most 1e6", 1e6)


def existing_file(text: str) -> str:
    """Return the absolute path of a file to read, for argparse; raise if there is no such file."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"expected a file, got {text!r}")
    return str(Path(text).resolve())


def output_path(text: str) -> Path:
    """Return the path of a file to write, for argparse; raise if its folder is missing or it is a folder."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in an existing folder, got {text!r}")
    return path


_PACKAGES: Final = ("torch", "pytorch-lightning", "lightning", "hydra-core", "lightning_ddp")
_COUNT: Final = {"type": positive_int, "metavar": "N"}
_SHARED: Final[dict[str, tuple[tuple[str, ...], dict[str, Any]]]] = {
    "rounds": (("--rounds",), {**_COUNT, "help": "measured rounds"}),
    "world_size": (
        ("--world-size", "--devices"),
        {**_COUNT, "help": "number of processes (default: 2, or 1 with a single GPU)"},
    ),
    "timeout_s": (
        ("--timeout-s",),
        {"type": seconds, "metavar": "S", "help": "seconds after which processes are killed"},
    ),
    "device": (
        ("--device",),
        {"choices": ("cpu", "cuda"), "help": "cpu with gloo, or cuda with NCCL and one GPU per process"},
    ),
    "models": (("--models", "--model"), {"choices": MODEL_NAMES, "metavar": "MODEL", "help": MODELS_HELP}),
}
"""Names and arguments for argparse, by option."""


def add_shared(parser: Any, **defaults: Any) -> None:
    """Add the named shared options, with these defaults, to a parser; a list default takes several values."""
    for name, default in defaults.items():
        names, options = _SHARED[name]
        if isinstance(default, list):
            options = {**options, "nargs": "+"}
        if default is not None:
            shown = " ".join(map(str, default)) if isinstance(default, list) else default
            options = {**options, "help": f"{options['help'].partition(' (default')[0]} (default: {shown})"}
        parser.add_argument(*names, default=default, **options)


def add_choices(parser: Any, option: str, choices: Sequence[str], default: Sequence[str], what: str) -> None:
    """Add to a parser an option that accepts one or more of `choices`, which its help lists."""
    shown = "all" if tuple(default) == tuple(choices) else " ".join(default)
    text = f"{what}; any of: {', '.join(choices)} (default: {shown})"
    parser.add_argument(
        option, nargs="+", choices=tuple(choices), default=list(default), metavar="NAME", help=text
    )


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median over rounds of `numerator / denominator`; raise `ValueError` if a round is missing.

    Unlike the ratio of two medians, pairing by round cancels changes between rounds, such as other load.
    """
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile; a single value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, median, third = statistics.quantiles(values, method="inclusive")
    return first, median, third


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str | int | float]]) -> str:
    """Return a table of rows under headers: numbers right-aligned, floats to three decimals; text left."""
    cells = [[f"{value:.3f}" if isinstance(value, float) else str(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    numeric = [bool(rows) and not isinstance(rows[0][column], str) for column in range(len(headers))]

    def line(texts: Sequence[str]) -> str:
        columns = zip(texts, widths, numeric, strict=True)
        return "  ".join(t.rjust(width) if right else t.ljust(width) for t, width, right in columns).rstrip()

    return "\n".join(map(line, [headers, ["-" * width for width in widths], *cells]))


def describe_machine() -> dict[str, Any]:
    """Return platform, CPU cores and package versions (None if not installed) as JSON values."""
    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in versions:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    }


def progress_bar(total: int, label: str) -> tqdm[None]:
    """Return a progress bar on standard error, silent if that is no terminal."""
    return tqdm(total=total, desc=label, file=sys.stderr, disable=None, leave=False)


# ---------------------------------------------------------------------- pictures (with matplotlib)

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

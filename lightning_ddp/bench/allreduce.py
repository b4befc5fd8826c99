"""Time of an all-reduce between CPU processes: shared memory beside gloo, from small to large buckets.

A sum is started as the reducer starts that of a bucket, and waited for. Both ways take turns in each round,
on tensors that lie where each of them finds its own; ratios are paired by round. Both results are checked.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from lightning_ddp.bench.arguments import GLOO, SHARED, add_common_arguments, output_path, positive_int
from lightning_ddp.bench.report import Comparison, compare, format_table, progress_bar, write_report

CONTENDERS: Final = (SHARED, GLOO)
SIZES_KIB: Final = (4, 16, 64, 256, 1024, 4096, 16384, 65536)

RankSeconds = Mapping[str, Mapping[str, Sequence[float]]]
"""One rank's times: size -> contender -> seconds of one all-reduce, by round."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench allreduce``."""
    add_common_arguments(parser, rounds=30, timeout_s=900.0)
    parser.add_argument(
        "--sizes-kib",
        nargs="+",
        type=positive_int,
        default=list(SIZES_KIB),
        metavar="N",
        help="sizes of the tensor in KiB (default: %(default)s)",
    )
    parser.add_argument("--plot", type=output_path, metavar="PATH", help="draw the times (PNG or SVG)")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the JSON and the picture that were asked for.

    Returns:
        The exit status, 0.

    Raises:
        BenchmarkError: If a rank fails, the deadline passes, or shared memory cannot be used here.
    """
    samples = reduce_ranks(_measure(args))
    comparisons = {size: compare(rounds, reference=SHARED) for size, rounds in samples.items()}
    print(format_report(comparisons))
    if args.json is not None:
        write_report(
            args.json,
            benchmark="allreduce",
            unit="ms",
            settings={"rounds": args.rounds, "world_size": args.world_size},
            samples=samples,
            comparisons=comparisons,
        )
    if args.plot is not None:
        draw(comparisons, args.plot)
    return 0


def reduce_ranks(per_rank: Sequence[RankSeconds]) -> dict[str, dict[str, list[float]]]:
    """Turn the seconds of each rank into one figure per round: the milliseconds of the slowest rank."""
    return {
        size: {
            name: [
                1e3 * max(seconds) for seconds in zip(*(rank[size][name] for rank in per_rank), strict=True)
            ]
            for name in contenders
        }
        for size, contenders in per_rank[0].items()
    }


def format_report(comparisons: Mapping[str, Mapping[str, Comparison]]) -> str:
    """Lay out one row per size and contender, with how many times faster shared memory is."""
    rows = [
        (f"{size} KiB", name, comparison.median, comparison.iqr, 1 / comparison.ratio)
        for size, contenders in comparisons.items()
        for name, comparison in contenders.items()
    ]
    return format_table(("size", "contender", "median ms", "IQR ms", f"times of {SHARED}"), rows)


def draw(comparisons: Mapping[str, Mapping[str, Comparison]], path: Path) -> None:
    """Draw the median times against the size, both on logarithmic axes."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]  # an optional dependency

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    sizes = [int(size) for size in comparisons]
    for name in CONTENDERS:
        rows = [contenders[name] for contenders in comparisons.values()]
        axes.errorbar(
            sizes, [row.median for row in rows], yerr=[row.iqr / 2 for row in rows], marker="o", label=name
        )
    axes.set(xscale="log", yscale="log", xlabel="size (KiB)", ylabel="all-reduce (ms)")
    faster = statistics.geometric_mean(1 / contenders[GLOO].ratio for contenders in comparisons.values())
    axes.set_title(f"shared memory is {faster:.1f} times as fast as gloo (geometric mean)")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=150)


def _measure(args: argparse.Namespace) -> list[RankSeconds]:
    from lightning_ddp.bench.processes import run_ranks
    from lightning_ddp.bench.workers import AllReduceSettings, time_all_reduces

    sizes = tuple(dict.fromkeys(args.sizes_kib))
    with progress_bar(len(sizes) * args.rounds, "bench allreduce") as bar:
        return run_ranks(
            time_all_reduces,
            AllReduceSettings(sizes_kib=sizes, num_rounds=args.rounds),
            world_size=args.world_size,
            device="cpu",
            timeout_s=args.timeout_s,
            on_progress=bar.update,
        )

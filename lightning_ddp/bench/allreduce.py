"""Time of an all-reduce between CPU processes: shared memory beside gloo, from small to large buckets.

A sum is started as the reducer starts that of a bucket, and waited for. Both ways take turns in each round,
on tensors that lie where each of them finds its own; ratios are paired by round. Both results are checked.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Final

from lightning_ddp.bench.arguments import GLOO, SHARED, add_common_arguments, positive_int
from lightning_ddp.bench.outputs import write_outputs
from lightning_ddp.bench.pictures import draw_lines
from lightning_ddp.bench.report import Comparison, compare, format_table, progress_bar

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


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the files that were asked for.

    Returns:
        The exit status, 0.

    Raises:
        BenchmarkError: If a rank fails, the deadline passes, or shared memory cannot be used here.
    """
    samples = reduce_ranks(_measure(args))
    comparisons = {size: compare(rounds, reference=SHARED) for size, rounds in samples.items()}
    print(format_report(comparisons))
    write_outputs(
        args,
        benchmark="allreduce",
        unit="ms",
        settings={"rounds": args.rounds, "world_size": args.world_size},
        samples=samples,
        comparisons=comparisons,
        title=f"medians with quartiles; the ratio is {SHARED} / {GLOO}",
        draw=draw_lines,
    )
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

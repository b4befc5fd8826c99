"""Time of an all-reduce between CPU processes: shared memory beside gloo, from small to large buckets.

A sum is started as the reducer starts that of a bucket, and waited for. Both ways take turns in each round,
on tensors that lie where each of them finds its own; ratios are paired by round. Both results are checked.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from lightning_ddp.tools.bench.arguments import GLOO, SHARED, add_common_arguments, positive_int
from lightning_ddp.tools.bench.outputs import write_outputs
from lightning_ddp.tools.bench.pictures import draw_lines
from lightning_ddp.tools.bench.report import Comparison, compare, format_table

if TYPE_CHECKING:
    from lightning_ddp.tools.bench.session import Session

CONTENDERS: Final = (SHARED, GLOO)
SIZES_KIB: Final = (4, 16, 64, 256, 1024, 4096, 16384, 65536)

RankSeconds = Mapping[str, Mapping[str, Sequence[float]]]
"""One rank's times: size -> contender -> seconds of one all-reduce, by round."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench allreduce``."""
    add_common_arguments(parser, rounds=30, timeout_s=900.0, world_size=None)
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
    from lightning_ddp.tools.bench.session import open_session

    with open_session(args) as session:
        samples = reduce_ranks(_measure(args, session))
    if not session.is_first:
        return 0
    comparisons = {size: compare(rounds, reference=SHARED) for size, rounds in samples.items()}
    print(format_report(comparisons))
    write_outputs(
        args,
        benchmark="allreduce",
        unit="ms",
        settings={"rounds": args.rounds, "world_size": session.world_size},
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


def _measure(args: argparse.Namespace, session: Session) -> list[RankSeconds]:
    from lightning_ddp.tools.bench.workers import AllReduceSettings, time_all_reduces

    sizes = tuple(dict.fromkeys(args.sizes_kib))
    settings = AllReduceSettings(sizes_kib=sizes, num_rounds=args.rounds)
    with session.progress_bar(len(sizes) * args.rounds, "bench allreduce") as bar:
        return session.run(time_all_reduces, settings, bar.update)

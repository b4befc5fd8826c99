"""Peak memory of a training process: this package's BucketedDDP beside torch's with gradient views.

A process's peak covers its whole life, so every figure comes from freshly spawned ranks that train one model
under one contender. Contenders take turns; the figure of a run is that of its largest rank. On a CPU the peak
is that of the resident set size (RSS), in which memory that ranks share counts once for all of them; on CUDA
it is that of the allocator.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from lightning_ddp.tools.bench.arguments import (
    OURS,
    TORCH_VIEW,
    add_common_arguments,
    add_model_arguments,
    positive_int,
)
from lightning_ddp.tools.bench.outputs import write_outputs
from lightning_ddp.tools.bench.report import Comparison, compare, format_table

if TYPE_CHECKING:
    from lightning_ddp.tools.bench.session import Session

CONTENDERS: Final = (OURS, TORCH_VIEW)
QUANTITIES: Final = ("peak", "growth")
"""Peak of the process, and how far that lies above what was in use just before the wrapper was built."""

_MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench memory``; its deadline holds for each spawned run."""
    add_common_arguments(parser, rounds=3, timeout_s=300.0, world_size=None)
    add_model_arguments(parser)
    parser.add_argument(
        "--steps", type=positive_int, default=8, metavar="N", help="training steps (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the files that were asked for.

    Returns:
        The exit status, 0.

    Raises:
        BenchmarkError: If a rank fails or the deadline passes.
    """
    from lightning_ddp.tools.bench.session import open_session

    with open_session(args) as session:
        samples = _measure(args, session)
    if not session.is_first:
        return 0
    comparisons = {subject: compare(rounds, reference=OURS) for subject, rounds in samples.items()}
    print(format_report(comparisons))
    write_outputs(
        args,
        benchmark="memory",
        unit="MiB",
        settings={"rounds": args.rounds, "steps": args.steps, "world_size": session.world_size}
        | {"device": args.device},
        samples=samples,
        comparisons=comparisons,
        title=f"medians with quartiles; the ratio is {OURS} / contender",
    )
    return 0


def format_report(comparisons: Mapping[str, Mapping[str, Comparison]]) -> str:
    """Lay out one row per model, quantity and contender.

    Args:
        comparisons: ``"<model> <quantity>"`` -> contender -> its figures beside ours, in MiB.
    """
    rows = [
        (subject, name, comparison.median, comparison.iqr, comparison.ratio)
        for subject, contenders in comparisons.items()
        for name, comparison in contenders.items()
    ]
    return format_table(("model, quantity", "contender", "median MiB", "IQR MiB", "ours/contender"), rows)


def _measure(args: argparse.Namespace, session: Session) -> dict[str, dict[str, list[float]]]:
    from lightning_ddp.tools.bench.workers import MemorySettings, measure_memory

    models = tuple(dict.fromkeys(args.models))
    samples: dict[str, dict[str, list[float]]] = {
        f"{model} {quantity}": {name: [] for name in CONTENDERS}
        for model in models
        for quantity in QUANTITIES
    }
    with session.progress_bar(args.rounds * len(models) * len(CONTENDERS), "bench memory") as bar:
        for _ in range(args.rounds):
            for model in models:
                for name in CONTENDERS:
                    settings = MemorySettings(model=model, contender=name, num_steps=args.steps)
                    ranks = session.run(measure_memory, settings)
                    for quantity in QUANTITIES:
                        largest = max(rank[f"{quantity}_bytes"] for rank in ranks)
                        samples[f"{model} {quantity}"][name].append(largest / _MIB)
                    bar.update()
    return samples

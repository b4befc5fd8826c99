"""Time of a training step: this package's BucketedDDP beside torch's DistributedDataParallel.

On each of the spawned ranks every contender trains its own copy of the same model. Contenders take turns of a
few steps in an order that is shuffled each round; a barrier stands before each timed step. The time of a step
is that of its slowest rank, the sample of a round is the median of its steps, and ratios are paired by round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from lightning_ddp.bench.arguments import (
    OURS,
    TORCH_DEFAULT,
    TORCH_FLAGS,
    add_common_arguments,
    add_model_arguments,
    positive_int,
)
from lightning_ddp.bench.report import Comparison, compare, format_table, progress_bar, write_report

CONTENDERS: Final = (OURS, TORCH_DEFAULT, TORCH_FLAGS)
FASTEST_TORCH: Final = "fastest_torch"
"""Label of the ratio against whichever of torch's sets of flags has the lowest median on a model."""

RankSeconds = Mapping[str, Mapping[str, Sequence[Sequence[float]]]]
"""One rank's times: model -> contender -> round -> seconds of each timed step."""

Comparisons = Mapping[str, Mapping[str, Comparison]]
"""Model -> contender -> its figures beside ours, in milliseconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench step``."""
    add_common_arguments(parser, rounds=30, timeout_s=1800.0)
    add_model_arguments(parser)
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=4,
        metavar="N",
        help="timed steps of each contender in a round (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and write the JSON that was asked for.

    Returns:
        The exit status, 0.

    Raises:
        BenchmarkError: If a rank fails or the deadline passes.
    """
    from lightning_ddp.bench.contenders import constructor_flags

    samples = reduce_ranks(_measure(args))
    comparisons = {model: compare(rounds, reference=OURS) for model, rounds in samples.items()}
    flags = {name: constructor_flags(name) for name in CONTENDERS}
    print(format_report(comparisons, flags))
    if args.json is not None:
        write_report(
            args.json,
            benchmark="step",
            unit="ms",
            settings={"rounds": args.rounds, "steps": args.steps, "world_size": args.world_size}
            | {"device": args.device, "flags": flags},
            samples=samples,
            comparisons=comparisons,
            extra={"geometric_mean": geometric_means(comparisons)},
        )
    return 0


def reduce_ranks(per_rank: Sequence[RankSeconds]) -> dict[str, dict[str, list[float]]]:
    """Turn the seconds of each rank's steps into one figure per round: the median step of the slowest rank.

    Args:
        per_rank: The times of each rank; all of the same shape.

    Returns:
        Model -> contender -> milliseconds of each round.
    """
    samples: dict[str, dict[str, list[float]]] = {}
    for model, contenders in per_rank[0].items():
        samples[model] = {}
        for name in contenders:
            rounds = zip(*(seconds[model][name] for seconds in per_rank), strict=True)
            samples[model][name] = [
                1e3 * statistics.median(max(step) for step in zip(*ranks, strict=True)) for ranks in rounds
            ]
    return samples


def geometric_means(comparisons: Comparisons) -> dict[str, float]:
    """Return the geometric mean over the models of ours / contender.

    Returns:
        One entry for each of torch's contenders, and one against whichever of them has the lowest median on
        each model.
    """
    ratios: dict[str, list[float]] = {TORCH_DEFAULT: [], TORCH_FLAGS: [], FASTEST_TORCH: []}
    for contenders in comparisons.values():
        rivals = [contenders[TORCH_DEFAULT], contenders[TORCH_FLAGS]]
        fastest = min(rivals, key=lambda comparison: comparison.median)
        for name, rival in zip(ratios, [*rivals, fastest], strict=True):
            ratios[name].append(rival.ratio)
    return {name: statistics.geometric_mean(values) for name, values in ratios.items()}


def format_report(comparisons: Comparisons, flags: Mapping[str, Mapping[str, bool]]) -> str:
    """Lay out the table of all models and contenders, with the geometric means and the flags under it."""
    rows = [
        (model, name, comparison.median, comparison.iqr, comparison.ratio)
        for model, contenders in comparisons.items()
        for name, comparison in contenders.items()
    ]
    lines = [format_table(("model", "contender", "median ms", "IQR ms", "ours/contender"), rows), ""]
    for name, mean in geometric_means(comparisons).items():
        lines.append(f"geometric mean of ours/{name}: {mean:.3f}")
    for name, values in flags.items():
        described = ", ".join(f"{flag}={value}" for flag, value in values.items()) or "defaults"
        lines.append(f"{name}: {described}")
    return "\n".join(lines)


def _measure(args: argparse.Namespace) -> list[RankSeconds]:
    from lightning_ddp.bench.processes import run_ranks
    from lightning_ddp.bench.workers import StepSettings, time_steps

    models = tuple(dict.fromkeys(args.models))
    with progress_bar(len(models) * args.rounds, "bench step") as bar:
        return run_ranks(
            time_steps,
            StepSettings(models=models, contenders=CONTENDERS, num_rounds=args.rounds, num_steps=args.steps),
            world_size=args.world_size,
            device=args.device,
            timeout_s=args.timeout_s,
            on_progress=bar.update,
        )

"""Time of a training step: this package's BucketedDDP beside torch's DistributedDataParallel.

Every contender trains its own copy of the same model on ranks of its own: what a wrapper changes in its
process, such as what the C library does with freed memory, belongs to its figure. Contenders take turns of
a few steps in an order that is shuffled each round, and sleep meanwhile; a barrier stands before each timed
step. The time of a step is that of its slowest rank, the sample of a round is the median of its steps, and
ratios are paired by round. On a link (``--links``) all contenders share two processes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from lightning_ddp.tools.bench import BenchmarkError
from lightning_ddp.tools.bench.arguments import (
    BARE,
    CONTENDERS,
    OURS,
    TORCH_DEFAULT,
    TORCH_FLAGS,
    add_common_arguments,
    add_contender_argument,
    add_model_arguments,
    positive_float,
    positive_int,
)
from lightning_ddp.tools.bench.outputs import write_outputs
from lightning_ddp.tools.bench.report import Comparison, compare, format_table, progress_bar
from lightning_ddp.tools.bench.trainer_steps import STRATEGIES, TRAINER_OURS, time_trainer_steps

if TYPE_CHECKING:
    from lightning_ddp.tools.bench.session import Session
    from lightning_ddp.tools.bench.step_times import StepSettings

DEFAULT_CONTENDERS: Final = (OURS, TORCH_DEFAULT, TORCH_FLAGS)
FASTEST_TORCH: Final = "fastest_torch"
"""Label of the ratio against whichever of torch's sets of flags has the lowest median on a model."""

_NUM_TRAINER_STEPS: Final = 8  # times --steps: a script's start is long, so that it is used for more of them

RankSeconds = Mapping[str, Mapping[str, Sequence[Sequence[float]]]]
"""One rank's times: model -> contender -> round -> seconds of each timed step."""

Comparisons = Mapping[str, Mapping[str, Comparison]]
"""Model (and link, if asked for) -> contender -> its figures beside the reference's, in milliseconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench step``."""
    add_common_arguments(parser, rounds=30, timeout_s=1800.0, world_size=None)
    add_model_arguments(parser)
    add_contender_argument(parser, DEFAULT_CONTENDERS)
    parser.add_argument(
        "--links",
        nargs="+",
        type=positive_float,
        metavar="MBIT",
        help="between two network namespaces, on links of these speeds in Mbit/s (Linux, as root)",
    )
    parser.add_argument(
        "--trainer",
        type=positive_int,
        metavar="N",
        help="also N whole runs of a Trainer with each of the strategies custom_ddp and ddp, in turns",
    )
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=4,
        metavar="N",
        help="timed steps of each contender in a round (default: %(default)s)",
    )
    parser.add_argument(
        "--warmup",
        type=positive_int,
        default=5,
        metavar="N",
        help="steps of each contender before the first round (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the files that were asked for.

    Returns:
        The exit status, 0.

    Raises:
        BenchmarkError: If a rank fails, the deadline passes, or links are asked for that cannot be made.
    """
    from lightning_ddp.tools.bench.contenders import constructor_flags
    from lightning_ddp.tools.bench.session import open_session

    contenders = tuple(dict.fromkeys(args.contenders))
    reference = reference_of(contenders)
    with open_session(args) as session:
        _check(args, contenders, session)
        samples = _measure(args, contenders, session)
        trained = _measure_trainer(args, session) if args.trainer is not None else {}
    if not session.is_first:
        return 0
    comparisons = {subject: compare(rounds, reference=reference) for subject, rounds in samples.items()}
    in_trainer = {subject: compare(rounds, reference=TRAINER_OURS) for subject, rounds in trained.items()}
    flags = {name: constructor_flags(name) for name in contenders}
    print(format_report(comparisons, flags))
    means = geometric_means(comparisons)
    if in_trainer:
        print("\n" + format_trainer(in_trainer))
        means["Trainer ddp"] = trainer_mean(in_trainer)
    write_outputs(
        args,
        benchmark="step",
        unit="ms",
        settings={"rounds": args.rounds, "steps": args.steps, "warmup": args.warmup, "trainer": args.trainer}
        | {"world_size": session.world_size, "device": args.device, "links": args.links, "flags": flags},
        samples=samples | trained,
        comparisons=comparisons | in_trainer,
        extra={"geometric_mean": means},
        title="medians with quartiles; the ratio is ours / contender",
    )
    return 0


def _check(args: argparse.Namespace, contenders: Sequence[str], session: Session) -> None:
    """Raise if what was asked for does not go together."""
    is_launched = session.launch is not None
    if BARE in contenders and session.world_size > 1:
        raise BenchmarkError(f"{BARE} averages nothing: measure it with --world-size 1")
    if args.links is not None and (session.world_size != 2 or session.device != "cpu" or is_launched):
        raise BenchmarkError("--links joins two ranks on the CPU that it starts itself")
    if args.trainer is not None and (args.links is not None or is_launched):
        raise BenchmarkError(
            "--trainer starts its own scripts on this host: without --links, not by torchrun"
        )


def reference_of(contenders: Sequence[str]) -> str:
    """Return the contender that stands above the fraction line: ours, or the first if ours is left out."""
    return OURS if OURS in contenders else contenders[0]


def merge_crews(times: Sequence[RankSeconds], world_size: int) -> list[RankSeconds]:
    """Bring together what the crews have measured, each of which has trained one contender.

    Args:
        times: The times of each rank of the first crew, then those of the second one, and so on.
        world_size: Ranks of a crew.

    Returns:
        The times of each rank, of all contenders.
    """
    return [
        {
            model: {name: rounds for crew in times[rank::world_size] for name, rounds in crew[model].items()}
            for model in times[rank]
        }
        for rank in range(world_size)
    ]


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
    """Return the geometric mean over the models (and links) of reference / contender.

    Returns:
        One entry for each contender but the reference; where several are torch's, one more against whichever
        of them has the lowest median on each model.
    """
    names = list(next(iter(comparisons.values())))
    reference = reference_of(names)
    means = {
        name: statistics.geometric_mean(contenders[name].ratio for contenders in comparisons.values())
        for name in names
        if name != reference
    }
    rivals = [name for name in means if CONTENDERS[name].is_torch]
    if len(rivals) > 1:
        means[FASTEST_TORCH] = statistics.geometric_mean(
            min((contenders[name] for name in rivals), key=lambda figures: figures.median).ratio
            for contenders in comparisons.values()
        )
    return means


def format_report(comparisons: Comparisons, flags: Mapping[str, Mapping[str, object]]) -> str:
    """Lay out the table of all models and contenders, with the geometric means and the flags under it."""
    reference = reference_of(list(flags))
    rows = [
        (subject, name, comparison.median, comparison.iqr, comparison.ratio)
        for subject, contenders in comparisons.items()
        for name, comparison in contenders.items()
    ]
    lines = [format_table(("model", "contender", "median ms", "IQR ms", f"{reference}/contender"), rows), ""]
    for name, mean in geometric_means(comparisons).items():
        lines.append(f"geometric mean of {reference}/{name}: {mean:.3f}")
    for name, values in flags.items():
        described = ", ".join(f"{flag}={value}" for flag, value in values.items()) or "defaults"
        lines.append(f"{name}: {described}")
    return "\n".join(lines)


def trainer_mean(comparisons: Comparisons) -> float:
    """Return the geometric mean over the models of custom_ddp / ddp inside a Trainer."""
    return statistics.geometric_mean(contenders["ddp"].ratio for contenders in comparisons.values())


def format_trainer(comparisons: Comparisons) -> str:
    """Lay out the table of the strategies, with the geometric mean under it."""
    rows = [
        (subject, name, comparison.median, comparison.iqr, comparison.ratio)
        for subject, contenders in comparisons.items()
        for name, comparison in contenders.items()
    ]
    table = format_table(("model", "strategy", "median ms", "IQR ms", f"{TRAINER_OURS}/strategy"), rows)
    return f"{table}\n\ngeometric mean of {TRAINER_OURS}/ddp: {trainer_mean(comparisons):.3f}"


def _measure(
    args: argparse.Namespace, contenders: tuple[str, ...], session: Session
) -> dict[str, dict[str, list[float]]]:
    from lightning_ddp.tools.bench.step_times import StepSettings, time_steps

    models = tuple(dict.fromkeys(args.models))
    settings = StepSettings(
        models=models,
        contenders=contenders,
        num_rounds=args.rounds,
        num_steps=args.steps,
        num_warmup_steps=args.warmup,
    )
    if args.links is not None:
        return _measure_links(args, settings)
    with session.progress_bar(len(models) * args.rounds, "bench step") as bar:
        times = session.run(time_steps, settings, bar.update, num_crews=len(contenders))
    return reduce_ranks(merge_crews(times, session.world_size))


def _measure_links(args: argparse.Namespace, settings: StepSettings) -> dict[str, dict[str, list[float]]]:
    from lightning_ddp.tools.bench.linked_steps import time_linked_steps

    samples: dict[str, dict[str, list[float]]] = {}
    links = tuple(dict.fromkeys(args.links))
    with progress_bar(len(links) * len(settings.models) * args.rounds, "bench step") as bar:
        for mbit in links:
            per_rank = time_linked_steps(
                settings, mbit=mbit, timeout_s=args.timeout_s, on_progress=bar.update
            )
            for model, rounds in reduce_ranks(per_rank).items():
                samples[f"{model}, {mbit:g} Mbit/s"] = rounds
    return samples


def _measure_trainer(args: argparse.Namespace, session: Session) -> dict[str, dict[str, list[float]]]:
    models = tuple(dict.fromkeys(args.models))
    with session.progress_bar(args.trainer * len(models) * len(STRATEGIES), "bench step --trainer") as bar:
        return time_trainer_steps(
            models,
            num_rounds=args.trainer,
            num_warmup_steps=args.warmup,
            num_steps=_NUM_TRAINER_STEPS * args.steps,
            world_size=session.world_size,
            device=session.device,
            timeout_s=args.timeout_s,
            advance=bar.update,
        )

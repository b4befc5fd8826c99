"""Time of a training step: this package's BucketedDDP beside torch's DistributedDataParallel.

Every contender trains its own copy of the same model in separate processes, because changes of a wrapper in
its process, such as the C library's handling of freed memory, are part of its result. Contenders take turns
of a few steps in an order that is shuffled each round, and sleep otherwise; a barrier precedes each timed
step. The time of a step is that of its slowest rank, the sample of a round is the median of its steps, and
ratios are paired by round.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lightning_ddp.tools.bench import Benchmark, Comparisons, Result, format_comparisons
from lightning_ddp.tools.command_line import add_choices, add_shared, positive_int, progress_bar
from lightning_ddp.tools.models import (
    CONTENDERS,
    MODEL_NAMES,
    OURS,
    TORCH_DEFAULT,
    TORCH_FLAGS,
    TrainingRun,
    build_workload,
    constructor_flags,
    is_torch,
)
from lightning_ddp.tools.ranks import RankContext, RoundRobin, run_ranks, shuffled, timed

DEFAULT_CONTENDERS: Final = (OURS, TORCH_DEFAULT, TORCH_FLAGS)
FASTEST_TORCH: Final = "fastest_torch"
"""Label of the ratio against torch's set of flags with the lowest median on each model."""

_CONTENDERS_HELP: Final = (
    "wrappers (ours_gloo: transport='gloo', view: gradient_as_bucket_view, flags: also static_graph and"
    " batched_grad_copy)"
)
_TOLERANCE: Final = 1e-3  # relative; rounding stays far below, no communication is 5 to 1000 times above
_MOST_COMPARED: Final = 8192


def _options(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, rounds=30, world_size=None, timeout_s=1800.0, models=list(MODEL_NAMES), device="cpu")
    add_choices(parser, "--contenders", tuple(CONTENDERS), DEFAULT_CONTENDERS, _CONTENDERS_HELP)
    for name, default, text in (
        ("--steps", 4, "timed steps of each contender in a round (default: %(default)s)"),
        ("--warmup", 5, "steps of each contender before the first round (default: %(default)s)"),
    ):
        parser.add_argument(name, type=positive_int, default=default, metavar="N", help=text)


class StepSettings(NamedTuple):
    """Settings of `time_steps`: models, contenders, numbers of rounds, timed steps and warm-up steps."""

    models: tuple[str, ...]
    contenders: tuple[str, ...]
    num_rounds: int
    num_steps: int
    """Timed steps of each contender in a round."""
    num_warmup_steps: int


def _measure(args: argparse.Namespace) -> Result:
    settings = StepSettings(
        models=tuple(dict.fromkeys(args.models)),
        contenders=tuple(dict.fromkeys(args.contenders)),
        num_rounds=args.rounds,
        num_steps=args.steps,
        num_warmup_steps=args.warmup,
    )
    most = max(1, torch.cuda.device_count()) if args.device == "cuda" else 2
    world_size = args.world_size or min(2, most)
    options = {"world_size": world_size, "device": args.device, "timeout_s": args.timeout_s}
    with progress_bar(len(settings.models) * settings.num_rounds, "bench step") as bar:
        found = run_ranks(
            time_steps, settings, num_replicas=len(settings.contenders), on_progress=bar.update, **options
        )
    result = Result(
        samples=reduce_ranks(found, settings),
        references=reference_of(settings.contenders),
        settings={name: getattr(args, name) for name in ("rounds", "steps", "warmup", "device")}
        | {"world_size": world_size}
        | {"flags": {name: constructor_flags(name) for name in settings.contenders}},
    )
    result.extra["geometric_mean"] = geometric_means(result.comparisons)
    return result


RankSeconds = Mapping[str, Mapping[str, Sequence[Sequence[float]]]]
"""Seconds of each timed step of one process, by model, contender and round."""


def reduce_ranks(found: Sequence[RankSeconds], settings: StepSettings) -> dict[str, dict[str, list[float]]]:
    """Return the median milliseconds of the slowest rank's steps in each round, by model and contender."""

    def milliseconds(model: str, name: str) -> list[float]:
        ranks = [seconds[model][name] for seconds in found if name in seconds[model]]
        return [
            1e3 * statistics.median(max(step) for step in zip(*of_round, strict=True))
            for of_round in zip(*ranks, strict=True)
        ]

    return {m: {name: milliseconds(m, name) for name in settings.contenders} for m in settings.models}


def reference_of(contenders: Sequence[str]) -> str:
    """Return the name of the contender to compare others to: this package's, or else the first."""
    return OURS if OURS in contenders else contenders[0]


def geometric_means(comparisons: Comparisons) -> dict[str, float]:
    """Return the geometric mean over models of the ratio reference / contender, by contender."""
    rows, mean = list(comparisons.values()), statistics.geometric_mean
    reference = reference_of(list(rows[0]))
    means = {name: mean(row[name].ratio for row in rows) for name in rows[0] if name != reference}
    rivals = [name for name in means if is_torch(name)]
    if len(rivals) > 1:
        fastest = (min((row[name] for name in rivals), key=lambda figures: figures.median) for row in rows)
        means[FASTEST_TORCH] = mean(figures.ratio for figures in fastest)
    return means


def format_report(result: Result) -> str:
    """Return the report: a table of all models and contenders, then geometric means and flags."""
    flags: Any = result.settings["flags"]
    reference = reference_of(list(flags))
    headers = ("model", "contender", f"{reference}/contender")
    lines = [format_comparisons(result.comparisons, headers, "ms"), ""]
    for name, mean in result.extra["geometric_mean"].items():
        lines.append(f"geometric mean of {reference}/{name}: {mean:.3f}")
    for name, values in flags.items():
        described = ", ".join(f"{flag}={value}" for flag, value in values.items()) or "defaults"
        lines.append(f"{name}: {described}")
    return "\n".join(lines)


# ---------------------------------------------------------------------- code of the ranks


def time_steps(context: RankContext, settings: StepSettings) -> RankSeconds:
    """Time training steps of all contenders on each model, in turns; return the seconds of each step.

    With as many replicas as contenders, each replica trains one contender; a single replica trains all.

    Collective: all ranks must call it.
    """
    turns = RoundRobin(context.store, context.world_size)
    is_alone = context.num_replicas > 1
    mine = (settings.contenders[context.replica],) if is_alone else settings.contenders
    return {model: _time_model(context, settings, model, mine, turns) for model in settings.models}


def _time_model(
    context: RankContext, settings: StepSettings, model: str, mine: Sequence[str], turns: RoundRobin
) -> dict[str, list[list[float]]]:
    gc.collect()  # frees the previous model
    runs: dict[str, TrainingRun] = {}
    for name in turns.of(settings.contenders, mine):
        runs[name] = TrainingRun(name, build_workload(model, rank=context.rank), context.device)
        for _ in range(settings.num_warmup_steps):
            runs[name].step()
    seconds: dict[str, list[list[float]]] = {name: [] for name in mine}
    for round_index in range(settings.num_rounds):
        for name in turns.of(shuffled(settings.contenders, seed=round_index), mine):
            runs[name].step()  # loads this contender's weights into the caches
            seconds[name].append([timed(runs[name].step, context.device) for _ in range(settings.num_steps)])
        if context.replica == 0:
            context.advance()
    # all contenders have to compute the same
    reference = TORCH_DEFAULT if TORCH_DEFAULT in settings.contenders else settings.contenders[0]
    key = f"state/{model}/{context.rank}"
    for name in turns.of(sorted(settings.contenders, key=lambda name: name != reference), mine):
        state = runs[name].state_after_one_step(build_workload(model, rank=context.rank))
        found = {kind: _some(values) for kind, values in state.items()}
        if name == reference:
            context.store.set(key, json.dumps({kind: v.tolist() for kind, v in found.items()}))
        else:
            expected = json.loads(context.store.get(key))
            check_agreement(name, found, reference, {k: torch.tensor(v) for k, v in expected.items()})
    return seconds


def _some(values: Tensor) -> Tensor:
    """Return a fixed random sample of a tensor's elements, on the CPU; all if they are few."""
    if values.numel() <= _MOST_COMPARED:
        return values.cpu()
    generator = torch.Generator().manual_seed(values.numel())
    return values.cpu()[torch.randint(values.numel(), (_MOST_COMPARED,), generator=generator)]


def check_agreement(
    name: str, found: Mapping[str, Tensor], reference: str, expected: Mapping[str, Tensor]
) -> None:
    """Raise if two contenders compute different results in one step from the same weights.

    Otherwise a wrapper without communication would be the fastest.
    """
    for kind, values in found.items():
        error = ((values - expected[kind]).norm() / expected[kind].norm()).item()
        if not error <= _TOLERANCE:
            raise RuntimeError(
                f"the {kind} of {name} differ from those of {reference} by a relative {error:g} (at most"
                f" {_TOLERANCE:g} expected), so its times are not comparable"
            )


STEP: Final = Benchmark(
    name="step",
    summary="Time of a training step, beside torch's DistributedDataParallel.",
    unit="ms",
    options=_options,
    measure=_measure,
    table=format_report,
)

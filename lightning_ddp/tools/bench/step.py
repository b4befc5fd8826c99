"""Time of a training step: `bench step` beside torch's DistributedDataParallel, `bench hooks` on slow links.

Every contender of `step` trains its own copy of the same model in separate processes, because changes of a
wrapper in its process, such as the C library's handling of freed memory, are part of its result. Contenders
take turns of a few steps in an order that is shuffled each round, and sleep otherwise; a barrier precedes
each timed step. The time of a step is that of its slowest rank, the sample of a round is the median of its
steps, and ratios are paired by round.

The contenders of `hooks` take turns in two processes, on links of given speeds between two network
namespaces, with a step of the model with 67 MB of gradients; bytes are counted by the hook and by the kernel.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp.comm.group import Group
from lightning_ddp.hooks import StatefulHook, build_hook
from lightning_ddp.tools.bench import Benchmark, Comparisons, Result, format_comparisons
from lightning_ddp.tools.command_line import (
    add_choices,
    add_shared,
    format_table,
    positive_float,
    positive_int,
    progress_bar,
)
from lightning_ddp.tools.models import (
    CONTENDERS,
    MODEL_NAMES,
    OURS,
    OURS_GLOO,
    TORCH_DEFAULT,
    TORCH_FLAGS,
    TrainingRun,
    build_workload,
    constructor_flags,
    is_torch,
)
from lightning_ddp.tools.ranks import RankContext, RoundRobin, read_sent_bytes, run_ranks, shuffled, timed

DEFAULT_CONTENDERS: Final = (OURS, TORCH_DEFAULT, TORCH_FLAGS)
FASTEST_TORCH: Final = "fastest_torch"
"""Label of the ratio against torch's set of flags with the lowest median on each model."""

_CONTENDERS_HELP: Final = (
    "wrappers (ours_gloo: transport='gloo', view: gradient_as_bucket_view, flags: also static_graph and"
    " batched_grad_copy)"
)
_TOLERANCE: Final = 1e-3  # relative; rounding stays far below, no communication is 5 to 1000 times above
_NUM_COMPARED: Final = 8192


def _options(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, rounds=30, world_size=None, timeout_s=1800.0, models=list(MODEL_NAMES), device="cpu")
    add_choices(parser, "--contenders", tuple(CONTENDERS), DEFAULT_CONTENDERS, _CONTENDERS_HELP)
    for name, default, text in (
        ("--steps", 4, "timed steps of each contender in a round (default: %(default)s)"),
        ("--warmup", 5, "steps of each contender before the first round (default: %(default)s)"),
    ):
        parser.add_argument(name, type=positive_int, default=default, metavar="N", help=text)


def _measure(args: argparse.Namespace) -> Result:
    models, contenders = tuple(dict.fromkeys(args.models)), tuple(dict.fromkeys(args.contenders))
    most = max(1, torch.cuda.device_count()) if args.device == "cuda" else 2
    world_size = args.world_size or min(2, most)
    options: dict[str, Any] = {"world_size": world_size, "device": args.device, "timeout_s": args.timeout_s}
    counts = args.rounds, args.steps, args.warmup
    with progress_bar(len(models) * args.rounds, "bench step") as bar:
        options |= {"num_replicas": len(contenders), "on_progress": bar.update}
        found = run_ranks(time_steps, models, contenders, *counts, **options)
    result = Result(
        samples=reduce_ranks(found),
        references=reference_of(contenders),
        settings={name: getattr(args, name) for name in ("rounds", "steps", "warmup", "device")}
        | {"world_size": world_size}
        | {"flags": {name: constructor_flags(name) for name in contenders}},
    )
    result.extra["geometric_mean"] = geometric_means(result.comparisons)
    return result


RankSeconds = Mapping[str, Mapping[str, Sequence[Sequence[float]]]]
"""Seconds of each timed step of one process, by model, contender and round."""


def reduce_ranks(found: Sequence[RankSeconds]) -> dict[str, dict[str, list[float]]]:
    """Return the median milliseconds of the slowest rank's steps in each round, by model and contender."""

    def milliseconds(model: str, name: str) -> list[float]:
        ranks = [seconds[model][name] for seconds in found if name in seconds[model]]
        return [
            1e3 * statistics.median(max(step) for step in zip(*of_round, strict=True))
            for of_round in zip(*ranks, strict=True)
        ]

    contenders = dict.fromkeys(name for seconds in found for of in seconds.values() for name in of)
    return {model: {name: milliseconds(model, name) for name in contenders} for model in found[0]}


def reference_of(contenders: Sequence[str]) -> str:
    """Return the name of the contender to compare others to: this package's, or else the first."""
    return OURS if OURS in contenders else contenders[0]


def geometric_means(comparisons: Comparisons) -> dict[str, float]:
    """Return geometric means over models of reference / contender, by contender, and for torch's fastest."""
    rows, mean = list(comparisons.values()), statistics.geometric_mean
    reference = reference_of(list(rows[0]))
    means = {name: mean(row[name].ratio for row in rows) for name in rows[0] if name != reference}
    rivals = [name for name in means if is_torch(name)]
    if len(rivals) > 1:
        fastest = (min((row[name] for name in rivals), key=lambda figures: figures.median) for row in rows)
        means[FASTEST_TORCH] = mean(figures.ratio for figures in fastest)
    return means


def format_report(result: Result) -> str:
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


def time_steps(
    context: RankContext,
    models: Sequence[str],
    contenders: Sequence[str],
    num_rounds: int,
    num_steps: int,
    num_warmup_steps: int,
) -> RankSeconds:
    """Time steps of this process's wrapper by model, in turns, and check its gradients; return all seconds.

    Collective: all ranks must call it.
    """
    turns, mine = RoundRobin(context.store, context.world_size), contenders[context.replica]
    seconds: dict[str, dict[str, list[list[float]]]] = {}
    for model in models:
        with turns.turn(contenders, mine):
            run = TrainingRun(mine, build_workload(model, rank=context.rank), context.device)
            for _ in range(num_warmup_steps):
                run.step()
        seconds[model] = {mine: []}
        for round_index in range(num_rounds):
            with turns.turn(shuffled(contenders, seed=round_index), mine):
                run.step()  # loads this contender's weights into the caches
                seconds[model][mine].append([timed(run.step, context.device) for _ in range(num_steps)])
            if context.replica == 0:
                context.advance()
        # all contenders have to compute the same
        reference = TORCH_DEFAULT if TORCH_DEFAULT in contenders else contenders[0]
        key = f"state/{model}/{context.rank}"
        with turns.turn(sorted(contenders, key=lambda name: name != reference), mine):
            found = _some(run.gradients_from(build_workload(model, rank=context.rank)))
            if mine == reference:
                context.store.set(key, json.dumps(found.tolist()))
            else:
                check_agreement(mine, found, reference, torch.tensor(json.loads(context.store.get(key))))
        del run  # before the next model
        gc.collect()
    return seconds


def _some(values: Tensor) -> Tensor:
    """Return a fixed random sample of a tensor's elements."""
    generator = torch.Generator().manual_seed(values.numel())
    return values[torch.randint(values.numel(), (_NUM_COMPARED,), generator=generator)]


def check_agreement(name: str, found: Tensor, reference: str, expected: Tensor) -> None:
    """Raise if `found` and `expected`, gradients of one step from the same weights, differ too much.

    Otherwise a wrapper without communication would be the fastest.
    """
    error = ((found - expected).norm() / expected.norm()).item()
    if not error <= _TOLERANCE:
        raise RuntimeError(
            f"the gradients of {name} differ from those of {reference} by a relative {error:g} (at most"
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


# ---------------------------------------------------------------------- hooks on slow links

NONE: Final = "none"
HOOK_SPECS: Final[Mapping[str, Any]] = {
    NONE: None,
    TORCH_DEFAULT: None,
    "bf16": "bf16",
    "int8": "int8",
    "powersgd": "powersgd",
    "topk_1pc": {"name": "topk", "ratio": 0.01},
    "sign": "sign",
}
"""Specifications of the hooks to time on links, by contender; None for a wrapper without a hook."""

_MODEL: Final = "linear16"
_NUM_WARMUP_STEPS: Final = 3  # buckets are rebuilt after the first, and low-rank factors settle
_SETTLED_STEP: Final = 10**9  # after the warm-up of every hook
_FIGURES: Final = {
    "MB by kernel": ("kernel_bytes", 1e-6),
    "MB by hook": ("counted_bytes", 1e-6),
    "codec ms": ("codec_seconds", 1e3),
}
"""Keys of figures of a step, and the factors of their units, by column."""

Rows = Mapping[str, Sequence[Mapping[str, float]]]
"""Figures of each round, by contender."""


def _hook_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--links",
        nargs="+",
        type=positive_float,
        default=[100.0, 1000.0],
        metavar="MBIT",
        help="link speeds in Mbit/s, which need root (default: 100 1000)",
    )
    add_shared(parser, rounds=5, timeout_s=7200.0)


def _measure_hooks(args: argparse.Namespace) -> Result:
    links, samples = {}, {}
    for mbit in args.links:
        link = f"{_MODEL}, {mbit:g} Mbit/s"
        options = {"world_size": 2, "timeout_s": args.timeout_s, "mbit": mbit}
        links[link] = merge_ranks(run_ranks(time_hooks, _MODEL, HOOK_SPECS, args.rounds, **options))
        samples[link] = {name: [1e3 * row["seconds"] for row in of] for name, of in links[link].items()}
    given = {"rounds": args.rounds, "links": args.links}
    return Result(samples=samples, references=NONE, settings=given, extra={"links": links})


def merge_ranks(per_rank: Sequence[Rows]) -> dict[str, list[dict[str, float]]]:
    """Return, for each contender, round and figure, the largest value of the ranks."""
    return {
        name: [
            {key: max(row[key] for row in rows) for key in rows[0]}
            for rows in zip(*(ranks[name] for ranks in per_rank), strict=True)
        ]
        for name in per_rank[0]
    }


def median(rows: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def format_links(result: Result) -> str:
    parts = []
    for link, comparisons in result.comparisons.items():
        table: list[tuple[str | float, ...]] = []
        for name, of in comparisons.items():
            rows = result.extra["links"][link][name]
            figures = (factor * median(rows, key) for key, factor in _FIGURES.values())
            table.append((name, of.median, of.ratio, *figures))
        headers = ("contender", "step ms", "speed-up", *_FIGURES)
        parts.append(f"two ranks, {link} in each direction\n{format_table(headers, table)}")
    return "\n\n".join(parts)


def time_hooks(
    context: RankContext, model: str, hooks: Mapping[str, Any], num_rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Time steps with each hook, in turns, without shared memory; return this rank's figures of each round.

    They are seconds, bytes counted by the kernel (0 without a shaped link) and by the hook, codec seconds.
    Collective: all ranks must call it.
    """
    runs: dict[str, tuple[TrainingRun, Any]] = {}
    for name, spec in hooks.items():
        wrapper = TORCH_DEFAULT if name == TORCH_DEFAULT else OURS_GLOO
        run = TrainingRun(wrapper, build_workload(model, rank=context.rank), context.device)
        hook = None
        if spec is not None:
            hook = build_hook(spec, Group(dist.group.WORLD, transport="gloo"), context.device)
            if isinstance(hook, StatefulHook):
                hook.step = _SETTLED_STEP
            run.wrapped.register_comm_hook(None, hook)
        for _ in range(_NUM_WARMUP_STEPS):
            run.step()
        runs[name] = run, hook

    def counts(hook: Any) -> dict[str, float]:
        return {
            "kernel_bytes": read_sent_bytes() or 0,
            "counted_bytes": hook.channel.num_bytes_sent if hook else 0,
            "codec_seconds": hook.channel.busy_s - hook.channel.wait_s if hook else 0.0,
        }

    rows: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for number in range(num_rounds):
        for name in shuffled(list(runs), seed=number):
            run, hook = runs[name]
            before = counts(hook)
            seconds = timed(run.step, context.device)
            dist.barrier()  # after it the peer has received all bytes that are counted here
            changes = {key: value - before[key] for key, value in counts(hook).items()}
            rows[name].append({"seconds": seconds, **changes})
    return rows


HOOKS: Final = Benchmark(
    name="hooks",
    summary="Bytes sent by hooks, and time of steps on slow links.",
    unit="ms",
    options=_hook_options,
    measure=_measure_hooks,
    table=format_links,
    title="a step; the ratio is that without a hook / contender",
)

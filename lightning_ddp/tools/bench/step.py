"""Time and peak memory of a training step: this package's BucketedDDP beside torch's DistributedDataParallel.

Every contender trains its own copy of the same model in separate processes, because changes of a wrapper in
its process, such as the C library's handling of freed memory, are part of its result. Contenders take turns
of a few steps in an order that is shuffled each round, and sleep otherwise; a barrier precedes each timed
step. The time of a step is that of its slowest rank, the sample of a round is the median of its steps, and
ratios are paired by round. The peak is that of the largest rank: on a CPU of its resident memory, in which
memory shared by ranks counts once for all of them; on CUDA that of the allocator. On a link (`--links`) all
contenders share two processes, so memory is not measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import resource
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp.tools import ToolError
from lightning_ddp.tools.bench import Benchmark, Comparisons, Result, format_comparisons
from lightning_ddp.tools.command_line import (
    add_choices,
    add_shared,
    positive_float,
    positive_int,
    progress_bar,
)
from lightning_ddp.tools.models import (
    BARE,
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
from lightning_ddp.tools.ranks import (
    RankContext,
    RoundRobin,
    TorchrunRank,
    run_ranks,
    shuffled,
    timed,
    torchrun_rank,
)
from lightning_ddp.tools.scripts import STRATEGIES, TRAINING, compiled_package, started

DEFAULT_CONTENDERS: Final = (OURS, TORCH_DEFAULT, TORCH_FLAGS)
FASTEST_TORCH: Final = "fastest_torch"
"""Label of the ratio against torch's set of flags with the lowest median on each model."""
TRAINER_OURS: Final = STRATEGIES[0]
SCRIPT = TRAINING
"""Script that is started for each turn of a Trainer."""

_NUM_TRAINER_STEPS: Final = 8  # times --steps: a script's start is long, so that it is used for more of them
_CONTENDERS_HELP: Final = (
    "wrappers (ours_gloo: transport='gloo', view: gradient_as_bucket_view, flags: also static_graph and"
    " batched_grad_copy, bare: no wrapper)"
)
_TOLERANCE: Final = 1e-3  # relative; rounding stays far below, no communication is 5 to 1000 times above
_MOST_COMPARED: Final = 8192
_MIB: Final = 2**20


def _options(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, rounds=30, world_size=None, timeout_s=1800.0, models=list(MODEL_NAMES), device="cpu")
    add_choices(parser, "--contenders", tuple(CONTENDERS), DEFAULT_CONTENDERS, _CONTENDERS_HELP)
    parser.add_argument(
        "--links",
        nargs="+",
        type=positive_float,
        metavar="MBIT",
        help="measure between two network namespaces, on links of these speeds in Mbit/s (Linux, as root)",
    )
    for name, default_n, text in (
        (
            "--trainer",
            None,
            "also measure N whole runs of a Trainer with each of the strategies custom_ddp and ddp",
        ),
        ("--steps", 4, "timed steps of each contender in a round (default: %(default)s)"),
        ("--warmup", 5, "steps of each contender before the first round (default: %(default)s)"),
    ):
        parser.add_argument(name, type=positive_int, default=default_n, metavar="N", help=text)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings of `time_steps`, which measures one model after the other in rounds of turns."""

    models: tuple[str, ...]
    contenders: tuple[str, ...]
    num_rounds: int
    num_steps: int
    """Timed steps of each contender in a round."""
    num_warmup_steps: int
    """Steps of each contender before the first round; torch rebuilds its buckets after the first of them."""


def _measure(args: argparse.Namespace) -> Result | None:
    settings = StepSettings(
        models=tuple(dict.fromkeys(args.models)),
        contenders=tuple(dict.fromkeys(args.contenders)),
        num_rounds=args.rounds,
        num_steps=args.steps,
        num_warmup_steps=args.warmup,
    )
    with torchrun_rank(args) as torchrun:
        world_size = torchrun.world_size if torchrun is not None else default_world_size(args)
        _check(args, settings, world_size, is_launched=torchrun is not None)
        samples, peaks = _measure_steps(args, settings, world_size, torchrun)
        trained = _measure_trainer(args, settings, world_size) if args.trainer is not None else {}
    if torchrun is not None and torchrun.rank > 0:
        return None
    names = ("rounds", "steps", "warmup", "trainer", "device", "links")
    flags = {name: constructor_flags(name) for name in settings.contenders}
    result = Result(
        samples=samples | trained,
        references=dict.fromkeys(samples, reference_of(settings.contenders))
        | dict.fromkeys(trained, TRAINER_OURS),
        settings={name: getattr(args, name) for name in names} | {"world_size": world_size, "flags": flags},
    )
    means = geometric_means({subject: result.comparisons[subject] for subject in samples})
    if trained:
        in_trainer = [result.comparisons[subject]["ddp"].ratio for subject in trained]
        means["Trainer ddp"] = statistics.geometric_mean(in_trainer)
    result.extra |= {"peak_mib": peaks, "geometric_mean": means}
    return result


def default_world_size(args: argparse.Namespace) -> int:
    """Return the requested number of ranks; by default 2, but at most as many as GPUs on CUDA."""
    if args.world_size is not None:
        return int(args.world_size)
    return max(1, min(2, torch.cuda.device_count())) if args.device == "cuda" else 2


def _check(args: argparse.Namespace, settings: StepSettings, world_size: int, *, is_launched: bool) -> None:
    """Refuse options that cannot be combined."""
    if BARE in settings.contenders and world_size > 1:
        raise ToolError(f"{BARE} averages nothing. Measure it with --world-size 1")
    if args.links is not None and (world_size != 2 or args.device != "cpu" or is_launched):
        raise ToolError("--links needs two ranks on the CPU that the command starts itself")
    if args.trainer is not None and (args.links is not None or is_launched):
        raise ToolError(
            "--trainer starts its own scripts on this host. Use it without --links and without torchrun"
        )


def _measure_steps(
    args: argparse.Namespace, settings: StepSettings, world_size: int, torchrun: TorchrunRank | None
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, float]]]:
    """Return milliseconds of each round, and peak MiB, both by model and contender."""
    links = tuple(dict.fromkeys(args.links or [None]))
    samples: dict[str, dict[str, list[float]]] = {}
    peaks: dict[str, dict[str, float]] = {}
    is_shown = torchrun is None or torchrun.rank == 0
    total = len(links) * len(settings.models) * settings.num_rounds
    with progress_bar(total, "bench step", is_shown=is_shown) as bar:
        for mbit in links:
            found = run_ranks(
                time_steps,
                settings,
                world_size=world_size,
                device=args.device,
                timeout_s=args.timeout_s,
                num_replicas=len(settings.contenders) if mbit is None else 1,
                on_progress=bar.update,
                torchrun=torchrun,
                mbit=mbit,
            )
            for model, rounds in reduce_ranks([rank["seconds"] for rank in found], settings).items():
                samples[model if mbit is None else f"{model}, {mbit:g} Mbit/s"] = rounds
            for rank in found:
                for model, contenders in rank["peak_bytes"].items():
                    for name, peak in contenders.items():
                        row = peaks.setdefault(model, {})
                        row[name] = max(row.get(name, 0.0), peak / _MIB)
    return samples, peaks


RankSeconds = Mapping[str, Mapping[str, Sequence[Sequence[float]]]]
"""Seconds of each timed step of one process, by model, contender and round."""


def reduce_ranks(found: Sequence[RankSeconds], settings: StepSettings) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds of each round by model and contender: median step of the slowest rank.

    `found` has the seconds of all processes, each of which has timed some contenders.
    """

    def milliseconds(model: str, name: str) -> list[float]:
        ranks = [seconds[model][name] for seconds in found if name in seconds[model]]
        return [
            1e3 * statistics.median(max(step) for step in zip(*of_round, strict=True))
            for of_round in zip(*ranks, strict=True)
        ]

    return {m: {name: milliseconds(m, name) for name in settings.contenders} for m in settings.models}


def reference_of(contenders: Sequence[str]) -> str:
    """Return the reference contender: this package's, or the first if that is left out."""
    return OURS if OURS in contenders else contenders[0]


def geometric_means(comparisons: Comparisons) -> dict[str, float]:
    """Return geometric means over models (and links) of reference / contender, by contender.

    With several contenders of torch, `FASTEST_TORCH` is the one with the lowest median on each model.
    """
    names = list(next(iter(comparisons.values())))
    reference = reference_of(names)
    rows, mean = list(comparisons.values()), statistics.geometric_mean
    means = {name: mean(row[name].ratio for row in rows) for name in names if name != reference}
    rivals = [name for name in means if is_torch(name)]
    if len(rivals) > 1:
        fastest = (min((row[name] for name in rivals), key=lambda figures: figures.median) for row in rows)
        means[FASTEST_TORCH] = mean(figures.ratio for figures in fastest)
    return means


def format_report(result: Result) -> str:
    """Format the table of all models and contenders, followed by geometric means and flags."""
    flags: Any = result.settings["flags"]
    means = dict(result.extra["geometric_mean"])
    reference = reference_of(list(flags))
    rows = result.comparisons
    in_trainer = {s: row for s, row in rows.items() if result.reference(s) == TRAINER_OURS}
    steps = {s: row for s, row in rows.items() if s not in in_trainer}
    columns = {"peak MiB": result.extra["peak_mib"]}
    trainer_mean = means.pop("Trainer ddp", None)
    lines = [format_comparisons(steps, ("model", "contender", f"{reference}/contender"), "ms", columns), ""]
    lines += [f"geometric mean of {reference}/{name}: {mean:.3f}" for name, mean in means.items()]
    for name, values in flags.items():
        described = ", ".join(f"{flag}={value}" for flag, value in values.items()) or "defaults"
        lines.append(f"{name}: {described}")
    if in_trainer:
        headers = ("model", "strategy", f"{TRAINER_OURS}/strategy")
        lines += ["", format_comparisons(in_trainer, headers, "ms"), ""]
        lines.append(f"geometric mean of {TRAINER_OURS}/ddp: {trainer_mean:.3f}")
    return "\n".join(lines)


# ---------------------------------------------------------------------- code of the ranks


def time_steps(context: RankContext, settings: StepSettings) -> dict[str, Any]:
    """Time the training steps of all contenders on each model, in turns.

    With as many replicas as contenders, each replica trains one contender; a single replica trains all.
    Returns "seconds", of each timed step on this rank, by model, contender of this replica and round; and
    "peak_bytes", the peak of memory, by model and contender, if the process has one contender.

    Collective: all ranks must call it.
    """
    turns = RoundRobin(context.store, context.world_size)
    is_alone = context.num_replicas > 1 or len(settings.contenders) == 1
    mine = (settings.contenders[context.replica],) if is_alone else settings.contenders
    found: dict[str, Any] = {"seconds": {}, "peak_bytes": {}}
    for model in settings.models:
        found["seconds"][model], peak = _time_model(context, settings, model, mine, turns)
        if is_alone:
            found["peak_bytes"][model] = {mine[0]: peak}
    return found


def _time_model(
    context: RankContext, settings: StepSettings, model: str, mine: Sequence[str], turns: Any
) -> tuple[dict[str, list[list[float]]], int]:
    runs: dict[str, TrainingRun] = {}
    _forget_peak(context.device)
    for name in settings.contenders:
        with turns.take(is_mine=name in mine) as is_mine:
            if is_mine:
                runs[name] = TrainingRun(name, build_workload(model, rank=context.rank), context.device)
                for _ in range(settings.num_warmup_steps):
                    runs[name].step()
    seconds: dict[str, list[list[float]]] = {name: [] for name in mine}
    for round_index in range(settings.num_rounds):
        for name in shuffled(settings.contenders, seed=round_index):
            with turns.take(is_mine=name in mine) as is_mine:
                if is_mine:
                    runs[name].step()  # loads this contender's weights into the caches
                    times = [timed(runs[name].step, context.device) for _ in range(settings.num_steps)]
                    seconds[name].append(times)
        if context.replica == 0:
            context.advance()
    dist.barrier()  # all ranks use the shared memory by now
    peak = _peak_bytes(context.device)
    dist.barrier()
    _compare(context, model, settings.contenders, runs, turns)
    return seconds, peak


def _compare(
    context: RankContext, model: str, contenders: Sequence[str], runs: Mapping[str, TrainingRun], turns: Any
) -> None:
    """Check on each rank that all contenders of all replicas compute the same."""
    reference = TORCH_DEFAULT if TORCH_DEFAULT in contenders else contenders[0]
    key = f"state/{model}/{context.rank}"
    for name in sorted(contenders, key=lambda contender: contender != reference):
        with turns.take(is_mine=name in runs) as is_mine:
            if not is_mine:
                continue
            state = runs[name].state_after_one_step(build_workload(model, rank=context.rank))
            found = {kind: _some(values) for kind, values in state.items()}
            if name == reference:
                context.store.set(key, json.dumps({kind: v.tolist() for kind, v in found.items()}))
                continue
            expected = json.loads(context.store.get(key))
            check_agreement(name, found, reference, {k: torch.tensor(v) for k, v in expected.items()})


def _some(values: Tensor) -> Tensor:
    """Return a fixed sample of the elements."""
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


def _forget_peak(device: Any) -> None:
    """Reset the peak of memory to the present use."""
    gc.collect()  # frees the previous models
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes(device: Any) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # Not ru_maxrss: Linux carries it over exec, so a child starts from its parent's size at the fork.
        peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:  # not Linux, where nothing is shared either
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak is not None
    return 1024 * (int(peak[1]) - _kib_of_others())


def _kib_of_others() -> int:
    """Return the KiB of shared memory that count for other users of its pages."""
    total, is_shared = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):  # "7f3c...-7f3d... rw-s 00000000 00:01 7 /memfd:..."
            is_shared = rest.startswith("rw-s")
        elif is_shared and name in ("Rss:", "Pss:"):
            total += int(rest.split()[0]) * (1 if name == "Rss:" else -1)
    return total


# ---------------------------------------------------------------------- inside a Trainer


def _measure_trainer(
    args: argparse.Namespace, settings: StepSettings, world_size: int
) -> dict[str, dict[str, list[float]]]:
    """Train every model under both strategies; return milliseconds of each round.

    By "<model>, Trainer" and strategy. A Trainer owns its processes, so strategies take turns by whole
    scripts. The sample of a turn is the median of the steps after the warm-up, from `on_train_batch_start` to
    `on_train_batch_end` on rank 0.
    """
    samples = {f"{model}, Trainer": {name: list[float]() for name in STRATEGIES} for model in settings.models}
    total = args.trainer * len(settings.models) * len(STRATEGIES)
    with compiled_package() as package_root, progress_bar(total, "bench step --trainer") as bar:
        for round_index in range(args.trainer):
            for model in settings.models:
                for name in STRATEGIES if round_index % 2 else reversed(STRATEGIES):
                    arguments = {"strategy": name, "devices": world_size, "accelerator": args.device}
                    arguments |= {"model": model, "package_root": package_root}
                    seconds = _train(arguments, settings, args.timeout_s)
                    samples[f"{model}, Trainer"][name].append(1e3 * statistics.median(seconds))
                    bar.update()
    return samples


def _train(arguments: dict[str, Any], settings: StepSettings, timeout_s: float) -> list[float]:
    """Run a script; return the seconds of each step after its warm-up."""
    num_steps = settings.num_warmup_steps + _NUM_TRAINER_STEPS * settings.num_steps
    arguments = {**arguments, "num_steps": num_steps}
    is_ours = arguments["strategy"] == TRAINER_OURS
    with started(SCRIPT, arguments) as running:
        found = running.run_to("STEP_SECONDS", timeout_s, may_fail_later=not is_ours)
    seconds: list[float] = json.loads(found)
    if len(seconds) != num_steps:
        raise ToolError(f"{arguments['strategy']} trained {len(seconds)} steps, {num_steps} expected")
    return seconds[settings.num_warmup_steps :]


STEP: Final = Benchmark(
    name="step",
    summary="Time and peak memory of a training step, beside torch's DistributedDataParallel.",
    unit="ms",
    options=_options,
    measure=_measure,
    table=format_report,
    joins_torchrun=True,
)

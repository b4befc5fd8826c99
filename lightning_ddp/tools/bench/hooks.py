"""Hooks and averagers: bytes, time of a step on slow links, and what is learned.

On links of given speeds between two network namespaces, every contender takes its turn with a step of the
model with 67 MB of gradients; bytes are counted by the hook and by the kernel. Digits and characters are then
learned with every hook and averager, several seeds each. A picture shows what was learned against the bytes
that it took.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from lightning_ddp import BucketedDDP
from lightning_ddp.comm.group import Group
from lightning_ddp.communication import Communication
from lightning_ddp.tools import ToolError
from lightning_ddp.tools.bench import Benchmark, Result, draw_bars, save_panels
from lightning_ddp.tools.command_line import (
    add_shared,
    format_table,
    paired_ratio,
    positive_float,
    positive_int,
    progress_bar,
)
from lightning_ddp.tools.models import OURS, TORCH_DEFAULT, TrainingRun, build_workload, make_task
from lightning_ddp.tools.ranks import RankContext, read_sent_bytes, run_ranks, shuffled, timed

Rows = Mapping[str, Sequence[Mapping[str, float]]]
"""Contender -> one entry a round or a seed -> figures."""

LINK_HOOKS: Final[Mapping[str, Any]] = {
    OURS: None,
    TORCH_DEFAULT: None,
    "bf16": "bf16",
    "int8": "int8",
    "powersgd": {"name": "powersgd", "start_step": 0},
    "topk_1pc": {"name": "topk", "ratio": 0.01},
    "sign": "sign",
}
"""What is timed on links: contender -> specification of a hook; None for a wrapper without one."""

_NUM_WARMUP_STEPS: Final = 3  # buckets are rebuilt after the first, and low-rank factors settle
_TASKS: Final = {"digits": 800, "text": 2000}
"""Task -> optimizer steps."""
_MARKERS: Final = "osD^v<>ph*PX"
_SGD: Final = {"momentum": 0.9, "nesterov": True}


CONVERGENCE_RUNS: Final[Mapping[str, Mapping[str, Any]]] = {
    **{name: {"hook": {"name": name}} for name in ("allreduce", "fp16", "bf16", "int8", "fp8")},
    "powersgd_r2": {"hook": {"name": "powersgd", "rank": 2}, "start": 0.1, "text_start": 0.5},
    "powersgd_r4": {"hook": {"name": "powersgd", "rank": 4}, "start": 0.1, "text_start": 0.5},
    "topk_1pc": {"hook": {"name": "topk", "ratio": 0.01, **_SGD}, "warmup": 0.1, "text_start": 0.5},
    "randomk_25pc": {"hook": {"name": "randomk", "ratio": 0.25, **_SGD}, "text_start": 0.5},
    "sign": {"hook": {"name": "sign", **_SGD}, "start": 0.1, "text_start": 0.5},
    "post_local_sgd": {"averaging": {"name": "post_local_sgd", "period": 8}, "start": 0.5},
    "hierarchical_sgd": {"averaging": {"name": "hierarchical_sgd", "periods": {8: 0}}, "start": 0.5},
    "slowmo": {"averaging": {"name": "slowmo", "period": 8, "slow_momentum": 0.2}, "start": 0.25},
    "diloco_h20": {"averaging": {"name": "diloco", "period": 20, "outer_momentum": 0.5}, "start": 0.25},
    "streaming_h20": {
        "averaging": {"name": "streaming_diloco", "period": 20, "outer_momentum": 0.5},
        "start": 0.25,
    },
}
"""What is compared by what it learns, with settings for a short run of two ranks: compression begins after
the warm-up of the learning rate, post-local SGD in the middle, and the outer momentum is small. `start` is
the part of the steps with averaged gradients before that, `warmup` that in which the ratio of `topk` falls.
Hooks that let a part of the gradient wait begin in the middle where the characters are learned
(`text_start`): Adam at a high rate does not bear gradients that are many steps old, so that in a run as short
as this they would cost more steps than it has. They apply the momentum where the task trains with SGD."""


def communication_of(run: Mapping[str, Any], task: str, num_steps: int) -> dict[str, Any]:
    """The arguments of `Communication` for one of `CONVERGENCE_RUNS` and a task.

    >>> communication_of(CONVERGENCE_RUNS["sign"], "text", 300)
    {'hook': {'name': 'sign', 'start_step': 150}}
    """
    key = "hook" if "hook" in run else "averaging"
    chosen = {k: v for k, v in run[key].items() if task == "digits" or k not in _SGD}
    start = run.get("start", 0.0)
    for option, part in (
        ("start_step", run.get("text_start", start) if task == "text" else start),
        ("warmup_steps", run.get("warmup", 0.0)),
    ):
        if part:
            chosen[option] = round(part * num_steps)
    return {key: chosen}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--links",
        nargs="*",
        type=positive_float,
        default=[100.0, 1000.0],
        metavar="MBIT",
        help="link speeds in Mbit/s, none to leave out that part (default: 100 1000; needs root)",
    )
    add_shared(parser, rounds=5, timeout_s=7200.0)
    for option, count, choices, text in (
        ("--hooks", "+", CONVERGENCE_RUNS, "convergence runs (default: all)"),
        ("--tasks", "*", _TASKS, "tasks, none to leave out that part (default: all)"),
    ):
        names = sorted(choices)
        parser.add_argument(option, nargs=count, choices=names, default=names, metavar="NAME", help=text)
    parser.add_argument(
        "--seeds", type=positive_int, default=5, metavar="N", help="training runs of each (default: 5)"
    )


def _measure(args: argparse.Namespace) -> Result:
    if not args.links and not args.tasks:
        raise ToolError("nothing is left to measure: give --links or --tasks")
    links = {f"{mbit:g}": _time_link(args, mbit) for mbit in args.links}
    samples = {
        f"linear16, {mbit} Mbit/s": {name: [1e3 * row["seconds"] for row in of] for name, of in rows.items()}
        for mbit, rows in links.items()
    }
    return Result(
        samples=samples,
        references=OURS,
        settings={"rounds": args.rounds, "links": args.links, "tasks": args.tasks, "seeds": args.seeds},
        extra={"links": links, "learned": _learn(args) if args.tasks else {}},
    )


def _time_link(args: argparse.Namespace, mbit: float) -> Rows:
    settings = LinkSettings(model="linear16", hooks=LINK_HOOKS, num_rounds=args.rounds)
    return merge_ranks(run_ranks(time_on_link, settings, world_size=2, timeout_s=args.timeout_s, mbit=mbit))


def merge_ranks(per_rank: Sequence[Rows]) -> dict[str, list[dict[str, float]]]:
    """Take of each round and figure the larger one of the ranks.

    >>> merge_ranks([{"a": [{"seconds": 1.0}]}, {"a": [{"seconds": 2.0}]}])
    {'a': [{'seconds': 2.0}]}
    """
    return {
        name: [
            {key: max(row[key] for row in rows) for key in rows[0]}
            for rows in zip(*(ranks[name] for ranks in per_rank), strict=True)
        ]
        for name in per_rank[0]
    }


def _learn(args: argparse.Namespace) -> dict[str, Rows]:
    runs = {name: run for name, run in CONVERGENCE_RUNS.items() if name in args.hooks}
    tasks: Learning = {}
    for task in args.tasks:
        contenders = {name: communication_of(run, task, _TASKS[task]) for name, run in runs.items()}
        tasks[task] = (_TASKS[task], contenders, args.seeds)
    with progress_bar(len(runs) * len(tasks) * args.seeds, "bench hooks") as bar:
        found = run_ranks(_train_tasks, tasks, world_size=2, timeout_s=args.timeout_s, on_progress=bar.update)
    learned: dict[str, Rows] = found[0]
    return learned


# ---------------------------------------------------------------------- tables and the picture


def _format(result: Result) -> str:
    parts = []
    for mbit, rows in result.extra["links"].items():
        parts += [f"\n16 x Linear(1024), two ranks, {mbit} Mbit/s each way", format_link(rows)]
    for task, scores in result.extra["learned"].items():
        kind = "test accuracy in %" if task == "digits" else "perplexity"
        parts.append(f"\n{task}: {kind}, {result.settings['seeds']} seeds")
        parts.append(format_learned(scores, is_perplexity=task != "digits"))
    return "\n".join(parts)


def format_link(rows: Rows) -> str:
    """Lay out the table of one link."""

    def median(entries: Sequence[Mapping[str, float]], key: str, factor: float) -> float:
        return factor * statistics.median(row[key] for row in entries)

    seconds = {name: [row["seconds"] for row in entries] for name, entries in rows.items()}
    figures = (("kernel_bytes", 1e-6), ("counted_bytes", 1e-6), ("codec_seconds", 1e3))
    table: list[tuple[str | float, ...]] = [
        (
            name,
            median(entries, "seconds", 1e3),
            paired_ratio(seconds[OURS], seconds[name]),
            *(median(entries, key, factor) for key, factor in figures),
        )
        for name, entries in rows.items()
    ]
    headers = ("contender", "step ms", "speed-up", "MB by kernel", "MB by hook", "codec ms")
    return format_table(headers, table)


def format_learned(scores: Rows, *, is_perplexity: bool) -> str:
    """Lay out the table of one task: mean and standard deviation over the seeds, and the difference.

    Accuracies differ by points, perplexities by per cent of the uncompressed one.
    """
    reference = _mean(scores["allreduce"], "score") if "allreduce" in scores else None
    table = []
    for name, entries in scores.items():
        mean, spread = _mean(entries, "score"), _spread(entries)
        change = mean - reference if reference is not None else 0.0
        if is_perplexity and reference is not None:
            change *= 100 / reference
        table.append((name, mean, spread, change, _mean(entries, "part"), _mean(entries, "bytes") / 1e3))
    unit = "%" if is_perplexity else "points"
    headers = ("contender", "mean", "st. dev.", f"against allreduce, {unit}", "bytes, part", "kB a step")
    return format_table(headers, table)


def _mean(entries: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.mean(row[key] for row in entries)


def _spread(entries: Sequence[Mapping[str, float]]) -> float:
    return statistics.stdev(row["score"] for row in entries) if len(entries) > 1 else 0.0


def _draw(result: Result, path: Path, *, unit: str, title: str) -> None:
    if result.extra["learned"]:
        draw_learned(result.extra["learned"], path)
    else:
        draw_bars(result, path, unit=unit, title=title)


def draw_learned(learned: Mapping[str, Rows], path: Path) -> None:
    """Draw a panel a task: the score against the part of the bytes, with the spread over seeds."""
    names = list(dict.fromkeys(chain.from_iterable(learned.values())))

    def draw_panel(axes: Any, task: str) -> None:
        for name, entries in learned[task].items():
            at = (_mean(entries, "part"), _mean(entries, "score"))
            number = names.index(name)
            style = {"color": f"C{number % 10}", "marker": _MARKERS[number % len(_MARKERS)]}
            axes.errorbar(*at, yerr=_spread(entries), label=name, capsize=2, linestyle="", **style)
        if task == list(learned)[-1]:  # one legend, as many points lie close together
            axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), fontsize=8)
        ylabel = "test accuracy (%)" if task == "digits" else "perplexity"
        axes.set(xscale="log", xlabel="bytes sent, as part of uncompressed float32", ylabel=ylabel)

    panels = {task: partial(draw_panel, task=task) for task in learned}
    title = "bench hooks: what is learned for the bytes that are sent (mean and st. dev. over seeds)"
    save_panels(path, panels, title=title)


# ---------------------------------------------------------------------- what each rank does


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """What `time_on_link` measures, in rounds in which contenders take turns."""

    model: str
    hooks: Mapping[str, Any]
    """Contender -> specification of a hook; None for a wrapper without one."""
    num_rounds: int


def time_on_link(context: RankContext, settings: LinkSettings) -> dict[str, list[dict[str, float]]]:
    """Time steps of all contenders, which take turns. Both ranks call it; communicates.

    Returns:
        Contender -> one entry a round: seconds, bytes by the kernel's and by the hook's count, codec seconds.
    """
    runs: dict[str, tuple[TrainingRun, Communication]] = {}
    for name, hook in settings.hooks.items():
        wrapper = TORCH_DEFAULT if name == TORCH_DEFAULT else OURS
        run = TrainingRun(wrapper, build_workload(settings.model, rank=context.rank), context.device)
        communication = Communication(hook)
        if wrapper == OURS:
            communication.register(
                run.wrapped, Group(dist.group.WORLD), context.device, node_size=1, loss_scale=lambda: 1.0
            )
        for _ in range(_NUM_WARMUP_STEPS):
            run.step()
        runs[name] = run, communication

    def counts(communication: Communication) -> dict[str, float]:
        """Bytes that the kernel and the hook have sent, and seconds of the hook's encoding and decoding."""
        channel = communication.hook.channel if communication.hook is not None else None
        return {
            "kernel_bytes": read_sent_bytes(),
            "counted_bytes": channel.num_bytes_sent if channel else 0,
            "codec_seconds": channel.busy_s - channel.wait_s if channel else 0.0,
        }

    rows: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for number in range(settings.num_rounds):
        for name in shuffled(list(runs), seed=number):
            run, communication = runs[name]
            before = counts(communication)
            seconds = timed(run.step, context.device)
            dist.barrier()  # a peer that is through has received all that is counted here
            changes = {key: value - before[key] for key, value in counts(communication).items()}
            rows[name].append({"seconds": seconds, **changes})
    return rows


Learning = dict[str, tuple[int, dict[str, dict[str, Any]], int]]
"""Task -> optimizer steps, contender -> arguments of `Communication`, and the number of seeds."""


def _train_tasks(context: RankContext, tasks: Learning) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Train every contender on every task; task -> contender -> one entry a seed: score and bytes a step."""
    return {
        task: {
            name: [_train(context, task, num_steps, arguments, seed) for seed in range(num_seeds)]
            for name, arguments in contenders.items()
        }
        for task, (num_steps, contenders, num_seeds) in tasks.items()
    }


def _train(
    context: RankContext, name: str, num_steps: int, arguments: dict[str, Any], seed: int
) -> dict[str, float]:
    group = Group(dist.group.WORLD)
    task = make_task(name, rank=context.rank, world_size=group.size, seed=seed)
    model = BucketedDDP(task.module)
    communication = Communication(**arguments)
    communication.register(model, group, context.device, node_size=1, loss_scale=lambda: 1.0)
    optimizer = task.make_optimizer(communication.momentum)
    communication.start(task.module, [optimizer], group)
    num_local = 0
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = task.learning_rate * _decay(step, num_steps)
        optimizer.zero_grad()
        num_local += not communication.averages_gradients
        task.loss(model, task.next_batch()).backward()
        if task.max_norm < math.inf:
            torch.nn.utils.clip_grad_norm_(task.module.parameters(), task.max_norm)
        optimizer.step()
        communication.after_step(optimizer, was_skipped=False)
    communication.agree()
    numel = sum(p.numel() for p in task.module.parameters())
    full = 2 * (group.size - 1) / group.size * 4 * numel
    sent = 0.0
    if communication.hook is not None:
        sent += communication.hook.channel.num_bytes_sent
    elif communication.averager is not None:
        sent += full * (num_steps - num_local)  # the reducer's own all-reduces before the local phase
    if communication.averager is not None:
        sent += communication.averager.num_bytes_sent
    context.advance()
    return {"score": task.score(task.module), "bytes": sent / num_steps, "part": sent / num_steps / full}


def _decay(step: int, num_steps: int) -> float:
    """A rise over the first twentieth, then half a cosine down to zero."""
    warmup = num_steps / 20
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (num_steps - warmup)))


HOOKS: Final = Benchmark(
    name="hooks",
    summary="Bytes of hooks and averagers, steps on slow links, and what is learned.",
    unit="ms",
    options=_options,
    measure=_measure,
    table=_format,
    draw=_draw,
    title="a step; the ratio is ours / contender",
)

"""Hooks and averagers: bytes, time of a step on slow links, and what is learned.

Three parts. On links of given speeds between two network namespaces, every contender takes its turn with a
step of the model with 67 MB of gradients; bytes are counted by the hook and by the kernel. Digits and
characters are then learned with every hook and averager, several seeds each. A picture shows what was learned
against the bytes that it took.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightning_ddp.tools.bench import BenchmarkError
from lightning_ddp.tools.bench.arguments import (
    OURS,
    TORCH_DEFAULT,
    add_plot_argument,
    output_path,
    positive_float,
    positive_int,
)
from lightning_ddp.tools.bench.learners import Learner
from lightning_ddp.tools.bench.outputs import write_outputs
from lightning_ddp.tools.bench.pictures import draw_bars
from lightning_ddp.tools.bench.report import compare, format_table, paired_ratio, progress_bar

LINK_HOOKS: Final[Mapping[str, Any]] = {
    OURS: None,
    TORCH_DEFAULT: None,
    "bf16": "bf16",
    "int8": "int8",
    "powersgd_r4": {"name": "powersgd", "rank": 4, "start_step": 0},
    "topk_1pc": {"name": "topk", "ratio": 0.01},
    "sign": "sign",
}
"""What is timed on links."""

LEARNERS: Final[Mapping[str, Learner]] = {
    "allreduce": Learner(hook={"name": "allreduce"}),
    "fp16": Learner(hook={"name": "fp16"}),
    "bf16": Learner(hook={"name": "bf16"}),
    "int8": Learner(hook={"name": "int8"}),
    "fp8": Learner(hook={"name": "fp8"}),
    "powersgd_r2": Learner(hook={"name": "powersgd", "rank": 2}, start=0.1, text_start=0.5),
    "powersgd_r4": Learner(hook={"name": "powersgd", "rank": 4}, start=0.1, text_start=0.5),
    "topk_1pc": Learner(
        hook={"name": "topk", "ratio": 0.01}, warmup=0.1, text_start=0.5, takes_momentum=True
    ),
    "randomk_25pc": Learner(hook={"name": "randomk", "ratio": 0.25}, text_start=0.5, takes_momentum=True),
    "sign": Learner(hook={"name": "sign"}, start=0.1, text_start=0.5, takes_momentum=True),
    "post_local_sgd": Learner(averaging={"name": "post_local_sgd", "period": 8}, start=0.5),
    "hierarchical_sgd": Learner(averaging={"name": "hierarchical_sgd", "periods": {8: 0}}, start=0.5),
    "slowmo": Learner(averaging={"name": "slowmo", "period": 8, "slow_momentum": 0.2}, start=0.25),
    "diloco_h20": Learner(averaging={"name": "diloco", "period": 20, "outer_momentum": 0.5}, start=0.25),
    "streaming_h20": Learner(
        averaging={"name": "streaming_diloco", "period": 20, "outer_momentum": 0.5}, start=0.25
    ),
}
"""What is compared by what it learns, with settings for a short run of two ranks: compression begins after
the warm-up of the learning rate, post-local SGD in the middle, and the outer momentum is small. Hooks that
let a part of the gradient wait begin in the middle where the characters are learned: Adam at a high rate does
not bear gradients that are many steps old, so that in a run as short as this they would cost more steps than
it has."""

_TASKS: Final = {"digits": 800, "text": 2000}
"""Task -> optimizer steps."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench hooks``."""
    parser.add_argument(
        "--links",
        nargs="*",
        type=positive_float,
        default=[100.0, 1000.0],
        metavar="MBIT",
        help="link speeds in Mbit/s, none to leave out that part (default: 100 1000; needs root)",
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=5, metavar="N", help="timed steps (default: 5)"
    )
    parser.add_argument(
        "--hooks", nargs="+", choices=sorted(LEARNERS), metavar="NAME", help="learners (default: all)"
    )
    parser.add_argument(
        "--tasks", nargs="*", choices=sorted(_TASKS), default=sorted(_TASKS), metavar="TASK", help="tasks"
    )
    parser.add_argument(
        "--seeds", type=positive_int, default=5, metavar="N", help="training runs of each (default: 5)"
    )
    parser.add_argument(
        "--timeout-s", type=positive_float, default=7200.0, metavar="S", help="deadline of each part"
    )
    parser.add_argument("--json", type=output_path, metavar="PATH", help="write all figures to this file")
    add_plot_argument(parser, "--picture")


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables, write the files that were asked for.

    Returns:
        The exit status, 0.

    Raises:
        BenchmarkError: If a rank fails, the deadline passes, or links cannot be shaped.
    """
    from lightning_ddp.tools.bench.session import refuse_launched

    refuse_launched("hooks")
    if not args.links and not args.tasks:
        raise BenchmarkError("nothing is left to measure: give --links or --tasks")
    links = {mbit: _time_link(args, mbit) for mbit in args.links}
    for mbit, rows in links.items():
        print(f"\n16 x Linear(1024), two ranks, {mbit:g} Mbit/s each way")
        print(format_link(rows))
    learned = _learn(args) if args.tasks else {}
    for task, scores in learned.items():
        print(f"\n{task}: {'test accuracy in %' if task == 'digits' else 'perplexity'}, {args.seeds} seeds")
        print(format_learned(scores, is_perplexity=task != "digits"))
    _write_files(args, links, learned)
    return 0


def _time_link(args: argparse.Namespace, mbit: float) -> dict[str, list[dict[str, float]]]:
    from lightning_ddp.tools.bench.links import run_linked
    from lightning_ddp.tools.bench.traffic import LinkSettings, time_on_link

    settings = LinkSettings(model="linear16", hooks=dict(LINK_HOOKS), num_rounds=args.rounds)
    per_rank = run_linked(time_on_link, settings, mbit, args.timeout_s)
    return merge_ranks(per_rank)


def merge_ranks(per_rank: Sequence[Mapping[str, Sequence[Mapping[str, float]]]]) -> dict[str, Any]:
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


def format_link(rows: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Lay out the table of one link."""
    seconds = {name: [row["seconds"] for row in entries] for name, entries in rows.items()}
    table = [
        (
            name,
            1e3 * statistics.median(seconds[name]),
            paired_ratio(seconds[OURS], seconds[name]),
            statistics.median(row["kernel_bytes"] for row in entries) / 1e6,
            statistics.median(row["counted_bytes"] for row in entries) / 1e6,
            1e3 * statistics.median(row["codec_seconds"] for row in entries),
        )
        for name, entries in rows.items()
    ]
    headers = ("contender", "step ms", "speed-up", "MB by kernel", "MB by hook", "codec ms")
    return format_table(headers, table)


def format_learned(scores: Mapping[str, Sequence[Mapping[str, float]]], *, is_perplexity: bool) -> str:
    """Lay out the table of one task: mean and standard deviation over the seeds, and the difference.

    Accuracies differ by points, perplexities by per cent of the uncompressed one.
    """
    reference = (
        statistics.mean(row["score"] for row in scores["allreduce"]) if "allreduce" in scores else None
    )
    table = []
    for name, entries in scores.items():
        values = [row["score"] for row in entries]
        mean = statistics.mean(values)
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        change = mean - reference if reference is not None else 0.0
        if is_perplexity and reference is not None:
            change *= 100 / reference
        part = statistics.mean(row["part"] for row in entries)
        table.append(
            (name, mean, spread, change, part, statistics.mean(row["bytes"] for row in entries) / 1e3)
        )
    unit = "%" if is_perplexity else "points"
    headers = ("contender", "mean", "st. dev.", f"against allreduce, {unit}", "bytes, part", "kB a step")
    return format_table(headers, table)


def _learn(args: argparse.Namespace) -> dict[str, dict[str, list[dict[str, float]]]]:
    from lightning_ddp.tools.bench.processes import run_ranks
    from lightning_ddp.tools.bench.traffic import LearningSettings, train_tasks

    names = [name for name in LEARNERS if not args.hooks or name in args.hooks]
    tasks = {task: _TASKS[task] for task in args.tasks}
    contenders = {
        task: {name: LEARNERS[name].arguments(task, num_steps) for name in names}
        for task, num_steps in tasks.items()
    }
    settings = LearningSettings(contenders=contenders, num_steps=tasks, seeds=tuple(range(args.seeds)))
    with progress_bar(len(names) * len(tasks) * args.seeds, "bench hooks") as bar:
        learned: dict[str, dict[str, list[dict[str, float]]]] = run_ranks(
            train_tasks,
            settings,
            world_size=2,
            device="cpu",
            timeout_s=args.timeout_s,
            on_progress=bar.update,
        )[0]
    return learned


def _write_files(args: argparse.Namespace, links: Mapping[float, Any], learned: Mapping[str, Any]) -> None:
    samples = {
        f"linear16, {mbit:g} Mbit/s": {
            name: [1e3 * row["seconds"] for row in entries] for name, entries in rows.items()
        }
        for mbit, rows in links.items()
    }

    def draw_learned(*_: object, **__: object) -> None:
        draw(learned, args.plot)

    write_outputs(
        args,
        benchmark="hooks",
        unit="ms",
        settings={"rounds": args.rounds, "links": args.links, "tasks": args.tasks, "seeds": args.seeds},
        samples=samples,
        comparisons={subject: compare(rounds, reference=OURS) for subject, rounds in samples.items()},
        extra={"links": {str(mbit): rows for mbit, rows in links.items()}, "learned": learned},
        title=f"a step; the ratio is {OURS} / contender",
        draw=draw_learned if learned else draw_bars,
    )


def draw(learned: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]], path: Path) -> None:
    """Draw a panel a task: the score against the part of the bytes, with the spread over seeds."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]  # an optional dependency

    figure = Figure(figsize=(6.5 * len(learned), 5), layout="constrained")
    panels = figure.subplots(1, len(learned), squeeze=False)[0]
    for axes, (task, scores) in zip(panels, learned.items(), strict=True):
        for name, entries in scores.items():
            values = [row["score"] for row in entries]
            part = statistics.mean(row["part"] for row in entries)
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            axes.errorbar(part, statistics.mean(values), yerr=spread, marker="o", capsize=2)
            axes.annotate(
                name, (part, statistics.mean(values)), xytext=(4, 4), textcoords="offset points", fontsize=7
            )
        axes.set(
            xscale="log",
            xlabel="bytes sent, as part of uncompressed float32",
            ylabel="test accuracy (%)" if task == "digits" else "perplexity",
            title=task,
        )
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)

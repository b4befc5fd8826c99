"""Time from a fault in one rank to its end on all others: strategy "custom_ddp" beside Lightning's "ddp".

Each sample starts a real script in which one rank fails in a training step. Shown are how soon the other
ranks learned of it in Python (so that callbacks and loggers ran), how soon every process was gone, and how
the script ended. A process that does not end within the deadline is counted and killed.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Final

from lightning_ddp.tools.arguments import add_shared
from lightning_ddp.tools.bench.benchmark import Benchmark, Result
from lightning_ddp.tools.report import format_table, progress_bar
from lightning_ddp.tools.scripts import STRATEGIES, FailedRun, run_to_fault

FAULTS: Final = ("exception", "kill")
VICTIMS: Final = ("first", "last")


def _options(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, rounds=3, world_size=2, timeout_s=60.0)


def _measure(args: argparse.Namespace) -> Result:
    cells = [(f, v, s) for f in FAULTS for v in VICTIMS for s in STRATEGIES]
    found: dict[tuple[str, str, str], list[FailedRun]] = {cell: [] for cell in cells}
    with progress_bar(args.rounds * len(cells), "bench failures") as bar:
        for _ in range(args.rounds):
            for fault, place, strategy in cells:
                victim = 0 if place == "first" else args.world_size - 1
                options = {"fault": fault, "victim": victim, "timeout_s": args.timeout_s}
                run = run_to_fault(strategy, args.world_size, **options)
                found[fault, place, strategy].append(run)
                bar.update()
    gone: dict[str, dict[str, list[float]]] = {}
    for (fault, place, strategy), runs in found.items():
        gone.setdefault(f"{fault}, {place} rank", {})[strategy] = [run.gone_s for run in runs]
    return Result(
        samples=gone,
        references=STRATEGIES[0],
        settings={"rounds": args.rounds, "world_size": args.world_size},
        extra={"scripts": {"/".join(cell): [vars(run) for run in runs] for cell, runs in found.items()}},
    )


def _format(result: Result) -> str:
    num_others = int(str(result.settings["world_size"])) - 1
    rows: list[tuple[str | int | float, ...]] = []
    for cell, found in sorted(result.extra["scripts"].items()):
        runs = [FailedRun(**run) for run in found]
        learned = [seconds for run in runs for seconds in run.learned_s]
        rows.append(
            (
                *cell.split("/"),
                f"{len(learned)} of {num_others * len(runs)}",
                f"{statistics.median(learned):.3f}" if learned else "never",
                f"{max(learned):.3f}" if learned else "never",
                statistics.median(run.gone_s for run in runs),
                sum(run.num_left for run in runs),
                ", ".join(sorted({str(run.exit_code) for run in runs})),
            )
        )
    told = ("others told", "median s", "worst s")
    return format_table(("fault", "rank", "strategy", *told, "all gone s", "left", "exit"), rows)


FAILURES: Final = Benchmark(
    name="failures",
    summary='Time from a fault in one rank to the end of all, beside Lightning\'s "ddp".',
    unit="s",
    options=_options,
    measure=_measure,
    table=_format,
    title="until all processes were gone; the ratio is custom_ddp / strategy",
)

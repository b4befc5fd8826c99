"""Time from the loss of a rank to the next committed step: `on_failure="shrink"` beside restarts.

Each sample starts a real script in which the last rank is killed in a training step, or stopped ("stalled").
With "replace" and "spare" the supervisor of `run` forks another process, or has one that waits; with "cold"
the script is run by `python`. They are at full strength when that process commits its first step.
"restart" is Lightning's "ddp" under `torchrun --max-restarts`, with a checkpoint each step. A step that is
committed twice counts as lost, and so does a sample that no committed step has used. Steps without a failure
are timed in two scripts, with `on_failure="stop"` and "shrink", that train in turns, a few steps each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lightning_ddp.tools.arguments import add_shared
from lightning_ddp.tools.bench.benchmark import Benchmark, Result, format_comparisons, save_panels
from lightning_ddp.tools.report import format_table, progress_bar
from lightning_ddp.tools.scripts import PACKAGE_ROOT, TRAINING, run_to_mark, started

CONTENDERS: Final = ("shrink", "stalled", "restart", "replace", "spare", "cold")
_REPLACE: Final = {"replace": 0, "spare": 1, "cold": 0}
"""With how many spares."""
_MODES: Final = ("stop", "shrink")
_NUM_STEPS: Final = 24
_NUM_STEPS_TO_REPLACE: Final = 400
_FAULT_STEP: Final = 8
_STEP_S: Final = 0.02
_STALL_S: Final = 2.0
_SPARE_S: Final = 4.0
"""How long a spare has, to be ready before the loss."""
_BLOCK: Final = 10
_BLOCKS_TO_WARM: Final = 2
_RUN: Final = ("-m", "lightning_ddp", "run")
_HEALTHY: Final = "step"
_KILLED: Final = "loss to next step"


def _options(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, rounds=3, world_size=3, timeout_s=120.0)
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        default=list(CONTENDERS),
        metavar="NAME",
        help=f"what is killed, any of {', '.join(CONTENDERS)} (default: all)",
    )


def _measure(args: argparse.Namespace) -> Result:
    names = list(dict.fromkeys(args.contenders))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with progress_bar(args.rounds * len(names) + 1, "bench recovery") as bar:
        healthy: dict[str, list[float]] = {mode: [] for mode in _MODES}
        for modes in (_MODES, _MODES[::-1])[
            : args.rounds
        ]:  # the same code differs by process by some percent
            found = time_steps(modes, args.world_size, args.rounds, timeout_s=args.timeout_s)
            for mode in modes:
                healthy[mode] += found[mode]
        bar.update()
        for _ in range(args.rounds):
            for name in names:
                runs[name].append(run_to_recovery(name, args.world_size, timeout_s=args.timeout_s))
                bar.update()
    return Result(
        samples={
            _KILLED: {name: [run["seconds"] for run in found] for name, found in runs.items()},
            _HEALTHY: healthy,
        },
        references={_KILLED: names[0], _HEALTHY: "shrink"},
        settings={
            "rounds": args.rounds,
            "world_size": args.world_size,
            "step_s": _STEP_S,
            "stall_timeout_s": _STALL_S,
        },
        extra={"runs": runs},
    )


def run_to_recovery(name: str, world_size: int, *, timeout_s: float) -> dict[str, Any]:
    """Kill the last rank of a training; returns what came of it.

    Args:
        name: of `CONTENDERS`.
        world_size: number of ranks.
        timeout_s: seconds for all of it; then it is killed, and counts as not recovered.
    """
    with tempfile.TemporaryDirectory(prefix="lightning_ddp_recovery_") as folder:
        is_ours = name != "restart"
        num_steps = _NUM_STEPS_TO_REPLACE if name in _REPLACE else _NUM_STEPS
        replaces = {"name": "replace", "spares": _REPLACE.get(name, 0)}
        ours = replaces if name in _REPLACE else "shrink"
        arguments = {
            "strategy": "custom_ddp" if is_ours else "ddp",
            "on_failure": ours if is_ours else None,
            "folder": None if is_ours else folder,
            "devices": world_size,
            "package_root": str(PACKAGE_ROOT),
            "num_steps": num_steps,
            "wait_s": _SPARE_S if name == "spare" else 0.0,
            "fault": "stop" if name == "stalled" else "kill",
            "fault_step": _FAULT_STEP,
            "victim": world_size - 1,
            "step_s": _STEP_S,
            "stall_s": _STALL_S if name == "stalled" else None,
        }
        elastic = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=3"]
        launcher: Sequence[str] = _RUN if is_ours else [*elastic, f"--nproc-per-node={world_size}"]
        if name == "cold":
            launcher = ()
        with started(TRAINING, arguments, launcher) as running:
            with suppress(subprocess.TimeoutExpired):  # it hangs: then what it has printed by now counts
                running.process.wait(timeout_s)
            text = running.text
            faults = re.findall(r"FAULT (\d+\.\d+)", text)
            if not faults:
                raise running.failed("reached no fault")
    commits = re.findall(r"COMMIT (\d+\.\d+) (\d+) (\d+) ([\d ]+)$", text, re.MULTILINE)
    found = _outcome(commits, float(faults[0]), world_size, timeout_s, num_steps)
    regroups = re.findall(r"^REGROUP (\d+\.\d+)$", text, re.MULTILINE)
    return {**found, "regroup_s": float(regroups[0]) if regroups else None}


def _outcome(
    commits: Sequence[tuple[str, str, str, str]],
    fault: float,
    world_size: int,
    timeout_s: float,
    num_steps: int = _NUM_STEPS,
) -> dict[str, Any]:
    """What the lines that were printed mean.

    >>> lines = [("1.0", "1", "0", "0"), ("3.5", "2", "0", "1")]
    >>> _outcome(lines, 2.0, 1, 9.0)["seconds"]
    1.5
    >>> lines += [("3.6", "3", "0", "2"), ("3.9", "4", "0", "3"), ("4.0", "4", "1", "4")]
    >>> found = _outcome(lines, 2.0, 2, 9.0)
    >>> found["full_s"], round(found["pause_s"], 1)
    (2.0, 0.3)
    """
    steps = [(float(moment), int(step)) for moment, step, rank, _ in commits if rank == "0"]
    before = max((step for moment, step in steps if moment <= fault), default=0)
    after = [moment - fault for moment, step in steps if moment > fault and step > before]
    last = [(float(moment), int(step)) for moment, step, rank, _ in commits if int(rank) == world_size - 1]
    full = min(((moment, step) for moment, step in last if moment > fault and step > before), default=None)
    gaps = [
        later - sooner
        for (sooner, first), (later, step) in itertools.pairwise(steps)
        if full is not None and before < first and step <= full[1]
    ]
    used = {number for *_, ids in commits for number in ids.split()}
    return {
        "seconds": min(after, default=timeout_s),
        "is_recovered": bool(after),
        "steps_again": len(steps) - len({step for _, step in steps}),
        "samples_lost": world_size * num_steps - len(used),
        "full_s": None if full is None else full[0] - fault,
        "pause_s": max(gaps, default=None),
        "curve": steps,
    }


def time_steps(
    modes: Sequence[str], world_size: int, num_blocks: int, *, timeout_s: float
) -> dict[str, list[float]]:
    """Seconds of a step in which nothing fails, with two values of `on_failure`: means of blocks, in turns.

    Args:
        modes: the two; the first one begins.
        world_size: number of ranks.
        num_blocks: so many of each, of ten steps.
        timeout_s: seconds for the two scripts.

    Raises:
        ToolError: a script fails, or is not done in time.
    """
    with tempfile.TemporaryDirectory(prefix="lightning_ddp_turns_") as folder:
        pipes = [Path(folder, mode) for mode in modes]
        for path in pipes:
            os.mkfifo(path)
        first, second = (
            {
                "strategy": "custom_ddp",
                "on_failure": mode,
                "devices": world_size,
                "package_root": str(PACKAGE_ROOT),
                "num_steps": _BLOCK * (num_blocks + _BLOCKS_TO_WARM),
                "model": "convbn40",
                "turns": [str(path) for path in turns],
                "block": _BLOCK,
            }
            for mode, turns in zip(modes, (pipes, pipes[::-1]), strict=True)
        )
        token = os.open(pipes[0], os.O_RDWR)
        try:
            os.write(token, b".")
            with started(TRAINING, first, _RUN) as running:
                _, of_second = run_to_mark(
                    TRAINING, second, "STEP_SECONDS", timeout_s=timeout_s, launcher=_RUN
                )
                if running.process.wait(timeout_s):
                    raise running.failed("failed")
                of_first = running.text.rpartition("STEP_SECONDS ")[2].splitlines()[0]
        finally:
            os.close(token)
    texts = zip(modes, (of_first, of_second), strict=True)
    return {mode: json.loads(text)[_BLOCKS_TO_WARM:] for mode, text in texts}


def _format(result: Result) -> str:
    rows: list[tuple[str | int | float, ...]] = []
    for name, runs in result.extra["runs"].items():
        recovered = [run["seconds"] for run in runs if run["is_recovered"]]
        regroups = [run["regroup_s"] for run in runs if run["regroup_s"] is not None]
        rows.append(
            (
                f"{name} (stall_timeout {_STALL_S:g} s)" if name == "stalled" else name,
                f"{len(recovered)} of {len(runs)}",
                f"{statistics.median(recovered):.3f}" if recovered else "never",
                f"{max(recovered):.3f}" if recovered else "never",
                f"{statistics.median(regroups):.3f}" if regroups else "-",
                *(_median_of(runs, key) for key in ("full_s", "pause_s")),
                max(run["steps_again"] for run in runs),
                max(run["samples_lost"] for run in runs),
            )
        )
    head = (
        *("a rank is lost", "went on", "median s", "worst s", "regroup s"),
        *("full strength s", "longest pause s", "steps again", "samples lost"),
    )
    healthy = {
        _HEALTHY: {
            mode: replace(figures, median=1e3 * figures.median, iqr=1e3 * figures.iqr)
            for mode, figures in result.comparisons[_HEALTHY].items()
        }
    }
    table = format_comparisons(healthy, (_HEALTHY, "on_failure", "shrink / this"), "ms")
    return f"{format_table(head, rows)}\n\n{table}"


def _median_of(runs: Sequence[dict[str, Any]], key: str) -> str:
    known = [run[key] for run in runs if run[key] is not None]
    return f"{statistics.median(known):.3f}" if known else "-"


def _draw(result: Result, path: Path, *, unit: str, title: str) -> None:
    """Steps over time of the first round of each contender, from the kill on."""

    def draw(axes: Any) -> None:
        for name, runs in result.extra["runs"].items():
            start = runs[0]["curve"][0][0]
            axes.plot(*zip(*((moment - start, step) for moment, step in runs[0]["curve"]), strict=True), ".-")
            axes.lines[-1].set_label(name)
        axes.set(xlabel=unit, ylabel="committed step")
        axes.axhline(_FAULT_STEP, color="red", linestyle="--", label="loss")
        axes.legend()

    save_panels(path, {"a rank is lost": draw}, title=title)


RECOVERY: Final = Benchmark(
    name="recovery",
    summary="Time from a kill to the next committed step, beside restarts by torchrun.",
    unit="s",
    options=_options,
    measure=_measure,
    table=_format,
    draw=_draw,
    title="steps over time",
)

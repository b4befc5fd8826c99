"""Time from a kill to the next committed step: `on_failure="shrink"` beside restarts from a checkpoint.

Each sample starts a real script in which the last rank is killed in a training step. "restart" is Lightning's
"ddp" under `torchrun --max-restarts`, with a checkpoint each step. A step that is committed twice counts as
lost, and so does a sample that no committed step has used. Steps without a failure are timed in scripts that
take turns, with `on_failure="stop"` and "shrink".
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lightning_ddp.tools.arguments import add_shared
from lightning_ddp.tools.bench.benchmark import Benchmark, Result, save_panels
from lightning_ddp.tools.report import format_table, progress_bar
from lightning_ddp.tools.scripts import PACKAGE_ROOT, TRAINING, run_to_mark, started

CONTENDERS: Final = ("shrink", "restart")
_MODES: Final = ("stop", "shrink")
_NUM_STEPS: Final = 40
_NUM_HEALTHY_STEPS: Final = 60
_FAULT_STEP: Final = 10
_STEP_S: Final = 0.05
_HEALTHY: Final = "step without a failure"
_KILLED: Final = "kill to next step"


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
    healthy: dict[str, list[float]] = {mode: [] for mode in _MODES}
    with progress_bar(args.rounds * (len(names) + len(_MODES)), "bench recovery") as bar:
        for number in range(args.rounds):
            for name in names:
                runs[name].append(run_to_recovery(name, args.world_size, timeout_s=args.timeout_s))
                bar.update()
            for mode in _MODES if number % 2 else reversed(_MODES):
                healthy[mode].append(_time_steps(mode, args.world_size, timeout_s=args.timeout_s))
                bar.update()
    return Result(
        samples={
            _KILLED: {name: [run["seconds"] for run in found] for name, found in runs.items()},
            _HEALTHY: healthy,
        },
        references={_KILLED: names[0], _HEALTHY: "shrink"},
        settings={"rounds": args.rounds, "world_size": args.world_size, "step_s": _STEP_S},
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
        arguments = {
            "strategy": "custom_ddp" if name == "shrink" else "ddp",
            "on_failure": "shrink" if name == "shrink" else None,
            "folder": None if name == "shrink" else folder,
            "devices": world_size,
            "package_root": str(PACKAGE_ROOT),
            "num_steps": _NUM_STEPS,
            "fault": "kill",
            "fault_step": _FAULT_STEP,
            "victim": world_size - 1,
            "step_s": _STEP_S,
        }
        elastic = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=3"]
        launcher = [] if name == "shrink" else [*elastic, f"--nproc-per-node={world_size}"]
        with started(TRAINING, arguments, launcher) as running:
            with suppress(subprocess.TimeoutExpired):  # it hangs: then what it has printed by now counts
                running.process.wait(timeout_s)
            text = running.text
            faults = re.findall(r"FAULT (\d+\.\d+)", text)
            if not faults:
                raise running.failed("reached no fault")
    commits = re.findall(r"COMMIT (\d+\.\d+) (\d+) (\d+) ([\d ]+)$", text, re.MULTILINE)
    return _outcome(commits, float(faults[0]), world_size, timeout_s)


def _outcome(
    commits: Sequence[tuple[str, str, str, str]], fault: float, world_size: int, timeout_s: float
) -> dict[str, Any]:
    """What the lines that were printed mean.

    >>> lines = [("1.0", "1", "0", "0"), ("3.5", "2", "0", "1")]
    >>> _outcome(lines, 2.0, 1, 9.0)["seconds"]
    1.5
    """
    steps = [(float(moment), int(step)) for moment, step, rank, _ in commits if rank == "0"]
    before = max((step for moment, step in steps if moment <= fault), default=0)
    after = [moment - fault for moment, step in steps if moment > fault and step > before]
    used = {number for *_, ids in commits for number in ids.split()}
    return {
        "seconds": min(after, default=timeout_s),
        "is_recovered": bool(after),
        "steps_again": len(steps) - len({step for _, step in steps}),
        "samples_lost": world_size * _NUM_STEPS - len(used),
        "curve": steps,
    }


def _time_steps(mode: str, world_size: int, *, timeout_s: float) -> float:
    """Median of the seconds of a step in which nothing fails."""
    arguments = {
        "strategy": "custom_ddp",
        "on_failure": mode,
        "devices": world_size,
        "package_root": str(PACKAGE_ROOT),
        "num_steps": _NUM_HEALTHY_STEPS,
        "model": "linear16",
    }
    _, found = run_to_mark(TRAINING, arguments, "STEP_SECONDS", timeout_s=timeout_s)
    seconds: list[float] = json.loads(found)
    return statistics.median(seconds[_NUM_HEALTHY_STEPS // 4 :])


def _format(result: Result) -> str:
    rows: list[tuple[str | int | float, ...]] = []
    for name, runs in result.extra["runs"].items():
        recovered = [run["seconds"] for run in runs if run["is_recovered"]]
        rows.append(
            (
                name,
                f"{len(recovered)} of {len(runs)}",
                f"{statistics.median(recovered):.3f}" if recovered else "never",
                f"{max(recovered):.3f}" if recovered else "never",
                max(run["steps_again"] for run in runs),
                max(run["samples_lost"] for run in runs),
            )
        )
    head = ("a rank is killed", "went on", "median s", "worst s", "steps again", "samples lost")
    healthy = result.comparisons[_HEALTHY]
    cost = ", ".join(f"{mode} {1e3 * healthy[mode].median:.3f} ms" for mode in _MODES)
    return f"{format_table(head, rows)}\n{_HEALTHY}: {cost}; shrink / stop {healthy['stop'].ratio:.3f}"


def _draw(result: Result, path: Path, *, unit: str, title: str) -> None:
    """Steps over time of the first round of each contender, from the kill on."""

    def draw(axes: Any) -> None:
        for name, runs in result.extra["runs"].items():
            start = runs[0]["curve"][0][0]
            axes.plot(*zip(*((moment - start, step) for moment, step in runs[0]["curve"]), strict=True), ".-")
            axes.lines[-1].set_label(name)
        axes.set(xlabel=unit, ylabel="committed step")
        axes.axhline(_FAULT_STEP, color="red", linestyle="--", label="kill")
        axes.legend()

    save_panels(path, {"a rank is killed": draw}, title=title)


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

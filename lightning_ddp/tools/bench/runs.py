"""Benchmarks of whole runs: `launch` to the first batch, `failures` to the exit, `recovery` to the next step.

Each sample starts a real script, which starts its other ranks itself. `launch` kills it at its first batch;
one uncounted round of each contender warms the file cache and writes bytecode.

In the scripts of `failures` one rank fails in a training step. Measured is when the other ranks have received
the failure in Python (so that callbacks and loggers ran), and when every process has exited. A process that
does not exit within the deadline is counted and killed.

With `recovery` the last rank is killed, or stopped ("stalled"). With "replace" the supervisor of `run` forks
another process; with "cold" the script is run by `python`. "restart" is Lightning's "ddp" under `torchrun
--max-restarts`, with a checkpoint in each step. A step that is committed twice counts as lost, and so does a
sample that no committed step has used. Steps without a failure are timed in one script, in turns of fits.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lightning_ddp.tools.bench import Benchmark, Result, format_comparisons
from lightning_ddp.tools.command_line import add_choices, add_shared, format_table, progress_bar
from lightning_ddp.tools.ranks import shuffled
from lightning_ddp.tools.scripts import RUN, STRATEGIES, TRAINING, run_to_fault, started

# ---------------------------------------------------------------------- launch

STARTS: Final = {STRATEGIES[0]: (), "run": RUN, STRATEGIES[1]: ()}
"""Contenders, with the arguments before the script on the command line."""
_LAUNCH_STEPS: Final = 2000
"""Steps of each rank, enough for all ranks to run while their memory is read."""
SCRIPT = TRAINING
IMPORT: Final = "import"
ALONE, WITH_OURS = "alone", "with lightning_ddp"
"""Imports of Lightning alone, and of this package after it."""


def _measure_launch(args: argparse.Namespace) -> Result:
    sizes = {f"first batch, {size} devices": size for size in dict.fromkeys(args.world_size)}
    samples = {subject: {name: list[float]() for name in STARTS} for subject in sizes}
    samples[IMPORT] = {ALONE: [], WITH_OURS: []}
    memory = {subject: {name: list[float]() for name in STARTS} for subject in sizes}
    total = (1 + args.rounds) * (1 + len(sizes) * len(STARTS))
    with progress_bar(total, "bench launch") as bar:
        for number in range(1 + args.rounds):
            for subject, size in sizes.items():
                for name in shuffled(list(STARTS), seed=number):
                    strategy = name if name in STRATEGIES else STRATEGIES[0]
                    given = {"strategy": strategy, "devices": size, "num_steps": _LAUNCH_STEPS}
                    found = time_first_batch(SCRIPT, given, launcher=STARTS[name], timeout_s=args.timeout_s)
                    samples[subject][name].append(found[0])
                    memory[subject][name].append(found[1])
                    bar.update()
            for name, seconds in time_import(args.timeout_s).items():
                samples[IMPORT][name].append(seconds)
            bar.update()
    counted = {s: {name: values[1:] for name, values in of.items()} for s, of in samples.items()}
    added = (b - a for a, b in zip(counted[IMPORT][ALONE], counted[IMPORT][WITH_OURS], strict=True))
    memory_mib = {s: {name: statistics.median(of[1:]) for name, of in by.items()} for s, by in memory.items()}
    return Result(
        samples=counted,
        references=dict.fromkeys(sizes, STRATEGIES[0]) | {IMPORT: WITH_OURS},
        settings={"rounds": args.rounds, "world_size": args.world_size},
        extra={"memory_mib": memory_mib, "import_adds_ms": 1e3 * statistics.median(added)},
    )


def _format_launch(result: Result) -> str:
    lines = [format_comparisons(result.comparisons, ("start", "contender", "ours/contender"), "s")]
    for subject, mib in result.extra["memory_mib"].items():
        least = ", ".join(f"{name} {value:.0f} MiB" for name, value in mib.items())
        lines.append(f"{subject}: memory of all processes: {least} (medians)")
    added_ms = result.extra["import_adds_ms"]
    lines.append(f"import: lightning_ddp adds {added_ms:.1f} ms (median of the rounds' differences)")
    return "\n".join(lines)


def time_first_batch(
    script: Path, arguments: dict[str, Any], *, launcher: Sequence[str] = (), timeout_s: float
) -> tuple[float, float]:
    """Run a script until it prints `FIRST_BATCH`, then kill it; return the seconds and its memory in MiB."""
    with started(script, arguments, launcher) as running:
        moment: float = running.run_to("FIRST_BATCH", timeout_s, ends_there=True)
        return moment - running.started_at, running.memory_mib()


def time_import(timeout_s: float) -> dict[str, float]:
    """Return the seconds to import Lightning alone, and to import it with this package, in a new process."""
    with started(TRAINING, {"function": "time_import"}) as running:
        return dict(zip((ALONE, WITH_OURS), running.run_to("IMPORTED", timeout_s), strict=True))


LAUNCH: Final = Benchmark(
    name="launch",
    summary="Time and memory until a script's first batch, beside Lightning's \"ddp\"; time of the import.",
    unit="s",
    options=lambda parser: add_shared(parser, rounds=10, world_size=[2], timeout_s=120.0),
    measure=_measure_launch,
    table=_format_launch,
)


# ---------------------------------------------------------------------- failures

FAULTS: Final = ("exception", "kill")
VICTIMS: Final = ("first", "last")


def _measure_failures(args: argparse.Namespace) -> Result:
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    cells = list(itertools.product(FAULTS, VICTIMS, STRATEGIES))
    with progress_bar(args.rounds * len(cells), "bench failures") as bar:
        for _ in range(args.rounds):
            for fault, place, strategy in cells:
                victim = 0 if place == "first" else args.world_size - 1
                run = run_to_fault(
                    strategy, args.world_size, fault=fault, victim=victim, timeout_s=args.timeout_s
                )
                of_strategy = runs.setdefault(f"{fault}, {place} rank", {}).setdefault(strategy, [])
                of_strategy.append({name: value for name, value in vars(run).items() if name != "commits"})
                bar.update()
    return Result(
        samples={c: {name: [r["gone_s"] for r in of] for name, of in by.items()} for c, by in runs.items()},
        references=STRATEGIES[0],
        settings={"rounds": args.rounds, "world_size": args.world_size},
        extra={"runs": runs},
    )


def format_failures(result: Result) -> str:
    num_others = int(str(result.settings["world_size"])) - 1
    rows: list[tuple[str | int | float, ...]] = []
    for fault, by_strategy in result.extra["runs"].items():
        for strategy, runs in by_strategy.items():
            learned = [seconds for run in runs for seconds in run["learned_s"]]
            gone_s = result.comparisons[fault][strategy].median
            num_left = sum(run["num_left"] for run in runs)
            codes = ", ".join(sorted({str(run["exit_code"]) for run in runs}))
            rows.append(
                (fault, strategy, *_summary(learned, num_others * len(runs)), gone_s, num_left, codes)
            )
    headers = ("fault", "strategy", "others told", "median s", "worst s", "all gone s", "left", "exit")
    return format_table(headers, rows)


def _summary(seconds: Sequence[float], expected: int) -> tuple[str, str, str]:
    """Return three table cells: 'n of `expected`', and median and maximum of the times, or 'never'."""
    if not seconds:
        return f"0 of {expected}", "never", "never"
    return f"{len(seconds)} of {expected}", f"{statistics.median(seconds):.3f}", f"{max(seconds):.3f}"


FAILURES: Final = Benchmark(
    name="failures",
    summary='Time from a fault in one rank to the exit of all processes, beside Lightning\'s "ddp".',
    unit="s",
    options=lambda parser: add_shared(parser, rounds=3, world_size=2, timeout_s=60.0),
    measure=_measure_failures,
    table=format_failures,
    title="until all processes had exited; the ratio is custom_ddp / strategy",
)


# ---------------------------------------------------------------------- recovery

RECOVERIES: Final = ("shrink", "stalled", "restart", "replace", "cold")
_MODES: Final = ("stop", "shrink")
_NUM_STEPS: Final = 24
_NUM_STEPS_TO_REPLACE: Final = 400
"""Enough steps for the start of a process; steps after its join do not wait."""
_FAULT_STEP: Final = 8
_STEP_S: Final = 0.02
_STALL_S: Final = 2.0
_NUM_WARMUP: Final = 10
_NUM_TIMED: Final = 100
_RESTART: Final = ("-m", "torch.distributed.run", "--standalone", "--max-restarts=3")
_HEALTHY: Final = "step"
_KILLED: Final = "loss to next step"
_DURATIONS: Final = {"regroup s": "regroup_s", "full strength s": "full_s", "longest pause s": "pause_s"}
"""Keys of an outcome that may be None, by column."""


def _recovery_options(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, rounds=3, world_size=3, timeout_s=120.0)
    what = "ways to recover (stalled: the rank is stopped, not killed; cold: replaced without a fork)"
    add_choices(parser, "--contenders", RECOVERIES, RECOVERIES, what)


def _measure_recovery(args: argparse.Namespace) -> Result:
    names = list(dict.fromkeys(args.contenders))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with progress_bar(args.rounds * len(names) + 1, "bench recovery") as bar:
        healthy = time_steps(args.world_size, args.rounds, timeout_s=args.timeout_s)
        bar.update()
        for _ in range(args.rounds):
            for name in names:
                runs[name].append(run_to_recovery(name, args.world_size, timeout_s=args.timeout_s))
                bar.update()
    return Result(
        samples={
            _KILLED: {name: [1e3 * run["seconds"] for run in of] for name, of in runs.items()},
            _HEALTHY: {mode: [1e3 * seconds for seconds in of] for mode, of in healthy.items()},
        },
        references={_KILLED: names[0], _HEALTHY: "shrink"},
        settings={"rounds": args.rounds, "world_size": args.world_size}
        | {"step_s": _STEP_S, "stall_timeout_s": _STALL_S},
        extra={"runs": runs},
    )


def run_to_recovery(name: str, world_size: int, *, timeout_s: float) -> dict[str, Any]:
    """Train with recovery `name`, kill or stop the last rank; return times, lost samples, repeated steps.

    A run that has not ended after `timeout_s` is killed, and counts as not recovered.
    """
    is_replaced = name in ("replace", "cold")
    num_steps = _NUM_STEPS_TO_REPLACE if is_replaced else _NUM_STEPS
    arguments: dict[str, Any] = {
        "on_failure": "replace" if is_replaced else "shrink",
        "num_steps": num_steps,
        "fault_step": _FAULT_STEP,
        "step_s": _STEP_S,
        "stall_s": _STALL_S if name == "stalled" else None,
        "launcher": () if name == "cold" else RUN,
    }
    with tempfile.TemporaryDirectory(prefix="lightning_ddp_recovery_") as folder:
        if name == "restart":
            launcher = (*_RESTART, f"--nproc-per-node={world_size}")
            arguments |= {"on_failure": None, "folder": folder, "launcher": launcher}
        run = run_to_fault(
            "ddp" if name == "restart" else "custom_ddp",
            world_size,
            fault="stop" if name == "stalled" else "kill",
            victim=world_size - 1,
            timeout_s=timeout_s / 2,
            **arguments,
        )
    first, last = ([c for c in run.commits if c.rank == rank] for rank in (0, world_size - 1))
    before = max((commit.step for commit in first if commit.moment_s <= 0), default=0)
    after = [commit.moment_s for commit in first if commit.moment_s > 0 and commit.step > before]
    full = min((commit for commit in last if commit.moment_s > 0 and commit.step > before), default=None)
    pauses = [
        later.moment_s - sooner.moment_s
        for sooner, later in itertools.pairwise(first)
        if full is not None and before < sooner.step and later.step <= full.step
    ]
    used = {sample for commit in run.commits for sample in commit.samples}
    return {
        "seconds": min(after, default=timeout_s),
        "is_recovered": bool(after),
        "steps_again": len(first) - len({commit.step for commit in first}),
        "samples_lost": world_size * num_steps - len(used),
        "full_s": None if full is None else full.moment_s,
        "pause_s": max(pauses, default=None),
        "regroup_s": next(iter(run.regroups_s), None),
    }


def time_steps(world_size: int, num_rounds: int, *, timeout_s: float) -> dict[str, list[float]]:
    """Run fits without a failure in one script; return each fit's mean step seconds, by `on_failure`.

    One script runs all fits, two of each value per round in both orders: the same code differs by some
    percent between processes, and the second fit is faster.
    """
    turns = [*_MODES, *_MODES[::-1]] * num_rounds
    arguments = {
        "function": "time_fits",
        "devices": world_size,
        "model": "convbn40",
        "num_steps": _NUM_WARMUP + _NUM_TIMED,
        "num_warmup": _NUM_WARMUP,
        "turns": [*_MODES, *turns],
    }
    with started(TRAINING, arguments, RUN) as running:
        seconds = running.run_to("STEP_SECONDS", timeout_s * (num_rounds + 1))[len(_MODES) :]
    return {mode: [s for s, turn in zip(seconds, turns, strict=True) if turn == mode] for mode in _MODES}


def format_recovery(result: Result) -> str:
    rows: list[tuple[str | int | float, ...]] = []
    for name, runs in result.extra["runs"].items():
        label = f"{name} (stall_timeout {_STALL_S:g} s)" if name == "stalled" else name
        recovered = [run["seconds"] for run in runs if run["is_recovered"]]
        known = ([run[key] for run in runs if run[key] is not None] for key in _DURATIONS.values())
        medians = (f"{statistics.median(seconds):.3f}" if seconds else "-" for seconds in known)
        again, lost = (max(run[key] for run in runs) for key in ("steps_again", "samples_lost"))
        rows.append((label, *_summary(recovered, len(runs)), *medians, again, lost))
    headers = ("a rank is lost", "went on", "median s", "worst s", *_DURATIONS, "steps again", "samples lost")
    healthy = format_comparisons(
        {_HEALTHY: result.comparisons[_HEALTHY]}, (_HEALTHY, "on_failure", "shrink / this"), "ms"
    )
    return f"{format_table(headers, rows)}\n\n{healthy}"


RECOVERY: Final = Benchmark(
    name="recovery",
    summary="Time from a kill to the end of the next step, beside restarts by torchrun.",
    unit="ms",
    options=_recovery_options,
    measure=_measure_recovery,
    table=format_recovery,
    title="the ratio is the first or shrink / contender",
)

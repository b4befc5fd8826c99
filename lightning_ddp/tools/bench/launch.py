"""Time from the start of a training script to its first batch, and memory then, beside Lightning's "ddp".

"custom_ddp" is measured twice: as `python script.py`, and as `python -m lightning_ddp run script.py`. A
second part measures how much `import lightning_ddp` adds to the import of Lightning. Each sample starts a
real script, which starts its other ranks itself, on the CPU, and is killed at its first batch; each import
has a new process. Contenders take turns, and one uncounted run of each warms the file cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightning_ddp.tools import ToolError
from lightning_ddp.tools.bench import Benchmark, Result, format_comparisons
from lightning_ddp.tools.command_line import add_choices, add_shared, progress_bar
from lightning_ddp.tools.scripts import STRATEGIES, TRAINING, compiled_package, started

CONTENDERS: Final = {STRATEGIES[0]: (), "run": ("-m", "lightning_ddp", "run"), STRATEGIES[1]: ()}
"""Contenders, with the arguments before the script on the command line."""
NUM_STEPS: Final = 2000
"""Steps of each rank, enough for all ranks to run while their memory is read."""
PARTS: Final = ("first_batch", "import")
ALONE: Final = "alone"
"""Import of Lightning alone."""
WITH_OURS: Final = "with lightning_ddp"
"""Import of Lightning, and then of this package."""
SCRIPT = TRAINING
"""Script to start."""

_NAMESPACES = ("pytorch_lightning", "lightning")
_IMPORTS: Final = """\
import importlib, json, sys, time

sys.path.insert(0, sys.argv[2])
start = time.perf_counter()
importlib.import_module(sys.argv[1])
between = time.perf_counter()
importlib.import_module("lightning_ddp")
print(json.dumps([between - start, time.perf_counter() - start]))
"""


def _options(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, rounds=10, world_size=[2], timeout_s=120.0)
    add_choices(
        parser,
        "--parts",
        PARTS,
        PARTS,
        "what to measure: the time to the first training batch, the time of `import lightning_ddp`",
    )


def _measure(args: argparse.Namespace) -> Result:
    starts: dict[str, dict[str, list[float]]] = {}
    memory: dict[str, dict[str, float]] = {}
    imports: dict[str, dict[str, list[float]]] = {}
    with compiled_package() as package_root:
        if "first_batch" in args.parts:
            starts, memory = _time_starts(args, package_root)
        if "import" in args.parts:
            imports = time_imports(args.rounds, package_root, timeout_s=args.timeout_s)
    added = {subject: added_ms(rounds) for subject, rounds in imports.items()}
    return Result(
        samples=starts | imports,
        references=dict.fromkeys(starts, STRATEGIES[0]) | dict.fromkeys(imports, WITH_OURS),
        settings={"rounds": args.rounds, "world_size": args.world_size, "parts": args.parts},
        extra={"memory_mib": memory, "import_adds_ms": added},
    )


def _format(result: Result) -> str:
    """Format a row per start and contender, followed by the memory and the cost of the import."""
    lines = [format_comparisons(result.comparisons, ("start", "contender", "ours/contender"), "s")]
    for subject, mib in result.extra["memory_mib"].items():
        least = ", ".join(f"{name} {value:.0f} MiB" for name, value in mib.items())
        lines.append(f"{subject}: memory of all processes: {least} (medians)")
    for subject, milliseconds in result.extra["import_adds_ms"].items():
        added = f"lightning_ddp adds {milliseconds:.1f} ms (median of the rounds' differences)"
        lines.append(f"{subject}: {added}")
    return "\n".join(lines)


def time_first_batch(
    script: Path, arguments: dict[str, Any], *, launcher: Sequence[str] = (), timeout_s: float
) -> tuple[float, float]:
    """Run a script to its line `FIRST_BATCH <seconds since the epoch>`, and kill it there.

    Returns the seconds from its start, and the memory of its processes then in MiB.
    """
    with started(script, arguments, launcher) as running:
        moment = float(running.run_to("FIRST_BATCH", timeout_s, ends_there=True))
        return moment - running.started_at, running.memory_mib()


def _time_starts(
    args: argparse.Namespace, package_root: str
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, float]]]:
    """Return seconds of each round and median memory in MiB, both by subject and contender."""
    sizes = {f"first batch, {size} devices": size for size in dict.fromkeys(args.world_size)}
    samples = {subject: {name: list[float]() for name in CONTENDERS} for subject in sizes}
    memory = {subject: {name: list[float]() for name in CONTENDERS} for subject in sizes}
    with progress_bar((1 + args.rounds * len(sizes)) * len(CONTENDERS), "bench launch") as bar:

        def time_one(name: str, size: int) -> tuple[float, float]:
            strategy = name if name in STRATEGIES else STRATEGIES[0]
            arguments = {"strategy": strategy, "devices": size, "package_root": package_root}
            arguments["num_steps"] = NUM_STEPS
            found = time_first_batch(SCRIPT, arguments, launcher=CONTENDERS[name], timeout_s=args.timeout_s)
            bar.update()
            return found

        for name in CONTENDERS:
            time_one(name, min(sizes.values()))
        for number in range(args.rounds):
            for subject, size in sizes.items():
                for name in CONTENDERS if number % 2 else reversed(CONTENDERS):
                    seconds, mib = time_one(name, size)
                    samples[subject][name].append(seconds)
                    memory[subject][name].append(mib)
                if bar.disable:  # without a progress bar, print the progress of a long run
                    last = ", ".join(f"{name} {of[-1]:.1f} s" for name, of in samples[subject].items())
                    text = f"bench launch: round {number + 1} of {args.rounds}, {subject}: {last}"
                    print(text, file=sys.stderr, flush=True)
    medians = {s: {name: statistics.median(mib) for name, mib in of.items()} for s, of in memory.items()}
    return samples, medians


def time_imports(
    num_rounds: int, package_root: str, *, timeout_s: float
) -> dict[str, dict[str, list[float]]]:
    """Time imports of Lightning and this package in new processes: seconds of each round.

    Returned by "import <name>", and `ALONE` or `WITH_OURS`. Installed names of Lightning take turns. A first
    round, which is not counted, fills the file cache.
    """
    names = [name for name in _NAMESPACES if importlib.util.find_spec(name) is not None]
    samples = {f"import {name}": {ALONE: list[float](), WITH_OURS: list[float]()} for name in names}
    with progress_bar((num_rounds + 1) * len(names), "imports") as bar:
        for round_index in range(num_rounds + 1):
            for name in names if round_index % 2 else reversed(names):
                alone, with_ours = _time_import(name, package_root, timeout_s)
                if round_index > 0:
                    samples[f"import {name}"][ALONE].append(alone)
                    samples[f"import {name}"][WITH_OURS].append(with_ours)
                bar.update()
    return samples


def added_ms(rounds: Mapping[str, Sequence[float]]) -> float:
    """Return the median over the rounds of the import time that this package adds, in milliseconds.

    >>> added_ms({"alone": [1.0, 2.0, 1.0], "with lightning_ddp": [1.25, 2.5, 1.5]})
    500.0
    """
    pairs = zip(rounds[ALONE], rounds[WITH_OURS], strict=True)
    return 1e3 * statistics.median(total - alone for alone, total in pairs)


def _time_import(name: str, package_root: str, timeout_s: float) -> tuple[float, float]:
    command = [sys.executable, "-c", _IMPORTS, name, package_root]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"import {name} was still running after {timeout_s:g} s") from error
    if done.returncode != 0:
        raise ToolError(f"import {name} failed with status {done.returncode}:\n{done.stderr[-4000:]}")
    alone, with_ours = json.loads(done.stdout.splitlines()[-1])
    return alone, with_ours


LAUNCH: Final = Benchmark(
    name="launch",
    summary="Time and memory until a script's first batch, beside Lightning's \"ddp\"; time of the import.",
    unit="s",
    options=_options,
    measure=_measure,
    table=_format,
)

"""Time from the start of a training script to its first batch, and memory then, beside Lightning's "ddp".

"custom_ddp" is measured twice: as `python script.py`, and as `python -m lightning_ddp run script.py`. Beside
that stands how much `import lightning_ddp` adds to the import of Lightning. Each sample starts a real script,
which starts its other ranks itself, on the CPU, and is killed at its first batch; each import has a new
process. Contenders take turns, and one uncounted round of each warms the file cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lightning_ddp.tools.bench import Benchmark, Result, format_comparisons
from lightning_ddp.tools.command_line import add_shared, progress_bar
from lightning_ddp.tools.ranks import shuffled
from lightning_ddp.tools.scripts import RUN, STRATEGIES, TRAINING, compiled_package, started

CONTENDERS: Final = {STRATEGIES[0]: (), "run": RUN, STRATEGIES[1]: ()}
"""Contenders, with the arguments before the script on the command line."""
NUM_STEPS: Final = 2000
"""Steps of each rank, enough for all ranks to run while their memory is read."""
SCRIPT = TRAINING
IMPORT: Final = "import"
ALONE, WITH_OURS = "alone", "with lightning_ddp"
"""Imports of Lightning alone, and of this package after it."""


def _measure(args: argparse.Namespace) -> Result:
    sizes = {f"first batch, {size} devices": size for size in dict.fromkeys(args.world_size)}
    samples = {subject: {name: list[float]() for name in CONTENDERS} for subject in sizes}
    samples[IMPORT] = {ALONE: [], WITH_OURS: []}
    memory = {subject: {name: list[float]() for name in CONTENDERS} for subject in sizes}
    total = (1 + args.rounds) * (1 + len(sizes) * len(CONTENDERS))
    with compiled_package() as package_root, progress_bar(total, "bench launch") as bar:
        for number in range(1 + args.rounds):
            for subject, size in sizes.items():
                for name in shuffled(list(CONTENDERS), seed=number):
                    strategy = name if name in STRATEGIES else STRATEGIES[0]
                    given = {"strategy": strategy, "devices": size, "num_steps": NUM_STEPS}
                    given["package_root"] = package_root
                    found = time_first_batch(
                        SCRIPT, given, launcher=CONTENDERS[name], timeout_s=args.timeout_s
                    )
                    samples[subject][name].append(found[0])
                    memory[subject][name].append(found[1])
                    bar.update()
            for name, seconds in time_import(package_root, args.timeout_s).items():
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


def _format(result: Result) -> str:
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
    """Run a script until it prints `FIRST_BATCH <seconds since the epoch>`, and kill it there.

    Returns the seconds from its start, and the memory of its processes then in MiB.
    """
    with started(script, arguments, launcher) as running:
        moment = float(running.run_to("FIRST_BATCH", timeout_s, ends_there=True))
        return moment - running.started_at, running.memory_mib()


def time_import(package_root: str, timeout_s: float) -> dict[str, float]:
    """Return the seconds to import Lightning alone, and to import it with this package, in a new process."""
    with started(TRAINING, {"function": "time_import", "package_root": package_root}) as running:
        seconds = json.loads(running.run_to("IMPORTED", timeout_s))
    return dict(zip((ALONE, WITH_OURS), seconds, strict=True))


LAUNCH: Final = Benchmark(
    name="launch",
    summary="Time and memory until a script's first batch, beside Lightning's \"ddp\"; time of the import.",
    unit="s",
    options=lambda parser: add_shared(parser, rounds=10, world_size=[2], timeout_s=120.0),
    measure=_measure,
    table=_format,
)

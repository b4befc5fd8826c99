"""Time from starting a training script to its first batch: strategy "custom_ddp" beside Lightning's "ddp".

Beside it stands what ``import lightning_ddp`` adds to the import of Lightning.

Each sample starts a real script, which starts its other ranks itself, on the CPU, and is ended at its first
batch. Strategies take turns, and one run of each that is not counted warms the file cache.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lightning_ddp.tools.bench.arguments import add_common_arguments
from lightning_ddp.tools.bench.imports import WITH_OURS, added_ms, installed_namespaces, time_imports
from lightning_ddp.tools.bench.outputs import write_outputs
from lightning_ddp.tools.bench.report import Comparison, compare, format_table, note, progress_bar
from lightning_ddp.tools.bench.scripts import compiled_package, run_to_mark

OURS: Final = "custom_ddp"
STRATEGIES: Final = (OURS, "ddp")

PARTS: Final = ("first_batch", "import")

_MARK = re.compile(r"^FIRST_BATCH (\d+\.\d+)$", re.MULTILINE)

SCRIPT: Final = """\
import sys
import time

import pytorch_lightning as pl
import torch

strategy, devices, package_root = sys.argv[1:]
if strategy == "custom_ddp":
    sys.path.insert(0, package_root)
    import lightning_ddp


class Probe(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)

    def on_train_batch_start(self, batch, batch_idx):
        if self.global_rank == 0:
            print(f"FIRST_BATCH {time.time():.6f}", flush=True)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


trainer = pl.Trainer(
    strategy=strategy,
    accelerator="cpu",
    devices=int(devices),
    max_steps=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Probe(), torch.utils.data.DataLoader(torch.randn(64, 32), batch_size=8))
"""
"""The measured script; its arguments are the strategy, the number of devices and where this package lies."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench launch``; its deadline holds for each script."""
    add_common_arguments(parser, rounds=10, timeout_s=120.0, world_size=[2])
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=f"what is measured, any of {', '.join(PARTS)} (default: all)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the files that were asked for.

    Returns:
        The exit status, 0.

    Raises:
        BenchmarkError: If a script fails or its deadline passes.
    """
    from lightning_ddp.tools.bench.session import refuse_launched

    refuse_launched("launch")
    samples: dict[str, dict[str, list[float]]] = {}
    added: dict[str, float] = {}
    if "first_batch" in args.parts:
        samples |= _measure(args)
    if "import" in args.parts:
        imports = _measure_imports(args)
        added = {subject: added_ms(rounds) for subject, rounds in imports.items()}
        samples |= imports
    comparisons = {
        subject: compare(rounds, reference=WITH_OURS if subject in added else OURS)
        for subject, rounds in samples.items()
    }
    print(format_report(comparisons, added))
    write_outputs(
        args,
        benchmark="launch",
        unit="s",
        settings={"rounds": args.rounds, "world_size": args.world_size, "parts": args.parts},
        samples=samples,
        comparisons=comparisons,
        extra={"import_adds_ms": added},
        title="medians with quartiles; the ratio is ours / contender",
    )
    return 0


def format_report(comparisons: Mapping[str, Mapping[str, Comparison]], added_ms: Mapping[str, float]) -> str:
    """Lay out one row per start and contender, and what the import adds under them."""
    rows = [
        (subject, name, figures.median, figures.iqr, figures.ratio)
        for subject, contenders in comparisons.items()
        for name, figures in contenders.items()
    ]
    lines = [format_table(("start", "contender", "median s", "IQR s", "ours/contender"), rows)]
    for subject, milliseconds in added_ms.items():
        lines.append(
            f"{subject}: lightning_ddp adds {milliseconds:.1f} ms (median of the rounds' differences)"
        )
    return "\n".join(lines)


def time_first_batch(script: Path, arguments: list[str], *, timeout_s: float) -> float:
    """Run a script to its first training batch, end it there, and return the seconds from its start.

    Args:
        script: A file that prints ``FIRST_BATCH <seconds since the epoch>`` at its first batch.
        arguments: The script's own arguments.
        timeout_s: Seconds that it has to get there.

    Raises:
        BenchmarkError: If the script fails, is too slow or never prints the line.

    No process of the script is left.
    """
    start, found = run_to_mark(
        script,
        arguments,
        _MARK,
        what="its first batch",
        timeout_s=timeout_s,
        ends_there=True,
    )
    return float(found) - start


def _measure(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    sizes = tuple(dict.fromkeys(args.world_size))
    samples = {_subject(size): {name: list[float]() for name in STRATEGIES} for size in sizes}
    num_scripts = (1 + args.rounds * len(sizes)) * len(STRATEGIES)
    with (
        tempfile.TemporaryDirectory() as folder,
        compiled_package() as package_root,
        progress_bar(num_scripts, "bench launch") as bar,
    ):
        script = Path(folder, "first_batch.py")
        script.write_text(SCRIPT, encoding="utf-8")

        def time_one(name: str, size: int, where: str) -> float:
            bar.set_postfix_str(f"{where}: {name} on {size} devices")
            arguments = [name, str(size), str(package_root)]
            seconds = time_first_batch(script, arguments, timeout_s=args.timeout_s)
            bar.update()
            return seconds

        for name in STRATEGIES:
            time_one(name, min(sizes), "not counted")
        for round_index in range(args.rounds):
            where = f"round {round_index + 1} of {args.rounds}"
            for size in sizes:
                found = samples[_subject(size)]
                for name in STRATEGIES if round_index % 2 else reversed(STRATEGIES):
                    found[name].append(time_one(name, size, where))
                note(bar, f"bench launch: {where}, {_describe_last(_subject(size), found)}")
    return samples


def _describe_last(subject: str, found: Mapping[str, list[float]]) -> str:
    return f"{subject}: " + ", ".join(f"{name} {seconds[-1]:.1f} s" for name, seconds in found.items())


def _subject(world_size: int) -> str:
    return f"first batch, {world_size} devices"


def _measure_imports(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    with progress_bar((args.rounds + 1) * len(installed_namespaces()), "imports") as bar:
        return time_imports(args.rounds, timeout_s=args.timeout_s, advance=bar.update)

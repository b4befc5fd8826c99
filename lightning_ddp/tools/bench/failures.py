"""Time from a fault in one rank to its end on all others: strategy "custom_ddp" beside Lightning's "ddp".

Each sample starts a real script in which one rank fails in a training step. Shown are how soon the other
ranks learned of it in Python (so that callbacks and loggers ran), how soon every process was gone, and how
the script ended. A process that does not end within the deadline is counted and killed.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning_ddp.tools.bench import BenchmarkError
from lightning_ddp.tools.bench.arguments import add_common_arguments
from lightning_ddp.tools.bench.outputs import write_outputs
from lightning_ddp.tools.bench.report import compare, format_table, progress_bar
from lightning_ddp.tools.bench.scripts import PACKAGE_ROOT, num_alive, read_output, started

OURS: Final = "custom_ddp"
STRATEGIES: Final = (OURS, "ddp")
FAULTS: Final = ("exception", "kill")
VICTIMS: Final = ("first", "last")

_POLL_S = 0.02

SCRIPT: Final = """\
import os
import runpy
import signal
import sys
import time

import pytorch_lightning as pl
import torch

strategy, devices, package_root, fault, victim, accelerator, preload = sys.argv[1:]
if strategy == "custom_ddp":
    sys.path.append(package_root)
    import lightning_ddp
if preload:
    runpy.run_path(preload)


def say(text):
    os.write(1, f"{text} {time.time():.6f}\\n".encode())


class Probe(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)

    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == int(victim):
            say("FAULT")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the fault of this benchmark")
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Witness(pl.Callback):
    def on_exception(self, trainer, module, exception):
        if trainer.global_rank != int(victim):
            said = f"{type(exception).__name__} of {getattr(exception, 'rank', 'nobody')}"
            say(f"RANK {trainer.global_rank} RAISED {said}: LEARNED")


trainer = pl.Trainer(
    strategy=strategy,
    accelerator=accelerator,
    devices=int(devices),
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[Witness()],
)
trainer.fit(Probe(), torch.utils.data.DataLoader(torch.randn(256, 32), batch_size=4))
"""
"""The failing script; its arguments: strategy, devices, where this package lies, fault, rank that fails,
accelerator, a Python file that each rank runs first or nothing."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What came of one failing script."""

    learned_s: tuple[float, ...]
    """Seconds from the fault until each of the other ranks that learned of it did."""
    raised: dict[int, str]
    """What each of them raised, and the rank that it names: 'PeerFailure of 1'."""
    gone_s: float
    """Seconds from the fault until no process was left; the deadline where some had to be killed."""
    num_left: int
    """Processes that were left when the script itself had ended, and did not follow within the deadline."""
    exit_code: int | None
    """Of the script; None if it did not end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench failures``; its deadline holds from each fault to the end of all."""
    add_common_arguments(parser, rounds=3, timeout_s=60.0)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the files that were asked for.

    Returns:
        The exit status, 0.

    Raises:
        BenchmarkError: If a script never reaches its fault.
    """
    from lightning_ddp.tools.bench.session import refuse_launched

    refuse_launched("failures")
    samples = _measure(args)
    rows = [_row(*cell, found, args.world_size - 1) for cell, found in sorted(samples.items())]
    headers = (
        "fault",
        "rank",
        "strategy",
        "others told",
        "median s",
        "worst s",
        "all gone s",
        "left",
        "exit",
    )
    print(format_table(headers, rows))
    gone: dict[str, dict[str, list[float]]] = {}
    for (fault, victim, strategy), found in samples.items():
        subject = gone.setdefault(f"{fault}, {victim} rank", {})
        subject[strategy] = [sample.gone_s for sample in found]
    write_outputs(
        args,
        benchmark="failures",
        unit="s",
        settings={"rounds": args.rounds, "world_size": args.world_size},
        samples=gone,
        comparisons={subject: compare(rounds, reference=OURS) for subject, rounds in gone.items()},
        extra={"scripts": {"/".join(cell): [vars(s) for s in found] for cell, found in samples.items()}},
        title=f"until all processes were gone; the ratio is {OURS} / strategy",
    )
    return 0


def _row(
    fault: str, victim: str, strategy: str, found: list[Sample], num_others: int
) -> tuple[str | int | float, ...]:
    learned = [seconds for sample in found for seconds in sample.learned_s]
    codes = sorted({str(sample.exit_code) for sample in found})
    return (
        fault,
        victim,
        strategy,
        f"{len(learned)} of {num_others * len(found)}",
        statistics.median(learned) if learned else "never",
        max(learned) if learned else "never",
        statistics.median(sample.gone_s for sample in found),
        sum(sample.num_left for sample in found),
        ", ".join(codes),
    )


def _measure(args: argparse.Namespace) -> dict[tuple[str, str, str], list[Sample]]:
    cells = [(f, v, s) for f in FAULTS for v in VICTIMS for s in STRATEGIES]
    samples: dict[tuple[str, str, str], list[Sample]] = {cell: [] for cell in cells}
    with (
        tempfile.TemporaryDirectory() as folder,
        progress_bar(args.rounds * len(cells), "bench failures") as bar,
    ):
        script = Path(folder, "failing.py")
        script.write_text(SCRIPT, encoding="utf-8")
        for _ in range(args.rounds):
            for fault, victim, strategy in cells:
                rank = 0 if victim == "first" else args.world_size - 1
                arguments = failing_arguments(strategy, args.world_size, fault=fault, victim=rank)
                samples[fault, victim, strategy].append(
                    run_failing(script, arguments, timeout_s=args.timeout_s)
                )
                bar.update()
    return samples


def failing_arguments(
    strategy: str,
    world_size: int,
    *,
    fault: str,
    victim: int,
    accelerator: str = "cpu",
    preload: str | None = None,
) -> list[str]:
    """What `SCRIPT` is given."""
    return [strategy, str(world_size), str(PACKAGE_ROOT), fault, str(victim), accelerator, preload or ""]


def run_failing(script: Path, arguments: list[str], *, timeout_s: float) -> Sample:
    """Run a script that fails, and wait until all of its processes are gone.

    Args:
        script: A file that prints ``FAULT <seconds since the epoch>``, and ``LEARNED <...>`` from each other
            rank that is told, maybe after ``RANK <rank> RAISED <what>: `` in its line.
        arguments: The script's own arguments.
        timeout_s: Seconds for it to reach its fault, and again from there until all processes are gone.

    Raises:
        BenchmarkError: If it reaches no fault. No process is left.
    """
    output = script.with_suffix(".log")
    deadline = time.monotonic() + 2 * timeout_s
    with started(script, arguments, output) as process:
        while num_alive(process) > 0 and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        gone, num_left = time.time(), num_alive(process)
        exit_code = process.wait() if num_left == 0 else process.poll()
    text = read_output(output)
    marks = {
        name: [float(t) for t in re.findall(rf"{name} (\d+\.\d+)", text)] for name in ("FAULT", "LEARNED")
    }
    if not marks["FAULT"]:
        raise BenchmarkError(f"{' '.join(arguments)} reached no fault:\n{read_output(output, tail=True)}")
    start = marks["FAULT"][0]
    learned = tuple(moment - start for moment in marks["LEARNED"])
    raised = {int(rank): what for rank, what in re.findall(r"RANK (\d+) RAISED (.*): LEARNED", text)}
    return Sample(
        learned_s=learned, raised=raised, gone_s=gone - start, num_left=num_left, exit_code=exit_code
    )

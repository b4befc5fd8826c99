"""``bench step --trainer``: a step inside Lightning's Trainer, strategy "custom_ddp" beside "ddp".

A Trainer owns its processes, so that strategies take turns by whole scripts: each trains some steps of one
model, and the median of those after the warm-up is the sample of its turn. Both train the same weights and
batches; a step lasts from `on_train_batch_start` to `on_train_batch_end` on rank 0.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from lightning_ddp.tools.bench import BenchmarkError
from lightning_ddp.tools.bench.scripts import compiled_package, run_to_mark

__all__ = ["STRATEGIES", "TRAINER_OURS", "time_trainer_steps"]

TRAINER_OURS: Final = "custom_ddp"
STRATEGIES: Final = (TRAINER_OURS, "ddp")

_MARK = re.compile(r"^STEP_SECONDS (\[.*\])$", re.MULTILINE)

SCRIPT: Final = """\
import importlib.util
import json
import sys
import time
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch

strategy, devices, accelerator, model, num_steps, package_root = sys.argv[1:]
sys.path.insert(0, package_root)
if strategy == "custom_ddp":
    import lightning_ddp
# by its path, so that "ddp" runs without the package
spec = importlib.util.spec_from_file_location(
    "bench_models", Path(package_root, "lightning_ddp", "tools", "bench", "models.py")
)
models = sys.modules["bench_models"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(models)
warnings.filterwarnings("ignore")
torch.set_num_threads(1)


class Probe(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.module = models.build_workload(model, rank=0).module
        self.seconds = []

    def on_train_start(self):
        self.inputs = models.build_workload(model, rank=self.global_rank).batch.to(self.device)

    def on_train_batch_start(self, batch, batch_idx):
        self.trainer.strategy.barrier()
        self.started_at = self.now()

    def training_step(self, batch, batch_idx):
        return models.compute_loss(self.module(self.inputs))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seconds.append(self.now() - self.started_at)

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


probe = Probe()
trainer = pl.Trainer(
    strategy=strategy,
    accelerator=accelerator,
    devices=int(devices),
    max_steps=int(num_steps),
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(probe, torch.utils.data.DataLoader(torch.zeros(int(devices) * int(num_steps), 1)))
if trainer.global_rank == 0:
    print(f"STEP_SECONDS {json.dumps(probe.seconds)}", flush=True)
"""
"""The measured script; its arguments: strategy, devices, accelerator, model, steps, package folder."""


def time_trainer_steps(
    models: Sequence[str],
    *,
    num_rounds: int,
    num_warmup_steps: int,
    num_steps: int,
    world_size: int,
    device: str,
    timeout_s: float,
    advance: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, list[float]]]:
    """Train every model under both strategies, a script each, in turns.

    Args:
        models: Names of `lightning_ddp.tools.bench.arguments.MODEL_NAMES`.
        num_rounds: Scripts of each model and strategy.
        num_warmup_steps: First steps of each script, which do not count.
        num_steps: Steps after them.
        world_size: Devices of the Trainer.
        device: ``"cpu"`` or ``"cuda"``.
        timeout_s: Deadline of each script in seconds.
        advance: Called after each script.

    Returns:
        ``"<model>, Trainer"`` -> strategy -> milliseconds of each round.

    Raises:
        BenchmarkError: If a script fails or its deadline passes. No process is left.
    """
    samples = {f"{model}, Trainer": {name: list[float]() for name in STRATEGIES} for model in models}
    with tempfile.TemporaryDirectory() as folder, compiled_package() as package_root:
        script = Path(folder, "trainer_steps.py")
        script.write_text(SCRIPT, encoding="utf-8")
        for round_index in range(num_rounds):
            for model in models:
                for name in STRATEGIES if round_index % 2 else reversed(STRATEGIES):
                    arguments = (name, world_size, device, model, num_warmup_steps + num_steps, package_root)
                    seconds = _train(script, [str(argument) for argument in arguments], timeout_s)
                    if len(seconds) != num_warmup_steps + num_steps:
                        raise BenchmarkError(f"{name} trained {len(seconds)} steps, not as many as asked for")
                    milliseconds = 1e3 * statistics.median(seconds[num_warmup_steps:])
                    samples[f"{model}, Trainer"][name].append(milliseconds)
                    advance()
    return samples


def _train(script: Path, arguments: list[str], timeout_s: float) -> list[float]:
    """The seconds of each step of a script."""
    _, found = run_to_mark(
        script,
        arguments,
        _MARK,
        what="the end of its steps",
        timeout_s=timeout_s,
        may_fail_later=arguments[0] != TRAINER_OURS,
    )
    seconds: list[float] = json.loads(found)
    return seconds

"""Training script for timing a start, steps or a failure, which prints the times of events; run as a file.

Its argument is a JSON object with the keywords of `main`. With the strategy "ddp" it does not import this
package, which is in the folder `package_root`.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any


def _say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # one write, so that lines of the ranks do not mix


def main(
    *,
    strategy: str,
    package_root: str,
    devices: int,
    accelerator: str = "cpu",
    num_steps: int = 1,
    model: str | None = None,
    fault: str | None = None,
    victim: int = 0,
    preload: str | None = None,
    fault_step: int = 3,
    on_failure: Any = None,
    folder: str | None = None,
    step_s: float = 0.0,
    stall_s: float | None = None,
    wait_s: float = 0.0,
    turns: list[str] | None = None,
    num_warmup: int = 0,
) -> None:
    """Train, and print `FIRST_BATCH`, `FAULT` and `LEARNED` with the time, and `STEP_SECONDS` with a list.

    Steps of a model of `models.py` are timed. The victim fails once by `fault`, "exception", "kill" or
    "stop", in step `fault_step` after a wait of `wait_s`. With `on_failure`, or a folder for a checkpoint of
    each step from which it resumes, all ranks print `COMMIT` with the time, the step and the samples of each
    batch. Steps last `step_s` until a new rank has joined; rank 0 prints `REGROUP` with the seconds of the
    recovery. With `turns`, a list of values of `on_failure`, there is one fit for each, with steps on a part
    of a sample; the list has the mean step of each fit, with its boundaries, after `num_warmup` steps.
    """
    models: Any = importlib.import_module("models") if model else None  # "ddp" runs without the package
    # The names of the modules in this folder are common, and could hide others.
    sys.path[:] = [path for path in sys.path if Path(path) != Path(__file__).parent]
    import pytorch_lightning as pl
    import torch

    if strategy == "custom_ddp":
        sys.path.insert(0, package_root)
        import lightning_ddp

    has_ledger = (on_failure is not None or folder is not None) and not turns
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    place = int(os.environ.get("LOCAL_RANK", "0"))
    if preload:
        runpy.run_path(preload)
    if model:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)

    class Probe(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.module = models.build_workload(model, rank=0).module if models else torch.nn.Linear(32, 2)
            self.seconds: list[float] = []
            self.step_s = step_s

        def on_train_start(self) -> None:
            rank = self.global_rank
            inputs = models.build_workload(model, rank=rank).batch if models else torch.randn(8, 32)
            self.inputs = (inputs[:1, ..., :8, :8] if turns else inputs).to(self.device)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_rank == 0 and batch_idx == 0:
                _say(f"FIRST_BATCH {time.time():.6f}")
            if models and (batch_idx == num_warmup if turns else True):
                self.trainer.strategy.barrier()
                self.started_at = self.now()

        def on_train_end(self) -> None:
            if turns:
                self.seconds.append((self.now() - self.started_at) / (num_steps - num_warmup))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(self.step_s)
            if fault and self.global_step == fault_step and place == victim and attempt == 0:
                time.sleep(wait_s)
                _say(f"FAULT {time.time():.6f}")
                if fault != "exception":
                    os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
                raise ValueError("the fault of this benchmark")
            return self.module(self.inputs).square().mean()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if models and not turns:
                self.seconds.append(self.now() - self.started_at)
            if has_ledger:
                ids = " ".join(map(str, batch[:, 0].int().tolist()))
                _say(f"COMMIT {time.time():.6f} {self.trainer.global_step} {self.global_rank} {ids}")

        def on_world_changed(self, change: Any) -> None:
            if change.joined_ranks:
                self.step_s = 0.0
            if change.new_rank == 0:
                _say(f"REGROUP {change.seconds:.6f}")

        def now(self) -> float:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return time.perf_counter()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    class Witness(pl.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            if trainer.global_rank != victim:
                said = f"{type(exception).__name__} of {getattr(exception, 'rank', 'nobody')}"
                _say(f"RANK {trainer.global_rank} RAISED {said}: LEARNED {time.time():.6f}")

    callbacks: list[Any] = [Witness()] if fault else []
    if folder is not None:
        callbacks.append(pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_last=True))
    last = Path(folder, "last.ckpt") if folder is not None else None
    seconds = []
    for mode in turns or [on_failure]:
        chosen: Any = strategy
        if mode is not None:
            stall_timeout = timedelta(seconds=stall_s) if stall_s is not None else None
            chosen = lightning_ddp.CustomDDPStrategy(on_failure=mode, stall_timeout=stall_timeout)
        trainer = pl.Trainer(
            strategy=chosen,
            accelerator=accelerator,
            devices=devices,
            max_steps=-1 if has_ledger and fault else num_steps,
            max_epochs=1 if has_ledger and fault else None,
            logger=False,
            enable_checkpointing=folder is not None,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
        )
        data: Any = torch.arange(float(devices * num_steps)).unsqueeze(1)  # a tensor has length and items
        resumed = str(last) if last is not None and last.exists() else None
        probe = Probe()
        trainer.fit(probe, torch.utils.data.DataLoader(data), ckpt_path=resumed)
        seconds += probe.seconds
    if trainer.global_rank == 0:
        _say(f"STEP_SECONDS {json.dumps(seconds)}")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))

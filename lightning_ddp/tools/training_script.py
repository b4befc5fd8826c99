"""Training script for timing a start, steps or a failure, which prints the times of events; run as a file.

Its argument is a JSON object with the name of a `function` below, by default `train`, and its keywords. With
the strategy "ddp" it does not import this package.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

# The names of the modules in this folder are common, and could hide others.
sys.path[:] = [path for path in sys.path if Path(path) != Path(__file__).parent]


def _say(kind: str, value: Any) -> None:
    # one write, so that lines of the ranks do not mix
    os.write(1, f"\n{kind} {json.dumps(value)}\n".encode())


def train(
    *,
    strategy: str,
    devices: int,
    accelerator: str = "cpu",
    num_steps: int = 1,
    fault: str | None = None,
    victim: int = 0,
    num_victims: int = 1,
    fault_step: int = 3,
    moment: str = "forward",
    num_nodes: int = 1,
    backend: str | None = None,
    preload: str | None = None,
    on_failure: str | None = None,
    stall_s: float | None = None,
    folder: str | None = None,
    step_s: float = 0.0,
) -> None:
    """Train a small model; print `FIRST_BATCH`, `FAULT` and `RAISED` with the time.

    The victim, with `num_victims - 1` ranks before it, fails once by `fault` as in `_fail`, in step
    `fault_step`: before it ("idle"), in it ("forward", "backward", "all-reduce", "optimizer"), or at the
    "start" of the script. With `on_failure`, or a folder for a checkpoint of each step from which it resumes,
    all ranks print `COMMIT` with the time, the step and the samples of each batch. Steps last `step_s` until
    a new rank has joined; rank 0 prints `REGROUP` with the seconds of the recovery.
    """
    import pytorch_lightning as pl
    import torch

    chosen: Any = strategy
    if strategy == "custom_ddp":
        import lightning_ddp

        if on_failure is not None or backend is not None:
            stall_timeout = timedelta(seconds=stall_s) if stall_s is not None else None
            given: dict[str, Any] = {"stall_timeout": stall_timeout, "process_group_backend": backend}
            chosen = lightning_ddp.CustomDDPStrategy(on_failure=on_failure or "stop", **given)
    if preload:
        runpy.run_path(preload)
    has_ledger = on_failure is not None or folder is not None
    rank = devices * int(os.environ.get("NODE_RANK", "0")) + int(os.environ.get("LOCAL_RANK", "0"))
    is_victim = fault is not None and victim - num_victims < rank <= victim
    is_first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if is_victim and moment == "start":
        _fail(fault, torch.device("cpu"))

    class Probe(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(32, 2)
            self.step_s = step_s
            self.num_accumulated = 0

        def reached(self, here: str) -> None:
            if is_victim and is_first_attempt and here == moment and self.global_step == fault_step:
                _fail(fault, self.device)

        def accumulated(self, _: Any) -> None:
            self.num_accumulated += 1
            if self.num_accumulated % 2 == 0:  # the bucket has both parameters, and is on its way
                self.reached("all-reduce")

        def on_train_start(self) -> None:
            for parameter in self.parameters():
                parameter.register_post_accumulate_grad_hook(self.accumulated)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_rank == 0 and batch_idx == 0:
                _say("FIRST_BATCH", time.time())
            self.reached("idle")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(self.step_s)
            self.reached("forward")
            output = self.module(torch.randn(8, 32, device=self.device))
            if is_victim and moment == "backward":
                output.register_hook(lambda _: self.reached("backward"))
            return output.square().mean()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.reached("optimizer")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if has_ledger:
                ids = batch[:, 0].int().tolist()
                _say("COMMIT", [time.time(), self.trainer.global_step, self.global_rank, ids])

        def on_world_changed(self, change: Any) -> None:
            if change.joined_ranks:
                self.step_s = 0.0
            if change.new_rank == 0:
                _say("REGROUP", change.seconds)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    class Witness(pl.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            if trainer.global_rank != victim:
                said = f"{type(exception).__name__} of {getattr(exception, 'rank', 'nobody')}"
                _say("RAISED", [time.time(), trainer.global_rank, said])

    callbacks: list[Any] = [Witness()] if fault else []
    resumed = None
    if folder is not None:
        callbacks.append(pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_last=True))
        last = Path(folder, "last.ckpt")
        resumed = str(last) if last.exists() else None
    options: dict[str, Any] = {"strategy": chosen, "accelerator": accelerator, "callbacks": callbacks}
    options |= {"enable_checkpointing": folder is not None, "num_nodes": num_nodes}
    _fit(Probe(), devices, num_steps, resumed=resumed, **options)


def _fail(fault: str | None, device: Any) -> None:
    """Print `FAULT`, then fail by "exception", "kill", "stop", or GPU errors: "memory", "address"."""
    import torch

    _say("FAULT", time.time())
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    elif fault == "memory":
        torch.empty(2**45, device=device)
    elif fault == "address":
        torch.zeros(1, device=device)[torch.full((1,), 2**40, device=device)].sum().item()
    raise ValueError("the fault of this benchmark")


def train_on_nodes(*, num_nodes: int, **arguments: Any) -> None:
    """Call `train` in a process for each node, on this host; exit with the highest exit code or signal."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    order = json.dumps({"num_nodes": num_nodes, **arguments})
    processes = []
    for node in range(num_nodes):
        named = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(node)}
        command = [sys.executable, __file__, order]
        processes.append(subprocess.Popen(command, env={**os.environ, **named}))
    sys.exit(max(abs(process.wait()) for process in processes))


def _fit(module: Any, devices: int, num_steps: int, *, resumed: str | None = None, **options: Any) -> Any:
    """Train on numbered samples, one per rank and step; return the Trainer."""
    import pytorch_lightning as pl
    import torch

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(devices=devices, max_epochs=1, **quiet, **options)
    size = devices * options.get("num_nodes", 1) * num_steps
    data: Any = torch.arange(float(size)).unsqueeze(1)  # a tensor has length and items
    trainer.fit(module, torch.utils.data.DataLoader(data), ckpt_path=resumed)
    return trainer


def time_import() -> None:
    """Print `IMPORTED` with the seconds of the import of Lightning alone, and of both packages."""
    start = time.perf_counter()
    importlib.import_module("pytorch_lightning")
    between = time.perf_counter()
    importlib.import_module("lightning_ddp")
    _say("IMPORTED", [between - start, time.perf_counter() - start])


def time_fits(*, turns: list[str], devices: int, num_steps: int, num_warmup: int, model: str) -> None:
    """Run a fit for each value of `on_failure` in `turns`; print `STEP_SECONDS` with their mean steps.

    The steps, of a model of `models.py` on a part of a sample, are timed with their boundaries, after the
    first `num_warmup`.
    """
    import pytorch_lightning as pl
    import torch

    import lightning_ddp
    from lightning_ddp.tools.models import build_workload, compute_loss

    torch.set_num_threads(1)
    seconds: list[float] = []

    class Timed(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.module = build_workload(model, rank=0).module

        def on_train_start(self) -> None:
            self.inputs = build_workload(model, rank=self.global_rank).batch[:1, ..., :8, :8]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == num_warmup:
                self.trainer.strategy.barrier()
                self.started_at = time.perf_counter()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return compute_loss(self.module(self.inputs))

        def on_train_end(self) -> None:
            seconds.append((time.perf_counter() - self.started_at) / (num_steps - num_warmup))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    for mode in turns:
        strategy = lightning_ddp.CustomDDPStrategy(on_failure=mode)
        options: dict[str, Any] = {"strategy": strategy, "accelerator": "cpu", "enable_checkpointing": False}
        trainer = _fit(Timed(), devices, num_steps, **options)
    if trainer.global_rank == 0:
        _say("STEP_SECONDS", seconds)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    globals()[given.pop("function", "train")](**given)

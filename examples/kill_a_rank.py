"""Four processes train; two of them are killed; the others continue in the same `fit`. On the CPU, in 30 s.

    python examples/kill_a_rank.py

Draws loss and number of processes over time into `kill_a_rank.png`, with the pause after each kill.
"""

from __future__ import annotations

import os
import signal
import time

import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp

KILLS = {3: 60, 1: 120}  # rank when the run begins -> step
PICTURE = "kill_a_rank.png"


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if KILLS.get(int(os.environ.get("LOCAL_RANK", "0"))) == self.global_step:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Record(pl.Callback):
    """Record the loss and the number of processes at each step, and the length of each pause."""

    def __init__(self) -> None:
        self.steps, self.pauses = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.steps.append((time.time(), float(outputs["loss"]), trainer.world_size))

    def on_world_changed(self, trainer, module, change) -> None:
        self.pauses.append((time.time() - change.seconds, change.seconds))


def draw(record: Record, path: str) -> None:
    start = record.steps[0][0]
    seconds, losses, sizes = zip(*((t - start, loss, size) for t, loss, size in record.steps), strict=True)
    figure = Figure(figsize=(10, 5), layout="constrained")
    left = figure.add_subplot(xlabel="seconds since the first step", ylabel="loss")
    left.semilogy(seconds, losses, label="loss")
    right = left.twinx()
    right.step(seconds, sizes, where="post", color="C1", label="processes")
    right.set(ylabel="processes", ylim=(0, max(sizes) + 1), yticks=range(max(sizes) + 1))
    for number, (lost, pause) in enumerate(record.pauses):
        left.axvline(lost - start, color="red", linestyle="--", label=None if number else "process killed")
        left.annotate(f" pause {pause:.2f} s", (lost - start, 1.01), xycoords=("data", "axes fraction"))
    figure.legend(loc="outside upper right", ncols=3)
    figure.savefig(path)


if __name__ == "__main__":
    pl.seed_everything(1, verbose=False)
    x = torch.linspace(-3, 3, 2000).unsqueeze(1)
    strategy, record = lightning_ddp.CustomDDPStrategy(on_failure="shrink"), Record()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 240}
    trainer = pl.Trainer(accelerator="cpu", devices=4, strategy=strategy, callbacks=[record], **options)
    trainer.fit(Model(), DataLoader(TensorDataset(x, x.sin()), batch_size=16, shuffle=True))
    if trainer.is_global_zero:
        draw(record, PICTURE)
        print(f"{trainer.global_step} steps, picture: {PICTURE}")

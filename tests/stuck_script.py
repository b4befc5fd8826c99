"""Fits with two ranks of which one leaves the path of the other, or is slow, as the arguments say."""

from __future__ import annotations

import os
import threading
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from fault_script import Notes, Witness
from pytorch_lightning.loggers.logger import DummyLogger
from torch import Tensor

import lightning_ddp

warnings.filterwarnings("ignore")
DEADLINE_S = 3.0
SLOW_S = 0.06
POWERSGD = {"name": "powersgd", "start_step": 2, "rank": 1, "min_compression": 1}
AVERAGING = {"name": "post_local_sgd", "start_step": 4, "period": 2}


class Model(pl.LightningModule):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.way = way

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.way == "slow" and self.global_rank == 1:
            threading.Event().wait(SLOW_S)
        if self.trainer.global_step == 2 and self.global_rank == 1:
            if self.way == "barrier":
                self.trainer.strategy.barrier("mine alone")
            elif self.way == "hang":
                threading.Event().wait(30)
            elif self.way == "shape":  # as rank 0 does below, but not the same
                self.trainer.strategy.reduce(torch.ones(3))
        if self.trainer.global_step == 2 and self.way == "shape":
            self.trainer.strategy.reduce(torch.ones(2))
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.layer(batch).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(32, 8), batch_size=2)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(4, 8), batch_size=2)


class Logger(DummyLogger):
    """Leaves the last value of each metric: how late a rank was is known some steps later."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.notes = notes
        self.metrics: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "communication/step_ms" in metrics:
            self.metrics |= metrics
            self.notes.write("metrics", **self.metrics)


def main(arguments: list[str]) -> None:
    way, folder, debug = arguments
    path = Path(folder)
    torch.manual_seed(0)
    rank = int(os.environ.get("LOCAL_RANK", 0))
    monitor = lightning_ddp.callbacks.CommunicationMonitor(
        every_n_steps=2, slow_after_steps=4, timeline=path / "timeline"
    )
    trainer = pl.Trainer(
        strategy=lightning_ddp.CustomDDPStrategy(
            debug=debug or None,
            timeout=timedelta(seconds=60.0 if debug else DEADLINE_S),
            failure_grace_s=20.0,
            ddp_comm_hook=None
            if way == "slow"
            else {"name": "powersgd", "start_step": 2, "rank": 1, "min_compression": 1},
            model_averaging=AVERAGING if way == "all" else None,
        ),
        accelerator="cpu",
        devices=2,
        max_epochs=2 if way == "all" else 1,
        limit_train_batches=8 if way == "slow" else 4,
        logger=Logger(Notes(path, rank)) if way == "slow" else False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=way == "all",
        default_root_dir=path,
        callbacks=[Witness(path), *([monitor] if way == "slow" else [])],
    )
    trainer.fit(model := Model(way))
    trainer.validate(model, verbose=False)
    Notes(path, rank).write("trained", weight=model.layer.weight.sum().item())

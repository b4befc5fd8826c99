"""Trains on data whose position a checkpoint keeps: a resumed run has the losses of an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from fault_script import Notes, Witness
from pytorch_lightning.callbacks import OnExceptionCheckpoint
from torch import Tensor

import lightning_ddp

warnings.filterwarnings("ignore")
STEPS = 12


class Stream:
    """A loader that continues where its state says."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __iter__(self) -> Any:
        while self.position < STEPS:
            self.position += 1
            yield torch.full((2, 4), float(self.position * 3 + self.rank))
        self.position = 0

    def __len__(self) -> int:
        return STEPS

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Model(pl.LightningModule):
    def __init__(self, folder: Path, wait_at: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.folder, self.wait_at = folder, wait_at
        self.losses: dict[int, float] = {}

    def pause(self, moment: str) -> None:
        """Says where it is, and goes on once the test has sent its signal."""
        if moment == self.wait_at:
            self.wait_at = ""
            Notes(self.folder, self.global_rank).write("ready")
            while not (self.folder / "go").exists():
                threading.Event().wait(0.01)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.layer(batch) - 1).square().mean()
        self.losses[self.trainer.global_step] = float(loss)
        if self.trainer.global_step == 4:
            self.pause("fit")
            self.pause("grace")
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.layer(batch).mean(), sync_dist=True)
        if self.trainer.global_step >= 4 and not self.trainer.sanity_checking:
            self.pause("validation")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4, momentum=0.9)

    def train_dataloader(self) -> Any:
        return Stream(self.global_rank)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)


class SlowShutdown(pl.Callback):
    """A callback that hangs while the run shuts down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        if (self.folder / "hang").exists():
            Notes(self.folder, trainer.global_rank).write("hanging")
            threading.Event().wait(60)


def main(arguments: list[str]) -> None:
    wait_at, folder, checkpoint, devices, *environment = arguments
    os.environ.update(json.loads(environment[0]) if environment else {})
    path = Path(folder)
    torch.manual_seed(0)
    model = Model(path, wait_at)
    trainer = pl.Trainer(
        strategy=lightning_ddp.CustomDDPStrategy(failure_grace_s=3.0 if wait_at == "grace" else 20.0),
        accelerator="cpu",
        devices=int(devices),
        max_epochs=1,
        val_check_interval=4,
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=True,
        default_root_dir=path,
        callbacks=[Witness(path), SlowShutdown(path), OnExceptionCheckpoint(path, "stopped")],
    )
    rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_PROCID", 0)))
    # a handler of the user's own is still called
    signal.signal(signal.SIGTERM, lambda number, frame: Notes(path, rank).write("sigterm"))
    try:
        trainer.fit(model, ckpt_path=checkpoint or None)
    finally:
        Notes(path, rank).write("finally", step=trainer.global_step, losses=json.dumps(model.losses))

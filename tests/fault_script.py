"""Trains until a fault fires in one rank at one moment; every rank leaves notes of what it went through."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from pytorch_lightning.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_ddp

warnings.filterwarnings("ignore")
STALL_S = 2.0
BATCHES = 6


def fault(kind: str) -> None:
    """Does what `kind` says to this process."""
    if kind == "exception":
        raise ValueError("expected 3 channels, got 1")
    if kind == "memory":
        raise MemoryError("cannot allocate 80 GiB")
    if kind == "exit":
        os._exit(3)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}[kind])
    threading.Event().wait(0.5)  # a signal to oneself is there before this; SIGSTOP stops the process here


class Notes:
    """Files in one folder: `<event>-<rank>` with when it happened."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank

    def write(self, event: str, **more: Any) -> None:
        part = self.folder / f"{event}-{self.rank}.part"
        part.write_text(json.dumps({"time": time.time(), "pid": os.getpid(), **more}))
        part.rename(self.folder / f"{event}-{self.rank}")


class Data(Dataset[Tensor]):
    def __init__(self, on_item: Any = None) -> None:
        self.on_item = on_item

    def __len__(self) -> int:
        return 8 * BATCHES

    def __getitem__(self, index: int) -> Tensor:
        if self.on_item is not None:
            self.on_item(index)
        return torch.full((4,), float(index % 7))


class Model(pl.LightningModule):
    def __init__(self, kind: str, victim: int, moment: str, folder: Path) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
        self.kind, self.victim, self.moment, self.folder = kind, victim, moment, folder

    def reach(self, moment: str) -> None:
        if moment == self.moment and self.global_rank == self.victim:
            Notes(self.folder, self.victim).write("fired")
            fault(self.kind)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.reach("forward")
        hidden = self.layers[:3](batch)
        if batch_idx == 2 and self.moment == "backward":
            hidden.register_hook(lambda grad: self.reach("backward"))
        return self.layers[3:](hidden).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == 2:
            self.reach("optimizer")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.reach("sanity" if self.trainer.sanity_checking else "validation")
        self.log("val_loss", self.layers(batch).mean(), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.state.status != "interrupted":
            self.reach("checkpoint")

    def teardown(self, stage: str) -> None:
        self.reach("teardown")
        if self.moment == "teardown":
            threading.Event().wait(30)  # the others are still in their own teardown

    num_items = 0

    def on_item(self, index: int) -> None:
        self.num_items += 1
        if self.num_items == 9:  # the first of the third batch, in the worker's own copy of the model
            self.reach("loader")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Tensor]:
        is_worker = self.moment == "loader"
        data = Data(self.on_item if is_worker else None)
        return DataLoader(data, batch_size=4, num_workers=int(is_worker))

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Data(), batch_size=8)


class Logger(DummyLogger):
    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.notes = notes

    def finalize(self, status: str) -> None:
        self.notes.write("finalize", status=status)


class Witness(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        fields = {
            name: getattr(exception, name, None)
            for name in ("rank", "message", "exception_type", "exit_code")
        }
        Notes(self.folder, trainer.global_rank).write("on_exception", kind=type(exception).__name__, **fields)


def main(arguments: list[str]) -> None:
    kind, victim, moment, devices, folder, strategy_name = arguments
    path = Path(folder)
    strategies = {
        "custom_ddp": lambda: lightning_ddp.CustomDDPStrategy(
            bucket_cap_mb=0.0001,
            failure_grace_s=10.0,
            stall_timeout=timedelta(seconds=STALL_S) if kind == "stop" else None,
        ),
        "ddp": lambda: "ddp",
    }
    rank = int(os.environ.get("LOCAL_RANK", 0))
    notes = Notes(path, rank)
    trainer = pl.Trainer(
        strategy=strategies[strategy_name](),
        accelerator="cpu",
        devices=int(devices),
        max_epochs=1,
        logger=Logger(notes),
        default_root_dir=path,
        num_sanity_val_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            Witness(path),
            ModelCheckpoint(path / "checkpoints"),
            OnExceptionCheckpoint(path, "on_exception_checkpoint"),
        ],
    )
    try:
        trainer.fit(Model(kind, int(victim), moment, path))
    finally:
        notes.write("finally")

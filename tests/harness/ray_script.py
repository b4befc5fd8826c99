"""Trains under Ray Train's TorchTrainer, in several ways in one cluster: `ray_script.py FOLDER ORDERS`."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import (
    RayDDPStrategy,
    RayLightningEnvironment,
    RayTrainReportCallback,
    prepare_trainer,
)
from ray.train.torch import TorchTrainer
from torch import Tensor
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
NUM_WORKERS = 2


def train(order: dict[str, Any]) -> None:
    """On a worker: once with each strategy, in the process group that Ray has made."""
    import lightning.pytorch as pl

    from lightning_ddp import RayCustomDDPStrategy

    class Model(pl.LightningModule):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            if self.global_rank == 1 and index == 2 and "fault" in order:
                if order["fault"] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("a picture is broken")
            loss = self.layer(batch[:, None] / 64).square().mean()
            self.log("loss", loss)
            return loss

        def on_fit_end(self) -> None:
            if self.global_rank == 0:
                weights = [parameter.item() for parameter in self.parameters()]
                note = {"weights": weights, "world_size": self.trainer.world_size}
                Path(order["folder"], f"{self.name}.json").write_text(json.dumps(note))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for name in order["strategies"]:
        pl.seed_everything(7)
        trainer = pl.Trainer(
            strategy=RayDDPStrategy() if name == "ray" else RayCustomDDPStrategy(),
            plugins=[RayLightningEnvironment()],
            callbacks=[RayTrainReportCallback()],
            accelerator="cpu",
            devices="auto",
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer = prepare_trainer(trainer)
        trainer.fit(Model(name), DataLoader(torch.arange(64.0), batch_size=4))


def fit(order: dict[str, Any]) -> dict[str, Any]:
    """How one training ends."""
    folder = Path(order["folder"])
    folder.mkdir()
    trainer = TorchTrainer(
        train,
        train_loop_config=order,
        scaling_config=ScalingConfig(num_workers=NUM_WORKERS, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(folder), name="run"),
    )
    try:
        result = trainer.fit()
    except Exception as error:  # noqa: BLE001 (what Ray raises is what is tested)
        return {"error": f"{type(error).__name__}: {error} {error.__cause__}"}
    notes = {name: json.loads((folder / f"{name}.json").read_text()) for name in order["strategies"]}
    return {**notes, "checkpoint": result.checkpoint is not None, "epochs": result.metrics["epoch"] + 1}


def main() -> None:
    folder, orders = Path(sys.argv[1]), json.loads(sys.argv[2])
    ray.init(num_cpus=NUM_WORKERS + 1, include_dashboard=False)  # it starts so many processes at once
    notes = {name: fit({"folder": str(folder / name), **order}) for name, order in orders.items()}
    (folder / "notes.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    main()

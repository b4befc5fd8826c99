"""Trains on 64 numbered samples; each rank notes its numbers, samples, weights: `engine_script.py ORDER`."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_ddp

warnings.filterwarnings("ignore")
NUM_SAMPLES = 64


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def training_step(self, batch: Tensor) -> Tensor:
        self.seen += batch.tolist()
        return self.layer(batch[:, None] / NUM_SAMPLES).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    order: dict[str, Any] = json.loads(sys.argv[1])
    pl.seed_everything(7)
    model = Model()
    trainer = pl.Trainer(
        strategy=lightning_ddp.CustomDDPStrategy(process_group_backend="gloo"),
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **order["trainer"],
    )
    trainer.fit(model, DataLoader(torch.arange(float(NUM_SAMPLES)), batch_size=4))
    note = {
        "rank": trainer.global_rank,
        "local_rank": trainer.local_rank,
        "node_rank": trainer.node_rank,
        "world_size": trainer.world_size,
        "num_nodes": trainer.num_nodes,
        "num_devices": trainer.num_devices,
        "samples": model.seen,
        "weights": [parameter.tolist() for parameter in model.parameters()],
    }
    Path(order["folder"], f"rank-{trainer.global_rank}.json").write_text(json.dumps(note))


if __name__ == "__main__":
    main()

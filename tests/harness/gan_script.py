"""Trains a GAN on random images as a LightningModule with two optimizers, and saves its weights.

Run by `test_gan.py` under several strategies:

    python gan_script.py custom_ddp results
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp

NUM_IMAGES, BATCH_SIZE, NUM_LATENTS, NUM_PIXELS = 128, 16, 8, 64


class Generator(nn.Module):
    """Latent vectors to images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NUM_LATENTS, 32), nn.BatchNorm1d(32), nn.LeakyReLU(0.2), nn.Linear(32, NUM_PIXELS)
        )

    def forward(self, latents: Tensor) -> Tensor:
        return self.layers(latents).sigmoid()


class Discriminator(nn.Module):
    """Images to the logit of being real."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(NUM_PIXELS, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class GAN(pl.LightningModule):
    """Both networks in one module; in each step the generator learns, then the discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = Generator()
        self.discriminator = Discriminator()

    def forward(self, latents: Tensor) -> Tensor:
        return self.generator(latents)

    def loss(self, images: Tensor, is_real: bool) -> Tensor:
        logits = self.discriminator(images)
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (images,) = batch
        for_generator, for_discriminator = self.optimizers()
        latents = torch.randn(images.shape[0], NUM_LATENTS, device=images.device)

        self.toggle_optimizer(for_generator)
        loss = self.loss(self(latents), is_real=True)
        self.log("generator", loss, prog_bar=True, on_epoch=True, sync_dist=True)
        self.manual_backward(loss)
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)

        self.toggle_optimizer(for_discriminator)
        loss = (self.loss(images, is_real=True) + self.loss(self(latents).detach(), is_real=False)) / 2
        self.log("discriminator", loss, prog_bar=True, on_epoch=True, sync_dist=True)
        self.manual_backward(loss)
        for_discriminator.step()
        for_discriminator.zero_grad()
        self.untoggle_optimizer(for_discriminator)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.002, betas=(0.5, 0.999)),
            torch.optim.Adam(self.discriminator.parameters(), lr=0.002, betas=(0.5, 0.999)),
        ], []


def main() -> None:
    strategy, out = sys.argv[1], Path(sys.argv[2])
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    pl.seed_everything(11, verbose=False)
    images = torch.rand(NUM_IMAGES, NUM_PIXELS)
    model = GAN()
    trainer_class = pl.Trainer if strategy.startswith("ddp") else lightning_ddp.Trainer
    trainer = trainer_class(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer.fit(model, DataLoader(TensorDataset(images), BATCH_SIZE, shuffle=True))
    result = {
        "before": before,
        "state": model.state_dict(),
        "optimizers": [optimizer.state_dict()["state"] for optimizer in trainer.optimizers],
        "logged": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
    }
    rank = os.environ.get("LOCAL_RANK", "0")
    torch.save(result, out.with_suffix(f".{rank}.pt"))


if __name__ == "__main__":
    main()

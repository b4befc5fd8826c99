"""Manual optimisation with two optimizers: a GAN learns to draw digits, and prints one.

$ python examples/gan.py
"""

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp

NUM_LATENTS = 16


class GAN(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            *(nn.Linear(NUM_LATENTS, 128), nn.BatchNorm1d(128), nn.LeakyReLU(0.2)),
            *(nn.Linear(128, 64), nn.Sigmoid()),
        )
        self.discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))

    def loss(self, images: Tensor, is_real: bool) -> Tensor:
        logits = self.discriminator(images)
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))

    def training_step(self, batch: list[Tensor]) -> None:
        (images,) = batch
        for_generator, for_discriminator = self.optimizers()
        latents = torch.randn(len(images), NUM_LATENTS, device=images.device)

        # toggled: the other network's parameters need no gradient in this backward, on all ranks alike
        self.toggle_optimizer(for_generator)
        loss = self.loss(self.generator(latents), is_real=True)
        for_generator.zero_grad()
        self.manual_backward(loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        self.log("generator", loss, on_step=False, on_epoch=True, sync_dist=True)

        self.toggle_optimizer(for_discriminator)
        loss = self.loss(images, is_real=True) + self.loss(self.generator(latents).detach(), is_real=False)
        for_discriminator.zero_grad()
        self.manual_backward(loss)
        for_discriminator.step()
        self.untoggle_optimizer(for_discriminator)
        self.log("discriminator", loss, on_step=False, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        networks = (self.generator, self.discriminator)
        return [torch.optim.Adam(network.parameters(), lr=0.002, betas=(0.5, 0.999)) for network in networks]


if __name__ == "__main__":
    pl.seed_everything(0, verbose=False)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    trainer = lightning_ddp.Trainer(
        strategy="custom_ddp",
        num_processes=2,
        max_epochs=15,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = GAN()
    trainer.fit(model, DataLoader(TensorDataset(images), batch_size=64, shuffle=True))
    if trainer.is_global_zero:
        losses = {name: f"{value:.2f}" for name, value in trainer.callback_metrics.items()}
        print(f"{trainer.global_step} steps of two optimizers; losses of the last epoch: {losses}")
        drawn = model.eval().generator(torch.randn(1, NUM_LATENTS)).reshape(8, 8)
        print("\n".join("".join(" .:-=+*#%@"[int(9.99 * ink)] * 2 for ink in row) for row in drawn))

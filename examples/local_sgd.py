"""Post-local SGD: the processes take steps of their own, and average their parameters every 8 steps.

$ python examples/local_sgd.py
"""

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp import CustomDDPStrategy


class DigitNet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return cross_entropy(self.layers(images), labels)

    def on_train_batch_end(self, *args: object) -> None:
        """Print the distance of the processes' models, by a collective for this example only."""
        models = self.all_gather(parameters_to_vector(self.parameters()).detach())
        apart = (models - models.mean(0)).norm(dim=1).mean()
        if self.trainer.is_global_zero and self.global_step in (20, 21, 24, 27, 28, 29, 35, 36, 37):
            print(f"step {self.global_step}: the models are {apart:.4f} apart")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    pl.seed_everything(0, verbose=False)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    averaging = {"name": "post_local_sgd", "start_step": 20, "period": 8}  # gradients first, then parameters
    trainer = pl.Trainer(
        strategy=CustomDDPStrategy(model_averaging=averaging),
        accelerator="cpu",
        devices=2,
        max_epochs=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = DigitNet()
    trainer.fit(model, DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        accuracy = (model.layers(images[1500:]).argmax(1) == labels[1500:]).float().mean()
        print(f"{accuracy:.1%} of the test digits after {trainer.global_step} steps")


if __name__ == "__main__":
    main()

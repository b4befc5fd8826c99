"""LightningCLI: model, data and strategy come from a YAML file, and each option from the command line.

$ pip install "jsonargparse[signatures]"
$ python examples/cli.py fit --config examples/cli.yaml
$ python examples/cli.py fit --config examples/cli.yaml --trainer.strategy.init_args.ddp_comm_hook=bf16
"""

import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LightningCLI
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp  # noqa: F401  # registers "custom_ddp"


class Digits(pl.LightningDataModule):
    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
        self.data, self.batch_size = TensorDataset(images.float() / 16, labels), batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*self.data[:1500]), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*self.data[1500:]), 297)


class DigitNet(pl.LightningModule):
    def __init__(self, width: int = 128, learning_rate: float = 0.003) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
        )

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return cross_entropy(self.layers(images), labels)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        images, labels = batch
        accuracy = (self.layers(images).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def on_fit_end(self) -> None:
        if self.trainer.is_global_zero:
            accuracy, name = self.trainer.callback_metrics["accuracy"], type(self.trainer.strategy).__name__
            print(f"{accuracy:.1%} of the test digits with {name} in {self.trainer.world_size} processes")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


if __name__ == "__main__":
    LightningCLI(DigitNet, Digits, save_config_callback=None)

"""PowerSGD: each gradient matrix travels as two thin factors, and the network learns as well.

$ python examples/powersgd.py
"""

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp import CustomDDPStrategy


class DigitNet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(torch.nn.Linear(64, 256), torch.nn.ReLU()),
            *(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)),
        )

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return cross_entropy(self.layers(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def numbers_sent(parameter: torch.Tensor, rank: int) -> int:
    """Of a parameter in a step: for a matrix two factors of `rank` columns, if these are smaller."""
    factors = rank * sum(parameter.shape) if parameter.ndim == 2 else parameter.numel()
    return min(parameter.numel(), factors)


def train(hook: dict | None, data: TensorDataset, test: TensorDataset) -> None:
    pl.seed_everything(0, verbose=False)
    model = DigitNet()
    trainer = pl.Trainer(
        strategy=CustomDDPStrategy(ddp_comm_hook=hook),
        accelerator="cpu",
        devices=2,
        max_epochs=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        images, labels = test.tensors
        accuracy = (model.layers(images).argmax(1) == labels).float().mean()
        name, rank = ("mean", 10_000) if hook is None else (hook["name"], hook["rank"])
        numbers = sum(numbers_sent(parameter, rank) for parameter in model.parameters())
        print(f"{name:<9} {numbers:>7,} numbers a step   {accuracy:.1%} of the test digits")


if __name__ == "__main__":
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    parts = TensorDataset(*data[:1500]), TensorDataset(*data[1500:])
    train(None, *parts)
    train({"name": "powersgd", "rank": 2, "start_step": 25}, *parts)

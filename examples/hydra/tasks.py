"""Data and models of the experiment, as Lightning wants them; the networks are those of `bench hooks`."""

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp.tools.models import CONTEXT, CharacterModel, read_digits, read_text


class Data(pl.LightningDataModule):
    """Two sets of tensors. Lightning gives each process its share of the batches.

    Args:
        batch_size: rows of a step, over all processes.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.train, self.val = self.read()

    def read(self) -> tuple[TensorDataset, TensorDataset]:
        raise NotImplementedError

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.val, shuffle=False)

    def _loader(self, dataset: TensorDataset, *, shuffle: bool) -> DataLoader:
        batch_size = max(1, self.batch_size // self.trainer.world_size)
        return DataLoader(dataset, batch_size, shuffle=shuffle, drop_last=shuffle)


class DigitsData(Data):
    """Scans of handwritten digits with what they are."""

    def read(self) -> tuple[TensorDataset, TensorDataset]:
        train, val = read_digits()
        return TensorDataset(*train), TensorDataset(*val)


class TextData(Data):
    """Rows of characters with the characters that follow them.

    Args:
        batch_size: rows of a step, over all processes.
        num_val_rows: rows to validate on, from the end of the text.
    """

    def __init__(self, batch_size: int, num_val_rows: int) -> None:
        self.num_val_rows = num_val_rows
        super().__init__(batch_size)

    def read(self) -> tuple[TensorDataset, TensorDataset]:
        tokens, _ = read_text()
        length = CONTEXT + 1
        rows = tokens[: len(tokens) // length * length].view(-1, length)
        train, val = rows[: -self.num_val_rows], rows[-self.num_val_rows :]
        return TensorDataset(train[:, :-1], train[:, 1:]), TensorDataset(val[:, :-1], val[:, 1:])


def character_model(width: int, num_layers: int) -> nn.Module:
    """A transformer for the characters of the text."""
    return CharacterModel(read_text()[1], width=width, num_layers=num_layers)


class Classifier(pl.LightningModule):
    """Predicts a class for each place: of an image, or of each character.

    Args:
        network: inputs to logits, whose last dimension is the classes.
        optimizer: called with the parameters.
    """

    def __init__(self, network: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.network = network
        self.make_optimizer = optimizer

    def on_fit_start(self) -> None:
        torch.set_num_threads(1)  # networks this small: more threads would wait for each other

    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return cross_entropy(self.network(inputs).flatten(0, -2), targets.flatten())

    def validation_step(self, batch: list[Tensor]) -> None:
        inputs, targets = batch
        logits, targets = self.network(inputs).flatten(0, -2), targets.flatten()
        accuracy = (logits.argmax(1) == targets).float().mean()
        self.log("val_loss", cross_entropy(logits, targets), sync_dist=True)
        self.log("val_accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.make_optimizer(self.parameters())
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

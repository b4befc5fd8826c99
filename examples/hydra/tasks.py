"""Data and models of the experiment, as Lightning wants them."""

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

CONTEXT = 64
"""Characters that the model sees at most."""
_NUM_TEST_DIGITS = 360
_NUM_CHARACTERS = 1_500_000


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


def read_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """1,437 images (1 x 8 x 8, from 0 to 1) with their labels to train on, and 360 to test."""
    from sklearn.datasets import load_digits  # slow to import, and the text does without

    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    targets = torch.tensor(labels)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    test, train = order[:_NUM_TEST_DIGITS], order[_NUM_TEST_DIGITS:]
    return (inputs[train], targets[train]), (inputs[test], targets[test])


def read_text() -> tuple[Tensor, int]:
    """Read the standard library's sources as character numbers, which depend on Python's version."""
    text = ""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="ignore")
        if len(text) >= _NUM_CHARACTERS:
            break
    data = torch.tensor(list(text.encode("ascii", "ignore")), dtype=torch.int64)[:_NUM_CHARACTERS]
    known, tokens = data.unique(return_inverse=True)
    return tokens, len(known)


def digit_network(width: int = 32) -> nn.Module:
    """Two convolutions with `width` and twice as many channels, and two linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(2 * width * 16, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


class CharacterModel(nn.Module):
    """A transformer that predicts the next of `num_characters` from up to `CONTEXT`; `width` / 4 is whole."""

    def __init__(self, num_characters: int, width: int = 128, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, width)
        self.position = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_characters)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch x length x characters) of the character after each of `tokens` (batch x length)."""
        length = tokens.shape[1]
        hidden = self.embedding(tokens) + self.position(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        result: Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return result


def character_model(width: int, num_layers: int) -> nn.Module:
    """Make a transformer for the characters of the text."""
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

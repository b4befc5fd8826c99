"""Training tasks that judge hooks and averagers: scanned digits, and Python's standard library."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

_NUM_TEST_DIGITS = 360
CONTEXT = 64
"""Characters that the model sees at most."""
_DIGITS_LR = 0.1
_MOMENTUM = 0.9
_TEXT_LR = 1e-2
_TEXT_MAX_NORM = 1.0
_NUM_CHARACTERS = 1_500_000
_NUM_TEST_CHARACTERS = 100_000


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model with its data."""

    module: nn.Module
    """The same weights on all ranks."""
    next_batch: Callable[[], tuple[Tensor, Tensor]]
    """This rank's next batch."""
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
    """Of a batch."""
    score: Callable[[nn.Module], float]
    """On the test data: accuracy in per cent, or perplexity."""
    make_optimizer: Callable[[float], torch.optim.Optimizer]
    """The optimizer, given how much of SGD's momentum a hook applies instead of it."""
    learning_rate: float
    """At the beginning; it falls to zero as a cosine."""
    max_norm: float = math.inf
    """To which the norm of all gradients is clipped."""


def make_task(name: str, *, rank: int, world_size: int, seed: int) -> Task:
    """Builds "digits" or "text"; the rank chooses the batches, which have one size over all ranks."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (_digits if name == "digits" else _text)(generator, world_size)


def read_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """1,437 images (1 x 8 x 8, from 0 to 1) with their labels to train on, and 360 to test."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # scikit-learn ships no types

    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    targets = torch.tensor(labels)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    test, train = order[:_NUM_TEST_DIGITS], order[_NUM_TEST_DIGITS:]
    return (inputs[train], targets[train]), (inputs[test], targets[test])


def digit_network(width: int = 32) -> nn.Module:
    """Two convolutions with `width` and twice as many channels, and two linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(2 * width * 16, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def _digits(generator: torch.Generator, world_size: int) -> Task:
    (inputs, targets), (test_inputs, test_targets) = read_digits()

    def next_batch() -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(targets), (64 // world_size,), generator=generator)
        return _shift(inputs[chosen], generator), targets[chosen]

    def score(model: nn.Module) -> float:
        with torch.no_grad():
            correct: Tensor = model(test_inputs).argmax(1) == test_targets
            return 100 * float(correct.float().mean())

    module = digit_network()

    def make_optimizer(taken: float) -> torch.optim.Optimizer:
        momentum = _MOMENTUM - taken
        options: dict[str, Any] = {"momentum": momentum, "nesterov": not taken, "weight_decay": 1e-4}
        return torch.optim.SGD(module.parameters(), lr=_DIGITS_LR, **options)

    return Task(
        module=module,
        next_batch=next_batch,
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        score=score,
        make_optimizer=make_optimizer,
        learning_rate=_DIGITS_LR,
    )


def _shift(images: Tensor, generator: torch.Generator) -> Tensor:
    """Moves each 8 x 8 image by up to one pixel in each direction."""
    rows, columns = torch.randint(3, (2, len(images), 1), generator=generator) + torch.arange(8)
    padded = nn.functional.pad(images, (1, 1, 1, 1)).squeeze(1)
    which = torch.arange(len(images)).view(-1, 1, 1)
    return padded[which, rows.unsqueeze(2), columns.unsqueeze(1)].unsqueeze(1)


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


def _text(generator: torch.Generator, world_size: int) -> Task:
    tokens, num_characters = read_text()
    train, test = tokens[:-_NUM_TEST_CHARACTERS], tokens[-_NUM_TEST_CHARACTERS:]

    def next_batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(train) - CONTEXT - 1, (16 // world_size,), generator=generator)
        rows = torch.stack([train[s : s + CONTEXT + 1] for s in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def score(model: nn.Module) -> float:
        rows = test[: len(test) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)[:512]
        with torch.no_grad():
            losses = [loss(model, (part[:, :-1], part[:, 1:])).item() for part in rows.split(64)]
        return math.exp(sum(losses) / len(losses))

    module = CharacterModel(num_characters, width=64, num_layers=1)  # learns what it can in minutes
    return Task(
        module=module,
        next_batch=next_batch,
        loss=loss,
        score=score,
        make_optimizer=lambda taken: torch.optim.AdamW(module.parameters(), lr=_TEXT_LR),
        learning_rate=_TEXT_LR,
        max_norm=_TEXT_MAX_NORM,
    )


def read_text() -> tuple[Tensor, int]:
    """The sources of the standard library as character numbers; the same for one Python version."""
    text = ""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="ignore")
        if len(text) >= _NUM_CHARACTERS:
            break
    data = torch.tensor(list(text.encode("ascii", "ignore")), dtype=torch.int64)[:_NUM_CHARACTERS]
    known, tokens = data.unique(return_inverse=True)
    return tokens, len(known)

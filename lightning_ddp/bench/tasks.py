"""What hooks and averagers are judged by: scanned digits, and characters of Python's standard library."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["Task", "make_task"]

_NUM_TEST_DIGITS = 360
_DIGITS_LR = 0.1
_MOMENTUM = 0.9
_CONTEXT = 64
_TEXT_LR = 5e-3
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
    """Builds a task.

    Args:
        name: "digits" or "text".
        rank: chooses the batches.
        world_size: number of ranks; the batch of all of them together has one size.
        seed: of weights and batches.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (_digits if name == "digits" else _text)(generator, world_size)


def _digits(generator: torch.Generator, world_size: int) -> Task:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # scikit-learn ships no types

    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    targets = torch.tensor(labels)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    test, train = order[:_NUM_TEST_DIGITS], order[_NUM_TEST_DIGITS:]
    module = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(64 * 16, 64), nn.ReLU(), nn.Linear(64, 10)),
    )

    def next_batch() -> tuple[Tensor, Tensor]:
        chosen = train[torch.randint(len(train), (64 // world_size,), generator=generator)]
        return _shift(inputs[chosen], generator), targets[chosen]

    def score(model: nn.Module) -> float:
        with torch.no_grad():
            correct: Tensor = model(inputs[test]).argmax(1) == targets[test]
            return 100 * float(correct.float().mean())

    return Task(
        module=module,
        next_batch=next_batch,
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        score=score,
        make_optimizer=lambda taken: torch.optim.SGD(
            module.parameters(),
            lr=_DIGITS_LR,
            momentum=_MOMENTUM - taken,
            nesterov=not taken,
            weight_decay=1e-4,
        ),
        learning_rate=_DIGITS_LR,
    )


def _shift(images: Tensor, generator: torch.Generator) -> Tensor:
    """Moves each 8 x 8 image by up to one pixel in each direction."""
    rows, columns = torch.randint(3, (2, len(images), 1), generator=generator) + torch.arange(8)
    padded = nn.functional.pad(images, (1, 1, 1, 1)).squeeze(1)
    which = torch.arange(len(images)).view(-1, 1, 1)
    return padded[which, rows.unsqueeze(2), columns.unsqueeze(1)].unsqueeze(1)


class _CharacterModel(nn.Module):
    """A transformer of two layers that predicts the next character."""

    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, 128)
        self.position = nn.Embedding(_CONTEXT, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, num_characters)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        hidden = self.embedding(tokens) + self.position(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        result: Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return result


def _text(generator: torch.Generator, world_size: int) -> Task:
    tokens, num_characters = _read_text()
    train, test = tokens[:-_NUM_TEST_CHARACTERS], tokens[-_NUM_TEST_CHARACTERS:]

    def next_batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(train) - _CONTEXT - 1, (16 // world_size,), generator=generator)
        rows = torch.stack([train[s : s + _CONTEXT + 1] for s in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def score(model: nn.Module) -> float:
        rows = test[: len(test) // (_CONTEXT + 1) * (_CONTEXT + 1)].view(-1, _CONTEXT + 1)[:512]
        with torch.no_grad():
            losses = [loss(model, (part[:, :-1], part[:, 1:])).item() for part in rows.split(64)]
        return math.exp(sum(losses) / len(losses))

    module = _CharacterModel(num_characters)
    return Task(
        module=module,
        next_batch=next_batch,
        loss=loss,
        score=score,
        make_optimizer=lambda taken: torch.optim.AdamW(module.parameters(), lr=_TEXT_LR),
        learning_rate=_TEXT_LR,
        max_norm=_TEXT_MAX_NORM,
    )


def _read_text() -> tuple[Tensor, int]:
    """The sources of the standard library as character numbers; the same for one Python version."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    pieces = []
    total = 0
    for path in sorted(folder.glob("*.py")):
        pieces.append(path.read_text(encoding="utf-8", errors="ignore"))
        total += len(pieces[-1])
        if total >= _NUM_CHARACTERS:
            break
    data = torch.tensor(list("".join(pieces).encode("ascii", "ignore")), dtype=torch.int64)[:_NUM_CHARACTERS]
    known, tokens = data.unique(return_inverse=True)
    return tokens, len(known)

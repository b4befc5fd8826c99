"""The models of the parity tests, small enough for many steps a second."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

NUM_CLASSES = 5
BATCH_SIZE = 6


class MLP(nn.Module):
    """Three linear layers on 12 features."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, NUM_CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ConvBatchNorm(nn.Module):
    """Two convolutions with BatchNorm, whose running statistics are buffers of three dtypes and shapes.

    The convolutions have no bias: BatchNorm subtracts it again, so its gradient would be rounding noise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean(dim=(2, 3)))


class TransformerEncoder(nn.Module):
    """Two encoder layers without dropout over sequences of 7 tokens."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, dropout=0.0, batch_first=True)
        # nested tensors are for inference and warn of being a prototype
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(dim=1))


class SharedAndFrozen(nn.Module):
    """A tied embedding and output projection around a trained and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.trained = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.partly_frozen = nn.Linear(16, 16)
        self.partly_frozen.bias.requires_grad_(False)
        self.output = nn.Linear(16, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.trained(self.embedding(tokens)))
        hidden = torch.tanh(self.partly_frozen(self.frozen(hidden)))
        return self.output(hidden).mean(dim=1)


class Branches(nn.Module):
    """The sum of those of its layers a, b, c that it is told to use; a loss of no parameter without any."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 1, bias=False) for _ in range(3))

    def forward(self, x: Tensor, use: Iterable[str]) -> Tensor:
        outputs = [getattr(self, name)(x).sum() for name in use]
        return torch.stack(outputs).sum() if outputs else torch.zeros((), requires_grad=True)


def grads_by_branch(model: nn.Module) -> list[float | None]:
    """The gradient of each layer of a wrapped `Branches`, which is the same for all of its elements."""
    found = [p.grad for p in model.module.parameters()]
    return [None if g is None else g.unique().item() for g in found]


class MixedDtypes(nn.Module):
    """Linear layers in float32, float64 and bfloat16, so that gradients cannot share one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(12, 16)
        self.in_double = nn.Linear(16, 16, dtype=torch.float64)
        self.in_bfloat16 = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.last = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.single(x)).double()
        x = torch.tanh(self.in_double(x)).bfloat16()
        return self.last(torch.tanh(self.in_bfloat16(x)).float())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": MLP,
    "conv_batch_norm": ConvBatchNorm,
    "transformer": TransformerEncoder,
    "shared_and_frozen": SharedAndFrozen,
}
_SHAPES = {"mlp": (12,), "conv_batch_norm": (3, 8, 8), "transformer": (7, 16), "mixed_dtypes": (12,)}


def build(name: str, seed: int) -> nn.Module:
    """A model with weights that follow from `seed` alone, not from the RNG that threads share."""
    module = MixedDtypes() if name == "mixed_dtypes" else MODELS[name]()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                bound = (parameter.shape[0] / parameter.numel()) ** 0.5
                parameter.uniform_(-bound, bound, generator=generator)
            else:  # biases and the weights of normalisations alike
                parameter.uniform_(0.2, 0.6, generator=generator)
    return module


def batch(name: str, rank: int, step: int, micro_batch: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and class labels, different for every rank, step and micro-batch, and the same in every run."""
    generator = torch.Generator().manual_seed(1_000_000 * rank + 1_000 * step + micro_batch)
    if name == "shared_and_frozen":
        inputs = torch.randint(0, 11, (BATCH_SIZE, 9), generator=generator)
        return inputs, torch.randint(0, 11, (BATCH_SIZE,), generator=generator)
    inputs = torch.randn(BATCH_SIZE, *_SHAPES[name], generator=generator)
    return inputs, torch.randint(0, NUM_CLASSES, (BATCH_SIZE,), generator=generator)


def filled(module: Any, seed: int = 5) -> Any:
    """The module with weights of any dtype that follow from `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float32) / 4)
            if p.is_complex():
                p.add_(1j * torch.randn(p.shape, generator=generator))
    return module


def done(value: Any) -> torch.futures.Future[Any]:
    """What a communication hook returns that has reduced its bucket to this, or failed with it."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    (future.set_exception if isinstance(value, Exception) else future.set_result)(value)
    return future


def x_of(rank: int, step: int = 0, width: int = 4) -> Tensor:
    """Three inputs, different for every rank and step."""
    return torch.randn(3, width, generator=torch.Generator().manual_seed(100 * rank + step))

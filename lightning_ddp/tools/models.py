"""What is trained: models with a batch, tasks that judge what is learned, and wrappers beside each other.

Of the models each stresses another part of a data-parallel wrapper: `linear500` the per-parameter cost of
hooks (1,000 small parameters), `linear16` bytes (64 MiB of gradients), `transformer6` a usual mix, `convbn40`
the broadcast of buffers before each forward. A script that trains without this package imports this file.
"""

from __future__ import annotations

import inspect
import math
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with its batch, on the CPU."""

    module: nn.Module
    """In training mode; the same weights on all ranks."""
    batch: Tensor
    """float32 inputs; different on each rank."""


def build_workload(name: str, *, rank: int) -> Workload:
    """Build one model of `MODEL_NAMES`, and a batch whose seed is `rank`: the same values each time."""
    build_module, batch_shape = WORKLOADS[name]
    torch.manual_seed(0)
    module = build_module()
    generator = torch.Generator().manual_seed(1 + rank)
    return Workload(module=module, batch=torch.randn(batch_shape, generator=generator))


def compute_loss(output: Tensor) -> Tensor:
    """Return the scalar loss of every model: the mean square of its output."""
    return output.square().mean()


def _linear500() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(500):
        layers += [_scaled_linear(32, nonlinearity="relu"), nn.ReLU()]
    return nn.Sequential(*layers)


def _linear16() -> nn.Module:
    return nn.Sequential(*(_scaled_linear(1024, nonlinearity="linear") for _ in range(16)))


def _transformer6() -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        d_model=256, nhead=4, dim_feedforward=1024, dropout=0.0, batch_first=True
    )
    return nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)


def _convbn40() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(40):
        layers += [nn.Conv2d(32, 32, kernel_size=3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers)


def _scaled_linear(features: int, *, nonlinearity: str) -> nn.Linear:
    # The default initialization shrinks the signal in each layer; hundreds of layers deep it ends in denormal
    # numbers, whose arithmetic is many times slower and would be what is measured.
    linear = nn.Linear(features, features)
    nn.init.kaiming_normal_(linear.weight, nonlinearity=nonlinearity)  # type: ignore[arg-type]  # a Literal in torch
    nn.init.zeros_(linear.bias)
    return linear


WORKLOADS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear500": (_linear500, (8, 32)),
    "linear16": (_linear16, (8, 1024)),
    "transformer6": (_transformer6, (8, 64, 256)),
    "convbn40": (_convbn40, (8, 32, 16, 16)),
}
"""Name -> how to build the model, and the shape of its batch."""

MODEL_NAMES = tuple(WORKLOADS)
"""In the order in which they are measured."""


# ---------------------------------------------------------------------- wrappers

OURS: Final = "ours"
OURS_GLOO: Final = "ours_gloo"
"""Without shared memory: what that gains between ranks of a host."""
TORCH_DEFAULT: Final = "torch_ddp"
TORCH_VIEW: Final = "torch_ddp_view"
TORCH_FLAGS: Final = "torch_ddp_flags"
"""With every flag on that makes a static model's step faster."""
BARE: Final = "bare"
"""The module itself, on one rank: for the overhead of a wrapper."""

_VIEW: Final = {"gradient_as_bucket_view": True}
CONTENDERS: Final[Mapping[str, Mapping[str, Any]]] = {
    OURS: {},
    OURS_GLOO: {"transport": "gloo"},
    TORCH_DEFAULT: {},
    TORCH_VIEW: _VIEW,
    TORCH_FLAGS: {**_VIEW, "static_graph": True, "batched_grad_copy": True},
    BARE: {},
}
"""Name -> the wrapper's arguments besides the module and its device."""


def is_torch(contender: str) -> bool:
    """Whether torch's DistributedDataParallel wraps it."""
    return contender in (TORCH_DEFAULT, TORCH_VIEW, TORCH_FLAGS)


def constructor_flags(contender: str) -> dict[str, Any]:
    """The arguments with which a contender is built; without flags that the installed torch does not have."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    flags = CONTENDERS[contender]
    return {name: value for name, value in flags.items() if name in known or not is_torch(contender)}


def wrap(contender: str, module: nn.Module, device: torch.device) -> nn.Module:
    """Wrap a module, which is on its device, for training over the default process group. All ranks."""
    if contender == BARE:
        return module
    from lightning_ddp import BucketedDDP

    wrapper: Any = DistributedDataParallel if is_torch(contender) else BucketedDDP
    device_ids = [device.index] if device.type == "cuda" else None
    wrapped: nn.Module = wrapper(module, device_ids=device_ids, **constructor_flags(contender))
    return wrapped


class TrainingRun:
    """A model in training: wrapped, with its optimizer and its batch. All ranks make it together."""

    def __init__(self, contender: str, workload: Workload, device: torch.device) -> None:
        self.contender = contender
        self.batch = workload.batch.to(device)
        self.module = workload.module.to(device)
        self.wrapped = wrap(contender, self.module, device)
        # A small rate: it does not change the time of a step, and weights stay finite in any number of steps.
        self._optimizer = torch.optim.SGD(self.wrapped.parameters(), lr=1e-6)

    def step(self) -> None:
        """Do one training step: zero the gradients, forward, backward, update. All ranks; communicates."""
        self._optimizer.zero_grad(set_to_none=True)
        compute_loss(self.wrapped(self.batch)).backward()
        self._optimizer.step()

    def state_after_one_step(self, workload: Workload) -> dict[str, Tensor]:
        """Do one step from the weights of a workload; return what a wrapper keeps in step across ranks.

        That is "gradients", and "buffers" where the model has floating-point ones; each as one vector. An
        evaluating forward comes after the step: by then a wrapper has to have brought the buffers together.
        """
        self.module.load_state_dict(workload.module.state_dict())
        self.step()
        gradients = []
        for name, parameter in self.wrapped.named_parameters():
            if parameter.grad is None:
                raise RuntimeError(f"{self.contender} left {name} without a gradient")
            gradients.append(parameter.grad.flatten())
        state = {"gradients": torch.cat(gradients)}
        self.wrapped.eval()
        with torch.no_grad():
            self.wrapped(self.batch)
        self.wrapped.train()
        buffers = [buffer.flatten() for buffer in self.wrapped.buffers() if buffer.is_floating_point()]
        return {**state, "buffers": torch.cat(buffers)} if buffers else state


# ---------------------------------------------------------------------- tasks: digits and text

_NUM_TEST_DIGITS = 360
CONTEXT = 64
"""Characters that the model sees at most."""
_DIGITS_LR, _MOMENTUM = 0.1, 0.9
_TEXT_LR, _TEXT_MAX_NORM = 1e-2, 1.0
_NUM_CHARACTERS, _NUM_TEST_CHARACTERS = 1_500_000, 100_000


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model with its data."""

    module: nn.Module
    """The same weights on all ranks."""
    next_batch: Callable[[], tuple[Tensor, Tensor]]
    """This rank's next batch."""
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
    score: Callable[[nn.Module], float]
    """On the test data: accuracy in per cent, or perplexity."""
    make_optimizer: Callable[[float], torch.optim.Optimizer]
    """The optimizer, given how much of SGD's momentum a hook applies instead of it."""
    learning_rate: float
    """At the beginning; it falls to zero as a cosine."""
    max_norm: float = math.inf
    """To which the norm of all gradients is clipped."""


def make_task(name: str, *, rank: int, world_size: int, seed: int) -> Task:
    """Build "digits" or "text"; the rank chooses the batches, which have one size over all ranks."""
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
        options: dict[str, Any] = {"momentum": _MOMENTUM - taken, "nesterov": not taken}
        return torch.optim.SGD(module.parameters(), lr=_DIGITS_LR, weight_decay=1e-4, **options)

    return Task(
        module=module,
        next_batch=next_batch,
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        score=score,
        make_optimizer=make_optimizer,
        learning_rate=_DIGITS_LR,
    )


def _shift(images: Tensor, generator: torch.Generator) -> Tensor:
    """Move each 8 x 8 image by up to one pixel in each direction."""
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

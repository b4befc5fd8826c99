"""Trains on random images in several ways, one after the other, and saves what came out of each.

A script as users write them, run by `test_parity_trainer.py` under several strategies and launchers:

    python trainer_script.py custom_ddp plain,clip results.pt
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, leaky_relu
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp

warnings.filterwarnings("ignore", message=".*does not have many workers")

NUM_TRAIN, NUM_VAL, BATCH_SIZE = 256, 64, 16


def loader(start: int, stop: int, shuffle: bool) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(NUM_TRAIN + NUM_VAL, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (NUM_TRAIN + NUM_VAL,), generator=generator)
    return DataLoader(TensorDataset(images[start:stop], labels[start:stop]), BATCH_SIZE, shuffle=shuffle)


class Classifier(pl.LightningModule):
    """A convolution with BatchNorm and a linear layer, trained with momentum."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(8 * 3 * 3, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))

    def loss(self, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        return cross_entropy(self(images), labels)

    def on_train_start(self) -> None:
        # one write a line: the processes share the stream
        rank, world_size = self.global_rank, self.trainer.world_size
        wrapper = type(self.trainer.strategy.model).__name__
        os.write(1, f"{self.case}: rank {rank} of {world_size} has {wrapper}\n".encode())

    def on_fit_end(self) -> None:
        total = sum(float(buffer.sum()) for buffer in self.buffers())
        os.write(1, f"{self.case}: the buffers are {total.hex()}\n".encode())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)
        self.log("test_ranks", float(self.global_rank), sync_dist=True, reduce_fx="sum")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Quiet(Classifier):
    """Logs nothing in training: the compiler of torch 2.13 fails in Lightning's `log`."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)


class Accumulating(Classifier):
    """Manual optimisation with two micro-batches a step; gradients of the first stay on their rank."""

    def __init__(self, case: str) -> None:
        super().__init__(case)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer, strategy = self.optimizers(), self.trainer.strategy
        # Lightning's own strategy has it under the name that its loops use
        no_backward_sync = getattr(strategy, "no_backward_sync", strategy.block_backward_sync)
        first, second = (list(halves) for halves in zip(*(t.chunk(2) for t in batch), strict=True))
        with no_backward_sync():
            self.manual_backward(self.loss(first))
        self.manual_backward(self.loss(second))
        optimizer.step()
        optimizer.zero_grad()


class GAN(Classifier):
    """The features make images of noise, the head tells them from real ones; each is off in turn."""

    def __init__(self, case: str) -> None:
        super().__init__(case)
        self.automatic_optimization = False
        self.features = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.LeakyReLU(0.2), nn.Linear(32, 64), nn.Sigmoid()
        )
        self.hidden = nn.Linear(64, 32)
        self.head = nn.Linear(32, 1)

    def loss_of(self, images: Tensor, is_real: bool) -> Tensor:
        logits = self.head(leaky_relu(self.hidden(images), 0.2))
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, noise = batch[0].flatten(1), torch.randn(len(batch[0]), 8)
        losses = {
            "generator": lambda: self.loss_of(self.features(noise), is_real=True),
            "discriminator": lambda: (
                self.loss_of(images, is_real=True)
                + self.loss_of(self.features(noise).detach(), is_real=False)
            ),
        }
        for optimizer, (name, loss_of) in zip(self.optimizers(), losses.items(), strict=True):
            self.toggle_optimizer(optimizer)
            loss = loss_of()
            self.log(name, loss, prog_bar=True, on_epoch=True, sync_dist=True)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        discriminator = [*self.hidden.parameters(), *self.head.parameters()]
        return [torch.optim.Adam(p, lr=0.002) for p in (self.features.parameters(), discriminator)], []


FITS: dict[str, tuple[type[Classifier], dict[str, Any]]] = {
    "plain": (Classifier, {}),
    "accumulate": (Classifier, {"accumulate_grad_batches": 2}),
    "clip": (Classifier, {"gradient_clip_val": 0.05}),
    "bf16": (Classifier, {"precision": "bf16-mixed"}),
    "manual_accumulate": (Accumulating, {}),
}
"""Ways to train of which the weights are all that is compared."""


class Cases:
    """The ways to train; each method is one besides those of `FITS`, named by what it shows."""

    def __init__(self, strategy: str, folder: Path) -> None:
        self.strategy = strategy
        self.folder = folder

    def fit(self, model: Classifier, ckpt_path: str | None = None, **options: Any) -> pl.Trainer:
        trainer_class = pl.Trainer if self.strategy.startswith("ddp") else lightning_ddp.Trainer
        trainer = trainer_class(
            **{
                "strategy": self.strategy,
                "accelerator": "cpu",
                "devices": 2,
                "max_epochs": 1,
                "logger": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "enable_checkpointing": False,
                **options,
            }
        )
        trainer.fit(model, loader(0, NUM_TRAIN, shuffle=True), ckpt_path=ckpt_path)
        return trainer

    def run(self, name: str) -> dict[str, Any]:
        if name not in FITS:
            result: dict[str, Any] = getattr(self, name)()
            return result
        kind, options = FITS[name]
        model = kind(name)
        self.fit(model, **options)
        return {"state": model.state_dict()}

    def gan(self) -> dict[str, Any]:
        """Without a search for unused parameters; torch's class needs it."""
        model, find = GAN("gan"), {"strategy": "ddp_find_unused_parameters_true"}
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        trainer = self.fit(model, **(find if self.strategy == "ddp" else {}))
        assert [name for name, p in model.named_parameters() if torch.equal(before[name], p)] == []
        state = model.state_dict()
        for i, optimizer in enumerate(trainer.optimizers):
            for index, values in optimizer.state_dict()["state"].items():
                state |= {f"optimizer {i}, {index}, {name}": value for name, value in values.items()}
        logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
        return {"state": state, "logged": logged, "global_step": trainer.global_step}

    def compiled(self) -> dict[str, Any]:
        model = Quiet("compiled")
        compiled = torch.compile(model, backend="aot_eager")
        self.fit(compiled, gradient_clip_val=0.2)
        return {"state": model.state_dict()}

    def two_epochs(self, case: str = "two_epochs", ckpt_path: str | None = None) -> dict[str, Any]:
        model = Classifier(case)
        trainer = self.fit(model, ckpt_path=ckpt_path, max_epochs=2)
        counts = {"epoch": trainer.current_epoch, "global_step": trainer.global_step}
        return {"state": model.state_dict(), **counts}

    def resumed(self) -> dict[str, Any]:
        checkpoint = str(self.folder / "after_one_epoch.ckpt")
        self.fit(Classifier("resumed")).save_checkpoint(checkpoint)
        return self.two_epochs("resumed", checkpoint)

    def fit_twice_and_evaluate(self) -> dict[str, Any]:
        model = Classifier("fit_twice_and_evaluate")
        self.fit(model)
        trainer = self.fit(model)
        held_out = loader(NUM_TRAIN, NUM_TRAIN + NUM_VAL, shuffle=False)
        return {
            "validate": trainer.validate(model, held_out, verbose=False),
            "test": trainer.test(model, held_out, verbose=False),
            "predict": torch.cat(trainer.predict(model, held_out)),
            "state": model.state_dict(),
        }


def main() -> None:
    strategy, names, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    cases = Cases(strategy, out.parent)
    results = {}
    for name in names.split(","):
        pl.seed_everything(7, verbose=False)
        results[name] = cases.run(name)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            torch.save(results, out)  # after each, so that a later failure does not hide it


if __name__ == "__main__":
    main()

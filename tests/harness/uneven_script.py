"""Trains with other numbers of batches on each rank in several ways, and saves what came out of each rank.

Run by `test_uneven_trainer.py`; every rank writes a file of its own, `results.<rank>.pt`:

    python uneven_script.py sized,unsized results
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lightning_ddp
from lightning_ddp import CustomDDPStrategy

BATCH_SIZE, NUM_FEATURES = 4, 3
NUM_EPOCHS = 2


def batches(rank: int, num_batches: int, batch_size: int = BATCH_SIZE) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the first batches of a rank, the same in every run."""
    generator = torch.Generator().manual_seed(100 + rank)
    inputs = torch.randn(40, NUM_FEATURES, generator=generator)[: num_batches * batch_size]
    return inputs, inputs.sum(1, keepdim=True) * (rank + 1) + rank


class Stream(IterableDataset):
    """Samples without a length."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.samples = list(zip(inputs, targets, strict=True))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.samples)


class Regression(pl.LightningModule):
    """A linear layer whose optimizer has a state, with losses logged in every way."""

    def __init__(
        self, num_batches: Sequence[int], is_sized: bool = True, batch_size: int = BATCH_SIZE
    ) -> None:
        super().__init__()
        self.num_batches = num_batches
        self.is_sized = is_sized
        self.batch_size = batch_size
        self.layer = nn.Linear(NUM_FEATURES, 1)
        with torch.no_grad():
            self.layer.weight.fill_(0.1)
            self.layer.bias.zero_()
        self.seen: list[dict[str, float]] = []
        self.epochs: list[dict[str, float]] = []

    def train_dataloader(self) -> Any:
        return self.loader(self.num_batches[self.global_rank])

    def loader(self, num_batches: int) -> DataLoader:
        data = batches(self.global_rank, num_batches, self.batch_size)
        return DataLoader(TensorDataset(*data) if self.is_sized else Stream(*data), self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*batches(7, 2)), BATCH_SIZE)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def log_loss(self, loss: Tensor) -> None:
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", loss, on_step=True, on_epoch=True, sync_dist=True, reduce_fx="max")
        self.log("smallest", loss, on_step=True, on_epoch=True, sync_dist=True, reduce_fx="min")
        self.log("local", loss, on_step=False, on_epoch=True)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log_loss(loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("batches", 1.0, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        names = ("loss_step", "largest_step", "smallest_step")
        self.seen.append({name: self.trainer.callback_metrics[name].item() for name in names})

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("ranks", float(self.global_rank), sync_dist=True, reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Epochs(pl.Callback):
    """Keeps the metrics of each epoch."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        names = ("loss_epoch", "largest_epoch", "smallest_epoch", "local", "batches", "val_loss")
        metrics = trainer.callback_metrics
        pl_module.epochs.append({name: metrics[name].item() for name in names if name in metrics})


class Manual(Regression):
    """Manual optimisation with two backwards a step."""

    def __init__(self, num_batches: Sequence[int]) -> None:
        super().__init__(num_batches)
        self.automatic_optimization = False

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.log_loss(self.loss(batch))
        for half in range(2):
            self.manual_backward(self.loss([tensor.chunk(2)[half] for tensor in batch]) / 2)
        optimizer.step()


class Stateful(Regression):
    """BatchNorm, once inside a checkpointed part, torchmetrics, a replaced buffer and collectives."""

    def __init__(self, num_batches: Sequence[int]) -> None:
        super().__init__(num_batches)
        self.norm = nn.BatchNorm1d(NUM_FEATURES, affine=False)
        self.again = nn.BatchNorm1d(NUM_FEATURES, affine=False)
        self.mean = torchmetrics.MeanMetric(sync_on_compute=False)
        self.cat = torchmetrics.CatMetric(sync_on_compute=False)
        self.register_buffer("last", torch.zeros(1))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        hidden = checkpoint(self.again, self.norm(inputs).requires_grad_(), use_reentrant=True)
        del batch[1]  # a step may do to its batch what it likes
        hidden = hidden + self.all_gather(inputs.mean()).mean()
        self.trainer.strategy.barrier()
        loss = (self.layer(hidden) - targets).square().mean()
        self.mean.update(loss.detach())
        self.cat.update(inputs[0, 0])
        self.last = inputs[0, :1].clone()
        decide = self.trainer.strategy.reduce_boolean_decision
        self.votes = [decide(self.global_rank == 0, all=True), decide(self.global_rank == 1, all=False)]
        self.log_loss(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.epochs_of_metrics = [float(self.mean.compute()), self.cat.compute().view(-1).tolist()]
        self.mean.reset()
        self.cat.reset()


class RandomDepth(Regression):
    """Leaves out a layer at random, on all ranks alike as they were seeded alike."""

    def __init__(self, num_batches: Sequence[int]) -> None:
        super().__init__(num_batches)
        self.extra = nn.ModuleList(nn.Linear(NUM_FEATURES, 1) for _ in range(2))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        chosen = int(torch.randint(2, (1,)))
        self.choices = [*getattr(self, "choices", []), chosen]
        loss = self.loss(batch) + self.extra[chosen](batch[0]).square().mean()
        self.log_loss(loss)
        return loss


class Shrinking(Regression):
    """Loaders that are made anew in each epoch, with other numbers of batches."""

    def __init__(self, by_epoch: Sequence[Sequence[int]], is_sized: bool) -> None:
        super().__init__(by_epoch[0], is_sized)
        self.by_epoch = by_epoch

    def train_dataloader(self) -> Any:
        return self.loader(self.by_epoch[self.trainer.current_epoch][self.global_rank])


class TwoLoaders(Regression):
    def train_dataloader(self) -> Any:
        return [self.loader(2), self.loader(2)]


class FetchesItself(Regression):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        return self.loss(next(dataloader_iter)[0])


class SizedOnRankZero(Regression):
    def train_dataloader(self) -> Any:
        self.is_sized = self.global_rank == 0
        return super().train_dataloader()


class Fit:
    """One training; the Trainer and the model are kept for what follows it."""

    def __init__(
        self,
        model: Regression,
        strategy: Mapping[str, Any] | None = None,
        ckpt_path: str | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self.trainer = lightning_ddp.Trainer(
            **{
                "strategy": CustomDDPStrategy(**{"uneven_inputs": "join", **(strategy or {})}),
                "accelerator": "cpu",
                "devices": 2,
                "max_epochs": NUM_EPOCHS,
                "use_distributed_sampler": False,
                "logger": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "enable_checkpointing": False,
                "callbacks": [Epochs()],
                **options,
            }
        )
        self.trainer.fit(model, ckpt_path=ckpt_path)
        self.result = {
            "weight": model.layer.weight.detach().clone(),
            "bias": model.layer.bias.detach().clone(),
            "optimizer": self.trainer.optimizers[0].state_dict(),
            "steps": self.trainer.global_step,
            "seen": model.seen,
            "epochs": model.epochs,
            "ranks": self.trainer.callback_metrics["ranks"].item() if model.seen else None,
        }

    def and_of_model(self, *names: str) -> dict[str, Any]:
        """The result, and these attributes of the model."""
        return self.result | {name: getattr(self.model, name) for name in names}


def stateful() -> dict[str, Any]:
    fit = Fit(Stateful([5, 3]), {"broadcast_buffers": False}, max_epochs=1)
    buffers = {name: buffer.clone() for name, buffer in fit.model.named_buffers()}
    return {**fit.and_of_model("epochs_of_metrics", "votes"), "buffers": buffers}


def resumed_inside_an_epoch(folder: Path) -> dict[str, Any]:
    file = str(folder / "two_steps.ckpt")
    Fit(Regression([3, 5]), max_steps=2).trainer.save_checkpoint(file)
    return Fit(Regression([3, 5]), ckpt_path=file, max_steps=4).result


def checkpointed(folder: Path) -> dict[str, Any]:
    def fit(ckpt_path: str | None = None) -> tuple[Any, dict[str, Any]]:
        kept = pl.callbacks.ModelCheckpoint(folder, monitor="val_loss", save_top_k=-1, every_n_epochs=1)
        options = {"callbacks": [kept, Epochs()], "enable_checkpointing": True}
        return kept, Fit(Regression([3, 5]), ckpt_path=ckpt_path, **options).result

    folder = folder / "checkpoints"
    kept, result = fit()
    files = sorted(path.name for path in folder.iterdir())
    return {**result, "again": fit(sorted(kept.best_k_models)[0])[1], "files": files}


def fit_and_validate() -> dict[str, Any]:
    fit = Fit(Regression([3, 5]))
    validated = fit.trainer.validate(fit.model, verbose=False)
    fit.trainer.fit_loop.max_epochs = NUM_EPOCHS + 1
    fit.trainer.fit(fit.model)
    return {**fit.result, "validate": validated, "again": fit.model.layer.weight.detach().clone()}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "sized": lambda _: Fit(Regression([3, 5])).result,
    "unsized": lambda _: Fit(Regression([3, 5], is_sized=False)).result,
    "limited": lambda _: Fit(Regression([3, 5]), limit_train_batches=4).result,
    "accumulated": lambda _: Fit(Regression([5, 3]), accumulate_grad_batches=2).result,
    "over_active": lambda _: Fit(Regression([3, 5]), {"divide_by_initial_world_size": False}).result,
    "single_samples": lambda _: Fit(Regression([3, 4], batch_size=1)).result,
    "manual": lambda _: Fit(Manual([3, 5])).result,
    "stateful": lambda _: stateful(),
    "random_depth": lambda _: Fit(RandomDepth([3, 9]), {"find_unused_parameters": True}).and_of_model(
        "choices"
    ),
    "none_in_second_epoch": lambda _: (
        Fit(Shrinking([[2, 3], [0, 2]], is_sized=False), reload_dataloaders_every_n_epochs=1).result
    ),
    "checkpointed": checkpointed,
    "fit_and_validate": lambda _: fit_and_validate(),
    # what is refused; run where an error in all processes does not end them
    "error_mode": lambda _: Fit(Regression([3, 5]), {"uneven_inputs": "error"}).result,
    "error_mode_even": lambda _: Fit(Regression([3, 3]), {"uneven_inputs": "error"}).result,
    "two_loaders": lambda _: Fit(TwoLoaders([2, 2])).result,
    "dataloader_iter": lambda _: Fit(FetchesItself([2, 2])).result,
    "sized_on_rank_zero": lambda _: Fit(SizedOnRankZero([2, 2])).result,
    "resumed_inside_an_epoch": resumed_inside_an_epoch,
}
"""The ways to train, each with a folder for its files."""


def make_warnings_errors() -> None:
    warnings.filterwarnings("error")
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch has no need of it
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # Lightning on torch 2.13
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=r".*self.log\('local', ..., sync_dist=True\)")  # on purpose
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
    warnings.filterwarnings("ignore", message=".*dataloader_iter.*experimental")


def main() -> None:
    make_warnings_errors()
    names, out = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ  # else an error ends all processes
    results: dict[str, Any] = {}
    for name in names.split(","):
        pl.seed_everything(7, verbose=False)
        try:
            results[name] = CASES[name](out.parent)
        except Exception as error:
            if not is_launched:
                raise
            results[name] = {"error": type(error).__name__, "message": str(error)}
        torch.save(results, out.with_suffix(f".{rank}.pt"))


if __name__ == "__main__":
    main()

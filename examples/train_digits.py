"""Train a small convolutional network on scikit-learn's handwritten digits, in two processes by default.

$ python examples/train_digits.py
$ python examples/train_digits.py --devices 3 --strategy custom_ddp_spawn
$ torchrun --standalone --nproc-per-node 2 examples/train_digits.py
"""

import argparse
import csv
import time
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.overrides.distributed import UnrepeatedDistributedSampler
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_ddp

# The images are in memory already: worker processes would only copy them.
warnings.filterwarnings("ignore", message=".*does not have many workers")
# Every process evaluates a share of its own, without repeats: see DigitsData.
warnings.filterwarnings("ignore", message=".*Using `DistributedSampler` with the dataloaders")
# Lightning 2.6 asks torch 2.13 for a name that torch is about to drop.
warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\)")
# A second run into the same folder replaces the first one's files; that is meant.
warnings.filterwarnings("ignore", message=".*exists and is not empty")


class DigitsData(pl.LightningDataModule):
    """1,797 scans of 8x8 pixels: 1,257 to train on, 180 to choose the best epoch, 360 to test."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        images, labels = load_digits(return_X_y=True)
        rest, test = train_test_split(range(len(labels)), test_size=360, stratify=labels, random_state=0)
        train, val = train_test_split(rest, test_size=180, stratify=labels[rest], random_state=0)
        images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
        labels = torch.tensor(labels)
        self.train, self.val, self.test = (TensorDataset(images[i], labels[i]) for i in (train, val, test))

    def train_dataloader(self) -> DataLoader:
        # Lightning gives each process its share. The last, smaller batch would only make BatchNorm noisy.
        batch_size = max(1, self.batch_size // self.trainer.world_size)
        return DataLoader(self.train, batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return self._evaluate(self.val)

    def test_dataloader(self) -> DataLoader:
        return self._evaluate(self.test)

    def _evaluate(self, dataset: TensorDataset) -> DataLoader:
        # DistributedSampler repeats images until all shares are equally long, which distorts the accuracy.
        # This one does not. One batch per process keeps the number of steps the same everywhere.
        sampler = UnrepeatedDistributedSampler(
            dataset, self.trainer.world_size, self.trainer.global_rank, shuffle=False
        )
        return DataLoader(dataset, batch_size=len(sampler), sampler=sampler)


class DigitNet(pl.LightningModule):
    def __init__(self, learning_rate: float = 0.003) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 10)),
        )
        self.loss = nn.CrossEntropyLoss()
        # A metric adds up its counts over all processes before it divides.
        self.accuracy = nn.ModuleDict({s: MulticlassAccuracy(10, average="micro") for s in ("val", "test")})

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        shift = torch.randint(-1, 2, (2,)).tolist()  # a digit is the same one pixel off
        images = images.roll(shift, dims=(2, 3))
        loss = self.loss(self(images), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self._evaluate("val", *batch)

    def test_step(self, batch: list[torch.Tensor]) -> None:
        self._evaluate("test", *batch)

    def _evaluate(self, stage: str, images: torch.Tensor, labels: torch.Tensor) -> None:
        logits = self(images)
        self.accuracy[stage](logits, labels)
        self.log(f"{stage}_loss", self.loss(logits, labels), sync_dist=True)
        self.log(f"{stage}_accuracy", self.accuracy[stage], on_epoch=True, prog_bar=True)

    def on_train_start(self) -> None:
        torch.set_num_threads(1)  # images this small: more threads would wait for each other
        self.started = time.perf_counter()

    def on_train_epoch_end(self) -> None:  # the slowest process counts
        self.log("seconds", time.perf_counter() - self.started, sync_dist=True, reduce_fx="max")

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.learning_rate, self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def read_curve(path: Path) -> dict[str, list[float]]:
    """Read the columns of Lightning's metrics.csv, which has separate lines for validation."""
    rows = list(csv.DictReader(path.open()))
    return {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}


def draw(model: DigitNet, data: DigitsData, curve: dict[str, list[float]], path: Path) -> None:
    """Save one picture: the learning curve on the left, the hardest test digits on the right."""
    from matplotlib.figure import Figure  # only the process that draws pays for the import

    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.15, 1))

    left.suptitle("Learning curve")
    loss, accuracy = left.subplots(2, 1, sharex=True)
    epochs = range(1, len(curve["train_loss"]) + 1)
    loss.plot(epochs, curve["train_loss"], marker=".", label="training")
    loss.plot(epochs, curve["val_loss"], marker=".", label="validation")
    loss.set(ylabel="cross-entropy", yscale="log")
    loss.legend(frameon=False)
    accuracy.plot(epochs, [100 * a for a in curve["val_accuracy"]], marker=".", color="tab:orange")
    accuracy.set(xlabel="epoch", ylabel="validation accuracy (%)")
    accuracy.xaxis.get_major_locator().set_params(integer=True)
    for axes in (loss, accuracy):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)

    images, labels = data.test.tensors
    with torch.no_grad():
        probabilities = model.eval().cpu()(images).softmax(1)
    predicted = probabilities.argmax(1)
    hardest = probabilities[range(len(labels)), labels].argsort()
    wrong = int((predicted != labels).sum())
    right.suptitle(f"Hardest test digits; misclassified in red: {wrong} of {len(labels)}")
    for axes, i in zip(right.subplots(3, 4).flat, hardest, strict=False):
        axes.imshow(images[i, 0], cmap="gray_r")
        axes.set_axis_off()
        colour = "black" if predicted[i] == labels[i] else "tab:red"
        axes.set_title(f"is {labels[i]}, read as {predicted[i]}", fontsize=9, color=colour)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--accelerator", default="cpu", help="cpu or gpu")
    parser.add_argument("--strategy", default="custom_ddp", help="see `python -m lightning_ddp variants`")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, over all processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/digits"))
    args = parser.parse_args()

    pl.seed_everything(args.seed, verbose=False)
    checkpoint = ModelCheckpoint(
        args.output_dir, "best", monitor="val_loss", mode="min", enable_version_counter=False
    )
    trainer = lightning_ddp.Trainer(
        strategy=args.strategy,
        accelerator=args.accelerator,
        devices=args.devices,
        max_epochs=args.epochs,
        callbacks=checkpoint,
        logger=CSVLogger(args.output_dir, name="", version=""),
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        enable_model_summary=False,
    )
    data = DigitsData(args.batch_size)
    trainer.fit(DigitNet(), data)
    # Read now: with a spawning strategy, testing is a new run that begins a new metrics.csv.
    curve = read_curve(args.output_dir / "metrics.csv") if trainer.is_global_zero else {}
    (results,) = trainer.test(DigitNet(), data, ckpt_path=checkpoint.best_model_path, verbose=False)

    if trainer.is_global_zero:  # the other processes are done
        seconds = curve["seconds"][-1]
        picture = args.output_dir / "digits.png"
        draw(DigitNet.load_from_checkpoint(checkpoint.best_model_path), data, curve, picture)
        print(f"""
test accuracy  {100 * results["test_accuracy"]:.1f} %
training       {seconds:.1f} s
images/s       {args.epochs * len(data.train) / seconds:,.0f}
processes      {trainer.world_size}
strategy       {args.strategy}
picture        {picture}""")


if __name__ == "__main__":
    main()

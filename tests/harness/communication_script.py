"""Trains a small network with hooks and averagers through Lightning's Trainer; saves what came out of it.

Run by `test_communication_trainer.py` on two ranks:

    python communication_script.py CASE FOLDER [OPTION]
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.plugins import AsyncCheckpointIO, TorchCheckpointIO
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp import CustomDDPStrategy, PeerFailure

warnings.filterwarnings("ignore", message=".*does not have many workers")
warnings.filterwarnings("ignore", message=".*exists and is not empty")

POWERSGD = {"name": "powersgd", "start_step": 1, "min_compression": 1}
RESUMED: dict[str, dict[str, Any]] = {
    "powersgd": {"ddp_comm_hook": POWERSGD},
    "bf16_topk": {"ddp_comm_hook": ["bf16", {"name": "topk", "ratio": 0.1}], "bucket_cap_mb": 0.001},
    "sign": {"ddp_comm_hook": "sign"},
    "post_local_sgd": {"model_averaging": {"name": "post_local_sgd", "start_step": 2, "period": 3}},
    "node": {
        "model_averaging": {
            "name": "post_local_sgd",
            "start_step": 2,
            "period": 3,
            "intra_node_gradients": True,
        },
        "ddp_comm_hook": "sign",
    },
    "diloco": {"model_averaging": {"name": "diloco", "period": 3, "encoding": "int8"}},
    "streaming_diloco": {
        "model_averaging": {"name": "streaming_diloco", "period": 6, "num_fragments": 2, "delay": 2}
    },
    "scaled": {"model_averaging": {"name": "post_local_sgd", "start_step": 1, "period": 3}},
}


class Network(pl.LightningModule):
    """Two layers with BatchNorm between them, trained with Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
        self.validated: list[Tensor] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor]) -> None:
        self.validated.append(self.layers[0].weight.detach().clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Overflowing(Network):
    """Gradients of rank 1 alone overflow in the second and in the sixth step."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = super().training_step(batch)
        overflows = self.global_rank == 1 and self.trainer.fit_loop.epoch_loop.total_batch_idx in (1, 5)
        return loss * float("inf") if overflows else loss


class Failing(Network):
    """Rank 1 alone raises an error in the fourth step."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        if self.global_rank == 1 and self.trainer.global_step == 3:
            raise ValueError("of rank 1")
        return super().training_step(batch)


class Logging(Network):
    """Logs a value in each epoch, by which the ranks rank the epochs differently, as `v`."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        value = ((1.0, 2.0, 0.0), (2.0, 1.0, 0.0))[self.global_rank][self.current_epoch]
        self.log("v", value, on_step=False, on_epoch=True)
        return super().training_step(batch)


class Spread(Callback):
    """Notes after each batch how far the ranks' parameters are apart."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        flat = torch.cat([p.detach().view(-1) for p in module.parameters()])
        both = trainer.strategy.all_gather(flat)
        self.values.append((both[0] - both[1]).abs().max().item())


class MovingAverage(Callback):
    """Validates, saves and leaves behind a moving average of the model, as Lightning's EMAWeightAveraging."""

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.model = AveragedModel(module, avg_fn=get_ema_avg_fn(0.5))

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.model.update_parameters(module)

    def on_validation_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for own, mean in zip(module.parameters(), self.model.module.parameters(), strict=True):
            own.data, mean.data = mean.data, own.data

    on_validation_epoch_end = on_validation_epoch_start

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: Any) -> None:
        checkpoint["state_dict"] = self.model.module.state_dict()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        module.load_state_dict(self.model.module.state_dict())


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(32, 6, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :3] * 2 + 1), batch_size=4)


class Killed(TorchCheckpointIO):
    """Kills this process when it is about to write a file whose name matches, for the second time."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.num_times = pattern, 0

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.num_times += fnmatch(Path(path).name, self.pattern)
        if self.num_times == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        super().save_checkpoint(checkpoint, path, storage_options)


def overwriting(folder: Path, plugins: list[Any]) -> dict[str, Any]:
    """A run of two epochs that overwrites its checkpoint after each, or goes on from there."""
    checkpoint, model = folder / "last.ckpt", built()
    strategy = CustomDDPStrategy(**RESUMED["sign"])
    resume = checkpoint if checkpoint.exists() else None
    _, spread = fit(model, strategy, 2, folder, resume, is_overwritten=True, plugins=plugins)
    return result(model, spread)


def fit(model: Network, strategy: Any, epochs: int, folder: Path, resume: Path | None = None, **options: Any):
    every_epoch = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, every_n_epochs=1)
    checkpoints = options.pop("checkpoints", [every_epoch])
    if options.pop("is_overwritten", False):
        checkpoints = [ModelCheckpoint(folder, "last", every_n_epochs=1, enable_version_counter=False)]
    spread = Spread()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        logger=False,
        callbacks=[*checkpoints, spread],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(model, loader(), DataLoader(loader().dataset, batch_size=16), ckpt_path=resume)
    return trainer, spread.values


def built(kind: type[Network] = Network) -> Network:
    torch.manual_seed(1)
    return kind()


def result(model: Network, spread: list[float]) -> dict[str, Any]:
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "spread": spread,
        "validated": torch.stack(model.validated),
    }


def train(
    folder: Path, kind: type[Network] = Network, accumulate: int = 1, **arguments: Any
) -> dict[str, Any]:
    model = built(kind)
    options = {"accumulate_grad_batches": accumulate, **options_of(kind)}
    trainer, spread = fit(model, CustomDDPStrategy(**arguments), 2, folder, **options)
    return result(model, spread) | {"scaler": trainer.precision_plugin.state_dict()}


def logged(folder: Path) -> dict[str, Any]:
    """A run of three epochs whose ranks differ in the names of checkpoints, and in which one to remove."""
    named = ModelCheckpoint(folder / "named", "{epoch}-{v:.0f}", save_top_k=-1)
    best = ModelCheckpoint(folder / "best", monitor="v", save_top_k=2)
    model = built(Logging)
    _, spread = fit(model, CustomDDPStrategy(**RESUMED["sign"]), 3, folder, checkpoints=[named, best])
    return result(model, spread)


def averaged(folder: Path, period: int) -> dict[str, Any]:
    """A run of two epochs with local training and a moving average, and the weights that it has saved."""
    model, averaging = built(), {"name": "post_local_sgd", "start_step": 0, "period": period}
    checkpoint = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    callbacks = [checkpoint, MovingAverage()]
    strategy = CustomDDPStrategy(model_averaging=averaging)
    _, spread = fit(model, strategy, 2, folder, checkpoints=callbacks)
    saved = [torch.load(folder / f"epoch={epoch}.ckpt")["state_dict"] for epoch in range(2)]
    return result(model, spread) | {"saved": torch.stack([state["layers.0.weight"] for state in saved])}


def validated_after_failure(folder: Path) -> dict[str, Any]:
    """A validation by the Trainer whose fit has failed on rank 1, one or two steps into local training."""
    model = built(Failing)
    averaging = {"name": "post_local_sgd", "start_step": 2, "period": 8}
    with suppress(ValueError, PeerFailure):
        fit(model, CustomDDPStrategy(model_averaging=averaging, emergency_checkpoint=False), 1, folder)
    fitted = model.layers[0].weight.detach().clone()
    model.trainer.validate(model, DataLoader(loader().dataset, batch_size=16), verbose=False)
    return {"fitted": fitted, "validated": torch.stack(model.validated)}


def options_of(kind: type[Network]) -> dict[str, Any]:
    """With a loss scale that grows every third step; Lightning itself offers none on the CPU."""
    if kind is not Overflowing:
        return {}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def resume(folder: Path, name: str) -> dict[str, Any]:
    """An undisturbed run of two epochs, and one that goes on from its first checkpoint."""
    arguments = RESUMED[name]
    kind = Overflowing if name == "scaled" else Network
    undisturbed = train(folder, kind, **arguments)
    model = built(kind)
    with torch.no_grad():
        model.layers[0].weight.zero_()  # must come from the checkpoint
    strategy, checkpoint = CustomDDPStrategy(**arguments), folder / "epoch=0.ckpt"
    trainer, spread = fit(model, strategy, 2, folder / "again", resume=checkpoint, **options_of(kind))
    resumed = result(model, spread) | {"scaler": trainer.precision_plugin.state_dict()}
    return {"undisturbed": undisturbed, "resumed": resumed}


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[2])
    answer: dict[str, Any]
    if case == "resumed":
        averaging = {"name": "post_local_sgd", "start_step": 2, "period": 2}
        answer = {name: resume(folder / name, name) for name in RESUMED}
        answer["accumulated"] = train(folder / "accumulated", accumulate=2, model_averaging=averaging)
    elif case == "killed":
        answer = overwriting(folder, [Killed(sys.argv[3])])
    elif case == "continued":
        answer = overwriting(folder, [AsyncCheckpointIO()] if "async" in sys.argv else [])
    elif case == "logged":
        answer = logged(folder)
    elif case == "averaged":
        answer = averaged(folder, int(sys.argv[3]))
    elif case == "failed":
        answer = validated_after_failure(folder)
    else:
        raise SystemExit(f"no case {case!r}")
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.save(answer, folder / f"result.{rank}")


if __name__ == "__main__":
    main()

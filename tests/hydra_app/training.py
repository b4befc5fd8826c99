"""What the programs of the tests do on each rank: train a little, and note what they have seen."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_ddp  # noqa: F401 (which registers the strategy)

warnings.filterwarnings("ignore")
_OURS = ("MASTER_", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "PL_", "LIGHTNING_DDP_STORE", "GLOO_", "NCCL_")


class Model(pl.LightningModule):
    """One layer, which begins alike on all ranks."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lr = lr
        self.interface: str | None = None
        self.layer = torch.nn.Linear(2, 1)

    def on_train_start(self) -> None:
        self.interface = os.environ.get("GLOO_SOCKET_IFNAME")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fit(
    lr: float = 0.1,
    *,
    strategy: Any = "custom_ddp",
    devices: int = 2,
    num_nodes: int = 1,
    plugins: Any = None,
) -> dict[str, Any]:
    """Trains for two steps on 16 samples; returns rank, port and final weights."""
    model = Model(lr)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        num_nodes=num_nodes,
        plugins=plugins,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.linspace(-1, 1, 32).reshape(16, 2)
    trainer.fit(model, DataLoader(data, batch_size=2, shuffle=False))
    weights = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
    return {
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "port": os.environ.get("MASTER_PORT"),
        "interface": model.interface,
        "weights": weights,
    }


def register_resolvers() -> None:
    """Resolvers of a user: one draws at every access, one is cached by OmegaConf."""

    def draw() -> float:
        return random.SystemRandom().random()  # which no seed changes

    OmegaConf.register_new_resolver("draw", draw, replace=True)
    OmegaConf.register_new_resolver("draw_once", draw, use_cache=True, replace=True)


def state_of_process() -> dict[str, Any]:
    """What a run sets up in its process, and has to take down."""
    descriptors = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return {
        "variables": {name: value for name, value in os.environ.items() if name.startswith(_OURS)},
        "handlers": [str(signal.getsignal(number)) for number in range(1, signal.NSIG) if number != 32],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "sockets": sum(os.path.islink(path) and "socket:" in os.readlink(path) for path in descriptors),
        "is_initialized": torch.distributed.is_initialized(),
        "num_threads": torch.get_num_threads(),
    }


def values_of(cfg: DictConfig) -> dict[str, Any]:
    """All values of a configuration as a user reads them, and the kind of error where there is none."""
    found: dict[str, Any] = {}
    for key in cfg:
        try:
            value = cfg[key]
            is_container = isinstance(value, DictConfig | ListConfig)
            found[str(key)] = OmegaConf.to_container(value, resolve=True) if is_container else value
        except Exception as error:  # noqa: BLE001 (that is what is looked at)
            found[str(key)] = type(error).__name__
    return found


def note(name: str, content: dict[str, Any]) -> None:
    """Writes a file for the test that runs this program."""
    path = Path(os.environ["NOTES"], f"{name}-{content.get('rank', 'x')}-{os.getpid()}.json")
    path.write_text(json.dumps({**content, "pid": os.getpid(), "cwd": os.getcwd()}))

"""A user's program whose replicas part: bits flip, parameters join training, learning rates differ."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp

warnings.filterwarnings("ignore")
ORDER: dict[str, Any] = json.loads(sys.argv[1])


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.head = nn.Linear(16, 3)
        self.automatic_optimization = not ORDER.get("manual", False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(ORDER.get("step_s", 0.0))
        loss = nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        used = filter(lambda p: p.requires_grad, self.parameters())
        rate = 0.02 if ORDER.get("rate_differs_on") == self.global_rank else 0.01
        return torch.optim.AdamW(used, rate)


class Faults(pl.Callback):
    """Flips bits after steps: `flips` are [rank, step, name, index, bit], a name as the report has it."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        for rank, step, name, index, bit in ORDER.get("flips", []):
            if step == trainer.global_step:
                note(trainer, digest=digest(trainer, module))
                if rank == trainer.global_rank:
                    flip(tensor_of(trainer, module, name), index, bit)


def tensor_of(trainer: Any, module: nn.Module, name: str) -> Tensor:
    key, _, of = name.rpartition(" of ")
    parameter = module.get_parameter(of)
    return trainer.optimizers[0].state[parameter][key] if key else parameter


def flip(tensor: Tensor, index: int, bit: int) -> None:
    words = tensor.detach().reshape(-1)[index : index + 1].view(torch.int32)
    words ^= torch.tensor([1 << bit], dtype=torch.int64).to(torch.int32)


def digest(trainer: Any, module: nn.Module) -> str:
    state = [*module.parameters()]
    for values in trainer.optimizers[0].state.values():
        state += [value for value in values.values() if isinstance(value, Tensor)]
    return hashlib.md5(b"".join(t.detach().numpy().tobytes() for t in state)).hexdigest()


def note(trainer: Any, **what: Any) -> None:
    path = Path(ORDER["folder"]) / f"rank-{trainer.global_rank}"
    with path.open("a") as file:
        file.write(json.dumps({"step": trainer.global_step, **what}) + "\n")


def main() -> None:
    size = ORDER.get("steps", 60) * ORDER.get("devices", 3) * 4
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(size, 8, generator=draw), torch.randint(3, (size,), generator=draw))
    callbacks: list[Any] = [Faults()]
    if "unfreezes_at" in ORDER:
        callbacks.append(BackboneFinetuning(ORDER["unfreezes_at"], train_bn=False, verbose=False))
    strategy = {"failure_grace_s": 10, **ORDER.get("strategy", {})}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ORDER.get("devices", 3),
        strategy=lightning_ddp.CustomDDPStrategy(**strategy),
        max_epochs=ORDER.get("epochs", 1),
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=os.environ.get("TMPDIR"),
    )
    net = Net()
    trainer.fit(net, DataLoader(data, batch_size=4))
    note(trainer, digest=digest(trainer, net))


if __name__ == "__main__":
    main()

"""Trains with Lightning's Fabric in several ways, one after the other, and saves what came out of each.

Run by `test_fabric.py` under several strategies and launchers:

    python fabric_script.py lightning.fabric results custom_ddp
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp

FAIL_AT = 3
POWERSGD = {"name": "powersgd", "rank": 1, "start_step": 2}
LOCAL = {"name": "post_local_sgd", "start_step": 2, "period": 4}


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def train(fabric: Any, out: Path, fails: str, module: nn.Module) -> None:
    """Two epochs in which gradients accumulate over two batches; then a checkpoint, saved and loaded."""
    is_shared = module[0].weight.is_shared()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(module, optimizer)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.rand(64, 8, generator=generator), torch.randint(4, (64,), generator=generator))
    loader = fabric.setup_dataloaders(DataLoader(data, 4, shuffle=True))
    step, apart = 0, []
    for inputs, labels in (batch for _ in range(2) for batch in loader):
        if step == FAIL_AT and fabric.global_rank == 1:
            fail(fails, module)
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            fabric.backward(cross_entropy(model(inputs), labels))
        step += 1
        if step % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            weights = fabric.all_gather(module[0].weight.detach())
            apart.append(float((weights[0] - weights[1]).abs().max()))

    place = out.with_suffix(".ckpt")
    state = {"model": model, "optimizer": optimizer, "step": step}
    fabric.save(place, state)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    nn.init.zeros_(module[0].weight)
    state["step"] = 0
    remainder = fabric.load(place, state)
    torch.save(
        {
            "saved": saved,
            "loaded": model.state_dict(),
            "step": state["step"],
            "remainder": remainder,
            "files": sorted(path.name for path in place.parent.glob("*.ckpt*")),
            "apart": apart,
            "is_shared": is_shared,
            "wrapper": type(model._forward_module).__name__,
            "sum": fabric.all_reduce(torch.tensor(fabric.global_rank + 1.0), reduce_op="sum"),
            "told": fabric.broadcast(f"by {fabric.global_rank}", src=1),
        },
        out.with_suffix(f".{fabric.global_rank}.pt"),
    )
    fabric.barrier()


def fail(how: str, module: nn.Module) -> None:
    if how == "part":
        with torch.no_grad():
            module[0].weight[3, 5].neg_()
    if how == "raise":
        raise ValueError("the picture 4711.png is broken")


def main(namespace: str, out: Path, cases: list[str]) -> None:
    fabric_class = importlib.import_module(namespace).Fabric
    objects = {
        "hook": {"ddp_comm_hook": POWERSGD},
        "averager": {"model_averaging": LOCAL},
        "check": {"replica_check": "stop"},
    }
    for case in cases:
        name, _, fails = case.partition(":")
        strategy = lightning_ddp.CustomFabricStrategy(**objects[name]) if name in objects else name
        fabric = fabric_class(accelerator="cpu", devices=2, strategy=strategy)
        arguments = (out / name, fails, network())
        if name.endswith(("_spawn", "_fork")):
            fabric.launch(train, *arguments)
        else:
            fabric.launch()
            train(fabric, *arguments)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])

"""A user's program: run by its path or as `python -m hydra_app.train`."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import pytorch_lightning as pl
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from hydra_app.training import fit, note, register_resolvers, state_of_process, values_of

register_resolvers()


def _local_class() -> Any:
    @dataclass
    class Unpicklable:
        width: int = 3

    return Unpicklable


ConfigStore.instance().store(group="bad", name="object", node=_local_class())
ConfigStore.instance().store(group="bad", name="folder", node={"kind": "folder"})


def _train(cfg: DictConfig) -> dict[str, Any]:
    seen = {}
    for _ in range(cfg.num_fits):
        seen = fit(cfg.lr, devices=cfg.devices, num_nodes=cfg.num_nodes)
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if cfg.fault == "first attempt" and is_first and seen["rank"] == 1:
            print("FAULT FIRED", file=sys.stderr, flush=True)
            os._exit(7)
    if cfg.fault == "last" and seen["rank"] == cfg.devices - 1:
        raise RuntimeError("raised when the training was over")
    return seen


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(cfg: DictConfig) -> float:
    """One job; returns what a sweeper minimises."""
    before = state_of_process()
    first_draw = cfg.drawn
    cfg.read_twice += 1  # a child that got the configuration as it is now would add another one
    cfg.text += "!"
    pl.seed_everything(cfg.seed)  # Lightning sets variables, and shuffles by them
    OmegaConf.register_new_resolver("registered_by_the_task", lambda: "late", replace=True)
    if OmegaConf.select(cfg, "bad.kind") == "folder":
        Path(HydraConfig.get().runtime.output_dir, "ranks").write_text("in the way")
    begun = state_of_process()
    try:
        seen = _train(cfg)
    except ValueError as error:
        note(
            f"error{HydraConfig.get().job.num}",
            {"message": str(error), "lr": cfg.lr, "left": state_of_process(), "begun": begun},
        )
        return float(cfg.lr)
    logging.getLogger("hydra_app").info("a line of rank %s", seen["rank"])
    print(f"printed by rank {seen['rank']}", flush=True)
    runtime = HydraConfig.get().runtime
    note(
        f"job-{OmegaConf.select(HydraConfig.get(), 'job.num', default='run')}",
        {
            **seen,
            "before": before,
            "first_draw": first_draw,
            "values": values_of(cfg),
            "raw": OmegaConf.to_yaml(cfg),
            "flags": [OmegaConf.is_struct(cfg), OmegaConf.is_interpolation(cfg, "follows")],
            "hydra": OmegaConf.to_yaml(HydraConfig.get()),
            "name": HydraConfig.get().job.name,
            "output_dir": runtime.output_dir,
            "parent": os.getppid(),
        },
    )
    return float(cfg.lr)


if __name__ == "__main__":
    main()
    note("end", state_of_process())

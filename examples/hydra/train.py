"""Train one configured experiment. Every process runs this; rank 0 writes `result.json` into its folder.

$ python examples/hydra/train.py strategy=powersgd strategy.ddp_comm_hook.rank=2
$ python examples/hydra/train.py -m strategy=custom_ddp,bf16,topk seed=0,1
$ python examples/hydra/train.py +experiment=hooks
$ python examples/hydra/collect.py multirun/*/*
"""

import csv
import json
import sys
import time
import warnings
from pathlib import Path

import hydra
import pytorch_lightning as pl
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from tasks import Classifier

# The data are in memory already: worker processes would only copy them.
warnings.filterwarnings("ignore", message=".*does not have many workers")
# 360 digits and 512 rows can be shared out evenly between 2, 4 and 8 processes.
warnings.filterwarnings("ignore", message=".*Using `DistributedSampler` with the dataloaders")
# Lightning 2.6 asks torch 2.13 for a name that torch is about to drop.
warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\)")


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> float:
    """Trains; returns the last validation loss, for sweepers that search."""
    pl.seed_everything(config.seed, verbose=False)  # the same weights on all ranks
    data = hydra.utils.instantiate(config.data)
    network = hydra.utils.instantiate(config.model)
    module = Classifier(network, hydra.utils.instantiate(config.optimizer))
    trainer = hydra.utils.instantiate(config.trainer)
    start = time.perf_counter()
    trainer.fit(module, data)
    if "val_loss" not in trainer.callback_metrics:
        sys.exit("nothing was validated: trainer.val_check_interval has to be at most trainer.max_steps")
    if trainer.is_global_zero:
        hydra_config = HydraConfig.get()
        curve = read_curve(Path(trainer.logger.log_dir, "metrics.csv"))
        result = {
            "name": hydra_config.job.override_dirname or "defaults",
            "data": hydra_config.runtime.choices.data,
            "strategy": hydra_config.runtime.choices.strategy,
            "seed": config.seed,
            "world_size": trainer.world_size,
            "steps": curve[-1]["step"],
            "seconds": time.perf_counter() - start,
            "num_parameters": sum(p.numel() for p in network.parameters()),
            "curve": curve,
        }
        path = Path(hydra_config.runtime.output_dir, "result.json")
        path.write_text(json.dumps(result, indent=2))
        print(f"{result['name']}: accuracy {100 * curve[-1]['val_accuracy']:.1f} %, see {path}")
    return float(trainer.callback_metrics["val_loss"])


def read_curve(path: Path) -> list[dict[str, float]]:
    """Read the steps and metrics that the logger has written, perhaps in another process."""
    with path.open(newline="") as file:
        return [
            {
                "step": int(row["step"]) + 1,
                **{name: float(row[name]) for name in ("val_loss", "val_accuracy")},
            }
            for row in csv.DictReader(file)
        ]


if __name__ == "__main__":
    main()

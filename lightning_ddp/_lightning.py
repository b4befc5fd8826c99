"""The one place that knows Lightning's module names, public and private.

Lightning comes as `pytorch_lightning` and as `lightning.pytorch`, with separate classes and registries. The
one that the user has already imported is used; otherwise `pytorch_lightning`, otherwise `lightning.pytorch`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_fabric.plugins.collectives.torch_collective import default_pg_timeout as default_pg_timeout
    from lightning_fabric.strategies.launchers.subprocess_script import (
        _basic_subprocess_cmd as basic_subprocess_cmd,
    )
    from lightning_fabric.strategies.launchers.subprocess_script import (
        _hydra_subprocess_cmd as hydra_subprocess_cmd,
    )
    from lightning_fabric.utilities.distributed import (
        _set_num_threads_if_needed as set_num_threads_if_needed,
    )
    from lightning_fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
    from lightning_fabric.utilities.seed import reset_seed as reset_seed
    from pytorch_lightning import LightningModule as LightningModule
    from pytorch_lightning import Trainer as Trainer
    from pytorch_lightning.accelerators import Accelerator as Accelerator
    from pytorch_lightning.accelerators import CUDAAccelerator as CUDAAccelerator
    from pytorch_lightning.callbacks import Callback as Callback
    from pytorch_lightning.plugins import CheckpointIO as CheckpointIO
    from pytorch_lightning.plugins import Precision as Precision
    from pytorch_lightning.plugins.environments import ClusterEnvironment as ClusterEnvironment
    from pytorch_lightning.plugins.environments import LightningEnvironment as LightningEnvironment
    from pytorch_lightning.strategies import DDPStrategy as DDPStrategy
    from pytorch_lightning.strategies import StrategyRegistry as StrategyRegistry
    from pytorch_lightning.strategies.launchers import (
        _MultiProcessingLauncher as MultiProcessingLauncher,
    )
    from pytorch_lightning.strategies.launchers import (
        _SubprocessScriptLauncher as SubprocessScriptLauncher,
    )
    from pytorch_lightning.strategies.strategy import _ForwardRedirection as ForwardRedirection
    from pytorch_lightning.trainer.call import _interrupt as interrupt_trainer
    from pytorch_lightning.trainer.connectors.logger_connector.result import (
        _ResultCollection as ResultCollection,
    )
    from pytorch_lightning.trainer.states import TrainerFn as TrainerFn
    from pytorch_lightning.utilities.exceptions import SIGTERMException as SIGTERMException
    from pytorch_lightning.utilities.exceptions import _TunerExitException as TunerExitException
else:
    # our name -> (module below the root, name there); "fabric:" is the other package of the same family
    _NAMES = {
        "Accelerator": ("accelerators", "Accelerator"),
        "Callback": ("callbacks", "Callback"),
        "CUDAAccelerator": ("accelerators", "CUDAAccelerator"),
        "CheckpointIO": ("plugins", "CheckpointIO"),
        "ClusterEnvironment": ("plugins.environments", "ClusterEnvironment"),
        "DDPStrategy": ("strategies", "DDPStrategy"),
        "ForwardRedirection": ("strategies.strategy", "_ForwardRedirection"),
        "LightningEnvironment": ("plugins.environments", "LightningEnvironment"),
        "LightningModule": ("", "LightningModule"),
        "MultiProcessingLauncher": ("strategies.launchers", "_MultiProcessingLauncher"),
        "Precision": ("plugins", "Precision"),
        "ResultCollection": ("trainer.connectors.logger_connector.result", "_ResultCollection"),
        "SIGTERMException": ("utilities.exceptions", "SIGTERMException"),
        "StrategyRegistry": ("strategies", "StrategyRegistry"),
        "SubprocessScriptLauncher": ("strategies.launchers", "_SubprocessScriptLauncher"),
        "Trainer": ("", "Trainer"),
        "TrainerFn": ("trainer.states", "TrainerFn"),
        "TunerExitException": ("utilities.exceptions", "_TunerExitException"),
        "basic_subprocess_cmd": ("fabric:strategies.launchers.subprocess_script", "_basic_subprocess_cmd"),
        "default_pg_timeout": ("fabric:plugins.collectives.torch_collective", "default_pg_timeout"),
        "hydra_subprocess_cmd": ("fabric:strategies.launchers.subprocess_script", "_hydra_subprocess_cmd"),
        "interrupt_trainer": ("trainer.call", "_interrupt"),
        "optimizers_to_device": ("fabric:utilities.optimizer", "_optimizers_to_device"),
        "reset_seed": ("fabric:utilities.seed", "reset_seed"),
        "set_num_threads_if_needed": ("fabric:utilities.distributed", "_set_num_threads_if_needed"),
    }

    def _choose_root() -> str:
        for root in ("pytorch_lightning", "lightning.pytorch"):
            if root in sys.modules:
                return root
        return "pytorch_lightning" if importlib.util.find_spec("pytorch_lightning") else "lightning.pytorch"

    ROOT = _choose_root()
    _FABRIC = "lightning_fabric" if ROOT == "pytorch_lightning" else "lightning.fabric"
    for _ours, (_module, _theirs) in _NAMES.items():
        _root, _, _path = _module.rpartition(":")
        _full = ".".join(filter(None, (_FABRIC if _root else ROOT, _path)))
        globals()[_ours] = getattr(importlib.import_module(_full), _theirs)

__all__ = [
    "Accelerator",
    "CUDAAccelerator",
    "Callback",
    "CheckpointIO",
    "ClusterEnvironment",
    "DDPStrategy",
    "ForwardRedirection",
    "LightningEnvironment",
    "LightningModule",
    "MultiProcessingLauncher",
    "Precision",
    "ResultCollection",
    "SIGTERMException",
    "StrategyRegistry",
    "SubprocessScriptLauncher",
    "Trainer",
    "TrainerFn",
    "TunerExitException",
    "basic_subprocess_cmd",
    "default_pg_timeout",
    "hydra_subprocess_cmd",
    "interrupt_trainer",
    "optimizers_to_device",
    "reset_seed",
    "set_num_threads_if_needed",
    "set_training_results",
]


def set_training_results(trainer: Trainer, results: ResultCollection) -> None:
    """Lets `trainer` collect in `results` what is logged while it trains."""
    trainer.fit_loop.epoch_loop._results = results

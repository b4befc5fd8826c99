"""A PyTorch Lightning strategy with its own bucketed DistributedDataParallel.

Importing the package registers its named variants with each namespace of Lightning that the script has
imported or imports later, so that `Trainer(strategy="custom_ddp")` works, and its configuration groups with
Hydra; it imports neither. In a child of its launcher it ties the process's life to the launcher's.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_ddp.errors import PeerFailure
from lightning_ddp.hydra_jobs import install as extend_hydra
from lightning_ddp.launch.child_process import adopt_from_environment, end_fast
from lightning_ddp.strategy import CustomDDPPlugin, CustomDDPStrategy
from lightning_ddp.variants import available_variants, register_builtin_variants, register_variant

if TYPE_CHECKING:
    from lightning_ddp import averaging as averaging
    from lightning_ddp import callbacks as callbacks
    from lightning_ddp import hooks as hooks
    from lightning_ddp.ddp.module import BucketedDDP
    from lightning_ddp.fabric import CustomFabricStrategy
    from lightning_ddp.replicas import DataParallel, data_parallel, gather, parallel_apply, replicate, scatter
    from lightning_ddp.trainer import Trainer

__version__ = "0.1.0"
__all__ = [
    "BucketedDDP",
    "CustomDDPPlugin",
    "CustomDDPStrategy",
    "CustomFabricStrategy",
    "DataParallel",
    "PeerFailure",
    "Trainer",
    "available_variants",
    "data_parallel",
    "gather",
    "parallel_apply",
    "register_variant",
    "replicate",
    "scatter",
]

_CATALOGUES = ("averaging", "callbacks", "hooks")
_LATER = {
    "BucketedDDP": "ddp.module",
    "CustomFabricStrategy": "fabric",
    **dict.fromkeys(
        ("DataParallel", "data_parallel", "gather", "parallel_apply", "replicate", "scatter"), "replicas"
    ),
}
"""Modules of public names that are imported on first access, by name."""


if not TYPE_CHECKING:  # a type checker would accept any name because of it

    def __getattr__(name: str) -> Any:
        """Import and return a public object or submodule of the package on its first access.

        Otherwise the launching process would import them before it starts the other processes, and scripts
        that do not train, but use the variants or read a configuration, would import them, too.
        """
        if name in _CATALOGUES:
            return importlib.import_module(f"lightning_ddp.{name}")
        if name == "Trainer":
            return importlib.import_module("lightning_ddp.trainer").trainer_class()
        if name == "RayCustomDDPStrategy":
            return importlib.import_module("lightning_ddp.trainer").ray_strategy_class()
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"lightning_ddp.{_LATER[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_CATALOGUES, *_LATER, "RayCustomDDPStrategy", "Trainer"})


adopt_from_environment()
end_fast()
register_builtin_variants()
extend_hydra()

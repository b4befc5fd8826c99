"""Hydra: the ranks of a run share the job, and the configuration, of the process that composed it.

All uses of private names of Hydra and OmegaConf are here. The page of this room lists its files.
"""

from __future__ import annotations

import importlib
import sys
import types

from lightning_ddp.import_hook import after_import

for _name in [name for name in sys.modules if name.startswith("lightning_ddp.")]:
    # A child has loaded some modules before their packages, so set them as attributes of these.
    _owner, _, _leaf = _name.rpartition(".")
    if _owner in sys.modules:
        setattr(sys.modules[_owner], _leaf, sys.modules[_name])


def install() -> None:
    """Patch Hydra once the script imports it: ranks share its jobs, and this package's config groups exist.

    Does not import Hydra itself.
    """

    def keep_answers(module: types.ModuleType) -> None:
        from lightning_ddp.hydra_jobs.jobs import patch_resolvers

        patch_resolvers(module)

    def extend_hydra(module: types.ModuleType) -> None:
        importlib.import_module("lightning_ddp.hydra_jobs.compositions")

    after_import("omegaconf.base", keep_answers)
    after_import("hydra.core.global_hydra", extend_hydra)

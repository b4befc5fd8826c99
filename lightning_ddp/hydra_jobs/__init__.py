"""Hydra: the ranks of a run share the job, and the configuration, of the process that has composed it.

All that knows Hydra and OmegaConf by names that these do not promise. The page of this room has its files.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from lightning_ddp.import_hook import after_import

__all__ = ["install"]

for _name in [name for name in sys.modules if name.startswith("lightning_ddp.")]:
    # a child has loaded some files before their packages, whose attributes they would be by now
    _owner, _, _leaf = _name.rpartition(".")
    if _owner in sys.modules:
        setattr(sys.modules[_owner], _leaf, sys.modules[_name])


def install(schemas: Any) -> None:
    """Shares Hydra's jobs and offers it our groups, once the script has imported it. Imports nothing of it.

    Args:
        schemas: the package `conf`, which knows what is in our groups.
    """

    def keep_answers(module: types.ModuleType) -> None:
        from lightning_ddp.hydra_jobs.handover import install

        install(module)

    def extend_each_hydra(module: types.ModuleType) -> None:
        """The one patch of Hydra: every `Hydra` that registers itself in this process becomes one of ours."""
        from lightning_ddp.hydra_jobs.jobs import jobs

        jobs().schemas = schemas
        kind: Any = module.GlobalHydra
        original = kind.initialize

        def extend(hydra: Any, *, is_late: bool = False) -> None:
            from lightning_ddp.hydra_jobs.compositions import extend

            extend(hydra, is_late=is_late)

        def initialize(self: Any, hydra: Any) -> None:
            original(self, hydra)
            extend(hydra)

        kind.initialize = initialize
        living = kind.instance().hydra
        if living is not None:  # a job imports the package, or the search path of a composition
            extend(living, is_late=True)

    after_import("omegaconf.base", keep_answers)
    after_import("hydra.core.global_hydra", extend_each_hydra)

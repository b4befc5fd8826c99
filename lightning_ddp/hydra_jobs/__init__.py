"""Hydra: the ranks of a run share the job, and the configuration, of the process that composed it.

All uses of private names of Hydra and OmegaConf are here. The page of this room lists its files.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from lightning_ddp.import_hook import after_import

__all__ = ["install"]

for _name in [name for name in sys.modules if name.startswith("lightning_ddp.")]:
    # A child has loaded some modules before their packages, so set them as attributes of these.
    _owner, _, _leaf = _name.rpartition(".")
    if _owner in sys.modules:
        setattr(sys.modules[_owner], _leaf, sys.modules[_name])


def install() -> None:
    """Share Hydra's jobs and add the package's config groups, once the script has imported Hydra.

    Does not import Hydra itself.
    """

    def keep_answers(module: types.ModuleType) -> None:
        from lightning_ddp.hydra_jobs.handover import install

        install(module)

    def extend_each_hydra(module: types.ModuleType) -> None:
        """Patch Hydra, here only: extend every `Hydra` that registers itself in this process."""
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
        if living is not None:  # the package is imported by a job, or by a composition's search path
            extend(living, is_late=True)

    after_import("omegaconf.base", keep_answers)
    after_import("hydra.core.global_hydra", extend_each_hydra)

"""Hydra's configuration groups `strategy`, `trainer` and `launcher`; what `hydra_jobs` is told of them.

They are found with `hydra.searchpath: [pkg://lightning_ddp.conf]`, and without it in a script that imports
`lightning_ddp` where its defaults name one of them that it has not itself. Nothing here imports Hydra before
that. (A plugin in Hydra's own sense would be found without `import lightning_ddp`, but would have every Hydra
program of the environment import torch.)
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
_PROVIDER = "lightning_ddp"


@functools.cache
def register() -> None:
    """Register the schemas and groups of this package in Hydra's ConfigStore.

    Not as `strategy`, `trainer` and `launcher`: Hydra 1 takes an entry of its store for the schema of a file
    of the same name, so that a `trainer/gpu.yaml` of the user's could not be composed any more.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    from lightning_ddp.conf.schema import all_schemas

    store = ConfigStore.instance()
    for schema in all_schemas().values():
        group, _, name = f"{_PROVIDER}/schema/{schema.name}".rpartition("/")
        store.store(group=group, name=name, node=schema.cls, provider=_PROVIDER)
    for path in sorted(_FOLDER.rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        package = re.match(r"# @package (\S+)", text)
        store.store(
            group=f"{_PROVIDER}/{path.parent.relative_to(_FOLDER).as_posix()}",
            name=path.stem,
            node=OmegaConf.create(text),
            package=package[1] if package else None,
            provider=_PROVIDER,
        )


def check_composed(config: Any) -> None:
    """Check a composed configuration with `check.check_composed`, if it can contain a schema."""
    if "lightning_ddp.conf.schema" in sys.modules:
        from lightning_ddp.conf.check import check_composed

        check_composed(config)


def explain(error: Any, groups: Set[str]) -> str | None:
    """Explain a Hydra error with `check.explain`."""
    from lightning_ddp.conf.check import explain

    return explain(error, groups)

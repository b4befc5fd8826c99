"""Hydra's configuration groups `strategy`, `trainer` and `launcher`, and their interface for `hydra_jobs`.

Hydra finds them with `hydra.searchpath: [pkg://lightning_ddp.conf]`. A script that imports `lightning_ddp`
needs no search path if its defaults name a group that the script itself does not have. Nothing here imports
Hydra before that. (A Hydra plugin would be found without `import lightning_ddp`, but would make every Hydra
program in the environment import torch.)
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

    Not as `strategy`, `trainer` and `launcher`: Hydra 1 uses an entry of its store as the schema of a file of
    the same name, so a user's `trainer/gpu.yaml` could not be composed any more.
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

"""What a script that uses Hydra gets from `import lightning_ddp`: schemas, groups and checks.

`install` imports nothing of Hydra; the rest happens when the user's script has imported it. (A plugin in
Hydra's own sense would be found without `import lightning_ddp`, but would have every Hydra program of the
environment import torch.)
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_ddp.conf.importing import after_import

__all__ = ["install"]

_FOLDER = Path(__file__).parent
_PROVIDER = "lightning_ddp"
_SEARCH_PATH = "pkg://lightning_ddp.conf"
_GROUPS = ("strategy", "trainer", "launcher")
_MARK = "_knows_lightning_ddp"


def install() -> None:
    """Does all this when Hydra is imported, or at once if it is. Does not communicate."""
    after_import("hydra.core.config_store", _register)
    after_import("hydra._internal.config_loader_impl", _extend_loader)


def _register(module: ModuleType) -> None:
    """Stores the schemas, and the groups under the name of this package.

    Not as `strategy`, `trainer` and `launcher`: Hydra 1 takes an entry of its store for the schema of a file
    of the same name, so that a `trainer/gpu.yaml` of the user's could not be composed any more.
    """
    from omegaconf import OmegaConf

    from lightning_ddp.conf.schema import all_schemas

    store = module.ConfigStore.instance()
    for schema in all_schemas().values():
        group, _, name = f"lightning_ddp/schema/{schema.name}".rpartition("/")
        store.store(group=group, name=name, node=schema.cls, provider=_PROVIDER)
    for path in sorted(path for group in _GROUPS for path in _FOLDER.glob(f"{group}/**/*.yaml")):
        text = path.read_text(encoding="utf-8")
        package = re.match(r"# @package (\S+)", text)
        store.store(
            group=f"lightning_ddp/{path.parent.relative_to(_FOLDER).as_posix()}",
            name=path.stem,
            node=OmegaConf.create(text),
            package=package[1] if package else None,
            provider=_PROVIDER,
        )


def _extend_loader(module: ModuleType) -> None:
    """Appends our folder to Hydra's search path, and our checks to its composition.

    For every `@hydra.main`, sweep and `compose` of this process, which all end in this class. Hydra (1.3)
    runs no call-back when a composition fails, and so none that could name the option that was meant.
    """
    loader: Any = module.ConfigLoaderImpl
    if getattr(loader, _MARK, False):
        return
    make, override = loader.__init__, loader._apply_overrides_to_config

    @functools.wraps(make)
    def __init__(self: Any, config_search_path: Any) -> None:
        _append_search_path(config_search_path)
        make(self, config_search_path)

    @functools.wraps(override)
    def _apply_overrides_to_config(overrides: Any, cfg: Any) -> None:
        from lightning_ddp.conf.check import check_composed

        override(overrides, cfg)
        check_composed(cfg)

    loader.__init__ = __init__
    loader.load_configuration = _explained(loader.load_configuration)
    # What follows matters where a search path is all that names the package: Hydra imports it in the middle
    # of its first composition, whose load_configuration is running by then, and which then looks these up.
    loader._compose_config_from_defaults_list = _explained(loader._compose_config_from_defaults_list)
    loader._apply_overrides_to_config = staticmethod(_explained(_apply_overrides_to_config))
    setattr(loader, _MARK, True)


def _explained(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose errors about our options say what was meant; each is explained once."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        from hydra.errors import HydraException

        from lightning_ddp.conf.check import explain

        try:
            return function(*args, **kwargs)
        except HydraException as error:
            explanation = None if hasattr(error, _MARK) else explain(error)
            if explanation is None:
                raise
            explained = type(error)(explanation)
            setattr(explained, _MARK, True)
            raise explained from error.__cause__

    return wrapper


def _append_search_path(search_path: Any) -> None:
    """After the user's files, so that they come first; before the store, which Hydra wants at the end."""
    elements = search_path.get_path()
    if all(element.path != _SEARCH_PATH for element in elements):
        search_path.append(_PROVIDER, _SEARCH_PATH)
        if len(elements) > 1 and elements[-2].provider == "schema":
            elements[-2], elements[-1] = elements[-1], elements[-2]

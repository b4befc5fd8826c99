"""Actions that wait until the user's script has imported a module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["after_import"]


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Calls `action(module)` once the module is imported: now, if it is already, and else right after that.

    Imports nothing itself. An error of the action is one of the import.

    Args:
        name: of the module, with its packages.
        action: may import what it likes.
    """
    module = sys.modules.get(name)
    if module is not None and not _is_being_imported(module):
        action(module)
    else:
        sys.meta_path.insert(0, _Finder(name, action))


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


class _Finder(MetaPathFinder):
    """Finds one module as the others do, with a loader that calls the action after it."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)  # it is needed once, and must not find itself
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._action)
        return spec


class _Loader(Loader):
    """The loader that was found, and an action behind it."""

    def __init__(self, loader: Loader, action: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._action(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # get_source, get_resource_reader ...

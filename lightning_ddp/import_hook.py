"""Callbacks for the import of a module, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

_waiting: dict[str, list[Callable[[types.ModuleType], None]]] = {}


def after_import(name: str, function: Callable[[types.ModuleType], None]) -> None:
    """Call `function(module)` once a module is imported, or now if it is imported already.

    The call is in the importing thread. The module need not exist.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        function(module)
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting.setdefault(name, []).append(function)


class _Finder(importlib.abc.MetaPathFinder):
    """Import finder that lets functions given to `after_import` be called once their module has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _waiting:
            return None
        others = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _call_after_execution(spec.loader)
        return spec


def _call_after_execution(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        loader.exec_module = execute
        execute(module)
        for function in _waiting.pop(module.__name__, []):
            function(module)

    loader.exec_module = exec_module

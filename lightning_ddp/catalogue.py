"""Catalogue of hooks or averagers by name."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Generic, TypeVar

from lightning_ddp.errors import ConfigurationError, closest

K = TypeVar("K")


class Catalogue(Generic[K]):
    """Registry by name of a base class's subclasses with their options, found in the base's package.

    Listed are subclasses with a `name` of their own. Each has a dataclass `Options` whose fields with `init`
    are the options. Errors call the classes `what` and an entry `argument`.
    """

    def __init__(self, what: str, base: type[K], *, argument: str | None = None, remark: str = "") -> None:
        self._what, self._argument, self._remark = what, argument or what, remark
        self._kinds: dict[str, Any] = {}
        for kind in _named_classes(base):
            assert kind.name not in self._kinds, f"two classes of the {what} {kind.name!r}"
            self._kinds[kind.name] = kind

    def __getitem__(self, name: str) -> type[K]:
        kind: type[K] = self._kinds[name]
        return kind

    def names(self) -> list[str]:
        return sorted(self._kinds)

    def descriptions(self) -> dict[str, str]:
        """Return the first lines of the classes' docstrings by name, sorted."""
        return {name: (self._kinds[name].__doc__ or "").partition("\n")[0] for name in self.names()}

    def options(self) -> dict[str, Any]:
        """Return the options dataclass of each class by name, sorted."""
        return {name: self._kinds[name].Options for name in self.names()}

    def parse(self, entry: Any) -> tuple[str, Any]:
        """Check a configuration entry, a name or mapping with `name`; return name and options object."""
        given = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
            raise ConfigurationError(
                f"{self._argument} {entry!r}: expected a name or a mapping with 'name'{self._remark}"
            )
        given = {str(key): value for key, value in given.items()}
        name = given.pop("name")
        if name not in self._kinds:
            hint = closest(name, self.names(), lists_all=True)
            raise ConfigurationError(f"unknown {self._what} {name!r}{hint}")
        kind = self._kinds[name].Options
        known = [field.name for field in fields(kind) if field.init]
        for option in given:
            if option not in known:
                hint = closest(option, known, lists_all=True)
                raise ConfigurationError(f"{self._what} {name!r} has no option {option!r}{hint}")
        try:
            return name, kind(**given)
        except (ConfigurationError, TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(f"{self._what} {name!r}: {error}") from error


def _named_classes(base: type) -> Iterator[Any]:
    package = base.__module__.rpartition(".")[0]
    for file in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        for kind in [*vars(importlib.import_module(file.name)).values()]:
            is_derived = isinstance(kind, type) and issubclass(kind, base)
            if is_derived and kind.__module__ == file.name and "name" in vars(kind):
                yield kind


def hook_name(hook: Any) -> str:
    """Return the display name of a hook: its own name, or that of the function.

    >>> from lightning_ddp.hooks.momentum import Sign
    >>> hook_name(Sign.__new__(Sign)), hook_name(functools.partial(print, end=""))
    ('sign', 'print')
    """
    while isinstance(hook, functools.partial):
        hook = hook.func
    own = getattr(hook, "name", None)
    return own if isinstance(own, str) else str(getattr(hook, "__qualname__", type(hook).__qualname__))

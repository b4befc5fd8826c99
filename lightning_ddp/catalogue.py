"""Catalogue of hooks or averagers by name, and identity of a hook for comparison between ranks."""

from __future__ import annotations

import functools
import hashlib
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import CodeType
from typing import Any, Generic, TypeVar

from lightning_ddp.errors import ConfigurationError, closest

K = TypeVar("K")
_PLAIN = (bool, int, float, str, bytes, type(None))


class Catalogue(Generic[K]):
    """Registry by name of a base class's subclasses with their options, found in the files beside it.

    Args:
        what: kind of the classes for errors, such as 'averager'.
        base: base class. Subclasses with their own `name` are listed; each has a dataclass `Options` whose
            fields with `init` are the options.
        argument: name of a configuration entry in errors; None for `what`.
        remark: end of the error for an entry without a name.
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
        """Return name and options of the class that a configuration entry (a string or mapping) names."""
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


def describe_hook(hook: Any) -> str:
    """Return a hook's name with its options, or with a digest of its code; equal for equal hooks."""
    if hook is None:
        return "none"
    options = getattr(hook, "options", None)
    if isinstance(getattr(hook, "name", None), str) and options is not None:
        return f"{hook_name(hook)} ({options})"
    arguments = []
    while isinstance(hook, functools.partial):
        given = [*enumerate(hook.args), *sorted(hook.keywords.items())]
        arguments += [f"{key}={value!r}" for key, value in given if isinstance(value, _PLAIN)]
        hook = hook.func
    code = getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
    digest = _digest(code) if isinstance(code, CodeType) else "-"
    module = getattr(hook, "__module__", "")
    return f"{module}.{hook_name(hook)} ({', '.join([*arguments, f'code {digest}'])})"


def _digest(code: CodeType) -> str:
    """Return a hash of a code object's instructions, names and plain constants, which paths do not change."""
    parts = [repr(code.co_code), repr(code.co_names)]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            parts.append(_digest(constant))
        elif isinstance(constant, _PLAIN):
            parts.append(repr(constant))
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:8]

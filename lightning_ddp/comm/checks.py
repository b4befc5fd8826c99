"""Checks of what users name: hooks and averagers in a catalogue, their options, and their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from lightning_ddp.errors import ConfigurationError, closest

__all__ = ["first_lines", "name_hint", "parse_entry", "require"]


def require(condition: bool, message: str) -> None:
    """Raises a ConfigurationError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigurationError(message)


def name_hint(found: str, known: Sequence[str]) -> str:
    """The end of a sentence about a name that does not exist: what was meant, and which there are.

    >>> name_hint("ration", ["ratio", "seed"]), name_hint("k", ["ratio"]), name_hint("k", [])
    ("; did you mean 'ratio'? There are ratio, seed", '; there are ratio', '; it has none')
    """
    if not known:
        return "; it has none"
    hint = closest(found, known)
    return f"{hint} There are {', '.join(known)}" if hint.endswith("?") else hint


def first_lines(kinds: Mapping[str, type]) -> dict[str, str]:
    """Name -> the first line of its class's docstring, sorted by name."""
    return {name: (kind.__doc__ or "").partition("\n")[0] for name, kind in sorted(kinds.items())}


def parse_entry(what: str, entry: Mapping[str, Any], kinds: Mapping[str, Any]) -> tuple[str, Any]:
    """Finds what an entry of a configuration names, and checks its options.

    Args:
        what: 'averager' ..., for errors.
        entry: `name`, a text, and options.
        kinds: name -> class, with a dataclass `Options` whose fields with `init` are the options.

    Returns:
        The name, and the options as an object of that dataclass.

    Raises:
        ConfigurationError: the name or an option does not exist, or a value cannot be used.
    """
    name = entry["name"]
    if name not in kinds:
        raise ConfigurationError(f"unknown {what} {name!r}{name_hint(name, sorted(kinds))}")
    options = kinds[name].Options
    known = [field.name for field in fields(options) if field.init]
    given = {str(key): value for key, value in entry.items() if key != "name"}
    for option in given:
        if option not in known:
            raise ConfigurationError(f"{what} {name!r} has no option {option!r}{name_hint(option, known)}")
    try:
        return name, options(**given)
    except (ConfigurationError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"{what} {name!r}: {error}") from error

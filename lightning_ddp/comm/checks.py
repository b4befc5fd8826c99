"""What checks of options have in common, whether they are those of a hook or of an averager."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from lightning_ddp.errors import ConfigurationError

__all__ = ["name_hint", "require"]


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
    close = difflib.get_close_matches(found, known, n=1)
    listed = ", ".join(known)
    return f"; did you mean {close[0]!r}? There are {listed}" if close else f"; there are {listed}"

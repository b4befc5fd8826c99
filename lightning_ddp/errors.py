"""All errors that the package raises.

A message names the rank and step, the value found and the value expected, the likely cause and a remedy.
All errors derive from `LightningDDPError` and from the built-in error that torch or Python would raise, so
that existing `except` clauses keep working.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from datetime import timedelta
from math import inf
from typing import Any

_SCREEN_LINES, _SCREEN_COLUMNS = 20, 100  # size of a screen; a longer report ends with the essentials


def require(condition: bool, message: str) -> None:
    """Raise a ConfigurationError with `message` unless `condition` is True."""
    if not condition:
        raise ConfigurationError(message)


def in_seconds(argument: str, duration: timedelta | float) -> float:
    """Return a duration, given as a `timedelta` or a number, in seconds.

    >>> in_seconds("timeout", timedelta(minutes=1.5)), in_seconds("timeout", 20)
    (90.0, 20)

    Raises:
        ConfigurationError: It is neither a `timedelta` nor a finite number.
    """
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    require(
        type(duration) in (int, float) and -inf < duration < inf,
        f"{argument}={duration!r}: expected a datetime.timedelta or seconds, such as"
        " timedelta(minutes=5) or 300",
    )
    return duration


def one_of(choices: Iterable[str]) -> str:
    """Return valid choices joined by commas and 'or', for a message.

    >>> one_of(["'auto'"]), one_of(["'auto'", "'ring'", "'gloo'"])
    ("'auto'", "'auto', 'ring' or 'gloo'")
    """
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last


def closest(found: str, known: Iterable[str], *, lists_all: bool = False) -> str:
    """Return the end of a message about an unknown name: the closest name, all names, or both.

    >>> closest("rnak", ["rank", "seed"]), closest("x", ["rank", "seed"]), closest("x", [])
    ("; did you mean 'rank'?", '; expected rank or seed', '; it has none')
    >>> closest("rnak", ["rank", "seed"], lists_all=True)
    "; did you mean 'rank'? Expected rank or seed"
    """
    names = list(known)
    if not names:
        return "; it has none"
    close = difflib.get_close_matches(found, names, n=1)
    every = f"xpected {one_of(names)}"
    return f"; did you mean {close[0]!r}?" + f" E{every}" * lists_all if close else f"; e{every}"


def unknown_argument(owner: str, argument: str, known: Iterable[str]) -> TypeError:
    """Return the TypeError for a call with an unknown keyword argument."""
    return TypeError(f"{owner} got an unexpected keyword argument {argument!r}{closest(argument, known)}")


class LightningDDPError(Exception):
    """Base class of all errors of this package."""


class ConfigurationError(LightningDDPError, ValueError):
    """An argument, name or environment variable has an invalid value."""


class UnsupportedVersionError(LightningDDPError, AttributeError):
    """The installed Lightning version lacks a name that this package needs."""


class ProcessGroupError(ConfigurationError, RuntimeError):
    """There is no process group, or the given process group cannot be used."""


class UnsuitableModuleError(LightningDDPError, RuntimeError):
    """A module cannot be wrapped: it has nothing to train, or parameters without a shape."""


class RankMismatchError(LightningDDPError, RuntimeError):
    """The ranks hold different models, so that their gradients cannot be averaged."""


class RendezvousError(LightningDDPError, RuntimeError):
    """The processes of a run could not connect to each other."""


class CollectiveError(LightningDDPError, RuntimeError):
    """A collective failed, for example because a peer has closed its connection.

    Attributes:
        label: Name of the collective.
        rank: Group rank that raises the error.
        waited_s: Seconds from the start of the collective to its failure.
        missing: Group ranks that have not called the collective, if they are known.
    """

    def __init__(
        self, message: str, *, label: str, rank: int, waited_s: float, missing: Sequence[int] = ()
    ) -> None:
        super().__init__(message)
        self.label = label
        self.rank = rank
        self.waited_s = waited_s
        self.missing = tuple(missing)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), dict(self.__dict__), str(self))


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A collective did not finish within its timeout."""


class CollectiveMismatchError(CollectiveError):
    """The ranks have called, or are about to call, different collectives of a group."""


class UnevenInputsError(LightningDDPError, RuntimeError):
    """A rank has run out of batches where that is not allowed, or has had no batch at all."""


class BackwardOrderError(LightningDDPError, RuntimeError):
    """Gradients arrived in an order that the reducer does not support, such as twice in one backward."""


class CommHookError(LightningDDPError, RuntimeError):
    """A communication hook raised an error, or returned something other than a reduced bucket."""


@dataclass(eq=False, repr=False)
class MissingGradientError(LightningDDPError, RuntimeError):
    """Parameters received no gradient in a synchronized backward pass.

    Attributes:
        rank: Rank that raises the error, of `world_size`.
        missing: Rank -> qualified names of the parameters without a gradient on that rank. A rank that
            did not report in time is absent.
        step: Number of the synchronized backward pass, from 0.
        can_continue: True if all ranks have started the same collectives, so that training may continue;
            if False, the group cannot be used any further.
    """

    missing: Mapping[int, Sequence[str]]
    _: KW_ONLY
    rank: int
    world_size: int
    step: int
    can_continue: bool = False
    hint: str = ""

    def __post_init__(self) -> None:
        self.missing = {rank: tuple(names) for rank, names in sorted(self.missing.items())}
        super().__init__(self._describe())

    def add_hint(self, hint: str) -> None:
        """Add `hint` to the end of this error's message."""
        self.hint = f"{self.hint}\n{hint}" if self.hint else hint
        self.args = (self._describe(),)

    def copy(self) -> MissingGradientError:
        """Return a copy without the traceback, which would keep the frames that raised it alive."""
        return type(self)(**_values(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), _values(self))

    def _describe(self) -> str:
        lines = [f"rank {self.rank}: backward {self.step} ended, but these parameters got no gradient:"]
        for rank in range(self.world_size):
            names = self.missing.get(rank)
            found = "no report" if names is None else ", ".join(names) or "none missing"
            lines.append(f"  rank {rank}: {found}")
        lines.append(
            "Expected a gradient for every parameter that requires one. Use each of them in the loss, or set"
            " requires_grad=False on it before wrapping, or use find_unused_parameters=True, which searches"
            " for unused parameters in every step."
        )
        return "\n".join([*lines, self.hint] if self.hint else lines)


def _rebuild(kind: type[LightningDDPError], keywords: dict[str, Any], *message: str) -> LightningDDPError:
    """Unpickle an error with keyword-only arguments, and possibly a message composed by its raiser."""
    return kind(*message, **keywords)


def _values(error: Any) -> dict[str, Any]:
    return {field.name: getattr(error, field.name) for field in fields(error)}


def fits_a_screen(text: str) -> bool:
    """Return True if a text fits 20 lines of 100 columns, where a non-ASCII character counts as two."""
    widths = (len(line) + sum(not c.isascii() for c in line) for line in text.rstrip().split("\n"))
    return sum(max(1, -(-width // _SCREEN_COLUMNS)) for width in widths) <= _SCREEN_LINES


def cause_of(failure: Any, *, is_whole: bool = True) -> str:
    """Return class and message of a `PeerFailure`'s cause; `is_whole=False` cuts a long message to a line."""
    message: str = failure.message
    if not is_whole and not fits_a_screen(message):
        message = message.partition("\n")[0][:200] + " ..."
    return f"{failure.exception_type}: {message}" if failure.exception_type else message


def with_ending(text: str, failure: Any) -> str:
    """Return a report; if it is longer than a screen, end it with a line of failed rank, step and cause."""
    if fits_a_screen(text):
        return text
    name = f"rank {failure.rank}" if failure.rank >= 0 else "the launching process"
    where = f" at step {failure.step}" if failure.step is not None else ""
    where += f" in {failure.phase}" if failure.phase else ""
    what = failure.message.strip().partition("\n")[0].strip()[:200]
    if failure.exception_type:
        what = f"{failure.exception_type}: {what}"
    elif failure.traceback:  # a stack, or the end of a log
        what = f"{what} ... {failure.traceback.rstrip().splitlines()[-1].strip()[:200]}"
    return f"{text.rstrip()}\nIn short: {name} failed first{where}: {what}\n"


@dataclass(kw_only=True, eq=False, repr=False)
class PeerFailure(LightningDDPError, RuntimeError):
    """Another rank failed, and this rank was stopped because of it.

    Attributes:
        rank: Global rank that failed first; -1 for a launching process that is not a rank.
        node_rank: Node of that rank, or None if unknown.
        host: Host name of that node, or None.
        pid: Process id on that host, or None.
        step: Global step at the failure, or None.
        phase: Phase of the failure (`training_step`, `validation` ...), or None.
        exception_type: Class name of the rank's exception, or None if the process died without one.
        exception_class: Module and full name of that class, `module:name`, or None.
        message: Text of the exception, or how the process died.
        traceback: Formatted traceback, or None.
        exit_code: Exit code of the process, negative for a signal; None while it runs.
        is_own: True if the rank that raises this error is the one that failed, for example by stalling;
            None in a launching process that is not a rank.
    """

    rank: int
    message: str
    node_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    step: int | None = None
    phase: str | None = None
    exception_type: str | None = None
    exception_class: str | None = None
    traceback: str | None = None
    exit_code: int | None = None
    is_own: bool | None = False

    def __post_init__(self) -> None:
        super().__init__(self._describe())

    def __str__(self) -> str:  # some classes that `like` mixes in have another one
        return self._describe()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (PeerFailure, _values(self))

    def like(self) -> PeerFailure:
        """Return this failure as an object that is also of the original exception's class, where possible.

        Returns itself if this process does not have that class, or Python cannot combine the two.
        """
        kind = _loaded_class(self.exception_class)
        if type(self) is not PeerFailure or kind is None:
            return self
        try:
            return self._mixed_with(kind)
        except Exception:  # noqa: BLE001 (a user's class may raise any error when it is combined)
            return self

    def _mixed_with(self, kind: type[Exception]) -> PeerFailure:
        names = {"__module__": __name__, "__doc__": PeerFailure.__doc__}
        mixed: Any = type(PeerFailure.__name__, (PeerFailure, kind), names)
        failure: PeerFailure = mixed.__base__.__new__(mixed)  # the base that determines the memory layout
        failure.args = self.args
        for name, value in _values(self).items():
            setattr(failure, name, value)
        return failure

    def _describe(self) -> str:
        where = [f"host {self.host}"] if self.host else []
        where += [f"pid {self.pid}"] if self.pid is not None else []
        name = f"rank {self.rank}" if self.rank >= 0 else "the launching process"
        text = name + (f" ({', '.join(where)})" if where else "") + " failed"
        text += f" at step {self.step}" if self.step is not None else ""
        text += f" in {self.phase}" if self.phase else ""
        text += f":\n  {cause_of(self, is_whole=not self.traceback)}\n"
        text += "  This rank was healthy and was stopped because of it." if self.is_own is False else ""
        if self.traceback:
            text += f" Traceback of rank {self.rank} follows.\n{self.traceback}"
        return with_ending(text, self)


def _loaded_class(path: str | None) -> type[Exception] | None:
    """Return the imported exception class `module:name`; None if absent, a base of PeerFailure, or ours."""
    module, _, name = (path or "").partition(":")
    # In spawned processes the user's script is `__mp_main__`.
    found: Any = sys.modules.get("__main__" if module == "__mp_main__" else module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if not isinstance(found, type) or not issubclass(found, Exception):
        return None
    return None if issubclass(PeerFailure, found) or issubclass(found, LightningDDPError) else found

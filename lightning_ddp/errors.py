"""Every error that the package raises, on one page.

A message says which rank and step, what was found and what was expected, the likely cause and one thing
to try. All of them derive from `LightningDDPError` and from the built-in that torch or Python would raise
in the same place, so that existing `except` clauses keep working.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_SCREEN_LINES, _SCREEN_COLUMNS = 20, 100
"""What a report may take of a screen before its last line says all that matters once more."""


def require(condition: bool, message: str) -> None:
    """Raises a ConfigurationError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigurationError(message)


def one_of(choices: Iterable[str]) -> str:
    """Join valid choices for a message.

    >>> one_of(["'auto'"]), one_of(["'auto'", "'ring'", "'gloo'"])
    ("'auto'", "'auto', 'ring' or 'gloo'")
    """
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last


def closest(found: str, known: Iterable[str], *, lists_all: bool = False) -> str:
    """Return the end of a message about an unknown name: the closest known name, or all names, or both.

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
    """What a call with a keyword that its signature has not ends with."""
    return TypeError(f"{owner} got an unexpected keyword argument {argument!r}{closest(argument, known)}")


class LightningDDPError(Exception):
    """Base of all errors of this package."""


class ConfigurationError(LightningDDPError, ValueError):
    """An argument, name or environment variable that cannot be used as given."""


class UnsupportedVersionError(LightningDDPError, AttributeError):
    """A version of Lightning that lacks something which this package builds on."""


class ProcessGroupError(ConfigurationError, RuntimeError):
    """There is no process group, or the one that was given cannot be used."""


class UnsuitableModuleError(LightningDDPError, RuntimeError):
    """A module that cannot be wrapped: nothing in it to train, or parameters without a shape."""


class RankMismatchError(LightningDDPError, RuntimeError):
    """The ranks hold different models, so that nothing can be averaged between them."""


class RendezvousError(LightningDDPError, RuntimeError):
    """The processes of a run could not find each other."""


class CollectiveError(LightningDDPError, RuntimeError):
    """A collective failed: its backend says how, such as that a peer has closed its connection.

    Attributes:
        label: what the collective is called.
        rank: rank in the group that raises it.
        waited_s: seconds from its start to its failure.
        missing: group ranks that never came or will not come, where that is known.
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
    """A collective did not end within its deadline."""


class CollectiveMismatchError(CollectiveError):
    """The ranks are about to start different collectives of a group, or have done so."""


class ReplicaError(LightningDDPError, RuntimeError):
    """A replica raised an error of a kind that cannot be built anew; the original is its `__cause__`."""


class UnevenInputsError(LightningDDPError, RuntimeError):
    """A rank has run out of batches while others have more, and may not, or has had none at all."""


class BackwardOrderError(LightningDDPError, RuntimeError):
    """Gradients arrived in a way that the reducer cannot follow, such as twice in one backward."""


class CommHookError(LightningDDPError, RuntimeError):
    """A communication hook raised, or returned something that is no reduced bucket."""


class MissingGradientError(LightningDDPError, RuntimeError):
    """Parameters got no gradient in a backward that was to be synchronised.

    Attributes:
        rank: the rank that raises it, of `world_size`.
        missing: rank -> qualified names of the parameters without a gradient on that rank. A rank that
            did not report in time is absent.
        step: number of the synchronised backward, from 0.
        num_launched: buckets that every rank had started to reduce; None where the ranks differ, which
            leaves collectives that will never match: this group cannot be used any further.
    """

    def __init__(
        self,
        missing: Mapping[int, Sequence[str]],
        *,
        rank: int,
        world_size: int,
        step: int,
        num_launched: int | None = None,
        hint: str = "",
    ) -> None:
        self.num_launched = num_launched
        self.hint = hint
        self.rank = rank
        self.world_size = world_size
        self.missing = {r: tuple(names) for r, names in sorted(missing.items())}
        self.step = step
        super().__init__(self._describe())

    @property
    def is_same_everywhere(self) -> bool:
        """Whether every rank has reported, and all miss the same parameters."""
        return len(self.missing) == self.world_size and len(set(self.missing.values())) == 1

    def with_hint(self, hint: str) -> MissingGradientError:
        """The same error with more to say at its end."""
        return MissingGradientError(**{**self._keywords(), "hint": hint})

    def add_hint(self, hint: str) -> None:
        """Lets this very error say still more at its end."""
        self.hint = f"{self.hint}\n{hint}" if self.hint else hint
        self.args = (self._describe(),)

    def _keywords(self) -> dict[str, Any]:
        names = ("missing", "rank", "world_size", "step", "num_launched", "hint")
        return {name: getattr(self, name) for name in names}

    def copy(self) -> MissingGradientError:
        """The same error without a traceback, which would keep the frames that raised it alive."""
        rebuild, arguments = self.__reduce__()
        return rebuild(*arguments)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._keywords())

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


class MissingGradientWarning(MissingGradientError, UserWarning):
    """The same in the first backward of a wrapper, where all ranks miss the same parameters.

    Their `.grad` stays as it was, those of the others are right; the next step raises the error.
    """

    @classmethod
    def of(cls, error: MissingGradientError) -> MissingGradientWarning:
        """The warning for an error that is put off to the next step."""
        return cls(**{**error._keywords(), "hint": "The next step will raise an error."})


def _rebuild(kind: type[LightningDDPError], keywords: dict[str, Any], *message: str) -> LightningDDPError:
    """Unpickles an error that has keyword-only arguments, and perhaps a message that its raiser composed."""
    return kind(*message, **keywords)


def fits_a_screen(text: str) -> bool:
    """Tell whether a text takes at most 20 lines of 100 columns, of which a character may take two."""
    widths = (len(line) + sum(not c.isascii() for c in line) for line in text.rstrip().split("\n"))
    return sum(max(1, -(-width // _SCREEN_COLUMNS)) for width in widths) <= _SCREEN_LINES


def cause_of(failure: Any, *, is_whole: bool = True) -> str:
    """Say what happened, of a `PeerFailure` or its record; if not whole, the first line of a long message."""
    message: str = failure.message
    if not is_whole and not fits_a_screen(message):
        message = message.partition("\n")[0][:200] + " ..."
    return f"{failure.exception_type}: {message}" if failure.exception_type else message


def with_ending(text: str, failure: Any) -> str:
    """Repeat rank, step and class of a failure after a report of it that is longer than a screen."""
    if fits_a_screen(text):
        return text
    name = f"rank {failure.rank}" if failure.rank >= 0 else "the launching process"
    where = f" at step {failure.step}" if failure.step is not None else ""
    where += f" in {failure.phase}" if failure.phase else ""
    lines = [line.strip()[:200] for line in failure.message.strip().splitlines()] or [""]
    what = lines[0]
    if failure.exception_type:
        what = f"{failure.exception_type}: {what}"
    elif failure.traceback:  # a stack, or the end of a log
        what = f"{what} ... {failure.traceback.rstrip().splitlines()[-1].strip()[:200]}"
    return f"{text.rstrip()}\nIn short: {name} failed first{where}: {what}\n"


class PeerFailure(LightningDDPError, RuntimeError):
    """Another rank failed, and this one was stopped because of it.

    Attributes:
        rank: global rank that failed first; -1 for a launching process that is no rank.
        node_rank: node of that rank, or None where it is not known.
        host: host name of that node, or None.
        pid: process id on that host, or None.
        step: global step at the failure, or None.
        phase: what the rank was doing (`training_step`, `validation` ...), or None.
        exception_type: class name of its exception, or None where the process died without one.
        exception_class: the same with module and full name, `module:name`.
        message: text of its exception, or how it died.
        traceback: its formatted traceback, or None.
        exit_code: its exit code; negative is the number of the signal that killed it; None while it runs.
        is_own: whether it is the rank that raises this which was found to have failed, such as by stalling;
            None in a launching process that is no rank.
    """

    def __init__(
        self,
        *,
        rank: int,
        message: str,
        node_rank: int | None = None,
        host: str | None = None,
        pid: int | None = None,
        step: int | None = None,
        phase: str | None = None,
        exception_type: str | None = None,
        exception_class: str | None = None,
        traceback: str | None = None,
        exit_code: int | None = None,
        is_own: bool | None = False,
    ) -> None:
        self.rank = rank
        self.is_own = is_own
        self.message = message
        self.node_rank = node_rank
        self.host = host
        self.pid = pid
        self.step = step
        self.phase = phase
        self.exception_type = exception_type
        self.exception_class = exception_class
        self.traceback = traceback
        self.exit_code = exit_code
        super().__init__(self._describe())

    def __str__(self) -> str:  # some classes that `like` mixes in have another one
        return self._describe()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (PeerFailure, {name: getattr(self, name) for name in _FIELDS})

    def like(self) -> PeerFailure:
        """This failure as an instance of the class of what was raised as well, for `except` clauses.

        As itself where this process does not have that class, or Python cannot combine the two.
        """
        kind = _loaded_class(self.exception_class)
        if type(self) is not PeerFailure or kind is None:
            return self
        try:
            return self._mixed_with(kind)
        except Exception:  # noqa: BLE001 (whatever a class of the user's does when it is combined)
            return self

    def _mixed_with(self, kind: type[Exception]) -> PeerFailure:
        names = {"__module__": __name__, "__doc__": PeerFailure.__doc__}
        mixed: Any = type(PeerFailure.__name__, (PeerFailure, kind), names)
        failure: PeerFailure = mixed.__base__.__new__(mixed)  # the one whose memory it has
        failure.args = self.args
        for name in _FIELDS:
            setattr(failure, name, getattr(self, name))
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


_FIELDS = tuple(inspect.signature(PeerFailure).parameters)


def _loaded_class(path: str | None) -> type[Exception] | None:
    """The exception class `module:name`, if this process has it and it tells more than `PeerFailure` does."""
    module, _, name = (path or "").partition(":")
    # in spawned processes the user's script has this name as well
    found: Any = sys.modules.get("__main__" if module == "__mp_main__" else module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if not isinstance(found, type) or not issubclass(found, Exception):
        return None
    return None if issubclass(PeerFailure, found) or issubclass(found, LightningDDPError) else found

"""The times of reconciliation."""

from __future__ import annotations

import math
import signal as signals
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from lightning_ddp.errors import ConfigurationError, closest

__all__ = [
    "PreemptionSettings",
    "ReconcileSettings",
    "RecoverySettings",
    "ReplaceSettings",
    "parse_on_failure",
    "parse_on_preemption",
]

_Kind = TypeVar("_Kind", bound="RecoverySettings | PreemptionSettings")
_LEAST_HEARTBEAT_S = 2.0
_NOTICES = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")
"""Signals by which schedulers announce that a machine is taken away."""


def _check_number(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigurationError(f"on_failure: {name}={value!r}; expected a whole number of at least {least}")


@dataclass(frozen=True, kw_only=True)
class RecoverySettings:
    """How a run goes on after a failure, and when it does not.

    Raises:
        ConfigurationError: a number is out of range, or a name is unknown.
    """

    min_world_size: int = 1
    """With fewer ranks it ends."""
    max_recoveries: int = 10
    """So many failures end it if no 100 optimizer steps lie between them."""
    batch: Literal["rank", "global"] = "rank"
    """What stays the same: the batch of each rank, or the global batch."""
    exceptions: bool = False
    """Whether a rank whose code raises is left behind as well; else that ends the run."""

    def __post_init__(self) -> None:
        _check_number("min_world_size", self.min_world_size, 1)
        _check_number("max_recoveries", self.max_recoveries, 1)
        if self.batch not in ("rank", "global"):
            raise ConfigurationError(f"on_failure: batch={self.batch!r}; there are 'rank', 'global'")
        if type(self.exceptions) is not bool:
            raise ConfigurationError(f"on_failure: exceptions={self.exceptions!r}; expected True or False")


@dataclass(frozen=True, kw_only=True)
class ReplaceSettings(RecoverySettings):
    """The same, with a new process in the place of each one that is lost."""

    wait_s: float = 0.0
    """With fewer than `min_world_size` ranks the others wait for so many seconds for new ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.wait_s) not in (int, float) or not 0 <= self.wait_s < math.inf:
            raise ConfigurationError(f"on_failure: wait_s={self.wait_s!r}; expected seconds of at least 0")


@dataclass(frozen=True, kw_only=True)
class PreemptionSettings:
    """A process that gets a signal leaves the others at a step boundary, and they go on.

    Raises:
        ConfigurationError: there is no such signal, or it cannot be handled.
    """

    signal: str = "SIGTERM"
    """The signal by which it is asked to."""

    def __post_init__(self) -> None:
        if self.signal not in _NOTICES:
            raise ConfigurationError(
                f"on_preemption: signal={self.signal!r}; there are {', '.join(map(repr, _NOTICES))}"
            )

    @property
    def number(self) -> int:
        """Of the signal."""
        return int(getattr(signals, self.signal))


def parse_on_failure(spec: str | Mapping[str, Any]) -> RecoverySettings | None:
    """What the argument `on_failure` says; None for an end of the run.

    Raises:
        ConfigurationError: an unknown name or option.
    """
    kinds = {"stop": None, "shrink": RecoverySettings, "replace": ReplaceSettings}
    return _parse("on_failure", spec, kinds)


def parse_on_preemption(spec: str | Mapping[str, Any]) -> PreemptionSettings | None:
    """What the argument `on_preemption` says; None where a signal stops all.

    Raises:
        ConfigurationError: an unknown name or option.
    """
    return _parse("on_preemption", spec, {"stop": None, "leave": PreemptionSettings})


def _parse(
    argument: str, spec: str | Mapping[str, Any], kinds: Mapping[str, type[_Kind] | None]
) -> _Kind | None:
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = str(options.pop("name", None))
    if name not in kinds:
        raise ConfigurationError(f"{argument}={spec!r}; there are {', '.join(map(repr, kinds))}")
    kind = kinds[name]
    if kind is None:
        if options:
            raise ConfigurationError(f"{argument}='stop' has no options, and was given {', '.join(options)}")
        return None
    known = [field.name for field in fields(kind)]
    for option in options:
        if option not in known:
            raise ConfigurationError(f"{argument}={name!r} has no option {option!r}{closest(option, known)}")
    return kind(**options)


@dataclass(frozen=True, kw_only=True)
class ReconcileSettings:
    """How long a failure may stay unnoticed, and how long its consequences may take.

    Raises:
        ConfigurationError: a time is out of range.
    """

    heartbeat_timeout_s: float = 15.0
    """A node that is not heard of for so long is gone; at least 2."""
    failure_grace_s: float = 30.0
    """A process that does not end so long after a failure is ended, with the stacks of its threads printed.
    Also how long ranks may take to reach the step boundary at which a SIGTERM stops them."""
    stall_timeout_s: float | None = None
    """A rank that makes no progress for so long, and does not wait for others, has failed; None: never."""
    recovery: RecoverySettings | None = None
    """How the run goes on after a failure; None: it ends."""
    preemption: PreemptionSettings | None = None
    """By which signal a process leaves the others; None: by none."""

    def __post_init__(self) -> None:
        if not self.heartbeat_timeout_s >= _LEAST_HEARTBEAT_S:
            raise ConfigurationError(
                f"heartbeat_timeout_s={self.heartbeat_timeout_s}: expected seconds, at least"
                f" {_LEAST_HEARTBEAT_S:g}"
            )
        if self.stall_timeout_s is not None and not self.stall_timeout_s > 0:
            raise ConfigurationError(f"stall_timeout={self.stall_timeout_s} s: expected a time above 0")
        if not self.failure_grace_s > 0:
            raise ConfigurationError(f"failure_grace_s={self.failure_grace_s}: expected seconds above 0")

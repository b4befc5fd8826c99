"""Settings of supervision, recovery and preemption. An invalid value raises `ConfigurationError`."""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, ClassVar, Literal, TypeVar

from lightning_ddp.errors import ConfigurationError, closest, in_seconds, one_of, require

REPORTS_A_TIMEOUT = 4  # least number of reports of a rank within the time after which it counts as stalled

_Kind = TypeVar("_Kind", bound="RecoverySettings | PreemptionSettings | ReplicaCheckSettings")
_LEAST_HEARTBEAT_S = 2.0
_NOTICES = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")
"""Signals by which schedulers announce that a machine is taken away."""


@dataclass(frozen=True, kw_only=True)
class RecoverySettings:
    """Options of `on_failure='shrink'`: when a run continues after a failure, and when it ends."""

    min_world_size: int = 1
    """Smallest number of ranks with which the run continues; with fewer ranks it ends."""
    max_recoveries: int = 10
    """Largest number of recoveries; one more ends the run. The count restarts after 100 steps, or
    local rounds, without a recovery."""
    batch: Literal["rank", "global"] = "rank"
    """Batch size that stays the same when ranks are lost: that of each rank ('rank') or of all ranks
    ('global')."""
    exceptions: bool = False
    """True to recover also from exceptions in user code, as from the loss of the rank that raised; if
    False, an exception ends the run."""

    def __post_init__(self) -> None:
        for name in ("min_world_size", "max_recoveries"):
            value = getattr(self, name)
            is_right = type(value) is int and value >= 1
            require(is_right, f"on_failure: {name}={value!r}: expected an integer of at least 1")
        is_right = self.batch in ("rank", "global")
        require(is_right, f"on_failure: batch={self.batch!r}: expected 'rank' or 'global'")
        is_right = type(self.exceptions) is bool
        require(is_right, f"on_failure: exceptions={self.exceptions!r}: expected True or False")


@dataclass(frozen=True, kw_only=True)
class ReplaceSettings(RecoverySettings):
    """Options of `on_failure='replace'`: those of 'shrink', and how long to wait for new processes."""

    wait_s: float = 0.0
    """Seconds to wait for new processes while there are fewer than `min_world_size` ranks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds = in_seconds("on_failure: wait_s", self.wait_s)
        require(seconds >= 0, f"on_failure: wait_s={self.wait_s!r}: expected seconds of at least 0")


@dataclass(frozen=True, kw_only=True)
class PreemptionSettings:
    """Options of `on_preemption='leave'`: the signal at which a process leaves the run at a step boundary."""

    signal: str = "SIGTERM"
    """Name of the signal that makes a process leave, such as 'SIGUSR1'."""

    def __post_init__(self) -> None:
        expected = one_of(map(repr, _NOTICES))
        require(self.signal in _NOTICES, f"on_preemption: signal={self.signal!r}: expected {expected}")

    @property
    def number(self) -> int:
        return int(getattr(signals, self.signal))


@dataclass(frozen=True, kw_only=True)
class ReplicaCheckSettings:
    """Options of `replica_check`: how much of the state is hashed in each step."""

    name: ClassVar[Literal["warn", "stop", "heal"]] = "warn"
    """Reaction to replicas that differ."""
    cycle_steps: int = 16
    """Number of steps in which all of the state is hashed once, if the limit of `mb_per_step` allows it."""
    mb_per_step: float | None = None
    """Most MiB that are hashed in a step; None for 0.25 on the CPU and 64 on a device."""

    def __post_init__(self) -> None:
        steps, limit = self.cycle_steps, self.mb_per_step
        is_right = type(steps) is int and steps >= 1
        require(is_right, f"replica_check: cycle_steps={steps!r}: expected an integer of at least 1")
        is_right = limit is None or (type(limit) in (int, float) and limit > 0)
        require(is_right, f"replica_check: mb_per_step={limit!r}: expected a number above 0, or None")


class StopIfReplicasDiffer(ReplicaCheckSettings):
    name = "stop"


class HealReplicas(ReplicaCheckSettings):
    name = "heal"


def parse_on_failure(spec: str | Mapping[str, Any]) -> RecoverySettings | None:
    kinds = {"stop": None, "shrink": RecoverySettings, "replace": ReplaceSettings}
    return _parse("on_failure", spec, kinds)


def parse_on_preemption(spec: str | Mapping[str, Any]) -> PreemptionSettings | None:
    return _parse("on_preemption", spec, {"stop": None, "leave": PreemptionSettings})


def parse_replica_check(spec: str | Mapping[str, Any]) -> ReplicaCheckSettings | None:
    kinds = {"off": None, "warn": ReplicaCheckSettings, "stop": StopIfReplicasDiffer, "heal": HealReplicas}
    return _parse("replica_check", spec, kinds)


def _parse(
    argument: str, spec: str | Mapping[str, Any], kinds: Mapping[str, type[_Kind] | None]
) -> _Kind | None:
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = str(options.pop("name", None))
    require(name in kinds, f"{argument}={spec!r}: expected {one_of(map(repr, kinds))}")
    kind = kinds[name]
    if kind is None:
        require(not options, f"{argument}={name!r} has no options, but was given {', '.join(options)}")
        return None
    known = [field.name for field in fields(kind)]
    for option in options:
        if option not in known:
            raise ConfigurationError(f"{argument}={name!r} has no option {option!r}{closest(option, known)}")
    given: dict[str, Any] = {
        option: value.total_seconds() if isinstance(value, timedelta) else value
        for option, value in options.items()
    }
    return kind(**given)


@dataclass(frozen=True, kw_only=True)
class SupervisionSettings:
    """Settings of supervision: time limits, and options of recovery, preemption and replica comparison."""

    heartbeat_timeout_s: float = 15.0
    """Seconds without a heartbeat after which a node counts as lost (at least 2)."""
    failure_grace_s: float = 30.0
    """Seconds that a process has to exit after a failure; then it is killed and the stacks of its threads are
    printed. Also the time without progress (batches, steps) after which ranks fail the run if SIGTERM is to
    stop them at a step boundary."""
    stall_timeout_s: float | None = None
    """Seconds without progress after which a rank that waits for no other rank counts as failed; None for no
    limit."""
    recovery: RecoverySettings | None = None
    """Options of recovery from a failure; None if a failure ends the run."""
    preemption: PreemptionSettings | None = None
    """Options of preemption; None if a signal stops all ranks."""
    replicas: ReplicaCheckSettings | None = None
    """Options of the comparison of replicas; None if nothing is compared."""

    def __post_init__(self) -> None:
        heartbeat_s, grace_s, stall_s = self.heartbeat_timeout_s, self.failure_grace_s, self.stall_timeout_s
        require(
            heartbeat_s >= _LEAST_HEARTBEAT_S,
            f"heartbeat_timeout_s={heartbeat_s}: expected at least {_LEAST_HEARTBEAT_S:g} seconds",
        )
        require(stall_s is None or stall_s > 0, f"stall_timeout={stall_s} s: expected a time above 0")
        require(grace_s > 0, f"failure_grace_s={grace_s}: expected seconds above 0")
        heals = self.replicas is not None and self.replicas.name == "heal"
        require(
            not heals or self.recovery is not None,
            "replica_check='heal' copies the state as after a loss. Set on_failure='shrink' or 'replace'.",
        )

    def report_period_s(self, num_ranks: int) -> float:
        """Return the seconds between a rank's periodic reports to the control server, for `num_ranks` ranks.

        A report costs the server some 50 us, so all ranks together send at most 64 or 128 a second.
        """
        if self.stall_timeout_s is not None:  # a stopped rank is found by so much later
            often_s, longest_s = max(0.25, num_ranks / 64), self.stall_timeout_s / REPORTS_A_TIMEOUT
        else:
            often_s, longest_s = max(1.0, num_ranks / 128), self.failure_grace_s / 3
        return min(often_s, longest_s, self.failure_grace_s / 3)

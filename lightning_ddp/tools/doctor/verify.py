"""`doctor --verify`: trains on this machine's devices and compares the results with torch's DDP and formulas.

Starts the ranks of the trials and watches them: a trial that raises or does not end becomes a finding that
names it, and those after it run in fresh processes. Then a rank of a script is killed, as of a user's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_ddp.tools import ToolError
from lightning_ddp.tools.doctor.diagnosis import Finding, name_ranks
from lightning_ddp.tools.doctor.placement import Placement
from lightning_ddp.tools.doctor.trials import HOST_WAITS, run_trials, trials_of, verdict_key
from lightning_ddp.tools.ranks import FAILURE_KEY, host_store, run_ranks
from lightning_ddp.tools.report import progress_bar
from lightning_ddp.tools.scripts import run_to_fault

KILLED = "killed rank"
"""The name of the check that kills a rank of a script."""

_STARTING = 4
"""So many deadlines may the processes take to start: on a new machine Python's files come from far away."""
_MOST_STARTS = 3
_DEFAULT_CPU_RANKS = 2
_MOST_TEXT = 300


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What is to be verified."""

    world_size: int
    """Ranks, all on this machine."""
    device: str
    """'cpu' or 'cuda'."""
    timeout_s: float
    """Of each trial."""
    preload: str | None = None
    """A Python file that each rank runs first."""
    only: tuple[str, ...] = ()
    """How the names of the checks begin that are to be run; empty for all."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> Verification:
        """Fills in what the user left open: all GPUs where there are some, else two CPU ranks."""
        num_gpus = torch.cuda.device_count()
        device = args.device or ("cuda" if num_gpus else "cpu")
        default = max(num_gpus, 1) if device == "cuda" else _DEFAULT_CPU_RANKS
        return cls(
            world_size=args.processes or default,
            device=device,
            timeout_s=args.timeout_s,
            preload=args.preload,
            only=tuple(args.only),
        )

    def checks(self) -> list[str]:
        """What will be checked, in order: the trials, then what needs none of them."""
        names = dict.fromkeys([*trials_of(self.device), HOST_WAITS, KILLED])
        return [name for name in names if not self.only or name.startswith(self.only)]


def refusal(placement: Placement) -> Finding | None:
    """Why this process cannot verify, as it was started with others; None if it can."""
    if placement.world_size == 1:
        return None
    return Finding(
        "FAIL",
        "verify",
        f"{placement.world_size} processes have been started ({placement.starter}), and --verify"
        " starts those of one machine itself: run `python -m lightning_ddp doctor --verify` once on each"
        " node, without torchrun, and with one task in srun; without --verify `doctor` looks at all of them",
    )


def verify(wanted: Verification) -> list[Finding]:
    """Runs all checks; one finding each. Leaves no process."""
    num_gpus = torch.cuda.device_count()
    if wanted.device == "cuda" and num_gpus < wanted.world_size:
        message = f"{wanted.world_size} ranks need as many GPUs, found {num_gpus}"
        return [Finding("FAIL", "verify", f"{message}: see --processes and --device cpu")]
    names = wanted.checks()
    if not names:
        return [Finding("FAIL", "verify", f"no check begins with {' or '.join(wanted.only)}")]
    trials = trials_of(wanted.device)
    remaining = [name for name in names if name in trials]
    findings: list[Finding] = []
    with progress_bar(len(names), "verify") as bar:
        for _ in range(_MOST_STARTS):
            if not remaining:
                break
            found = list(_try(wanted, remaining, bar))
            findings += found
            remaining = remaining[len(found) :]
        findings += [Finding("FAIL", name, f"not run, after {_MOST_STARTS} failures") for name in remaining]
        if HOST_WAITS in names and HOST_WAITS not in trials:
            message = "not applicable: on the CPU there is no device that the host could wait for"
            findings.append(Finding("PASS", HOST_WAITS, message))
        if KILLED in names:
            findings.append(_kill_a_rank(wanted))
    return findings


# ---------------------------------------------------------------------- trials


class _Progress:
    """Looks at the ranks from time to time, and raises once a trial takes too long."""

    def __init__(self, wanted: Verification, store: Any, bar: Any) -> None:
        self._wanted = wanted
        self._store = store
        self._bar = bar
        self._has_started = False
        self._since = time.monotonic()

    def __call__(self, count: int) -> None:
        """Called a few times a second with the trials that have ended since the last call."""
        if count:
            self._bar.update(count - (not self._has_started))
            self._has_started = True
            self._since = time.monotonic()
        limit = self._wanted.timeout_s * (1 if self._has_started else _STARTING)
        if time.monotonic() - self._since > limit:
            raise ToolError(f"not over after {limit:g} s: the ranks wait for each other, or compute")
        if self._store.check([FAILURE_KEY]):  # the process itself may hang in the end of its group
            raise ToolError(self._store.get(FAILURE_KEY).decode())


def _try(wanted: Verification, names: Sequence[str], bar: Any) -> Iterator[Finding]:
    """Runs trials in fresh processes; yields what came of them, up to one that has ended the ranks."""
    # no wait in a rank may end before the deadline here does
    longest_s = wanted.timeout_s * (len(names) + 2 * _STARTING)
    store = host_store(longest_s)
    # a fork has imported everything; CUDA, which looking for GPUs starts, does not survive it
    start_method = "spawn" if wanted.device == "cuda" or torch.cuda.is_initialized() else "fork"
    problem: str | None = None
    try:
        run_ranks(
            run_trials,
            tuple(names),
            world_size=wanted.world_size,
            device=wanted.device,
            timeout_s=longest_s,
            on_progress=_Progress(wanted, store, bar),
            store=store,
            preload=wanted.preload,
            start_method=start_method,
        )
    except ToolError as error:
        problem = _shorten(str(error))
    for name in names:
        ranks = range(wanted.world_size)
        keys = {r: verdict_key(name, r) for r in ranks}
        verdicts = {r: json.loads(store.get(key)) for r, key in keys.items() if store.check([key])}
        missing = [rank for rank in ranks if rank not in verdicts]
        if missing:
            there = f"{name_ranks(missing)} did not get to its end: {problem}"
            yield Finding("FAIL", name, "; ".join([*_problems(verdicts), there]))
            return
        yield _conclude(name, verdicts)


def _problems(verdicts: dict[int, dict[str, Any]]) -> list[str]:
    """What is wrong, each with its ranks."""
    found: dict[str, list[int]] = {}
    for rank, verdict in verdicts.items():
        if verdict["problem"] is not None:
            found.setdefault(verdict["problem"], []).append(rank)
    return [f"{name_ranks(ranks)}: {problem}" for problem, ranks in found.items()]


def _conclude(name: str, verdicts: dict[int, dict[str, Any]]) -> Finding:
    problems = _problems(verdicts)
    if problems:
        return Finding("FAIL", name, "; ".join(problems))
    first = verdicts[0]
    if first["is_slow"]:
        return Finding("WARN", name, f"{first['figure']}; is the machine busy? `bench step` says more")
    return Finding("PASS", name, first["figure"])


def _shorten(text: str) -> str:
    """The first line of an error, and the last one, which says what was raised."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return (lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}")[:_MOST_TEXT]


# ---------------------------------------------------------------------- a rank that is killed


def _kill_a_rank(wanted: Verification) -> Finding:
    """A rank of a script is killed: all others have to name it, and all processes to end."""
    victim = wanted.world_size - 1
    if not victim:
        return Finding("PASS", KILLED, "not applicable: one rank has nobody to tell")
    try:
        found = run_to_fault(
            "custom_ddp",
            wanted.world_size,
            fault="kill",
            victim=victim,
            timeout_s=wanted.timeout_s * _STARTING / 2,
            accelerator=wanted.device,
            preload=wanted.preload,
        )
    except ToolError as error:
        return Finding("FAIL", KILLED, _shorten(str(error)))
    expected = f"PeerFailure of {victim}"
    raised = {rank: found.raised.get(rank, "nothing") for rank in range(victim)}
    problems = [
        f"rank {rank} raised {what}, expected {expected}" for rank, what in raised.items() if what != expected
    ]
    if found.num_left:
        problems.append(f"{found.num_left} processes were left after {found.gone_s:.0f} s and were killed")
    if found.exit_code == 0:
        problems.append("the script ended with exit code 0")
    if problems:
        return Finding("FAIL", KILLED, f"rank {victim} was killed in training: {'; '.join(problems)}")
    return Finding(
        "PASS",
        KILLED,
        f"rank {victim} was killed in training; {name_ranks(range(victim))} raised PeerFailure that names it"
        f" within {max(found.learned_s):.2f} s, all processes were gone after {found.gone_s:.2f} s",
    )

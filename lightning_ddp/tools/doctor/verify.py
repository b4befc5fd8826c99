"""`doctor --verify`: run the trials in processes that are watched, and kill a rank of a script like a user's.

A trial that raises or hangs becomes a finding with its name, and later trials run in new processes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from lightning_ddp.tools import ToolError
from lightning_ddp.tools.command_line import progress_bar
from lightning_ddp.tools.doctor.diagnosis import name_ranks
from lightning_ddp.tools.doctor.machine import Finding, Placement
from lightning_ddp.tools.doctor.trials import HOST_WAITS, run_trials, trials_of, verdict_key
from lightning_ddp.tools.ranks import FAILURE_KEY, host_store, run_ranks
from lightning_ddp.tools.scripts import run_to_fault

KILLED: Final = "killed rank"
"""Name of the check that kills a rank of a script."""

_STARTING = 4
"""Number of time limits that the start of processes may take, as a cold file cache makes it slow."""
_MOST_STARTS = 3
_DEFAULT_CPU_RANKS = 2
_MOST_TEXT = 300


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Settings of a verification."""

    world_size: int
    """Number of ranks, all on this machine."""
    device: str
    """'cpu' or 'cuda'."""
    timeout_s: float
    """Time limit of each trial in seconds."""
    preload: str | None = None
    """Python file that each rank runs first, or None."""
    only: tuple[str, ...] = ()
    """Beginnings of the names of the checks to run; empty for all."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> Verification:
        """Read the options, with defaults: all GPUs if there are any, else two CPU ranks."""
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
        """Return the names of the checks, in order: the trials, then the others."""
        names = dict.fromkeys([*trials_of(self.device), HOST_WAITS, KILLED])
        return [name for name in names if not self.only or name.startswith(self.only)]


def refusal(placement: Placement) -> Finding | None:
    """Return a finding if this process was started with others and so cannot verify; else None."""
    if placement.world_size == 1:
        return None
    return Finding(
        "FAIL",
        "verify",
        f"{placement.world_size} processes have been started ({placement.starter}), but --verify starts"
        " those of one machine itself. Run `python -m lightning_ddp doctor --verify` once on each node,"
        " without torchrun, and with one task in srun; without --verify `doctor` checks all of them",
    )


def run_checks(wanted: Verification) -> list[Finding]:
    """Run all checks and return one finding for each; leave no process."""
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
            message = "not applicable: a CPU has no device for the host to wait for"
            findings.append(Finding("PASS", HOST_WAITS, message))
        if KILLED in names:
            findings.append(_kill_a_rank(wanted))
    return findings


def _watcher(wanted: Verification, store: Any, bar: Any) -> Callable[[int], None]:
    """Return a callback that raises once a trial takes too long or a rank has failed."""
    has_started, since = False, time.monotonic()

    def look(count: int) -> None:
        nonlocal has_started, since
        if count:  # the first unit of progress is that of the start
            bar.update(count - (not has_started))
            has_started, since = True, time.monotonic()
        limit = wanted.timeout_s * (1 if has_started else _STARTING)
        if time.monotonic() - since > limit:
            raise ToolError(
                f"not finished after {limit:g} s: the ranks wait for each other, or still compute"
            )
        if store.check([FAILURE_KEY]):  # the process itself may hang in the end of its group
            raise ToolError(store.get(FAILURE_KEY).decode())

    return look


def _try(wanted: Verification, names: Sequence[str], bar: Any) -> Iterator[Finding]:
    """Run trials in new processes; yield a finding for each, up to a trial that stopped the ranks."""
    # Waits in the ranks must not time out before the deadline here.
    longest_s = wanted.timeout_s * (len(names) + 2 * _STARTING)
    store = host_store(longest_s)
    # A fork saves the imports, but CUDA, which the search for GPUs initializes, does not support it.
    start_method = "spawn" if wanted.device == "cuda" or torch.cuda.is_initialized() else "fork"
    problem: str | None = None
    try:
        run_ranks(
            run_trials,
            tuple(names),
            world_size=wanted.world_size,
            device=wanted.device,
            timeout_s=longest_s,
            on_progress=_watcher(wanted, store, bar),
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
            there = f"{name_ranks(missing)} did not finish: {problem}"
            yield Finding("FAIL", name, "; ".join([*_problems(verdicts), there]))
            return
        problems, first = _problems(verdicts), verdicts[0]
        if problems:
            yield Finding("FAIL", name, "; ".join(problems))
        elif first["is_slow"]:
            message = f"{first['figure']}. The machine may be busy; `bench step` measures more"
            yield Finding("WARN", name, message)
        else:
            yield Finding("PASS", name, first["figure"])


def _problems(verdicts: dict[int, dict[str, Any]]) -> list[str]:
    """Return the problems, each with its ranks."""
    found: dict[str, list[int]] = {}
    for rank, verdict in verdicts.items():
        if verdict["problem"] is not None:
            found.setdefault(verdict["problem"], []).append(rank)
    return [f"{name_ranks(ranks)}: {problem}" for problem, ranks in found.items()]


def _shorten(text: str) -> str:
    """Return the first line of an error, and the last, which has the exception."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return (lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}")[:_MOST_TEXT]


def _kill_a_rank(wanted: Verification) -> Finding:
    """Kill a rank of a script; check that all others name it and all processes exit."""
    victim = wanted.world_size - 1
    if not victim:
        return Finding("PASS", KILLED, "not applicable: one rank has no peers")
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
        f"rank {victim} was killed in training; {name_ranks(range(victim))} raised PeerFailure that names"
        f" it within {max(found.learned_s):.2f} s, all processes had exited after {found.gone_s:.2f} s",
    )

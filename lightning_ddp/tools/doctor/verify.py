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
from lightning_ddp.tools.doctor.diagnosis import by_value, name_ranks
from lightning_ddp.tools.doctor.machine import Finding, Placement
from lightning_ddp.tools.doctor.trials import HOST_WAITS, beginning_with, run_trials, trials_of, verdict_key
from lightning_ddp.tools.ranks import FAILURE_KEY, host_store, run_ranks
from lightning_ddp.tools.scripts import FailedRun, run_to_fault

KILLED: Final = "killed rank"
"""Name of the check that kills a rank of a script."""

_STARTING = 4
"""Number of time limits that the start of processes may take, as a cold file cache makes it slow."""
_MOST_STARTS = 3
_MOST_TEXT = 300


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of all checks: ranks, device, time limit of a trial, and a file that each rank runs first."""

    world_size: int
    device: str
    timeout_s: float
    preload: str | None


def settings_of(args: argparse.Namespace, placement: Placement) -> Settings:
    """Return settings by `args`, by default all GPUs or 2 CPU ranks; raise `ToolError` if they cannot run."""
    num_gpus = torch.cuda.device_count()
    device = args.device or ("cuda" if num_gpus else "cpu")
    world_size = args.processes or (max(num_gpus, 1) if device == "cuda" else 2)
    if placement.world_size > 1:
        raise ToolError(
            f"{placement.world_size} processes have been started ({placement.starter}), but --verify starts"
            " those of one machine itself. Run `python -m lightning_ddp doctor --verify` once on each node,"
            " without torchrun, and with one task in srun; without --verify `doctor` checks all of them"
        )
    if device == "cuda" and num_gpus < world_size:
        raise ToolError(
            f"{world_size} ranks need as many GPUs, found {num_gpus}: see --processes and --device cpu"
        )
    return Settings(world_size=world_size, device=device, timeout_s=args.timeout_s, preload=args.preload)


def run_checks(settings: Settings, only: Sequence[str]) -> list[Finding]:
    """Run the checks whose names begin with one of `only`, or all; return one finding for each.

    Leaves no process.
    """
    trials = trials_of(settings.device)
    names = beginning_with(only, dict.fromkeys([*trials, HOST_WAITS, KILLED]), "check")
    remaining = [name for name in names if name in trials]
    findings: list[Finding] = []
    with progress_bar(len(names), "verify") as bar:
        for _ in range(_MOST_STARTS):
            found = list(try_in_ranks(settings, remaining, bar=bar)) if remaining else []
            findings += found
            remaining = remaining[len(found) :]
        findings += [Finding("FAIL", name, f"not run, after {_MOST_STARTS} failures") for name in remaining]
        if HOST_WAITS in names and HOST_WAITS not in trials:
            message = "not applicable: a CPU has no device for the host to wait for"
            findings.append(Finding("PASS", HOST_WAITS, message))
        if KILLED in names:
            findings.append(_kill_a_rank(settings))
    return findings


def _watcher(settings: Settings, store: Any, bar: Any) -> Callable[[int], None]:
    """Return a callback that raises once a trial takes too long or a rank has failed."""
    has_started, since = False, time.monotonic()

    def look(count: int) -> None:
        nonlocal has_started, since
        if count:  # the first unit of progress is that of the start
            if bar is not None:
                bar.update(count - (not has_started))
            has_started, since = True, time.monotonic()
        limit = settings.timeout_s * (1 if has_started else _STARTING)
        if time.monotonic() - since > limit:
            raise ToolError(
                f"not finished after {limit:g} s: the ranks wait for each other, or still compute"
            )
        if store.check([FAILURE_KEY]):  # the process itself may hang in the end of its group
            raise ToolError(store.get(FAILURE_KEY).decode())

    return look


def try_in_ranks(
    settings: Settings, names: Sequence[str], worker: Callable[..., None] = run_trials, bar: Any = None
) -> Iterator[Finding]:
    """Run trials in new processes; yield a finding for each, the last one FAIL if it stopped the ranks."""
    # Waits in the ranks must not time out before the deadline here.
    longest_s = settings.timeout_s * (len(names) + 2 * _STARTING)
    store = host_store(longest_s)
    # A fork saves the imports, but CUDA, which the search for GPUs initializes, does not support it.
    start_method = "spawn" if settings.device != "cpu" or torch.cuda.is_initialized() else "fork"
    options: dict[str, Any] = {"start_method": start_method, "preload": settings.preload}
    options |= {"world_size": settings.world_size, "device": settings.device}
    problem: str | None = None
    try:
        look = _watcher(settings, store, bar)
        run_ranks(worker, tuple(names), timeout_s=longest_s, on_progress=look, store=store, **options)
    except ToolError as error:
        problem = shorten(str(error))
    for name in names:
        keys = {rank: verdict_key(name, rank) for rank in range(settings.world_size)}
        verdicts = {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
        missing = [rank for rank in keys if rank not in verdicts]
        found = by_value({rank: verdict["problem"] for rank, verdict in verdicts.items()})
        problems = [f"{name_ranks(those)}: {text}" for text, those in found.items() if text is not None]
        if missing:
            there = f"{name_ranks(missing)} did not finish: {problem}"
            yield Finding("FAIL", name, "; ".join([*problems, there]))
            return
        figure = verdicts[0]["figure"]
        if problems:
            yield Finding("FAIL", name, "; ".join(problems))
        elif verdicts[0]["is_slow"]:
            yield Finding("WARN", name, f"{figure}. The machine may be busy; `bench step` measures more")
        else:
            yield Finding("PASS", name, figure)


def shorten(text: str) -> str:
    """Return the first line of an error's text and the last, which has the exception, cut to a limit."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return (lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}")[:_MOST_TEXT]


def _kill_a_rank(settings: Settings) -> Finding:
    if settings.world_size == 1:
        return Finding("PASS", KILLED, "not applicable: one rank has no peers")
    try:
        return Finding("PASS", KILLED, stop_ranks(settings, "kill"))
    except ToolError as error:
        return Finding("FAIL", KILLED, shorten(str(error)))


def fail_a_rank(settings: Settings, fault: str, **more: Any) -> FailedRun:
    """Run a training script in which a rank fails, by default the last; return the outcome."""
    if settings.device == "cuda:0":  # each rank is a node of its own, so that all may have that GPU
        nodes = {"num_nodes": settings.world_size, "devices": 1, "backend": "gloo"}
        more |= {"function": "train_on_nodes", **nodes}
    given: dict[str, Any] = {"victim": settings.world_size - 1, "preload": settings.preload, **more}
    given |= {"accelerator": settings.device.partition(":")[0], "timeout_s": 2 * settings.timeout_s}
    return run_to_fault("custom_ddp", settings.world_size, fault=fault, **given)


def stop_ranks(settings: Settings, fault: str, **more: Any) -> str:
    """Make a script's rank fail; return as text when the others named it and all exited, or raise."""
    found, victim = fail_a_rank(settings, fault, **more), more.get("victim", settings.world_size - 1)
    others = [rank for rank in range(settings.world_size) if rank != victim]
    expected, event = f"PeerFailure of {victim}", f"rank {victim} failed in training ({fault})"
    raised = {rank: found.raised.get(rank, "nothing") for rank in others}
    problems = [
        f"rank {rank} raised {what}, expected {expected}" for rank, what in raised.items() if what != expected
    ]
    if found.num_left:
        problems.append(f"{found.num_left} processes were left after {found.gone_s:.0f} s and were killed")
    if found.exit_code == 0:
        problems.append("the script ended with exit code 0")
    if problems:
        raise ToolError(f"{event}: {'; '.join(problems)}")
    return (
        f"{event}; {name_ranks(others)} raised PeerFailure that names it within {max(found.learned_s):.2f} s,"
        f" all processes had exited after {found.gone_s:.2f} s"
    )

"""Finds and ends processes that a run has left behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable

import psutil


class ProcessLeftBehind(Exception):
    """A run ended, but processes that it started were still alive. They have been killed."""


def find_processes(sessions: Collection[int]) -> list[psutil.Process]:
    """Living processes of these sessions, whoever their parents are by now; zombies are dead."""
    found = []
    for pid in psutil.pids():
        # the process may end, or be another user's, while it is looked at
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(pid) in sessions and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(psutil.Process(pid))
    return found


def kill_processes(processes: Iterable[psutil.Process]) -> None:
    """Kills with SIGKILL and waits until they are gone."""
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def require_none(sessions: Collection[int]) -> None:
    """Waits up to half a second until no process of the sessions of ranks is left, kills those that are.

    Raises:
        ProcessLeftBehind: at least one process was still alive then.
    """
    left = find_processes(sessions)
    if not left:
        return
    _, alive = psutil.wait_procs(left, timeout=0.5)
    # a process that ended may have started another one meanwhile
    alive = alive or find_processes(sessions)
    if not alive:
        return
    described = "; ".join(describe_process(process) for process in alive)
    kill_processes([*alive, *find_processes(sessions)])
    raise ProcessLeftBehind(f"a rank left {len(alive)} process(es) behind: {described}")


def describe_process(process: psutil.Process) -> str:
    """Its process id and command line."""
    try:
        return f"pid {process.pid} ({' '.join(process.cmdline())[:200]})"
    except psutil.Error:
        return f"pid {process.pid}"

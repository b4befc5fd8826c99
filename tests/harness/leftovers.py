"""Finds and ends processes that a run has left behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable

import psutil


class ProcessLeftBehind(Exception):
    """A run ended, but processes that it started were still alive. They have been killed."""


def in_sessions(session_ids: Iterable[int]) -> Callable[[psutil.Process], bool]:
    """Tells whether a process belongs to one of these sessions, whoever its parent is by now."""
    wanted = frozenset(session_ids)

    def belongs(process: psutil.Process) -> bool:
        return os.getsid(process.pid) in wanted

    return belongs


def find_processes(belongs: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """Living processes for which `belongs` holds. Zombies are dead and only wait for their parent."""
    found = []
    for process in psutil.process_iter():
        # the process may end, or be another user's, while it is looked at
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE and belongs(process):
                found.append(process)
    return found


def kill_processes(processes: Iterable[psutil.Process]) -> None:
    """Kills with SIGKILL and waits until they are gone."""
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def require_none(belongs: Callable[[psutil.Process], bool], *, grace_s: float, what: str) -> None:
    """Waits up to `grace_s` until no process is left, kills those that are.

    Raises:
        ProcessLeftBehind: at least one process was still alive after `grace_s`.
    """
    left = find_processes(belongs)
    if not left:
        return
    _, alive = psutil.wait_procs(left, timeout=grace_s)
    # a process that ended may have started another one meanwhile
    alive = alive or find_processes(belongs)
    if not alive:
        return
    described = "; ".join(describe_process(process) for process in alive)
    kill_processes([*alive, *find_processes(belongs)])
    raise ProcessLeftBehind(f"{what} left {len(alive)} process(es) behind: {described}")


def describe_process(process: psutil.Process) -> str:
    """Its process id and command line."""
    try:
        return f"pid {process.pid} ({' '.join(process.cmdline())[:200]})"
    except psutil.Error:
        return f"pid {process.pid}"

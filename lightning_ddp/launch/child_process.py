"""A child process: it imports quickly, and never outlives what has started it, whatever kills that.

Importing torch and Lightning makes some hundred thousand objects that stay, and Python's cyclic garbage
collector walks through all of them again and again: a second of the five that the imports take. Until the
run of a child begins the collector comes a hundred times less often: Python imports the first `sitecustomize`
that it finds at its start, and that of `prelude/` is first on the search path of a child.

The kernel kills a child when its parent is gone. Once it has joined a run it is told instead, and unwinds;
one that cannot hear it is ended by the guard (`supervise/guard.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "PARENT_VARIABLE",
    "adopt_from_environment",
    "after_imports",
    "begin_run",
    "child_environment",
    "die_with_parent",
    "end_fast",
    "end_with",
    "forked_by_zygote",
    "guarded_by",
    "keep_files",
    "launched_by",
    "launcher_pid",
    "outlive_parent",
]

PARENT_VARIABLE = "LIGHTNING_DDP_PARENT_PID"
"""Environment variable in which a launcher tells a child its own process id."""

_PRELUDE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "prelude")
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child that is to import quickly, made of what it would be without that."""
    if sys.flags.ignore_environment or sys.flags.no_site:  # nor would the child look there
        return dict(environment)
    path = [_PRELUDE, environment.get("PYTHONPATH")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def begin_run() -> None:
    """In a child the garbage collector comes as often as usual from here on. Does nothing elsewhere."""
    prelude = sys.modules.pop("_lightning_ddp_prelude", None)
    if prelude is not None:
        prelude.restore()


def end_fast() -> None:
    """Have a process that multiprocessing has started end in a tenth of the time, if it is no rank.

    Such is the worker of a data loader, which is spawned where ranks are. At its end the garbage collector
    would walk for a second through all that was imported; the rank waits for that, and on a busy machine
    kills it after 5 s, which leaves its files behind.
    """
    import atexit

    atexit.register(_forget_imports)


def _forget_imports() -> None:
    # asked here, as multiprocessing imports the script before it says whose child this is
    if multiprocessing.parent_process() is None:
        return
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():  # groups are to be destroyed
        gc.freeze()


def after_imports(make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call `make` in a rank that has just been spawned, and is to end as fast as the workers do.

    Only what is imported by now is kept from the collector: a file in the cycles of the Trainer, which comes
    later, is still closed at the end.
    """
    gc.freeze()
    return make(*arguments)


def keep_files(files: Mapping[int, int]) -> None:
    """In a fork on Linux, closes all files but `files`: number that one is to have -> number that it has."""
    import fcntl  # which Windows has not

    above = max(files, default=2) + 1
    held = {number: fcntl.fcntl(present, fcntl.F_DUPFD, above) for number, present in files.items()}
    for present in [int(name) for name in os.listdir("/proc/self/fd")]:
        if present not in held.values():
            with contextlib.suppress(OSError):  # the one that has listed them
                os.close(present)
    for number, present in held.items():
        os.dup2(present, number)
        os.close(present)


# ---------------------------------------------------------------------- its parent


@dataclass
class _Origin:
    """Processes that started this one."""

    launcher: int | None
    """Process that launched it, if a launcher of this package did."""
    parent: int
    """The same process, or the zygote of a supervisor."""
    may_outlive: bool = False


_origin: _Origin | None = None
"""Global: it is known when the package is imported, or the process forked, long before there is a job."""


def adopt_from_environment() -> None:
    """In a child of our launcher, ties this process's life to the launcher's; elsewhere does nothing.

    Takes the variable out of the environment, so that processes which this one starts are not concerned. One
    that was started earlier, and has got it as well, is no child of the launcher.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or (parent != str(os.getppid()) and _is_alive(parent)):
        return
    if parent != str(os.getppid()):
        print(
            f"lightning_ddp: the process that {PARENT_VARIABLE}={parent} names has ended, so this child"
            " process ends too. If this process is not its child, unset that variable.",
            file=sys.stderr,
        )
        os._exit(1)
    die_with_parent(int(parent))


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    return True


def die_with_parent(parent: int) -> None:
    """Has the kernel (Linux) or a thread (elsewhere) kill this process when its parent is gone.

    If it is gone already, this process ends at once.
    """
    global _origin
    _origin = _Origin(parent, parent)
    end_with(parent)


def forked_by_zygote(launcher: int | None) -> None:
    """Note in a fork of a zygote, which ends with that, which process launched it.

    Args:
        launcher: the supervisor; None in rank 0, which is alone at first.
    """
    global _origin
    _origin = _Origin(launcher, os.getppid())


def launched_by(launcher: int) -> None:
    """Note in rank 0 that its supervisor launched the others."""
    assert _origin is not None  # it is a fork of a zygote
    _origin.launcher = launcher


def end_with(parent: int) -> None:
    """As `die_with_parent`, for a process that its parent has not launched."""
    if sys.platform == "linux":
        _set_death_signal(signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True, name="parent-watch").start()
    if os.getppid() != parent:
        os._exit(1)


def launcher_pid() -> int | None:
    """The process that has launched this one, if that is a launcher of this package and has not ended."""
    return None if _origin is None or os.getppid() != _origin.parent else _origin.launcher


def guarded_by() -> int:
    """The process whose guard is that of this one; this one itself if none has started it."""
    by_function = multiprocessing.parent_process()
    launcher = None if _origin is None else _origin.launcher
    if launcher is not None and by_function is not None:
        launcher = by_function.pid
    return launcher or os.getpid()


def outlive_parent() -> None:
    """Unties this process's life from its parent's: it is told of the end by other means, and unwinds.

    If it is stopped (SIGSTOP) at that moment, the kernel continues it, so that it can.
    """
    if _origin is not None:
        _origin.may_outlive = True
    if sys.platform == "linux":
        _set_death_signal(signal.SIGCONT)


def _set_death_signal(number: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    if _origin is None or not _origin.may_outlive:
        os._exit(1)

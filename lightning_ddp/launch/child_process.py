"""A child process: it imports quickly, and never outlives what has started it, whatever kills that.

Python's garbage collector walks through all objects of torch and Lightning again and again while they are
imported. A child imports the `sitecustomize` of `prelude/` first, which lets the collector come rarely.

The kernel kills a child when its parent is gone. Once the child has joined a job it is told instead, and
unwinds; one that cannot hear it is ended by the guard (`supervise/guard.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

PARENT_VARIABLE = "LIGHTNING_DDP_PARENT_PID"
"""Environment variable in which a launcher tells a child its own process id."""

_PRELUDE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "prelude")
_PR_SET_PDEATHSIG = 1


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment`, with a PYTHONPATH by which a child rarely collects garbage during its imports."""
    path = [_PRELUDE, environment.get("PYTHONPATH")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def begin_run() -> None:
    """Restore the usual garbage collection thresholds of a child, which were raised for its imports."""
    prelude = sys.modules.pop("_lightning_ddp_prelude", None)
    if prelude is not None:
        prelude.restore()


def end_fast() -> None:
    """Register an exit handler by which spawned data loader workers skip the slow last garbage collection.

    The rank waits for them, and on a busy machine kills them after 5 s, which leaves their files behind. All
    processes have the last collection where nanobind would report what it leaves.
    """
    atexit.register(_forget_imports)


def _forget_imports() -> None:
    if any(kind.__module__ == "nanobind" for kind in type.__subclasses__(type)):
        gc.unfreeze()  # nanobind (triton's, since torch 2.15) reports objects that are never collected
        return
    distributed = sys.modules.get("torch.distributed")
    has_group = distributed is not None and distributed.is_initialized()  # which is to be destroyed
    # asked here, as multiprocessing imports the script before it says whose child this is
    if multiprocessing.parent_process() is not None and not has_group:
        gc.freeze()


def after_imports(make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Exclude the objects of a spawned rank from garbage collection, then call `make`; return its result."""
    gc.freeze()
    return make(*arguments)


def keep_files(files: Mapping[int, int]) -> None:
    """Renumber the file descriptors `files` (wanted -> present number), and close all others (Linux)."""
    above = max(files, default=2) + 1
    held = {number: fcntl.fcntl(present, fcntl.F_DUPFD, above) for number, present in files.items()}
    for number, duplicate in held.items():
        os.dup2(duplicate, number)
    for number in [int(name) for name in os.listdir("/proc/self/fd")]:
        if number not in files:
            with contextlib.suppress(OSError):  # the one that has listed them
                os.close(number)


# ---------------------------------------------------------------------- its parent


_launcher: int | None = None
"""Process that launched this one, if a launcher of this package did.

Global, as the next: known when the package is imported, or the process forked, long before there is a job."""
_parent: int | None = None  # the same process, or a zygote, or a forkserver


def adopt_from_environment() -> None:
    """Have the kernel kill this process when the launcher named in its environment ends; exit if it ended.

    Takes the variable out of the environment, so that processes which this one starts are not concerned. One
    that was started earlier, and has got it as well, is no child of the launcher.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent == str(os.getppid()):
        note_launcher(int(parent))
        end_with(int(parent))
    elif parent is not None and not is_alive(parent):
        print(
            f"lightning_ddp: the process that {PARENT_VARIABLE}={parent} names has ended, so this child"
            " process ends too. If this process is not its child, unset that variable.",
            file=sys.stderr,
        )
        os._exit(1)


def is_alive(pid: str | int) -> bool:
    """Return True if a process exists and has not ended; a zombie has ended."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:  # there is none but on Linux
        return file.read().rpartition(")")[2].split()[0] not in "ZX"
    return True


def note_launcher(launcher: int | None) -> None:
    """Store the process id of this process's launcher, which may not be its parent (a zygote, forkserver).

    None in rank 0 under `run`, until it starts the other ranks.
    """
    global _launcher, _parent
    _launcher, _parent = launcher, os.getppid()


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent process ends; exit at once if it has ended."""
    _set_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def launcher_pid() -> int | None:
    """Return the process id of this process's launcher; None if not launched by this package, or it ended."""
    return _launcher if os.getppid() == _parent else None


def guarded_by() -> int:
    """Return the pid of the launcher whose guard process watches this one; its own pid if not launched."""
    return _launcher or os.getpid()


def outlive_parent() -> None:
    """Have the kernel send SIGCONT, not SIGKILL, when the parent ends, so that this process can unwind."""
    _set_death_signal(signal.SIGCONT)  # it may be stopped (SIGSTOP) at that moment


def _set_death_signal(number: int) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")

"""Child processes never outlive the process that started them, whatever kills it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "PARENT_VARIABLE",
    "adopt_from_environment",
    "die_with_parent",
    "end_with",
    "is_child",
    "is_gone",
    "launcher_pid",
    "outlive_parent",
    "tie_to_supervisor",
]

PARENT_VARIABLE = "LIGHTNING_DDP_PARENT_PID"
"""Environment variable in which a launcher tells a child its own process id."""

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5

_is_tied = threading.Event()
_may_outlive = threading.Event()


@dataclass(frozen=True)
class _Supervised:
    """The launching process of a child whose parent is a supervisor."""

    launcher: int
    is_gone: Callable[[], bool]
    on_outliving: Callable[[], None]


_supervised: _Supervised | None = None


def adopt_from_environment() -> None:
    """In a child of our launcher, ties this process's life to the launcher's; elsewhere does nothing.

    The launcher stops children by SIGINT, so that their finalisers run. One that was started in the
    background of a shell script inherits SIGINT ignored, and so would this process: it gets Python's handler.

    Takes the variable out of the environment, so that processes which this one starts are not concerned. One
    that was started earlier, and has got it as well, is no child of the launcher.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or (parent != str(os.getppid()) and _is_alive(parent)):
        return
    if parent != str(os.getppid()):
        print(
            f"lightning_ddp: the process that {PARENT_VARIABLE}={parent} names has ended, and so does its"
            " child. If this process is not, unset that variable.",
            file=sys.stderr,
        )
        os._exit(1)
    die_with_parent(int(parent))
    _hear_interrupts()


def _hear_interrupts() -> None:
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    return True


def die_with_parent(parent: int) -> None:
    """Has the kernel (Linux) or a thread (elsewhere) kill this process when process `parent` is gone.

    Args:
        parent: process id of the parent. If it is gone already, this process ends at once.
    """
    _is_tied.set()
    end_with(parent)


def end_with(parent: int) -> None:
    """As `die_with_parent`, for a process that is no child of a launcher."""
    if sys.platform == "linux":
        _set_death_signal(signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True, name="parent-watch").start()
    if os.getppid() != parent:
        os._exit(1)


def tie_to_supervisor(launcher: int, is_gone: Callable[[], bool], on_outliving: Callable[[], None]) -> None:
    """Called in the place of `adopt_from_environment` in a child that a supervisor has forked.

    Args:
        launcher: the process that has asked for it.
        is_gone: whether that has ended.
        on_outliving: tells the supervisor that this process hears of that by other means.
    """
    global _supervised
    _supervised = _Supervised(launcher, is_gone, on_outliving)
    os.environ.pop(PARENT_VARIABLE, None)
    _is_tied.set()
    _hear_interrupts()


def launcher_pid() -> int:
    """In a child: the process that launched it."""
    return os.getppid() if _supervised is None else _supervised.launcher


def is_gone(launcher: int) -> bool:
    """In a child: whether the process that launched it has ended."""
    return os.getppid() != launcher if _supervised is None else _supervised.is_gone()


def is_child() -> bool:
    """Whether a launcher of this package started this process."""
    return _is_tied.is_set()


def outlive_parent() -> None:
    """Unties this process's life from its parent's: it is told of the end by other means, and unwinds.

    If it is stopped (SIGSTOP) at that moment, the kernel continues it, so that it can.
    """
    _may_outlive.set()
    if _supervised is not None:
        _supervised.on_outliving()
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
    if not _may_outlive.is_set():
        os._exit(1)

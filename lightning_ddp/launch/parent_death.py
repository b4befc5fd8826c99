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
    "launcher_pid",
    "outlive_parent",
    "tie_to_supervisor",
]

PARENT_VARIABLE = "LIGHTNING_DDP_PARENT_PID"
"""Environment variable in which a launcher tells a child its own process id."""

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


@dataclass
class _Tie:
    """Between this process and the one that has launched it."""

    launcher: int
    parent: int
    """The same process, or the supervisor that has forked both."""
    has_ended: Callable[[], bool] = lambda: False
    """Whether the supervisor knows of the launcher's end."""
    on_outliving: Callable[[], None] = lambda: None
    may_outlive: bool = False

    def is_gone(self) -> bool:
        return os.getppid() != self.parent or self.has_ended()


_tie: _Tie | None = None
"""Known when the package is imported, which is before there is a session."""


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
    global _tie
    _tie = _Tie(parent, parent)
    end_with(parent)


def tie_to_supervisor(launcher: int, has_ended: Callable[[], bool], on_outliving: Callable[[], None]) -> None:
    """Called in the place of `adopt_from_environment` in a child that a supervisor has forked.

    Args:
        launcher: the process that has asked for it.
        has_ended: whether the supervisor knows of the launcher's end.
        on_outliving: tells the supervisor that this process hears of that by other means.
    """
    global _tie
    _tie = _Tie(launcher, os.getppid(), has_ended, on_outliving)
    os.environ.pop(PARENT_VARIABLE, None)
    _hear_interrupts()


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
    return None if _tie is None or _tie.is_gone() else _tie.launcher


def outlive_parent() -> None:
    """Unties this process's life from its parent's: it is told of the end by other means, and unwinds.

    If it is stopped (SIGSTOP) at that moment, the kernel continues it, so that it can.
    """
    if _tie is not None:
        _tie.may_outlive = True
        _tie.on_outliving()
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
    if _tie is None or not _tie.may_outlive:
        os._exit(1)

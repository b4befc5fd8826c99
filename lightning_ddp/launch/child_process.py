"""A child process: it imports quickly, and never outlives what has started it, whatever kills that.

Importing torch and Lightning makes some hundred thousand objects that stay, and Python's cyclic garbage
collector walks through all of them again and again: a second of the five that the imports take. Until the
run of a child begins the collector comes a hundred times less often: Python imports the first `sitecustomize`
that it finds at its start, and that of `prelude/` is first on the search path of a child.

The kernel kills a child when its parent is gone. Once it has joined a run it is told instead, and unwinds.
One that holds its interpreter, in C code that never returns or in a regular expression, runs no Python to
hear it with, and the kernel knows no signal that waits. So each launching process has a guard next to its
children: this file as a program, without the package, that sleeps until they have ended, or until a while
after the launching process has.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "PARENT_VARIABLE",
    "Guard",
    "adopt_from_environment",
    "begin_run",
    "child_environment",
    "die_with_parent",
    "end_with",
    "keep_files",
    "launcher_pid",
    "outlive_parent",
    "supervisor_of_rank",
    "tell_guard",
    "tie_first_rank",
    "tie_to_supervisor",
]

PARENT_VARIABLE = "LIGHTNING_DDP_PARENT_PID"
"""Environment variable in which a launcher tells a child its own process id."""

_PRELUDE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "prelude")
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5
_PATIENCE_S = 20.0
"""How long a child may outlive the launching process without having heard of its end."""
_END_WAIT_S = 5.0
_CREDENTIALS = struct.Struct("3i")


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
class _Tie:
    """Between this process and those that have started it."""

    launcher: int | None
    """The one that has launched it, if a launcher of ours has."""
    parent: int
    """The same process, or the supervisor that has forked both."""
    supervisor: Any = None
    """In the first rank that a supervisor has forked: what it asks that with."""
    has_ended: Callable[[], bool] = lambda: False
    """Whether the supervisor knows of the launcher's end."""
    on_outliving: Callable[[], None] = lambda: None
    may_outlive: bool = False

    def is_gone(self) -> bool:
        return os.getppid() != self.parent or self.has_ended()


_tie: _Tie | None = None
"""Not in the session: it is known when the package is imported, or the process forked, long before that."""


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
    """Has the kernel (Linux) or a thread (elsewhere) kill this process when its parent is gone.

    If it is gone already, this process ends at once.
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
    _tie = _Tie(launcher, os.getppid(), has_ended=has_ended, on_outliving=on_outliving)
    os.environ.pop(PARENT_VARIABLE, None)
    _hear_interrupts()


def tie_first_rank(supervisor: Any) -> None:
    """The same in the first rank, which launches the others: it asks the supervisor with `supervisor`."""
    global _tie
    _tie = _Tie(None, os.getppid(), supervisor=supervisor)


def supervisor_of_rank() -> Any:
    """What `tie_first_rank` was given; None where it was not called."""
    return None if _tie is None else _tie.supervisor


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


# ---------------------------------------------------------------------- the guard, in the launching process


class Guard:
    """The guard, which ends after the children. There is none where the kernel has not what it needs.

    Args:
        children: process ids of children that have not been waited for.
    """

    def __init__(self, children: Iterable[int]) -> None:
        import subprocess  # the process itself has no need of it

        self._process: subprocess.Popen[bytes] | None = None
        if sys.platform != "linux":
            return
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):  # it is no Linux of 5.3 or later

            def open_end(pid: int) -> int:
                end = os.pidfd_open(pid)
                opened.callback(os.close, end)
                return end

            launcher, ends = open_end(os.getpid()), {open_end(pid): pid for pid in children}
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", os.path.abspath(__file__), str(launcher)),
                    *(f"{end}:{pid}" for end, pid in ends.items()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                pass_fds=[launcher, *ends],
            )

    def end(self) -> None:
        """Called when the children have ended, or are given up."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_END_WAIT_S)


# ---------------------------------------------------------------------- the guard, in a child


def tell_guard(*, ends_itself: bool) -> None:
    """Tells the process, if there is one, whether this child knows of a failure and limits its own time."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as telling:
            telling.sendto(b"1" if ends_itself else b"0", _name_of(os.getpid()))


def _name_of(child: int) -> str:
    return f"\0lightning_ddp/guard-of-{child}"


# ---------------------------------------------------------------------- the guard


def _guard(launcher: int, children: dict[int, int]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # they are for the ranks
    told = {}
    waiting = select.poll()
    for end in (launcher, *children):
        waiting.register(end, select.POLLIN)
    for pid in children.values():
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        listener.bind(_name_of(pid))
        told[listener.fileno()] = listener
        waiting.register(listener, select.POLLIN)
    end_themselves: set[int] = set()
    deadline: float | None = None
    while children:
        limit_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        for ready, _ in waiting.poll(limit_ms):
            if ready in told:
                data, extra, _, _ = told[ready].recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
                pid = _CREDENTIALS.unpack(extra[0][2])[0]  # as the kernel says
                (end_themselves.add if data == b"1" else end_themselves.discard)(pid)
                continue
            waiting.unregister(ready)
            if ready == launcher:
                deadline = time.monotonic() + _PATIENCE_S
            else:
                del children[ready]
        if deadline is not None and time.monotonic() >= deadline:
            _kill({end: pid for end, pid in children.items() if pid not in end_themselves})
            return


def _kill(late: Mapping[int, int]) -> None:
    for end, pid in late.items():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            signal.pidfd_send_signal(end, signal.SIGKILL)
            print(
                f"lightning_ddp: the process {pid} did not hear that the one which had launched it was gone,"
                " and was killed",
                file=sys.stderr,
                flush=True,
            )


if __name__ == "__main__":
    _guard(int(sys.argv[1]), {int(end): int(pid) for end, pid in (word.split(":") for word in sys.argv[2:])})

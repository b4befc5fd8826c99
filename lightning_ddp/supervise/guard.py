"""The guard of a launching process, and the stack of a process that holds its interpreter.

A process in C code, or in a regular expression, runs no Python and does not learn that it is to end. So each
launching process has a guard beside it: this file as a program, without the package. It kills those that do
not learn of a failure in time, and prints the report if the launching process is gone without it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from lightning_ddp.supervise.failure_record import FailureRecord

PATIENCE_S = 20.0  # seconds that a process may outlive the launching one without having learned of its end
_CREDENTIALS = struct.Struct("3i")
_LONGEST = 100_000
_MOST_FRAMES = 8
_STACK_WAIT_S, _STACK_POLL_S = 0.6, 0.05
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')
_STACK = "lightning_ddp_stack"


# ---------------------------------------------------------------------- the guard


class Guard:
    """Subprocess beside a launcher that kills processes which do not end after a failure (Linux 5.3+)."""

    def __init__(self, *, ends_launcher: bool) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        with suppress(AttributeError, OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
            os.close(os.pidfd_open(os.getpid()))  # the kernel can
            heard.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            heard.bind(_name(os.getpid()))
            program = [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid())]
            program += ["rank"] if ends_launcher else []
            self._process = subprocess.Popen(
                program, stdin=heard.fileno(), stdout=subprocess.DEVNULL, cwd="/"
            )

    def end(self) -> None:
        """Kill the guard subprocess, as all guarded processes have ended and the launcher itself reports."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def tell_guard(of: int, rank: int, is_aware: bool | None, limit_s: float = inf, report: str = "") -> None:
    """Tell launcher `of`'s guard that this process has joined (None), knows of a failure (True) or not.

    An aware process ends by itself, and in `limit_s` seconds all others have to be aware; False takes that
    back. The first report counts, unless another one comes without a limit.
    """
    with suppress(AttributeError, OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as telling:
        telling.settimeout(_STACK_WAIT_S)
        telling.sendto(json.dumps([rank, is_aware, limit_s, report[: _LONGEST // 12]]).encode(), _name(of))


def _name(launcher: int) -> str:
    return f"\0lightning_ddp/guard-of-{launcher}"


def _guard(launcher: int, aware: set[int]) -> None:
    ends, ranks, deadline, report = {os.pidfd_open(launcher): launcher}, {launcher: 0}, inf, ""
    heard = socket.socket(fileno=0)
    while ends:
        left_s = None if deadline == inf else max(0.0, deadline - time.monotonic())
        for ready in select.select([0, *ends], (), (), left_s)[0]:
            if ready != 0:
                limit_s = PATIENCE_S if ends.pop(ready) == launcher else inf
            else:
                data, extra, _, _ = heard.recvmsg(_LONGEST, socket.CMSG_SPACE(_CREDENTIALS.size))
                pid = _CREDENTIALS.unpack(extra[0][2])[0]  # as the kernel says
                ranks[pid], is_aware, limit_s, text = json.loads(data)
                with suppress(OSError):  # it has ended
                    if pid not in ends.values():
                        ends[os.pidfd_open(pid)] = pid
                (aware.add if is_aware else aware.discard)(pid)
                if is_aware is False and launcher in ends.values():  # the scripts have caught it, and go on
                    deadline, report = inf, ""
                report = report or text if limit_s < inf else text or report
            deadline = min(deadline, time.monotonic() + limit_s)
        if time.monotonic() >= deadline:
            deadline, late = inf, {end: pid for end, pid in ends.items() if pid not in aware}
            killed = "".join(_kill(end, pid, ranks[pid]) for end, pid in late.items())
            if launcher in set(ends.values()) - set(late.values()):  # it reports the failure itself
                print(killed, end="", file=sys.stderr, flush=True)
            else:
                report = killed + report
    print(report, end="", file=sys.stderr, flush=True)


def _kill(end: int, pid: int, rank: int) -> str:
    stack = "".join((stack_of(pid) or "").splitlines(keepends=True)[-2 * _MOST_FRAMES :])
    with suppress(ProcessLookupError):  # it has just ended
        signal.pidfd_send_signal(end, signal.SIGKILL)
    return f"lightning_ddp: rank {rank} (pid {pid}) did not react to a failure, and was killed:\n{stack}"


# ---------------------------------------------------------------------- the stack of another process


_stack_file: int | None = None  # file in memory, which others find among the open files of this process


def permit_stack() -> None:
    """Install a signal handler in C by which another process can read this one's stack with `stack_of`."""
    global _stack_file
    if _stack_file is not None or not hasattr(os, "memfd_create"):
        return
    number = _stack_signal()
    if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):  # else it is of the user
        with suppress(ValueError):  # this is not the main thread
            signal.signal(number, signal.SIG_IGN)  # what it is again when the interpreter ends
            _stack_file = os.memfd_create(_STACK)
            faulthandler.register(number, file=_stack_file, all_threads=False)


def forbid_stack() -> None:
    """Remove the handler that `permit_stack` has installed, and restore the signal."""
    global _stack_file
    if _stack_file is not None:
        os.close(_stack_file)  # nobody asks any more
        _stack_file = None
        faulthandler.unregister(_stack_signal())
        signal.signal(_stack_signal(), signal.SIG_DFL)


def _stack_signal() -> int:
    return signal.SIGRTMIN + 3


def stack_of(pid: int) -> str | None:
    """Return the Python stack of another process's main thread on this host as text; None if unavailable."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):  # it has ended
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] in "Tt":  # stopped: it runs no handler
                return None
        for name in os.listdir(folder):
            with suppress(OSError):  # a file that it has closed
                if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{_STACK}"):
                    with open(f"{folder}/{name}", errors="replace") as file:
                        return _ask(pid, file)
    return None


def _ask(pid: int, file: TextIO) -> str | None:
    import linecache

    file.seek(0, os.SEEK_END)
    os.kill(pid, _stack_signal())
    text, deadline = "", time.monotonic() + _STACK_WAIT_S
    while time.monotonic() < deadline:
        time.sleep(_STACK_POLL_S)
        more = file.read()
        if text and not more:
            break
        text += more
    frames = [
        f'  File "{name}", line {number}, in {function}\n    {linecache.getline(name, int(number)).strip()}\n'
        for name, number, function in reversed(_FRAME.findall(text))
    ]
    return "".join(frames) or None


def with_stack(record: FailureRecord) -> FailureRecord:
    """Return a failure record with the current stack of its process as traceback, if that is on this host."""
    from dataclasses import replace  # which the guard does without

    if record.pid is None or record.host != socket.gethostname():
        return record
    return replace(record, traceback=stack_of(record.pid))


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)  # they are for the ranks
    _guard(int(sys.argv[1]), set() if sys.argv[2:] else {int(sys.argv[1])})

"""Ends children that outlive a launching process which was killed.

A child hears of that and unwinds, in its own time. One that holds its interpreter, in C code that never
returns or in a regular expression, runs no Python to hear it with, and the kernel knows no signal that waits.
So each launching process has a small process next to its children: a program of its own, without this
package, that sleeps until they have ended, or until a while after the launching process has.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping

__all__ = ["Guard", "tell_guard"]

_PATIENCE_S = 20.0
"""How long a child may outlive the launching process without having heard of its end."""
_END_WAIT_S = 5.0
_CREDENTIALS = struct.Struct("3i")


# ---------------------------------------------------------------------- in the launching process


class Guard:
    """The process, which ends after the children. There is none where the kernel has not what it needs.

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


# ---------------------------------------------------------------------- in a child


def tell_guard(*, ends_itself: bool) -> None:
    """Tells the process, if there is one, whether this child knows of a failure and limits its own time."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as telling:
            telling.sendto(b"1" if ends_itself else b"0", _name_of(os.getpid()))


def _name_of(child: int) -> str:
    return f"\0lightning_ddp/guard-of-{child}"


# ---------------------------------------------------------------------- in the process


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

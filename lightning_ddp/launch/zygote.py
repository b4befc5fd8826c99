"""The zygote of `python -m lightning_ddp run`: a process with one thread, which forks the ranks of this node.

The supervisor forks it after the imports and before it starts a thread, opens a store or touches a device. A
fork of the zygote is therefore like a new interpreter that has imported the same modules.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_ddp.launch.child_process import end_with, is_alive
from lightning_ddp.launch.program import Program

_AWAITED = {signal.SIGCHLD, signal.SIGIO}
_SIZE = struct.Struct("!I")
_MOST_FILES = 16
_LOOK_EVERY_S = 0.05


# ---------------------------------------------------------------------- messages with files


def send(connection: socket.socket, message: Any, files: Sequence[int] = ()) -> None:
    """Send an object and duplicates of file descriptors to a process of the same program."""
    data = pickle.dumps(message)
    socket.send_fds(connection, [_SIZE.pack(len(data))], files)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[Any, list[int]] | None:
    """Receive an object and file descriptors from `send`; return None if the other end is closed."""
    head, files, _, _ = socket.recv_fds(connection, _SIZE.size, _MOST_FILES)
    if len(head) < _SIZE.size:
        return None
    (size,) = _SIZE.unpack(head)
    return pickle.loads(connection.recv(size, socket.MSG_WAITALL)), files


# ---------------------------------------------------------------------- in the supervisor


@dataclass(frozen=True, kw_only=True)
class Start:
    """Request to fork a rank: its program, environment variables, working directory and log file."""

    program: Program
    environment: Mapping[str, str] | None = None
    """Environment variables; None for those of the supervisor."""
    cwd: str | None = None
    """Working directory; None for that of the supervisor."""
    log: str | None = None
    """Path of the file to which the output is appended; None for the output of the supervisor."""


class Zygote:
    """The supervisor's handle on the zygote (the process that forks ranks): sends requests to `serve`."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._lock = threading.Lock()

    def start(self, start: Start, files: Mapping[int, int]) -> Fork:
        """Have the zygote fork a rank with `files` (number there -> here); return it or raise `OSError`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._lock:
            send(self._requests, (start, list(files)), [theirs.fileno(), *files.values()])
        pid = int(ours.recv(64) or -errno.EPIPE)
        if pid < 0:
            ours.close()
            raise OSError(-pid, f"the zygote could not fork: {os.strerror(-pid)}")
        return Fork(pid, ours)

    def close(self) -> None:
        self._requests.close()


class Fork:
    """A rank forked by the zygote, with the methods of `subprocess.Popen` that a launcher needs.

    `told` is the socket on which the zygote sends its exit code.
    """

    def __init__(self, pid: int, told: socket.socket) -> None:
        self.pid = pid
        self._told = told
        self.returncode: int | None = None
        """Exit code; None until `wait` has returned."""

    def wait(self) -> int:
        """Wait until this process has ended; return its exit code. Called once."""
        with self._told:
            answer = self._told.recv(64)
        while not answer and is_alive(self.pid):  # the zygote is gone
            time.sleep(_LOOK_EVERY_S)
        self.returncode = int(answer) if answer else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def fork() -> int:
    """Fork this process, after flushing output; return the child's process id, and 0 in the child."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():  # about threads of BLAS, which ends them before each fork
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


# ---------------------------------------------------------------------- in the zygote


def serve(requests: socket.socket, supervisor: int) -> tuple[Start, dict[int, int]]:
    """Fork ranks on request and report their exits until the supervisor ends, SIGCHLD and SIGIO blocked.

    Returns in a rank only: the request, and its files, number that the rank is to have -> present number.
    """
    end_with(supervisor)
    fcntl.fcntl(requests, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(requests, fcntl.F_SETFL, fcntl.fcntl(requests, fcntl.F_GETFL) | os.O_ASYNC)
    ranks: dict[int, int] = {}
    here = os.getpid()
    while True:
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _tell(ranks[pid], os.waitstatus_to_exitcode(status))
                os.close(ranks.pop(pid))
        while select.select([requests], (), (), 0.0)[0]:
            received = receive(requests)
            if received is None:
                os._exit(0)
            (start, numbers), (told, *files) = received
            try:
                pid = os.fork()
            except OSError as error:
                pid = -(error.errno or 1)
            if pid == 0:
                end_with(here)
                requests.close()
                for descriptor in (told, *ranks.values()):
                    os.close(descriptor)
                return start, dict(zip(numbers, files, strict=True))
            _tell(told, pid)
            for descriptor in files:
                os.close(descriptor)
            if pid > 0:
                ranks[pid] = told
            else:
                os.close(told)
        signal.sigwaitinfo(_AWAITED)


def _tell(descriptor: int, number: int) -> None:
    with contextlib.suppress(OSError):  # the supervisor is gone
        os.write(descriptor, str(number).encode())

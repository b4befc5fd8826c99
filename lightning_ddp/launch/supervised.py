"""The connection of rank 0 to its supervisor under `python -m lightning_ddp run`.

The supervisor hosts the store and the control server of a job and starts its other ranks, so that rank 0 is a
rank like all others, and may be lost.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from lightning_ddp.launch.program import Launch
from lightning_ddp.launch.zygote import receive, send
from lightning_ddp.supervise.failure_record import FailureRecord

_READ_AT_IMPORT = ("OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH_", "LD_", "PYTHON")
"""Variables that the interpreter, torch, OpenMP or the allocator had read when the supervisor began."""
_SET_BY_IMPORTS = {
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR"),
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # by scikit-learn, against defects of OpenMP
}
_PUSHED = 0
"""Number of an answer that nobody asked for: the end of a child."""


class SupervisorLink:
    """Rank 0's connection to the supervisor, to call methods of its `JobHost`; errors are raised here."""

    def __init__(self, connection: socket.socket, supervisor: int) -> None:
        self.supervisor = supervisor
        self.pid = os.getpid()
        self.on_child_ended: Callable[[FailureRecord], None] = lambda record: None
        """Called in a thread where this process has to tell the others of the end of a child."""
        self._connection = connection
        self._environment = dict(os.environ)
        self._numbers = itertools.count(_PUSHED + 1)
        self._answers: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._is_listening = False

    def can_start(self, environment: Mapping[str, str]) -> bool:
        """Return True if forked ranks can have these variables; else print why Python has to be started."""
        names = {*environment, *self._environment} - _SET_BY_IMPORTS
        differing = {name for name in names if environment.get(name) != self._environment.get(name)}
        changed = tuple(sorted(name for name in differing if name.startswith(_READ_AT_IMPORT)))
        if changed:
            _explain_start(changed)
        return not changed

    def open_store(self, address: str, port: int | None, named_by: str) -> dist.TCPStore:
        bound = self._ask("open_store", address, port, named_by)
        return dist.TCPStore(address, bound, is_master=False)

    def open_server(self, address: str, **options: Any) -> int:
        return int(self._ask("open_server", address, **options))

    def launch(self, launch: Launch) -> None:
        handed = launch.command.handed
        files = () if handed is None else (handed.fileno(),)
        self._ask("launch", replace(launch, command=replace(launch.command, handed=None)), files=files)

    def start_again(self, place: int, number: int) -> None:
        self._ask("start_again", place, number)

    def kill_rank(self, rank: int) -> None:
        self._ask("kill_rank", rank)

    def kill(self) -> None:
        self._ask("kill")

    def note_failure(self, record: FailureRecord) -> None:
        with suppress(OSError):  # it was killed
            self._post("note_failure", (record,), {}, ())

    def finish(self) -> FailureRecord | None:
        failure: FailureRecord | None = self._ask("finish")
        return failure

    def _ask(self, name: str, *args: Any, files: Sequence[int] = (), **options: Any) -> Any:
        return self._post(name, args, options, files).result()

    def _post(
        self, name: str, args: Sequence[Any], options: Mapping[str, Any], files: Sequence[int]
    ) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._answers[number] = answer
            send(self._connection, (number, name, args, options), files)
            if not self._is_listening:
                self._is_listening = True
                threading.Thread(target=self._listen, daemon=True, name="supervisor-link").start()
        return answer

    def _listen(self) -> None:
        """Pass each answer of the supervisor to the call that waits for it, until no job is left."""
        while True:
            received = None
            with suppress(ConnectionResetError):
                received = receive(self._connection)
            if received is None:  # the supervisor was killed
                with self._lock:
                    self._is_listening = False
                    for answer in self._answers.values():
                        answer.set_exception(ConnectionResetError("the supervisor has ended"))
                    self._answers.clear()
                return
            number, result, is_last = received[0]
            if number == _PUSHED:
                self.on_child_ended(result)
                continue
            with self._lock:
                answer = self._answers.pop(number)
                if is_last:
                    self._is_listening = False
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)
            if is_last:
                return


@functools.cache
def _explain_start(changed: Sequence[str]) -> None:
    print(
        f"lightning_ddp: {', '.join(changed)} has changed since torch was imported for this run, so Python"
        " starts the other ranks instead of forking them, which takes longer",
        file=sys.stderr,
    )


_link: SupervisorLink | None = None
_passed_on: mmap.mmap | None = None
"""Global: they are known when a rank is forked, long before it has a job."""


def become_supervised(link: SupervisorLink | None, passed_on: mmap.mmap) -> None:
    """Store in a forked rank the last signal passed on, and in rank 0 the link to the supervisor."""
    global _link, _passed_on
    _link, _passed_on = link, passed_on


def supervisor_link() -> SupervisorLink | None:
    """Return the link of rank 0 to its supervisor; None in all other processes, such as a fork of rank 0."""
    return _link if _link is not None and _link.pid == os.getpid() else None


def was_passed_on(number: int) -> bool:
    """Return True if a signal that this process got was sent to its supervisor, so to the whole job."""
    return _passed_on is not None and _passed_on[0] == number

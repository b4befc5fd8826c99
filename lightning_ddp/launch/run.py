"""The children of this process and the run that they belong to, from its start to its end.

A run ends with the process, or, in a process that does one job of Hydra after the other, with the job. Then
everything that it has set up is taken down, so that the next job finds the process as the first one did.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import torch

import lightning_ddp.shm.background  # noqa: F401 (its exit handler has to run after that of this module)
from lightning_ddp.hydra_jobs.jobs import jobs, restore
from lightning_ddp.launch.children import ChildExit, Children, describe_exit
from lightning_ddp.launch.reconciliation import current, forget_run, limit_last_words, standard_error
from lightning_ddp.launch.rendezvous import close_store, leave_default_group
from lightning_ddp.supervise.failure_record import FailureRecord, Identity
from lightning_ddp.supervise.failure_report import render
from lightning_ddp.supervise.settings import ReconcileSettings
from lightning_ddp.supervise.verdict import ECHO_WAIT_S, EXIT_WAIT_S

__all__ = ["LaunchedRun", "begin_anew", "end_job", "launched_run"]

_STOP_GRACE_S = 5.0
_EXIT_GRACE_S = 60.0
_LAST_WORDS_S = 3 * _STOP_GRACE_S
_LAST_LINES = 30


class LaunchedRun:
    """The children of this process, which live as long as the run does, over several Trainers.

    Args:
        first_rank: rank of this process, the first one of its node.
        node_rank: this node.
        settings: times of reconciliation.
    """

    def __init__(self, first_rank: int, node_rank: int, settings: ReconcileSettings) -> None:
        global _launched
        self.children = Children(self._on_failure, lambda: current().has_met)
        self.logs: dict[int, Path] = {}
        """Local rank -> file with what the child has printed, where that is not on the terminal."""
        self._first_rank, self._node_rank = first_rank, node_rank
        self._settings = settings
        self._pid = os.getpid()
        self._num_threads = torch.get_num_threads()
        self._variables: dict[str, str | None] = {}
        self._leaving = threading.Lock()
        _launched = self
        atexit.register(self._at_exit)

    def set_variables(self, variables: dict[str, str]) -> None:
        """Sets environment variables until the run ends."""
        for name in (*variables, "OMP_NUM_THREADS"):  # Lightning sets the last one
            self._variables.setdefault(name, os.environ.get(name))
        os.environ.update(variables)

    def _on_failure(self, child: ChildExit) -> None:
        identity = Identity(
            rank=self._first_rank + child.local_rank, node_rank=self._node_rank, pid=child.pid
        )
        how = describe_exit(child.code) + (" before it had joined the others" if child.code == 0 else "")
        message, printed = f"the process {how}; ", None
        log = self.logs.get(child.local_rank)
        if log is None:
            message += "what it printed stands above"
        else:
            message += f"what it printed is in {log}"
            printed = "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:]) or None
        record = FailureRecord.of_identity(identity, message, exit_code=child.code, traceback=printed)
        current().child_ended(record)

    def wake(self) -> None:
        """Continues children that are stopped, so that they hear of the failure."""
        self.children.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends the children at once."""
        self.children.send_signal(signal.SIGKILL)

    def end_late(self) -> None:
        """Called in a thread: ends this process, whose time after a failure is over, but its children first.

        Where the main thread waits for the children already it does the same.
        """
        if not self._leaving.acquire(blocking=False):
            return
        limit_last_words(_LAST_WORDS_S)
        grace_s = self._settings.failure_grace_s
        print(
            f"lightning_ddp: rank {self._first_rank} has not ended {grace_s:g} s after a failure:",
            file=sys.stderr,
        )
        faulthandler.dump_traceback(standard_error(), all_threads=True)
        self._end_children(0.0)
        failure = current().wait_for_verdict(ECHO_WAIT_S + EXIT_WAIT_S)
        if failure is not None:
            print(render(failure), file=sys.stderr, end="")
        sys.stderr.flush()
        os._exit(1)

    def _end_children(self, grace_s: float) -> None:
        """Waits until the children have ended, and after `grace_s` seconds ends them."""
        if self.children.join(grace_s):
            return
        for pid in self.children.stop(_STOP_GRACE_S):
            rank = self._first_rank + 1 + [proc.pid for proc in self.children.procs].index(pid)
            print(f"lightning_ddp: rank {rank} (pid {pid}) did not end, and was killed", file=sys.stderr)

    def _leave(self, *, has_failed: bool) -> FailureRecord | None:
        """Waits for the end of the children and leaves the control channel; returns the first failure."""
        ours = current()
        self._leaving.acquire()
        if not has_failed:
            self._end_children(_EXIT_GRACE_S)
        else:  # without a control channel nobody has told the children
            grace_s = ours.seconds_left() if ours.watch is not None else 0.0
            limit_last_words(grace_s + _LAST_WORDS_S)
            self._end_children(grace_s)
        if self.children.first_failure() is not None:  # told a moment ago, perhaps
            ours.wait_for_verdict(ECHO_WAIT_S + EXIT_WAIT_S)
        failure = ours.first_failure()
        ours.close()
        return failure

    def end(self, error: BaseException | None) -> FailureRecord | None:
        """Ends the run while the process goes on; returns its first failure.

        Args:
            error: what the job has raised in this process, or None.
        """
        _tell(error)
        failure = self._leave(has_failed=error is not None or _has_failed())
        atexit.unregister(self._at_exit)
        leave_default_group()
        jobs.publish_to(None)
        close_store()
        forget_run()
        restore(self._variables)
        torch.set_num_threads(self._num_threads)
        return failure

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a process forked from this one inherits the handler, but has no children of ours
        _tell(getattr(sys, "last_value", None))
        failure = self._leave(has_failed=_has_failed() or getattr(sys, "last_value", None) is not None)
        if failure is None or self._is_handled():
            return
        print(render(failure), file=sys.stderr, end="")
        if getattr(sys, "last_value", None) is None:  # else Python itself exits with 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # an exit handler has no other way to change the exit code

    def _is_handled(self) -> bool:
        """Whether the scripts of all ranks here have caught the failure and ended well."""
        is_caught = current().is_over and getattr(sys, "last_value", None) is None
        return is_caught and all(proc.returncode == 0 for proc in self.children.procs)


_launched: LaunchedRun | None = None
_last_failure: FailureRecord | None = None


def launched_run() -> LaunchedRun | None:
    """The children of this process's present run."""
    return _launched


def begin_anew() -> None:
    """Called before each run: forgets one that failed with an exception which the script has caught.

    All ranks that do so meet again, with a new control channel and process group.
    """
    before = current()
    if not before.may_begin_anew():
        return
    before.close()
    leave_default_group()
    forget_run()
    current().follow(before)
    ended = _launched.children.first_failure() if _launched is not None else None
    if _launched is not None and ended is not None:  # a child that will not come
        _launched._on_failure(ended)


def _tell(error: BaseException | None) -> None:
    """Tells the other ranks what the script has raised outside of a Trainer: nobody has heard of it."""
    if error is not None and not _has_failed():
        current().fail("".join(traceback.format_exception(error)))


def _has_failed() -> bool:
    ours = current()
    return ours.first_failure() is not None or ours.is_over or ours.interrupt.error is not None


def end_job(error: BaseException | None) -> BaseException | None:
    """Ends the run of a job of Hydra, if it has one and this process started it.

    Args:
        error: what the job has raised in this process, or None.

    Returns:
        What the job fails with; None if it succeeded on all ranks.
    """
    global _launched, _last_failure
    if _launched is None or _launched._pid != os.getpid():
        return error
    ended, _launched = _launched, None
    if _last_failure is None:
        atexit.register(_tell_last_failure)
    _last_failure = ended.end(error)
    gc.collect()  # a Trainer is a cycle and holds the group, whose sockets close with its last reference
    if error is None and _last_failure is not None:
        return _last_failure.to_error()
    return error


def _tell_last_failure() -> None:
    """The failure that ended the last job of this process is the last thing on the screen."""
    if _last_failure is not None:
        print(render(_last_failure), file=sys.stderr, end="")

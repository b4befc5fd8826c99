"""The context of this process's job, over several Trainers of a script: store, children, supervision.

One generation of supervision follows another where the scripts of all ranks caught a failure and continue.
The context ends with the process; where a process runs one job of Hydra after another, it ends with the job.
"""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

import torch

import lightning_ddp.shm.shared_memory  # noqa: F401 (its exit handler has to run after that of this module)
from lightning_ddp._torch import known_groups, never_destroy
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.hydra_jobs.jobs import jobs, restore
from lightning_ddp.launch.child_process import launcher_pid, outlive_parent
from lightning_ddp.launch.failure_handler import FailureHandler
from lightning_ddp.launch.interface import is_loopback
from lightning_ddp.launch.last_words import exit_now, show_report
from lightning_ddp.launch.processes import Children
from lightning_ddp.launch.program import Launch
from lightning_ddp.launch.rendezvous import (
    JOIN_VARIABLE,
    TOKEN_VARIABLE,
    Rendezvous,
    leave_default_group,
)
from lightning_ddp.supervise.client import ServerAddress
from lightning_ddp.supervise.failure_record import FailureRecord, Identity, traceback_of
from lightning_ddp.supervise.job_control import LocalProcesses
from lightning_ddp.supervise.root_cause import ECHO_WAIT_S, EXIT_WAIT_S
from lightning_ddp.supervise.server import ControlServer
from lightning_ddp.supervise.settings import SupervisionSettings

if TYPE_CHECKING:
    from lightning_ddp.launch.supervised import SupervisorLink

__all__ = ["JobContext", "end_job", "global_seed", "job_context", "server_in"]

_STORE_KEY = "lightning_ddp/control_server"
_LOOK_EVERY_S = 0.1
_EXIT_GRACE_S = 60.0


class JobContext:
    """Store, children and supervision of this process for its job. Made and used in the main thread.

    Args:
        before: the previous context: of a job that ended, or of the process that forked this one.
    """

    def __init__(self, before: JobContext | None = None) -> None:
        self._pid = os.getpid()
        self.rendezvous: Rendezvous = Rendezvous()
        if before is not None and not before.is_inherited:
            self.rendezvous = before.rendezvous
        self.store: Any = None
        """Store from which this process made its process group."""
        self.children: Children = Children(self._child_ended, lambda: self.control.has_met)
        self._goes_on = False
        """True if the job continues without ranks that it loses."""
        self.control: FailureHandler = FailureHandler(self.children)
        """Supervision of the present generation."""
        self.num_failed = 0
        """Number of generations that failed with an exception which the script caught."""
        self._start = int(os.environ.pop(JOIN_VARIABLE, "0")) if before is None else 0
        """Number of this start among those that were requested for the slot."""
        self.is_joining = self._start > 0
        """True while this process, which replaces a lost one, is not a member of the job."""
        self._inherited = before if before is not None and before.is_inherited else None
        """Kept alive: C++ would wait for the threads of its store, which are in the other process."""
        self._num_threads = torch.get_num_threads()
        self._variables: dict[str, str | None] = {}

    @property
    def is_inherited(self) -> bool:
        """True in a process that was forked: it has no part in the job of this context."""
        return os.getpid() != self._pid

    def disown(self) -> None:
        """Close the sockets of this context in a process that was forked."""
        self.control.disown()
        never_destroy([self, *self.control.interrupt.activity.groups(), *known_groups().items()])

    # ------------------------------------------------------------------ begin

    def begin_launch(
        self, launch: Launch, variables: dict[str, str], link: SupervisorLink | None = None
    ) -> None:
        """Make this process the launcher of its node.

        Args:
            variables: environment variables to set until the job ends.
            link: to the supervisor that starts the others, and waits for them, instead of this process.
        """
        self._goes_on, self.children.remote = launch.goes_on, link
        for name in (*variables, "OMP_NUM_THREADS"):  # Lightning sets the last one
            self._variables.setdefault(name, os.environ.get(name))
        os.environ.update(variables)
        if link is None:
            self.children.launch = launch
            atexit.register(self._at_exit)
        else:
            link.on_child_ended = self._child_ended

    def _child_ended(self, record: FailureRecord) -> None:
        """Report the exit of another rank of this node, where that concerns the others. Thread-safe."""
        if self._goes_on or record.exit_code or not self.control.has_met:
            self.control.child_ended(record)

    def open_server(
        self,
        address: str,
        store: Any,
        *,
        identity: Identity,
        world_size: int,
        num_nodes: int,
        settings: SupervisionSettings,
        processes: LocalProcesses | None = None,
    ) -> ControlServer | None:
        """Open the control server of the job at `address`, and publish that in the store of the job.

        It is in this process; or for a rank 0 under `run` in the supervisor, then None is returned.

        Args:
            identity: this process.
            processes: the processes of this node; None for this one's children.
        """
        shared = self.rendezvous.token
        options: dict[str, Any] = {
            "token": shared or secrets.token_hex(16),
            "world_size": world_size,
            "settings": settings,
            # /etc/hosts often maps a node's own name to the loopback, where the others could not reach it
            "any_interface": num_nodes > 1 and is_loopback(address),
        }
        link = self.children.remote
        if link is not None:
            port = link.open_server(address, **options)
            identity = Identity(rank=-1, node_rank=0, pid=link.supervisor)
        else:
            self.control.server = ControlServer(address, processes=processes or self.children, **options)
            port = self.control.server.port
        published = "" if shared else options["token"]
        who = (identity.rank, identity.node_rank, identity.host, identity.pid)
        store.set(_STORE_KEY, "\n".join(map(str, (address, port, published, *who))))
        return self.control.server

    def find_server(self, store: Any) -> ServerAddress:
        """Wait until rank 0 has published the address of the control server, then return it."""
        while self.num_failed and not store.check([_STORE_KEY]):  # rank 0 may have left
            self.control.interrupt.check()
            time.sleep(_LOOK_EVERY_S)
        return server_in(store, self.rendezvous.token)

    def connect(
        self, store: Any, identity: Identity, settings: SupervisionSettings, timeout_s: float
    ) -> None:
        """Connect to the control server unless connected; wait until all ranks are."""
        if self.control.watch is None:
            address = self.find_server(store)
            start = self._start if self.is_joining else None
            parent_pid = launcher_pid()
            self.control.connect(address, identity, settings, parent_pid, start=start)
            if parent_pid is not None:
                outlive_parent()
        self.control.wait_for_all(timeout_s)

    def begin_anew(self) -> None:
        """Begin a new generation if the script caught the failure of the last one; all ranks meet again."""
        if not self.control.may_begin_anew():
            return
        self.control.close()
        leave_default_group()
        self.control.restore_handlers()
        self.control = FailureHandler(self.children)
        self.num_failed += 1
        ended = self.children.first_failure()
        if ended is not None:  # a child that will not come
            self.control.child_ended(ended)

    # ------------------------------------------------------------------ end

    def end(self, error: BaseException | None) -> FailureRecord | None:
        """End the job while the process continues; return its failure.

        Args:
            error: what the job raised here.
        """
        failure = self._leave(error)
        atexit.unregister(self._at_exit)
        if self._is_left_behind:
            return None
        leave_default_group()
        jobs().publish_to(None)
        self.store = None
        self.rendezvous.close()
        self.control.restore_handlers()
        restore(self._variables)
        torch.set_num_threads(self._num_threads)
        return failure

    @property
    def _is_left_behind(self) -> bool:
        """True in a rank 0 that has left the others on request: the supervisor has what they need."""
        return self.control.has_left and self.children.remote is not None

    def _leave(self, error: BaseException | None) -> FailureRecord | None:
        """Wait until the children have exited, leave the control channel; return the first failure."""
        ours = self.control
        if self._is_left_behind:
            return None
        if error is not None and not ours.has_failed:  # outside of a Trainer: nobody has heard of it
            ours.fail(traceback_of(error), traceback.format_exception_only(error)[-1].strip())
        has_failed = error is not None or ours.has_failed
        self.children.are_ending = True
        if self.control.server is not None:
            self.children.end_new(self.control.server.goes_on_without)
        elif ours.calls is not None:
            self.children.end_new(ours.calls.state.goes_on_without)
        if not has_failed:
            self.children.end(_EXIT_GRACE_S)
        else:  # without a control channel nobody has told the children
            left_s = ours.end_limit.extend_for_children()
            self.children.end(left_s if ours.watch is not None else 0.0)
        has_lost_some = ours.calls is not None and ours.calls.state.generation > 0
        if self.children.first_failure() is not None and not has_lost_some:  # told a moment ago, perhaps
            ours.wait_for_verdict(ECHO_WAIT_S + EXIT_WAIT_S)
        failure = ours.first_failure()
        ours.close()
        if self.children.remote is not None:
            failure = self.children.remote.finish() or failure
        return failure

    def _at_exit(self) -> None:
        if self.is_inherited:
            return
        error = getattr(sys, "last_value", None)
        failure = self._leave(error)
        is_caught = error is None and self.control.is_over
        if failure is None or (is_caught and all(proc.returncode == 0 for proc in self.children.procs)):
            return  # the scripts of all ranks here have caught the failure and ended well
        show_report(failure)
        if error is None:  # else Python itself exits with 1
            exit_now(1)  # an exit handler has no other way to change the exit code


def global_seed() -> int:
    """Return the seed that Lightning's `seed_everything` set for all ranks; 0 for none."""
    text = os.environ.get("PL_GLOBAL_SEED", "")
    return int(text) if text.isdecimal() else 0


def server_in(store: Any, shared: str | None) -> ServerAddress:
    """Return the address of the control server that the store of a job has; `shared` is the user's token."""
    host, port, published, rank, node_rank, name, pid = store.get(_STORE_KEY).decode().split("\n")
    if bool(shared) == bool(published):
        here, not_here = ("here", "for rank 0") if shared else ("for rank 0", "here")
        raise ConfigurationError(
            f"{TOKEN_VARIABLE} is set {here} but not {not_here}. Set it to the same text for all processes,"
            " or for none."
        )
    identity = Identity(rank=int(rank), node_rank=int(node_rank), host=name, pid=int(pid))
    return ServerAddress(host=host, port=int(port), token=shared or published, identity=identity)


_context: JobContext | None = None
"""Global: Lightning makes launchers, strategies and callbacks one by one, and all need the job."""


def job_context() -> JobContext:
    """Return the context of this process; make it at the first call, also in a forked process."""
    global _context
    if _context is None or _context.is_inherited:
        _context = JobContext(_context)
    return _context


def end_job(error: BaseException | None) -> BaseException | None:
    """End a job of Hydra, which raised `error` here, if this process launched it; return its failure."""
    global _context
    ended = _context
    if ended is None or ended.is_inherited or not ended.children.are_of_this_process:
        return error
    failure = ended.end(error)
    _context, ended = JobContext(ended), None
    atexit.unregister(show_report)
    if failure is not None:
        atexit.register(show_report, failure)
    gc.collect()  # a Trainer is a cycle and holds the group, whose sockets close with its last reference
    return failure.to_error() if error is None and failure is not None else error


def _disown() -> None:
    if _context is not None:
        _context.disown()


os.register_at_fork(after_in_child=_disown)

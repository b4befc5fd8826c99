"""The session of this process: its part in a run, over several Trainers of a script.

It owns the store in which the ranks meet, the children that this process has started, and the supervision of
the present generation of the run: one follows another where the scripts of all ranks have caught a failure
and go on. It ends with the process, or with the job in a process that does one job of Hydra after the other:
then what it has set up is taken down, so that the next job finds the process as the first one did.
"""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

import lightning_ddp.shm.background  # noqa: F401 (its exit handler has to run after that of this module)
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.hydra_jobs.jobs import jobs, restore
from lightning_ddp.launch.children import ChildExit, Children
from lightning_ddp.launch.control_process import ServerElsewhere
from lightning_ddp.launch.interface import is_loopback
from lightning_ddp.launch.parent_death import launcher_pid, outlive_parent
from lightning_ddp.launch.reconciliation import LAST_WORDS_S, Reconciliation, limit_last_words
from lightning_ddp.launch.rendezvous import (
    JOIN_VARIABLE,
    TOKEN_VARIABLE,
    Rendezvous,
    leave_default_group,
)
from lightning_ddp.launch.terminal import show_report
from lightning_ddp.supervise.client import ServerAddress
from lightning_ddp.supervise.failure_record import FailureRecord, Identity
from lightning_ddp.supervise.server import ControlServer
from lightning_ddp.supervise.settings import ReconcileSettings
from lightning_ddp.supervise.verdict import ECHO_WAIT_S, EXIT_WAIT_S

__all__ = ["Session", "end_job", "server_in", "session_of_process"]

_STORE_KEY = "lightning_ddp/control_server"
_LOOK_EVERY_S = 0.1
_EXIT_GRACE_S = 60.0


class Session:
    """What this process has for its run. Made in the main thread; its methods are called there.

    Args:
        before: the session before this one: one that has ended, or that of the process which this one was
            forked from.
    """

    def __init__(self, before: Session | None = None) -> None:
        self.is_inherited = False
        """Whether it is that of a process which has forked this one: this one has no part in its run."""
        self.rendezvous: Rendezvous = Rendezvous()
        if before is not None and not before.is_inherited:
            self.rendezvous = before.rendezvous
        self.store: Any = None
        """The store from which this process has made its process group."""
        self.children: Children = Children(self._child_ended, lambda: self.control.has_met)
        self.control: Reconciliation = Reconciliation(self.children)
        """Supervision of the present generation."""
        self.num_failed = 0
        """Generations that have failed with an exception, after each of which the script went on."""
        self.is_joining = before is None and os.environ.pop(JOIN_VARIABLE, None) is not None
        """Whether this process is in the place of a lost one, and not a member of the run yet."""
        self._parent_pid = launcher_pid()
        self._inherited = before if before is not None and before.is_inherited else None
        """Kept, as C++ would wait for the threads of its store, which are in the other process."""
        self._node_rank = 0
        self._num_threads = torch.get_num_threads()
        self._variables: dict[str, str | None] = {}

    def disown(self) -> None:
        """Called in a forked process, of the session of the one that it was forked from."""
        self.is_inherited = True
        self.control.disown()

    # ------------------------------------------------------------------ begin

    def begin_launch(
        self, first_rank: int, node_rank: int, variables: dict[str, str], *, tells_all: bool = False
    ) -> None:
        """From now on this process is the one that starts the others of its node.

        Args:
            first_rank: rank of this process, the first one of its node.
            node_rank: this node.
            variables: environment variables to set until the session ends.
            tells_all: whether the server is told of each child that ends, as the others may go on.
        """
        self.children.tells_all = tells_all
        self.children.first_rank, self._node_rank = first_rank, node_rank
        for name in (*variables, "OMP_NUM_THREADS"):  # Lightning sets the last one
            self._variables.setdefault(name, os.environ.get(name))
        os.environ.update(variables)
        atexit.register(self._at_exit)

    def open_server(
        self,
        address: str,
        store: Any,
        *,
        identity: Identity,
        world_size: int,
        num_nodes: int,
        settings: ReconcileSettings,
        on_failure: Callable[[FailureRecord], None] | None = None,
        on_condemned: Callable[[Identity], None] | None = None,
        on_vacant: Callable[[int], None] | None = None,
    ) -> ControlServer | ServerElsewhere:
        """Opens the control server of the run, and says in the run's store where it is.

        It is in this process, but for a rank 0 that has a control process.

        Args:
            address: where the first node, which is this one, is reached.
            store: the store of the run.
            identity: this process.
            world_size: ranks of the run.
            num_nodes: nodes of the run.
            settings: times.
            on_failure: called in the server's thread with the first failure.
            on_condemned: ends a process that the others go on without; None for a child of this one.
            on_vacant: has a new one started in the place of a lost one; None for the same.

        Raises:
            RendezvousError: `address` is none of this host.
        """
        shared = self.rendezvous.token
        options: dict[str, Any] = {
            "token": shared or secrets.token_hex(16),
            "world_size": world_size,
            "settings": settings,
            # /etc/hosts often maps a node's own name to the loopback, where the others could not reach it
            "any_interface": num_nodes > 1 and is_loopback(address),
        }
        server: ControlServer | ServerElsewhere
        if self.rendezvous.control is not None:
            server = self.rendezvous.control.open_server(address, **options)
            identity = self.rendezvous.control.identity
        else:
            server = ControlServer(
                address,
                on_failure=on_failure,
                on_condemned=on_condemned or (lambda identity: self.children.kill_one(identity.pid)),
                on_vacant=on_vacant or self.children.start_again,
                on_called=lambda identity, place: self.children.move(identity.pid, place),
                **options,
            )
        self.control.server = server
        published = "" if shared else server.token
        who = (identity.rank, identity.node_rank, identity.host, identity.pid)
        store.set(_STORE_KEY, "\n".join(map(str, (address, server.port, published, *who))))
        return server

    def find_server(self, store: Any) -> ServerAddress:
        """As `server_in`, once it is there."""
        while self.num_failed and not store.check([_STORE_KEY]):  # rank 0 may have left
            self.control.interrupt.check()
            time.sleep(_LOOK_EVERY_S)
        return server_in(store, self.rendezvous.token)

    def connect(self, store: Any, identity: Identity, settings: ReconcileSettings, timeout_s: float) -> None:
        """Connects to the control server, and waits until all ranks have. Does nothing the second time.

        Args:
            store: the store of the run.
            identity: this process.
            settings: times.
            timeout_s: how long to wait for the other ranks.

        Raises:
            RendezvousError: the server cannot be reached, or not all ranks came.
            PeerFailure: a rank failed before.
        """
        if self.control.watch is None:
            address = self.find_server(store)
            self.control.connect(address, identity, settings, self._parent_pid, is_new=self.is_joining)
            if self._parent_pid is not None:
                outlive_parent()
        self.control.wait_for_all(timeout_s)

    def take_place(self, local_rank: int) -> None:
        """In a new process: which rank of its node it is. A spare does not know before it is called."""
        os.environ["LOCAL_RANK"] = str(local_rank)

    def begin_anew(self) -> None:
        """Called before each run: a new generation follows one whose failure the script has caught.

        All ranks that do so meet again, with a new control channel and process group.
        """
        if not self.control.may_begin_anew():
            return
        self.control.close()
        leave_default_group()
        self.control.restore_handlers()
        self.control = Reconciliation(self.children)
        self.num_failed += 1
        ended = self.children.first_failure()
        if ended is not None:  # a child that will not come
            self._child_ended(ended)

    def _child_ended(self, child: ChildExit) -> None:
        """In a thread: a child has ended without success."""
        rank = (self.children.first_rank or 0) + child.local_rank
        identity = Identity(rank=rank, node_rank=self._node_rank, pid=child.pid)
        self.control.child_ended(
            FailureRecord.of_identity(
                identity, child.describe(), exit_code=child.code, traceback=child.last_lines()
            )
        )

    # ------------------------------------------------------------------ end

    def end(self, error: BaseException | None) -> FailureRecord | None:
        """Ends the run while the process goes on; returns its first failure.

        Args:
            error: what the job has raised in this process, or None.
        """
        failure = self._leave(error)
        atexit.unregister(self._at_exit)
        if self._is_left_behind:
            return None
        leave_default_group()
        jobs.publish_to(None)
        self.store = None
        self.rendezvous.close()
        self.control.restore_handlers()
        restore(self._variables)
        torch.set_num_threads(self._num_threads)
        return failure

    @property
    def _is_left_behind(self) -> bool:
        """Whether this is a rank 0 without which the others go on, and with what it has asked for."""
        return self.control.has_left and self.children.first_rank == 0

    def _leave(self, error: BaseException | None) -> FailureRecord | None:
        """Waits for the end of the children and leaves the control channel; returns the first failure."""
        ours = self.control
        if self._is_left_behind:
            return None
        ours.resume()
        if error is not None and not ours.has_failed:  # outside of a Trainer: nobody has heard of it
            ours.fail("".join(traceback.format_exception(error)))
        has_failed = error is not None or ours.has_failed
        self.children.ending.acquire()
        if isinstance(self.control.server, ControlServer):
            self.children.end_new(self.control.server.goes_on_without)
        elif ours.calls is not None:
            self.children.end_new(ours.calls.goes_on_without)
        if not has_failed:
            self.children.end(_EXIT_GRACE_S)
        else:  # without a control channel nobody has told the children
            grace_s = ours.seconds_left() if ours.watch is not None else 0.0
            limit_last_words(grace_s + LAST_WORDS_S)
            self.children.end(grace_s)
        has_lost_some = ours.calls is not None and ours.calls.member.generation > 0
        if self.children.first_failure() is not None and not has_lost_some:  # told a moment ago, perhaps
            ours.wait_for_verdict(ECHO_WAIT_S + EXIT_WAIT_S)
        failure = ours.first_failure()
        ours.close()
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
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # an exit handler has no other way to change the exit code


def server_in(store: Any, shared: str | None) -> ServerAddress:
    """Where the control server of a run is, as its store says.

    Args:
        store: of the run.
        shared: the secret of the run, where that is not left in the store.

    Raises:
        ConfigurationError: rank 0 has a token that the user has set, and this process none, or vice versa.
    """
    host, port, published, rank, node_rank, name, pid = store.get(_STORE_KEY).decode().split("\n")
    if bool(shared) == bool(published):
        here, not_here = ("here", "for rank 0") if shared else ("for rank 0", "here")
        raise ConfigurationError(
            f"{TOKEN_VARIABLE} is set {here} and not {not_here}: set it to the same text for all"
            " processes, or for none"
        )
    identity = Identity(rank=int(rank), node_rank=int(node_rank), host=name, pid=int(pid))
    return ServerAddress(host=host, port=int(port), token=shared or published, identity=identity)


_session: Session | None = None


def session_of_process() -> Session:
    """The session of this process; begun at the first call, and anew in a forked process."""
    global _session
    if _session is None or _session.is_inherited:
        _session = Session(_session)
    return _session


def end_job(error: BaseException | None) -> BaseException | None:
    """Ends the run of a job of Hydra, if it has one and this process started it.

    Args:
        error: what the job has raised in this process, or None.

    Returns:
        What the job fails with; None if it succeeded on all ranks.
    """
    global _session
    ended = _session
    if ended is None or ended.is_inherited or ended.children.first_rank is None:
        return error
    failure = ended.end(error)
    _session, ended = Session(ended), None
    atexit.unregister(_tell_last_failure)
    if failure is not None:
        atexit.register(_tell_last_failure, failure)
    gc.collect()  # a Trainer is a cycle and holds the group, whose sockets close with its last reference
    if error is None and failure is not None:
        return failure.to_error()
    return error


def _tell_last_failure(failure: FailureRecord) -> None:
    """The failure that ended the last job of this process is the last thing on the screen."""
    show_report(failure)


def _disown() -> None:
    if _session is not None:
        _session.disown()


os.register_at_fork(after_in_child=_disown)

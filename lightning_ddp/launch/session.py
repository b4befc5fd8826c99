"""The session of this process: its part in a run, over several Trainers of a script, from begin to end.

It owns the store in which the ranks meet, the children that this process has started, and the supervision of
the present generation of the run: one follows another where the scripts of all ranks have caught a failure
and go on. It ends with the process, or with the job in a process that does one job of Hydra after the other:
then what it has set up is taken down, so that the next job finds the process as the first one did.

It is long because it has the whole of a run: how a process joins it, where its loops stop, how it ends.
"""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import sys
import time
import traceback
import types
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import lightning_ddp.shm.shared_memory  # noqa: F401 (its exit handler has to run after that of this module)
from lightning_ddp._lightning import (
    ClusterEnvironment,
    at_step_boundaries,
    is_fitting,
    note_sigterm,
    replace_signal_handlers,
    sigterm_exception,
)
from lightning_ddp._torch import known_groups, never_destroy
from lightning_ddp.comm.teardown import remember_connections
from lightning_ddp.errors import ConfigurationError, RendezvousError
from lightning_ddp.hydra_jobs.jobs import jobs, restore, share_job
from lightning_ddp.launch.child_process import launcher_pid, outlive_parent
from lightning_ddp.launch.children import Children
from lightning_ddp.launch.control_process import ControlProcess
from lightning_ddp.launch.interface import backend_names, choose_interface, is_loopback
from lightning_ddp.launch.reconciliation import (
    LAST_WORDS_S,
    Reconciliation,
    is_enabled,
    limit_last_words,
    show_report,
)
from lightning_ddp.launch.rendezvous import (
    JOIN_VARIABLE,
    TOKEN_VARIABLE,
    Rendezvous,
    existing_group,
    join_default_group,
    leave_default_group,
    meet,
    note_met,
    run_store,
    tcp_address,
)
from lightning_ddp.launch.stop_signals import WaitSignals, describe_rank, tell_long_wait
from lightning_ddp.supervise.client import ServerAddress
from lightning_ddp.supervise.failure_record import FailureRecord, Identity, traceback_of
from lightning_ddp.supervise.job_control import LocalProcesses
from lightning_ddp.supervise.orders import Wish, WishKind
from lightning_ddp.supervise.rank_state import Passage
from lightning_ddp.supervise.root_cause import ECHO_WAIT_S, EXIT_WAIT_S
from lightning_ddp.supervise.server import ControlServer
from lightning_ddp.supervise.settings import ReconcileSettings

if TYPE_CHECKING:
    from lightning_ddp._lightning import Trainer

__all__ = [
    "FIRST_JOB",
    "Session",
    "StepStop",
    "end_job",
    "global_seed",
    "join_run",
    "server_in",
    "session_of_process",
    "waiting",
]

_LONGEST_WAIT_S = 1800.0
FIRST_JOB = "the job that the first node has composed"
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
        self.children: Children = Children(
            lambda record: self.control.child_ended(record), lambda: self.control.has_met
        )
        self.control: Reconciliation = Reconciliation(self.children)
        """Supervision of the present generation."""
        self.num_failed = 0
        """Generations that have failed with an exception, after each of which the script went on."""
        self._start = int(os.environ.pop(JOIN_VARIABLE, "0")) if before is None else 0
        """Which one in its place this process is, of those that were asked for."""
        self.is_joining = self._start > 0
        """Whether this process is in the place of a lost one, and not a member of the run yet."""
        self._parent_pid = launcher_pid()
        self._inherited = before if before is not None and before.is_inherited else None
        """Kept, as C++ would wait for the threads of its store, which are in the other process."""
        self._num_threads = torch.get_num_threads()
        self._variables: dict[str, str | None] = {}

    def disown(self) -> None:
        """Called in a forked process, of the session of the one that it was forked from."""
        self.is_inherited = True
        self.control.disown()
        never_destroy([self, *self.control.interrupt.activity.groups(), *known_groups().items()])

    # ------------------------------------------------------------------ begin

    def begin_launch(
        self, first_rank: int, node_rank: int, variables: dict[str, str], *, tells_all: bool = False
    ) -> None:
        """From now on this process, of rank `first_rank`, is the one that starts the others of its node.

        Args:
            variables: environment variables to set until the session ends.
            tells_all: whether the server is told of each child that ends, as the others may go on.
        """
        self.children.tells_all = tells_all
        self.children.first_rank, self.children.node_rank = first_rank, node_rank
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
        processes: LocalProcesses | None = None,
    ) -> ControlServer | ControlProcess:
        """Opens the control server of the run, and says in the run's store where it is.

        It is in this process, but for a rank 0 that has a control process.

        Args:
            address: where the first node, which is this one, is reached.
            store: the store of the run.
            identity: this process.
            processes: those of this node; None for this one's children.

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
        server: ControlServer | ControlProcess
        process = self.rendezvous.control
        if process is not None:
            process.open_server(address, **options)
            server, identity = process, process.identity
        else:
            server = ControlServer(address, processes=processes or self.children, **options)
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
        """Connects to the control server, and waits `timeout_s` seconds at most until all ranks have.

        Raises as `Reconciliation.connect` and `wait_for_all`. Does nothing the second time.
        """
        if self.control.watch is None:
            address = self.find_server(store)
            start = self._start if self.is_joining else None
            self.control.connect(address, identity, settings, self._parent_pid, start=start)
            if self._parent_pid is not None:
                outlive_parent()
        self.control.wait_for_all(timeout_s)

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
            self.control.child_ended(ended)

    # ------------------------------------------------------------------ end

    def end(self, error: BaseException | None) -> FailureRecord | None:
        """Ends the run, whose job has raised `error` here, while the process goes on; returns its failure."""
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
        """Whether this is a rank 0 without which the others go on, and with what it has asked for."""
        return self.control.has_left and self.children.first_rank == 0

    def _leave(self, error: BaseException | None) -> FailureRecord | None:
        """Waits for the end of the children and leaves the control channel; returns the first failure."""
        ours = self.control
        if self._is_left_behind:
            return None
        if error is not None and not ours.has_failed:  # outside of a Trainer: nobody has heard of it
            ours.fail(traceback_of(error), traceback.format_exception_only(error)[-1].strip())
        has_failed = error is not None or ours.has_failed
        self.children.ending.acquire()
        if isinstance(self.control.server, ControlServer):
            self.children.end_new(self.control.server.goes_on_without)
        elif ours.calls is not None:
            self.children.end_new(ours.calls.state.goes_on_without)
        if not has_failed:
            self.children.end(_EXIT_GRACE_S)
        else:  # without a control channel nobody has told the children
            grace_s = ours.seconds_left() if ours.watch is not None else 0.0
            limit_last_words(grace_s + LAST_WORDS_S)
            self.children.end(grace_s)
        has_lost_some = ours.calls is not None and ours.calls.state.generation > 0
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


def global_seed() -> int:
    """The seed that Lightning's `seed_everything` has set for all ranks; 0 for none."""
    text = os.environ.get("PL_GLOBAL_SEED", "")
    return int(text) if text.isdecimal() else 0


def server_in(store: Any, shared: str | None) -> ServerAddress:
    """Where the control server of a run is, as its store says; `shared` is the token that the user has set.

    Raises `ConfigurationError` if rank 0 has one, and this process none, or vice versa.
    """
    host, port, published, rank, node_rank, name, pid = store.get(_STORE_KEY).decode().split("\n")
    if bool(shared) == bool(published):
        here, not_here = ("here", "for rank 0") if shared else ("for rank 0", "here")
        raise ConfigurationError(
            f"{TOKEN_VARIABLE} is set {here} but not {not_here}. Set it to the same text for all processes,"
            " or for none."
        )
    identity = Identity(rank=int(rank), node_rank=int(node_rank), host=name, pid=int(pid))
    return ServerAddress(host=host, port=int(port), token=shared or published, identity=identity)


_session: Session | None = None
"""Lightning makes launchers, strategies and callbacks one by one, which all need the run of their process."""


def session_of_process() -> Session:
    """The session of this process; begun at the first call, and anew in a forked process."""
    global _session
    if _session is None or _session.is_inherited:
        _session = Session(_session)
    return _session


def end_job(error: BaseException | None) -> BaseException | None:
    """Ends the run of a job of Hydra that has raised `error` here, if it has one and this process started it.

    Returns what the job fails with; None if it succeeded on all ranks.
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
    return failure.to_error() if error is None and failure is not None else error


def _tell_last_failure(failure: FailureRecord) -> None:
    """The failure that ended the last job of this process is the last thing on the screen."""
    show_report(failure)


def _disown() -> None:
    if _session is not None:
        _session.disown()


os.register_at_fork(after_in_child=_disown)


# ---------------------------------------------------------------------- joining a run


def join_run(
    session: Session,
    backend: str,
    *,
    environment: ClusterEnvironment,
    num_nodes: int,
    timeout: timedelta | None,
    device: torch.device,
    settings: ReconcileSettings,
    init_method: str | None = None,
    given_store: Any | None = None,
) -> Any:
    """Connects this process to the others of its run and returns the default process group.

    All ranks call it; it returns once all have. What exists already is used again.

    Args:
        session: of this process.
        backend: 'gloo', 'nccl' ...
        environment: tells rank, world size and the address of the first node.
        num_nodes: nodes of the run.
        timeout: of the rendezvous and of collectives; None for torch's own.
        device: this process's.
        settings: times of reconciliation.
        init_method: where the ranks meet; None for the launcher's store, else `env://`.
        given_store: a store of the user's that all ranks reach, instead.

    Raises:
        ConfigurationError: a group of another size exists already, or there is no such backend.
        RendezvousError: the others cannot be reached.
        PeerFailure: one of them failed meanwhile.
    """
    rank, world_size = environment.global_rank(), environment.world_size()
    has_launcher = session.rendezvous.where is not None
    group = existing_group(1 if session.is_joining else world_size)
    if group is not None:
        _name_interface(session, environment, init_method, backend)
        if session.store is not None and not has_launcher and world_size > 1:
            with waiting(session, environment, lambda: FIRST_JOB):
                share_job(session.store, rank=rank)
        return group
    if session.rendezvous.where is not None:
        jobs().open_store = partial(run_store, session.rendezvous.where)
    is_elsewhere = given_store is not None or _is_elsewhere(init_method, has_launcher)

    def meet_elsewhere() -> Any:
        if given_store is not None:
            return dist.PrefixStore("lightning_ddp", given_store)
        assert init_method is not None  # or it would not be elsewhere
        with waiting(session, environment, lambda: f"the others at {init_method}"), remember_connections():
            return meet(init_method, rank, world_size, timeout)

    # the control channel is found through the launcher's store, so that a failure to meet ends all ranks
    if session.num_failed:
        # by a connection of its own: the other one was shut down with those of the process group
        store = dist.PrefixStore(f"after{session.num_failed}", session.store.clone())
    elif has_launcher or not is_elsewhere:
        with waiting(session, environment, lambda: f"the store of the run{_place(environment)}"):
            store = session.rendezvous.find(environment, timeout)
    else:
        store = meet_elsewhere()
    if session.is_joining:
        return _begin_alone(session, backend, store, environment, settings, timeout, device)
    if is_enabled() and (world_size > 1 or launcher_pid() is not None):  # a launcher counts on a lone one too
        identity = Identity(rank=rank, node_rank=environment.node_rank())
        if rank == 0 and (session.num_failed or not has_launcher):
            address = tcp_address(init_method)
            session.open_server(
                environment.main_address if address is None else address[0],
                store,
                identity=identity,
                world_size=world_size,
                num_nodes=num_nodes,
                settings=settings,
            )
        timeout_s = _LONGEST_WAIT_S if timeout is None else timeout.total_seconds()

        def for_whom() -> str:
            watch = session.control.watch
            return (
                f"all {world_size} ranks; connected so far: {None if watch is None else watch.who_is_here()}"
            )

        with waiting(session, environment, for_whom):
            session.connect(store, identity, settings, timeout_s)
        if rank == 0 and has_launcher and settings.recovery is not None:
            note_met(store)
    if has_launcher and is_elsewhere and not session.num_failed:
        store = meet_elsewhere()
    session.store = store
    if not has_launcher and world_size > 1:
        with waiting(session, environment, lambda: FIRST_JOB):
            share_job(store, rank=rank)
    _name_interface(session, environment, init_method, backend)
    if timeout is not None and "nccl" in backend_names(backend) and session.control.watch is not None:
        # this package says first what is late; NCCL's watchdog, which ends the process, is the last resort
        timeout += timedelta(seconds=settings.failure_grace_s)
    with waiting(session, environment, lambda: f"the process group ({backend}) of {world_size} ranks"):
        return join_default_group(
            backend, store, rank=rank, world_size=world_size, timeout=timeout, device=device
        )


def _begin_alone(
    session: Session,
    backend: str,
    store: Any,
    environment: ClusterEnvironment,
    settings: ReconcileSettings,
    timeout: timedelta | None,
    device: torch.device,
) -> Any:
    """In the place of a lost rank: connects to the run, and makes a group of this process alone."""
    identity = Identity(rank=environment.global_rank(), node_rank=environment.node_rank())
    try:
        session.connect(store, identity, settings, _LONGEST_WAIT_S)
    except RendezvousError as error:
        if identity.node_rank == 0 and isinstance(error.__cause__, ConnectionRefusedError):
            session.control.leave_late()  # the server has been on this host, and was closed at the end
        raise
    session.store = store
    _name_interface(session, environment, None, backend)
    return join_default_group(backend, dist.HashStore(), rank=0, world_size=1, timeout=timeout, device=device)


@contextmanager
def waiting(
    session: Session, environment: ClusterEnvironment, what: Callable[[], str], rank: int | None = None
) -> Generator[None, None, None]:
    """In here this process waits for others; one process a node says so, and signals end it at once.

    Args:
        session, environment: of this process.
        what: what it waits for, for people; any thread.
        rank: where the environment does not know it yet.
    """
    rank = environment.global_rank() if rank is None else rank

    def end(message: str) -> None:
        session.children.kill()
        session.control.fail(message)

    with ExitStack() as stack:
        if environment.local_rank() == 0:
            stack.enter_context(tell_long_wait(rank, what))
        stack.enter_context(WaitSignals(describe_rank(rank), what, end))
        yield


def _place(environment: ClusterEnvironment) -> str:
    return f" at {environment.main_address}:{environment.main_port} (rank 0 opens it)"


def _name_interface(
    session: Session, environment: ClusterEnvironment, init_method: str | None, backend: str
) -> None:
    """Has the groups that are made in this run use the interface that leads to the first node."""
    if environment.world_size() > 1:
        address = tcp_address(init_method)
        main_address = environment.main_address if address is None else address[0]
        session.control.set_while_running(choose_interface(main_address, backend))


def _is_elsewhere(init_method: str | None, has_launcher: bool) -> bool:
    """Whether the ranks meet neither in the launcher's store nor at `env://`."""
    if init_method is None or init_method.startswith("env://"):
        return False
    return not (has_launcher and tcp_address(init_method) is not None)  # the launcher listens there


# ---------------------------------------------------------------------- the end of a step


class StepStop:
    """Stops the loops of one Trainer for a signal, at the step boundary that all ranks have agreed on.

    Lightning broadcasts the signal inside of its handler and asks for it with a collective in every step.
    Both block where no Python runs, and a signal to another rank than 0 makes the first one wait for ever.
    Here the loops look at the agreement of the control channel, which costs a lock and a counter.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._trainer: Trainer | None = None
        self._requeue: Any = None

    def attach(self, trainer: Trainer) -> None:
        """Takes over from Lightning, where there is a control channel, before it registers its handlers."""
        self._session.control.follow(trainer)  # another launcher may have begun its run
        if self._session.control.watch is None or self._trainer is trainer:
            return
        self._trainer = trainer
        self._requeue = replace_signal_handlers(
            trainer, on_sigterm=_leave_to_stop_signals, on_requeue=self._ask_to_stop
        )
        # where the run goes on without ranks, the loop is wrapped, and calls it also on a rank alone
        at_step_boundaries(trainer, self.check if self._session.control.calls is None else lambda: None)

    def check(self) -> bool:
        """A step boundary; returns whether all ranks meet here, as others join or leave.

        All ranks pass the same ones; does not communicate.

        Raises:
            SIGTERMException: all ranks stop here.
            PeerFailure: one has failed.
        """
        ours = self._session.control
        if self._trainer is None or (passage := ours.reached_step_boundary()) is Passage.GO:
            return False
        if passage is Passage.MEET:
            return True
        note_sigterm(self._trainer)
        if (wish := ours.stops_for) is not None and wish.is_requeue:
            # all ranks save a checkpoint together, and rank 0 asks SLURM to start the job again
            self._requeue(wish.signal, None)
        raise sigterm_exception(self._trainer)

    def check_evaluation(self) -> None:
        """A step of an evaluation: a boundary unless it belongs to a fit, which stops between its own."""
        self._session.control.interrupt.activity.advance()
        if self._trainer is not None and not is_fitting(self._trainer):
            self.check()

    def _ask_to_stop(self, number: int, frame: types.FrameType | None) -> None:
        """Handler of the signal by which SLURM announces the end of a job."""
        watch = self._session.control.watch
        if watch is not None:
            watch.ask(Wish(WishKind.STOP, int(number), is_requeue=True))


def _leave_to_stop_signals(number: int, frame: types.FrameType | None) -> None:
    """In the place of Lightning's handler: `StopSignals` has its own, which Lightning calls next."""

"""The job of this process, over several Trainers of a script: store, children, supervision, process group.

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
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import lightning_ddp.shm.worker  # noqa: F401 (its exit handler has to run after that of this module)
from lightning_ddp._lightning import ClusterEnvironment
from lightning_ddp._torch import default_store, known_groups, never_destroy
from lightning_ddp.comm.teardown import destroy_groups, remember_connections
from lightning_ddp.errors import ConfigurationError, RendezvousError
from lightning_ddp.hydra_jobs.jobs import jobs, restore, share_job
from lightning_ddp.launch.child_process import launcher_pid
from lightning_ddp.launch.children import Children
from lightning_ddp.launch.failure_handler import FailureHandler, is_enabled
from lightning_ddp.launch.process_end import exit_now, show_report, waiting
from lightning_ddp.launch.rendezvous import (
    JOIN_VARIABLE,
    TOKEN_VARIABLE,
    Rendezvous,
    choose_interface,
    existing_group,
    is_loopback,
    join_default_group,
    meet,
    note_met,
    run_store,
    tcp_address,
    uses_nccl,
)
from lightning_ddp.launch.zygote import Launch, SupervisorLink
from lightning_ddp.supervise.client import ServerAddress
from lightning_ddp.supervise.failure_detection import ECHO_WAIT_S, EXIT_WAIT_S
from lightning_ddp.supervise.failure_record import FailureRecord, Identity, traceback_of
from lightning_ddp.supervise.job_control import LocalProcesses
from lightning_ddp.supervise.server import ControlServer
from lightning_ddp.supervise.settings import SupervisionSettings

FIRST_JOB = "the job that the first node has composed"

_STORE_KEY = "lightning_ddp/control_server"
_LOOK_EVERY_S = 0.1
_EXIT_GRACE_S = 60.0
_LONGEST_WAIT_S = 1800.0


class JobContext:
    """A process's part in its job: store, child processes, supervision. For use in the main thread.

    `before` is the previous context: of a job that ended, or of the process that forked this one.
    """

    def __init__(self, before: JobContext | None = None) -> None:
        self._pid = os.getpid()
        self.rendezvous: Rendezvous = Rendezvous()
        if before is not None and not before.is_inherited:
            self.rendezvous = before.rendezvous
        self.store: Any = None  # store from which this process made its process group
        self.num_groups = 0  # of default groups since the start or a failure: the script may destroy them
        self.children: Children = Children(self._child_ended, lambda: self.control.has_met)
        self.control: FailureHandler = FailureHandler(self.children)  # supervision of the present generation
        self.num_failed = 0  # number of generations that failed with an exception which the script caught
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
        """Close the job's sockets that a forked process has inherited, and never destroy its groups."""
        self.control.disown()
        never_destroy([self, *self.control.interrupt.activity.groups(), *known_groups().items()])

    # ------------------------------------------------------------------ begin

    def begin_launch(self, launch: Launch, variables: dict[str, str], link: SupervisorLink | None) -> None:
        """Set environment `variables`; let this process, or a supervisor at `link`, start the other ranks."""
        self.children.remote = link
        for name in (*variables, "OMP_NUM_THREADS"):  # Lightning sets the last one
            self._variables.setdefault(name, os.environ.get(name))
        os.environ.update(variables)
        if link is None:
            self.children.launch = launch
            atexit.register(self._at_exit)
        else:
            link.on_child_ended = self._child_ended

    def _child_ended(self, record: FailureRecord) -> None:
        self.control.child_ended(record)

    def open_server(
        self,
        address: str,
        store: Any,
        *,
        world_size: int,
        num_nodes: int,
        settings: SupervisionSettings,
        processes: LocalProcesses | None = None,
    ) -> ControlServer | None:
        """Open the control server at `address`, publish it in `store`; return it, None if in the supervisor.

        A process that is no rank gives the `processes` of its node; in rank 0 they are its children.
        """
        shared = self.rendezvous.token
        options: dict[str, Any] = {
            "token": shared or secrets.token_hex(16),
            "world_size": world_size,
            "settings": settings,
            # /etc/hosts often maps a node's own name to the loopback, where the others could not reach it
            "any_interface": num_nodes > 1 and is_loopback(address),
        }
        who = Identity(rank=0 if processes is None else -1, node_rank=0)
        link = self.children.remote
        if link is not None:
            port = link.ask("open_server", address, **options)
            who = Identity(rank=-1, node_rank=0, pid=link.supervisor)
        else:
            self.control.server = ControlServer(address, processes=processes or self.children, **options)
            port = self.control.server.port
        published = "" if shared else options["token"]
        period_s = settings.report_period_s(world_size)
        entry = (address, port, published, who.rank, who.node_rank, who.host, who.pid, period_s)
        store.set(_STORE_KEY, "\n".join(map(str, entry)))
        return self.control.server

    def find_server(self, store: Any, timeout_s: float) -> ServerAddress:
        """Wait until rank 0 has published the address of the control server, then return it."""
        deadline = time.monotonic() + timeout_s
        while self.num_failed and not store.check([_STORE_KEY]):  # rank 0 may have left
            self.control.interrupt.check()
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"rank 0 has not begun another run within {timeout_s:g} s, as this rank did after a"
                    " failure that the script has caught. All ranks must continue alike."
                )
            time.sleep(_LOOK_EVERY_S)
        return server_in(store, self.rendezvous.token)

    def connect(
        self, store: Any, identity: Identity, settings: SupervisionSettings, timeout_s: float
    ) -> None:
        """Connect to the control server unless connected; wait until all ranks have connected."""
        if self.control.watch is None:
            who = replace(identity, start=self._start if self.is_joining else None)
            self.control.connect(self.find_server(store, timeout_s), who, settings)
        assert self.control.watch is not None
        self.control.watch.wait_for_all(timeout_s, self.control.interrupt.check)
        self.control.interrupt.check()

    def begin_anew(self) -> None:
        """Destroy groups and restart supervision if the script caught a failure; all ranks connect again."""
        if not self.control.may_begin_anew():
            return
        self.control.close()
        destroy_groups()
        self.control.restore_handlers()
        self.control = FailureHandler(self.children)
        self.num_failed += 1
        self.num_groups = 0
        ended = self.children.first_failure()
        if ended is not None:  # a child that will not come
            self.control.child_ended(ended)

    # ------------------------------------------------------------------ end

    def end(self, error: BaseException | None) -> FailureRecord | None:
        """End the job, not the process: report `error`, wait for children; return the job's failure."""
        failure = self._leave(error)
        atexit.unregister(self._at_exit)
        if self._is_left_behind:
            return None
        destroy_groups()
        jobs().publish_to(None)
        self.store = None
        self.rendezvous.close()
        self.control.restore_handlers()
        restore(self._variables)
        torch.set_num_threads(self._num_threads)
        return failure

    @property
    def _is_left_behind(self) -> bool:
        """True in a rank 0 that left the run on request, while the supervisor serves the other ranks."""
        return self.control.has_left and self.children.remote is not None

    def _leave(self, error: BaseException | None) -> FailureRecord | None:
        """Report `error`, wait for children to exit, disconnect; return the job's first failure, or None."""
        ours = self.control
        if self._is_left_behind:
            return None
        if error is not None and not ours.has_failed:  # outside of a Trainer: nobody has heard of it
            ours.fail(traceback_of(error), traceback.format_exception_only(error)[-1].strip())
        has_failed = error is not None or ours.has_failed
        self.children.are_ending = True
        knows = ours.server or (ours.calls.state if ours.calls is not None else None)
        if knows is not None:
            self.children.end_new(knows.goes_on_without)
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
            failure = self.children.remote.ask("finish") or failure
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


# ---------------------------------------------------------------------- joining


@dataclass(frozen=True, kw_only=True)
class Joining:
    """Options with which this process joins its job: backend, environment, timeout, store ..."""

    context: JobContext
    backend: str
    """'gloo', 'nccl' ..."""
    environment: ClusterEnvironment
    num_nodes: int
    timeout: timedelta | None
    """Timeout of the rendezvous and of collectives; None for torch's own."""
    device: torch.device
    settings: SupervisionSettings
    init_method: str | None
    """URL at which ranks meet; None for the launcher's store, else `env://`."""
    given_store: Any | None
    """Store of the user that all ranks reach, instead."""

    def group(self) -> Any:
        """Return the default process group; create it, by joining the job, if there is none. Collective."""
        context = self.context
        group = existing_group(1 if context.is_joining else self._world_size)
        if group is None and context.num_groups > 0 and self._world_size > 1:
            # the script has destroyed the group, while store and control channel are still there
            context.control.interrupt.check()
            context.control.interrupt.activity.forget_groups()
        elif group is None:
            if context.rendezvous.where is not None:
                jobs().open_store = partial(run_store, context.rendezvous.where)
            # the control channel is found through the launcher's store: a failure to meet ends all ranks
            store = self._find_store()
            self._connect(store)
            if self._has_launcher and self._is_elsewhere and not (context.num_failed or context.is_joining):
                store = self._meet_elsewhere()
            context.store = store
        elif context.store is None and self._world_size > 1:  # something else, as Ray, has made the group
            store = dist.PrefixStore("lightning_ddp", default_store())
            self._connect(store)
            context.store, context.num_groups = store, 1
        context.control.check_settings(self.settings)
        if context.store is not None and not self._has_launcher and self._world_size > 1:
            with waiting(self.environment, lambda: FIRST_JOB):
                share_job(context.store, rank=self._rank)
        if self._world_size > 1:
            context.control.set_while_running(choose_interface(self._main_address, self.backend))
        group = self._make_group() if group is None else group
        context.control.handle_stop_signals()
        return group

    def _find_store(self) -> Any:
        context, environment = self.context, self.environment
        if context.num_failed:
            # by a connection of its own: the other one was shut down with those of the process group
            return dist.PrefixStore(f"after{context.num_failed}", context.store.clone())
        if self._is_elsewhere and not self._has_launcher:
            return self._meet_elsewhere()
        where = f"{environment.main_address}:{environment.main_port}"
        with waiting(self.environment, lambda: f"the store of the run at {where} (rank 0 opens it)"):
            return context.rendezvous.find(environment, self.timeout)

    def _meet_elsewhere(self) -> Any:
        if self.given_store is not None:
            return dist.PrefixStore("lightning_ddp", self.given_store)
        assert self.init_method is not None  # or it would not be elsewhere
        with waiting(self.environment, lambda: f"the others at {self.init_method}"), remember_connections():
            return meet(self.init_method, self._rank, self._world_size, self.timeout)

    @property
    def _is_elsewhere(self) -> bool:
        """True if ranks meet in a user's store or at a URL, not in the launcher's store or at `env://`."""
        if self.given_store is not None:
            return True
        if self.init_method is None or self.init_method.startswith("env://"):
            return False
        return not (self._has_launcher and tcp_address(self.init_method))  # the launcher listens there

    def _connect(self, store: Any) -> None:
        context, settings, rank = self.context, self.settings, self._rank
        identity = Identity(rank=rank, node_rank=self.environment.node_rank())
        if context.is_joining:
            try:
                context.connect(store, identity, settings, _LONGEST_WAIT_S)
            except RendezvousError as error:
                context.control.check_whether_late()
                if identity.node_rank == 0 and isinstance(error.__cause__, ConnectionRefusedError):
                    context.control.leave_late()  # the server was on this host, and was closed at the end
                raise
            return
        # a launcher counts on a lone rank too
        if is_enabled() and (self._world_size > 1 or launcher_pid() is not None):
            if rank == 0 and (context.num_failed or not self._has_launcher):
                context.open_server(
                    self._main_address,
                    store,
                    world_size=self._world_size,
                    num_nodes=self.num_nodes,
                    settings=settings,
                )
            timeout_s = _LONGEST_WAIT_S if self.timeout is None else self.timeout.total_seconds()

            def describe() -> str:
                watch = context.control.watch
                connected = None if watch is None else watch.who_is_here()
                return f"all {self._world_size} ranks; connected so far: {connected}"

            with waiting(self.environment, describe):
                context.connect(store, identity, settings, timeout_s)
            if rank == 0 and self._has_launcher and settings.recovery is not None:
                note_met(store)

    def _make_group(self) -> Any:
        """Create the default process group; in a replacement of a lost rank, of this process alone."""
        rank, world_size, store, timeout = self._rank, self._world_size, self.context.store, self.timeout
        if self.context.is_joining:
            rank, world_size, store = 0, 1, dist.HashStore()
        elif self.context.num_groups > 0:  # the store has the addresses of the destroyed group
            store = dist.PrefixStore(f"again{self.context.num_groups}", store)
        is_watched = self.context.control.watch is not None
        if timeout is not None and uses_nccl(self.backend) and is_watched:
            # this package reports first what is late; NCCL's watchdog, which ends the process, is the last
            timeout += timedelta(seconds=self.settings.failure_grace_s)
        with waiting(self.environment, lambda: f"the process group ({self.backend}) of {world_size} ranks"):
            group = join_default_group(
                self.backend, store, rank=rank, world_size=world_size, timeout=timeout, device=self.device
            )
        self.context.num_groups += 1
        return group

    @property
    def _rank(self) -> int:
        return int(self.environment.global_rank())

    @property
    def _world_size(self) -> int:
        return int(self.environment.world_size())

    @property
    def _has_launcher(self) -> bool:
        return self.context.rendezvous.where is not None

    @property
    def _main_address(self) -> str:
        address = tcp_address(self.init_method)
        return self.environment.main_address if address is None else address[0]


# ---------------------------------------------------------------------- a whole script as a run


class ScriptRun:
    """Supervision of a script as one run until its end, for Fabric, which has no loop of its own.

    In a job of Hydra that starts the ranks, the run ends with the job.
    """

    def __init__(self, control: FailureHandler) -> None:
        self._control = control
        self._hook_before = sys.excepthook

    def begin(self) -> None:
        """Start to supervise the script, by an exception hook and an exit handler, unless it has begun."""
        if self._control.end_script is not None:
            return
        self._control.end_script = self.finish
        self._control.enter("the script")
        sys.excepthook = self._raised
        atexit.register(self._end)

    def _raised(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if self._control.end_script is not None:  # else a hook of the script calls this one too late
            error = self._fail(error)
        self._hook_before(type(error), error, trace)

    def _fail(self, error: BaseException) -> BaseException:
        """Report a script's error, unless it failed before; return a peer's failure behind it, or `error`."""
        self._control.alarm.silence()
        failure = None if self._control.is_over else self._control.end(error)
        return error if failure is None else failure.with_traceback(error.__traceback__)

    def finish(self, error: BaseException | None) -> BaseException | None:
        """End this run before the process ends, and return the error that ends it, or None.

        Waits until all ranks have ended it, unless this one has failed. Does nothing at a second call.
        """
        control = self._control
        if control.end_script is None:
            return error
        control.end_script = None
        try:
            atexit.unregister(self._end)
            if sys.excepthook == self._raised:
                sys.excepthook = self._hook_before
            if error is None and not control.is_ending:
                control.leave_together()
            control.alarm.silence()
        except BaseException as raised:  # noqa: BLE001 (the job of Hydra, or the script, fails with it)
            control.alarm.silence()
            error = raised if error is None else error
        error = None if error is None else self._fail(error)
        control.leave()
        return error

    def _end(self) -> None:
        if self._control.is_inherited:
            return
        error = self.finish(None)
        if error is not None:
            traceback.print_exception(error)  # nobody is left to catch it
            if not self._control.is_launcher:  # the launching process still ends the others
                exit_now(1)


# ---------------------------------------------------------------------- the job of this process


def global_seed() -> int:
    """Return the seed that Lightning's `seed_everything` set for all ranks; 0 for none."""
    text = os.environ.get("PL_GLOBAL_SEED", "")
    return int(text) if text.isdecimal() else 0


def server_in(store: Any, shared: str | None) -> ServerAddress:
    """Return the control server's address that is published in a store; `shared` is the user's token."""
    host, port, published, *who, period_s = store.get(_STORE_KEY).decode().split("\n")
    if bool(shared) == bool(published):
        here, not_here = ("here", "for rank 0") if shared else ("for rank 0", "here")
        raise ConfigurationError(
            f"{TOKEN_VARIABLE} is set {here} but not {not_here}. Set it to the same text for all processes,"
            " or for none."
        )
    rank, node_rank, name, pid = who
    identity = Identity(rank=int(rank), node_rank=int(node_rank), host=name, pid=int(pid))
    token = shared or published
    return ServerAddress(host=host, port=int(port), token=token, identity=identity, period_s=float(period_s))


_context: JobContext | None = None
"""Global: Lightning makes launchers, strategies and callbacks one by one, and all need the job."""


def job_context() -> JobContext:
    """Return this process's `JobContext`; create it at the first call, also anew in a forked process."""
    global _context
    if _context is None or _context.is_inherited:
        _context = JobContext(_context)
    return _context


def end_job(error: BaseException | None) -> BaseException | None:
    """End the job that this process launched, if any; return `error`, else the job's failure as an error."""
    global _context
    ended = _context
    if ended is None or ended.is_inherited or not ended.children.are_of_this_process:
        return error
    if ended.control.end_script is not None:  # else the children, which wait for its end, would be killed
        error = ended.control.end_script(error)
    failure = ended.end(error)
    _context, ended = JobContext(ended), None
    atexit.unregister(show_report)
    if failure is not None:
        atexit.register(show_report, failure)
    gc.collect()  # a Trainer is a cycle and holds the group, whose sockets close with its last reference
    return failure.to_error() if error is None and failure is not None else error


os.register_at_fork(after_in_child=lambda: None if _context is None else _context.disown())

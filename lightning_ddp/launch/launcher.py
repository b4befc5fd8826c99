"""Launchers: they start the other processes of a node, run a function in all, and end all if one fails."""

from __future__ import annotations

import copy
import inspect
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.multiprocessing as mp

from lightning_ddp._lightning import (
    ClusterEnvironment,
    LightningEnvironment,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    check_can_start_children,
    check_missing_main_guard,
    end_silently,
    interrupt_trainer,
    process_arguments,
    set_num_threads_if_needed,
    teardown_trainer,
    unshare,
)
from lightning_ddp.errors import ConfigurationError, PeerFailure
from lightning_ddp.hydra_jobs.jobs import jobs, restore
from lightning_ddp.hydra_jobs.shared_job import share_job
from lightning_ddp.launch.child_command import ChildCommand, child_command
from lightning_ddp.launch.control_process import ControlProcess
from lightning_ddp.launch.init_method import tcp_address
from lightning_ddp.launch.init_process_group import FIRST_JOB, waiting
from lightning_ddp.launch.orphan_guard import Guard
from lightning_ddp.launch.parent_death import PARENT_VARIABLE, die_with_parent
from lightning_ddp.launch.prelude import begin_run
from lightning_ddp.launch.reconciliation import is_enabled
from lightning_ddp.launch.rendezvous import JOIN_VARIABLE, Rendezvous, named_port
from lightning_ddp.launch.session import Session, session_of_process
from lightning_ddp.launch.slurm import check_tasks
from lightning_ddp.launch.supervisor import control_process
from lightning_ddp.launch.unpicklable import find_unpicklable
from lightning_ddp.supervise.failure_record import FailureRecord, Identity, Where, describe_exit
from lightning_ddp.supervise.interrupt_main import Alarm
from lightning_ddp.supervise.protocol import Exited, Failed
from lightning_ddp.supervise.server import ControlServer
from lightning_ddp.supervise.settings import ReconcileSettings, ReplaceSettings
from lightning_ddp.supervise.verdict import ECHO_WAIT_S, EXIT_WAIT_S

if TYPE_CHECKING:
    from lightning_ddp._lightning import Trainer

__all__ = ["MultiprocessLauncher", "ScriptLauncher"]

_INTERRUPTED_S = 1.5
_LOOK_AGAIN_S = 0.1


class ScriptLauncher(SubprocessScriptLauncher):
    """Runs this program again in N-1 child processes; this process is local rank 0.

    The children are started at once, with the launcher's store already listening. They never outlive this
    process. A child that dies ends the run: `PeerFailure` is raised here, and the other children are stopped.

    Args:
        cluster_environment: tells ranks and addresses; if it creates processes externally, none are started.
        num_processes: processes of this node.
        num_nodes: nodes of the run.
        settings: times of reconciliation.
        init_method: where the ranks meet; the store listens at the address of a `tcp://` one.
        timeout: how long another node waits for the first one; None for torch's own.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        settings: ReconcileSettings | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._init_method = init_method
        self._settings = settings or ReconcileSettings()
        self._timeout = timeout

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Starts the children unless they run already, then calls `function` here and returns its result.

        Raises:
            PeerFailure: a child died.
            ConfigurationError: several nodes without a port that all know.
            RendezvousError: the port that the user named is taken.
        """
        begin_run()
        session, environment = session_of_process(), self.cluster_environment
        check_tasks(environment, num_devices=self.num_processes, num_nodes=self.num_nodes)
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            self._start_children(session)
        session.control.resume()
        session.begin_anew()
        set_num_threads_if_needed(num_processes=self.num_processes)
        result = session.control.run(trainer, function, *args, **kwargs)
        session.control.rest()
        return result

    def kill(self, signum: int) -> None:
        """Sends a signal to the children, once they had time to end by themselves after Ctrl-C."""
        children = session_of_process().children
        children.join(_INTERRUPTED_S)
        children.send_signal(signum)

    def _start_children(self, session: Session) -> None:
        check_can_start_children(self)
        environment = self.cluster_environment
        node_rank = _node_rank_of(environment, self.num_nodes)
        address, first_rank = environment.main_address, node_rank * self.num_processes
        world_size = self.num_processes * self.num_nodes
        rendezvous = session.rendezvous
        control = control_process() if node_rank == 0 and world_size > 1 else None
        variables = {
            **_host_store(rendezvous, environment, self._init_method, self.num_nodes, node_rank, control),
            "NODE_RANK": str(node_rank),
            "LOCAL_RANK": str(environment.local_rank()),
            "WORLD_SIZE": str(world_size),
        }
        try:
            command = self._command_of(session, first_rank)
        except BaseException:
            rendezvous.close()
            raise
        replaces = isinstance(self._settings.recovery, ReplaceSettings)
        if replaces and node_rank != 0 and not session.is_joining:
            session.is_joining = rendezvous.comes_back()
        tells_all = self._settings.recovery is not None
        session.begin_launch(first_rank, node_rank, variables, tells_all=tells_all)
        if node_rank == 0 and world_size > 1 and is_enabled():  # a lone rank has nobody to hear of
            session.open_server(
                address,
                rendezvous.hosted,
                identity=Identity(rank=0, node_rank=0),
                world_size=world_size,
                num_nodes=self.num_nodes,
                settings=self._settings,
            )
        self._run_children(session, command, first_rank)
        self.procs = session.children.procs  # type: ignore[assignment]  # of a supervisor, perhaps

    def _command_of(self, session: Session, first_rank: int) -> ChildCommand:
        """The command for the children, once the nodes agree on the job that each has composed by itself."""
        environment = self.cluster_environment
        if self.num_nodes > 1 and jobs.config() is not None:
            with waiting(session, environment, lambda: FIRST_JOB, first_rank):
                share_job(session.rendezvous.find(environment, self._timeout), rank=first_rank)
        return child_command()

    def _run_children(self, session: Session, command: ChildCommand, first_rank: int) -> None:
        common = {**os.environ, **session.rendezvous.handed, PARENT_VARIABLE: str(os.getpid())}
        recovery = self._settings.recovery
        num_spares = recovery.spares if isinstance(recovery, ReplaceSettings) else 0
        node_rank = first_rank // self.num_processes
        first = self.num_processes * self.num_nodes + node_rank * num_spares - first_rank
        for local_rank in (*range(1, self.num_processes), *range(first, first + num_spares)):
            session.children.start(
                local_rank,
                command.arguments,
                {**common, "LOCAL_RANK": str(local_rank)},
                command.cwd,
                log=command.log_of(first_rank + local_rank),
                inherited=command.handed,
                is_later=session.is_joining or local_rank >= self.num_processes,
            )
        session.children.guard()
        if command.handed is not None:
            if not isinstance(self._settings.recovery, ReplaceSettings):  # others may be started later
                command.handed.close()
            if first_rank == 0:
                jobs.publish_to(session.rendezvous.hosted.set)


def _node_rank_of(environment: ClusterEnvironment, num_nodes: int) -> int:
    """This node.

    Raises:
        ConfigurationError: there are several, and nothing says which one this is; or it is none of them.
    """
    if isinstance(environment, LightningEnvironment):
        name = "NODE_RANK" if "NODE_RANK" in os.environ else "GROUP_RANK"
        told = os.environ.get(name)
        if num_nodes > 1 and told is None:
            raise ConfigurationError(
                f"num_nodes={num_nodes}, but NODE_RANK is not set: start the program on every node, with"
                f" NODE_RANK=0 on the one that has the address MASTER_ADDR, and 1 to {num_nodes - 1} on the"
                " others"
            )
        if told is not None and not (told.isdecimal() and int(told) < num_nodes):
            raise ConfigurationError(
                f"{name}={told}, but the nodes of Trainer(num_nodes={num_nodes}) are counted from 0 to"
                f" {num_nodes - 1}. Unset {name} if it is left over, or set num_nodes."
            )
    return int(environment.node_rank())


def _host_store(
    rendezvous: Rendezvous,
    environment: ClusterEnvironment,
    init_method: str | None,
    num_nodes: int,
    node_rank: int,
    control: ControlProcess | None = None,
) -> dict[str, str]:
    """Opens the store of the run where the user said; returns torch's variables for it."""
    named = tcp_address(init_method)
    address, port = named or (environment.main_address, _port_of(environment))
    named_by = "MASTER_PORT" if named is None else "init_method"
    return rendezvous.host(
        address, num_nodes=num_nodes, node_rank=node_rank, port=port, named_by=named_by, control=control
    )


def _port_of(environment: ClusterEnvironment) -> int | None:
    """The port that the user or the cluster named; None where Lightning would draw one at random."""
    if isinstance(environment, LightningEnvironment) and "STANDALONE_PORT" not in os.environ:
        return named_port()
    return int(environment.main_port)


class MultiprocessLauncher(MultiProcessingLauncher):
    """Runs a function in N processes made by spawn, fork or forkserver; this process only waits for them.

    Args:
        strategy: the strategy whose processes they are.
        start_method: how they are made.
        settings: times of reconciliation.
        init_method: as for `ScriptLauncher`.
    """

    def __init__(
        self,
        strategy: Any,
        start_method: Literal["spawn", "fork", "forkserver"] = "spawn",
        settings: ReconcileSettings | None = None,
        init_method: str | None = None,
    ) -> None:
        self._server: ControlServer | None = None
        self._guard: Guard | None = None
        self._arguments: list[Any] = []
        """What the processes were started with, for others in their places."""
        self._is_joining = False
        self._vacant: list[int] = []
        """Places in which a process is to be started."""
        super().__init__(strategy, start_method=start_method)
        self._made_by = start_method
        self._owner = strategy
        self._init_method = init_method
        self._settings = settings or ReconcileSettings()
        self._all_forked: Barrier | None = None
        self._output: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """What is sent to the processes."""
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_processes": [], "_server": None, "_guard": None, "_arguments": []}

    @property
    def procs(self) -> list[Any]:
        """The processes."""
        return self._processes

    @procs.setter
    def procs(self, processes: list[Any]) -> None:
        server = self._server
        if server is not None and self._settings.recovery is not None:
            places = range(self._first_rank, self._first_rank + len(processes))
            # in the list of torch, which ends all when one of them has ended with an exit code
            processes[:] = [
                _MayBeLost(process, place, server) for process, place in zip(processes, places, strict=True)
            ]
            if processes and isinstance(self._settings.recovery, ReplaceSettings):
                self._arguments = process_arguments(sys._getframe(1))
        self._processes = processes
        self._guard = Guard(process.pid for process in processes) if processes else None

    @property
    def _first_rank(self) -> int:
        return _node_rank_of(self._owner.cluster_environment, self._owner.num_nodes) * int(
            self._owner.num_processes
        )

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Runs `function` in all processes and returns what rank 0 returned, the lowest that is left.

        Raises:
            PeerFailure: a process raised or died; with its traceback where there is one. It is torch's
                `ProcessRaisedException` or `ProcessExitedException` as well.
            ConfigurationError: several nodes without a port that all know, or what is to be sent to the
                processes does not pickle.
            RendezvousError: the port that the user named is taken.
            RuntimeError: the script has no main guard, so that each new process would run it anew.
        """
        if self._made_by != "fork":
            check_missing_main_guard()
        strategy = self._owner
        environment = strategy.cluster_environment
        assert environment is not None  # the Trainer has set it before it launches
        self.procs = []
        if self._made_by == "fork":
            # The store looks up the address of each rank that connects, and holds a lock of the C library
            # while it does: a process forked then could never take that lock.
            self._all_forked = mp.get_context("fork").Barrier(strategy.num_processes)
        node_rank = _node_rank_of(environment, strategy.num_nodes)
        session = session_of_process()
        rendezvous = session.rendezvous
        variables = _host_store(rendezvous, environment, self._init_method, strategy.num_nodes, node_rank)
        variables |= rendezvous.handed
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        server = self._open_server(session, node_rank) if is_enabled() and node_rank == 0 else None
        self._server = server
        tells_all = self._settings.recovery is not None
        ending = None
        if server is not None and (tells_all or hasattr(os, "waitid")):
            ending = _Ends(self, server, node_rank * strategy.num_processes, tells_all=tells_all)
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            _remove_error_files(error)
            first_rank = node_rank * strategy.num_processes
            failure = _process_failure(error, first_rank)
            known = server.wait_for_verdict(ECHO_WAIT_S + EXIT_WAIT_S) if server is not None else None
            if known is not None:
                failure = self._with_exit(known, first_rank)
            raise _like_torch(failure, error, failure.rank - first_rank) from error
        except BaseException as error:
            if server is not None:
                launcher = Identity(rank=-1, node_rank=node_rank)
                server.tell(Failed(FailureRecord.of_exception(error, launcher, Where())))
                server.wait_for_verdict(EXIT_WAIT_S)
            self._explain_unpicklable(error, trainer, function, args, kwargs)
            raise
        finally:
            if ending is not None:
                ending.close()
            self._end_new()
            self._arguments = []
            if self._guard is not None:
                self._guard.end()
            self._server = self._guard = None
            if server is not None:
                server.close()
            rendezvous.close()
            restore(before)

    def _explain_unpicklable(
        self,
        error: BaseException,
        trainer: Trainer | None,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> None:
        """Raises an error that says what cannot be sent to new processes, if that is what has failed."""
        if self.procs or self._made_by == "fork" or not isinstance(error, Exception):
            return
        named = inspect.signature(function).bind_partial(*args, **kwargs).arguments
        found = find_unpicklable({**named, "trainer": trainer})
        if found is not None:
            raise ConfigurationError(
                f"start_method={self._made_by!r} sends the model, the Trainer and all that they hold to"
                f" new processes, and this does not pickle: {found}. Make it in setup(), which runs in those"
                ' processes, or use a function or class of a module; or let strategy="custom_ddp" run the'
                ' script again, or "custom_ddp_fork" copy the process, which send nothing.'
            ) from error

    def _open_server(self, session: Session, node_rank: int) -> ControlServer:
        strategy = self._owner
        assert strategy.cluster_environment is not None
        server = session.open_server(
            strategy.cluster_environment.main_address,
            session.rendezvous.hosted,
            identity=Identity(rank=-1, node_rank=node_rank),
            world_size=strategy.num_processes * strategy.num_nodes,
            num_nodes=strategy.num_nodes,
            settings=self._settings,
            on_failure=self._wake,
            on_condemned=self._kill_one,
            on_vacant=self._vacant.append,
        )
        assert isinstance(server, ControlServer)  # only scripts have it in a control process
        return server

    def _with_exit(self, record: FailureRecord, first_rank: int) -> PeerFailure:
        """The failure with the exit code of its process, which all have by now."""
        local_rank = record.rank - first_rank
        code = self.procs[local_rank].exitcode if 0 <= local_rank < len(self.procs) else None
        if code:
            record = record.with_exit(code, f"the process {describe_exit(code)}")
        return record.to_error(is_rank=False)

    def _wake(self, record: FailureRecord) -> None:
        """Continues processes that are stopped, so that they hear of the failure."""
        for process in self.procs:
            if process.is_alive() and process.pid is not None:
                with suppress(ProcessLookupError):  # the main thread has just waited for it
                    os.kill(process.pid, signal.SIGCONT)

    def _kill_one(self, identity: Identity) -> None:
        """Ends a process that the others go on without."""
        for process in self.procs:
            if process.pid == identity.pid and process.is_alive():
                process.kill()

    def start_new(self) -> None:
        """Starts processes in the places of lost ones. Called in a thread that lives as long as they may."""
        while self._vacant:
            place = self._vacant.pop(0)
            local_rank = place - self._first_rank
            launcher = copy.copy(self)
            launcher._is_joining = True
            context: Any = mp.get_context(self._made_by)
            process = context.Process(target=launcher._wrapping_function, args=(local_rank, *self._arguments))
            try:
                process.start()
            except OSError:  # there are too many now
                self._vacant.append(place)
                return
            self._processes[local_rank].start_again(process)

    def _end_new(self) -> None:
        """All others have ended: those that have not joined come too late."""
        for process in self._processes:
            if isinstance(process, _MayBeLost) and process.is_again:
                if self._server is not None and self._server.goes_on_without(process.place):
                    process.kill()
                process.join()

    def _wrapping_function(
        self,
        process_idx: int,
        trainer: Trainer | None,
        function: Any,
        args: Any,
        kwargs: Any,
        results: Any,
        *rest: Any,
    ) -> None:
        die_with_parent(os.getppid())
        if self._is_joining:  # until there is a session
            os.environ[JOIN_VARIABLE] = "1"
        if self._all_forked is not None:
            self._all_forked.wait()
        wrapped = _Unwinding(function, trainer)
        if self._made_by != "fork":  # Lightning does not for all of them
            args, kwargs = unshare((args, kwargs))
        super()._wrapping_function(process_idx, trainer, wrapped, args, kwargs, results, *rest)
        if process_idx != 0 and self._output is not None:
            results.put(self._output)  # in the place of a process that is lost
        session_of_process().control.close()

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        self._output = super()._collect_rank_zero_results(trainer, results)
        return self._output


class _MayBeLost:
    """A process whose end is none of the run where the others go on without it: its exit code is 0 then.

    Args:
        process: of `multiprocessing`.
        place: the rank that it has in the beginning.
        server: knows whether the others go on.
    """

    def __init__(self, process: Any, place: int, server: ControlServer) -> None:
        self._process, self.place, self._server = process, place, server
        self.is_again = False
        """Whether it is another one, in the place of the one that torch has started and waits for."""
        # two threads that wait for a process take its exit code from each other
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end."""
        with self._lock:
            self._process.join(timeout)

    def start_again(self, process: Any) -> None:
        """Another one has been started in its place."""
        with self._lock:
            self._process, self.is_again = process, True

    @property
    def own_code(self) -> int | None:
        """Its exit code; None while it runs."""
        with self._lock:
            code: int | None = self._process.exitcode
        return code

    @property
    def exitcode(self) -> int | None:
        """As torch is to see it. Waits for the word of the server if the process has failed."""
        code = self.own_code
        while code and not self.is_again and not self._server.goes_on_without(self.place):
            if self._server.wait_for_verdict(_LOOK_AGAIN_S) is not None:
                return code
        return 0 if self.is_again else code and 0


class _Ends:
    """Looks for processes that end well before all ranks have found each other: the others wait for them.

    One that ends otherwise is noticed by torch, and one that has connected by the server. If all have ended
    well and there is a failure, nobody but this process is left to be told of it.

    Args:
        launcher: whose processes they are.
        server: the control server.
        first_rank: of these processes.
        tells_all: whether the server is told of each that ends, as the others may go on without it.
    """

    def __init__(
        self, launcher: MultiprocessLauncher, server: ControlServer, first_rank: int, *, tells_all: bool
    ) -> None:
        self._launcher, self._server, self._first_rank = launcher, server, first_rank
        self._told: set[int] | None = set() if tells_all else None
        self._alarm = Alarm()
        self._alarm.arm()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="process-ends")
        self._thread.start()

    def _look(self) -> None:
        failure: FailureRecord | None = None
        while not self._is_over.wait(_LOOK_AGAIN_S):
            self._launcher.start_new()
            codes = [_exit_code(process) for process in self._launcher.procs]
            if self._told is not None:
                codes = [self._tell(local_rank, code) for local_rank, code in enumerate(codes)]
            failure = failure or self._server.wait_for_verdict(0.0)
            if 0 in codes and failure is None and not self._server.has_met:
                message = "the process exited with code 0 before it had joined the others"
                failure = self._record(codes.index(0), 0, message)
                self._server.tell(Exited(failure))
            if failure is not None and not any(code != 0 for code in codes):
                self._alarm.ring(failure.to_error())  # the main thread waits for what rank 0 returns

    def _tell(self, local_rank: int, code: int | None) -> int | None:
        """Tells the server of an end; returns the exit code, 0 where the others have gone on."""
        assert self._told is not None
        if code is None or (code == 0 and not self._server.has_met):
            return code
        process = self._launcher.procs[local_rank]
        if process.pid not in self._told:
            self._told.add(process.pid)
            record = self._record(local_rank, code, f"the process {describe_exit(code)}")
            self._server.tell(Exited(record))
        return 0 if process.is_again or self._server.goes_on_without(process.place) else code

    def _record(self, local_rank: int, code: int, message: str) -> FailureRecord:
        rank, pid = self._first_rank + local_rank, self._launcher.procs[local_rank].pid or 0
        identity = Identity(rank=rank, node_rank=0, pid=pid)
        return FailureRecord.of_identity(identity, message, exit_code=code)

    def close(self) -> None:
        """Called when the processes have been joined."""
        self._alarm.release()
        self._is_over.set()
        self._thread.join()


def _exit_code(process: Any) -> int | None:
    """Of a process that has ended, which is left to be waited for; None for one that runs."""
    if isinstance(process, _MayBeLost):
        return process.own_code
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:  # it has been waited for
        code: int | None = process.exitcode
        return code
    return None if ended is None else ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


class _Unwinding:
    """The function of a worker process, and what Lightning does about exceptions in the main one only."""

    def __init__(self, function: Callable[..., Any], trainer: Trainer | None) -> None:
        self._function, self._trainer = function, trainer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return session_of_process().control.run(self._trainer, self._function, *args, **kwargs)
        except BaseException as error:
            if self._trainer is not None and session_of_process().control.has_left:
                end_silently(self._trainer)
            if self._trainer is not None:
                interrupt_trainer(self._trainer, error)
                teardown_trainer(self._trainer)
            if isinstance(error, SystemExit) and not error.code:
                raise SystemExit(1) from error  # with 0 the launching process would wait for the result
            raise


def _remove_error_files(error: mp.ProcessRaisedException | mp.ProcessExitedException) -> None:
    """Removes the files in which torch has the exceptions of processes, all of which have ended by now."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        joined = frame.f_locals.get("self")
        if isinstance(joined, mp.ProcessContext):
            for path in joined.error_files:
                Path(path).unlink(missing_ok=True)


def _like_torch(
    failure: PeerFailure, error: mp.ProcessRaisedException | mp.ProcessExitedException, local_rank: int
) -> PeerFailure:
    """The failure as the exception that `torch.multiprocessing` raises for it, as after `ddp_spawn`."""
    kind = mp.ProcessRaisedException if failure.exception_type is not None else mp.ProcessExitedException
    like: Any = failure.like(type(error) if error.error_index == local_rank else kind)
    like.msg, like.error_index, like.error_pid = str(failure), local_rank, failure.pid
    like.signal_name = getattr(error, "signal_name", None)
    raised: PeerFailure = like
    return raised


def _process_failure(
    error: mp.ProcessRaisedException | mp.ProcessExitedException, first_rank: int
) -> PeerFailure:
    rank = first_rank + int(error.error_index)
    host = socket.gethostname()
    if isinstance(error, mp.ProcessExitedException):
        code = int(error.exit_code)
        message = f"the process {describe_exit(code)}; what it printed stands above"
        return PeerFailure(
            rank=rank, host=host, pid=error.error_pid, exit_code=code, message=message, is_own=None
        )
    lines = str(error).strip().splitlines()
    kind, _, message = lines[-1].partition(": ")
    return PeerFailure(
        rank=rank,
        host=host,
        pid=error.error_pid,
        exit_code=1,
        exception_type=kind,
        message=message,
        traceback="\n".join(lines),
        is_own=None,
    )

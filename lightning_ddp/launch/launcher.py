"""Launchers: they start the other processes of a node, run a function in all, and end all if one fails."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, cast

import torch.multiprocessing as mp

from lightning_ddp._lightning import (
    ClusterEnvironment,
    DDPStrategy,
    LightningEnvironment,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    interrupt_trainer,
    set_num_threads_if_needed,
)
from lightning_ddp.errors import PeerFailure
from lightning_ddp.launch.children import ChildExit, Children, describe_exit
from lightning_ddp.launch.command import child_command
from lightning_ddp.launch.init_method import tcp_address
from lightning_ddp.launch.orphans import PARENT_VARIABLE, die_with_parent
from lightning_ddp.launch.reconciliation import current, is_enabled, open_server
from lightning_ddp.launch.rendezvous import host_store, hosted_store, named_port
from lightning_ddp.reconcile.record import FailureRecord, Identity, Where
from lightning_ddp.reconcile.report import render
from lightning_ddp.reconcile.server import ControlServer
from lightning_ddp.reconcile.settings import ReconcileSettings
from lightning_ddp.reconcile.verdict import ECHO_WAIT_S, EXIT_WAIT_S

if TYPE_CHECKING:
    from lightning_ddp._lightning import Trainer

__all__ = ["MultiprocessLauncher", "ScriptLauncher"]

_STOP_GRACE_S = 5.0
_EXIT_GRACE_S = 60.0
_INTERRUPTED_S = 1.5


class _Brood:
    """The children of this process, which live as long as it does, over several Trainers of a script."""

    def __init__(self, first_rank: int, node_rank: int, settings: ReconcileSettings) -> None:
        self.children = Children(self._on_failure)
        self._first_rank, self._node_rank = first_rank, node_rank
        self._settings = settings
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    def _on_failure(self, child: ChildExit) -> None:
        identity = Identity(
            rank=self._first_rank + child.local_rank, node_rank=self._node_rank, pid=child.pid
        )
        message = f"the process {describe_exit(child.code)}; what it printed stands above"
        current().child_ended(FailureRecord.of_identity(identity, message, exit_code=child.code))

    def wake(self) -> None:
        """Continues children that are stopped, so that they hear of the failure."""
        self.children.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends the children at once."""
        self.children.send_signal(signal.SIGKILL)

    def end(self, grace_s: float) -> None:
        """Waits until the children have ended, and after `grace_s` seconds ends them."""
        if not self.children.join(grace_s):
            self.children.stop(_STOP_GRACE_S)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a process forked from this one inherits the handler, but has no children of ours
        ours = current()
        failed = ours.first_failure() is not None or ours.is_over or ours.interrupt.error is not None
        if not failed and getattr(sys, "last_value", None) is None:
            self.end(_EXIT_GRACE_S)
        else:  # without a control channel nobody has told the children
            self.end(self._settings.failure_grace_s if ours.watch is not None else 0.0)
        if self.children.first_failure() is not None:  # told a moment ago, perhaps
            ours.wait_for_verdict(ECHO_WAIT_S + EXIT_WAIT_S)
        failure = ours.first_failure()
        ours.close()
        if failure is None:
            return
        print(render(failure), file=sys.stderr, end="")
        if getattr(sys, "last_value", None) is None:  # else Python itself exits with 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # an exit handler has no other way to change the exit code


_brood: _Brood | None = None


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
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        settings: ReconcileSettings | None = None,
        init_method: str | None = None,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._init_method = init_method
        self._settings = settings or ReconcileSettings()

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Starts the children unless they run already, then calls `function` here and returns its result.

        Raises:
            PeerFailure: a child died.
            ConfigurationError: several nodes without a port that all know.
            RendezvousError: the port that the user named is taken.
        """
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            self._start_children()
        set_num_threads_if_needed(num_processes=self.num_processes)
        return current().run(function, *args, **kwargs)

    def kill(self, signum: int) -> None:
        """Sends a signal to the children, once they had time to end by themselves after Ctrl-C."""
        if _brood is not None:
            _brood.children.join(_INTERRUPTED_S)
            _brood.children.send_signal(signum)

    def _start_children(self) -> None:
        global _brood
        self._check_can_spawn_children()
        environment = self.cluster_environment
        node_rank = environment.node_rank()
        variables = {
            **_host_store(environment, self._init_method, num_nodes=self.num_nodes, node_rank=node_rank),
            "NODE_RANK": str(node_rank),
            "LOCAL_RANK": str(environment.local_rank()),
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
        }
        os.environ.update(variables)
        ours = current()
        _brood = _Brood(node_rank * self.num_processes, node_rank, self._settings)
        ours.on_failure = _brood.wake
        ours.kill_children = _brood.kill
        if node_rank == 0 and is_enabled():
            ours.server = open_server(
                environment.main_address,
                hosted_store(),
                identity=Identity(rank=0, node_rank=0),
                world_size=self.num_processes * self.num_nodes,
                num_nodes=self.num_nodes,
                settings=self._settings,
            )
        for local_rank in range(1, self.num_processes):
            command, cwd = child_command(local_rank)
            env = {**os.environ, "LOCAL_RANK": str(local_rank), PARENT_VARIABLE: str(os.getpid())}
            _brood.children.start(local_rank, command, env, cwd)
        self.procs = _brood.children.procs


def _host_store(
    environment: ClusterEnvironment, init_method: str | None, *, num_nodes: int, node_rank: int
) -> dict[str, str]:
    """Opens the store of the run where the user said; returns the variables that lead to it."""
    named = tcp_address(init_method)
    address, port = named or (environment.main_address, _port_of(environment))
    named_by = "MASTER_PORT" if named is None else "init_method"
    return host_store(address, num_nodes=num_nodes, node_rank=node_rank, port=port, named_by=named_by)


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
        strategy: DDPStrategy,
        start_method: Literal["spawn", "fork", "forkserver"] = "spawn",
        settings: ReconcileSettings | None = None,
        init_method: str | None = None,
    ) -> None:
        super().__init__(strategy, start_method=start_method)
        self._init_method = init_method
        self._settings = settings or ReconcileSettings()

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Runs `function` in all processes and returns what rank 0 returned.

        Raises:
            PeerFailure: a process raised or died; with its traceback where there is one.
            ConfigurationError: several nodes without a port that all know.
            RendezvousError: the port that the user named is taken.
        """
        strategy = cast(DDPStrategy, self._strategy)
        environment = strategy.cluster_environment
        assert environment is not None  # the Trainer has set it before it launches
        node_rank = environment.node_rank()
        variables = _host_store(
            environment, self._init_method, num_nodes=strategy.num_nodes, node_rank=node_rank
        )
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        server = self._open_server(strategy, node_rank) if is_enabled() and node_rank == 0 else None
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            first_rank = node_rank * strategy.num_processes
            failure = _process_failure(error, first_rank)
            known = server.wait_for_verdict(ECHO_WAIT_S + EXIT_WAIT_S) if server is not None else None
            raise (self._with_exit(known, first_rank) if known is not None else failure) from error
        except BaseException as error:
            if server is not None:
                server.tell({**_failure_of_launcher(error).to_message(), "kind": "failed"})
                server.wait_for_verdict(EXIT_WAIT_S)
            raise
        finally:
            if server is not None:
                server.close()
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def _open_server(self, strategy: DDPStrategy, node_rank: int) -> ControlServer:
        assert strategy.cluster_environment is not None
        return open_server(
            strategy.cluster_environment.main_address,
            hosted_store(),
            identity=Identity(rank=-1, node_rank=node_rank),
            world_size=strategy.num_processes * strategy.num_nodes,
            num_nodes=strategy.num_nodes,
            settings=self._settings,
            on_failure=self._wake,
        )

    def _with_exit(self, record: FailureRecord, first_rank: int) -> PeerFailure:
        """The failure with the exit code of its process, which all have by now."""
        local_rank = record.rank - first_rank
        code = self.procs[local_rank].exitcode if 0 <= local_rank < len(self.procs) else None
        if code is not None:
            record = record.with_exit(code, f"the process {describe_exit(code)}")
        return record.to_error()

    def _wake(self, record: FailureRecord) -> None:
        """Continues processes that are stopped, so that they hear of the failure."""
        for process in self.procs:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGCONT)

    def _wrapping_function(
        self, process_idx: int, trainer: Trainer | None, function: Any, *rest: Any
    ) -> None:
        die_with_parent(os.getppid())
        wrapped = _Unwinding(function, trainer)
        super()._wrapping_function(process_idx, trainer, wrapped, *rest)
        current().close()


class _Unwinding:
    """The function of a worker process, and what Lightning does about exceptions in the main one only."""

    def __init__(self, function: Callable[..., Any], trainer: Trainer | None) -> None:
        self._function, self._trainer = function, trainer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return current().run(self._function, *args, **kwargs)
        except BaseException as error:
            if self._trainer is not None:
                interrupt_trainer(self._trainer, error)
                self._trainer._teardown()
            raise


def _failure_of_launcher(error: BaseException) -> FailureRecord:
    return FailureRecord.of_exception(error, Identity(rank=-1, node_rank=0), Where())


def _process_failure(
    error: mp.ProcessRaisedException | mp.ProcessExitedException, first_rank: int
) -> PeerFailure:
    rank = first_rank + int(error.error_index)
    host = socket.gethostname()
    if isinstance(error, mp.ProcessExitedException):
        code = int(error.exit_code)
        message = f"the process {describe_exit(code)}"
        return PeerFailure(rank=rank, host=host, pid=error.error_pid, exit_code=code, message=message)
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
    )

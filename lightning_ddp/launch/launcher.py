"""Launchers: they start the other processes of a node, run a function in all, and end all if one fails."""

from __future__ import annotations

import atexit
import os
import re
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch.multiprocessing as mp

from lightning_ddp._lightning import (
    ClusterEnvironment,
    DDPStrategy,
    LightningEnvironment,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    set_num_threads_if_needed,
)
from lightning_ddp.comm.group import Interrupt
from lightning_ddp.errors import PeerFailure
from lightning_ddp.launch.children import ChildExit, Children, describe_exit
from lightning_ddp.launch.command import child_command
from lightning_ddp.launch.orphans import PARENT_VARIABLE, die_with_parent
from lightning_ddp.launch.rendezvous import host_store, named_port

if TYPE_CHECKING:
    from lightning_ddp._lightning import Trainer

__all__ = ["MultiprocessLauncher", "ScriptLauncher"]

_ATTRIBUTION_S = 5.0
"""A lost connection is the echo of a failure elsewhere: so long we wait to learn of which child."""
_STOP_GRACE_S = 5.0
_EXIT_GRACE_S = 60.0

_LOST_CONNECTION = re.compile(r"connection (closed|reset|refused)|broken pipe|gloo|nccl", re.IGNORECASE)


class _Brood:
    """The children of this process, which live as long as it does, over several Trainers of a script."""

    def __init__(self, first_rank: int) -> None:
        self.interrupt = Interrupt()
        self.children = Children(self._on_failure)
        self._first_rank = first_rank
        self._is_reported = False
        atexit.register(self._at_exit)

    def _failure(self, child: ChildExit) -> PeerFailure:
        return PeerFailure(
            rank=self._first_rank + child.local_rank,
            host=socket.gethostname(),
            pid=child.pid,
            exit_code=child.code,
            message=f"the process {describe_exit(child.code)}; what it printed stands above",
        )

    def _on_failure(self, child: ChildExit) -> None:
        self.interrupt.set(self._failure(child))

    def explain(self, error: BaseException) -> PeerFailure | None:
        """The failure of a child that is behind `error` on this process, if there is one."""
        self._is_reported = True
        if isinstance(error, PeerFailure):
            return None
        is_echo = isinstance(error, RuntimeError) and _LOST_CONNECTION.search(str(error)) is not None
        child = self.children.first_failure(_ATTRIBUTION_S if is_echo else 0.0)
        return self._failure(child) if child is not None else None

    def stop(self) -> None:
        self.children.stop(_STOP_GRACE_S)

    def _at_exit(self) -> None:
        if not self.children.join(0.0) and not self.children.join(_EXIT_GRACE_S):
            self.stop()
        child = self.children.first_failure()
        if child is not None and not self._is_reported:
            print(f"{type(self._failure(child)).__name__}: {self._failure(child)}", file=sys.stderr)
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
    """

    @property
    def interrupt(self) -> Interrupt | None:
        """The failure of a child of this process, for its waits; None where it has no children."""
        return _brood.interrupt if _brood is not None else None

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
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if _brood is None:
                raise
            failure = _brood.explain(error)
            _brood.stop()
            if failure is not None:
                raise failure from error
            raise

    def _start_children(self) -> None:
        global _brood
        self._check_can_spawn_children()
        environment = self.cluster_environment
        node_rank = environment.node_rank()
        variables = {
            **host_store(
                environment.main_address,
                num_nodes=self.num_nodes,
                node_rank=node_rank,
                port=_port_of(environment),
            ),
            "NODE_RANK": str(node_rank),
            "LOCAL_RANK": str(environment.local_rank()),
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
        }
        os.environ.update(variables)
        _brood = _Brood(node_rank * self.num_processes)
        for local_rank in range(1, self.num_processes):
            command, cwd = child_command(local_rank)
            env = {**os.environ, "LOCAL_RANK": str(local_rank), PARENT_VARIABLE: str(os.getpid())}
            _brood.children.start(local_rank, command, env, cwd)
        self.procs = _brood.children.procs


def _port_of(environment: ClusterEnvironment) -> int | None:
    """The port that the user or the cluster named; None where Lightning would draw one at random."""
    if isinstance(environment, LightningEnvironment) and "STANDALONE_PORT" not in os.environ:
        return named_port()
    return int(environment.main_port)


class MultiprocessLauncher(MultiProcessingLauncher):
    """Runs a function in N processes made by spawn, fork or forkserver; this process only waits for them."""

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
        variables = host_store(
            environment.main_address,
            num_nodes=strategy.num_nodes,
            node_rank=node_rank,
            port=_port_of(environment),
        )
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise _process_failure(error, node_rank * strategy.num_processes) from error
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        die_with_parent(os.getppid())
        super()._wrapping_function(*args, **kwargs)


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

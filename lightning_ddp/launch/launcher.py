"""Launcher of scripts: it runs this program again for each other rank, and all end if one fails."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ddp._lightning import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    SubprocessScriptLauncher,
    check_can_start_children,
    set_num_threads_if_needed,
)
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.hydra_jobs.agreement import share_job
from lightning_ddp.hydra_jobs.jobs import jobs
from lightning_ddp.launch.child_process import begin_run, launched_by
from lightning_ddp.launch.failure_handler import is_enabled
from lightning_ddp.launch.job_context import FIRST_JOB, JobContext, end_job, job_context, waiting
from lightning_ddp.launch.rendezvous import open_store
from lightning_ddp.launch.zygote import ChildCommand, Launch, Program, supervisor_link
from lightning_ddp.supervise.settings import ReplaceSettings, SupervisionSettings

if TYPE_CHECKING:
    from lightning_ddp._lightning import Trainer


_INTERRUPTED_S = 1.5


class ScriptLauncher(SubprocessScriptLauncher):
    """Launcher that runs this program again in N-1 child processes; this process is local rank 0.

    Args:
        cluster_environment: tells ranks and addresses; if it creates processes externally, none are started.
        num_processes: processes of this node.
        num_nodes: nodes of the run.
        settings: times of supervision.
        init_method: where the ranks meet; the store listens at the address of a `tcp://` one.
        timeout: how long another node waits for the first one; None for torch's own.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        settings: SupervisionSettings,
        init_method: str | None,
        timeout: timedelta | None,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._init_method = init_method
        self._settings = settings
        self._timeout = timeout

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Start the children unless they run already, then call `function` here and return its result.

        Raises:
            PeerFailure: a child died.
            ConfigurationError: several nodes without a port that all know.
            RendezvousError: the port that the user named is taken.
        """
        begin_run()
        context, environment = job_context(), self.cluster_environment
        _check_tasks(environment, num_devices=self.num_processes, num_nodes=self.num_nodes)
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            self._start_children(context)
        context.begin_anew()
        set_num_threads_if_needed(num_processes=self.num_processes)
        return context.control.run(trainer, function, *args, **kwargs)

    def kill(self, signum: int) -> None:
        """Send a signal to the children, once they had time to end by themselves after Ctrl-C."""
        children = job_context().children
        children.join(_INTERRUPTED_S)
        children.send_signal(signum)

    def _start_children(self, context: JobContext) -> None:
        check_can_start_children(self)
        environment = self.cluster_environment
        node_rank = node_rank_of(environment, self.num_nodes)
        address, first_rank = environment.main_address, node_rank * self.num_processes
        world_size = self.num_processes * self.num_nodes
        rendezvous = context.rendezvous
        link = supervisor_link()
        if world_size == 1 or (link is not None and not link.can_start(os.environ)):
            link = None
        variables = {
            **rendezvous.host(
                environment,
                self._init_method,
                num_nodes=self.num_nodes,
                node_rank=node_rank,
                open_store=open_store if link is None else link.open_store,
            ),
            "NODE_RANK": str(node_rank),
            "LOCAL_RANK": str(environment.local_rank()),
            "WORLD_SIZE": str(world_size),
        }
        try:
            command = self._command_of(context, first_rank)
        except BaseException:
            rendezvous.close()
            raise
        replaces = isinstance(self._settings.recovery, ReplaceSettings)
        if replaces and node_rank != 0 and not context.is_joining:
            context.is_joining = rendezvous.comes_back()
        launch = Launch(
            command=command,
            environment={**os.environ, **variables, **rendezvous.handed},
            first_rank=first_rank,
            node_rank=node_rank,
            num_ranks=self.num_processes,
            world_size=world_size,
            is_later=context.is_joining,
            goes_on=self._settings.recovery is not None,
            grace_s=self._settings.failure_grace_s,
        )
        context.begin_launch(launch, variables, link)
        if node_rank == 0 and world_size > 1 and is_enabled():  # a lone rank has nobody to hear of
            context.open_server(
                address,
                rendezvous.hosted,
                world_size=world_size,
                num_nodes=self.num_nodes,
                settings=self._settings,
            )
        if link is not None:
            launched_by(link.supervisor)
            link.launch(launch)
        else:
            context.children.start_all()
        if command.handed is not None:
            if not replaces:  # others may be started later
                command.handed.close()
            if first_rank == 0:
                jobs().publish_to(context.rendezvous.hosted.set)

    def _command_of(self, context: JobContext, first_rank: int) -> ChildCommand:
        """Return the command of the child processes, once the nodes agree on the job that Hydra composed."""
        environment = self.cluster_environment
        if self.num_nodes > 1 and jobs().config() is not None:
            with waiting(environment, lambda: FIRST_JOB, first_rank):
                share_job(context.rendezvous.find(environment, self._timeout), rank=first_rank)
        return child_command()


def node_rank_of(environment: ClusterEnvironment, num_nodes: int) -> int:
    """Return the rank of this node; raise `ConfigurationError` if none, or no valid one, is given."""
    if isinstance(environment, LightningEnvironment):
        name = "NODE_RANK" if "NODE_RANK" in os.environ else "GROUP_RANK"
        told = os.environ.get(name)
        if num_nodes > 1 and told is None:
            raise ConfigurationError(
                f"num_nodes={num_nodes}, but NODE_RANK is not set. Start the program on every node, with"
                f" NODE_RANK=0 on the node that has the address MASTER_ADDR, and 1 to {num_nodes - 1} on"
                " the others."
            )
        if told is not None and not (told.isdecimal() and int(told) < num_nodes):
            raise ConfigurationError(
                f"{name}={told}, but the nodes of Trainer(num_nodes={num_nodes}) are counted from 0 to"
                f" {num_nodes - 1}. Unset {name} if it is left over, or set num_nodes."
            )
    return int(environment.node_rank())


# ---------------------------------------------------------------------- the command of a child


def child_command() -> ChildCommand:
    """Return the command that runs this program again, with its arguments.

    The child gets what Hydra has composed, and runs in the folder where the user started the program.

    Raises:
        ConfigurationError: there is no file or module to run again; a configuration does not pickle; or the
            output directory cannot be written.
    """
    elsewhere = jobs().program()
    program = Program(*elsewhere, []) if elsewhere else Program(*_program(), sys.argv[1:])
    handover = jobs().handover(end_job)
    if handover is None:
        return ChildCommand(program=program, cwd=os.getcwd())
    logs = _folder_for_logs()
    cwd = jobs().runtime("cwd") or os.getcwd()
    return ChildCommand(program=program, cwd=cwd, handed=handover.to_file(), logs=logs)


def _program() -> tuple[str, str]:
    """Return what this process runs: `("script", path)` or `("module", name)`."""
    import __main__  # at this moment: it is another module while a program is run by runpy

    spec = getattr(__main__, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return "module", spec.name
    # Python has made the path absolute when it started, while the working directory may have changed since
    path = getattr(__main__, "__file__", None) or sys.argv[0]
    if spec is not None:  # a folder with a __main__.py, which was run by its path
        path = os.path.dirname(path)
    if not os.path.exists(path):
        raise ConfigurationError(
            f"this program is neither a file nor a module (sys.argv[0] is {sys.argv[0]!r}), so the child"
            " processes cannot run it again. Use strategy='custom_ddp_spawn', 'custom_ddp_fork' or"
            " 'custom_ddp_notebook', or put the program into a file."
        )
    return "script", os.path.abspath(path)


def _folder_for_logs() -> Path | None:
    folder = jobs().runtime("output_dir")
    if folder is None:
        return None
    logs = Path(folder, "ranks")
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the output of the ranks cannot be written to {logs}: {error}. Check that hydra.run.dir (or"
            " hydra.sweep.dir) is writable."
        ) from error
    return logs


# ---------------------------------------------------------------------- SLURM


def _check_tasks(environment: ClusterEnvironment, *, num_devices: int, num_nodes: int) -> None:
    """Raise `ConfigurationError` if SLURM has not started as many tasks as there are ranks."""
    if not isinstance(environment, SLURMEnvironment):
        return
    num_tasks, nodes = int(os.environ["SLURM_NTASKS"]), os.environ.get("SLURM_NNODES")
    if num_tasks != num_devices * num_nodes:
        per_node, rest = divmod(num_tasks, int(nodes or num_nodes))
        fitting = f"devices={per_node}, num_nodes={int(nodes or num_nodes)}."
        if rest:
            fitting = f"devices and num_nodes whose product is {num_tasks}."
        where = "" if nodes is None else f" on {nodes} node{'s' if nodes != '1' else ''} (SLURM_NNODES)"
        raise ConfigurationError(
            f"SLURM has started {num_tasks} task{'s' if num_tasks != 1 else ''} (SLURM_NTASKS){where}, and"
            f" Trainer(devices={num_devices}, num_nodes={num_nodes}) needs {num_devices * num_nodes}. Either"
            " change the lines of the batch script to\n"
            f"  #SBATCH --nodes={num_nodes}\n"
            f"  #SBATCH --ntasks-per-node={num_devices}\n"
            "and start the program with srun; or change the Trainer to"
            f" {fitting}"
        )
    if num_tasks > 1 and "SLURM_STEP_ID" not in os.environ:
        warnings.warn(
            f"SLURM has allocated {num_tasks} tasks, but SLURM_STEP_ID is not set. If this program was not"
            " started with srun, it is the only process, and waits for the others until it times out. In"
            " the batch script use `srun python ...` instead of `python ...`.",
            stacklevel=2,
        )

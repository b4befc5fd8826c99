"""SLURM: whether its tasks are as many as the Trainer expects, and tasks that launch the ranks of a node."""

from __future__ import annotations

import os
import warnings

from lightning_ddp._lightning import ClusterEnvironment, SLURMEnvironment, lightnings
from lightning_ddp.errors import ConfigurationError

__all__ = ["check_tasks", "launch_on_each_node"]


def launch_on_each_node() -> None:
    """Called in a supervisor. If srun has started one task a node, that is no rank, but launches those there.

    So this process has the variables of a node that was started by hand, and not the one by which Lightning
    takes each task for a rank.
    """
    num_tasks, kind = os.environ.get("SLURM_NTASKS"), lightnings("SLURMEnvironment")
    if num_tasks is None or num_tasks != os.environ.get("SLURM_NNODES") or not kind.detect():
        return
    slurm = kind()
    address, port, node = slurm.main_address, slurm.main_port, slurm.node_rank()
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), NODE_RANK=str(node))
    del os.environ["SLURM_NTASKS"]


def check_tasks(environment: ClusterEnvironment, *, num_devices: int, num_nodes: int) -> None:
    """Compares the number of tasks with the number of ranks. Does not communicate.

    Args:
        environment: only that of SLURM is looked at.
        num_devices: ranks of each node.
        num_nodes: nodes of the run.

    Raises:
        ConfigurationError: they differ; says both, and which line to change.
    """
    if not isinstance(environment, SLURMEnvironment):
        return
    num_tasks, nodes = int(os.environ["SLURM_NTASKS"]), os.environ.get("SLURM_NNODES")
    if num_tasks != num_devices * num_nodes:
        where = "" if nodes is None else f" on {nodes} node{'s' if nodes != '1' else ''} (SLURM_NNODES)"
        raise ConfigurationError(
            f"SLURM has started {num_tasks} task{'s' if num_tasks != 1 else ''} (SLURM_NTASKS){where}, and"
            f" Trainer(devices={num_devices}, num_nodes={num_nodes}) needs {num_devices * num_nodes}. Either"
            " change the lines of the batch script to\n"
            f"  #SBATCH --nodes={num_nodes}\n"
            f"  #SBATCH --ntasks-per-node={num_devices}\n"
            "and start the program with srun; or change the Trainer to"
            f" {_trainer_for(num_tasks, int(nodes or num_nodes))}"
        )
    if num_tasks > 1 and "SLURM_STEP_ID" not in os.environ:
        warnings.warn(
            f"SLURM has allocated {num_tasks} tasks, but SLURM_STEP_ID is not set: if this program was not"
            " started with srun, it is the only one, and waits for the others until it times out. In the"
            " batch script write `srun python ...` in the place of `python ...`.",
            stacklevel=2,
        )


def _trainer_for(num_tasks: int, num_nodes: int) -> str:
    if num_tasks % num_nodes == 0:
        return f"devices={num_tasks // num_nodes}, num_nodes={num_nodes}."
    return f"devices and num_nodes whose product is {num_tasks}."

"""Ports of this machine that are free, and what a process is told of other machines: processors, tasks."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_ddp.shm import hosts


@contextmanager
def host_with(num_processors: int) -> Iterator[None]:
    """In here wrappers are made as on a host of which each rank may use `num_processors`, the same ones."""
    real = hosts._processors
    hosts._processors = lambda: frozenset(range(num_processors))
    try:
        yield
    finally:
        hosts._processors = real


def srun(
    num_nodes: int, tasks_per_node: int, node: int = 0, local_rank: int = 0, nodes: str = "localhost"
) -> dict[str, str]:
    """The variables of a task that SLURM has started."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NNODES": str(num_nodes),
        "SLURM_NODEID": str(node),
        "SLURM_NODELIST": nodes,
        "SLURM_NTASKS": str(num_nodes * tasks_per_node),
        "SLURM_NTASKS_PER_NODE": str(tasks_per_node),
        "SLURM_PROCID": str(tasks_per_node * node + local_rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_STEP_ID": "0",
    }


def free_port() -> int:
    """One below those that the kernel hands out by itself, so that nobody is given it meanwhile."""
    for port in range(20000 + os.getpid() % 10000, 32000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")

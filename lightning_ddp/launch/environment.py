"""Nodes of a job: what the engine that started its processes says of them in environment variables.

Where an engine starts one process per node, this package starts the ranks. `ENGINES` has one row per engine,
from its own source. Processes that an engine starts as ranks (torchrun, srun with one task per device, MPI,
LSF) are Lightning's environments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_ddp._lightning import lightnings
from lightning_ddp.errors import ConfigurationError

_DEFAULT_PORT = "29500"  # port of the store where an engine gives an address only; torchrun's default too
_NODES_VARIABLE = "LIGHTNING_DDP_NODES"
"""Number of nodes, and the variable that said it where that was removed; for processes started from here."""
_OF_SLURM = "SLURM_NNODES"


class Told(NamedTuple):
    """A number, and the name of the environment variable from which it was read."""

    value: int
    variable: str

    def __str__(self) -> str:
        return f"{self.variable}={self.value}"


def _number(env: Mapping[str, str], name: str) -> Told | None:
    """Return the number in an environment variable, or None; raise `ConfigurationError` for other text."""
    text = env.get(name)
    if not text:
        return None
    if not text.isdecimal():
        raise ConfigurationError(f"{name}={text}: expected a number from 0")
    return Told(int(text), name)


def _hosts(env: Mapping[str, str], name: str) -> list[str]:
    """Return the host names that an environment variable lists, one per line or as JSON."""
    text = env.get(name, "").strip()
    return list(json.loads(text)) if text.startswith("[") else text.split()


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Facts in the environment variables of a cluster engine about its nodes; None where they say nothing."""

    num_nodes: Told | None = None
    node_rank: Told | None = None
    num_devices: Told | None = None
    """Processes of each node."""
    address: str | None = None
    """Host of node 0."""
    port: str | None = None


@dataclass(frozen=True)
class Engine:
    """A cluster engine that starts one process per node, and how its environment variables are read."""

    name: str
    marks: tuple[str, ...]
    """Variables that are all set where this engine has started the process."""
    read: Callable[[Mapping[str, str]], Nodes]


def _processes(env: Mapping[str, str]) -> Told | None:
    """Return torchrun's number of processes per node, with its variable; None if not set, or a word."""
    name = "PET_NPROC_PER_NODE"
    return None if env.get(name) in ("auto", "cpu", "gpu") else _number(env, name)


def _of_pet(env: Mapping[str, str]) -> Nodes:
    range_ = env.get("PET_NNODES", "")
    least, _, most = range_.partition(":")
    if most and least != most:
        raise ConfigurationError(
            f"PET_NNODES={range_} is a range, of which torchrun chooses. Set a number of nodes; with"
            " on_failure='replace' training continues while fewer of them are there"
        )
    return Nodes(
        num_nodes=_number({"PET_NNODES": least}, "PET_NNODES"),
        node_rank=_number(env, "PET_NODE_RANK"),
        num_devices=_processes(env),
        address=env.get("PET_MASTER_ADDR"),
        port=env.get("PET_MASTER_PORT"),
    )


def _of_pods(env: Mapping[str, str]) -> Nodes:
    size, per_node = _number(env, "WORLD_SIZE"), _processes(env)
    if size and per_node and per_node.value and not size.value % per_node.value:
        # where nprocPerNode is a number, the operator counts the processes of all pods; its RANK is the pod's
        size = Told(size.value // per_node.value, f"{size.variable} / {per_node.variable}")
    return Nodes(num_nodes=size, node_rank=_number(env, "RANK"))


def _of_skypilot(env: Mapping[str, str]) -> Nodes:
    hosts = _hosts(env, "SKYPILOT_NODE_IPS")
    return Nodes(
        num_nodes=_number(env, "SKYPILOT_NUM_NODES") or Told(len(hosts), "lines of SKYPILOT_NODE_IPS"),
        node_rank=_number(env, "SKYPILOT_NODE_RANK"),
        address=next(iter(hosts), None),
    )


def _of_sagemaker(env: Mapping[str, str]) -> Nodes:
    hosts, here = _hosts(env, "SM_HOSTS"), env.get("SM_CURRENT_HOST")
    if here not in hosts:
        raise ConfigurationError(f"SM_CURRENT_HOST={here} is none of SM_HOSTS={hosts}")
    return Nodes(
        num_nodes=Told(len(hosts), "hosts in SM_HOSTS"),
        node_rank=Told(hosts.index(here), "place of SM_CURRENT_HOST in SM_HOSTS"),
        address=hosts[0],
    )


def _of_hand(env: Mapping[str, str]) -> Nodes:
    number, _, variable = env.get(_NODES_VARIABLE, "").partition(" ")
    return Nodes(
        num_nodes=Told(int(number), variable) if number else None,
        node_rank=_number(env, "NODE_RANK"),
        address=env.get("MASTER_ADDR"),
        port=env.get("MASTER_PORT"),
    )


_OF_PODS = {"RANK", "WORLD_SIZE"}
ENGINES = (
    Engine("by hand", (), _of_hand),
    Engine("Kubeflow TrainJob", ("PET_NNODES",), _of_pet),
    Engine("Kubeflow PyTorchJob or Vertex AI", tuple(_OF_PODS), _of_pods),
    Engine("SkyPilot", ("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"), _of_skypilot),
    Engine("SageMaker", ("SM_HOSTS", "SM_CURRENT_HOST"), _of_sagemaker),
)
"""Rows of the table, those whose address is preferred first."""


def nodes_of(env: Mapping[str, str], num_nodes: int = 1) -> tuple[Nodes, list[str]]:
    """Return what environment variables of all cluster engines say of the nodes, and the engines found.

    An index alone does not say that there are several nodes, as Kubernetes numbers the pods of a sweep, too:
    it counts where `num_nodes` of the script does. Raises `ConfigurationError` for a contradiction.
    """
    # with LOCAL_RANK, RANK and WORLD_SIZE count ranks; without it, pods
    shown = env.keys() - (_OF_PODS if "LOCAL_RANK" in env else set())
    found = [engine for engine in ENGINES if shown >= set(engine.marks)]
    said = [engine.read(env) for engine in found]
    stated = _agreed([nodes.num_nodes for nodes in said])
    node_rank = _agreed([nodes.node_rank for nodes in said])
    if node_rank is None and (num_nodes > 1 or stated is not None):
        node_rank = _number(env, "JOB_COMPLETION_INDEX")
    if stated is not None and node_rank is not None and node_rank.value >= stated.value:
        raise ConfigurationError(f"{node_rank}, but nodes are counted from 0, and {stated}")
    return (
        Nodes(
            num_nodes=stated,
            node_rank=node_rank,
            num_devices=_agreed([nodes.num_devices for nodes in said]),
            address=next((nodes.address for nodes in said if nodes.address), None),
            port=next((nodes.port for nodes in said if nodes.port), None),
        ),
        [engine.name for engine in found if engine.marks],
    )


def _agreed(told: list[Told | None]) -> Told | None:
    """Return the number on which several variables agree, or None; `ConfigurationError` if two differ."""
    made = [one for one in told if one is not None]
    for one in made[1:]:
        if one.value != made[0].value:
            raise ConfigurationError(f"{made[0]}, but {one}: they contradict each other. Unset one of them")
    return made[0] if made else None


def variables_by_hand(nodes: Nodes, engines: list[str]) -> dict[str, str]:
    """Return NODE_RANK, if known, and MASTER_ADDR and MASTER_PORT, if an engine and an address are known."""
    variables = {}
    if nodes.node_rank is not None:
        variables["NODE_RANK"] = str(nodes.node_rank.value)
    if engines and nodes.address is not None:
        variables.update(MASTER_ADDR=nodes.address, MASTER_PORT=nodes.port or _DEFAULT_PORT)
    return variables


def settle_nodes(num_nodes: int, num_devices: int, *, is_open: bool) -> tuple[int, int]:
    """Return numbers of nodes and devices per node, the cluster's if not given; set NODE_RANK and address.

    Sets `MASTER_ADDR`, `MASTER_PORT` and `NODE_RANK` of this process, as for a node started by hand, and
    removes variables that count pods as ranks. Raises `ConfigurationError` for a contradiction.

    One node is Lightning's default, hence open; the number of devices is if `is_open` says so.
    """
    env = os.environ
    nodes, engines = nodes_of(env, num_nodes)
    if nodes.num_nodes is not None:
        if num_nodes not in (1, nodes.num_nodes.value):
            raise ConfigurationError(
                f"Trainer(num_nodes={num_nodes}), but {nodes.num_nodes} ({', '.join(engines)}). Leave"
                " num_nodes out of the script, or start as many nodes"
            )
        num_nodes = nodes.num_nodes.value
    if nodes.num_devices is not None and nodes.num_devices.value != num_devices:
        if not is_open:
            raise ConfigurationError(
                f"Trainer(devices={num_devices}), but {nodes.num_devices} ({', '.join(engines)}). Leave"
                " devices out of the script, or change one of them"
            )
        num_devices = nodes.num_devices.value
    if nodes.num_nodes is not None and "LOCAL_RANK" not in env and env.keys() >= _OF_PODS:
        for name in _OF_PODS:  # libraries take them for ranks
            del env[name]
        env[_NODES_VARIABLE] = f"{num_nodes} {nodes.num_nodes.variable}"
    if num_nodes > 1:
        env.update(variables_by_hand(nodes, engines))
    return num_nodes, num_devices


def take_slurm_task() -> None:
    """Set NODE_RANK and the first node's address from SLURM, if srun has started one task per node."""
    num_tasks, kind = os.environ.get("SLURM_NTASKS"), lightnings("SLURMEnvironment")
    if num_tasks is None or num_tasks != os.environ.get(_OF_SLURM) or not kind.detect():
        return
    slurm = kind()
    address, port, node = slurm.main_address, slurm.main_port, slurm.node_rank()
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), NODE_RANK=str(node))
    os.environ[_NODES_VARIABLE] = f"{num_tasks} {_OF_SLURM}"
    del os.environ["SLURM_NTASKS"]  # by which Lightning takes each task for a rank


def is_slurm_node(environment: Any, num_devices: int) -> bool:
    """Return True if this SLURM task is to start its node's ranks; then `take_slurm_task` has been called.

    It does if srun has started one task per node, and a node has several devices; or if `run` has taken the
    task. A script that srun has not started is alone, so there must be no other task.
    """
    if type(environment).__name__ != "SLURMEnvironment":
        return False
    if num_devices > 1 and ("SLURM_STEP_ID" in os.environ or os.environ.get("SLURM_NTASKS") == "1"):
        take_slurm_task()
    return os.environ.get(_NODES_VARIABLE, "").endswith(_OF_SLURM)

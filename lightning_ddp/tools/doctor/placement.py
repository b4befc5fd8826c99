"""Placement of a process among the others, read from the variables of torchrun, SLURM or the user."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_ddp.tools.doctor.diagnosis import Finding

Starter = Literal["nobody", "torchrun", "slurm", "script"]
_INTERACTIVE_JOBS = ("bash", "interactive")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """This process among the others."""

    starter: Starter
    """'script': the user, on every node, as for this package's own launcher; 'nobody': it is alone."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    num_nodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    has_agent_store: bool = False
    """Whether torchrun's agent hosts the store; rank 0 does otherwise."""
    findings: tuple[Finding, ...] = ()
    """What is wrong or worth knowing about the variables."""


def place(env: Mapping[str, str], num_nodes: int | None = None) -> Placement:
    """Reads environment variables; `num_nodes` are started by hand, None where the user does not say.

    >>> place({"NODE_RANK": "1", "MASTER_ADDR": "gpu-07", "MASTER_PORT": "29500"}, num_nodes=2).rank
    1
    """
    try:
        if "RANK" in env and "WORLD_SIZE" in env:
            return _from_torchrun(env)
        if "SLURM_JOB_ID" in env:
            placement = _from_slurm(env)
            if placement is not None:
                return placement
        return _from_user(env, num_nodes or 1)
    except ValueError as error:
        message = f"an environment variable holds no number ({error}): correct or unset it"
        return Placement(starter="nobody", findings=_findings("variables", [message]))


def _findings(check: str, problems: Sequence[str], all_is_well: str = "") -> tuple[Finding, ...]:
    """A failure for each problem; one that passes where there is none."""
    if problems or not all_is_well:
        return tuple(Finding("FAIL", check, problem) for problem in problems)
    return (Finding("PASS", check, all_is_well),)


def _from_torchrun(env: Mapping[str, str]) -> Placement:
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    local_size = int(env.get("LOCAL_WORLD_SIZE", world_size))
    num_nodes = int(env.get("GROUP_WORLD_SIZE", -(-world_size // local_size)))
    found = (
        f"{world_size} ranks, {local_size} on each of {num_nodes} node(s), restart"
        f" {env.get('TORCHELASTIC_RESTART_COUNT', '0')} of {env.get('TORCHELASTIC_MAX_RESTARTS', '0')}:"
        f" use Trainer(devices={local_size}, num_nodes={num_nodes})"
    )
    problems = []
    missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        problems.append(
            f"RANK and WORLD_SIZE are set, but {', '.join(missing)} not: a part of another launcher's"
            " variables has been passed on. Unset RANK and WORLD_SIZE, or start with torchrun"
        )
    if not 0 <= rank < world_size:
        problems.append(f"RANK={rank} is not below WORLD_SIZE={world_size}")
    if local_size * num_nodes != world_size:
        problems.append(
            f"{num_nodes} nodes x {local_size} ranks are not WORLD_SIZE={world_size}; Lightning needs as"
            " many processes on each node: give all nodes the same --nproc-per-node"
        )
    return Placement(
        starter="torchrun",
        rank=rank,
        local_rank=int(env.get("LOCAL_RANK", 0)),
        world_size=world_size,
        num_nodes=num_nodes,
        master_addr=env.get("MASTER_ADDR"),
        master_port=_port(env),
        has_agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        findings=_findings("torchrun", problems, found),
    )


def _from_slurm(env: Mapping[str, str]) -> Placement | None:
    """None where Lightning does not take the SLURM variables for those of a run."""
    if env.get("SLURM_JOB_NAME") in _INTERACTIVE_JOBS or "SLURM_NTASKS" not in env:
        return None
    num_tasks = int(env["SLURM_NTASKS"])
    num_nodes = int(env.get("SLURM_NNODES", env.get("SLURM_JOB_NUM_NODES", 1)))
    per_node = num_tasks // num_nodes
    problems = []
    if num_tasks > 1 and "SLURM_STEP_ID" not in env:
        problems.append(
            f"the job has {num_tasks} tasks, but this is the batch script itself: only one process runs,"
            " and the others would be waited for. Start the program with `srun python ...`"
        )
    if num_tasks % num_nodes:
        problems.append(
            f"--ntasks={num_tasks} cannot be spread evenly over --nodes={num_nodes}: use"
            " --ntasks-per-node with the number of devices of a node instead of --ntasks"
        )
    found = (
        f"job {env['SLURM_JOB_ID']}: {num_tasks} tasks, {per_node} on each of {num_nodes} node(s):"
        f" use Trainer(devices={per_node}, num_nodes={num_nodes})"
    )
    port = env.get("MASTER_PORT") or str(15000 + int(env["SLURM_JOB_ID"][-4:]))  # as Lightning chooses it
    return Placement(
        starter="slurm",
        rank=int(env.get("SLURM_PROCID", 0)),
        local_rank=int(env.get("SLURM_LOCALID", 0)),
        world_size=num_tasks,
        num_nodes=num_nodes,
        master_addr=env.get("MASTER_ADDR") or first_host(env.get("SLURM_NODELIST", "")) or "127.0.0.1",
        master_port=int(port),
        findings=_findings("SLURM", problems, found),
    )


def first_host(node_list: str) -> str:
    """The first node of SLURM's compressed list.

    >>> first_host("gpu-[07-09,12],login"), first_host("a1,a2"), first_host("")
    ('gpu-07', 'a1', '')
    """
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)", node_list)
    return "".join(part or "" for part in match.groups()) if match else ""


def _from_user(env: Mapping[str, str], num_nodes: int) -> Placement:
    findings: tuple[Finding, ...] = ()
    if env.get("SLURM_JOB_ID"):
        reason = "SLURM_NTASKS is not set" if "SLURM_NTASKS" not in env else "the job is an interactive one"
        found = f"inside job {env['SLURM_JOB_ID']}, but {reason}: Lightning starts processes itself"
        findings = _findings("SLURM", [], found)
    is_alone = num_nodes == 1
    node_rank = int(env.get("NODE_RANK", 0))
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    problems = []
    if missing and not is_alone:
        problems.append(
            f"--nodes {num_nodes}, but {', '.join(missing)} not set: give every node the same MASTER_ADDR"
            " and MASTER_PORT, and NODE_RANK 0, 1, ... in turn"
        )
    if not is_alone and not 0 <= node_rank < num_nodes:
        problems.append(f"NODE_RANK={node_rank} is not below --nodes {num_nodes}")
    return Placement(
        starter="nobody" if is_alone else "script",
        rank=node_rank,
        world_size=num_nodes,
        num_nodes=num_nodes,
        master_addr=env.get("MASTER_ADDR"),
        master_port=_port(env),
        findings=(*findings, *_findings("variables", problems)),
    )


def _port(env: Mapping[str, str]) -> int | None:
    text = env.get("MASTER_PORT")
    if not text:
        return None
    port = int(text)
    if not 0 < port < 65536:
        raise ValueError(f"MASTER_PORT={text}, expected 1 to 65535")
    return port

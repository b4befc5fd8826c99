"""Facts about this process and its peers: launcher, machine, addresses, and an all-reduce; with deadlines."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from lightning_ddp._lightning import lightnings
from lightning_ddp._torch import new_gloo
from lightning_ddp.comm.group import InThread
from lightning_ddp.comm.nccl import connect, default_implementation, memory_problem
from lightning_ddp.errors import ConfigurationError, LightningDDPError
from lightning_ddp.launch.environment import nodes_of, variables_by_hand
from lightning_ddp.launch.rendezvous import interfaces, route_to
from lightning_ddp.tools.command_line import describe_machine
from lightning_ddp.tools.ranks import synchronize

T = TypeVar("T")
Level = Literal["NOT HERE", "PASS", "WARN", "FAIL"]
LEVELS: tuple[Level, ...] = ("NOT HERE", "PASS", "WARN", "FAIL")


@dataclass(frozen=True)
class Finding:
    """Result of one check: its level, its subject, and a message with the remedy."""

    level: Level
    check: str
    """Subject of the check, in a word or two."""
    message: str
    """Result and, unless it passed, the remedy."""


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level of the findings; 'PASS' if there are none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="PASS")


# ---------------------------------------------------------------------- this machine

_PREFIXES = ("SLURM_", "TORCHELASTIC_", "MASTER_", "NCCL_", "GLOO_", "PL_", "LIGHTNING_DDP_", "OMP_", "CUDA_")
_NAME = re.compile(r"NODE_RANK|((LOCAL_|GROUP_)?(RANK|WORLD_SIZE))")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def gather_facts(env: Mapping[str, str], *, rank: int, local_rank: int) -> dict[str, Any]:
    """Return versions, devices and relevant variables of `env` without secrets, as JSON values."""
    has_cuda = torch.cuda.is_available()
    has_nccl = has_cuda and dist.is_nccl_available()
    return {
        "rank": rank,
        "local_rank": local_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        **describe_machine(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count() * has_cuda)],
        "backend": "nccl" if has_nccl else "gloo",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "implementation": default_implementation().name if has_nccl else None,
        "variables": {
            name: value
            for name, value in sorted(env.items())
            if (_NAME.fullmatch(name) or name.startswith(_PREFIXES))
            and not any(word in name for word in _SECRET)
        },
        "executable": sys.executable,
    }


# ---------------------------------------------------------------------- addresses

_RETRY_S = 0.2


class DeadlinePassed(LightningDDPError, TimeoutError):
    """Error of a call that did not end in time; the thread that runs it may still be blocked."""


def within(seconds: float, what: str, step: Callable[[], T]) -> T:
    """Call `step` in a thread; return its result, or raise `DeadlinePassed` after `seconds` seconds."""
    call = InThread(lambda _: step())
    if not call.is_over.wait(seconds):
        raise DeadlinePassed(f"{what} did not end within {seconds:g} s")
    return call.result


@functools.cache
def resolve(host: str, timeout_s: float) -> str:
    """Return the IP address of a host name, IPv4 if there is one; the result is cached."""
    look_up = functools.partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    found = within(timeout_s, f"looking up {host!r}", look_up)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def addresses() -> dict[str, str]:
    """Return an address of each network interface of this host, IPv4 if there is one, by its name."""
    found: dict[str, str] = {}
    for name, address in interfaces():
        if name not in found or (":" in found[name] and ":" not in address):
            found[name] = address
    return found


def interface_to(address: str) -> str | None:
    """Return name (or else address) of the interface that leads to an address, or None. Sends nothing."""
    try:
        name, own = route_to(address)
    except OSError:
        return None
    return name or own


def connect_problem(address: str, port: int, timeout_s: float) -> str | None:
    """Try to open a TCP connection; return None if it opens, or the reason of its failure."""
    try:
        socket.create_connection((address, port), timeout_s).close()
    except TimeoutError:
        return f"no answer within {timeout_s:g} s. A firewall may drop the packets, or the host is down"
    except ConnectionRefusedError:
        return "the host answers, but nothing listens there (yet)"
    except OSError as error:
        return error.strerror or str(error)
    return None


def wait_until_reached(address: str, port: int, timeout_s: float) -> str | None:
    """Retry a TCP connection for `timeout_s`; return None once it opens, or the last failure's reason."""
    deadline = time.monotonic() + timeout_s
    while True:
        problem = connect_problem(address, port, max(0.1, deadline - time.monotonic()))
        if problem is None or time.monotonic() + _RETRY_S > deadline:
            return problem
        time.sleep(_RETRY_S)


# ---------------------------------------------------------------------- launcher of this process


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Rank and master of this process, from the variables of torchrun, SLURM or the user."""

    starter: Literal["nobody", "torchrun", "slurm", "script"]
    """Launcher; 'script': started by the user on every node; 'nobody': a single process."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    num_nodes: int = 1
    master_addr: Any = None
    master_port: Any = None
    """Text and number; None only with a finding, or for a single process."""
    has_agent_store: bool = False
    """True if torchrun's agent hosts the store; otherwise rank 0 does."""
    findings: tuple[Finding, ...] = ()
    """Findings about the variables."""


def place(env: Mapping[str, str], num_nodes: int | None = None) -> Placement:
    """Return launcher, rank, world size and master by `env`; a launcher's variables override `num_nodes`."""
    try:
        if "RANK" in env and "WORLD_SIZE" in env and "LOCAL_RANK" in env:
            return _from_torchrun(env)
        # Lightning ignores the variables of interactive SLURM jobs.
        is_interactive = env.get("SLURM_JOB_NAME") in ("bash", "interactive")
        if "SLURM_NTASKS" in env and "SLURM_JOB_ID" in env and not is_interactive:
            return _from_slurm(env)
        return _from_user(env, num_nodes or 1)
    except ConfigurationError as error:
        return Placement(starter="nobody", findings=(Finding("FAIL", "variables", str(error)),))
    except (ValueError, ZeroDivisionError) as error:
        message = f"an environment variable is not a valid number ({error}). Correct or unset it"
        return Placement(starter="nobody", findings=(Finding("FAIL", "variables", message),))


def _findings(check: str, problems: Sequence[str], all_is_well: str) -> tuple[Finding, ...]:
    """Return a FAIL finding per problem, or one PASS finding if there are none."""
    failures = tuple(Finding("FAIL", check, problem) for problem in problems)
    return failures or (Finding("PASS", check, all_is_well),)


def _from_torchrun(env: Mapping[str, str]) -> Placement:
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    local_size = int(env.get("LOCAL_WORLD_SIZE", world_size))
    num_nodes = int(env.get("GROUP_WORLD_SIZE", -(-world_size // local_size)))
    problems = []
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]:
        problems.append(
            f"RANK and WORLD_SIZE are set, but {', '.join(missing)} not: another launcher's variables were"
            " passed on in part. Unset RANK and WORLD_SIZE, or start with torchrun"
        )
    if not 0 <= rank < world_size:
        problems.append(f"RANK={rank} is not below WORLD_SIZE={world_size}")
    if local_size * num_nodes != world_size:
        problems.append(
            f"{num_nodes} nodes x {local_size} ranks are not WORLD_SIZE={world_size}, but Lightning needs"
            " as many processes on each node. Use the same --nproc-per-node on all nodes"
        )
    found = (
        f"{world_size} ranks, {local_size} on each of {num_nodes} node(s), restart"
        f" {env.get('TORCHELASTIC_RESTART_COUNT', '0')} of {env.get('TORCHELASTIC_MAX_RESTARTS', '0')}. Use"
        f" Trainer(devices={local_size}, num_nodes={num_nodes})"
    )
    return Placement(
        starter="torchrun",
        rank=rank,
        local_rank=int(env["LOCAL_RANK"]),
        world_size=world_size,
        num_nodes=num_nodes,
        master_addr=env.get("MASTER_ADDR"),
        master_port=_port(env),
        has_agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        findings=_findings("torchrun", problems, found),
    )


def _from_slurm(env: Mapping[str, str]) -> Placement:
    num_tasks = int(env["SLURM_NTASKS"])
    num_nodes = int(env.get("SLURM_NNODES", env.get("SLURM_JOB_NUM_NODES", 1)))
    problems = []
    if num_tasks > 1 and "SLURM_STEP_ID" not in env:
        problems.append(
            f"the job has {num_tasks} tasks, but this is the batch script itself, so only one process runs"
            " and waits for the others. Start the program with `srun python ...`"
        )
    if num_tasks % num_nodes:
        problems.append(
            f"--ntasks={num_tasks} cannot be divided evenly over --nodes={num_nodes}. Use --ntasks-per-node"
            " with the number of devices of a node instead of --ntasks"
        )
    job, per_node = env["SLURM_JOB_ID"], num_tasks // num_nodes
    found = (
        f"job {job}: {num_tasks} tasks, {per_node} on each of {num_nodes} node(s). Use"
        f" Trainer(devices={per_node}, num_nodes={num_nodes})"
        + ", or more devices, whose ranks each task starts then"
        * (per_node == 1)
    )
    first_host = lightnings("SLURMEnvironment").resolve_root_node_address(env.get("SLURM_NODELIST", ""))
    return Placement(
        starter="slurm",
        rank=int(env.get("SLURM_PROCID", 0)),
        local_rank=int(env.get("SLURM_LOCALID", 0)),
        world_size=num_tasks,
        num_nodes=num_nodes,
        master_addr=env.get("MASTER_ADDR") or first_host or "127.0.0.1",
        master_port=_port(env) or 15000 + int(job[-4:]),  # as Lightning chooses it
        findings=_findings("SLURM", problems, found),
    )


def _from_user(env: Mapping[str, str], num_nodes: int) -> Placement:
    findings: list[Finding] = []
    problems = []
    if env.get("SLURM_JOB_ID"):
        reason = "SLURM_NTASKS is not set" if "SLURM_NTASKS" not in env else "the job is interactive"
        found = f"inside job {env['SLURM_JOB_ID']}, but {reason}: Lightning starts processes itself"
        findings.append(Finding("PASS", "SLURM", found))
    nodes, engines = nodes_of(env, num_nodes)
    num_nodes = num_nodes if nodes.num_nodes is None else nodes.num_nodes.value
    env = {**env, **variables_by_hand(nodes, engines)}
    if engines:
        per_node = "" if nodes.num_devices is None else f", {nodes.num_devices}"
        found = f"{nodes.num_nodes or 'no number of nodes'}, {nodes.node_rank or 'no node rank'}{per_node}"
        findings.append(Finding("PASS", "engine", f"{', '.join(engines)}: {found}"))
    rank = int(env.get("NODE_RANK", 0))
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if num_nodes > 1 and missing:
        problems.append(
            f"--nodes {num_nodes}, but {', '.join(missing)} not set. Set the same MASTER_ADDR and"
            " MASTER_PORT on every node, and NODE_RANK to 0, 1, ..."
        )
    if num_nodes > 1 and not 0 <= rank < num_nodes:
        problems.append(f"NODE_RANK={rank} is not below --nodes {num_nodes}")
    return Placement(
        starter="nobody" if num_nodes == 1 else "script",
        rank=rank,
        world_size=num_nodes,
        num_nodes=num_nodes,
        master_addr=env.get("MASTER_ADDR"),
        master_port=_port(env),
        findings=(*findings, *(Finding("FAIL", "variables", problem) for problem in problems)),
    )


def _port(env: Mapping[str, str]) -> int | None:
    text = env.get("MASTER_PORT")
    if text and not 0 < int(text) < 65536:
        raise ValueError(f"MASTER_PORT={text}, expected 1 to 65535")
    return int(text) if text else None


# ---------------------------------------------------------------------- measured by all ranks

_NUM_WARM_UPS = 3  # connections and memory
_NUM_REPEATS = 5


class Plan(NamedTuple):
    """Size of the timed all-reduce, limit of each network step, and interface (None for gloo's choice)."""

    num_bytes: int
    timeout_s: float
    interface: str | None


def examine(
    store: Any, plan: Plan, env: Mapping[str, str], *, rank: int, local_rank: int, world_size: int
) -> dict[str, Any]:
    """Time an all-reduce with the other ranks; return the slowest time and this rank's facts, for JSON.

    Collective: all ranks must call it.
    """
    answer = gather_facts(env, rank=rank, local_rank=local_rank)
    limit = timedelta(seconds=plan.timeout_s)
    gloo = dist.ProcessGroupGloo
    where = gloo.create_device(interface=plan.interface) if plan.interface else gloo.create_default_device()
    control = new_gloo(dist.PrefixStore("gloo", store), rank, world_size, [where], limit)
    device, group = torch.device("cpu"), control
    # Alone in NCCL a rank would wait for the others.
    has_device = torch.tensor([answer["backend"] == "nccl" and local_rank < len(answer["devices"])]).int()
    _all_reduce(control, has_device, limit, dist.ReduceOp.MIN)
    if has_device.item():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        group = connect(dist.PrefixStore("nccl", store), rank, world_size, limit, device)
        answer["bucket_memory"] = memory_problem(group, device)
    tensor = torch.zeros(max(1, plan.num_bytes // 4), device=device)
    seconds = [_all_reduce(group, tensor, limit) for _ in range(_NUM_WARM_UPS + _NUM_REPEATS)]
    slowest = torch.tensor([statistics.median(seconds[_NUM_WARM_UPS:])], dtype=torch.float64)
    _all_reduce(control, slowest, limit, dist.ReduceOp.MAX)
    return {
        **answer,
        "interface": plan.interface,
        "measured_on": "gloo" if group is control else "nccl",
        "all_reduce": {"num_bytes": 4 * tensor.numel(), "seconds": slowest.item()},
    }


def _all_reduce(
    group: Any, tensor: torch.Tensor, limit: timedelta, operation: Any = dist.ReduceOp.SUM
) -> float:
    """All-reduce a tensor; return the seconds until the result is available."""
    options = dist.AllreduceOptions()
    options.reduceOp = operation
    synchronize(tensor.device)
    start = time.perf_counter()
    group.allreduce([tensor], options).wait(limit)
    synchronize(tensor.device)
    return time.perf_counter() - start


def exchange(
    store: Any, answer: dict[str, Any], *, rank: int, world_size: int, timeout_s: float
) -> list[Any]:
    """Exchange answers by a store; return all ranks'. Rank 0, which may host the store, returns last.

    Collective: all ranks must call it.
    """
    limit = timedelta(seconds=timeout_s)
    store.set(f"answer/{rank}", json.dumps(answer))
    store.wait([f"answer/{other}" for other in range(world_size)], limit)
    answers = [json.loads(store.get(f"answer/{other}")) for other in range(world_size)]
    store.set(f"read/{rank}", "")
    if rank == 0:
        store.wait([f"read/{other}" for other in range(world_size)], limit)
    return answers

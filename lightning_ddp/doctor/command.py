"""Checks this machine, and all ranks where it is launched on each, for a distributed run.

Alone, with `--processes N` for N ranks here, under torchrun or srun, or on each node with `--nodes N` and the
variables NODE_RANK, MASTER_ADDR and MASTER_PORT. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from lightning_ddp.bench import BenchmarkError
from lightning_ddp.bench.arguments import existing_file, positive_float, positive_int
from lightning_ddp.bench.processes import RankContext, run_ranks
from lightning_ddp.bench.report import progress_bar
from lightning_ddp.doctor import checks, network
from lightning_ddp.doctor.examine import Plan, examine, exchange
from lightning_ddp.doctor.facts import gather_facts
from lightning_ddp.doctor.findings import Finding, worst
from lightning_ddp.doctor.measure import Line, Timing, all_reduce_sizes, fit_line
from lightning_ddp.doctor.placement import Placement, place
from lightning_ddp.doctor.report import format_json, format_report
from lightning_ddp.launch.environment import all_variables

__all__ = ["add_arguments", "run"]

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"


@dataclass(kw_only=True)
class Examination:
    """What has been found so far."""

    answers: list[Any] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    is_stuck: bool = False
    """Whether a step is still blocked in a thread of this process."""

    def add(self, level: Any, check: str, message: str) -> None:
        """Adds a finding."""
        self.findings.append(Finding(level=level, check=check, message=message))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--processes", type=positive_int, metavar="N", help="start N ranks on this machine and measure them"
    )
    where.add_argument(
        "--nodes", type=positive_int, metavar="N", help="this command is run by hand on each of N nodes"
    )
    parser.add_argument(
        "--timeout-s",
        type=positive_float,
        default=30.0,
        metavar="S",
        help="deadline of each step on the network, meeting the other ranks included (default: %(default)s)",
    )
    parser.add_argument(
        "--max-mb",
        type=positive_float,
        default=64.0,
        metavar="MIB",
        help="largest all-reduce in MiB (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="train on this machine's GPUs (or on --processes of them; else on 2 CPU ranks) and compare: with"
        " torch's DDP, every hook and averager with its formula; kill a rank; time steps. Under a minute",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="of --verify (default: cuda where there is a GPU)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="CHECK",
        help="run only those checks of --verify whose names begin so, such as 'hook topk'",
    )
    parser.add_argument(
        "--preload",
        type=existing_file,
        metavar="FILE",
        help="a Python file that each rank of --verify runs first: to set a backend up, or to break something"
        " that has to be found",
    )


def run(args: argparse.Namespace) -> int:
    """Examine, print on rank 0 (on every rank that could not meet the others), return 0 or 1."""
    env = all_variables()
    placement = place(env, args.nodes)
    examination = Examination(findings=list(placement.findings))
    with _stdout_kept_for_json() if args.json else contextlib.nullcontext():
        _examine(examination, env, args, placement)
    has_met = len(examination.answers) > 1
    if not examination.answers:
        examination.answers = [gather_facts(env, rank=placement.rank, local_rank=placement.local_rank)]
    status = _finish(
        examination, args.json, is_silent=has_met and placement.rank > 0 and args.processes is None
    )
    if examination.is_stuck:  # destructors would wait for what is blocked
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


# ---------------------------------------------------------------------- three ways to examine


def _examine(
    examination: Examination, env: Mapping[str, str], args: argparse.Namespace, placement: Placement
) -> None:
    plan = Plan(
        largest_bytes=int(args.max_mb * (1 << 20)),
        timeout_s=args.timeout_s,
        interface=_choose_interface(env, placement, examination, args.timeout_s),
    )
    if args.verify:
        _verify(examination, env, args, placement)
    elif args.processes is not None:
        _examine_processes(examination, plan, env, args.processes)
    elif placement.world_size > 1:
        _examine_launched(examination, plan, env, placement)
    else:
        _examine_alone(examination, env, placement, args.timeout_s)


def _examine_alone(
    examination: Examination, env: Mapping[str, str], placement: Placement, timeout_s: float
) -> None:
    has_master = placement.master_addr and placement.master_port
    if has_master and worst(examination.findings) != "FAIL":
        if placement.rank == 0:
            _host_store(examination, placement, timeout_s)
        else:
            _find_master(examination, placement, timeout_s)
    examination.answers = [gather_facts(env, rank=placement.rank, local_rank=placement.local_rank)]
    message = "not measured, as this process is alone: add --processes 2, or launch it as you launch a run"
    examination.add("PASS", "all-reduce", message)


def _verify(
    examination: Examination, env: Mapping[str, str], args: argparse.Namespace, placement: Placement
) -> None:
    from lightning_ddp.doctor.verify import choose, refusal, verify

    examination.answers = [gather_facts(env, rank=placement.rank, local_rank=placement.local_rank)]
    refused = refusal(placement)
    if refused is not None:
        examination.findings.append(refused)
        return
    examination.findings += verify(
        choose(
            num_ranks=args.processes,
            device=args.device,
            timeout_s=args.timeout_s,
            preload=args.preload,
            only=args.only,
        )
    )


def _examine_processes(
    examination: Examination, plan: Plan, env: Mapping[str, str], num_processes: int
) -> None:
    num_steps = len(all_reduce_sizes(plan.largest_bytes))
    with progress_bar(num_steps, "all-reduce") as bar:
        try:
            examination.answers = run_ranks(
                _examine_rank,
                (plan, dict(env), num_processes),
                world_size=num_processes,
                device="cpu",
                timeout_s=plan.timeout_s * 4,
                on_progress=bar.update,
            )
        except BenchmarkError as error:
            examination.add("FAIL", "all-reduce", f"{num_processes} processes on this machine: {error}")


def _examine_rank(context: RankContext, settings: tuple[Plan, dict[str, str], int]) -> dict[str, Any]:
    """What a process of `--processes` runs."""
    plan, env, num_processes = settings
    return examine(
        context.store,
        plan,
        env,
        rank=context.rank,
        local_rank=context.rank,
        world_size=num_processes,
        advance=context.advance,
    )


def _examine_launched(
    examination: Examination, plan: Plan, env: Mapping[str, str], placement: Placement
) -> None:
    if worst(examination.findings) == "FAIL":
        return
    found = _meet(examination, placement, plan.timeout_s)
    if found is None:
        return
    store = dist.PrefixStore(f"doctor/{env.get('TORCHELASTIC_RESTART_COUNT', 0)}", found)
    rank, world_size = placement.rank, placement.world_size

    def together() -> list[Any]:
        bar = progress_bar(len(all_reduce_sizes(plan.largest_bytes)), "all-reduce") if rank == 0 else None
        with bar or contextlib.nullcontext():
            answer = examine(
                store,
                plan,
                env,
                rank=rank,
                local_rank=placement.local_rank,
                world_size=world_size,
                advance=bar.update if bar is not None else lambda: None,
            )
        answer["findings"] = [asdict(finding) for finding in examination.findings]
        return exchange(store, answer, rank=rank, world_size=world_size, timeout_s=plan.timeout_s)

    try:
        examination.answers = network.within(4 * plan.timeout_s, "measuring with the other ranks", together)
    except (RuntimeError, OSError) as error:
        examination.is_stuck = True  # a group whose peers are gone waits for them when it is freed
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        examination.add(
            "FAIL",
            "ranks",
            f"rank {rank} of {world_size} has the store at {placement.master_addr}, port"
            f" {placement.master_port}, but does not find all ranks through"
            f" {plan.interface or 'the default interface'}: {first_line}. Are all {world_size} started, and"
            " does no firewall close other ports between them?",
        )


# ---------------------------------------------------------------------- the master


def _choose_interface(
    env: Mapping[str, str], placement: Placement, examination: Examination, timeout_s: float
) -> str | None:
    """The user's interface, or the one that leads to the master; adds a finding about it."""
    named = env.get(_INTERFACE_VARIABLE) or None
    if worst(examination.findings) == "FAIL":
        return named
    try:
        address = network.resolve(placement.master_addr or _LOOPBACK, timeout_s)
    except (OSError, network.DeadlinePassed) as error:
        examination.add(
            "FAIL",
            "master",
            f"MASTER_ADDR={placement.master_addr} cannot be looked up ({error}): correct the name, or give"
            " the address itself",
        )
        return named
    route = network.interface_to(address)
    found = network.addresses()
    examination.findings.append(
        checks.check_interface(
            named, route, found, num_nodes=placement.num_nodes, variable=_INTERFACE_VARIABLE
        )
    )
    chosen = named or route
    return chosen if chosen in found else None


def _meet(examination: Examination, placement: Placement, timeout_s: float) -> Any | None:
    """The store of the ranks; None, with a finding, if it cannot be had."""
    if placement.rank == 0 and not placement.has_agent_store:
        return _host_store(examination, placement, timeout_s)
    address = _find_master(examination, placement, timeout_s)
    if address is None:
        return None
    assert placement.master_port is not None  # or there would be no address
    try:
        return network.open_store(address, placement.master_port, is_host=False, timeout_s=timeout_s)
    except (OSError, RuntimeError) as error:
        examination.is_stuck = isinstance(error, network.DeadlinePassed)
        message = (
            f"{placement.master_addr}, port {placement.master_port}: something listens there, but it is"
            " no store of this run. Name another MASTER_PORT on all nodes"
        )
        examination.add("FAIL", "master", message)
        return None


def _host_store(examination: Examination, placement: Placement, timeout_s: float) -> Any | None:
    assert placement.master_addr is not None  # the caller has looked
    assert placement.master_port is not None
    where = f"MASTER_ADDR={placement.master_addr}, MASTER_PORT={placement.master_port}"
    address = network.resolve(placement.master_addr, timeout_s)
    if not network.is_own(address):
        own = ", ".join(f"{a} ({name})" for name, a in network.addresses().items())
        message = f"{where}: rank 0 is here, but {address} is no address of this host, which has {own}"
        examination.add("FAIL", "master", f"{message}. Name one that all nodes reach")
        return None
    try:
        store = network.open_store(address, placement.master_port, is_host=True, timeout_s=timeout_s)
    except (OSError, RuntimeError) as error:
        examination.is_stuck = isinstance(error, network.DeadlinePassed)
        message = f"{where}: the port cannot be opened ({str(error).splitlines()[0]})"
        examination.add("FAIL", "port", f"{message}. Another process has it; name another one on all nodes")
        return None
    examination.add("PASS", "port", f"{where}: free, and opened here")
    return store


def _find_master(examination: Examination, placement: Placement, timeout_s: float) -> str | None:
    """The address of rank 0 once it listens; None, with a finding, if it does not within the deadline."""
    assert placement.master_addr is not None  # the findings would say so
    assert placement.master_port is not None
    address = network.resolve(placement.master_addr, timeout_s)
    interface = network.interface_to(address) or "no interface"
    where = f"{placement.master_addr}, port {placement.master_port}, through {interface}"
    problem = network.wait_until_reached(address, placement.master_port, timeout_s)
    if problem is None:
        examination.add("PASS", "master", f"{where}: answers")
        return address
    message = (
        f"rank {placement.rank} cannot reach {where}: {problem}. Start rank 0 first or at the same time, give"
        " all nodes the same MASTER_ADDR and MASTER_PORT, and open that port in the first node's firewall"
    )
    examination.add("FAIL", "master", message)
    return None


# ---------------------------------------------------------------------- the end


@contextlib.contextmanager
def _stdout_kept_for_json() -> Generator[None, None, None]:
    """Sends to stderr what anything else writes meanwhile, such as gloo, which tells of connections."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _finish(examination: Examination, as_json: bool, *, is_silent: bool) -> int:
    answers = examination.answers
    findings = [*examination.findings, *checks.check_answers(answers)]
    timings = [Timing(**timing) for timing in answers[0].get("timings", [])]
    line: Line | None = None
    if timings and len(answers) > 1:
        line = fit_line(timings)
        num_hosts = len({answer["host"] for answer in answers})
        findings.append(checks.check_line(line, world_size=len(answers), num_hosts=num_hosts))
    if not is_silent:
        print(
            (format_json if as_json else format_report)(answers, timings, line, _sorted(findings)), flush=True
        )
    return 1 if worst(findings) == "FAIL" else 0


def _sorted(findings: Sequence[Finding]) -> list[Finding]:
    """Failures last, where the eye is."""
    return sorted(findings, key=lambda finding: ("PASS", "WARN", "FAIL").index(finding.level))

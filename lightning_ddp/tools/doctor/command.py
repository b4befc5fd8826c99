"""Checks this machine, and all ranks where it is launched on each, for a distributed run.

Alone, with `--processes N` for N ranks here, under torchrun or srun, or on each node with `--nodes N` and the
variables NODE_RANK, MASTER_ADDR and MASTER_PORT. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Generator
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from lightning_ddp.launch.environment import all_variables
from lightning_ddp.launch.interface import is_own_address
from lightning_ddp.tools import ToolError
from lightning_ddp.tools.arguments import existing_file, positive_float, positive_int
from lightning_ddp.tools.doctor import checks, network
from lightning_ddp.tools.doctor.checks import Finding, Level, worst
from lightning_ddp.tools.doctor.examine import Plan, examine, exchange
from lightning_ddp.tools.doctor.facts import gather_facts
from lightning_ddp.tools.doctor.measure import Line, Timing, all_reduce_sizes, fit_line
from lightning_ddp.tools.doctor.placement import place
from lightning_ddp.tools.doctor.report import format_json, format_report
from lightning_ddp.tools.ranks import RankContext, run_ranks
from lightning_ddp.tools.report import progress_bar

__all__ = ["add_arguments", "run"]

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"


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
    examination = Examination(args)
    with _stdout_kept_for_json() if args.json else contextlib.nullcontext():
        examination.examine()
    status = examination.report(as_json=args.json)
    if examination.is_stuck:  # destructors would wait for what is blocked
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


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


class Examination:
    """This process, what has been found so far, and the ways to find more.

    Args:
        args: of the command.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._env = all_variables()
        self._here = place(self._env, args.nodes)
        self._findings: list[Finding] = list(self._here.findings)
        self._answers: list[Any] = []
        self.is_stuck = False
        """Whether a step is still blocked in a thread of this process."""

    def _add(self, level: Level, check: str, message: str) -> None:
        self._findings.append(Finding(level, check, message))

    @property
    def _has_failed(self) -> bool:
        return worst(self._findings) == "FAIL"

    @property
    def _own_facts(self) -> dict[str, Any]:
        return gather_facts(self._env, rank=self._here.rank, local_rank=self._here.local_rank)

    def examine(self) -> None:
        """Looks at this machine, or at all ranks, as the options and the variables say."""
        plan = Plan(
            largest_bytes=int(self._args.max_mb * (1 << 20)),
            timeout_s=self._args.timeout_s,
            interface=self._choose_interface(),
        )
        if self._args.verify:
            self._verify()
        elif self._args.processes is not None:
            self._examine_processes(plan)
        elif self._here.world_size > 1:
            self._examine_launched(plan)
        else:
            self._examine_alone()

    # ------------------------------------------------------------------ ways to examine

    def _examine_alone(self) -> None:
        if self._here.master_addr and self._here.master_port and not self._has_failed:
            if self._here.rank == 0:
                self._host_store()
            else:
                self._find_master()
        message = "not measured, as this process is alone: add --processes 2, or launch it as you do a run"
        self._add("PASS", "all-reduce", message)

    def _verify(self) -> None:
        from lightning_ddp.tools.doctor.verify import choose, refusal, verify

        args = self._args
        refused = refusal(self._here)
        if refused is not None:
            self._findings.append(refused)
            return
        options = {"timeout_s": args.timeout_s, "preload": args.preload, "only": args.only}
        self._findings += verify(choose(num_ranks=args.processes, device=args.device, **options))

    def _examine_processes(self, plan: Plan) -> None:
        count = self._args.processes
        with progress_bar(len(all_reduce_sizes(plan.largest_bytes)), "all-reduce") as bar:
            try:
                self._answers = run_ranks(
                    _examine_rank,
                    (plan, self._env),
                    world_size=count,
                    timeout_s=plan.timeout_s * 4,
                    on_progress=bar.update,
                )
            except ToolError as error:
                self._add("FAIL", "all-reduce", f"{count} processes on this machine: {error}")

    def _examine_launched(self, plan: Plan) -> None:
        found = None if self._has_failed else self._meet()
        if found is None:
            return
        here = self._here
        store = dist.PrefixStore(f"doctor/{self._env.get('TORCHELASTIC_RESTART_COUNT', 0)}", found)

        def together() -> list[Any]:
            total = len(all_reduce_sizes(plan.largest_bytes))
            with progress_bar(total, "all-reduce", is_shown=here.rank == 0) as bar:
                answer = examine(
                    store,
                    plan,
                    self._env,
                    rank=here.rank,
                    local_rank=here.local_rank,
                    world_size=here.world_size,
                    advance=bar.update,
                )
            answer["findings"] = [asdict(finding) for finding in self._findings]
            sizes = {"rank": here.rank, "world_size": here.world_size}
            return exchange(store, answer, timeout_s=plan.timeout_s, **sizes)

        try:
            self._answers = network.within(4 * plan.timeout_s, "measuring with the other ranks", together)
        except (RuntimeError, OSError) as error:
            self.is_stuck = True  # a group whose peers are gone waits for them when it is freed
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._add(
                "FAIL",
                "ranks",
                f"rank {here.rank} of {here.world_size} has the store at {here.master_addr}, port"
                f" {here.master_port}, but does not find all ranks through"
                f" {plan.interface or 'the default interface'}: {first_line}. Are all {here.world_size}"
                " started, and does no firewall close other ports between them?",
            )

    # ------------------------------------------------------------------ the master

    def _choose_interface(self) -> str | None:
        """The user's interface, or the one that leads to the master; adds a finding about it."""
        named = self._env.get(_INTERFACE_VARIABLE) or None
        if self._has_failed:
            return named
        try:
            address = network.resolve(self._here.master_addr or _LOOPBACK, self._args.timeout_s)
        except (OSError, network.DeadlinePassed) as error:
            self._add(
                "FAIL",
                "master",
                f"MASTER_ADDR={self._here.master_addr} cannot be looked up ({error}): correct the name, or"
                " give the address itself",
            )
            return named
        route, found = network.interface_to(address), network.addresses()
        num_nodes = self._here.num_nodes
        self._findings.append(
            checks.check_interface(named, route, found, num_nodes=num_nodes, variable=_INTERFACE_VARIABLE)
        )
        chosen = named or route
        return chosen if chosen in found else None

    def _meet(self) -> Any | None:
        """The store of the ranks; None, with a finding, if it cannot be had."""
        if self._here.rank == 0 and not self._here.has_agent_store:
            return self._host_store()
        address = self._find_master()
        if address is None:
            return None
        message = (
            f"{self._here.master_addr}, port {self._here.master_port}: something listens there, but it is no"
            " store of this run. Name another MASTER_PORT on all nodes"
        )
        return self._open_store(address, lambda error: ("master", message))

    def _open_store(
        self, address: str, explain: Callable[[Exception], tuple[str, str]], *, is_host: bool = False
    ) -> Any | None:
        """A store; None, with a finding of what `explain` says, if it cannot be opened or reached."""
        assert self._here.master_port is not None  # the findings would say so
        timeout_s = self._args.timeout_s
        try:
            return network.open_store(address, self._here.master_port, is_host=is_host, timeout_s=timeout_s)
        except (OSError, RuntimeError) as error:
            self.is_stuck = isinstance(error, network.DeadlinePassed)
            self._add("FAIL", *explain(error))
            return None

    def _host_store(self) -> Any | None:
        assert self._here.master_addr is not None  # the caller has looked
        where = f"MASTER_ADDR={self._here.master_addr}, MASTER_PORT={self._here.master_port}"
        address = network.resolve(self._here.master_addr, self._args.timeout_s)
        if not is_own_address(address):
            own = ", ".join(f"{a} ({name})" for name, a in network.addresses().items())
            message = f"{where}: rank 0 is here, but {address} is no address of this host, which has {own}"
            self._add("FAIL", "master", f"{message}. Name one that all nodes reach")
            return None

        def explain(error: Exception) -> tuple[str, str]:
            message = f"{where}: the port cannot be opened ({str(error).splitlines()[0]})"
            return "port", f"{message}. Another process has it; name another one on all nodes"

        store = self._open_store(address, explain, is_host=True)
        if store is not None:
            self._add("PASS", "port", f"{where}: free, and opened here")
        return store

    def _find_master(self) -> str | None:
        """The address of rank 0 once it listens; None, with a finding, if it does not within the deadline."""
        here, timeout_s = self._here, self._args.timeout_s
        assert here.master_addr is not None  # the findings would say so
        assert here.master_port is not None
        address = network.resolve(here.master_addr, timeout_s)
        interface = network.interface_to(address) or "no interface"
        where = f"{here.master_addr}, port {here.master_port}, through {interface}"
        problem = network.wait_until_reached(address, here.master_port, timeout_s)
        if problem is None:
            self._add("PASS", "master", f"{where}: answers")
            return address
        message = (
            f"rank {here.rank} cannot reach {where}: {problem}. Start rank 0 first or at the same time, give"
            " all nodes the same MASTER_ADDR and MASTER_PORT, and open that port in the first node's firewall"
        )
        self._add("FAIL", "master", message)
        return None

    # ------------------------------------------------------------------ the end

    def report(self, *, as_json: bool) -> int:
        """Checks what was gathered and prints it, unless another rank does; returns the exit status."""
        is_silent = len(self._answers) > 1 and self._here.rank > 0 and self._args.processes is None
        answers = self._answers or [self._own_facts]
        findings = [*self._findings, *checks.check_answers(answers)]
        timings = [Timing(**timing) for timing in answers[0].get("timings", [])]
        line: Line | None = None
        if timings and len(answers) > 1:
            line = fit_line(timings)
            num_hosts = len({answer["host"] for answer in answers})
            findings.append(checks.check_line(line, world_size=len(answers), num_hosts=num_hosts))
        findings.sort(key=lambda finding: ("PASS", "WARN", "FAIL").index(finding.level))
        if not is_silent:
            layout = format_json if as_json else format_report
            print(layout(answers, timings, line, findings), flush=True)
        return 1 if worst(findings) == "FAIL" else 0


def _examine_rank(context: RankContext, settings: tuple[Plan, dict[str, str]]) -> dict[str, Any]:
    """What a process of `--processes` runs."""
    plan, env = settings
    return examine(
        context.store,
        plan,
        env,
        rank=context.rank,
        local_rank=context.rank,
        world_size=context.world_size,
        advance=context.advance,
    )

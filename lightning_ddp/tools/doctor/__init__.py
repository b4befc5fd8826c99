"""Check this machine, and all ranks if they run this command, for distributed training.

Alone, with `--processes N` for N ranks here, under torchrun or srun, or on each node with `--nodes N` and the
variables NODE_RANK, MASTER_ADDR and MASTER_PORT. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from lightning_ddp.comm.teardown import flush_output
from lightning_ddp.launch.rendezvous import is_own_address, open_store
from lightning_ddp.tools import ToolError
from lightning_ddp.tools.command_line import (
    existing_file,
    format_table,
    output_path,
    positive_float,
    positive_int,
    seconds,
)
from lightning_ddp.tools.doctor.checklist import run_checklist
from lightning_ddp.tools.doctor.diagnosis import (
    INTERFACE_VARIABLE,
    Answer,
    check_all_reduce,
    check_answers,
    check_interface,
)
from lightning_ddp.tools.doctor.machine import (
    LEVELS,
    DeadlinePassed,
    Finding,
    Plan,
    addresses,
    examine,
    exchange,
    gather_facts,
    interface_to,
    place,
    resolve,
    wait_until_reached,
    within,
    worst,
)
from lightning_ddp.tools.doctor.verify import run_checks, settings_of
from lightning_ddp.tools.ranks import RankContext, run_ranks

_LOOPBACK = "127.0.0.1"
_ADVICE = {
    "NOT HERE": "nothing could be checked",
    "PASS": "no problem found",
    "WARN": "a run can start; see the lines with WARN",
    "FAIL": "a run would fail; see the lines with FAIL",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    text = "start N ranks on this machine and measure them"
    where.add_argument("--processes", type=positive_int, metavar="N", help=text)
    text = "number of nodes; run this command on each, with MASTER_ADDR, MASTER_PORT and NODE_RANK"
    where.add_argument("--nodes", type=positive_int, metavar="N", help=text)
    text = (
        "time limit of each network step in seconds, including the connection to the other ranks"
        " (default: %(default)s)"
    )
    parser.add_argument("--timeout-s", type=seconds, default=30.0, metavar="S", help=text)
    text = "size of the timed all-reduce in MiB (default: %(default)s)"
    parser.add_argument("--size-mb", type=positive_float, default=64.0, metavar="MIB", help=text)
    parser.add_argument("--json", action="store_true", help="print all results as JSON instead")
    text = (
        "train on this machine's GPUs, or else on 2 CPU ranks, and report PASS or FAIL. Compare with torch's"
        " DDP, and hooks and averagers with their formulas; kill a rank; time steps. Takes less than a"
        " minute. --processes limits the number of GPUs."
    )
    parser.add_argument("--verify", action="store_true", help=text)
    text = (
        "with --verify: go through the checklist of a first day on hardware, with each implementation of"
        " NCCL. Abort groups, and lose ranks in all phases of a step. An item is PASS, FAIL or NOT HERE."
        " Write PATH.json and PATH.png (default: checklist). Takes up to 9 minutes."
    )
    parser.add_argument("--full", nargs="?", type=output_path, const="checklist", metavar="PATH", help=text)
    text = "device of --verify (default: cuda if there is a GPU)"
    parser.add_argument("--device", choices=("cpu", "cuda"), help=text)
    text = "run only those checks of --verify whose names begin with this text, such as 'hook topk'"
    parser.add_argument("--only", nargs="+", default=(), metavar="CHECK", help=text)
    text = "Python file that each rank of --verify runs first, for example to register a backend"
    parser.add_argument("--preload", type=existing_file, metavar="FILE", help=text)


def run(args: argparse.Namespace) -> int:
    """Run the checks; print the report, on connected ranks by rank 0 alone; return exit status 0 or 1."""
    unused = [f"--{name}" for name in ("full", "device", "only", "preload") if getattr(args, name)]
    if unused and not args.verify:
        raise ToolError(f"{', '.join(unused)}: only for --verify. Add --verify, or leave it out")
    examination = _Examination(args)
    with _stdout_kept_for_json() if args.json else contextlib.nullcontext():
        examination.examine()
    status = examination.report(as_json=args.json)
    if examination.is_stuck:  # destructors would wait for the blocked thread
        flush_output()
        os._exit(status)
    return status


@contextlib.contextmanager
def _stdout_kept_for_json() -> Generator[None, None, None]:
    """Redirect all output to stdout in this context to stderr, such as gloo's, to keep it for JSON."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


class _Problem(Exception):
    """Error that ends the checks early, with the name of the failed check and a message."""


class _Examination:
    """One run of `doctor` in this process: performs the checks and collects their findings."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._env = dict(os.environ)
        self._here = place(self._env, args.nodes)
        self._findings: list[Finding] = list(self._here.findings)
        self._answers: list[Any] = []
        self.is_stuck = False
        """True if a step is still blocked in a thread of this process."""

    @property
    def _has_failed(self) -> bool:
        return worst(self._findings) == "FAIL"

    def examine(self) -> None:
        """Run the checks by the options: here, with launched or new ranks, or --verify; keep the findings."""
        plan = Plan(
            num_bytes=int(self._args.size_mb * (1 << 20)),
            timeout_s=self._args.timeout_s,
            interface=self._choose_interface(),
        )
        try:
            if self._args.verify:
                settings, only = settings_of(self._args, self._here), self._args.only
                full = self._args.full
                self._findings += run_checklist(settings, only, full) if full else run_checks(settings, only)
            elif self._args.processes is not None:
                self._examine_processes(plan)
            elif self._here.world_size > 1:
                self._examine_launched(plan)
            else:
                self._examine_alone()
        except _Problem as problem:
            self._findings.append(Finding("FAIL", *problem.args))
        except ToolError as error:
            self._findings.append(Finding("FAIL", "verify", str(error)))

    def _examine_alone(self) -> None:
        message = (
            "not measured, because this process is alone. Add --processes 2, or start it as you start a run"
        )
        self._findings.append(Finding("PASS", "all-reduce", message))
        if self._here.master_addr and self._here.master_port and not self._has_failed:
            if self._here.rank == 0:
                self._host_store()
            else:
                self._find_master()

    def _examine_processes(self, plan: Plan) -> None:
        count, limit_s = self._args.processes, 4 * plan.timeout_s
        try:
            self._answers = run_ranks(_examine_rank, plan, self._env, world_size=count, timeout_s=limit_s)
        except ToolError as error:
            raise _Problem("all-reduce", f"{count} processes on this machine: {error}") from error

    def _examine_launched(self, plan: Plan) -> None:
        if self._has_failed:
            return
        here, restart = self._here, self._env.get("TORCHELASTIC_RESTART_COUNT", 0)
        store = dist.PrefixStore(f"doctor/{restart}", self._meet())

        def together() -> list[Any]:
            where: dict[str, Any] = {"rank": here.rank, "world_size": here.world_size}
            answer = examine(store, plan, self._env, local_rank=here.local_rank, **where)
            answer["findings"] = [asdict(finding) for finding in self._findings]
            return exchange(store, answer, timeout_s=plan.timeout_s, **where)

        try:
            self._answers = within(4 * plan.timeout_s, "measuring with the other ranks", together)
        except (RuntimeError, OSError) as error:
            self.is_stuck = True  # the destructor of the group would wait for lost peers
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise _Problem(
                "ranks",
                f"rank {here.rank} of {here.world_size} has the store at {here.master_addr}, port"
                f" {here.master_port}, but does not find all ranks through"
                f" {plan.interface or 'the default interface'}: {first_line}. Check that all"
                f" {here.world_size} are started, and that no firewall closes other ports between them",
            ) from error

    def _choose_interface(self) -> str | None:
        """Return the user's network interface, or that of the route to the master; add a finding about it."""
        named = self._env.get(INTERFACE_VARIABLE) or None
        if self._has_failed:
            return named
        try:
            address = resolve(self._here.master_addr or _LOOPBACK, self._args.timeout_s)
        except (OSError, DeadlinePassed) as error:
            message = f"MASTER_ADDR={self._here.master_addr} cannot be resolved ({error}). Correct the name"
            self._findings.append(Finding("FAIL", "master", f"{message}, or give the address itself"))
            return named
        route, found = interface_to(address), addresses()
        self._findings.append(check_interface(named, route, found, num_nodes=self._here.num_nodes))
        chosen = named or route
        return chosen if chosen in found else None

    def _meet(self) -> Any:
        """Return a connection to the ranks' key-value store, which rank 0 opens unless torchrun has one."""
        here, limit = self._here, timedelta(seconds=self._args.timeout_s)
        if here.rank == 0 and not here.has_agent_store:
            return self._host_store()
        address = self._find_master()
        try:
            return self._opened(partial(dist.TCPStore, address, here.master_port, timeout=limit))
        except (OSError, RuntimeError) as error:
            raise _Problem(
                "master",
                f"{here.master_addr}, port {here.master_port}: something listens there, but it is not the"
                " store of this run. Use another MASTER_PORT on all nodes",
            ) from error

    def _host_store(self) -> Any:
        """Open the store at MASTER_ADDR and MASTER_PORT as a run does; add a finding and return the store."""
        where = f"MASTER_ADDR={self._here.master_addr}, MASTER_PORT={self._here.master_port}"
        try:
            store = self._opened(partial(open_store, self._here.master_addr, self._here.master_port))
        except (OSError, RuntimeError) as error:
            check = "port" if is_own_address(self._here.master_addr) else "master"
            raise _Problem(check, f"{where}: {str(error).splitlines()[0]}") from error
        self._findings.append(Finding("PASS", "port", f"{where}: free, and opened here"))
        return store

    def _opened(self, step: Callable[[], Any]) -> Any:
        limit_s = self._args.timeout_s
        try:
            store = within(limit_s + 1.0, f"connecting to the store, port {self._here.master_port}", step)
        except DeadlinePassed:
            self.is_stuck = True
            raise
        store.set_timeout(timedelta(seconds=limit_s))
        return store

    def _find_master(self) -> str:
        """Wait until the master's port accepts connections; return its address, or raise `_Problem`."""
        here, timeout_s = self._here, self._args.timeout_s
        address = resolve(here.master_addr, timeout_s)
        interface = interface_to(address) or "no interface"
        where = f"{here.master_addr}, port {here.master_port}, through {interface}"
        problem = wait_until_reached(address, here.master_port, timeout_s)
        if problem is not None:
            raise _Problem(
                "master",
                f"rank {here.rank} cannot reach {where}: {problem}. Start rank 0 first or at the same time,"
                " use the same MASTER_ADDR and MASTER_PORT on all nodes, and open that port in the first"
                " node's firewall",
            )
        self._findings.append(Finding("PASS", "master", f"{where}: answers"))
        return address

    def report(self, *, as_json: bool) -> int:
        """Evaluate the gathered facts; print the findings unless another rank does; return exit status."""
        is_silent = len(self._answers) > 1 and self._here.rank > 0 and self._args.processes is None
        here = self._here
        answers = self._answers or [gather_facts(self._env, rank=here.rank, local_rank=here.local_rank)]
        findings = [*self._findings, *check_answers(answers)]
        if len(answers) > 1:
            findings.append(check_all_reduce(answers))
        if self._args.full is None:  # a checklist has an order
            findings.sort(key=lambda finding: LEVELS.index(finding.level))
        document = {
            "verdict": worst(findings),
            "findings": list(map(asdict, findings)),
            "ranks": list(answers),
            "all_reduce": answers[0].get("all_reduce"),
        }
        if not is_silent:
            text = json.dumps(document, indent=2) if as_json else format_report(answers, findings)
            print(text, flush=True)
        return 1 if worst(findings) == "FAIL" else 0


def _examine_rank(context: RankContext, plan: Plan, env: dict[str, str]) -> dict[str, Any]:
    rank, world_size = context.rank, context.world_size
    return examine(context.store, plan, env, rank=rank, local_rank=rank, world_size=world_size)


def format_report(answers: Sequence[Answer], findings: Sequence[Finding]) -> str:
    """Return the report as text: ranks, variables and findings; the last line is the verdict."""
    rows = []
    for answer in answers:
        devices, place = answer["devices"], answer["local_rank"]
        device = devices[place] if place < len(devices) else f"CPU ({answer['num_cpus']} cores)"
        values = (*(answer[name] for name in ("rank", "host", "pid")), device, answer["backend"])
        rows.append((*map(str, values), answer.get("interface") or "-"))
    variables = "\n".join(f"  {name}={value}" for name, value in answers[0]["variables"].items())
    width = max(len(finding.check) for finding in findings)
    verdict = worst(findings)
    return "\n\n".join(
        (
            format_table(("rank", "host", "pid", "device", "backend", "interface"), rows),
            f"Variables of rank {answers[0]['rank']}:\n{variables or '  none'}",
            "\n".join(f"{f.level}  {f.check.ljust(width)}  {f.message}" for f in findings),
            f"{verdict}: {_ADVICE[verdict]}",
        )
    )

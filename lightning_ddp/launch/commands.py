"""The commands `run` and `leave`: start a program; take a node out of a run."""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_ddp._lightning import ROOTS
from lightning_ddp.errors import LightningDDPError
from lightning_ddp.launch.environment import take_slurm_task
from lightning_ddp.launch.zygote import Program
from lightning_ddp.supervise.protocol import DrainNode, DrainNodeReply, Message

_ANSWER_S = 15.0
_IMPORTED = ("lightning_ddp.ddp.module", "lightning_ddp.launch.launcher", "lightning_ddp.launch.supervisor")
_RARE = (100_000, 10, 10)


class Run:
    """Run a program: import its libraries once, and fork the ranks of this node from that process."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of `run` to the parser; all that follows the program is passed on to it."""
        parser.add_argument(
            "--preload",
            action="append",
            default=[],
            metavar="MODULE",
            help="import this module once for all ranks as well; may be repeated",
        )
        parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is a module name")
        parser.add_argument(
            "program", nargs=argparse.REMAINDER, metavar="PROGRAM ...", help="the script and its arguments"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Run a program in forked ranks; exit as rank 0 does. Return 2 if none is found, or not on Linux."""
        if not args.program or sys.platform != "linux":
            why = "which program?" if sys.platform == "linux" else "forking torch is safe on Linux only"
            print(f"error: python -m lightning_ddp run: {why}", file=sys.stderr)
            return 2
        name, *arguments = args.program
        if not args.is_module and not os.path.exists(name):
            why = f"can't open file {os.path.abspath(name)!r}: [Errno 2] No such file or directory"
            print(f"{sys.executable}: {why}", file=sys.stderr)
            return 2
        program = Program("module" if args.is_module else "script", name, arguments)
        if not sys.flags.safe_path:
            del sys.path[0]  # the folder of what Python was started with
        _import_once([*_namespaces(program), *_IMPORTED, *args.preload])
        take_slurm_task()
        from lightning_ddp.launch.supervisor import supervise  # only here, as all commands import this file

        return supervise(program)


def _import_once(modules: Sequence[str]) -> None:
    """Import modules, and exclude their objects from garbage collection, which would copy them in forks."""
    usual = gc.get_threshold()
    gc.set_threshold(*_RARE)
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    gc.set_threshold(*usual)


def _namespaces(program: Program) -> list[str]:
    """Return the installed Lightning packages that a program's text names, else the first installed one."""
    path = Path(program.name)
    if program.kind == "module":
        path = Path(*program.name.split(".")).with_suffix(".py")
    text = path.read_text(errors="replace") if path.is_file() else ""
    patterns = (r"\bpytorch_lightning\b", r"\b(import|from) lightning\b|\blightning\.pytorch\b")
    is_named = {root: re.search(pattern, text) for root, pattern in zip(ROOTS, patterns, strict=True)}
    there = [root for root in ROOTS if importlib.util.find_spec(root.partition(".")[0]) is not None]
    return [root for root in there if is_named[root]] or there[:1]


class Leave:
    """Drain a node: its ranks leave a run at a step boundary, and all other ranks continue."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of `leave` to the parser."""
        parser.add_argument(
            "--node",
            type=int,
            metavar="N",
            help="NODE_RANK of the node to drain (default: that of the environment)",
        )
        parser.add_argument(
            "address",
            nargs="?",
            metavar="HOST:PORT",
            help="MASTER_ADDR and MASTER_PORT of the run (default: those of the environment)",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Ask a run's server to drain a node; return 0 if it agrees, before ranks have left; else 2."""
        variables = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
        told = args.address or (":".join(variables) if all(variables) else None)
        node = args.node if args.node is not None else os.environ.get("NODE_RANK", "")
        try:
            if told is None:
                raise LightningDDPError("no run given: pass HOST:PORT, or set MASTER_ADDR and MASTER_PORT")
            if not str(node).isdecimal():
                raise LightningDDPError("no node given: pass --node, or set NODE_RANK")
            address, _, port = told.rpartition(":")
            if not address or not port.isdecimal():
                raise LightningDDPError(f"{told!r}: expected HOST:PORT")
            answer = _ask_run(address.strip("[]"), int(port), DrainNode(int(node)))
            if not isinstance(answer, DrainNodeReply) or answer.why is not None:
                raise LightningDDPError(f"{getattr(answer, 'why', None) or 'the run is another version'}")
        except LightningDDPError as error:
            print(f"error: python -m lightning_ddp leave: {error}", file=sys.stderr)
            return 2
        ranks = ", ".join(map(str, answer.ranks))
        print(f"lightning_ddp: rank {ranks} of node {node} leaves the run at the next step boundary")
        return 0


def _ask_run(address: str, port: int, question: Message) -> Message:
    """Send a question to the control server of the run whose store is at an address; return the answer."""
    # only here, as all other commands import this file
    from lightning_ddp.launch.job_context import server_in
    from lightning_ddp.launch.rendezvous import TOKEN_VARIABLE, run_store, running
    from lightning_ddp.supervise.client import ask

    number = running(address, port)
    if number is None:
        raise LightningDDPError(
            f"no run that can continue without lost nodes is at {address}, port {port}: it has ended, or"
            " its nodes have not connected yet, or it has on_failure='stop'"
        )
    store = run_store(f"{address}:{port}/{number}", None)
    return ask(server_in(store, os.environ.get(TOKEN_VARIABLE)), question, timeout_s=_ANSWER_S)

"""`python -m lightning_ddp join`: brings this node into a run that goes on, in the place of a lost one."""

from __future__ import annotations

import argparse
import os
import sys

from lightning_ddp.errors import LightningDDPError
from lightning_ddp.launch import supervisor

__all__ = ["add_arguments", "run"]

_ANSWER_S = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options: the address, and those of `run`."""
    parser.add_argument("address", metavar="HOST:PORT", help="MASTER_ADDR and MASTER_PORT of the run")
    supervisor.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the program of the run on this node, as `run` does, under the NODE_RANK of a node that is lost."""
    address, _, port = args.address.rpartition(":")
    address = address.strip("[]")
    if not address or not port.isdecimal():
        return _refuse(f"{args.address!r} is no HOST:PORT")
    try:
        node = os.environ.get("NODE_RANK") or _missing_node(address, int(port))
    except LightningDDPError as error:
        return _refuse(str(error))
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=port, NODE_RANK=node)
    print(f"lightning_ddp: this node joins the run at {args.address} with NODE_RANK={node}", file=sys.stderr)
    return supervisor.run(args)


def _missing_node(address: str, port: int) -> str:
    """The lowest node that the run has lost.

    Raises:
        LightningDDPError: there is none, or no such run.
    """
    # only here, as all other commands import this file
    from lightning_ddp.launch.rendezvous import TOKEN_VARIABLE, run_store, running
    from lightning_ddp.launch.session import server_in
    from lightning_ddp.supervise.client import ask
    from lightning_ddp.supervise.protocol import Missing, WhoIsMissing

    number = running(address, port)
    if number is None:
        raise LightningDDPError(
            f"no run that goes on without lost nodes is at {address}, port {port}: it has ended, or its nodes"
            " have not met yet, or it has no on_failure='replace'"
        )
    store = run_store(f"{address}:{port}/{number}", None)
    answer = ask(server_in(store, os.environ.get(TOKEN_VARIABLE)), WhoIsMissing(), timeout_s=_ANSWER_S)
    del store  # the ranks are forked from this process
    if not isinstance(answer, Missing) or not answer.nodes:
        raise LightningDDPError("all nodes of the run are there. NODE_RANK=... waits until that one is lost")
    return str(answer.nodes[0])


def _refuse(why: str) -> int:
    print(f"error: python -m lightning_ddp join: {why}", file=sys.stderr)
    return 2

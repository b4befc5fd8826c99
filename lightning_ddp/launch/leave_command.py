"""`python -m lightning_ddp leave`: takes a node out of a run, whose others go on."""

from __future__ import annotations

import argparse
import os
import sys

from lightning_ddp.errors import LightningDDPError
from lightning_ddp.launch.join_command import address_of, ask_run

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument(
        "--node", type=int, metavar="N", help="the NODE_RANK of the node; that of the environment by default"
    )
    parser.add_argument(
        "address",
        nargs="?",
        metavar="HOST:PORT",
        help="MASTER_ADDR and MASTER_PORT of the run; those of the environment by default",
    )


def run(args: argparse.Namespace) -> int:
    """Asks the run; returns at once, while the node trains up to the next step boundary."""
    from lightning_ddp.supervise.protocol import Dismiss, Dismissed  # all other commands import this file

    variables = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
    told = args.address or (":".join(variables) if all(variables) else None)
    node = args.node if args.node is not None else os.environ.get("NODE_RANK", "")
    try:
        if told is None:
            raise LightningDDPError("which run? Name HOST:PORT, or set MASTER_ADDR and MASTER_PORT")
        if not str(node).isdecimal():
            raise LightningDDPError("which node? Name it by --node, or set NODE_RANK")
        answer = ask_run(*address_of(told), Dismiss(int(node)))
        if not isinstance(answer, Dismissed) or answer.why is not None:
            raise LightningDDPError(f"{getattr(answer, 'why', None) or 'the run is another version'}")
    except LightningDDPError as error:
        print(f"error: python -m lightning_ddp leave: {error}", file=sys.stderr)
        return 2
    ranks = ", ".join(map(str, answer.ranks))
    print(f"lightning_ddp: rank {ranks} of node {node} leaves the run at the next step boundary")
    return 0

"""`python -m lightning_ddp join`: brings this node into a run that goes on, in the place of a lost one."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from lightning_ddp.errors import LightningDDPError
from lightning_ddp.launch import supervisor

if TYPE_CHECKING:
    from lightning_ddp.supervise.protocol import Message

__all__ = ["add_arguments", "address_of", "ask_run", "run"]

_ANSWER_S = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options: the address, and those of `run`."""
    parser.add_argument("address", metavar="HOST:PORT", help="MASTER_ADDR and MASTER_PORT of the run")
    supervisor.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the program of the run on this node, as `run` does, under the NODE_RANK of a node that is lost."""
    try:
        address, port = address_of(args.address)
        node = os.environ.get("NODE_RANK") or _missing_node(address, port)
    except LightningDDPError as error:
        print(f"error: python -m lightning_ddp join: {error}", file=sys.stderr)
        return 2
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), NODE_RANK=node)
    print(f"lightning_ddp: this node joins the run at {args.address} with NODE_RANK={node}", file=sys.stderr)
    return supervisor.run(args)


def address_of(text: str) -> tuple[str, int]:
    """Where the store of a run listens.

    Raises:
        LightningDDPError: the text is no HOST:PORT.
    """
    address, _, port = text.rpartition(":")
    address = address.strip("[]")
    if not address or not port.isdecimal():
        raise LightningDDPError(f"{text!r} is no HOST:PORT")
    return address, int(port)


def ask_run(address: str, port: int, question: Message) -> Message:
    """What the control server of a run answers.

    Args:
        address: of the first node.
        port: of its store there.
        question: what it is asked.

    Raises:
        LightningDDPError: there is no such run.
    """
    # only here, as all other commands import this file
    from lightning_ddp.launch.rendezvous import TOKEN_VARIABLE, run_store, running
    from lightning_ddp.launch.session import server_in
    from lightning_ddp.supervise.client import ask

    number = running(address, port)
    if number is None:
        raise LightningDDPError(
            f"no run that goes on without lost nodes is at {address}, port {port}: it has ended, or its nodes"
            " have not met yet, or it has on_failure='stop'"
        )
    store = run_store(f"{address}:{port}/{number}", None)
    return ask(server_in(store, os.environ.get(TOKEN_VARIABLE)), question, timeout_s=_ANSWER_S)


def _missing_node(address: str, port: int) -> str:
    """The lowest node that the run has lost.

    Raises:
        LightningDDPError: there is none, or no such run.
    """
    from lightning_ddp.supervise.protocol import Missing, WhoIsMissing

    answer = ask_run(address, port, WhoIsMissing())
    if not isinstance(answer, Missing) or not answer.nodes:
        raise LightningDDPError("all nodes of the run are there. NODE_RANK=... waits until that one is lost")
    return str(answer.nodes[0])

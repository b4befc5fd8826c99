"""Trains two steps where the environment says, after the test has opened a gate for all that wait there."""

from __future__ import annotations

import ctypes
import json
import os
from datetime import timedelta

import pytorch_lightning as pl
from hydra_app.training import fit, note
from pytorch_lightning.plugins.environments import KubeflowEnvironment

import lightning_ddp
from lightning_ddp.launch.orphans import PARENT_VARIABLE

_CLONE_NEWNET = 0x40000000


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def main(arguments: list[str]) -> None:
    """Args: one JSON object: `name`, `environment`, and optional `namespace`, `gate`, `timeout_s`, `fit`."""
    order = json.loads(arguments[0])
    options = order.get("fit", {})
    if PARENT_VARIABLE not in os.environ:  # a child has it all from its parent
        os.environ.update(order["environment"])
        if "namespace" in order:
            _enter(order["namespace"])
        if "gate" in order:
            os.close(os.open(order["gate"], os.O_RDONLY))  # a named pipe: waits until somebody writes
    if "timeout_s" in order:
        timeout = timedelta(seconds=order["timeout_s"])
        options["strategy"] = lightning_ddp.CustomDDPStrategy(timeout=timeout)
    if "KUBERNETES_PORT" in os.environ:
        options["plugins"] = KubeflowEnvironment()
    pl.seed_everything(7)  # as the program of the other tests
    note(order["name"], fit(**options))

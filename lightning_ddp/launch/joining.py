"""Joining a run: first the control channel, so that a rank that dies is known; then the process group."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch

from lightning_ddp._lightning import ClusterEnvironment
from lightning_ddp.launch.brood import set_for_run
from lightning_ddp.launch.interface import choose_interface
from lightning_ddp.launch.orphans import is_child
from lightning_ddp.launch.reconciliation import current, is_enabled, open_server
from lightning_ddp.launch.rendezvous import STORE_VARIABLE, existing_group, find_store, join_default_group
from lightning_ddp.launch.shared_job import share_job
from lightning_ddp.reconcile.record import Identity
from lightning_ddp.reconcile.settings import ReconcileSettings

__all__ = ["join_run"]

_LONGEST_WAIT_S = 1800.0

_external_store: Any = None


def join_run(
    backend: str,
    *,
    environment: ClusterEnvironment,
    num_nodes: int,
    timeout: timedelta | None,
    device: torch.device,
    settings: ReconcileSettings,
) -> Any:
    """Connects this process to the others of its run and returns the default process group.

    All ranks call it; it returns once all have. What exists already is used again.

    Args:
        backend: 'gloo', 'nccl' ...
        environment: tells rank, world size and the address of the first node.
        num_nodes: nodes of the run.
        timeout: of the rendezvous and of collectives; None for torch's own.
        device: this process's device.
        settings: times of reconciliation.

    Raises:
        ConfigurationError: a group of another size exists already.
        RendezvousError: the others cannot be reached.
        PeerFailure: one of them failed meanwhile.
    """
    global _external_store
    rank, world_size = environment.global_rank(), environment.world_size()
    group = existing_group(world_size)
    if group is not None:
        if _external_store is not None:
            share_job(_external_store, rank=rank)
        return group
    store = find_store(environment, timeout)
    if is_enabled() and world_size > 1:
        identity = Identity(rank=rank, node_rank=environment.node_rank())
        ours = current()
        if STORE_VARIABLE not in os.environ and rank == 0:  # no launcher of ours has opened it
            ours.server = open_server(
                environment.main_address,
                store,
                identity=identity,
                world_size=world_size,
                num_nodes=num_nodes,
                settings=settings,
            )
        timeout_s = _LONGEST_WAIT_S if timeout is None else timeout.total_seconds()
        ours.connect(store, identity, settings, is_child=is_child(), timeout_s=timeout_s)
    if STORE_VARIABLE not in os.environ and world_size > 1:
        _external_store = store
        share_job(store, rank=rank)
    if world_size > 1:
        set_for_run(choose_interface(environment.main_address, backend))
    return join_default_group(
        backend, store, rank=rank, world_size=world_size, timeout=timeout, device=device
    )

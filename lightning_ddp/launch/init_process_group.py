"""Joining a run: first the control channel, so that a rank that dies is known; then the process group."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp._lightning import ClusterEnvironment
from lightning_ddp.comm.abort import remember_connections
from lightning_ddp.errors import RendezvousError
from lightning_ddp.hydra_jobs.jobs import jobs
from lightning_ddp.hydra_jobs.shared_job import share_job
from lightning_ddp.launch.init_method import meet, tcp_address
from lightning_ddp.launch.interface import backend_names, choose_interface
from lightning_ddp.launch.parent_death import launcher_pid
from lightning_ddp.launch.reconciliation import is_enabled
from lightning_ddp.launch.rendezvous import existing_group, join_default_group, note_met, run_store
from lightning_ddp.launch.session import Session
from lightning_ddp.launch.stop_signals import WaitSignals
from lightning_ddp.launch.terminal import describe_rank, tell_long_wait
from lightning_ddp.supervise.failure_record import Identity
from lightning_ddp.supervise.settings import ReconcileSettings

__all__ = ["FIRST_JOB", "join_run", "waiting"]

_LONGEST_WAIT_S = 1800.0
FIRST_JOB = "the job that the first node has composed"


def join_run(
    session: Session,
    backend: str,
    *,
    environment: ClusterEnvironment,
    num_nodes: int,
    timeout: timedelta | None,
    device: torch.device,
    settings: ReconcileSettings,
    init_method: str | None = None,
    given_store: Any | None = None,
) -> Any:
    """Connects this process to the others of its run and returns the default process group.

    All ranks call it; it returns once all have. What exists already is used again.

    Args:
        session: of this process.
        backend: 'gloo', 'nccl' ...
        environment: tells rank, world size and the address of the first node.
        num_nodes: nodes of the run.
        timeout: of the rendezvous and of collectives; None for torch's own.
        device: this process's device.
        settings: times of reconciliation.
        init_method: where the ranks meet; None for the launcher's store, else `env://`.
        given_store: a store of the user's that all ranks reach, instead.

    Raises:
        ConfigurationError: a group of another size exists already, or there is no such backend.
        RendezvousError: the others cannot be reached.
        PeerFailure: one of them failed meanwhile.
    """
    rank, world_size = environment.global_rank(), environment.world_size()
    has_launcher = session.rendezvous.where is not None
    group = existing_group(1 if session.is_joining else world_size)
    if group is not None:
        _name_interface(session, environment, init_method, backend)
        if session.store is not None and not has_launcher and world_size > 1:
            with waiting(session, environment, lambda: FIRST_JOB):
                share_job(session.store, rank=rank)
        return group
    if session.rendezvous.where is not None:
        jobs.open_store = partial(run_store, session.rendezvous.where)
    is_elsewhere = given_store is not None or _is_elsewhere(init_method, has_launcher)

    def meet_elsewhere() -> Any:
        if given_store is not None:
            return dist.PrefixStore("lightning_ddp", given_store)
        assert init_method is not None  # or it would not be elsewhere
        with waiting(session, environment, lambda: f"the others at {init_method}"), remember_connections():
            return meet(init_method, rank, world_size, timeout)

    # the control channel is found through the launcher's store, so that a failure to meet ends all ranks
    if session.num_failed:
        # by a connection of its own: the other one was shut down with those of the process group
        store = dist.PrefixStore(f"after{session.num_failed}", session.store.clone())
    elif has_launcher or not is_elsewhere:
        with waiting(session, environment, lambda: f"the store of the run{_place(environment)}"):
            store = session.rendezvous.find(environment, timeout)
    else:
        store = meet_elsewhere()
    if session.is_joining:
        return _begin_alone(session, backend, store, environment, settings, timeout, device)
    if is_enabled() and (world_size > 1 or launcher_pid() is not None):  # a launcher counts on a lone one too
        identity = Identity(rank=rank, node_rank=environment.node_rank())
        if rank == 0 and (session.num_failed or not has_launcher):
            address = tcp_address(init_method)
            session.open_server(
                environment.main_address if address is None else address[0],
                store,
                identity=identity,
                world_size=world_size,
                num_nodes=num_nodes,
                settings=settings,
            )
        timeout_s = _LONGEST_WAIT_S if timeout is None else timeout.total_seconds()
        with waiting(
            session, environment, lambda: f"all {world_size} ranks; there are {_who_is_here(session)}"
        ):
            session.connect(store, identity, settings, timeout_s)
        if rank == 0 and has_launcher and settings.recovery is not None:
            note_met(store)
    if has_launcher and is_elsewhere and not session.num_failed:
        store = meet_elsewhere()
    session.store = store
    if not has_launcher and world_size > 1:
        with waiting(session, environment, lambda: FIRST_JOB):
            share_job(store, rank=rank)
    _name_interface(session, environment, init_method, backend)
    if timeout is not None and "nccl" in backend_names(backend) and session.control.watch is not None:
        # this package says first what is late; NCCL's watchdog, which ends the process, is the last resort
        timeout += timedelta(seconds=settings.failure_grace_s)
    with waiting(session, environment, lambda: f"the process group ({backend}) of {world_size} ranks"):
        return join_default_group(
            backend, store, rank=rank, world_size=world_size, timeout=timeout, device=device
        )


def _begin_alone(
    session: Session,
    backend: str,
    store: Any,
    environment: ClusterEnvironment,
    settings: ReconcileSettings,
    timeout: timedelta | None,
    device: torch.device,
) -> Any:
    """In the place of a lost rank: connects to the run, and makes a group of this process alone."""
    identity = Identity(rank=environment.global_rank(), node_rank=environment.node_rank())
    try:
        session.connect(store, identity, settings, _LONGEST_WAIT_S)
    except RendezvousError as error:
        if identity.node_rank == 0 and isinstance(error.__cause__, ConnectionRefusedError):
            session.control.leave_late()  # the server has been on this host, and was closed at the end
        raise
    session.store = store
    _name_interface(session, environment, None, backend)
    return join_default_group(backend, dist.HashStore(), rank=0, world_size=1, timeout=timeout, device=device)


@contextmanager
def waiting(
    session: Session, environment: ClusterEnvironment, what: Callable[[], str], rank: int | None = None
) -> Generator[None, None, None]:
    """In here this process waits for others; one process a node says so, and signals end it at once.

    Args:
        session: of this process.
        environment: tells its rank.
        what: what it waits for, for people; any thread.
        rank: where the environment does not know it yet.
    """
    rank = environment.global_rank() if rank is None else rank

    def end(message: str) -> None:
        session.children.kill()
        session.control.fail(message)

    with ExitStack() as stack:
        if environment.local_rank() == 0:
            stack.enter_context(tell_long_wait(rank, what))
        stack.enter_context(WaitSignals(describe_rank(rank), what, end))
        yield


def _place(environment: ClusterEnvironment) -> str:
    return f" at {environment.main_address}:{environment.main_port} (rank 0 opens it)"


def _who_is_here(session: Session) -> list[int] | None:
    return session.control.watch.who_is_here() if session.control.watch is not None else None


def _name_interface(
    session: Session, environment: ClusterEnvironment, init_method: str | None, backend: str
) -> None:
    """Has the groups that are made in this run use the interface that leads to the first node."""
    if environment.world_size() > 1:
        address = tcp_address(init_method)
        main_address = environment.main_address if address is None else address[0]
        session.control.set_while_running(choose_interface(main_address, backend))


def _is_elsewhere(init_method: str | None, has_launcher: bool) -> bool:
    """Whether the ranks meet neither in the launcher's store nor at `env://`."""
    if init_method is None or init_method.startswith("env://"):
        return False
    return not (has_launcher and tcp_address(init_method) is not None)  # the launcher listens there

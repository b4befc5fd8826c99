"""Joins this process to its job: finds the store, connects the control channel, makes the process group."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp._lightning import ClusterEnvironment
from lightning_ddp._torch import default_store
from lightning_ddp.comm.teardown import remember_connections
from lightning_ddp.errors import RendezvousError
from lightning_ddp.hydra_jobs.jobs import jobs, share_job
from lightning_ddp.launch.child_process import launcher_pid
from lightning_ddp.launch.failure_handler import is_enabled
from lightning_ddp.launch.interface import backend_names, choose_interface
from lightning_ddp.launch.job_context import JobContext
from lightning_ddp.launch.rendezvous import (
    existing_group,
    join_default_group,
    meet,
    note_met,
    run_store,
    tcp_address,
)
from lightning_ddp.launch.stop_signals import WaitSignals, describe_rank, tell_long_wait
from lightning_ddp.supervise.failure_record import Identity
from lightning_ddp.supervise.settings import SupervisionSettings

__all__ = ["FIRST_JOB", "Joining", "waiting"]

_LONGEST_WAIT_S = 1800.0
FIRST_JOB = "the job that the first node has composed"


@contextmanager
def waiting(
    context: JobContext, environment: ClusterEnvironment, what: Callable[[], str], rank: int | None = None
) -> Generator[None, None, None]:
    """Wait for other ranks in this context: one process per node prints so, and signals end it at once.

    Args:
        what: what is awaited, for people. Thread-safe.
        rank: rank of this process, where the environment does not know it yet.
    """
    rank = environment.global_rank() if rank is None else rank

    def end(message: str) -> None:
        context.children.kill()
        context.control.fail(message)

    with ExitStack() as stack:
        if environment.local_rank() == 0:
            stack.enter_context(tell_long_wait(rank, what))
        stack.enter_context(WaitSignals(describe_rank(rank), what, end))
        yield


@dataclass(frozen=True, kw_only=True)
class Joining:
    """Options with which this process joins its job."""

    context: JobContext
    backend: str
    """'gloo', 'nccl' ..."""
    environment: ClusterEnvironment
    num_nodes: int
    timeout: timedelta | None
    """Timeout of the rendezvous and of collectives; None for torch's own."""
    device: torch.device
    settings: SupervisionSettings
    init_method: str | None = None
    """URL at which ranks meet; None for the launcher's store, else `env://`."""
    given_store: Any | None = None
    """Store of the user that all ranks reach, instead."""

    def group(self) -> Any:
        """Return the default process group, joining the job if there is none.

        Collective: all ranks must call it.

        Raises:
            ConfigurationError: a group of another size exists already, or the backend is unknown.
            RendezvousError: the others cannot be reached.
            PeerFailure: another rank failed meanwhile.
        """
        context = self.context
        group = existing_group(1 if context.is_joining else self._world_size)
        if group is None:
            if context.rendezvous.where is not None:
                jobs().open_store = partial(run_store, context.rendezvous.where)
            # the control channel is found through the launcher's store: a failure to meet ends all ranks
            store = self._find_store()
            self._connect(store)
            if self._has_launcher and self._is_elsewhere and not (context.num_failed or context.is_joining):
                store = self._meet_elsewhere()
            context.store = store
        elif (
            context.store is None and self._world_size > 1
        ):  # of a group that something else, as Ray, has made
            store = dist.PrefixStore("lightning_ddp", default_store())
            self._connect(store)
            context.store = store
        if context.store is not None and not self._has_launcher and self._world_size > 1:
            with self._waiting(lambda: FIRST_JOB):
                share_job(context.store, rank=self._rank)
        if self._world_size > 1:
            context.control.set_while_running(choose_interface(self._main_address, self.backend))
        return self._make_group() if group is None else group

    # ------------------------------------------------------------------ the store

    def _find_store(self) -> Any:
        context, environment = self.context, self.environment
        if context.num_failed:
            # by a connection of its own: the other one was shut down with those of the process group
            return dist.PrefixStore(f"after{context.num_failed}", context.store.clone())
        if self._is_elsewhere and not self._has_launcher:
            return self._meet_elsewhere()
        where = f"{environment.main_address}:{environment.main_port}"
        with self._waiting(lambda: f"the store of the run at {where} (rank 0 opens it)"):
            return context.rendezvous.find(environment, self.timeout)

    def _meet_elsewhere(self) -> Any:
        if self.given_store is not None:
            return dist.PrefixStore("lightning_ddp", self.given_store)
        assert self.init_method is not None  # or it would not be elsewhere
        with self._waiting(lambda: f"the others at {self.init_method}"), remember_connections():
            return meet(self.init_method, self._rank, self._world_size, self.timeout)

    @property
    def _is_elsewhere(self) -> bool:
        """True if ranks meet neither in the launcher's store nor at `env://`."""
        if self.given_store is not None:
            return True
        if self.init_method is None or self.init_method.startswith("env://"):
            return False
        return not (self._has_launcher and tcp_address(self.init_method))  # the launcher listens there

    # ------------------------------------------------------------------ the control channel

    def _connect(self, store: Any) -> None:
        context, settings, rank = self.context, self.settings, self._rank
        identity = Identity(rank=rank, node_rank=self.environment.node_rank())
        if context.is_joining:
            self._connect_late(store, identity)
            return
        # a launcher counts on a lone rank too
        if is_enabled() and (self._world_size > 1 or launcher_pid() is not None):
            if rank == 0 and (context.num_failed or not self._has_launcher):
                context.open_server(
                    self._main_address,
                    store,
                    identity=identity,
                    world_size=self._world_size,
                    num_nodes=self.num_nodes,
                    settings=settings,
                )
            timeout_s = _LONGEST_WAIT_S if self.timeout is None else self.timeout.total_seconds()
            with self._waiting(self._describe_ranks):
                context.connect(store, identity, settings, timeout_s)
            if rank == 0 and self._has_launcher and settings.recovery is not None:
                note_met(store)

    def _connect_late(self, store: Any, identity: Identity) -> None:
        """Connect a process that replaces a lost one; end it if the job has ended."""
        try:
            self.context.connect(store, identity, self.settings, _LONGEST_WAIT_S)
        except RendezvousError as error:
            if identity.node_rank == 0 and isinstance(error.__cause__, ConnectionRefusedError):
                self.context.control.leave_late()  # the server was on this host, and was closed at the end
            raise

    def _describe_ranks(self) -> str:
        watch = self.context.control.watch
        connected = None if watch is None else watch.who_is_here()
        return f"all {self._world_size} ranks; connected so far: {connected}"

    # ------------------------------------------------------------------ the process group

    def _make_group(self) -> Any:
        """Make the default group; in a process that replaces a lost one, of this process alone."""
        rank, world_size, store, timeout = self._rank, self._world_size, self.context.store, self.timeout
        if self.context.is_joining:
            rank, world_size, store = 0, 1, dist.HashStore()
        is_watched = self.context.control.watch is not None
        if timeout is not None and "nccl" in backend_names(self.backend) and is_watched:
            # this package reports first what is late; NCCL's watchdog, which ends the process, is the last
            timeout += timedelta(seconds=self.settings.failure_grace_s)
        with self._waiting(lambda: f"the process group ({self.backend}) of {world_size} ranks"):
            return join_default_group(
                self.backend, store, rank=rank, world_size=world_size, timeout=timeout, device=self.device
            )

    # ------------------------------------------------------------------ what is known

    def _waiting(self, what: Callable[[], str]) -> Any:
        return waiting(self.context, self.environment, what)

    @property
    def _rank(self) -> int:
        return int(self.environment.global_rank())

    @property
    def _world_size(self) -> int:
        return int(self.environment.world_size())

    @property
    def _has_launcher(self) -> bool:
        return self.context.rendezvous.where is not None

    @property
    def _main_address(self) -> str:
        address = tcp_address(self.init_method)
        return self.environment.main_address if address is None else address[0]

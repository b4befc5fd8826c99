"""Rendezvous of the processes of a run: the key-value store, and the default process group from it.

The launcher binds the store's port before it starts a child, so that no port is ever chosen and then taken by
somebody else. Processes that something else started (torchrun, SLURM) meet at `env://`, as in torch.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp._lightning import ClusterEnvironment
from lightning_ddp.comm.abort import remember_connections
from lightning_ddp.comm.elastic_restart import store_of_attempt
from lightning_ddp.errors import ConfigurationError, RendezvousError
from lightning_ddp.launch.interface import (
    backend_names,
    describe_route,
    is_own_address,
    require_resolvable,
)

__all__ = [
    "JOIN_VARIABLE",
    "STORE_VARIABLE",
    "TOKEN_VARIABLE",
    "HostedStore",
    "Rendezvous",
    "existing_group",
    "join_default_group",
    "leave_default_group",
    "named_port",
    "note_met",
    "require_backend",
    "run_store",
    "running",
]

STORE_VARIABLE = "LIGHTNING_DDP_STORE"
"""Environment variable by which a launcher tells its processes where its store listens: `host:port/run`.

`run` counts the runs of the launching process: with a port that the user named they share one store."""

TOKEN_VARIABLE = "LIGHTNING_DDP_TOKEN"
"""Environment variable with the secret of the control channel.

On one node the launcher draws it. Elsewhere the user may set it, the same for all processes; where nobody
has, rank 0 draws one and leaves it in the store, where it is as readable as that is."""


JOIN_VARIABLE = "LIGHTNING_DDP_JOIN"
"""Environment variable by which a process knows that it comes in the place of one that a run has lost."""


_RUN_KEY = "lightning_ddp/run"
"""In a store of several runs: the number of the present one."""
_MET_KEY = "lightning_ddp/has_met"
"""In the store of a run that goes on without ranks that it loses: all have been there."""
_PROBE_S = 2.0


class HostedStore:
    """A store that listens in this process, and the environment variables that lead to it.

    Args:
        address: name or address under which the other processes reach this one.
        port: port to bind; None for any free one.
        named_by: where the user has named the port, for the error.
        control: the control process that is to host it instead.

    Raises:
        RendezvousError: the port is taken, or the address is none of this host.
    """

    def __init__(
        self, address: str, port: int | None, named_by: str = "MASTER_PORT", control: Any = None
    ) -> None:
        self.address = address
        self.is_named = port is not None
        self._control = control
        if control is not None:
            self.store = control.open_store(address, port, named_by)
            return
        name = "MASTER_ADDR" if named_by == "MASTER_PORT" else named_by
        require_resolvable(address, name)
        if not is_own_address(address):
            raise RendezvousError(
                f"{name}={address} (port {port}) is no address of this host, which is node 0:"
                f" {describe_route(address)}. Set {name} on all nodes to the address of the one with"
                " NODE_RANK=0, and NODE_RANK to another number on the others."
            )
        try:
            self.store = dist.TCPStore(address, port or 0, is_master=True, wait_for_workers=False)
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
                raise RendezvousError(f"cannot open a store on {address}:{port}: {error}") from error
            raise RendezvousError(
                f"port {port} on {address}, named by {named_by}, is in use by another process. Name a free"
                f" port, or unset {named_by} on a single node to have a free one taken."
            ) from error

    def close(self) -> None:
        """Frees the port, as far as this object has it."""
        if self._control is not None:
            self._control.close_store()


class Rendezvous:
    """Where this process meets the others of its runs: in a store that it hosts, or in another process's."""

    def __init__(self) -> None:
        self.handed: dict[str, str] = {}
        """STORE_VARIABLE and TOKEN_VARIABLE of the processes that a launcher in this one starts.

        They are kept out of this process's environment, from which the programs that the user's script starts
        would have them."""
        self.control: Any = None
        """The control process, where that hosts the store and the control server of this run."""
        self._hosted: HostedStore | None = None
        self._num_runs = 0

    def host(
        self,
        address: str,
        *,
        num_nodes: int,
        node_rank: int,
        port: int | None,
        named_by: str = "MASTER_PORT",
        control: Any = None,
    ) -> dict[str, str]:
        """On the first node, opens the store of this run; returns torch's variables for it.

        Args:
            address: where the first node is reached.
            num_nodes: nodes of the run.
            node_rank: this node.
            port: port that the user named, or None.
            named_by: where, for errors.
            control: the control process that hosts store and control server; None for this process.

        Raises:
            ConfigurationError: several nodes, and no port that all of them know.
            RendezvousError: the named port is taken.
        """
        if num_nodes > 1 and port is None:
            raise ConfigurationError(
                f"num_nodes={num_nodes}, but no port is named: set MASTER_ADDR and MASTER_PORT to the same"
                " values on every node, and NODE_RANK to 0, 1, ... in turn"
            )
        self._num_runs += 1
        self.control = control
        if node_rank == 0:
            if self._hosted is None or not self._is_hosted(address, port):
                self._hosted = HostedStore(address, port, named_by, self.control)
            port = int(self._hosted.store.port)
            self._hosted.store.set(_RUN_KEY, str(self._num_runs))
        self.handed = {STORE_VARIABLE: f"{address}:{port}/{self._num_runs}"}
        if num_nodes == 1 and not os.environ.get(TOKEN_VARIABLE):
            self.handed[TOKEN_VARIABLE] = secrets.token_hex(16)
        return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}

    def comes_back(self) -> bool:
        """Whether the run had all its ranks before this process, which is the first of another node, came.

        Then it is the present one of the store's process, which may have had others before.
        """
        assert self.where is not None
        address, port, _ = _parts_of(self.where)
        number = running(address, port)
        if number is None:
            return False
        self._num_runs = number
        self.handed[STORE_VARIABLE] = f"{address}:{port}/{number}"
        return True

    def _is_hosted(self, address: str, port: int | None) -> bool:
        """Whether this process has a store there already."""
        hosted = self._hosted
        return hosted is not None and hosted.address == address and hosted.store.port == port

    @property
    def hosted(self) -> Any:
        """The store that `host` has opened, for the present run."""
        assert self._hosted is not None  # only launchers ask, after they have opened it
        return dist.PrefixStore(f"run{self._num_runs}", self._hosted.store)

    @property
    def where(self) -> str | None:
        """STORE_VARIABLE as this run has it; None if no launcher of this package has started it."""
        return os.environ.get(STORE_VARIABLE) or self.handed.get(STORE_VARIABLE)

    @property
    def token(self) -> str | None:
        """TOKEN_VARIABLE as this run has it."""
        return os.environ.get(TOKEN_VARIABLE) or self.handed.get(TOKEN_VARIABLE)

    def find(self, environment: ClusterEnvironment, timeout: timedelta | None) -> Any:
        """The store of the run: the launcher's if there is one, else the one of `env://`.

        Args:
            environment: tells rank, world size and the address of the first node.
            timeout: how long to wait for it; None for torch's own.

        Raises:
            RendezvousError: it cannot be reached.
        """
        with remember_connections():  # a store on a node that is unreachable blocks as collectives do
            if self.where is None:
                return _rendezvous(environment, timeout)
            address, port, _ = _parts_of(self.where)
            return self.hosted if self._is_hosted(address, port) else run_store(self.where, timeout)

    def close(self) -> None:
        """Closes this process's store, at the end of a run.

        One on a port that the user named stays open for the next run of this process: its other nodes may be
        there before this one.
        """
        self.handed = {}
        if self._hosted is not None and not self._hosted.is_named:
            self._hosted.close()
            self._hosted = None


def named_port() -> int | None:
    """The port that the user named in MASTER_PORT, or None.

    Raises:
        ConfigurationError: the variable holds no port number.
    """
    text = os.environ.get("MASTER_PORT")
    if not text:
        return None
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ConfigurationError(f"MASTER_PORT={text!r} is no port number (1 to 65535)")
    return int(text)


def _rendezvous(environment: ClusterEnvironment, timeout: timedelta | None) -> Any:
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    rank, world_size = environment.global_rank(), environment.world_size()
    require_resolvable(environment.main_address)
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, **options))
    except RuntimeError as error:
        address = environment.main_address
        raise RendezvousError(
            f"rank {rank}: no rendezvous at MASTER_ADDR={address}, port {environment.main_port}: {error}."
            f" Here {describe_route(address)}. Check that all {world_size} ranks have been started, that"
            " MASTER_ADDR is the address of rank 0's node, and that the port is free there."
        ) from error
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return store_of_attempt(store, rank=rank, world_size=world_size)
    return store


def join_default_group(
    backend: str, store: Any, *, rank: int, world_size: int, timeout: timedelta | None, device: torch.device
) -> Any:
    """Makes the default process group of this process. All ranks call it; it returns once all have.

    Args:
        backend: 'gloo', 'nccl', 'cpu:gloo,cuda:nccl' ...
        store: the store of the run.
        rank: of this process.
        world_size: number of ranks.
        timeout: of collectives; None for the backend's own.
        device: this process's device; NCCL is bound to it.

    Raises:
        ConfigurationError: there is no such backend in this process.
    """
    require_backend(backend)
    arguments: dict[str, Any] = {"rank": rank, "world_size": world_size, "timeout": timeout}
    if device.type == "cuda":
        arguments["device_id"] = device
    is_gloo = "gloo" in backend_names(backend)
    with remember_connections(num_peers=world_size if is_gloo else 0):
        dist.init_process_group(backend, store=dist.PrefixStore("default_pg", store), **arguments)
    if "nccl" in backend_names(backend):
        atexit.register(leave_default_group)  # torch warns of an NCCL group that is left to the exit
    return dist.group.WORLD


def require_backend(backend: str) -> None:
    """Refuses a name, or several in torch's spelling, of which this process knows no backend.

    Raises:
        ConfigurationError: says which there are.
    """
    known = dist.Backend.backend_list
    for name in sorted(backend_names(backend)):
        if name not in known:
            raise ConfigurationError(
                f"process_group_backend={backend!r}: this process knows no backend {name!r}; there are"
                f" {', '.join(known[1:])}. A third-party one has to be registered with"
                " torch.distributed.Backend.register_backend in every process, at the top of the script."
            )


def existing_group(world_size: int) -> Any | None:
    """The default process group that a Trainer of this process has made before; None if there is none.

    Raises:
        ConfigurationError: it has another size.
    """
    if not dist.is_initialized():
        return None
    if dist.get_world_size() != world_size:
        raise ConfigurationError(
            f"this process belongs to a group of {dist.get_world_size()} ranks already, and this"
            f" Trainer wants {world_size}: use the same devices and num_nodes in all of a script"
        )
    return dist.group.WORLD


def run_store(where: str, timeout: timedelta | None) -> Any:
    """The store of a run that a launcher of ours has opened.

    Args:
        where: the value of STORE_VARIABLE.
        timeout: how long to wait for it; None for torch's own.

    Raises:
        RendezvousError: it cannot be reached.
    """
    address, port, run = _parts_of(where)
    require_resolvable(address)
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    try:
        return dist.PrefixStore(f"run{run}", dist.TCPStore(address, port, is_master=False, **options))
    except RuntimeError as error:
        raise RendezvousError(
            f"cannot reach the launcher's store at {address}, port {port}: {error}. Here"
            f" {describe_route(address)}. Check that the first node is up, and that MASTER_ADDR and"
            " MASTER_PORT are the same on all nodes."
        ) from error


def running(address: str, port: int) -> int | None:
    """The number of the run whose store listens there; None if there is none, or its ranks have not met."""
    try:
        socket.create_connection((address, port), timeout=_PROBE_S).close()
    except OSError:  # the first node begins as well
        return None
    store = dist.TCPStore(address, port, is_master=False)
    number = store.get(_RUN_KEY).decode() if store.check([_RUN_KEY]) else ""
    return int(number) if number and dist.PrefixStore(f"run{number}", store).check([_MET_KEY]) else None


def note_met(store: Any) -> None:
    """Called by rank 0 with the store of its run: all ranks have connected."""
    store.set(_MET_KEY, "")


def _parts_of(where: str) -> tuple[str, int, str]:
    """Address, port and run of STORE_VARIABLE."""
    listener, _, run = where.rpartition("/")
    address, _, port = listener.rpartition(":")
    return address, int(port), run


def leave_default_group() -> None:
    """Destroys the default process group, if there is one. Called at the end of a process that uses NCCL."""
    if dist.is_initialized():
        with suppress(RuntimeError):  # a peer may be gone already, and this process is about to be
            dist.destroy_process_group()

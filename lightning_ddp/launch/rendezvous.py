"""Rendezvous of the processes of a job: the key-value store, and the default process group from it.

A launcher binds the store's port before it starts a child, so that nobody else can take it meanwhile.
Processes that something else started (torchrun, SLURM) meet at `env://`, as in torch, or where the user says:
at `tcp://`, or in a file. A backend is told the interface that leads to the first node: without one it looks
up this host's own name, which on many clusters belongs to another network, or to the loopback.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from lightning_ddp._lightning import ClusterEnvironment, LightningEnvironment
from lightning_ddp._torch import never_destroy
from lightning_ddp.comm.barrier import store_of_attempt
from lightning_ddp.comm.nccl import is_nccl
from lightning_ddp.comm.teardown import destroy_groups, remember_connections
from lightning_ddp.errors import ConfigurationError, RendezvousError, one_of

STORE_VARIABLE = "LIGHTNING_DDP_STORE"
"""Environment variable with the address of a launcher's store: `host:port/run`.

`run` counts the runs of the launching process, which share one store if the user named the port."""

TOKEN_VARIABLE = "LIGHTNING_DDP_TOKEN"
"""Environment variable with the secret of the control channel.

On one node the launcher draws it. On several the user may set it, the same for all processes; otherwise
rank 0 draws one and publishes it in the store, where it is as readable as that is."""

JOIN_VARIABLE = "LIGHTNING_DDP_JOIN"
"""Environment variable of a process that replaces a lost one: the number of its start."""

_RUN_KEY = "lightning_ddp/run"  # key of the number of the present run
_MET_KEY = "lightning_ddp/has_met"
"""Key that is set once all ranks of a run, which may continue without some, have connected."""
_PROBE_S = 2.0
_RESOLVED_WITHIN_S = 30.0
_ASK_AGAIN_S = 0.5
_SIOCGIFCONF = 0x8912
_ENTRY_BYTES, _MOST_ENTRIES = 40, 1024
"""Size of a `struct ifreq`, and how many fit into the answer."""
_IPV6 = Path("/proc/net/if_inet6")


def open_store(address: str, port: int | None, named_by: str = "MASTER_PORT") -> Any:
    """Open a TCPStore that listens here, at `port` or any free one; raise `RendezvousError` if it cannot."""
    name = "MASTER_ADDR" if named_by == "MASTER_PORT" else named_by
    require_resolvable(address, name)
    if not is_own_address(address):
        raise RendezvousError(
            f"{name}={address} (port {port}) is not an address of this host, which is node 0:"
            f" {describe_route(address)}. Set {name} on all nodes to the address of the node with"
            " NODE_RANK=0, and NODE_RANK to another number on the others."
        )
    try:
        return dist.TCPStore(address, port or 0, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
            raise RendezvousError(f"cannot open a store on {address}:{port}: {error}") from error
        raise RendezvousError(
            f"port {port} on {address}, named by {named_by}, is in use by another process. Use a free"
            f" port, or unset {named_by} on a single node to let a free port be chosen."
        ) from error


class Rendezvous:
    """Access to the key-value store where ranks meet, whether this or another process opened it."""

    def __init__(self) -> None:
        self.handed: dict[str, str] = {}
        """STORE_VARIABLE and TOKEN_VARIABLE for the processes that this one starts as ranks.

        Not in the environment of this process, which the user's script hands to other programs."""
        self._hosted: Any = None
        self._is_named = False  # True if the user named the port of the hosted store
        self._num_runs = 0

    def host(
        self,
        environment: ClusterEnvironment,
        init_method: str | None,
        *,
        num_nodes: int,
        node_rank: int,
        open_store: Callable[[str, int | None, str], Any] = open_store,
    ) -> dict[str, str]:
        """Open the run's store on the first node, by `open_store`; return MASTER_ADDR and MASTER_PORT."""
        named = tcp_address(init_method)
        address, port = named or (environment.main_address, _port_of(environment))
        missing = "MASTER_PORT" if port is None else None
        if named is None and isinstance(environment, LightningEnvironment):
            missing = missing or (None if os.environ.get("MASTER_ADDR") else "MASTER_ADDR")
        if num_nodes > 1 and missing is not None:  # without an address, each node would wait for itself
            raise ConfigurationError(
                f"num_nodes={num_nodes}, but {missing} is not set. Set MASTER_ADDR and MASTER_PORT to the"
                " same values on every node, and NODE_RANK to 0, 1, ..."
            )
        self._num_runs += 1
        if node_rank == 0:
            if not self._is_hosted(address, port):
                named_by = "MASTER_PORT" if named is None else "init_method"
                self._hosted, self._is_named = open_store(address, port, named_by), port is not None
            port = int(self._hosted.port)
            self._hosted.set(_RUN_KEY, str(self._num_runs))
        self.handed = {STORE_VARIABLE: f"{address}:{port}/{self._num_runs}"}
        if num_nodes == 1 and not os.environ.get(TOKEN_VARIABLE):
            self.handed[TOKEN_VARIABLE] = secrets.token_hex(16)
        return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}

    def comes_back(self) -> bool:
        """Return True if all ranks of the run had connected already, and then store the run's address."""
        assert self.where is not None
        address, port, _ = _parts_of(self.where)
        number = running(address, port)
        if number is None:
            return False
        self._num_runs = number
        self.handed[STORE_VARIABLE] = f"{address}:{port}/{number}"
        return True

    def _is_hosted(self, address: str, port: int | None) -> bool:
        hosted = self._hosted
        return hosted is not None and (hosted.host, hosted.port) == (address, port)

    @property
    def hosted(self) -> Any:
        """Store that `host` opened, with the key prefix of the current run."""
        assert self._hosted is not None  # only launchers ask, after they have opened it
        return dist.PrefixStore(f"run{self._num_runs}", self._hosted)

    @property
    def where(self) -> str | None:
        """Address `host:port/run` of the launcher's store; None without a launcher of this package."""
        return os.environ.get(STORE_VARIABLE) or self.handed.get(STORE_VARIABLE)

    @property
    def token(self) -> str | None:
        """Secret by which the run's processes authenticate; None if rank 0 draws one and publishes it."""
        return os.environ.get(TOKEN_VARIABLE) or self.handed.get(TOKEN_VARIABLE)

    def find(self, environment: ClusterEnvironment, timeout: timedelta | None) -> Any:
        """Connect to the run's store and return it: the launcher's if there is one, else that of `env://`."""
        with remember_connections():  # a store on a node that is unreachable blocks as collectives do
            if self.where is None:
                return _meet_by_environment(environment, timeout)
            address, port, _ = _parts_of(self.where)
            return self.hosted if self._is_hosted(address, port) else run_store(self.where, timeout)

    def close(self) -> None:
        """Close the store that this process opened; keep it for later runs if the user named its port."""
        self.handed = {}
        if not self._is_named:  # else other nodes may come to the next run of this process before it does
            self._hosted = None


def _port_of(environment: ClusterEnvironment) -> int | None:
    """Return the store's port that the user or cluster named; None where Lightning would draw one."""
    if not isinstance(environment, LightningEnvironment) or "STANDALONE_PORT" in os.environ:
        return int(environment.main_port)
    text = os.environ.get("MASTER_PORT")
    if text and (not text.isdigit() or not 0 < int(text) < 65536):
        raise ConfigurationError(f"MASTER_PORT={text!r}: expected a port number (1 to 65535)")
    return int(text) if text else None


def _meet_by_environment(environment: ClusterEnvironment, timeout: timedelta | None) -> Any:
    os.environ.update(MASTER_ADDR=environment.main_address, MASTER_PORT=str(environment.main_port))
    rank, world_size = environment.global_rank(), environment.world_size()
    store = meet("env://", rank, world_size, timeout)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return store_of_attempt(store, rank=rank, world_size=world_size)
    return store


def join_default_group(
    backend: str, store: Any, *, rank: int, world_size: int, timeout: timedelta | None, device: torch.device
) -> Any:
    """Create and return the default process group, NCCL bound to `device`. Collective."""
    require_backend(backend)
    arguments: dict[str, Any] = {"rank": rank, "world_size": world_size, "timeout": timeout}
    if device.type == "cuda":
        arguments["device_id"] = device
    is_gloo = "gloo" in backend_names(backend)
    with remember_connections(num_peers=world_size if is_gloo else 0):
        dist.init_process_group(backend, store=dist.PrefixStore("default_pg", store), **arguments)
    if uses_nccl(backend):
        atexit.register(destroy_groups)  # torch warns of an NCCL group that is left to the exit
    return dist.group.WORLD


def require_backend(backend: str) -> None:
    """Raise `ConfigurationError` if a `torch.distributed` backend string has an unknown backend."""
    known = dist.Backend.backend_list
    for name in sorted(backend_names(backend)):
        if name not in known:
            raise ConfigurationError(
                f"process_group_backend={backend!r}: unknown backend {name!r}; expected"
                f" {one_of(known[1:])}. Register a third-party backend with"
                " torch.distributed.Backend.register_backend in every process, at the top of the script."
            )


def existing_group(world_size: int) -> Any | None:
    """Return the default process group or None; raise `ConfigurationError` if it has another size."""
    if not dist.is_initialized():
        return None
    if dist.get_world_size() != world_size:
        raise ConfigurationError(
            f"this process belongs to a group of {dist.get_world_size()} ranks already, but this Trainer"
            f" needs {world_size}. Use the same devices and num_nodes in the whole script."
        )
    return dist.group.WORLD


def run_store(where: str, timeout: timedelta | None) -> Any:
    """Connect to the store that a launcher opened at `where` (`host:port/run`), and return it."""
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
    """Return the number of a store's run; None unless all its ranks connected and it survives lost ones."""
    try:
        socket.create_connection((address, port), timeout=_PROBE_S).close()
    except OSError:  # the first node begins as well
        return None
    store = dist.TCPStore(address, port, is_master=False)
    number = store.get(_RUN_KEY).decode() if store.check([_RUN_KEY]) else ""
    return int(number) if number and dist.PrefixStore(f"run{number}", store).check([_MET_KEY]) else None


def note_met(store: Any) -> None:
    """Set the key in a run's store which tells that all ranks have connected. In rank 0."""
    store.set(_MET_KEY, "")


def _parts_of(where: str) -> tuple[str, int, str]:
    """Return address, port and run from the address `host:port/run` of a store."""
    listener, _, run = where.rpartition("/")
    address, _, port = listener.rpartition(":")
    return address, int(port), run


# ---------------------------------------------------------------------- chosen by the user


def check_meeting_place(init_method: str | None, store: Any | None, sent_by: str | None) -> None:
    """Raise `ConfigurationError` if `init_method` or `store` is invalid, or if both are given.

    `sent_by` is the start method, if it sends the strategy to the processes.
    """
    if init_method is not None:
        _check_init_method(init_method)
    if store is None:
        return
    if init_method is not None:
        raise ConfigurationError(
            f"init_method={init_method!r} and a store were both given. Pass one of them."
        )
    if not isinstance(store, dist.Store):
        raise ConfigurationError(f"store={store!r}: expected a torch.distributed.Store")
    if sent_by is not None:
        raise ConfigurationError(
            f"store with start_method={sent_by!r}: a store cannot be sent to a new process. Use"
            " start_method='popen', where each process runs the script and makes its own store, or"
            " init_method."
        )


def _check_init_method(init_method: str) -> None:
    url = urlparse(init_method)
    if not url.scheme or "://" not in init_method:
        raise ConfigurationError(
            f"init_method={init_method!r}: expected 'env://', 'tcp://host:port' or 'file:///path'"
        )
    if url.scheme == "tcp":
        tcp_address(init_method)
    if url.scheme == "file" and (url.netloc or not url.path.startswith("/") or url.path.endswith("/")):
        raise ConfigurationError(
            f"init_method={init_method!r}: expected the absolute path of a file, as in 'file:///shared/run-7',"
            " with three slashes"
        )


def tcp_address(init_method: str | None) -> tuple[str, int] | None:
    """Return host and port of a `tcp://` URL; None for any other URL."""
    if init_method is None or not init_method.startswith("tcp://"):
        return None
    url = urlparse(init_method)
    try:
        host, port = url.hostname, url.port
    except ValueError:  # no number, or too large
        host, port = None, None
    if not host or not port:
        raise ConfigurationError(
            f"init_method={init_method!r}: expected the first node's name or address and a free port, as in"
            " 'tcp://10.0.0.1:29500'"
        )
    return host, port


def meet(init_method: str, rank: int, world_size: int, timeout: timedelta | None) -> Any:
    """Meet the other ranks at a URL (`env://`, `tcp://`, `file://` ...); return the store. Collective."""
    if init_method.startswith("file://"):
        return meet_at_file(Path(urlparse(init_method).path), rank, world_size, timeout)
    place, named_by = init_method, "init_method"
    address, _ = tcp_address(init_method) or (None, None)
    if init_method == "env://":
        address, named_by = os.environ["MASTER_ADDR"], "MASTER_ADDR"
        place = f"MASTER_ADDR={address}, port {os.environ['MASTER_PORT']}"
    if address is not None:
        require_resolvable(address, named_by)
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    try:
        store, _, _ = next(dist.rendezvous(init_method, rank, world_size, **options))
        return store
    except (RuntimeError, ValueError) as error:
        if "No rendezvous handler" in str(error):
            raise ConfigurationError(f"init_method={init_method!r}: {error}") from error
        here = "" if address is None else f" Here {describe_route(address)}."
        raise RendezvousError(
            f"rank {rank} cannot connect to the other ranks at {place}: {error}.{here} Check that all"
            f" {world_size} ranks have been started, that the address is that of rank 0's node, and that the"
            " port is free there."
        ) from error


def meet_at_file(path: Path, rank: int, world_size: int, timeout: timedelta | None) -> Any:
    """Return a FileStore in a file that all ranks reach. The last rank that exits removes the file.

    A crashed run leaves its file behind. Ranks that read the old entries would hang, so each rank counts
    itself there, and refuses to be the second of its number.
    """
    if not path.parent.is_dir():
        raise RendezvousError(f"file://{path}: rank {rank} finds no folder {path.parent}")
    written = ""
    with suppress(OSError):
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        written = f" (last written {stamp})"
    store: Any = dist.FileStore(str(path), world_size)
    if timeout is not None:
        store.set_timeout(timeout)
    if store.add(f"lightning_ddp/rank/{rank}", 1) > 1:
        raise RendezvousError(
            f"file://{path}: rank {rank} is there already. The file is left over from an earlier"
            f" run{written}, another running job uses it, or two processes have the same rank. Use a new file"
            " for each run, or delete this one."
        )
    # unlike atexit it also runs where multiprocessing ends its processes
    Finalize(None, _leave, args=(path, store, world_size), exitpriority=0)
    return store


def _leave(path: Path, store: Any, world_size: int) -> None:
    """Remove the store's file if this is the last rank that exits, so that a run leaves none behind."""
    never_destroy([store])  # torch's destructor makes the file again if another rank has just removed it
    with suppress(OSError, RuntimeError):
        if path.exists() and store.add("lightning_ddp/left", 1) == world_size:
            path.unlink(missing_ok=True)


# ---------------------------------------------------------------------- the network interface


def interfaces() -> Iterator[tuple[str, str]]:
    """Yield (network interface, address) of this host, IPv4 first; nothing outside of Linux."""
    if sys.platform != "linux":
        return
    answer = array.array("B", bytes(_ENTRY_BYTES * _MOST_ENTRIES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iP", len(answer), answer.buffer_info()[0])
        size = struct.unpack("iP", fcntl.ioctl(probe, _SIOCGIFCONF, request))[0]
    for entry in range(0, size, _ENTRY_BYTES):
        name, _, address = struct.unpack_from("16sI4s", answer, entry)
        yield name.partition(b"\0")[0].decode(), socket.inet_ntop(socket.AF_INET, address)
    with suppress(OSError):  # a kernel without IPv6
        entries = [line.split() for line in _IPV6.read_text().splitlines()]
        for address, *_, name in sorted(entries, key=lambda entry: int(entry[1], 16)):
            yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))


def route_to(address: str) -> tuple[str | None, str]:
    """Return the network interface (or None) and own address that lead to a host; `OSError` if none do."""
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # of a datagram socket: sends nothing
        own = str(probe.getsockname()[0])
    plain = own.partition("%")[0]
    return next((name for name, text in interfaces() if text == plain), None), plain


def backend_names(backend: str) -> frozenset[str]:
    """Return the names in a `torch.distributed` backend string: one, or one per type of device.

    >>> sorted(backend_names("cpu:gloo,cuda:nccl")), sorted(backend_names("NCCL"))
    (['gloo', 'nccl'], ['nccl'])
    """
    return frozenset(part.strip().rpartition(":")[2] for part in backend.lower().split(","))


def uses_nccl(backend: str) -> bool:
    """Return True if one of the backends in a `torch.distributed` backend string is NCCL.

    >>> uses_nccl("cpu:gloo,cuda:nccl2"), uses_nccl("gloo")
    (True, False)
    """
    return any(map(is_nccl, backend_names(backend)))


def choose_interface(address: str, backend: str) -> dict[str, str]:
    """Return the environment variables that tell gloo and NCCL which interface leads to the first node.

    Empty where the user has named one, or no interface is found. The loopback is named to gloo alone, and
    only where the address is a number: a name may lead elsewhere from another node. NCCL, which spreads its
    sockets over all interfaces, gets none where it finds the way itself.
    """
    has_gloo, has_nccl = "gloo" in backend_names(backend), uses_nccl(backend)
    if not (has_gloo or has_nccl):
        return {}
    try:
        name, own = route_to(address)
    except OSError:  # whoever connects next says so, with more words
        return {}
    if name is None:
        return {}
    is_local = is_loopback(own)
    chosen = {}
    if not is_local or (has_gloo and address == own):
        chosen["GLOO_SOCKET_IFNAME"] = name
    if has_nccl and not is_local:
        found = list(dict.fromkeys(interface for interface, _ in interfaces()))
        names = _names_for_nccl(found, name)
        if names is not None:
            chosen["NCCL_SOCKET_IFNAME"] = names
    return {variable: value for variable, value in chosen.items() if variable not in os.environ}


def _names_for_nccl(found: Sequence[str], route: str) -> str | None:
    """Return the NCCL_SOCKET_IFNAME with which ranks meet on interface `route`; None if NCCL needs none.

    NCCL takes InfiniBand's interfaces if there are some, else all that are neither Docker's nor the loopback.
    Its ranks meet by the first of them, in the order of the C library, and data goes over all. So only
    interfaces before the right one, such as a bridge of containers, are left out.

    >>> _names_for_nccl(["lo", "eth0", "eth1", "docker0"], "eth0") is None
    True
    >>> _names_for_nccl(["lo", "cni0", "eth0", "eth1", "docker0"], "eth0")
    '=eth0,eth1'
    """
    taken = [name for name in found if name.startswith("ib")]
    taken = taken or [name for name in found if not name.startswith(("docker", "lo"))]
    if taken and (taken[0] == route or taken[0].startswith("ib")):
        return None
    return "=" + ",".join(taken[taken.index(route) :] if route in taken else [route])


def describe_route(address: str) -> str:
    """Return a phrase on the network interface that leads to an address, for an error message."""
    try:
        name, own = route_to(address)
    except OSError as error:
        return f"no interface leads to {address} ({error.strerror or error})"
    return f"interface {name or 'unknown'} with address {own} leads to {address}"


def is_loopback(address: str) -> bool:
    """Return True if a name or address leads to this host only; False if it cannot be resolved."""
    with suppress(OSError):
        address = str(socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0])
        return address.startswith("127.") or address == "::1"
    return False


def is_own_address(address: str) -> bool:
    """Return True if a name or address, which can be resolved, belongs to this host."""
    for family, kind, _, _, target in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(target)
            return True
    return False


def require_resolvable(address: str, named_by: str = "MASTER_ADDR") -> None:
    """Wait until the first node's name can be resolved; raise `RendezvousError` if it cannot within 30 s."""
    deadline = time.monotonic() + _RESOLVED_WITHIN_S
    is_said = False
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"{named_by}={address} cannot be resolved on {socket.gethostname()}: {error}. Set"
                    f" {named_by} to a name or an address of the first node that all nodes can resolve."
                ) from error
            if not is_said:
                print(f"lightning_ddp: {named_by}={address} cannot be resolved yet: {error}", file=sys.stderr)
                is_said = True
        time.sleep(_ASK_AGAIN_S)

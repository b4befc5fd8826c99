"""A new process group out of the ranks that are left, and everything that was made of the old one."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_ddp._torch import backend_of, count_groups_anew, set_timeout
from lightning_ddp.comm import broadcast_nested
from lightning_ddp.comm.abort import abort_groups, remember_connections, wait_for_aborts
from lightning_ddp.comm.group import Group
from lightning_ddp.comm.retired import retire_groups
from lightning_ddp.comm.waits import InThread
from lightning_ddp.ddp.module_sync import broadcast_coalesced
from lightning_ddp.errors import LightningDDPError
from lightning_ddp.launch.interface import backend_names
from lightning_ddp.launch.reconciliation import Reconciliation
from lightning_ddp.launch.rendezvous import join_default_group, leave_default_group
from lightning_ddp.launch.session import Session
from lightning_ddp.launch.terminal import tell_long_wait

__all__ = ["copy_state", "end_collectives", "leave", "meet_again"]

_LOOK_EVERY_S = 0.005
_ABORTED_WITHIN_S = 20.0
"""How long the communicators of NCCL, and what was queued on the device, may take to end."""


def leave(ours: Reconciliation, wrapper: Any | None, device: torch.device) -> None:
    """Lets go of a group whose connections are aborted. Does not communicate.

    Args:
        ours: this process's part in the run.
        wrapper: the `BucketedDDP` that used it.
        device: of this process; nothing runs there any more when this returns.

    Raises:
        LightningDDPError: something does not end there.
    """
    end_collectives(ours, device)
    if wrapper is not None:
        wrapper.reducer.close()
        for parameter in wrapper.module.parameters():
            parameter.grad = None
    ours.interrupt.activity.forget_groups()
    retire_groups()
    leave_default_group()
    count_groups_anew()


def end_collectives(ours: Reconciliation, device: torch.device) -> None:
    """Aborts all groups; when it returns nothing runs on the device any more. Does not communicate.

    Args:
        ours: this process's part in the run.
        device: of this process; on the CPU nothing is done, as what waits there has been interrupted.

    Raises:
        LightningDDPError: something does not end there.
    """
    if device.type != "cuda":
        return
    ours.forget_device()
    abort_groups()

    # in a thread, as an abort that goes wrong, or a kernel, may block for ever
    def wait(_: InThread[None]) -> None:
        wait_for_aborts()
        torch.cuda.synchronize(device)

    call = InThread(wait, _ABORTED_WITHIN_S)
    call.wait(lambda _: ours.check_end())
    if isinstance(call.error, TimeoutError):
        raise LightningDDPError(
            f"communicators of NCCL, or what is queued on {device}, have not ended {_ABORTED_WITHIN_S:g} s"
            " after they were aborted"
        )
    call.result  # noqa: B018 (raises what has gone wrong)


def meet_again(
    session: Session,
    backend: str,
    *,
    rank: int,
    world_size: int,
    timeout: timedelta | None,
    meet_within: timedelta,
    device: torch.device,
) -> Any:
    """Makes the default process group of a new generation. All its ranks call it; it returns once all have.

    gloo cannot be interrupted where it waits for a peer to connect, which may be lost at this very moment: so
    it begins when all have come, and gives up soon.

    Args:
        session: of this process; its control channel says which generation it is.
        backend: 'gloo', 'nccl' ...
        rank: this process's new one.
        world_size: the new number of ranks.
        timeout: of collectives.
        meet_within: how long gloo waits for a peer, which it does up to five times.
        device: this process's.
    """
    assert session.control.calls is not None
    with remember_connections():  # the other one was shut down with those of the old group
        session.store = session.store.clone()
    store = dist.PrefixStore(f"generation{session.control.calls.member.generation}", session.store)
    is_gloo = backend_names(backend) == {"gloo"}
    said = f"the {world_size} ranks that go on to meet again"
    with session.control.calls.waiting(), tell_long_wait(rank, lambda: said):
        _wait_for_all(store, rank, world_size, session.control.interrupt.check)
        group = join_default_group(
            backend,
            store,
            rank=rank,
            world_size=world_size,
            timeout=meet_within if is_gloo else timeout,
            device=device,
        )
    if is_gloo:
        set_timeout(backend_of(group, device), timeout or default_pg_timeout)
    return group


def _wait_for_all(store: Any, rank: int, world_size: int, check: Callable[[], None]) -> None:
    store.set(f"rank {rank} is here", b"")
    while not store.check([f"rank {other} is here" for other in range(world_size)]):
        check()
        time.sleep(_LOOK_EVERY_S)


def copy_state(
    group: Group,
    module: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    *,
    source: int,
    is_behind: bool,
    is_local: bool,
    device: torch.device,
) -> None:
    """Gives ranks that are one step behind the parameters and optimizer states of one that is not.

    All ranks call it; communicates. Learning rates stay: the scheduler's step after this one is still to come
    on a rank that is behind.

    Args:
        group: the ranks.
        module: what is trained.
        optimizers: whose states.
        source: rank that has the state.
        is_behind: whether this rank takes it.
        is_local: whether states of optimizers are each rank's own.
        device: of this process.
    """
    parameters = list(module.parameters())
    is_part = is_behind or group.rank == source  # in local training others have parameters of their own
    broadcast_coalesced(group, parameters if is_part else [p.detach().clone() for p in parameters], source)
    for optimizer in optimizers:
        mine = optimizer.state_dict()
        state = broadcast_nested(group, mine["state"], source, device, label="state of an optimizer")
        if is_behind and not is_local:
            optimizer.load_state_dict({**mine, "state": state})

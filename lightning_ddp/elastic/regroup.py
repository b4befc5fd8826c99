"""Change of process groups: leave the one with the lost ranks, make the one of those that continue."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_ddp._torch import backend_of, count_groups_anew, set_timeout
from lightning_ddp.comm.group import InThread
from lightning_ddp.comm.teardown import (
    abort_groups,
    destroy_groups,
    remember_connections,
    retire_groups,
    wait_for_aborts,
)
from lightning_ddp.errors import LightningDDPError
from lightning_ddp.launch.failure_handler import FailureHandler
from lightning_ddp.launch.job_context import JobContext
from lightning_ddp.launch.process_end import tell_long_wait
from lightning_ddp.launch.rendezvous import backend_names, join_default_group
from lightning_ddp.supervise.orders import NewGeneration

_LOOK_EVERY_S = 0.005
_ABORTED_WITHIN_S = 20.0  # longest time for communicators of NCCL and queued work to end


def leave(ours: FailureHandler, wrapper: Any | None, device: torch.device) -> None:
    """Destroy all process groups (on a GPU, abort them first), close the reducer, and drop the gradients.

    Does not communicate.
    """
    end_collectives(ours, device)
    if wrapper is not None:
        wrapper.reducer.close()
        for parameter in wrapper.module.parameters():
            parameter.grad = None
    retire_groups(ours.interrupt.activity.forget_groups())
    destroy_groups()
    count_groups_anew()


def end_collectives(ours: FailureHandler, device: torch.device) -> None:
    """On a GPU, abort all process groups and wait until its work ends; raise an error if it does not end.

    Does not communicate. On the CPU nothing is done, as what waits there has been interrupted.
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
            f"communicators of NCCL, or work queued on {device}, have not ended {_ABORTED_WITHIN_S:g} s"
            " after the abort"
        )
    call.result  # noqa: B018 (raises what has gone wrong)


def take_rank(context: JobContext, new: NewGeneration, num_processes: int) -> tuple[int, int]:
    """Kill lost local processes, set WORLD_SIZE, and return this process's new rank and local rank.

    Each node had `num_processes` at first.
    """
    ours = context.control
    assert ours.calls is not None
    for slot in {*new.before} - {*new.members, *new.left}:  # it may be stopped, or have lost only its
        context.children.kill_rank(slot)  # control connection
    own = ours.calls.state.place
    on_node = [slot for slot in new.members if slot // num_processes == own // num_processes]
    ours.set_while_running({"WORLD_SIZE": str(len(new.members))})
    return new.members.index(own), on_node.index(own)


def meet_again(
    context: JobContext,
    backend: str,
    world_size: int,
    *,
    timeout: timedelta | None,
    meet_within: timedelta,
    device: torch.device,
) -> Any:
    """Create and return the default process group of the new set of ranks, which must all call it.

    gloo cannot be interrupted where it waits for a peer to connect, which may be lost at this very moment: so
    it begins when all have come, and waits for a peer at most five times `meet_within`. A failure of the run
    raises PeerFailure.
    """
    calls, interrupt = context.control.calls, context.control.interrupt
    assert calls is not None
    with remember_connections():  # the other one was shut down with those of the old group
        # torch tries for long to reach a store whose process is gone
        clone = InThread(lambda _: context.store.clone())
        clone.wait(lambda _: interrupt.check())
        context.store = clone.result
    rank, is_gloo = calls.state.rank, backend_names(backend) == {"gloo"}
    store: Any = dist.PrefixStore(f"generation{calls.state.generation}", context.store)
    said = f"the {world_size} remaining ranks to form a new group"
    with calls.waiting(), tell_long_wait(rank, lambda: said):
        store.set(f"rank {rank} is here", b"")
        while not store.check([f"rank {other} is here" for other in range(world_size)]):
            interrupt.check()
            time.sleep(_LOOK_EVERY_S)
        limit = meet_within if is_gloo else timeout
        group = join_default_group(
            backend, store, rank=rank, world_size=world_size, timeout=limit, device=device
        )
    if is_gloo:
        set_timeout(backend_of(group, device), timeout or default_pg_timeout)
    return group

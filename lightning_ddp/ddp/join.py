"""Uneven inputs: a rank that has run out of them takes part in what the others still communicate.

Built on `torch.distributed.algorithms.join`, so that it goes together with other joinables, such as
`ZeroRedundancyOptimizer`. Every call here communicates, in the order in which the wrapper's forward and
backward do on the ranks that go on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from lightning_ddp._torch import is_joining
from lightning_ddp.comm.group import Group
from lightning_ddp.comm.uploads import uploaded
from lightning_ddp.ddp.buffers import Buffers
from lightning_ddp.ddp.module_sync import broadcast_coalesced
from lightning_ddp.ddp.reducer import Reducer
from lightning_ddp.errors import ConfigurationError

__all__ = ["JoinSignals", "ShadowSteps", "UnevenInputs"]


class JoinSignals:
    """What ranks with and without input tell each other inside `join()`.

    Args:
        group: the ranks.
        device: where the tensors of the exchange live.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._sent: tuple[Any, torch.Tensor] | None = None

    def send_forward_notice(self, is_training: bool, is_synchronised: bool) -> None:
        """On a rank with input: says whether a backward can follow, and is synchronised. Does not wait."""
        if self._sent is not None:
            self._group.wait(self._sent[0], self._device)
        notice = uploaded(torch.tensor([float(is_training), float(is_synchronised)]), self._device)
        self._sent = (self._group.all_reduce(notice), notice)

    def receive_forward_notice(self) -> tuple[bool, bool]:
        """On a rank without input: whether any rank says the one, and whether any says the other."""
        notice = torch.zeros(2, device=self._device)
        self._group.wait(self._group.all_reduce(notice), self._device)
        is_training, is_synchronised = notice.tolist()
        return bool(is_training), bool(is_synchronised)

    def agree_on_source(self, is_candidate: bool) -> int:
        """The highest group rank among those that are candidates."""
        rank = uploaded(torch.tensor([self._group.rank if is_candidate else -1]), self._device)
        self._group.wait(self._group.all_reduce(rank, dist.ReduceOp.MAX), self._device)
        return int(rank.item())


class ShadowSteps(JoinHook):
    """Mirrors the communication of the wrapper on a rank that has joined.

    Args:
        wrapper: the `BucketedDDP`.
    """

    def __init__(self, wrapper: UnevenInputs) -> None:
        self._wrapper = wrapper

    def main_hook(self) -> None:
        """One forward of the others: buckets planned anew, buffers, then zeros for every bucket."""
        wrapper = self._wrapper
        is_training, is_synchronised = wrapper._signals.receive_forward_notice()
        if is_training:
            wrapper.reducer.rebuild()
        wrapper._sync_buffers_if_due("before_forward", has_input=False)
        wrapper.require_forward_param_sync = is_synchronised
        if is_synchronised:
            wrapper.reducer.shadow_backward()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have joined: they take the model of the last one."""
        wrapper = self._wrapper
        src = wrapper.authoritative_rank = wrapper._signals.agree_on_source(is_last_joiner)
        broadcast_coalesced(wrapper._group, wrapper.states(), src)
        wrapper._module_buffers.sync(src)


class UnevenInputs(Joinable):
    """Base of `BucketedDDP` for training loops in which ranks run out of inputs at different steps."""

    if TYPE_CHECKING:
        device: torch.device
        process_group: Any
        reducer: Reducer
        require_backward_grad_sync: bool
        require_forward_param_sync: bool
        _module_buffers: Buffers
        _delayed: Any
        _group: Group
        _log: Any
        _signals: JoinSignals

        def states(self) -> list[torch.Tensor]: ...
        def _sync_buffers_if_due(self, where: Any, *, has_input: bool = True) -> None: ...

    authoritative_rank: int | None
    """The rank whose model all took at the end of the last `join()`."""

    def _connect_join(self) -> None:
        self.authoritative_rank = None
        self._signals = JoinSignals(self._group, self.device)
        self._active_ranks: Any | None = None
        self._divides_by_active = False

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """A context for training loops in which ranks run out of inputs at different steps.

        A rank that leaves the loop takes part in the others' communication, with zeros, until all have
        left; then all take the model of the last one. Other collectives of the model, such as those of
        SyncBatchNorm, are not mirrored: use `throw_on_early_termination` with them. All ranks enter.

        Args:
            divide_by_initial_world_size: whether gradients are divided by the number of ranks; otherwise by
                that of the ranks which still have input. A communication hook divides by itself.
            enable: False for no effect.
            throw_on_early_termination: whether all ranks raise RuntimeError when the first one runs out.

        Raises:
            ConfigurationError: there is no default process group, or gradients are averaged with a delay.
        """
        if not dist.is_initialized():
            if not enable:
                return nullcontext()
            raise ConfigurationError(
                "join() needs torch.distributed.init_process_group: torch's Join communicates through it"
            )
        if enable and self._delayed is not None:
            raise ConfigurationError(
                "join() with delay_all_reduce_named_params: a rank without input cannot tell when the others"
                " reduce those; leave out one of the two"
            )
        context: AbstractContextManager[None] = Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )
        return context

    def join_hook(self, **kwargs: Any) -> ShadowSteps:
        """What this wrapper does on a rank that has joined; torch's `Join` calls it.

        Args:
            **kwargs: `divide_by_initial_world_size` as for `join`; the rest is for other joinables.
        """
        self._log.join_uneven_inputs = True
        self._divides_by_active = not kwargs.get("divide_by_initial_world_size", True)
        return ShadowSteps(self)

    @property
    def join_device(self) -> torch.device:
        """Where the tensors live by which ranks tell each other that they have joined."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The ranks that join."""
        return self.process_group

    @property
    def _is_joining(self) -> bool:
        return is_joining(self)

    def _notify_joined(self, is_training: bool) -> None:
        """At the start of a forward: tells the ranks without input that there is one, and of which kind."""
        self._active_ranks = None
        if self._is_joining:
            self._active_ranks = Join.notify_join_context(self)
            self._signals.send_forward_notice(is_training, is_training and self.require_backward_grad_sync)

    def _set_divisor(self) -> None:
        """Before a synchronised backward: gradients are divided by the ranks, or by those with input."""
        if self._active_ranks is None or not self._divides_by_active:
            self.reducer.set_divisor(self._group.size)
            return
        self._group.wait(self._active_ranks, self.device)
        self.reducer.set_divisor(int(self._active_ranks.result()[0].item()))

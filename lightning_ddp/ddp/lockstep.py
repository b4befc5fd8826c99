"""Uneven inputs: ranks with different numbers of batches step together until the last rank is done.

A rank that has run out repeats its last batch, so it takes part in all communication of the step. The
repetition adds zeros to the gradients, is left out of reductions, and buffers and metrics are restored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp._torch import tree_map
from lightning_ddp.comm import all_gather, all_reduce, all_reduce_coalesced, reduce_op
from lightning_ddp.comm.collectives import widened
from lightning_ddp.comm.group import Group, uploaded
from lightning_ddp.ddp.buffers import ModuleSnapshot
from lightning_ddp.errors import ConfigurationError, UnevenInputsError

_NOTHING, _OLD, _FRESH = 0, 1, 2
_UNSIZED = -1


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Role of this rank in a step, new batch or last one again, and the number of ranks with a new one."""

    is_replay: bool
    """True if this rank has run out of batches and repeats its last one."""
    num_active: int
    """Number of ranks that have a new batch."""


class Lockstep:
    """Coordination of ranks with unequal numbers of batches: all take steps until none has a new batch.

    The order of one step is: the loader's next batch (communicates), `begin`, the forward inside `step`, the
    backward of `scale(loss)`, `restore`.

    Args:
        group: the ranks.
        device: device of the tensors of its exchanges.
        is_allowed: True if ranks may run out at different steps; otherwise that is an error on all ranks.
        divide_by_initial_world_size: True to count a rank that has run out in the mean of the gradients,
            with zeros; False for the mean over the ranks that have a new batch.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        *,
        is_allowed: bool = True,
        divide_by_initial_world_size: bool = True,
    ) -> None:
        self._group = group
        self._device = device
        self._is_allowed = is_allowed
        self._counts_all = divide_by_initial_world_size
        self._turns: deque[Turn] = deque()
        self._is_due = False
        self._is_stepping = False
        self._is_waiting = False
        self._last_batch: tuple[Any] | None = None
        self._spare: Callable[[], Any] | None = None
        self._kept: ModuleSnapshot | None = None
        self.turn = Turn(is_replay=False, num_active=group.size)

    # ------------------------------------------------------------------ batches

    def wrap(
        self, loader: Any, most: Callable[[], int] | None = None, spare: Callable[[], Any] | None = None
    ) -> LockstepLoader:
        """Return a wrapper of `loader` that ends on all ranks at the same step.

        `most` returns the number of batches of the longest loader; None exchanges the lengths now. `spare`
        makes a batch for a rank that has none to repeat; None raises an error there.

        Collective: all ranks must call it.
        """
        if self._is_waiting:
            raise ConfigurationError(
                "uneven_inputs supports one training dataloader, but there are several. Combine the"
                " datasets in one dataloader."
            )
        if most is None:
            mine = torch.tensor([_length(loader)], device=self._device)
            lengths = [int(n) for n in all_gather(self._group, mine).view(-1).tolist()]
            unsized = [rank for rank, length in enumerate(lengths) if length == _UNSIZED]
            if unsized and len(unsized) < len(lengths):
                raise ConfigurationError(
                    f"the training dataloader has no length on ranks {unsized}, but has one on the others."
                    " Give it one on every rank, or on none."
                )
            most = None if unsized else partial(max, lengths)
        self._spare = spare
        self._is_waiting = True
        return LockstepLoader(loader, self, most)

    def restart(self) -> None:
        """Discard steps that the ranks have agreed on but not begun, as a new epoch begins."""
        self._is_waiting = self._is_due = False
        self._turns.clear()

    def rejoin(self, group: Group) -> None:
        """Use the ranks of `group` from now on; discard steps that the ranks have agreed on but not begun."""
        self._group = group
        self.restart()

    def exchange(self, fresh: tuple[Any] | None, num_fetched: int) -> tuple[Any] | None:
        """Tell all ranks if this one has a new batch; return that, else the last one, or None at the end.

        Batches are in tuples; None stands for a rank that has run out, or for all ranks. Raises
        UnevenInputsError on every rank if a rank ran out and that is not allowed, or has no batch to repeat.
        """
        if fresh is not None:
            # Copy the containers: a step that changes its dict or list must not change the repetition.
            self._last_batch = tree_map(lambda leaf: leaf, fresh)
        elif self._last_batch is None and self._spare is not None:
            self._last_batch = (self._spare(),)
        told = torch.zeros(self._group.size, dtype=torch.int32)
        told[self._group.rank] = _FRESH if fresh else _OLD if self._last_batch else _NOTHING
        told = uploaded(told, self._device)
        self._group.wait(self._group.all_reduce(told), self._device)
        stands = told.tolist()
        self._is_due = True
        empty = [rank for rank, stand in enumerate(stands) if stand == _NOTHING]
        done = [rank for rank, stand in enumerate(stands) if stand != _FRESH]
        if len(done) == len(stands):
            return None
        if empty:
            raise UnevenInputsError(
                f"rank {self._group.rank}: ranks {empty} have no training batch to repeat while the others"
                " train. Give every rank at least one batch in the first epoch."
            )
        if done and not self._is_allowed:
            raise UnevenInputsError(
                f"rank {self._group.rank}: ranks {done} have run out of training batches, but the others"
                f" have more; this rank has had {num_fetched} in this epoch. Give every rank the same"
                ' number of batches, or allow different numbers with uneven_inputs="join".'
            )
        self._turns.append(Turn(is_replay=fresh is None, num_active=len(stands) - len(done)))
        return fresh or tree_map(lambda leaf: leaf, self._last_batch)

    def forget(self) -> None:
        """Drop the last batch and the module's snapshot, at the end of training."""
        self._last_batch = self._kept = None

    # ------------------------------------------------------------------ a step

    def begin(self) -> None:
        """Set `turn` to that of the next step; do nothing if called again before the next batch."""
        if self._is_due and self._turns:
            self.turn = self._turns.popleft()
            self._is_due = False

    @contextmanager
    def step(self, module: torch.nn.Module) -> Generator[None, None, None]:
        """Run a forward in this context; its end undoes a repeated batch's effect on buffers and metrics.

        RNG states are not restored, so that ranks that were seeded alike continue to draw alike.
        """
        self._kept = ModuleSnapshot(module) if self.turn.is_replay else None
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False
            self.restore()

    def restore(self) -> None:
        """Restore buffers and metrics after the backward of a repeated batch, which may rerun forwards."""
        if self._kept is not None and not self._is_stepping:
            self._kept.restore()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` with a backward that scales gradients by this rank's weight in this step."""
        is_even = self._counts_all or self.turn.num_active == self._group.size
        if is_even and not self.turn.is_replay:
            return loss
        scaled = loss.view_as(loss)
        if scaled.requires_grad and self.turn.is_replay:
            scaled.register_hook(torch.zeros_like)  # also in the place of gradients that are not finite
        elif scaled.requires_grad:
            factor = self._group.size / self.turn.num_active
            scaled.register_hook(lambda grad: grad * factor)
        return scaled

    # ------------------------------------------------------------------ reductions

    @property
    def is_partial(self) -> bool:
        """True in the forward of a step in which some ranks have no new batch."""
        return self._is_stepping and self.turn.num_active < self._group.size

    def reduce(self, group: Group, tensors: Sequence[torch.Tensor], op: Any) -> None:
        """Reduce `tensors` in place over the ranks of `group` that have a new batch; over all if none has."""
        resolved = reduce_op(op)
        num_active = self.turn.num_active
        if group is not self._group:
            count = torch.tensor(int(not self.turn.is_replay), device=self._device)
            num_active = int(all_reduce(group, count).item())
        if not num_active:
            all_reduce_coalesced(group, tensors, resolved)
            return
        is_mean = resolved == dist.ReduceOp.AVG
        with torch.no_grad():
            if self.turn.is_replay:
                for tensor in tensors:
                    tensor.detach().fill_(_neutral(resolved, tensor.dtype))
            if not is_mean:
                all_reduce_coalesced(group, tensors, resolved)
                return
            sums = [widened(tensor.detach()) for tensor in tensors]
            all_reduce_coalesced(group, sums, dist.ReduceOp.SUM)
            for tensor, total in zip(tensors, sums, strict=True):
                tensor.detach().copy_(total / num_active)


class LockstepLoader:
    """A loader with the length of the longest loader of all ranks, which ends on all ranks together.

    It has the attributes of the wrapped loader, but for `state_dict` and `load_state_dict` of one rank.
    """

    def __init__(self, loader: Any, lockstep: Lockstep, most: Callable[[], int] | None) -> None:
        self.__dict__.update(_loader=loader, _lockstep=lockstep, _most=most)

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)

    def __len__(self) -> int:
        """Return the greatest length of the loaders of all ranks; TypeError if they have none."""
        if self._most is None:
            raise TypeError(f"{type(self._loader).__name__} has no length")
        return int(self._most())

    def __iter__(self) -> Iterator[Any]:
        """Yield an epoch's batches, without prefetching; each step communicates with the other ranks."""
        batches = iter(self._loader)
        self._lockstep.restart()
        # A generator that has ended asks no more: some iterators would start another epoch.
        return self._steps((batch,) for batch in batches)

    def _steps(self, batches: Iterator[tuple[Any]]) -> Iterator[Any]:
        num_fetched = 0
        while True:
            fresh = next(batches, None)
            num_fetched += fresh is not None
            batch = self._lockstep.exchange(fresh, num_fetched)
            if batch is None:
                return
            yield batch[0]


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # as torch's DataLoader over an IterableDataset raises
        return _UNSIZED


def _neutral(op: Any, dtype: torch.dtype) -> float:
    if op == dist.ReduceOp.PRODUCT:
        return 1
    if op == dist.ReduceOp.BAND:
        return 1 if dtype == torch.bool else -1 if dtype.is_signed else int(torch.iinfo(dtype).max)
    if op not in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        return 0
    if dtype == torch.bool:
        least, greatest = 0.0, 1.0
    elif dtype.is_floating_point:
        least, greatest = float("-inf"), float("inf")
    else:
        least, greatest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return greatest if op == dist.ReduceOp.MIN else least

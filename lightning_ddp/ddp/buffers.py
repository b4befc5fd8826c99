"""Buffers of a module: broadcast from one rank before they are read, and their snapshots.

A snapshot also holds the states of metrics: all that a forward changes besides its outputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any, Literal

import torch

from lightning_ddp._torch import COMPUTED, UPDATE_COUNT, buffers_of, foreach_copy_, preserve_version_counters
from lightning_ddp.comm.collectives import broadcast_coalesced, is_plain
from lightning_ddp.comm.group import Group
from lightning_ddp.errors import ConfigurationError

Moment = Literal["before_forward", "after_forward"]
Broadcast = bool | Literal["auto"]
"""True to broadcast buffers in forwards, 'auto' only in those that read them, where that is known."""

_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


@contextmanager
def unseen_by_autograd(tensors: Sequence[torch.Tensor]) -> Generator[None, None, None]:
    """Hide in-place writes to `tensors` in this context from autograd; a backward may still follow."""
    with torch.no_grad(), preserve_version_counters(tuple(tensors)):
        yield


def check_broadcast_buffers(value: object) -> None:
    """Raise `ConfigurationError` if `value` is no valid value of the option `broadcast_buffers`."""
    if value not in (None, "auto", True, False):
        raise ConfigurationError(f"broadcast_buffers={value!r}: expected 'auto', True or False")


def when_to_broadcast(broadcast_buffers: Any, forward_sync_buffers: bool | None) -> Broadcast:
    """Merge torch's `broadcast_buffers` and `forward_sync_buffers` into True, False or 'auto'; check them."""
    check_broadcast_buffers(broadcast_buffers)
    if isinstance(broadcast_buffers, bool) and forward_sync_buffers is not None:
        warnings.warn(
            f"broadcast_buffers={broadcast_buffers} is ignored, because forward_sync_buffers is given too",
            FutureWarning,
            stacklevel=3,
        )
    chosen = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
    return "auto" if chosen is None else chosen


class Buffers:
    """The buffers of a wrapped module but for the `ignored`, with the decision when forwards broadcast them.

    A BatchNorm layer in training mode updates its running statistics but does not read them, and those of
    rank 0 depend on rank 0's own history only. If all buffers of a module are such statistics, a broadcast is
    due only before a forward in which a layer evaluates, if that forward follows a synchronized one, as in
    torch, or if the layer has trained since the last broadcast. With any other buffer, or a subclass of
    BatchNorm, which may read its statistics, every forward after a synchronized one broadcasts.
    """

    def __init__(
        self,
        group: Group,
        module: torch.nn.Module,
        ignored: frozenset[str] = frozenset(),
        broadcast: Broadcast = "auto",
    ) -> None:
        self._group = group
        self._module = module
        self._ignored = ignored
        self.hook: Callable[[dict[str, torch.Tensor]], Any] | None = None
        """User's hook that replaces the broadcast; returns None, or futures that end of backward awaits."""
        self.location: Moment = "before_forward"
        """Moment of the broadcast or of the hook, in each forward that follows a synchronized forward."""
        self._is_on = broadcast is not False
        layers = _batch_norms(module, ignored) if broadcast == "auto" else None
        self._have_trained = None if layers is None else dict.fromkeys(layers, True)  # since the last copy
        self._find()

    def _find(self) -> None:
        self._places: dict[str, tuple[dict[str, Any], str, torch.Tensor, int]] = {}
        self._others: list[torch.Tensor] = []
        dense: dict[torch.device, list[torch.Tensor]] = {}
        for name, tensor in self._module.named_buffers():  # each tensor once
            if name in self._ignored:
                continue
            path, _, key = name.rpartition(".")
            owner = buffers_of(self._module.get_submodule(path))
            self._places[name] = (owner, key, tensor, tensor.data_ptr())
            is_packed = is_plain(tensor) and tensor.numel()
            (dense.setdefault(tensor.device, []) if is_packed else self._others).append(tensor)
        self._packs: list[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]] = []
        """A tensor for one broadcast per device, with the bytes of the buffers and their places in it."""
        for tensors in dense.values():
            views = [t.detach().view(-1).view(torch.uint8) for t in tensors]
            sizes = [v.numel() for v in views]
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
            self._packs.append((flat, views, list(flat.split(sizes))))

    def named(self) -> dict[str, torch.Tensor]:
        """Return the buffers by qualified name; list them again if the module replaced a tensor."""
        for owner, key, tensor, pointer in self._places.values():
            if owner.get(key) is not tensor or tensor.data_ptr() != pointer:
                self._find()
                break
        return {name: tensor for name, (_, _, tensor, _) in self._places.items()}

    def copy(self, src: int = 0) -> None:
        """Overwrite the buffers with those of group rank `src`, in few broadcasts, unseen by autograd.

        Collective: all ranks must call it.
        """
        if self._have_trained is not None:
            self._have_trained = dict.fromkeys(self._have_trained, False)
        tensors = list(self.named().values())
        if tensors:
            with unseen_by_autograd(tensors):
                for flat, views, parts in self._packs:
                    if self._group.rank == src:
                        torch.cat(views, out=flat)
                    self._group.wait(self._group.broadcast(flat, src), flat.device)
                    if self._group.rank != src:
                        foreach_copy_(views, parts)
                broadcast_coalesced(self._group, self._others, src)

    def are_due(self, where: Moment, *, follows_sync: bool, is_joining: bool) -> bool:
        """Return True if the buffers must be synchronized at this moment of a forward; the same on all ranks.

        Where ranks may be out of input (`is_joining`), all steps must communicate alike.
        """
        if not (self._is_on and self._places) or where != self.location:
            return False
        if self.hook is None and not is_joining and self._have_trained is not None:
            reading = [has for layer, has in self._have_trained.items() if not layer.training]
            return any(follows_sync or has_trained for has_trained in reading)
        return follows_sync

    def sync(self, src: int = 0) -> list[Any]:
        """Broadcast rank `src`'s buffers or call the user's hook, unless turned off; return futures to await.

        Collective: all ranks must call it.
        """
        if not (self._is_on and self._places):
            return []
        if self.hook is None:
            self.copy(src)
            return []
        with torch.no_grad():
            return list(self.hook(self.named()) or [])

    def note_forward(self) -> None:
        """Record that a forward has changed the statistics of the BatchNorm layers in training mode."""
        have_trained = self._have_trained or {}
        for layer in have_trained:
            if layer.training:
                have_trained[layer] = True


def _batch_norms(module: torch.nn.Module, ignored: frozenset[str]) -> list[torch.nn.Module] | None:
    """Return the layers that own the buffers if all of these are BatchNorm statistics; else None."""
    layers = dict.fromkeys(
        module.get_submodule(name.rpartition(".")[0])
        for name, _ in module.named_buffers(remove_duplicate=False)
        if name not in ignored
    )
    return list(layers) if all(type(layer) in _BATCH_NORMS for layer in layers) else None


# ---------------------------------------------------------------------- what a forward changes


class ModuleSnapshot:
    """Copy of a module's buffers and of the states of its torchmetrics, which can be restored."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._owners = [buffers_of(owner) for owner in module.modules() if buffers_of(owner)]
        self._found = [
            metric
            for metric in module.modules()
            if hasattr(type(metric), "metric_state") and hasattr(metric, UPDATE_COUNT)
        ]
        self._find_buffers([])
        self.retake()

    def retake(self) -> None:
        """Save the present buffers and metric states anew, of the submodules that had any at construction."""
        present = list(chain.from_iterable(map(dict.values, self._owners)))
        is_same = len(present) == len(self._present) and all(map(is_, present, self._present))
        if not is_same or self._shapes != [tensor.shape for tensor in self._tensors]:
            self._find_buffers(present)
        elif self._tensors:
            with torch.no_grad():
                foreach_copy_(self._values, self._tensors)
        self._metrics = [(m, copy_states(m), getattr(m, UPDATE_COUNT)) for m in self._found]

    def _find_buffers(self, present: list[torch.Tensor | None]) -> None:
        self._present = present
        self._buffers = [(owner, key, tensor) for owner in self._owners for key, tensor in owner.items()]
        self._tensors = [tensor for tensor in present if tensor is not None]
        self._shapes = [tensor.shape for tensor in self._tensors]
        self._values = [tensor.detach().clone() for tensor in self._tensors]

    def restore(self) -> None:
        """Write the saved buffers and metric states back to the module, in place and hidden from autograd."""
        with unseen_by_autograd(self._tensors):
            for tensor, value in zip(self._tensors, self._values, strict=True):
                tensor.detach().copy_(value)
        for owner, key, present in self._buffers:
            owner[key] = present
        for metric, states, count in self._metrics:
            put_states(metric, states)
            setattr(metric, UPDATE_COUNT, count)


def copy_states(metric: Any) -> dict[str, Any]:
    """Return copies of the states of a torchmetrics `Metric`: tensors, or lists of tensors."""
    return {
        name: state.detach().clone() if isinstance(state, torch.Tensor) else list(state)
        for name, state in metric.metric_state.items()
    }


def put_states(metric: Any, states: Mapping[str, Any]) -> None:
    """Set the states of a torchmetrics `Metric` to copies of those from `copy_states`."""
    for name, state in states.items():
        setattr(metric, name, state.clone() if isinstance(state, torch.Tensor) else list(state))
    setattr(metric, COMPUTED, None)

"""Buffers: copied from one rank to all, when somebody is going to read them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_ddp._torch import buffers_of, foreach_copy_
from lightning_ddp.comm.group import Group
from lightning_ddp.ddp.module_sync import broadcast_coalesced
from lightning_ddp.ddp.reducer_options import check_broadcast_buffers
from lightning_ddp.ddp.snapshot import unseen_by_autograd

__all__ = ["BufferHook", "BufferReaders", "BufferSettings", "BufferSync", "Buffers"]

_BATCH_NORMS = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.SyncBatchNorm,
)


@dataclass(frozen=True, kw_only=True)
class BufferSettings:
    """When buffers are copied from rank 0 to all ranks."""

    at_construction: bool = True
    """Whether wrapping copies them."""
    in_forward: bool = True
    """Whether forwards do."""
    when_read: bool = True
    """Whether only those forwards do that read them, where that is known."""

    @classmethod
    def of(cls, broadcast_buffers: Any, forward_sync_buffers: bool | None) -> BufferSettings:
        """The settings for torch's two arguments.

        Raises:
            ConfigurationError: an argument is something else than torch knows, or 'auto'.
        """
        check_broadcast_buffers(broadcast_buffers)
        if isinstance(broadcast_buffers, bool) and forward_sync_buffers is not None:
            warnings.warn(
                f"broadcast_buffers={broadcast_buffers} is ignored, as forward_sync_buffers is given too",
                FutureWarning,
                stacklevel=4,
            )
        chosen = forward_sync_buffers if forward_sync_buffers is not None else broadcast_buffers
        return cls(
            at_construction=forward_sync_buffers is not None or broadcast_buffers is not False,
            in_forward=chosen is not False,
            when_read=chosen in (None, "auto"),
        )


@dataclass(frozen=True, kw_only=True)
class BufferHook:
    """What a user does with the buffers instead of the copy from rank 0."""

    hook: Callable[[Any, dict[str, torch.Tensor]], Any]
    """`hook(state, buffers by qualified name)`; returns None, or futures that the end of backward awaits."""
    state: Any
    """First argument of the hook."""
    location: Literal["before_forward", "after_forward"]
    """When it runs, in each forward that follows a synchronised one."""


class BufferReaders:
    """Tells whether the coming forward reads a buffer that may differ between ranks.

    A BatchNorm layer in training mode normalises with its batch alone; it updates its running statistics
    but does not read them, and rank 0's depend on rank 0's own history only. So while all buffers of a
    module are such statistics and all their layers train, a copy from rank 0 before each forward changes
    nothing that anybody computes. It is due before a forward in which a layer evaluates, if that follows a
    synchronised forward, as in torch, or if the layer has trained since the last copy. A module with any
    other buffer, or with a subclass of BatchNorm, which may read what it likes, takes a copy before every
    forward that follows a synchronised one.

    Args:
        module: the wrapped module.
        ignored: qualified names of buffers that are left alone.
    """

    def __init__(self, module: torch.nn.Module, ignored: frozenset[str] = frozenset()) -> None:
        layers: list[torch.nn.Module] = []
        self.are_known = True
        """Whether all buffers are BatchNorm statistics, so that it is known when they are read."""
        for prefix, layer in module.named_modules():
            names = [
                f"{prefix}.{key}" if prefix else key for key, b in buffers_of(layer).items() if b is not None
            ]
            if not [n for n in names if n not in ignored]:
                continue
            if type(layer) in _BATCH_NORMS:
                layers.append(layer)
            else:
                self.are_known = False
        self._trained = {id(layer): True for layer in layers}  # since the last copy
        self._layers = layers

    def are_due(self, follows_sync: bool) -> bool:
        """Whether the coming forward has to see rank 0's statistics. The same on all ranks."""
        reading = [layer for layer in self._layers if not layer.training]
        return any(follows_sync or self._trained[id(layer)] for layer in reading)

    def copied(self) -> None:
        """All ranks have rank 0's buffers."""
        self._trained = dict.fromkeys(self._trained, False)

    def note_forward(self) -> None:
        """A forward has run: layers in training mode have changed their statistics."""
        for layer in self._layers:
            if layer.training:
                self._trained[id(layer)] = True


class BufferSync:
    """Copies the buffers of a module from one rank to all, as bytes of all dtypes in one broadcast.

    The list of buffers is kept between calls and made anew when a module holds another tensor under one of
    the names.

    Args:
        group: the ranks that agree.
        module: the wrapped module.
        ignored: qualified names of buffers that are left alone.
    """

    def __init__(self, group: Group, module: torch.nn.Module, ignored: frozenset[str] = frozenset()) -> None:
        self._group = group
        self._module = module
        self._ignored = ignored
        self._places: list[tuple[dict[str, Any], str, torch.Tensor, int]] = []
        self._names: list[str] = []
        self._packs: list[_BytePack] = []
        self._others: list[torch.Tensor] = []
        self._find()

    def __bool__(self) -> bool:
        """Whether there is anything to copy."""
        return bool(self._places)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The buffers that are copied."""
        return [tensor for _, _, tensor, _ in self._places]

    def named(self) -> dict[str, torch.Tensor]:
        """The buffers that are copied, by qualified name."""
        if not self._is_current():
            self._find()
        return dict(zip(self._names, self.tensors, strict=True))

    def _find(self) -> None:
        self._places = []
        self._names = []
        seen: set[int] = set()
        for prefix, module in self._module.named_modules():
            owner = buffers_of(module)
            for key, tensor in owner.items():
                name = f"{prefix}.{key}" if prefix else key
                if tensor is None or name in self._ignored or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                self._names.append(name)
                self._places.append((owner, key, tensor, tensor.data_ptr()))
        dense: dict[torch.device, list[torch.Tensor]] = {}
        self._others = []
        for tensor in self.tensors:
            if tensor.is_contiguous() and tensor.numel():
                dense.setdefault(tensor.device, []).append(tensor)
            else:
                self._others.append(tensor)
        self._packs = [_BytePack(tensors) for tensors in dense.values()]

    def _is_current(self) -> bool:
        return all(
            owner.get(key) is tensor and tensor.data_ptr() == pointer
            for owner, key, tensor, pointer in self._places
        )

    def __call__(self, src: int = 0) -> None:
        """Overwrites the buffers with those of group rank `src`. All ranks call it; it communicates.

        Does not count as an in-place change for autograd, as torch's DDP does not either: two forward
        passes before one backward stay possible.
        """
        if not self._is_current():
            self._find()
        if not self._places:
            return
        with unseen_by_autograd(self.tensors):
            for pack in self._packs:
                pack.broadcast(self._group, src)
            broadcast_coalesced(self._group, self._others, src)


class _BytePack:
    """Buffers of one device as slices of one byte tensor."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._bytes = [t.detach().view(-1).view(torch.uint8) for t in tensors]
        self._flat = torch.empty(
            sum(b.numel() for b in self._bytes), dtype=torch.uint8, device=tensors[0].device
        )
        self._parts = list(self._flat.split([b.numel() for b in self._bytes]))

    def broadcast(self, group: Group, src: int) -> None:
        if group.rank == src:
            torch.cat(self._bytes, out=self._flat)
        group.wait(group.broadcast(self._flat, src), self._flat.device)
        if group.rank != src:
            foreach_copy_(self._bytes, self._parts)


class Buffers:
    """The buffers of a wrapped module, and when its forwards bring them together.

    Args:
        group: the ranks.
        module: the wrapped module.
        ignored: qualified names of buffers that are left alone.
        settings: when.
    """

    def __init__(
        self, group: Group, module: torch.nn.Module, ignored: frozenset[str], settings: BufferSettings
    ) -> None:
        self.copy = BufferSync(group, module, ignored)
        self.hook: BufferHook | None = None
        self._settings = settings
        self._readers = BufferReaders(module, ignored) if settings.when_read else None

    def are_due(
        self, where: Literal["before_forward", "after_forward"], *, follows_sync: bool, is_joining: bool
    ) -> bool:
        """Whether they have to be brought together now. The same on all ranks.

        Args:
            where: the moment in forward.
            follows_sync: whether the last forward was a synchronised one.
            is_joining: whether ranks may be out of input, so that each step has to look alike.
        """
        location = "before_forward" if self.hook is None else self.hook.location
        if not (self._settings.in_forward and self.copy) or where != location:
            return False
        readers = self._readers
        if self.hook is None and not is_joining and readers is not None and readers.are_known:
            return readers.are_due(follows_sync)
        return follows_sync

    def sync(self, src: int = 0) -> list[Any]:
        """Copies those of rank `src` to all ranks, or runs the hook. All ranks call it; it communicates.

        Returns:
            Futures that the end of backward is to wait for.
        """
        if not (self._settings.in_forward and self.copy):
            return []
        if self._readers is not None:
            self._readers.copied()
        if self.hook is None:
            self.copy(src)
            return []
        with torch.no_grad():
            return list(self.hook.hook(self.hook.state, self.copy.named()) or [])

    def note_forward(self) -> None:
        """A forward has run."""
        if self._readers is not None:
            self._readers.note_forward()

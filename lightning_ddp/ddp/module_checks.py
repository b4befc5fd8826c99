"""Checks of what users hand to `BucketedDDP`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp._torch import root_of_mesh
from lightning_ddp.comm.group import Group
from lightning_ddp.ddp import torch_messages as torch_words
from lightning_ddp.ddp.bucket import Bucket
from lightning_ddp.ddp.sparse import sparse_parameters
from lightning_ddp.errors import ConfigurationError, ProcessGroupError, UnsuitableModuleError

__all__ = ["check_backend", "check_device_ids", "check_hook", "check_process_group", "trainable_parameters"]

_DENSE_BACKENDS = ("nccl", "mpi", "ucc", "xccl")
"""Parts of the names of backends that refuse sparse tensors, or fail in the first backward with one."""


def trainable_parameters(
    module: torch.nn.Module, ignored: Collection[str], *, may_be_none: bool = False
) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that require gradients, with their qualified names.

    Raises:
        UnsuitableModuleError: there is none, one is lazy, or they are on several kinds of devices.
    """
    named = [(n, p) for n, p in module.named_parameters() if n not in ignored]
    lazy = [n for n, p in named if isinstance(p, torch.nn.UninitializedParameter)]
    if lazy:
        raise UnsuitableModuleError(
            f"{torch_words.UNINITIALIZED} uninitialised (lazy) parameters: {', '.join(lazy)}. Run one forward"
            " pass with a sample batch before wrapping, so that they get their shapes."
        )
    trainable = [(n, p) for n, p in named if p.requires_grad]
    if not trainable and not may_be_none:
        raise UnsuitableModuleError(
            f"{type(module).__name__} has no parameter that requires a gradient, so there is nothing to"
            " average: use it without a data-parallel wrapper, or set requires_grad=True on a parameter."
        )
    kinds = {p.device.type for _, p in named}
    if len(kinds) > 1:
        raise ConfigurationError(
            f"{torch_words.ONE_DEVICE_TYPE}, and the parameters are on {', '.join(sorted(kinds))}: move"
            " them all to CUDA devices, or all to the CPU"
        )
    return trainable


def check_process_group(process_group: Any | None, device_mesh: Any | None) -> Any:
    """The process group to use: the one given, that of the mesh, or the default one.

    Raises:
        ConfigurationError: there is none, or both are given, or the mesh has several dimensions.
    """
    if process_group is not None and device_mesh is not None:
        raise ProcessGroupError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        return _group_of_mesh(device_mesh)
    if process_group is not None:
        return process_group
    if not (dist.is_available() and dist.is_initialized()):
        raise ProcessGroupError(
            "no process group: call torch.distributed.init_process_group first, or pass process_group="
        )
    return dist.group.WORLD


def _group_of_mesh(mesh: Any) -> Any:
    if mesh.ndim != 1:
        raise ProcessGroupError(
            f"Only 1D device mesh is supported, but this one has {mesh.ndim} dimensions: {mesh}."
            " Slice the data-parallel dimension out of it (mesh['dp'])."
        )
    root = root_of_mesh(mesh)
    if root != mesh:
        raise ProcessGroupError(
            f"device_mesh is a part of {root}: tensor parallelism inside the module (DTensor parameters) is"
            " not supported. Pass process_group=mesh.get_group() for a module of plain tensors."
        )
    return mesh.get_group(mesh_dim=0)


def check_backend(
    group: Group, module: torch.nn.Module, named: Sequence[tuple[str, torch.nn.Parameter]]
) -> None:
    """Refuses parameters whose gradients the backend of the group cannot reduce.

    Raises:
        ConfigurationError: they are sparse and the backend knows dense tensors only, or they are on another
            device than the one that the group is bound to.
    """
    bound = getattr(group.process_group, "bound_device_id", None)
    kind = bound.type if bound is not None else None
    elsewhere = [n for n, p in named if p.device.type == kind and p.device != bound]
    if elsewhere:
        devices = sorted({str(p.device) for _, p in named})
        raise ConfigurationError(
            f"the module is on {', '.join(devices)}, and this process group is bound to {bound}"
            " (init_process_group(device_id=...)), so that it reduces nothing on another device:"
            f" {', '.join(map(repr, elsewhere))}. Move the whole module to {bound}, or make the group without"
            " device_id."
        )
    sparse = sparse_parameters(module.modules())
    found = [(n, p) for n, p in named if id(p) in sparse]
    for backend in {group.backend(p.device) for _, p in found}:
        if any(word in backend for word in _DENSE_BACKENDS):
            names = ", ".join(repr(n) for n, _ in found)
            raise ConfigurationError(
                f"the gradients of {names} are sparse, as their embeddings were made with sparse=True, and"
                f" {backend} reduces dense tensors only. Make them with sparse=False, or use gloo"
                " (process_group_backend='gloo')."
            )


def check_device_ids(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    parameters: Sequence[torch.Tensor],
) -> list[int] | None:
    """The index of the one CUDA device to which inputs are moved, or None to leave them alone.

    Raises:
        ConfigurationError: the module is on the CPU or on several devices, or on another one.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ConfigurationError(
            f"{torch_words.ONE_DEVICE_ID} Got {device_ids}: one process drives one device; start one process"
            " a device, or wrap DataParallel(module, devices)."
        )
    given = [*(device_ids or []), *([output_device] if output_device is not None else [])]
    if not given:
        return None
    devices = {p.device for p in parameters}
    indices = {d if isinstance(d, int) else torch.device(d).index for d in given}
    is_on_cpu = any(d.type == "cpu" for d in devices)
    if is_on_cpu or indices != {d.index for d in devices}:
        raise ConfigurationError(
            f"{torch_words.ONLY_SINGLE_DEVICE}: device_ids {device_ids}, output_device"
            f" {output_device}, but the module is on {', '.join(sorted(map(str, devices)))}: pass the"
            " module's one CUDA device, or None."
        )
    return [i for i in indices if i is not None]


def check_hook(hook: Callable[..., Any]) -> None:
    """Checks that a communication hook is one, as far as that can be seen.

    Raises:
        TypeError: it is not callable.
        ConfigurationError: its annotations name other types than a bucket and a future of a tensor.
    """
    if not callable(hook):
        raise TypeError(f"{torch_words.MUST_BE_CALLABLE} Got {hook!r}.")
    try:
        signature = inspect.signature(hook)
    except ValueError:  # some callables written in C have none
        return
    bucket = signature.parameters.get("bucket")
    empty = inspect.Parameter.empty
    known_buckets = (empty, dist.GradBucket, Bucket, Any, object)
    if (
        bucket is not None
        and not isinstance(bucket.annotation, str)
        and bucket.annotation not in known_buckets
    ):
        raise ConfigurationError(f"{torch_words.BUCKET_ANNOTATION} It is {bucket.annotation!r}.")
    answer = signature.return_annotation
    if not isinstance(answer, str) and answer not in (empty, torch.futures.Future[torch.Tensor], Any):
        raise ConfigurationError(f"{torch_words.RETURN_ANNOTATION} It is {answer!r}.")

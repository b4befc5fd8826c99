"""The wrapped module: checks of it and of the arguments, replaced parameters, parameters in low precision.

Messages contain the text of torch's DDP for the same error, which filters of logs search for.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp._torch import parameters_of, queue_callback, root_of_mesh, tree_map
from lightning_ddp.comm import all_gather_objects
from lightning_ddp.comm.group import Group
from lightning_ddp.ddp.bucket import Bucket, sparse_parameters
from lightning_ddp.ddp.gradients import find_tensors, hook_gradients
from lightning_ddp.errors import (
    ConfigurationError,
    ProcessGroupError,
    RankMismatchError,
    UnsuitableModuleError,
)

_DENSE_BACKENDS = ("nccl", "mpi", "ucc", "xccl")
"""Parts of names of backends that refuse sparse tensors, or fail in the first backward with them."""


def trainable_parameters(
    module: torch.nn.Module, ignored: Collection[str]
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return named parameters requiring gradients; raise if none, uninitialized or on mixed device types."""
    named = [(n, p) for n, p in module.named_parameters() if n not in ignored]
    lazy = [n for n, p in named if isinstance(p, torch.nn.UninitializedParameter)]
    if lazy:
        raise UnsuitableModuleError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`."
            f" uninitialized (lazy) parameters: {', '.join(lazy)}. Run one forward pass with a sample batch"
            " before wrapping, so that they get their shapes."
        )
    trainable = [(n, p) for n, p in named if p.requires_grad]
    if not trainable:
        raise UnsuitableModuleError(
            f"{type(module).__name__} has no parameter that requires a gradient, so there is nothing to"
            " average. Use it without a data-parallel wrapper, or set requires_grad=True on a parameter."
        )
    kinds = {p.device.type for _, p in named}
    if len(kinds) > 1:
        raise ConfigurationError(
            "input module must be on the same type of devices, but its parameters are on"
            f" {', '.join(sorted(kinds))}. Move them all to CUDA devices, or all to the CPU."
        )
    return trainable


def check_process_group(process_group: Any | None, device_mesh: Any | None) -> Any:
    """Return the process group to use: the given group, that of the mesh, or the default group."""
    if process_group is not None and device_mesh is not None:
        raise ProcessGroupError("Cannot specify both process_group and device_mesh arguments.")
    if process_group is not None:
        return process_group
    if device_mesh is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ProcessGroupError(
                "no process group. Call torch.distributed.init_process_group first, or pass process_group=."
            )
        return dist.group.WORLD
    if device_mesh.ndim != 1:
        raise ProcessGroupError(
            f"Only 1D device mesh is supported, but this one has {device_mesh.ndim} dimensions:"
            f" {device_mesh}. Slice the data-parallel dimension out of it (mesh['dp'])."
        )
    root = root_of_mesh(device_mesh)
    if root != device_mesh:
        raise ProcessGroupError(
            f"device_mesh is a part of {root}, and tensor parallelism inside the module (DTensor"
            " parameters) is not supported. Pass process_group=mesh.get_group() for a module of plain"
            " tensors."
        )
    return device_mesh.get_group(mesh_dim=0)


def check_backend(
    group: Group, module: torch.nn.Module, named: Sequence[tuple[str, torch.nn.Parameter]]
) -> None:
    """Raise if the backend cannot reduce a parameter's gradient: it is sparse, or on another device."""
    bound = getattr(group.process_group, "bound_device_id", None)
    kind = bound.type if bound is not None else None
    elsewhere = [n for n, p in named if p.device.type == kind and p.device != bound]
    if elsewhere:
        devices = sorted({str(p.device) for _, p in named})
        raise ConfigurationError(
            f"the module is on {', '.join(devices)}, but this process group is bound to {bound}"
            " (init_process_group(device_id=...)) and cannot reduce on another device:"
            f" {', '.join(map(repr, elsewhere))}. Move the whole module to {bound}, or make the group"
            " without device_id."
        )
    sparse = sparse_parameters(module.modules())
    found = [(n, p) for n, p in named if id(p) in sparse]
    for backend in {group.backend(p.device) for _, p in found}:
        if any(word in backend for word in _DENSE_BACKENDS):
            names = ", ".join(repr(n) for n, _ in found)
            raise ConfigurationError(
                f"the gradients of {names} are sparse, as their embeddings were made with sparse=True, but"
                f" {backend} reduces dense tensors only. Make them with sparse=False, or use gloo"
                " (process_group_backend='gloo')."
            )


def check_device_ids(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    parameters: Sequence[torch.Tensor],
) -> list[int] | None:
    """Return the index, in a list, of the CUDA device that inputs are moved to; None to leave them alone."""
    if device_ids is not None and len(device_ids) > 1:
        raise ConfigurationError(
            f"device_ids can only be None or contain a single element. Got {device_ids}: one process drives"
            " one device; start one process a device, or wrap DataParallel(module, devices)."
        )
    given = [*(device_ids or []), *([output_device] if output_device is not None else [])]
    if not given:
        return None
    devices = {p.device for p in parameters}
    indices = {d if isinstance(d, int) else torch.device(d).index for d in given}
    is_on_cpu = any(d.type == "cpu" for d in devices)
    if is_on_cpu or indices != {d.index for d in devices}:
        raise ConfigurationError(
            "DistributedDataParallel device_ids and output_device arguments only work with"
            f" single-device/multiple-device GPU modules or CPU modules: device_ids {device_ids},"
            f" output_device {output_device}, but the module is on {', '.join(sorted(map(str, devices)))}:"
            " pass the module's one CUDA device, or None."
        )
    return [i for i in indices if i is not None]


def check_hook(hook: Callable[..., Any]) -> None:
    """Raise unless `hook` is callable, with the annotations of a communication hook, if it has any."""
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable. Got {hook!r}.")
    try:
        signature = inspect.signature(hook)
    except ValueError:  # some callables written in C have none
        return
    bucket = signature.parameters.get("bucket")
    empty = inspect.Parameter.empty
    known_buckets = (empty, dist.GradBucket, Bucket, Any, object)
    kind = empty if bucket is None else bucket.annotation
    if not isinstance(kind, str) and kind not in known_buckets:
        raise ConfigurationError(
            f"Communication hook: bucket annotation should be dist.GradBucket. It is {kind!r}."
        )
    answer = signature.return_annotation
    if not isinstance(answer, str) and answer not in (empty, torch.futures.Future[torch.Tensor], Any):
        raise ConfigurationError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
            f" It is {answer!r}."
        )


# ---------------------------------------------------------------------- the same on all ranks


def verify_across_ranks(
    group: Group, named: Iterable[tuple[str, torch.Tensor]], device: torch.device, settings: dict[str, Any]
) -> str:
    """Raise if parameters or settings differ between ranks; return a random token, the same on all ranks.

    Collective: all ranks must call it.

    Returns:
        A random token, the same on all ranks, that no other call returns.

    Raises:
        RankMismatchError: on every rank, with the first parameter that differs, the rank and both forms.
    """
    # Devices differ by index between ranks, so only their type is compared.
    form = [(name, tuple(p.shape), p.stride(), str(p.dtype), p.device.type) for name, p in named]
    mine = (settings, form)
    digest = hashlib.sha256(pickle.dumps(mine)).digest()
    digests, tokens = zip(*all_gather_objects(group, (digest, secrets.token_hex(8)), device), strict=True)
    if len(set(digests)) > 1:
        everyone = all_gather_objects(group, mine, device)
        for rank, (theirs, _) in enumerate(everyone):
            for name, value in everyone[0][0].items():
                if theirs[name] != value:
                    raise RankMismatchError(
                        f"rank {group.rank}: {name} is {value!r} on rank 0 and {theirs[name]!r} on rank"
                        f" {rank}. Wrap the model with the same arguments on every rank."
                    )
        _raise_mismatch(group, [form for _, form in everyone])
    return str(tokens[0])


def _raise_mismatch(group: Group, forms: Sequence[Sequence[tuple[Any, ...]]]) -> None:
    reference = forms[0]
    for rank, form in enumerate(forms):
        if len(form) != len(reference):
            there, here = ([entry[0] for entry in each] for each in (form, reference))
            extra = [name for name in [*there, *here] if (name in there) != (name in here)]
            raise RankMismatchError(
                f"rank {group.rank}: rank 0 has {len(reference)} parameters that require gradients,"
                f" rank {rank} has {len(form)}; only one of them has {', '.join(map(repr, extra[:5]))}."
                " Build the same model on every rank, for example from one seed and one configuration."
            )
        for ours, theirs in zip(reference, form, strict=True):
            if ours != theirs:
                raise RankMismatchError(
                    f"rank {group.rank}: the models differ. {_entry(0, ours)}, but {_entry(rank, theirs)}."
                    " Build the same model on every rank; shapes must not depend on the rank's data."
                )


def _entry(rank: int, entry: tuple[Any, ...]) -> str:
    name, shape, stride, dtype, device = entry
    return f"rank {rank} has {name!r} with shape {list(shape)}, stride {list(stride)}, {dtype} on {device}"


# ---------------------------------------------------------------------- parameters in their places


class ParameterPlaces:
    """Detector of parameters that were replaced in a module, for one forward (`functional_call`) or for good.

    A parameter that has moved within the module is not replaced: `torch.nn.utils.prune` registers the same
    parameter under another name, and computes the tensor under the old name from it.
    """

    def __init__(self, module: torch.nn.Module, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._module = module
        self._on_leaves: list[Any] = []
        self._places: list[tuple[dict[str, Any], str]] = [({}, "")] * len(named)
        self._find()

    def replaced(self) -> list[int]:
        """Return the indices of parameters that the module no longer holds under any name."""
        pairs = zip(self._places, self.parameters, strict=True)
        is_complete = all(owner.get(key) is p for (owner, key), p in pairs)
        return [] if is_complete else self._find()

    def _find(self) -> list[int]:
        """Record which submodule holds each parameter; return indices of those that none holds."""
        owners = map(parameters_of, self._module.modules())
        found = {id(p): (owner, key) for owner in owners for key, p in owner.items()}
        keys = [id(p) for p in self.parameters]
        self._places = [found.get(k, place) for k, place in zip(keys, self._places, strict=True)]
        return [i for i, key in enumerate(keys) if key not in found]

    def expect_restored(self, outputs: Any, replaced: Sequence[int], rank: int) -> None:
        """Make a backward from `outputs` raise if the parameters are still replaced by then."""

        def check(_grad: torch.Tensor) -> None:
            gone = [self.names[i] for i in sorted(set(replaced).intersection(self.replaced()))]
            if gone:
                raise UnsuitableModuleError(
                    f"rank {rank}: parameters were replaced after the module was wrapped, so that their"
                    f" gradients are not averaged: {', '.join(gone)}. Change a parameter in place (with"
                    " torch.no_grad(): p.copy_(...)), or wrap the module again."
                )

        hook_gradients(find_tensors(outputs), check, self._on_leaves)


# ---------------------------------------------------------------------- low precision in a step


class MixedPrecision:
    """Mixed precision: swaps parameters for low-precision copies and back; construction casts the buffers.

    Outside of a step parameters are in full precision, and gradients arrive so. `config` is that of torch's
    DDP (`_MixedPrecision`, experimental there).
    """

    def __init__(self, config: Any, module: torch.nn.Module, ignored: frozenset[str]) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            dtype = getattr(config, name, None)
            if dtype is not None and not dtype.is_floating_point:
                raise ConfigurationError(f"mixed_precision.{name}={dtype}: expected a floating-point dtype")
        self.config = config
        self.reduce_dtype: torch.dtype | None = config.reduce_dtype or config.param_dtype
        """Dtype in which gradients are reduced; None for that of each parameter."""
        self._params = [
            p for name, p in module.named_parameters() if name not in ignored and p.is_floating_point()
        ]
        self._full: list[torch.Tensor] = []  # full-precision data while parameters hold copies
        self._on_leaves: list[Any] = []
        for name, buffer in module.named_buffers() if config.buffer_dtype is not None else ():
            if name not in ignored and buffer.is_floating_point():
                buffer.data = buffer.to(config.buffer_dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_on_leaves": []}  # hooks are of this process

    def cast_parameters(self) -> None:
        """Replace the data of parameters and gradients by low-precision copies, before a forward."""
        dtype = self.config.param_dtype
        if dtype is not None and not self._full:
            self._full = [p.data for p in self._params]
            for p in self._params:
                self._swap(p, p.data.to(dtype))

    def restore_parameters(self) -> None:
        """Restore parameters and gradients in full precision, after a backward."""
        full, self._full = self._full, []
        for p, data in zip(self._params, full, strict=False):  # none if they are in full precision already
            self._swap(p, data)

    @staticmethod
    def _swap(parameter: Any, data: torch.Tensor) -> None:
        grad = parameter.grad
        parameter.grad = None  # must have the parameter's dtype at any time
        parameter.data = data
        if grad is not None:
            parameter.grad = grad.to(data.dtype)
            if grad.is_cuda:  # allocated on another stream maybe, which would reuse the memory too early
                grad.record_stream(torch.cuda.current_stream(grad.device))

    def restore_after_backward(self, outputs: Any) -> None:
        """Restore parameters at the end of a backward from `outputs`, or now if no backward can follow."""
        tensors = list(find_tensors(outputs)) if torch.is_grad_enabled() else []
        if not tensors:
            self.restore_parameters()

        def start(_grad: torch.Tensor) -> None:
            queue_callback(self.restore_parameters)

        hook_gradients(tensors, start, self._on_leaves)

    def cast_inputs(self, inputs: Any) -> Any:
        """Return `inputs` with floating-point tensors in nested containers cast to `param_dtype`."""
        dtype = self.config.param_dtype

        def low(leaf: Any) -> Any:
            is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            return leaf.to(dtype) if is_float else leaf

        return inputs if dtype is None else tree_map(low, inputs)

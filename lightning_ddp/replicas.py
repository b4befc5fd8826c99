"""Data parallelism within one process: replicate -> scatter -> parallel_apply -> gather.

One thread per device runs a replica of the module on its chunk of the batch. The replicas' parameters have a
gradient edge to the original's, where the gradients are summed. Nothing here communicates across processes;
`BucketedDDP(DataParallel(module, devices))` adds that. As `torch.nn.parallel`, but also for CPU devices.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lightning_ddp._torch import (
    buffers_of,
    children_of,
    is_compiled,
    keystr,
    parameters_of,
    shallow_replica,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)
from lightning_ddp.errors import ConfigurationError

Device = int | str | torch.device
T = TypeVar("T")


class _Arguments(NamedTuple):
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]


def data_parallel(
    module: nn.Module,
    inputs: Any,
    devices: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Run `module` on chunks of the inputs, one per device, and join the outputs; differentiable.

    Called by one thread. Gradients are those of the module on the whole batch, unless it mixes samples:
    BatchNorm normalizes each chunk by itself, and the running statistics are those of replica 0.
    With one device the module itself runs, without replicas and threads.

    Args:
        module: with its parameters and buffers on `devices[0]`.
        inputs: a tuple of positional arguments, or the only one; None for none. See `scatter`.
        devices: an int is a CUDA device; may repeat. None for all CUDA devices, or the CPU without any.
        output_device: where the outputs are gathered; None for `devices[0]`.
        dim: the dimension of the batch, in inputs and outputs.
        module_kwargs: keyword arguments, scattered as `inputs`.

    Raises:
        ConfigurationError: a parameter or buffer is elsewhere, or as `replicate`, `scatter`, `gather`.
        Exception: what a replica raised, see `parallel_apply`.
    """
    targets = _as_devices(devices)
    target = targets[0] if output_device is None else _as_device(output_device)
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if tensor.device != targets[0]:
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise ConfigurationError(
                f"{kind} {name} is on {tensor.device}; expected all parameters and buffers on {targets[0]},"
                " the first of the devices. Move the module there first, as with"
                f" module.to('{targets[0]}')."
            )
    args = () if inputs is None else inputs if isinstance(inputs, tuple) else (inputs,)
    given = _Arguments(args, dict(module_kwargs or {}))
    pieces = scatter(given, targets, dim) if any(given) else [given]
    if len(targets) == 1:
        return scatter(module(*pieces[0].inputs, **pieces[0].kwargs), [target])[0]
    used = targets[: len(pieces)]
    replicas = replicate(module, used)
    outputs = parallel_apply(replicas, [p.inputs for p in pieces], [p.kwargs for p in pieces], used)
    return gather(outputs, target, dim)


class DataParallel(nn.Module):
    """`data_parallel` as a module, used instead of `module`; `state_dict` keys begin with `module.`.

    Args:
        module, output_device, dim: as for `data_parallel`, when `forward` is called.
        device_ids: its `devices`: ints for CUDA devices, names or `torch.device`s, as in `["cpu", "cpu"]`.

    Raises:
        ConfigurationError: no devices, or one that does not exist.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        self.module = module
        self.devices = _as_devices(device_ids)
        self.output_device = self.devices[0] if output_device is None else _as_device(output_device)
        self.dim = dim

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on chunks of the inputs; see `data_parallel`."""
        return data_parallel(self.module, inputs, self.devices, self.output_device, self.dim, kwargs)


# ---------------------------------------------------------------------- copies, and their threads


class _Copies(torch.autograd.Function):
    """Copy of a tensor to each device; backward sums the copies' gradients on the tensor's device.

    The gradient of a copy by torch itself may not be sparse.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, devices: list[torch.device]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a replica without a gradient adds nothing, not dense zeros
        ctx.device = tensor.device
        return tuple(tensor.to(device, copy=True) for device in devices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        moved = [grad.to(ctx.device) for grad in grads if grad is not None]
        return sum(moved[1:], moved[0]) if moved else None, None


def replicate(module: nn.Module, devices: Sequence[Device]) -> list[nn.Module]:
    """Copy `module` to each device; gradients of the copies flow back into it.

    Called by one thread, before each forward. Under `torch.no_grad` the replicas are detached.

    A replica shares hooks and plain attributes with the original; what its forward assigns to itself is lost.
    Its parameters are plain attributes, no leaves: `replica.parameters()` yields nothing. A tensor shared
    within the module is shared within the replica. Buffers are copied, but the first replica on the device of
    a buffer has the buffer itself: in-place updates (BatchNorm's running statistics) reach the original.

    Args:
        module: on any device.
        devices: an int is a CUDA device; may repeat, each replica has its own tensors.

    Raises:
        ConfigurationError: no devices, a device that does not exist, or a scripted or compiled module.
    """
    targets = _as_devices(devices)
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) or is_compiled(part):
            raise ConfigurationError(
                f"{name or 'the module'} is a {type(part).__name__}, and scripted and compiled modules"
                " cannot be replicated, because they are bound to their own parameters. Pass the module"
                " that they were made from."
            )
    copies: dict[int, Sequence[Tensor]] = {}
    for parameter in module.parameters():
        copies[id(parameter)] = _Copies.apply(parameter, targets)  # type: ignore[no-untyped-call] # torch's
    for buffer in module.buffers():
        own = targets.index(buffer.device) if buffer.device in targets else -1
        copies[id(buffer)] = [
            buffer if index == own else buffer.to(device, copy=True) for index, device in enumerate(targets)
        ]
    return [_replica(module, copies, index) for index in range(len(targets))]


def _replica(module: nn.Module, copies: Mapping[int, Sequence[Tensor]], index: int) -> nn.Module:
    made = {id(part): (part, shallow_replica(part)) for part in module.modules()}
    for part, replica in made.values():
        for name, child in children_of(part).items():
            children_of(replica)[name] = None if child is None else made[id(child)][1]
        for name, parameter in parameters_of(part).items():
            if parameter is None:
                parameters_of(replica)[name] = None
            else:
                setattr(replica, name, copies[id(parameter)][index])
        for name, buffer in buffers_of(part).items():
            buffers_of(replica)[name] = None if buffer is None else copies[id(buffer)][index]
    return made[id(module)][1]


def parallel_apply(
    replicas: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[Device] | None = None,
) -> list[Any]:
    """Run each replica on its inputs in a thread of its own; return the outputs in order.

    The caller's grad and inference mode, autocast and current CUDA streams hold in the threads, where the
    replica's device is current. The CPU's random numbers are drawn from one generator, in any order.

    Args:
        replicas: modules or functions.
        inputs: for each a tuple or list of positional arguments, or the only one.
        kwargs: for each its keyword arguments.
        devices: for each its device; None for that of the first tensor in its arguments.

    Raises:
        ConfigurationError: the arguments differ in length.
        Exception: the first one in replica order, with a note of the replica, after all threads have ended.
    """
    kwargs = [{}] * len(replicas) if kwargs is None else kwargs
    if not len(replicas) == len(inputs) == len(kwargs) == len(replicas if devices is None else devices):
        raise ConfigurationError(
            f"expected inputs, kwargs and devices for each of {len(replicas)} replicas; got {len(inputs)}"
            f" inputs, {len(kwargs)} kwargs and {'no' if devices is None else len(devices)} devices"
        )
    if devices is None:
        tensors = [filter(torch.is_tensor, tree_leaves(given)) for given in zip(inputs, kwargs, strict=True)]
        targets = [next((tensor.device for tensor in found), None) for found in tensors]
    else:
        targets = [_as_device(device) for device in devices]
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    cache = torch.is_autocast_cache_enabled()
    autocast = {t: torch.get_autocast_dtype(t) for t in ("cpu", "cuda") if torch.is_autocast_enabled(t)}
    streams = [
        torch.cuda.current_stream(target) if target is not None and target.type == "cuda" else None
        for target in targets
    ]

    def run(index: int) -> Any:
        with ExitStack() as settings:
            settings.enter_context(torch.inference_mode(inference))
            settings.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in autocast.items():
                settings.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            if streams[index] is not None:
                settings.enter_context(torch.cuda.stream(streams[index]))
            given = inputs[index]
            args = given if isinstance(given, (list, tuple)) else (given,)
            try:
                return replicas[index](*args, **kwargs[index])
            except BaseException as error:
                error.add_note(f"raised by replica {index} on {targets[index] or 'no device'}")
                raise

    if len(replicas) == 1:
        return [run(0)]
    with ThreadPoolExecutor(max(1, len(replicas)), thread_name_prefix="replica") as threads:
        # not `threads.map`, which cancels what has not begun when an earlier replica has raised
        futures = [threads.submit(run, index) for index in range(len(replicas))]
        try:
            return list(map(Future.result, futures))
        finally:
            futures.clear()  # they hold the error, whose traceback holds this frame


# ---------------------------------------------------------------------- batches over devices


def scatter(inputs: T, devices: Sequence[Device], dim: int = 0) -> list[T]:
    """Split every tensor in nested containers into chunks along `dim`, one per device.

    Containers are tuples, namedtuples, lists and dicts. All else is repeated, as the same object. A batch of
    3 on 2 devices gives chunks of 2 and 1; a batch of 1 gives one chunk. Chunks are copies, and gradients
    flow through them to the input. One device: whole tensors, moved there.

    >>> [x.tolist() for x, _ in scatter((torch.tensor([1, 2, 3]), "text"), ["cpu", "cpu"])]
    [[1, 2], [3]]

    Returns:
        As many results as the tensors have chunks; without any tensor, as many as there are devices.

    Raises:
        ConfigurationError: a tensor has no dimension `dim`, or tensors have different numbers of chunks.
    """
    targets = _as_devices(devices)
    leaves, structure = tree_flatten_with_path(inputs)
    columns: list[Sequence[Any]] = []
    named: dict[int, str] = {}
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor):
            columns.append([leaf] * len(targets))
            continue
        name = f"inputs{keystr(path)} of shape {tuple(leaf.shape)}"
        parts = zip(_split(leaf, len(targets), dim, name), targets, strict=False)
        # Copies: an in-place change by one replica would spoil what the others saved for backward.
        columns.append([part.to(device, copy=len(targets) > 1) for part, device in parts])
        named.setdefault(len(columns[-1]), name)
    if len(named) > 1:
        found = "; ".join(f"{name}: {count}" for count, name in named.items())
        raise ConfigurationError(
            f"tensors fall into different numbers of chunks along dimension {dim} over {len(targets)} devices"
            f" ({found}); expected the same number, so that each replica gets its part of all of them"
        )
    used = next(iter(named), len(targets))
    return [tree_unflatten([column[index] for column in columns], structure) for index in range(used)]


def _split(tensor: Tensor, num_parts: int, dim: int, name: str) -> Sequence[Tensor]:
    if num_parts == 1:
        return [tensor]
    if not -tensor.dim() <= dim < tensor.dim():
        raise ConfigurationError(
            f"{name} has no dimension {dim} along which to split it over {num_parts} devices. Pass a number"
            " instead of a tensor, or expand it to the batch."
        )
    parts: Sequence[Tensor] = tensor.split(max(1, -(-tensor.size(dim) // num_parts)), dim)
    return parts


def gather(outputs: Sequence[Any], device: Device, dim: int = 0) -> Any:
    """Concatenate the replicas' outputs along `dim` on `device`, in nested containers.

    Differentiable. Outputs may differ only in the tensors' size along `dim`. Tensors without dimensions
    become a vector, with a warning. Other objects must be equal. As device an int is a CUDA device.

    Raises:
        ConfigurationError: no outputs, or outputs that differ in structure or in something else than tensors.
    """
    if not outputs:
        raise ConfigurationError("gather got no outputs; expected one for each replica")
    target = _as_device(device)
    opened = [tree_flatten_with_path(output) for output in outputs]
    structure = opened[0][1]
    if any(other != structure for _, other in opened):
        found = "; ".join(", ".join(keystr(path) for path, _ in leaves) or "nothing" for leaves, _ in opened)
        raise ConfigurationError(f"output holds different things in the replicas: {found}")
    names = [f"output{keystr(path)}" for path, _ in opened[0][0]]
    columns = zip(*([leaf for _, leaf in leaves] for leaves, _ in opened), strict=True)
    joined = [_join(column, target, dim, name) for column, name in zip(columns, names, strict=True)]
    return tree_unflatten(joined, structure)


def _join(values: Sequence[Any], device: torch.device, dim: int, name: str) -> Any:
    first = values[0]
    if any(isinstance(value, Tensor) != isinstance(first, Tensor) for value in values):
        kinds = ", ".join(type(value).__name__ for value in values)
        raise ConfigurationError(f"{name} is of different types in the replicas: {kinds}")
    if not isinstance(first, Tensor):
        is_plain = isinstance(first, (str, bytes, int, float))
        if not all(value is first or (is_plain and value == first) for value in values):
            raise ConfigurationError(
                f"{name} is not a tensor and differs between the replicas: {', '.join(map(repr, values))}."
                " Return a tensor."
            )
        return first
    moved = [value.to(device) for value in values]
    if any(value.dim() for value in values):
        return torch.cat(moved, dim) if len(moved) > 1 else moved[0]
    warnings.warn(
        f"{name} has no dimensions in any replica, so the result is a vector with one element per replica",
        stacklevel=3,
    )
    return torch.stack(moved)


def _as_devices(devices: Sequence[Device] | None) -> list[torch.device]:
    if devices is None:
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]
    if not devices:
        raise ConfigurationError("devices is empty; expected at least one, or None for all CUDA devices")
    return [_as_device(device) for device in devices]


def _as_device(device: Device) -> torch.device:
    """Return the `torch.device` with its index, so that equal devices compare equal."""
    found = torch.device("cuda", max(device, 0)) if isinstance(device, int) else torch.device(device)
    if found.type != "cuda":
        return torch.device("cpu") if found.type == "cpu" else found
    count = torch.cuda.device_count()
    if (isinstance(device, int) and device < 0) or (found.index or 0) >= count:
        raise ConfigurationError(f"device {device!r} does not exist: this machine has {count} CUDA devices")
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found

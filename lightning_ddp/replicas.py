"""Data parallelism within one process: replicate -> scatter -> parallel_apply -> gather.

For training in one process; nothing else in the package uses it. One thread per device runs a replica of the
module on its chunk of the batch. The replicas' parameters have a gradient edge to the original's, where the
gradients are summed, so nothing here communicates across processes;
`BucketedDDP(DataParallel(module, devices))` adds that. After torch's C++ `data_parallel`.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lightning_ddp._torch import buffers_of, children_of, is_compiled, parameters_of, shallow_replica
from lightning_ddp.errors import ConfigurationError, ReplicaError

Device = int | str | torch.device
T = TypeVar("T")


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
    targets = as_devices(devices)
    target = targets[0] if output_device is None else as_device(output_device)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device != targets[0]:
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise ConfigurationError(
                f"{kind} {name} is on {tensor.device}; expected all parameters and buffers on {targets[0]},"
                " the first of the devices. Move the module there first, as with"
                f" module.to('{targets[0]}')."
            )
    args = () if inputs is None else inputs if isinstance(inputs, tuple) else (inputs,)
    pieces, kwargs = scatter_kwargs(args, module_kwargs, targets, dim)
    if len(targets) == 1:
        output = module(*pieces[0], **kwargs[0])
        return output if target == targets[0] else scatter(output, [target])[0]
    used = targets[: len(pieces)]
    return gather(parallel_apply(replicate(module, used), pieces, kwargs, used), target, dim)


class DataParallel(nn.Module):
    """`data_parallel` as a module, used instead of `module`; `state_dict` keys begin with `module.`.

    Does not communicate across processes. `BucketedDDP(DataParallel(module, devices))` does: several
    processes with several devices each.

    Args:
        module, output_device, dim: as for `data_parallel`, when `forward` is called.
        device_ids: its `devices`: ints for CUDA devices, names or `torch.device`s, as in `["cpu", "cpu"]`.
        devices: another name of `device_ids`.

    Raises:
        ConfigurationError: both names were used, no devices, or one that does not exist.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        devices: Sequence[Device] | None = None,
    ) -> None:
        super().__init__()
        if device_ids is not None and devices is not None:
            raise ConfigurationError(
                f"device_ids={device_ids} and devices={devices} mean the same. Pass one of them."
            )
        self.module = module
        self.devices = as_devices(device_ids if devices is None else devices)
        self.output_device = self.devices[0] if output_device is None else as_device(output_device)
        self.dim = dim

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on chunks of the inputs; see `data_parallel`."""
        return data_parallel(self.module, inputs, self.devices, self.output_device, self.dim, kwargs)


# ---------------------------------------------------------------------- copies, and their threads


class _Copies(torch.autograd.Function):
    """Copy of a tensor to each device; backward sums the copies' gradients on the tensor's device.

    One node per parameter, so that `BucketedDDP` gets each gradient early and can detect unused parameters.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, devices: list[torch.device]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a replica without a gradient adds nothing, not dense zeros
        ctx.device = tensor.device
        return tuple(tensor.to(device, copy=True) for device in devices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        total = None
        for grad in grads:
            if grad is not None:
                moved = grad.to(ctx.device)
                total = moved if total is None else total + moved  # out of place: differentiable itself
        return total, None


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
    targets = as_devices(devices)
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) or is_compiled(part):
            raise ConfigurationError(
                f"{name or 'the module'} is a {type(part).__name__}, and scripted and compiled modules"
                " cannot be replicated, because they are bound to their own parameters. Pass the module"
                " that they were made from."
            )
    copies = {id(parameter): _copies(parameter, targets) for parameter in module.parameters()}
    for buffer in module.buffers():
        if buffer.device in targets:
            own = targets.index(buffer.device)
            others = _copies(buffer, targets[:own] + targets[own + 1 :])
            copies[id(buffer)] = [*others[:own], buffer, *others[own:]]
        else:
            copies[id(buffer)] = _copies(buffer, targets)
    return [_replica(module, copies, index, {}) for index in range(len(targets))]


def _copies(tensor: Tensor, devices: list[torch.device]) -> list[Tensor]:
    return list(_Copies.apply(tensor, devices)) if devices else []  # type: ignore[no-untyped-call] # torch's


def _replica(
    module: nn.Module, copies: Mapping[int, Sequence[Tensor]], index: int, made: dict[int, nn.Module]
) -> nn.Module:
    if id(module) in made:
        return made[id(module)]
    made[id(module)] = replica = shallow_replica(module)
    for name, child in children_of(module).items():
        children_of(replica)[name] = None if child is None else _replica(child, copies, index, made)
    for name, parameter in parameters_of(module).items():
        if parameter is None:
            parameters_of(replica)[name] = None
        else:
            setattr(replica, name, copies[id(parameter)][index])
    for name, buffer in buffers_of(module).items():
        buffers_of(replica)[name] = None if buffer is None else copies[id(buffer)][index]
    return replica


def _caller_settings(
    devices: Sequence[torch.device | None],
) -> Callable[[torch.device | None], AbstractContextManager[None]]:
    """Return a context that applies this thread's settings of torch in a thread for a device."""
    used = {device for device in devices if device is not None}
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    cache = torch.is_autocast_cache_enabled()
    types = sorted({"cpu", "cuda", *(device.type for device in used)} - {"meta"})
    autocast = [(t, torch.get_autocast_dtype(t)) for t in types if torch.is_autocast_enabled(t)]
    streams = {d: torch.cuda.current_stream(d) for d in used if d.type == "cuda"}

    @contextmanager
    def applied(device: torch.device | None) -> Generator[None, None, None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            if device in streams:
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(streams[device]))
            yield

    return applied


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
        Exception: the first one in replica order, after all threads have ended: of the replica's type with
            the replica's index in the message, or `ReplicaError` where that type cannot be built from a
            message. The original is its `__cause__`.
    """
    kwargs = [{}] * len(replicas) if kwargs is None else kwargs
    if not len(replicas) == len(inputs) == len(kwargs) == len(replicas if devices is None else devices):
        raise ConfigurationError(
            f"expected inputs, kwargs and devices for each of {len(replicas)} replicas; got {len(inputs)}"
            f" inputs, {len(kwargs)} kwargs and {'no' if devices is None else len(devices)} devices"
        )
    args = [tuple(i) if isinstance(i, (list, tuple)) else (i,) for i in inputs]
    targets: list[torch.device | None]
    if devices is not None:
        targets = [as_device(device) for device in devices]
    else:
        tensors = [next(named_tensors(both, ""), None) for both in zip(args, kwargs, strict=True)]
        targets = [found and found[1].device for found in tensors]
    settings = _caller_settings(targets)
    outputs: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def run(index: int) -> None:
        try:
            with settings(targets[index]):
                outputs[index] = replicas[index](*args[index], **kwargs[index])
        except BaseException as error:  # noqa: BLE001 (any error is raised by the caller)
            errors[index] = error

    if len(replicas) == 1:
        run(0)
    else:
        with ExitStack() as started:  # ends once these have, also where one cannot be started
            for index in range(len(replicas)):
                thread = threading.Thread(target=run, args=(index,), name=f"replica {index}")
                thread.start()
                started.callback(thread.join)
    if not errors:
        return [outputs[index] for index in range(len(replicas))]
    index = min(errors)
    error = errors[index]
    outputs.clear()
    errors.clear()  # the traceback holds `run`, which holds `errors`: a circle would keep the replicas alive
    if not isinstance(error, Exception):
        raise error  # such as SystemExit, whose argument is no message
    raise _with_index(error, index, targets[index]) from error


def _with_index(error: Exception, index: int, device: torch.device | None) -> Exception:
    place = f"replica {index}" + (f" on {device}" if device is not None else "")
    kind = type(error)
    try:
        rebuilt = kind(f"{place}: {error}")
        if type(rebuilt) is kind and place in str(rebuilt):
            return rebuilt
    except Exception:  # noqa: BLE001, S110 (its constructor takes something else, and may do anything)
        pass
    return ReplicaError(f"{place} raised {kind.__name__}: {error}")


# ---------------------------------------------------------------------- batches over devices


def scatter(inputs: T, devices: Sequence[Device], dim: int = 0) -> list[T]:
    """Split every tensor in nested containers into chunks along `dim`, one per device.

    Containers are tuples, namedtuples, lists, dicts and dataclasses. All else is repeated, as the same
    object. A batch of 3 on 2 devices gives chunks of 2 and 1; a batch of 1 gives one chunk. Chunks are
    copies, and gradients flow through them to the input. One device: whole tensors, moved there.

    >>> [x.tolist() for x, _ in scatter((torch.tensor([1, 2, 3]), "text"), ["cpu", "cpu"])]
    [[1, 2], [3]]

    Returns:
        As many results as the tensors have chunks; without any tensor, as many as there are devices.

    Raises:
        ConfigurationError: a tensor has no dimension `dim`, or tensors have different numbers of chunks.
    """
    return _scatter(inputs, as_devices(devices), dim, "inputs")


class _Arguments(NamedTuple):
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]


def scatter_kwargs(
    inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None, devices: Sequence[Device], dim: int = 0
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Scatter positional and keyword arguments into equally many results.

    The side without tensors is repeated, or padded with `()` or `{}`. Without any argument: one call.

    Raises:
        ConfigurationError: as `scatter`, also between positional and keyword arguments.
    """
    if not inputs and not kwargs:
        return [()], [{}]
    pieces = _scatter(_Arguments(inputs, dict(kwargs or {})), as_devices(devices), dim, "")
    return [piece.inputs for piece in pieces], [piece.kwargs for piece in pieces]


def gather(outputs: Sequence[Any], device: Device, dim: int = 0) -> Any:
    """Concatenate the replicas' outputs along `dim` on `device`, in nested containers.

    Differentiable. Outputs may differ only in the tensors' size along `dim`. Tensors without dimensions
    become a vector, with a warning. Other objects must be equal. As device an int is a CUDA device.

    Raises:
        ConfigurationError: no outputs, or outputs that differ in structure or in something else than tensors.
    """
    if not outputs:
        raise ConfigurationError("gather got no outputs; expected one for each replica")
    return _gather(outputs, as_device(device), dim, "output")


def _open(obj: Any) -> tuple[dict[str, Any], Callable[[list[Any]], Any]] | None:
    """Return a container's items by their access text, and its rebuild function; None for a leaf."""
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):  # a namedtuple
        return {f".{name}": getattr(obj, name) for name in obj._fields}, type(obj)._make  # type: ignore[attr-defined]
    if isinstance(obj, (list, tuple)):
        return {f"[{i}]": item for i, item in enumerate(obj)}, type(obj)
    if isinstance(obj, MutableMapping):
        return {f"[{key!r}]": value for key, value in obj.items()}, lambda values: _refilled(obj, values)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        names = [field.name for field in dataclasses.fields(obj)]
        return {f".{name}": getattr(obj, name) for name in names}, lambda v: _reset(obj, names, v)
    return None


def _refilled(mapping: MutableMapping[Any, Any], values: list[Any]) -> Any:
    copied = copy.copy(mapping)  # of its own kind, such as a defaultdict
    for key, value in zip(mapping, values, strict=True):
        copied[key] = value
    return copied


def _reset(instance: Any, names: list[str], values: list[Any]) -> Any:
    copied = copy.copy(instance)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(copied, name, value)  # a frozen one, too
    return copied


def named_tensors(obj: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(obj, Tensor):
        yield path, obj
    elif (opened := _open(obj)) is not None:
        for name, item in opened[0].items():
            yield from named_tensors(item, path + name)


def _scatter(obj: T, devices: list[torch.device], dim: int, path: str) -> list[T]:
    num_chunks: dict[int, str] = {}
    for name, tensor in named_tensors(obj, path):
        where = f"{name.lstrip('.')} of shape {tuple(tensor.shape)}"
        if len(devices) > 1 and not -tensor.dim() <= dim < tensor.dim():
            raise ConfigurationError(
                f"{where} has no dimension {dim} along which to split it over {len(devices)} devices. Pass"
                " a number instead of a tensor, or expand it to the batch."
            )
        size = tensor.size(dim) if len(devices) > 1 else 0
        num_chunks.setdefault(max(1, -(-size // _chunk_size(size, len(devices)))), where)
    if len(num_chunks) > 1:
        found = "; ".join(f"{where}: {count}" for count, where in num_chunks.items())
        raise ConfigurationError(
            f"tensors fall into different numbers of chunks along dimension {dim} over {len(devices)} devices"
            f" ({found}); expected the same number, so that each replica gets its part of all of them"
        )
    used = next(iter(num_chunks), len(devices))
    return [_piece(obj, device, i, len(devices), dim) for i, device in enumerate(devices[:used])]


def _chunk_size(size: int, num_devices: int) -> int:
    return max(1, -(-size // num_devices))


def _piece(obj: Any, device: torch.device, index: int, num_devices: int, dim: int) -> Any:
    if isinstance(obj, Tensor):
        if num_devices == 1:
            return obj.to(device)
        step = _chunk_size(obj.size(dim), num_devices)
        chunk = obj.narrow(dim, index * step, min(step, obj.size(dim) - index * step))
        # a copy: an in-place change by one replica would spoil what the others saved for backward
        return chunk.to(device, copy=True)
    if (opened := _open(obj)) is None:
        return obj
    items, build = opened
    return build([_piece(item, device, index, num_devices, dim) for item in items.values()])


def _gather(outputs: Sequence[Any], device: torch.device, dim: int, path: str) -> Any:
    first = outputs[0]
    if all(isinstance(other, Tensor) for other in outputs):
        return _joined(outputs, device, dim, path)
    if any(type(other) is not type(first) for other in outputs):
        kinds = ", ".join(type(other).__name__ for other in outputs)
        raise ConfigurationError(f"{path} is of different types in the replicas: {kinds}")
    if (opened := _open(first)) is None:
        is_plain = isinstance(first, (str, bytes, int, float))
        if not all(other is first or (is_plain and other == first) for other in outputs):
            found = ", ".join(repr(other) for other in outputs)
            raise ConfigurationError(
                f"{path} is not a tensor and differs between the replicas: {found}. Return a tensor."
            )
        return first
    contents = [(_open(other) or ({}, None))[0] for other in outputs]
    if any(other.keys() != contents[0].keys() for other in contents):
        found = "; ".join(", ".join(other) or "nothing" for other in contents)
        raise ConfigurationError(f"{path} holds different things in the replicas: {found}")
    values = [_gather([other[n] for other in contents], device, dim, path + n) for n in contents[0]]
    return opened[1](values)


def _joined(outputs: Sequence[Tensor], device: torch.device, dim: int, path: str) -> Tensor:
    moved = [output.to(device) for output in outputs]
    if all(output.dim() == 0 for output in outputs):
        warnings.warn(
            f"{path} has no dimensions in any replica, so the result is a vector with one element per"
            " replica",
            stacklevel=3,
        )
        return torch.stack(moved)
    return torch.cat(moved, dim) if len(moved) > 1 else moved[0]


def as_devices(devices: Sequence[Device] | None) -> list[torch.device]:
    if devices is None:
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]
    if not devices:
        raise ConfigurationError("devices is empty; expected at least one, or None for all CUDA devices")
    return [as_device(device) for device in devices]


def as_device(device: Device) -> torch.device:
    """Return the device with its index, so that equal devices compare equal."""
    found = torch.device("cuda", max(device, 0)) if isinstance(device, int) else torch.device(device)
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        return found
    count = torch.cuda.device_count()
    if (isinstance(device, int) and device < 0) or (found.index or 0) >= count:
        raise ConfigurationError(f"device {device!r} does not exist: this machine has {count} CUDA devices")
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found
